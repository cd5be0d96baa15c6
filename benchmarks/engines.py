"""The vLLM engine beside the transformers engine, on this machine: tokens per second of the same work.

    python benchmarks/engines.py [--json] [--model demo] [--threads 2] [--batch 128] [--tokens 64]
                                 [--repeats 3]

Each engine runs in a process of its own, one after the other, with the same lock, prompts and threads;
answers are never ended early, so both make as many tokens. Every sample is taken on a freshly perturbed
member, as in a round, the perturbation not counted. Needs an environment with vLLM (docs/vllm.md).

Keys of the JSON: `tokens_per_second` by engine (median), `samples`, `ratio` of the medians, and what was run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

ENGINES = ("transformers", "vllm")


def measure(engine: str, model: str, threads: int, batch: int, tokens: int, repeats: int) -> list[float]:
    """Tokens per second of each repeat after the first."""
    from esnode import locking
    from esnode.engines import transformers_engine, vllm_engine
    from esnode.engines.interface import Sampling
    from esnode.template import template
    from protocol import plan as planning

    lock, data, folder = locking.resolve(
        planning.parse(template("short-answers", model)), trusted=["00" * 32]
    )
    prepared = locking.prepare(lock, folder.path, data)
    prompts = [list(prepared.ids_of("train", k % lock.train_prompts)) for k in range(batch)]
    load = vllm_engine.load if engine == "vllm" else transformers_engine.load
    loaded: Any = load(lock, folder.path, threads=threads)
    found = []
    for seed in range(repeats + 1):  # the first one warms up
        loaded.perturb(seed, lock.sigma_at(0), 1)
        began = time.perf_counter()
        answers = loaded.generate(prompts, Sampling(tokens, ()), [0] * batch)
        made = sum(map(len, answers))
        found.append(made / (time.perf_counter() - began))
        assert made == batch * tokens, "an answer ended early"
    return found[1:]


def in_process(engine: str, options: list[str]) -> list[float]:
    """`measure` in a process of its own: vLLM changes some of transformers' classes."""
    command = [sys.executable, __file__, "--only", engine, *options]
    limits = {f"{name}_NUM_THREADS": options[options.index("--threads") + 1] for name in ("OMP", "NUMBA")}
    environment = os.environ | limits
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise click.ClickException(
            f"{engine}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    samples: list[float] = json.loads(done.stdout.splitlines()[-1])
    return samples


@click.command(help=__doc__.split("\n")[0])
@click.option("--json", "as_json", is_flag=True)
@click.option("--model", default="demo", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--batch", default=128, show_default=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--only", type=click.Choice(ENGINES), hidden=True)
def main(
    as_json: bool, model: str, threads: int, batch: int, tokens: int, repeats: int, only: str | None
) -> None:
    """See the module's docstring."""
    if only:
        print(json.dumps(measure(only, model, threads, batch, tokens, repeats)), flush=True)
        os._exit(0)  # vLLM's threads need not be waited for
    options = [
        "--model", model, "--threads", str(threads), "--batch", str(batch),
        "--tokens", str(tokens), "--repeats", str(repeats),
    ]  # fmt: skip
    samples = {engine: in_process(engine, options) for engine in ENGINES}
    rates = {engine: round(median(found), 1) for engine, found in samples.items()}
    ratio = round(rates["vllm"] / rates["transformers"], 2)
    what = {"model": model, "threads": threads, "batch": batch, "tokens": tokens, "cores": os.cpu_count()}
    if as_json:
        print(json.dumps({"tokens_per_second": rates, "samples": samples, "ratio": ratio} | what))
        return
    print(f"{model}, {batch} answers of {tokens} tokens, {threads} threads: tokens per second")
    for engine, found in samples.items():
        print(f"  {engine:13} {rates[engine]:8.1f}   ({min(found):.0f} to {max(found):.0f})")
    print(f"  vllm / transformers {ratio:.2f}")


if __name__ == "__main__":
    main()
