"""One architecture on vLLM beside transformers, in a process of its own: `python -m tests.vllm_check llama`.

Prints one line of JSON: whether tokens and likelihoods of both engines agree (in float32), before and after a
perturbation; whether a perturbed model written to disk and loaded afresh by vLLM answers (in bf16) what the
weights written in place answered; whether D is equal after rounds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
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
from esnode.engines.interface import EngineEnded, Sampling
from esnode.engines.shortage import patiently
from esnode.engines.vllm_engine import VllmEngine
from esnode.engines.wish import Wish
from protocol.errors import UserError
from protocol.pieces import pieces_of
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
    "llama-one": WIDE | {"kind": "llama", "num_key_value_heads": 1, "tie_word_embeddings": False},
    "eight": WIDE | {"kind": "llama", "num_attention_heads": 8, "num_key_value_heads": 8},
    "mixtral": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
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


def ranked(folder: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """Everything a replica is asked for, of so many ranks in float32: equal whatever their number."""
    lock = tiny.lock(folder, live_dtype="float32")
    engine = vllm_engine.load(lock, folder, threads=1, wish=Wish(tp=ranks))
    found: dict[str, Any] = {"answers": [answers(engine)]}
    engine.perturb(SEED, SIGMA, -1)
    found["answers"].append(answers(engine))
    engine.restore()
    found["restored"] = answers(engine) == found["answers"][0]
    chain, _ = tiny.chain(lock, folder, rounds)
    found["digests"] = engine.apply(chain.entries)
    found["stated"] = [chain.digest_at(state) for state in range(1, rounds)]
    found["moved"] = answers(engine)
    pieces = pieces_of(lock)
    held = engine.piece_digests(pieces)
    found["pieces"] = [f"{digest:016x}" for digest in held]
    names = sorted(spec.name for spec in lock.manifest)
    shapes = {spec.name: spec.shape for spec in lock.manifest}
    parts = [
        (array, first, min(first + 5000, 4 * math.prod(shapes[name])))
        for array, name in enumerate(names)
        for first in range(0, 4 * math.prod(shapes[name]), 5000)
    ]
    snapshot = [(array, low, memoryview(bytes(engine.chunk(array, low, high)))) for array, low, high in parts]
    found["snapshot"] = hashlib.blake2b(b"".join(bytes(data) for _, _, data in snapshot)).hexdigest()
    read = engine.read(names[1])
    found["read"] = hashlib.blake2b(read.tobytes()).hexdigest()
    found["reset"] = engine.reset() == lock.digest
    found["refilled"] = engine.refill(snapshot) == found["digests"][-1] and answers(engine) == found["moved"]
    wanted = next(k for k, piece in enumerate(pieces) if piece.tensor == names[1])
    values = torch.from_numpy(read.reshape(-1))[: pieces[wanted].count].clone()
    engine.overwrite(pieces[wanted], values + 1)
    spoilt = engine.digest()
    engine.overwrite(pieces[wanted], values)
    found["mended"] = spoilt != found["digests"][-1] == engine.digest() and not engine.damaged()
    if ranks > 1:
        found["ended"] = _ended(engine)
    return found


def _ended(engine: VllmEngine) -> str:
    """What the engine says once one of its processes was killed in the middle of a unit."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            core = engine._engine.engine_core.engine_core  # type: ignore[attr-defined]
            os.kill(core.model_executor.workers[1].proc.pid, signal.SIGKILL)
        return False

    try:
        engine.generate(PROMPTS, Sampling(200, ()), [0] * len(PROMPTS), stop)
    except EngineEnded as error:
        return str(error)
    return ""


def refused(folder: Path, ranks: int) -> str:
    """The sentence an engine is refused with, and that nothing was started for it."""
    try:
        vllm_engine.load(tiny.lock(folder), folder, wish=Wish(tp=ranks))
    except UserError as error:
        return f"{'vllm' in sys.modules} {error}"
    return ""


def main(kind: str, what: str, place: str) -> None:
    """`what`: compare | perturb | fresh | bad | tpN:ROUNDS | refusedN; `place`: a folder shared by them."""
    torch.set_num_threads(1)
    folder, perturbed = Path(place) / kind, Path(place) / f"{kind}-perturbed"
    if not folder.exists():
        fields = dict(KINDS[kind])
        tiny.write_model(folder, AutoConfig.for_model(fields.pop("kind", kind), **fields))
    if what == "compare":
        found: Any = beside_transformers(folder)
    elif what == "perturb":
        found = in_place(folder, perturbed)
    elif what.startswith("tp"):  # tp2:50, ranks and rounds
        ranks, rounds = what[2:].split(":")
        found = ranked(folder, int(ranks), int(rounds))
    elif what.startswith("refused"):
        found = refused(folder, int(what[7:]))
    elif what == "bad":
        found = bad_input(folder)
    else:
        found = answers(vllm_engine.load(tiny.lock(perturbed), perturbed))
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's threads need not be waited for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp())
