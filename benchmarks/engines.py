"""The vLLM engine beside the transformers engine, and both beside what they are made of, on this machine.

    python benchmarks/engines.py [--json] [--model demo] [--threads 2] [--batch 128] [--tokens 64]
                                 [--members 2] [--repeats 3] [--only WHAT]...

What is measured, each in a process of its own, one after the other, with the same lock, prompts and threads;
answers are never ended early, so all make as many tokens:

    generate      plain transformers, `model.generate` with all prompts as one batch
    transformers  our engine on transformers
    vllm          our engine on vLLM
    round         our engine on vLLM through a whole round: for each member the look for damage, the
                  perturbation and the answers, then the update (scores are counted beside the next member)
    llm           plain `LLM.generate` as it comes, of all members' prompts at once: no member boundaries

A sample of the first three is one member's answers, the perturbation not counted. Needs an environment with
vLLM (docs/vllm.md). Beside tokens per second there are tokens per second of processor time, which other work
on the machine disturbs less (waiting threads spin, so take --threads 1 then).

Keys of the JSON: `tokens_per_second` and `tokens_per_processor_second` by what was measured (best of the
repeats), `samples`, `ratios`, and what was run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

KINDS = ("generate", "transformers", "vllm", "round", "llm")
RATIOS = (
    ("vllm", "transformers", "our engine on vLLM to ours on transformers"),
    ("vllm", "generate", "our engine on vLLM to plain generate"),
    ("transformers", "generate", "our engine on transformers to plain generate"),
    ("round", "llm", "a whole round to plain LLM.generate"),
)
Work = Callable[[], int]  # what is timed; the tokens it makes


class Bench:
    """The lock, the prompts and how much is asked. Each of KINDS yields what to time, again and again."""

    def __init__(self, model: str, threads: int, batch: int, tokens: int, members: int) -> None:
        from esnode import locking
        from esnode.template import template
        from protocol import plan as planning

        lock, data, folder = locking.resolve(
            planning.parse(template("short-answers", model)), trusted=["00" * 32]
        )
        self.lock = replace(lock, members=members)
        self.folder, self.threads, self.tokens, self.members = folder.path, threads, tokens, members
        prepared = locking.prepare(lock, folder.path, data)
        self.prompts = [list(prepared.ids_of("train", k % lock.train_prompts)) for k in range(batch)]

    def generate(self) -> Iterator[Work]:
        """Plain transformers: padded on the left, one batch."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self.threads)
        dtype = getattr(torch, self.lock.live_dtype)
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()
        width = max(map(len, self.prompts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in self.prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in self.prompts])
        limits = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens, "do_sample": False}

        def work() -> int:
            with torch.inference_mode():
                made = model.generate(ids, attention_mask=mask, pad_token_id=0, **limits)
            return (made.shape[1] - width) * made.shape[0]

        while True:
            yield work

    def transformers(self) -> Iterator[Work]:
        """Our engine on transformers, a fresh member each time."""
        from esnode.engines import transformers_engine

        engine = transformers_engine.load(self.lock, self.folder, threads=self.threads)
        return self._perturbed(engine)

    def vllm(self) -> Iterator[Work]:
        """Our engine on vLLM, likewise."""
        return self._perturbed(self._ours())

    def round(self) -> Iterator[Work]:
        """Our engine on vLLM through whole rounds."""
        from esnode import bench

        engine, entry = self._ours(), bench.commit(self.lock)

        def work() -> int:
            made = 0
            for seed in range(self.members):
                assert not engine.damaged()
                engine.perturb(seed, self.lock.sigma_at(0), 1)
                made += self._answers(engine)
            engine.apply([entry])
            return made

        while True:
            yield work

    def llm(self) -> Iterator[Work]:
        """vLLM as it comes."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
        import torch
        from vllm import LLM, SamplingParams

        torch.set_num_threads(self.threads)
        sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM looks into every module, which this one minds
        model = LLM(
            str(self.folder), dtype=self.lock.live_dtype, enforce_eager=not torch.cuda.is_available(),
            max_model_len=2048, skip_tokenizer_init=True, enable_prefix_caching=False,
        )  # fmt: skip
        asked: Any = [{"prompt_token_ids": row} for row in self.prompts * self.members]
        limits = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True, detokenize=False)

        def work() -> int:
            outputs = model.generate(asked, limits, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        while True:
            yield work

    def _ours(self) -> Any:
        from esnode.engines import vllm_engine

        return vllm_engine.load(self.lock, self.folder, threads=self.threads)

    def _perturbed(self, engine: Any) -> Iterator[Work]:
        for seed in count():
            engine.perturb(seed, self.lock.sigma_at(0), 1)
            yield lambda: self._answers(engine)

    def _answers(self, engine: Any) -> int:
        from esnode.engines.interface import Sampling

        made = engine.generate(self.prompts, Sampling(self.tokens, ()), [0] * len(self.prompts))
        return sum(map(len, made))


def measure(kind: str, bench: Bench, repeats: int) -> list[tuple[float, float]]:
    """Tokens per second, and per second of processor time, of each repeat; a first one warms up."""
    found = []
    wanted = len(bench.prompts) * bench.tokens * (bench.members if kind in ("round", "llm") else 1)
    for work in islice(getattr(bench, kind)(), repeats + 1):
        began, used = time.perf_counter(), time.process_time()
        assert work() == wanted, "an answer ended early"
        found.append((wanted / (time.perf_counter() - began), wanted / (time.process_time() - used)))
    return found[1:]


def in_process(kind: str, options: Sequence[str], threads: int) -> list[tuple[float, float]]:
    """`measure` in a process of its own: vLLM changes some of transformers' classes."""
    command = [sys.executable, __file__, "--measure", kind, *options]
    limits = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "NUMBA")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | limits)
    if done.returncode:
        raise click.ClickException(f"{kind}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    samples: list[tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    return samples


@click.command(help=__doc__.split("\n")[0])
@click.option("--json", "as_json", is_flag=True)
@click.option("--model", default="demo", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--batch", default=128, show_default=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--members", default=2, show_default=True, help="Of a round; an even number.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--only", type=click.Choice(KINDS), multiple=True)
@click.option("--measure", "alone", type=click.Choice(KINDS), hidden=True)
def main(as_json: bool, repeats: int, only: tuple[str, ...], alone: str | None, **what: Any) -> None:
    """See the module's docstring."""
    if alone:
        print(json.dumps(measure(alone, Bench(**what), repeats)), flush=True)
        os._exit(0)  # vLLM's threads need not be waited for
    options = [word for name, value in what.items() for word in (f"--{name}", str(value))]
    options += ["--repeats", str(repeats)]
    samples = {kind: in_process(kind, options, what["threads"]) for kind in only or KINDS}
    best = {
        kind: [round(max(rates), 1) for rates in zip(*found, strict=True)] for kind, found in samples.items()
    }
    ratios = {
        words: [round(a / b, 2) for a, b in zip(best[one], best[other], strict=True)]
        for one, other, words in RATIOS
        if one in best and other in best
    }
    if as_json:
        speeds = {"tokens_per_second": 0, "tokens_per_processor_second": 1}
        found = {key: {kind: rates[k] for kind, rates in best.items()} for key, k in speeds.items()}
        what |= {"cores": os.cpu_count(), "samples": samples, "ratios": ratios}
        print(json.dumps(found | what))
        return
    print(f"{what['model']}, {what['batch']} answers of {what['tokens']} tokens, {what['threads']} threads:")
    print(f"  {'':13} tokens/s   (slowest)   tokens/s of processor time")
    for kind, (rate, processor) in best.items():
        slowest = min(sample[0] for sample in samples[kind])
        print(f"  {kind:13} {rate:8.1f}   ({slowest:7.1f})   {processor:8.1f}")
    for words, (wall, processor) in ratios.items():
        print(f"  {words}: {wall:.2f} (processor time {processor:.2f})")


if __name__ == "__main__":
    main()
