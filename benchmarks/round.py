"""Where the time of a real round goes, and the engine beside plain transformers, on the demo model.

    python benchmarks/round.py [--json] [--task short-answers] [--model demo] [--threads 1] [--members 4]

Some members of round 0 are measured as a node does it (perturb, generate or forward, score, restore), then a
commit of the plan's whole population is applied, and the shares of a round of that population are worked out.
The same prompts, on the unperturbed weights, then go through plain transformers: `model.generate` without
repetition penalty for tasks that generate, one padded forward pass with all logits for the others.

Keys of the JSON: `round` with the seconds of one round of the whole population on this node (`check`,
`perturb`, `engine`, `score` as far as the engine waits for it, `update`, `total`), `scoring` in all, and
`other_share`, what is not `engine`; `tokens_per_second` with `ours`
and `plain` and their `ratio`; besides `task`, `model`, `members`, `prompts`, `threads`, `kernel`,
`processor`, `torch`, `transformers`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

from esnode import bench
from esnode.doctor import hardware
from esnode.engines import transformers_engine
from esnode.engines.interface import Sampling
from esnode.engines.transformers_engine import TransformersEngine
from esnode.prompts import Prepared
from esnode.template import template
from protocol import plan as planning
from protocol.lock import Lock
from protocol.seeds import prompts_of_round


def beside_plain(
    engine: TransformersEngine, lock: Lock, prepared: Prepared, repeats: int
) -> dict[str, float]:
    """Tokens per second of both sides, median of alternating runs over the prompts of round 0."""
    indices = prompts_of_round(lock.run_id, 0, lock.per_round, lock.train_prompts)
    prompts = [list(prepared.ids_of("train", index)) for index in indices]
    if prepared.task.mode == "generate":
        ours, plain = generating(engine, lock, prompts)
    else:
        targets = [list(prepared.target_ids("train", index)) for index in indices]
        ours, plain = forwarding(engine, prompts, targets)
    ours(), plain()  # first calls build caches
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, work in zip(taken, (ours, plain), strict=True):
            engine.restore()  # drops the packed weights: plain transformers has none, and ours must make them
            began = time.perf_counter()
            tokens = work()
            side.append(tokens / (time.perf_counter() - began))
    found = {"ours": median(taken[0]), "plain": median(taken[1])}
    return {name: round(value, 1) for name, value in found.items()} | {
        "ratio": round(found["ours"] / found["plain"], 2)
    }


def generating(
    engine: TransformersEngine, lock: Lock, prompts: Sequence[Sequence[int]]
) -> tuple[Callable[[], int], Callable[[], int]]:
    """Both sides make the same number of tokens: stop ids are ignored."""
    count = lock.max_new_tokens
    sampling = Sampling(count, ())
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def ours() -> int:
        return sum(map(len, engine.generate(prompts, sampling, [])))

    def plain() -> int:
        out = engine.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, repetition_penalty=1.0,
            max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
        )  # fmt: skip
        return int((out.shape[1] - width) * len(prompts))

    return ours, plain


def forwarding(
    engine: TransformersEngine, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> tuple[Callable[[], int], Callable[[], int]]:
    """Tokens are those of prompts and targets, padding not counted."""
    rows = [[*prompt, *target] for prompt, target in zip(prompts, targets, strict=True)]
    width, tokens = max(map(len, rows)), sum(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])

    def ours() -> int:
        engine.loglik(prompts, targets)
        return tokens

    @torch.inference_mode()
    def plain() -> int:
        logits = engine.model(input_ids=ids, attention_mask=mask).logits[:, :-1].float().log_softmax(-1)
        logits.gather(-1, ids[:, 1:, None])
        return tokens

    return ours, plain


def measure(task: str, model: str, threads: int, members: int, repeats: int) -> dict[str, Any]:
    found = bench.measure(
        planning.parse(template(task, model)), transformers_engine.load, members, threads=threads
    )
    engine, lock = found.engine, found.lock
    assert isinstance(engine, TransformersEngine)
    plain = beside_plain(engine, lock, found.prepared, repeats)
    return {
        "task": task,
        "model": lock.model,
        "members": lock.members,
        "prompts": lock.per_round,
        "threads": threads,
        "round": found.shares,
        "tokens_per_second": plain,
        "kernel": engine.backend,
        "processor": hardware()["processor"],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def words(found: dict[str, Any]) -> str:
    parts = found["round"]
    lines = [
        f"{found['task']} on {found['model']}: a round of {found['members']} members, {found['prompts']} "
        f"prompts, "
        f"{found['threads']} thread(s): {parts['total']:.1f} s"
    ]
    lines += [
        f"  {name:8} {parts[name]:8.2f} s  {100 * parts[name] / parts['total']:5.1f}%"
        for name in ("engine", "perturb", "score", "update")
    ]
    speed = found["tokens_per_second"]
    lines.append(
        f"tokens/s: {speed['ours']:.0f}, plain transformers {speed['plain']:.0f} ({speed['ratio']:.2f} times)"
    )
    return "\n".join(lines)


@click.command(help=__doc__.split("\n", 1)[0])
@click.option("--json", "as_json", is_flag=True, help="one JSON object instead of text")
@click.option("--task", default="short-answers", show_default=True)
@click.option("--model", default="demo", show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option(
    "--members", default=4, show_default=True, help="members measured; shares are of the whole round"
)
@click.option("--repeats", default=3, show_default=True, help="of the comparison with plain transformers")
def main(as_json: bool, task: str, model: str, threads: int, members: int, repeats: int) -> None:
    found = measure(task, model, threads, members, repeats)
    print(json.dumps(found, indent=2) if as_json else words(found))


if __name__ == "__main__":
    main()
