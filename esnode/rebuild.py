"""From a ledger and the base model to the weights of any round, digests compared entry by entry.

The library's front door: `open_ledger`, `at`, `verify`. Replay is exact, so what comes out has the same bits
as the weights of the nodes that took part. Opening and checking a ledger needs no torch; rebuilding does, and
loads it only then. Called by `finish.py`, `fork.py`, `evaluate.py`, `standing.py` and `cli/ledger.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from esnode import ancestry
from esnode.replay import WrongWeights, fold
from esnode.tell import Tell, silent
from protocol import ledger as ledger_file
from protocol.chain import Chain
from protocol.counting import rounds
from protocol.entries import Entry
from protocol.errors import UserError
from protocol.ledger import Damage
from protocol.lock import Lock

if TYPE_CHECKING:
    import numpy as np

    from esnode.engines.interface import Engine
    from esnode.models import ModelFolder


class LedgerMissing(UserError):
    """No such file, or a folder without a ledger."""


class DamagedLedger(UserError):
    """The file is altered or cut; the sentence locates the damage."""


class NoSuchRound(UserError):
    """A round was asked for that the ledger does not hold."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A verified ledger: `chain` is the sound part, `damage` what follows it, None when the file is sound."""

    path: Path
    chain: Chain
    ended: bool
    damage: Damage | None

    @property
    def lock(self) -> Lock:
        """What the run's replicas agree on: model, task, manifest, ES settings."""
        return self.chain.lock

    @property
    def rounds(self) -> int:
        """Rounds closed: the weights of round 0 (the base) to this one can be rebuilt."""
        return self.chain.round

    @property
    def state(self) -> str:
        """In words: "whole, ended after 20 rounds", "unfinished after 7 rounds", or where it is damaged."""
        return str(ledger_file.Reading(self.chain, self.ended, self.damage))

    @property
    def parents(self) -> Path:
        """Where the ledgers of a fork's ancestors lie."""
        return self.path.parent / "parents"


class Weights(Protocol):
    """The master weights of a run: a bare `state.State`, or an engine, which has a model to run them."""

    def apply(self, entries: Sequence[Entry]) -> list[int]:
        """Fold ledger entries in, in one pass; D after each. Only commits move anything."""

    def replay(self, chain: Chain, upto: int) -> int:
        """Fold the first `upto` rounds of an ancestor's chain (a fork's parent) in; D after them."""

    def digest(self) -> int:
        """D, the u64 digest of all trained tensors (docs/adr/0001-noise-law.md)."""

    def read(self, name: str) -> np.ndarray:
        """float32 copy of one stored tensor in its stored shape: the master, or the base's value if frozen.

        `name` as in the checkpoint's safetensors files. KeyError for another, ValueError for integers.
        """


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The weights of one round. `digest` is their D, the ledger's own where it states one."""

    weights: Weights
    ledger: Ledger
    model: ModelFolder  # the base model's
    round: int  # commits folded in; 0 is the base model
    digest: int  # u64
    compared: int  # digests that the ledger states and replay gave too
    load_seconds: float
    replay_seconds: float

    @property
    def lock(self) -> Lock:
        """The ledger's."""
        return self.ledger.lock

    @property
    def engine(self) -> Engine:
        """The weights as an engine that can generate; only after `at` or `start` with `runnable`."""
        assert hasattr(self.weights, "generate"), "rebuilt without a model to run"
        return cast("Engine", self.weights)


def open_ledger(path: str | Path) -> Ledger:
    """Read and verify a ledger file, or the ledger of a run folder.

    Hash links, signatures and every rule of docs/ledger-format.md are checked; damage is reported in
    `damage`, not raised, so that what precedes it can still be used. LedgerMissing when there is no such
    file or nothing in it yet, DamagedLedger when not even its first entry is sound.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "run.ledger"
    if not path.is_file():
        raise LedgerMissing(
            f"there is no ledger {path}. A run's ledger is the file run.ledger in its folder."
        )
    if not begun(path):
        raise LedgerMissing(f"{path} holds nothing yet: no coordinator has begun the run.")
    reading = ledger_file.read(path)
    if not reading.chain.height:
        raise DamagedLedger(f"{path} cannot be used: {reading.problem}.")
    return Ledger(path, reading.chain, reading.ended, reading.problem)


def begun(path: Path) -> bool:
    """Whether a ledger file is there and holds more than its first words, which an opening writes."""
    return path.is_file() and path.stat().st_size != len(ledger_file.MAGIC)


def damage_of(ledger: Ledger) -> str | None:
    """One sentence on where the file is damaged and what can still be had, None when it is sound."""
    if ledger.damage is None:
        return None
    return (
        f"{ledger.path} is {ledger.damage}. What precedes it is sound: `--round {ledger.rounds}` and "
        "lower rounds can still be exported."
    )


def at(
    ledger: Ledger | str | Path,
    round: int | None = None,
    base: str | None = None,
    *,
    runnable: bool = True,
    threads: int | None = None,
    backend: str | None = None,
    tell: Tell = silent,
) -> Rebuilt:
    """The weights after `round` commits (all of them when None), every digest that is stated compared.

    `base` is a model folder, GGUF file or hub id; left out, the lock's label is looked for. `runnable`
    gives an engine to generate with; without it only the weights are held, which is faster. `threads`: CPU
    threads, None for torch's setting; `backend`: a kernel of `esnode.kernels`, None for the best here;
    `tell`: told of each step. Raises DamagedLedger (only when no round is named), NoSuchRound,
    manifest.WrongBase, replay.WrongWeights, memory.MemoryShort, and what loading a model may raise, all of
    them UserError.
    """
    opened = ledger if isinstance(ledger, Ledger) else open_ledger(ledger)
    damage = damage_of(opened)
    if damage and round is None:
        raise DamagedLedger(damage)
    wanted = opened.rounds if round is None else round
    if not 0 <= wanted <= opened.rounds:
        raise NoSuchRound(
            f"{opened.path} holds {rounds(opened.rounds)}: there are weights after 0 to {opened.rounds}, "
            f"not after {wanted}."
        )
    first = start(opened, base, runnable=runnable, threads=threads, backend=backend, tell=tell)
    return advance(first, wanted, tell)


def start(
    ledger: Ledger,
    base: str | None = None,
    *,
    runnable: bool = True,
    threads: int | None = None,
    backend: str | None = None,
    tell: Tell = silent,
) -> Rebuilt:
    """The weights of round 0, for `advance`. Arguments and errors as of `at`."""
    from esnode import models

    began = time.monotonic()
    lock, loading = ledger.lock, "loading the base model"
    tell(loading, 0, 1)
    model = models.resolve(base) if base else models.find_by_base(lock.base, lock.model)
    if not runnable:  # an engine asks by itself
        tell(_memory(lock), 1, 1)
    load = _engine if runnable else _state
    weights = load(lock, model.path, threads, backend)
    tell(loading, 1, 1)
    for number, (chain, upto) in enumerate(ancestry.ancestors(lock, ledger.parents), start=1):
        tell("replaying the parents", number - 1, number)
        weights.replay(chain, upto)
        tell("replaying the parents", number, number)
    digest = weights.digest()
    _require_start(lock, digest, model)
    return Rebuilt(weights, ledger, model, 0, digest, 0, time.monotonic() - began, 0.0)


def _memory(lock: Lock) -> str:
    """What the master of a bare state takes, in words; MemoryShort when it does not fit."""
    from esnode import memory

    sizes = [(math.prod(spec.shape), spec.trained) for spec in lock.manifest]
    master = sum(size for size, trained in sizes if trained) * (4 if lock.master == "float32" else 2)
    needed = master + 4 * max(size for size, _ in sizes)  # the tensor that is being read, as float32
    free = memory.require_bare(needed, f"the master of {lock.model}")
    return f"memory: {memory.gb(needed)} needed, {memory.gb(free)} free"


def _engine(lock: Lock, folder: Path, threads: int | None, backend: str | None) -> Weights:
    from esnode.engines import transformers_engine

    return transformers_engine.load(lock, folder, threads=threads, backend=backend)


def _state(lock: Lock, folder: Path, threads: int | None, backend: str | None) -> Weights:
    from esnode import kernels
    from esnode.state import State

    chosen = kernels.pick("cpu", backend)
    if threads:
        chosen.threads = threads
    return State.load(lock, folder, chosen)


def advance(rebuilt: Rebuilt, round: int, tell: Tell = silent) -> Rebuilt:
    """Fold further rounds into weights that hold those up to `rebuilt.round`. Raises WrongWeights."""
    began = time.monotonic()
    compared = fold(rebuilt.weights.apply, rebuilt.ledger.chain, rebuilt.round, round, tell)
    return replace(
        rebuilt,
        round=round,
        digest=rebuilt.weights.digest(),
        compared=rebuilt.compared + compared,
        replay_seconds=rebuilt.replay_seconds + time.monotonic() - began,
    )


def _require_start(lock: Lock, digest: int, model: ModelFolder) -> None:
    from esnode.manifest import WrongBase

    if digest != lock.digest:
        raise WrongBase(
            f"{model.path} is not the base model of this ledger: its digest is {digest:016x}, the "
            f"ledger starts from {lock.model} with {lock.digest:016x}. Name the right model with --base."
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found. `fault` is None when everything is right, else one sentence that locates it."""

    path: str
    run: str  # id, 64 hex digits
    model: str
    rounds: int
    ended: bool
    digest: str | None  # D of the last round, 16 hex digits; None when it was not rebuilt
    compared: int  # rounds whose digest the ledger states and replay gave too
    load_seconds: float
    replay_seconds: float
    fault: str | None

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `esnode verify --json` prints it."""
        return asdict(self)

    def words(self) -> str:
        """A few lines for a person."""
        state = "ended" if self.ended else "unfinished"
        lines = [f"{self.path}: run {self.run[:16]}, {rounds(self.rounds)}, {state}"]
        if self.fault is None:
            lines += [
                "every link, signature and rule of the chain holds",
                f"{self.model} loaded in {self.load_seconds:.1f} s, replayed in {self.replay_seconds:.1f} s",
                f"digest {self.digest}; {self._compared()}",
            ]
        return "\n".join(lines)

    def _compared(self) -> str:
        if not self.rounds:
            return "no round is committed yet, so none was compared"
        words = f"{self.compared} of {rounds(self.rounds)} compared, all equal"
        if self.compared == self.rounds:
            return words
        if not self.compared:
            words = "no round was compared"
        return f"{words}; the last round's digest is not in the ledger yet, so it could not be compared"


def verify(
    path: str | Path, base: str | None = None, *, threads: int | None = None, tell: Tell = silent
) -> Verdict:
    """Check a ledger's file, then rebuild its weights and compare every digest it states.

    Damage, another base model and other weights are verdicts; a missing file or model raises.
    """
    from esnode.manifest import WrongBase

    opened = open_ledger(path)
    fault = damage_of(opened)
    rebuilt = None
    if fault is None:
        try:
            rebuilt = at(opened, None, base, runnable=False, threads=threads, tell=tell)
        except (WrongBase, WrongWeights) as error:
            fault = str(error)
    return Verdict(
        path=str(opened.path),
        run=opened.lock.run_id.hex(),
        model=opened.lock.model,
        rounds=opened.rounds,
        ended=opened.ended,
        digest=f"{rebuilt.digest:016x}" if rebuilt else None,
        compared=rebuilt.compared if rebuilt else 0,
        load_seconds=round(rebuilt.load_seconds, 2) if rebuilt else 0.0,
        replay_seconds=round(rebuilt.replay_seconds, 2) if rebuilt else 0.0,
        fault=fault,
    )
