"""A whole round on a GPU: the transformers engine on a model of random weights, and where the time goes.

The shapes are those of Qwen2.5; what it writes is noise, so no answer ends early. `MEMBERS` members answer
`PROMPTS` prompts with `TOKENS` new tokens each, then one commit is applied. Called by `gpu.py`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
             "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
             "tie_word_embeddings": True},
}  # fmt: skip
MEMBERS, PROMPTS, LENGTH, TOKENS = 4, 128, 64, 64


def measure(device: str, shape: str) -> dict[str, Any]:
    """Seconds of a round by what was done, with the share that is not generation."""
    from esnode.engines import transformers_engine
    from esnode.engines.interface import Sampling
    from esnode.kernels import pick
    from tests import bare

    with tempfile.TemporaryDirectory() as place:
        folder = _checkpoint(Path(place), shape)
        lock = bare.lock(folder, pick("cpu"))
        engine = transformers_engine.load(lock, folder, device=device)
        (commit,) = bare.commits(lock, 1)
        prompts = [[(7 * k + 3 * i) % 500 + 3 for i in range(LENGTH)] for k in range(PROMPTS)]
        seconds = dict.fromkeys(("perturb", "damage", "generate", "apply"), 0.0)

        def timed(what: str, call: Callable[[], object]) -> Any:
            began = time.perf_counter()
            found = call()
            if device != "cpu":
                torch.cuda.synchronize()
            seconds[what] += time.perf_counter() - began
            return found

        count, few = (PROMPTS, TOKENS) if device != "cpu" else (4, 4)
        sampling, streams = Sampling(few, ()), [0] * count
        engine.generate(prompts[:count], sampling, streams)  # warm
        engine.perturb(1, lock.sigma_at(0), 1)
        made = 0
        for member in range(MEMBERS):
            timed("damage", engine.damaged)
            timed("perturb", lambda seed=member: engine.perturb(seed, lock.sigma_at(0), 1))
            made += sum(
                map(len, timed("generate", lambda: engine.generate(prompts[:count], sampling, streams)))
            )
        timed("apply", lambda: engine.apply([commit]))
    total = sum(seconds.values())
    return {
        "engine": "transformers", "shape": shape, "weights": sum(_sizes(lock)), "members": MEMBERS,
        "prompts": count, "new_tokens": few, "seconds": seconds,
        "tokens_per_second": made / seconds["generate"], "other_share": 1 - seconds["generate"] / total,
    }  # fmt: skip


def words(found: dict[str, Any]) -> str:
    """The same in a line."""
    parts = ", ".join(f"{what} {value:.3f} s" for what, value in found["seconds"].items())
    return (
        f"a round of {found['members']} members of a {found['shape']} shape on {found['engine']}, "
        f"{found['prompts']} prompts x {found['new_tokens']} tokens: {parts}; "
        f"{found['tokens_per_second']:.0f} tokens/s, {found['other_share']:.1%} is not generation"
    )


def _sizes(lock: Any) -> list[int]:
    return [int(torch.Size(spec.shape).numel()) for spec in lock.manifest]


def _checkpoint(folder: Path, shape: str) -> Path:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(max_position_embeddings=1024, **SHAPES[shape])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder
