"""A whole round on a GPU: an engine on a model of random weights, and where the time goes.

The shapes are those of Qwen2.5; what it writes is noise, so no answer ends early. `MEMBERS` members, fewer
where the time is short, answer `PROMPTS` prompts with `TOKENS` new tokens each, then one commit is applied. A
part of `gpu.py`, which starts it as `python -m benchmarks.gpu_round DEVICE SHAPE ENGINE SECONDS`.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_limits
from benchmarks.gpu_part import reason, say

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
             "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
             "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
           "tie_word_embeddings": False},
}  # fmt: skip
MEASURED = ("0.5b", "1.5b", "7b")  # unless others are asked for
ENGINES = ("transformers", "vllm")
MEMBERS, PROMPTS, LENGTH, TOKENS = 4, 128, 64, 64
PARTS = ("perturb", "damage", "generate", "apply")
RESIDENT, FILE, HOST = (
    6,
    2,
    4,
)  # bytes a weight takes of the GPU, the disk, and the host that writes it


def measure(
    device: str, shape: str, engine: str = "transformers", until: float = float("inf")
) -> dict[str, Any]:
    """Seconds of a round by what was done, with the share that is not generation.

    `until`: the moment (of `time.monotonic`) after which no further member begins.
    """
    from esnode.kernels import pick
    from tests import bare

    with tempfile.TemporaryDirectory() as place:
        folder = _checkpoint(Path(place), shape, device)
        lock = bare.lock(folder, pick(device), device=device)
        if device != "cpu":
            gc.collect()
            torch.cuda.empty_cache()
        loaded = _load(engine, lock, folder, device)
        try:
            found = _round(loaded, lock, bare.commits(lock, 1), device, until)
        finally:
            loaded.close()
    return {"engine": engine, "shape": shape, "weights": sum(_sizes(lock)), **found}


def _round(engine: Any, lock: Any, commits: list[Any], device: str, until: float) -> dict[str, Any]:
    from esnode.engines.interface import Sampling

    count, few = (PROMPTS, TOKENS) if device != "cpu" else (4, 4)
    prompts = [[(7 * k + 3 * i) % 500 + 3 for i in range(LENGTH)] for k in range(count)]
    sampling, streams = Sampling(few, ()), [0] * count
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(what: str, call: Callable[[], object]) -> Any:
        began = time.perf_counter()
        found = call()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds[what] += time.perf_counter() - began
        return found

    engine.generate(prompts, sampling, streams)  # warm
    engine.perturb(1, lock.sigma_at(0), 1)
    made = members = 0
    while members < MEMBERS and (not members or time.monotonic() < until):
        timed("damage", engine.damaged)
        timed("perturb", lambda seed=members: engine.perturb(seed, lock.sigma_at(0), 1))
        made += sum(map(len, timed("generate", lambda: engine.generate(prompts, sampling, streams))))
        members += 1
    timed("apply", lambda: engine.apply(commits))
    return {
        "members": members, "prompts": count, "new_tokens": few, "seconds": seconds,
        "tokens_per_second": made / seconds["generate"],
        "other_share": 1 - seconds["generate"] / sum(seconds.values()),
    }  # fmt: skip


def _load(engine: str, lock: Any, folder: Path, device: str) -> Any:
    if engine == "vllm":
        from esnode.engines import vllm_engine

        return vllm_engine.load(lock, folder, device=device)
    from esnode.engines import transformers_engine

    return transformers_engine.load(lock, folder, device=device)


def obstacle(device: str, shape: str, engine: str) -> str | None:
    """Why this round is left out, in a line; None when it can be tried."""
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    count = weights(shape)
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    needs = [("GPU memory", RESIDENT, gpu_limits.SHARE * gpu_limits.free(torch.device(device)))]
    needs += [("disk", FILE, 0.9 * disk), ("host memory", HOST, gpu_limits.free(torch.device("cpu")))]
    for what, each, free in needs:
        if each * count > free:
            return f"{each * count / 1e9:.1f} GB of {what} needed, {free / 1e9:.1f} GB can be used"
    return None


def weights(shape: str) -> int:
    """How many weights a model of this shape has."""
    s = SHAPES[shape]
    hidden, inner = s["hidden_size"], s["intermediate_size"]
    narrow = hidden * s["num_key_value_heads"] // s["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * narrow + 3 * hidden * inner + 3 * hidden + 2 * narrow
    matrices = 1 if s["tie_word_embeddings"] else 2
    return int(matrices * s["vocab_size"] * hidden + s["num_hidden_layers"] * layer + hidden)


def words(found: dict[str, Any]) -> str:
    """The same in a line."""
    name = f"a round of the {found['shape']} shape on {found['engine']}"
    if "seconds" not in found:
        return f"{name}: {found['failed']}"
    parts = ", ".join(f"{what} {value:.3f} s" for what, value in found["seconds"].items())
    return (
        f"{name}, {found['members']} members, {found['prompts']} prompts x {found['new_tokens']} tokens: "
        f"{parts}; {found['tokens_per_second']:.0f} tokens/s, {found['other_share']:.1%} is not generation"
    )


def _sizes(lock: Any) -> list[int]:
    return [int(torch.Size(spec.shape).numel()) for spec in lock.manifest]


def _checkpoint(folder: Path, shape: str, device: str) -> Path:
    """Random weights, made where they are made fastest."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(max_position_embeddings=1024, **SHAPES[shape])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def main(device: str, shape: str, engine: str, seconds: str) -> None:
    """Say what a round takes, or why there is none."""
    until = time.monotonic() + float(seconds) / 2
    say(engine=engine, shape=shape)
    why = obstacle(device, shape, engine)
    if why is not None:
        return say(failed=f"left out: {why}")
    try:
        say(**measure(device, shape, engine, until))
    except Exception as error:
        say(failed=reason(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
