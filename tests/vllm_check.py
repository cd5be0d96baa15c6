"""One architecture on vLLM beside transformers: `python -m tests.vllm_check llama compare`.

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file, save_file
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
    "phi": WIDE | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "olmo": WIDE,
    "olmo2": WIDE,
    "llama-one": WIDE | {"kind": "llama", "num_key_value_heads": 1, "tie_word_embeddings": False},
    "eight": WIDE | {"kind": "llama", "num_attention_heads": 8, "num_key_value_heads": 8},
    "mixtral": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
SEED, SIGMA = 77, 2.0**-6
PROMPTS = [[5 + k, 6, 7, 8, 9 + 3 * k, 11, 13][: 3 + k % 4] for k in range(6)]
TARGETS = [prompt[::-1] for prompt in PROMPTS]
CONTEXT = tiny.SHAPE["max_position_embeddings"]
EXTREMES = [[5], [5 + 7 * k % 200 for k in range(CONTEXT - 10)]]  # with their targets: 2 tokens, and all
EXTREME_TARGETS = [[6], [9 * k for k in range(10)]]
SAMPLING = Sampling(10, (tiny.END,))
LOADERS: dict[str, Callable[..., Any]] = {"transformers": transformers_engine.load, "vllm": vllm_engine.load}


def answers(engine: Any) -> tuple[Any, list[float]]:
    """Greedy tokens and log-likelihoods, those also of the shortest row and of one that fills the context."""
    tokens = engine.generate(PROMPTS, SAMPLING, [0] * len(PROMPTS))
    return tokens, engine.loglik([*PROMPTS, *EXTREMES], [*TARGETS, *EXTREME_TARGETS])


def beside_transformers(kind: str, place: str) -> dict[str, Any]:
    """Both engines in float32, each in a process of its own: vLLM changes some of transformers' classes."""
    command = [sys.executable, "-m", "tests.vllm_check", kind]
    told = [
        subprocess.run([*command, name, place], stdout=subprocess.PIPE, check=True).stdout
        for name in ("transformers", "vllm")
    ]
    theirs, ours = (json.loads(words.splitlines()[-1]) for words in told)
    pairs = zip(theirs["sums"], ours["sums"], strict=True)
    return {
        "tokens": [a == b for a, b in zip(theirs["tokens"], ours["tokens"], strict=True)],
        "distance": max(abs(a - b) for a, b in pairs),
        "digests": theirs["digests"] == ours["digests"],
    }


def by_itself(engine: Any, folder: Path) -> dict[str, Any]:
    """What one engine answers, of the base and of a member, and D after each of three rounds of a ledger."""
    found: dict[str, Any] = {"tokens": [], "sums": []}
    for sign in (0, -1):
        if sign:
            engine.perturb(SEED, SIGMA, sign)
        tokens, sums = answers(engine)
        found["tokens"].append(tokens)
        found["sums"] += sums
    chain, _ = tiny.chain(engine.lock, folder, 3)
    return found | {"digests": engine.apply(chain.entries)}


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


def failing(folder: Path, ranks: int) -> dict[str, Any]:
    """What becomes of an engine whose last rank runs out of memory while the others wait in a collective."""
    engine = vllm_engine.load(tiny.lock(folder), folder, threads=1, wish=Wish(tp=ranks))

    def arm(worker: Any) -> None:
        def allocate(module: Any, arguments: Any) -> None:
            raise MemoryError("out of memory")

        if worker.rank == worker.parallel_config.world_size - 1:
            worker.model_runner.model.register_forward_pre_hook(allocate)

    engine._ranks.call(arm)
    said, rows, began = [], [], time.monotonic()
    for work in (lambda: answers(engine), engine.restore):
        try:
            work()
        except EngineEnded as error:
            said.append(str(error))
            rows.append(error.rows)
    core = engine._engine.engine_core.engine_core  # type: ignore[attr-defined]
    left = [worker.proc.is_alive() for worker in core.model_executor.workers]
    return {"said": said, "rows": rows, "seconds": time.monotonic() - began, "left": sum(left)}


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


def changed(folder: Path, name: str, ranks: int) -> str:
    """`refused` of the checkpoint without a tensor that it has, or with one that it has not."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if tensors.pop(name, None) is None:
        tensors[name] = torch.ones(32, 32, dtype=torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    return refused(folder, ranks)


def main(kind: str, what: str, place: str) -> None:
    """`what`: compare (runs the two after it) | transformers | vllm | perturb | fresh | bad | tpN:ROUNDS |
    failingN | refusedN | changedN:TENSOR; `place`: a folder shared by them.
    """
    torch.set_num_threads(1)
    folder, perturbed = Path(place) / kind, Path(place) / f"{kind}-perturbed"
    if not folder.exists():
        fields = dict(KINDS[kind])
        tiny.write_model(folder, AutoConfig.for_model(fields.pop("kind", kind), **fields))
    if what == "compare":
        found: Any = beside_transformers(kind, place)
    elif what in LOADERS:
        lock = tiny.lock(folder, live_dtype="float32")
        found = by_itself(LOADERS[what](lock, folder, threads=1), folder)
    elif what == "perturb":
        found = in_place(folder, perturbed)
    elif what.startswith("tp"):  # tp2:50, ranks and rounds
        ranks, rounds = what[2:].split(":")
        found = ranked(folder, int(ranks), int(rounds))
    elif what.startswith("failing"):
        found = failing(folder, int(what[7:]))
    elif what.startswith("refused"):
        found = refused(folder, int(what[7:]))
    elif what.startswith("changed"):
        ranks, name = what[7:].split(":")
        found = changed(folder, name, int(ranks))
    elif what == "bad":
        found = bad_input(folder)
    else:
        found = answers(vllm_engine.load(tiny.lock(perturbed), perturbed))
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's threads need not be waited for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp())
