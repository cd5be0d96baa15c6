"""A node's workshop without a model: 64 float32 weights under the real noise law, rewards exact everywhere.

The reward of a prompt is minus the mean squared distance of the live weights to a target that the prompt's
index defines, so training moves somewhere and the same member gives the same reward on every machine. Task
options of the lock: `seconds` per unit (in small steps, so that it can be cancelled unless `deaf`), `seconds
of NAME` per whole member on one node, in proportion for fewer chunks, `fail` (members that never work),
`flip` and `wrong` (the node and the round after which its master is damaged).
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from esnode.checkpoint import Checkpoints, Saved
from esnode.engines.interface import Cancelled
from esnode.events import About
from esnode.nodeoptions import Options
from esnode.replay import DamagedMaster
from esnode.room import Room
from esnode.snapshot import Reader
from protocol import noise, seeds
from protocol.bodies import step_of
from protocol.entries import Entry, EntryKind
from protocol.lock import Lock
from protocol.messages import Kind, Unit

TENSOR = "w"
WIDTH = 64
STEP_SECONDS = 0.01


@dataclass(frozen=True)
class ToyOutcome:
    """What the core reads of a measured unit."""

    sums: tuple[float, ...]
    correct: int
    floored: int
    tokens: int
    times: tuple[int, int, int]
    evidence: bytes
    scores: tuple[float, ...]
    fingerprint: bytes


def base_weights() -> np.ndarray:
    """The toy base model: 64 float32 weights."""
    return (np.arange(WIDTH, dtype=np.float32) - 32) / np.float32(64)


def base_digest() -> int:
    """D of the base model."""
    return noise.digest(base_weights(), seeds.tensor_key(TENSOR))


class ToyWorkshop:
    """Engine, prompts and scorer in one."""

    def __init__(
        self, lock: Lock, name: str, seconds: float | None = None, folder: Path | None = None
    ) -> None:
        """`seconds` per unit instead of the lock's; `folder`: the node's own, for its snapshots (None: none
        are kept).
        """
        self._lock = lock
        self._checkpoints = None if folder is None else Checkpoints(folder, lock, self, Room(spare=0))
        self._key = seeds.tensor_key(TENSOR)
        self._written = self._write(base_weights())  # D of what was written last
        self._seconds = float(lock.task_options.get("seconds", 0.0)) if seconds is None else seconds
        self._scoring = float(lock.task_options.get("scoring", 0.0))  # seconds a unit, beside the next one
        self._desk = ThreadPoolExecutor(1)
        self._deaf = bool(lock.task_options.get("deaf", False))
        self._fail = set(lock.task_options.get("fail", ()))
        self._bad = {what: lock.task_options.get(what) for what in ("flip", "wrong")}  # [node, round]
        print_ = hashlib.blake2b(b"toy", digest_size=8).digest()
        self.about = About(name, "toy", "cpu", b"selftest", print_)

    host_path = None

    def refresh(self) -> int:
        return self.digest()

    def digest(self) -> int:
        return noise.digest(self._master, self._key)

    def _write(self, master: np.ndarray) -> int:
        self._master = master
        self._written = self.digest()
        return self._written

    def apply(self, entries: Sequence[Entry]) -> list[int]:
        if self._checkpoints is not None:
            self._checkpoints.settle()
        self._require_intact()
        digests = []
        for entry in entries:
            digests.append(self._write(_moved(self._lock, self._master, entry)))
            self._go_wrong(entry, digests)
        return digests

    def _go_wrong(self, entry: Entry, digests: list[int]) -> None:
        """Once, after the commit of a round: a bit flips in memory, or the update comes out wrong."""
        for what in ("flip", "wrong"):
            if entry.kind is EntryKind.COMMIT and self._bad.get(what) == [self.about.name, entry.round]:
                del self._bad[what]
                self._master = self._master.copy()
                self._master.view(np.uint32)[5] ^= 8
                if what == "wrong":
                    digests[-1] = self._written = self.digest()

    def _require_intact(self) -> None:
        if self.damaged():
            raise DamagedMaster(self.damaged())

    def damaged(self) -> tuple[str, ...]:
        return (TENSOR,) if self.digest() != self._written else ()

    def all_held(self) -> tuple[int, ...]:
        return (self.digest(),)

    def held(self, pieces: Sequence[int]) -> tuple[int, ...]:
        return (self.digest(),)

    def derive(
        self, entries: Sequence[Entry], pieces: Sequence[int], base: bool
    ) -> tuple[tuple[int, ...], int]:
        height, since, self._derived = 0, 0, base_weights()
        found = None if base or self._checkpoints is None else self._checkpoints.stated(entries)
        if found is not None:
            with Reader(found[0]) as reader:
                self._derived = np.frombuffer(reader.span(0, 0, 4 * WIDTH), np.float32)
                height, since = found[1], reader.header.round
        for entry in entries[height:]:
            self._derived = _moved(self._lock, self._derived, entry)
        return (noise.digest(self._derived, self._key),), since

    def mend(self, pieces: Sequence[int]) -> int:
        return self._write(self._derived)

    def heal(self, entries: Sequence[Entry], tensors: Sequence[str]) -> int:
        self.derive(entries, (0,), True)
        return self.mend((0,))

    def rewind(self, entries: Sequence[Entry]) -> tuple[int, int]:
        found = self._checkpoints.load(entries) if self._checkpoints is not None else None
        if found is not None:
            return found
        return 0, self._write(base_weights())

    def save(self, round: int, entry: bytes, digest: int, done: Callable[[Saved], None]) -> None:
        if self._checkpoints is not None:
            self._checkpoints.begin(round, entry, digest, done)

    def chunk(self, array: int, first: int, end: int) -> np.ndarray:
        return self._master.view(np.uint8)[first:end]

    def digest_of(self, name: str, first: int, data: np.ndarray) -> int:
        return noise.digest(data.view(np.float32), self._key, first)

    def refill(self, pieces: Iterable[tuple[int, int, memoryview]]) -> int:
        fresh = self._master.copy()
        for _, first, data in pieces:
            fresh.view(np.uint8)[first : first + len(data)] = np.frombuffer(data, np.uint8)
        return self._write(fresh)

    def evaluate(
        self, unit: Unit, sigma: float, stop: Callable[[], bool], progress: Callable[[int], None]
    ) -> Future[ToyOutcome]:
        outcome = self._measure(unit, sigma, stop, progress)

        def score() -> ToyOutcome:
            self._take_time(self._scoring, stop, lambda _: None)
            return outcome

        if self._scoring:
            return self._desk.submit(score)
        future: Future[ToyOutcome] = Future()
        future.set_result(outcome)
        return future

    def _measure(
        self, unit: Unit, sigma: float, stop: Callable[[], bool], progress: Callable[[int], None]
    ) -> ToyOutcome:
        lock = self._lock
        if unit.kind == Kind.MEMBER and unit.member in self._fail:
            raise RuntimeError(f"member {unit.member} never works here")
        self._require_intact()
        chunks = unit.last - unit.first + 1
        whole = lock.task_options.get(f"seconds of {self.about.name}")
        seconds = self._seconds if whole is None else whole * chunks / lock.chunk_count(unit.kind)
        self._take_time(seconds, stop, progress)
        live = self._live(unit, sigma)
        sums, scores = [], []
        for start, count in lock.chunks_of(unit.kind)[unit.first : unit.last + 1]:
            prompts = self._prompts(unit)[start : start + count]
            rewards = [_reward(live, prompt) for prompt in prompts]
            scores += rewards
            sums.append(math.fsum(rewards))
        evidence = hashlib.blake2b(struct.pack(f"<{len(scores)}d", *scores)).digest()[:8]
        return ToyOutcome(
            tuple(sums),
            sum(r > -0.1 for r in scores),
            0,
            len(scores),
            (1, 2, 3),
            evidence,
            tuple(scores),
            self.about.fingerprint,
        )

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.settle()

    def _take_time(self, seconds: float, stop: Callable[[], bool], progress: Callable[[int], None]) -> None:
        began = time.monotonic()
        while (spent := time.monotonic() - began) < seconds:
            if stop() and not self._deaf:
                raise Cancelled
            progress(int(1000 * spent / seconds))
            time.sleep(STEP_SECONDS)

    def _live(self, unit: Unit, sigma: float) -> np.ndarray:
        if unit.kind == Kind.PROBE:
            return self._master
        lock = self._lock
        seed = seeds.member_seed(lock.run_id, unit.round, unit.member, lock.mirrored)
        m = noise.integers(seed, self._key, 0, WIDTH)
        sign = seeds.member_sign(unit.member, lock.mirrored)
        return noise.perturb(self._master, m, sigma, sign, "float32")

    def _prompts(self, unit: Unit) -> list[int]:
        lock = self._lock
        if unit.kind == Kind.PROBE:
            return list(range(lock.heldout_prompts))
        return seeds.prompts_of_round(lock.run_id, unit.round, lock.per_round, lock.train_prompts)


def _moved(lock: Lock, master: np.ndarray, entry: Entry) -> np.ndarray:
    step = step_of(lock, entry)
    if step is None:
        return master
    a = noise.weighted_sum(step.seeds, step.c, seeds.tensor_key(TENSOR), 0, WIDTH)
    return noise.update(master, a, step.shift)


def _reward(live: np.ndarray, prompt: int) -> float:
    target = ((np.arange(WIDTH) * 7 + prompt) % 13 - 6) / 16.0
    return -math.fsum((live.astype(np.float64) - target) ** 2) / WIDTH


def load(options: Options, lock: Lock) -> ToyWorkshop:
    """The loader of `python -m esnode.daemon --loader tests.toy_engine:load`."""
    return ToyWorkshop(lock, options.name, folder=options.folder)
