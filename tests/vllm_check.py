"""One architecture on vLLM beside transformers, in a process of its own: `python -m tests.vllm_check llama`.

Prints one line of JSON: whether tokens and likelihoods of both engines agree (in float32), before and after a
perturbation; whether a perturbed model written to disk and loaded afresh by vLLM answers (in bf16) what the
weights written in place answered; whether D is equal after rounds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from esnode import manifest
from esnode.engines import transformers_engine, vllm_engine
from esnode.engines.interface import Sampling
from esnode.engines.shortage import patiently
from esnode.engines.vllm_engine import VllmEngine
from tests import tiny

# Heads of 32 elements are the smallest that vLLM's attention takes on a CPU.
WIDE = tiny.SHAPE | {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
KINDS: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"tie_word_embeddings": True},
    "qwen2": WIDE,
    "qwen3": WIDE,
    "mistral": WIDE | {"sliding_window": None},
    "gemma": WIDE | {"num_key_value_heads": 1},
    "gemma2": WIDE | {"sliding_window": 64},
    "phi3": WIDE,
    "olmo2": WIDE,
}
SEED, SIGMA = 77, 2.0**-6
PROMPTS = [[5 + k, 6, 7, 8, 9 + 3 * k, 11, 13][: 3 + k % 4] for k in range(6)]
TARGETS = [prompt[::-1] for prompt in PROMPTS]
SAMPLING = Sampling(10, (tiny.END,))


def answers(engine: Any) -> tuple[Any, list[float]]:
    """Greedy tokens and log-likelihoods."""
    tokens = engine.generate(PROMPTS, SAMPLING, [0] * len(PROMPTS))
    return tokens, engine.loglik(PROMPTS, TARGETS)


def beside_transformers(folder: Path) -> dict[str, Any]:
    """Both engines in float32, and D of both after the rounds of a ledger."""
    lock = tiny.lock(folder, live_dtype="float32")
    theirs = transformers_engine.load(lock, folder)  # first: vLLM changes some of transformers' classes
    ours = vllm_engine.load(lock, folder)
    found: dict[str, Any] = {"tokens": [], "distance": 0.0}
    for _ in range(2):
        (tokens, sums), (expected, sums_there) = answers(ours), answers(theirs)
        found["tokens"].append(tokens == expected)
        found["distance"] = max(
            found["distance"], *(abs(a - b) for a, b in zip(sums, sums_there, strict=True))
        )
        for engine in (ours, theirs):
            engine.perturb(SEED, SIGMA, -1)
    chain, _ = tiny.chain(lock, folder, 3)
    found["digests"] = ours.apply(chain.entries) == theirs.apply(chain.entries)
    return found


def in_place(folder: Path, perturbed: Path) -> tuple[Any, list[float]]:
    """What bf16 weights written in place answer; they are also written to disk as a model of their own."""
    engine = vllm_engine.load(tiny.lock(folder), folder)
    engine.perturb(SEED, SIGMA, 1)
    _write(engine, folder, perturbed)
    return answers(engine)


def bad_input(folder: Path) -> dict[str, Any]:
    """What is left of a unit when a batch does not fit into memory, and when weights are no numbers."""
    engine = vllm_engine.load(tiny.lock(folder, live_dtype="float32"), folder)
    model = vllm_engine._model_of(engine._engine)
    whole, plain = answers(engine), engine.fingerprint

    def allocate(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if options["input_ids"].numel() > 15:
            raise torch.OutOfMemoryError("out of memory")

    hook = model.register_forward_pre_hook(allocate, with_kwargs=True)
    tokens = patiently(lambda: engine.generate(PROMPTS, SAMPLING, [0] * len(PROMPTS)))
    hook.remove()
    again = answers(engine)
    found: dict[str, Any] = {
        "rows": engine.room.rows,
        "tokens": tokens == again[0] == whole[0],
        "distance": max(abs(a - b) for a, b in zip(again[1], whole[1], strict=True)),
        "fingerprint": engine.fingerprint != plain,
        "broken": [],
    }
    engine.live("model.embed_tokens.weight")[PROMPTS[3][4]] = torch.nan
    for sampling in (SAMPLING, Sampling(1, (), temperature=1.0)):
        tokens = engine.generate(PROMPTS, sampling, [7] * len(PROMPTS))
        found["broken"].append((engine.broken, tokens[3]))
    engine.loglik(PROMPTS, TARGETS)
    found["broken"].append((engine.broken, []))
    engine.restore()
    found["restored"] = answers(engine) == again
    return found


def _write(engine: VllmEngine, folder: Path, to: Path) -> None:
    to.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    names = [spec.name for spec in manifest.read(folder)]
    save_file({name: engine.live(name).clone() for name in names}, to / "model.safetensors", {"format": "pt"})


def main(kind: str, what: str, place: str) -> None:
    """`what`: compare | perturb | fresh | bad; `place`: a folder shared by them."""
    torch.set_num_threads(1)
    folder, perturbed = Path(place) / kind, Path(place) / f"{kind}-perturbed"
    if not folder.exists():
        tiny.write_model(folder, AutoConfig.for_model(kind, **KINDS[kind]))
    if what == "compare":
        found: Any = beside_transformers(folder)
    elif what == "perturb":
        found = in_place(folder, perturbed)
    elif what == "bad":
        found = bad_input(folder)
    else:
        found = answers(vllm_engine.load(tiny.lock(perturbed), perturbed))
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's threads need not be waited for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp())
