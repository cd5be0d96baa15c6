"""The simulator's model: 64 weights under the real noise law, and a reward that is an exact function of them.

Everything here is the slow reference (`protocol.noise`), no torch. `Replica` folds entries the way an engine
does (coefficients merged per noise by `step_of`); `Truth` replays member by member, on its own path, to check
it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from protocol import noise, seeds
from protocol.bodies import step_of
from protocol.entries import CommitBody, Entry
from protocol.fields import bf16
from protocol.lock import Lock, TensorSpec
from protocol.messages import Kind, Unit
from protocol.shaping import coefficients

SIZE = 64
NAME = "model.weight"
KEY = seeds.tensor_key(NAME)
SIGMA = bf16(0.02)
ALPHA = 0.05

Weights = NDArray[np.float32]


def digest_of(master: Weights) -> int:
    """D."""
    return noise.digest(master, KEY)


def base() -> Weights:
    """The checkpoint every run starts from."""
    return np.asarray((np.arange(SIZE) * 37 % 101 - 50) / 500, np.float32)


def make_lock(
    trusted: bytes,
    *,
    heirs: tuple[bytes, ...] = (),
    members: int = 6,
    mirrored: bool = False,
    repeatable: bool = True,
    per_round: int = 8,
    chunk: int = 2,
    heldout: int = 4,
) -> Lock:
    """The lock of a simulated run: rewards in 0 .. 1, no text anywhere."""
    return Lock(
        model="vector",
        base="00" * 32,
        digest=noise.digest(base(), KEY),
        manifest=(TensorSpec(NAME, (SIZE,), "float32", True),),
        task="simulated",
        data="11" * 32,
        scorer="22" * 32,
        train_prompts=3 * per_round // 2,
        heldout_prompts=heldout,
        train_tokens="33" * 32,
        heldout_tokens="44" * 32,
        reward_low=0.0,
        reward_high=1.0,
        members=members,
        mirrored=mirrored,
        sigma=(SIGMA,),
        alpha=(ALPHA,),
        live_dtype="float32",
        repeatable=repeatable,
        per_round=per_round,
        chunk=chunk,
        max_new_tokens=1,
        trusted=(trusted.hex(), *(key.hex() for key in heirs)),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine says of a unit; see `esnode.events.Outcome`."""

    sums: tuple[float, ...]
    correct: int
    floored: int = 0
    tokens: int = 7
    times: tuple[int, int, int] = (1, 2, 3)
    evidence: bytes = b"evidence"
    scores: tuple[float, ...] = ()
    fingerprint: bytes = b"engine-1"


@lru_cache(maxsize=4096)
def _feature(split: str, prompt: int) -> Weights:
    seed = hashlib.blake2b(f"{split}{prompt}".encode(), digest_size=SIZE).digest()
    return np.asarray((np.frombuffer(seed, np.uint8).astype(np.float32) - 127) / 64, np.float32)


def reward(live: Weights, split: str, prompt: int) -> float:
    """In 0 .. 1, an exact function of the weights' bits and the prompt."""
    value = float((live.astype(np.float64) * _feature(split, prompt)).sum())
    return 0.5 + 0.5 * math.tanh(value)


@lru_cache(maxsize=4096)  # of these two: many nodes ask for the same
def _noise(seed: int) -> NDArray[np.int32]:
    return noise.integers(seed, KEY, 0, SIZE)


@lru_cache(maxsize=256)
def _sum(member_seeds: tuple[int, ...], c: tuple[int, ...]) -> NDArray[np.int32]:
    return noise.weighted_sum(member_seeds, c, KEY, 0, SIZE)


def measure(lock: Lock, master: Weights, unit: Unit, sigma: float | None = None) -> Outcome:
    """Evaluate a unit on a master: what an honest node answers. `sigma`: None for the lock's."""
    if unit.kind == Kind.PROBE:
        live, split = noise.round_to(master, lock.live_dtype), "heldout"
        prompts = tuple(range(lock.heldout_prompts))
    else:
        seed = seeds.member_seed(lock.run_id, unit.round, unit.member, lock.mirrored)
        m = _noise(seed)
        sign = seeds.member_sign(unit.member, lock.mirrored)
        scale = lock.sigma_at(unit.round) if sigma is None else sigma
        live, split = noise.perturb(master, m, scale, sign, lock.live_dtype), "train"
        prompts = _prompts(lock, unit.round)
    sums, correct = [], 0
    scores: list[float] = []
    for start, count in lock.chunks_of(unit.kind)[unit.first : unit.last + 1]:
        rewards = [reward(live, split, prompt) for prompt in prompts[start : start + count]]
        sums.append(math.fsum(rewards))
        scores += rewards
        correct += sum(value > 0.5 for value in rewards)
    return Outcome(tuple(sums), correct, evidence=evidence_of(scores), scores=tuple(scores))


def evidence_of(scores: Sequence[float]) -> bytes:
    """What a result commits to: the hash of its per-prompt scores."""
    return hashlib.blake2b(struct.pack(f"<{len(scores)}d", *scores)).digest()[:8]


@lru_cache(maxsize=256)
def _prompts_of(run_id: bytes, round: int, per_round: int, total: int) -> tuple[int, ...]:
    return tuple(seeds.prompts_of_round(run_id, round, per_round, total))


def _prompts(lock: Lock, round: int) -> tuple[int, ...]:
    return _prompts_of(lock.run_id, round, lock.per_round, lock.train_prompts)


class Replica:
    """One node's master."""

    def __init__(self, lock: Lock, errs: bytes | None = None, weight: int = 5) -> None:
        """`errs`: the hash of the entry whose update comes out with a wrong bit, in this weight."""
        self.lock = lock
        self.errs, self.weight = errs, weight
        self.master = base()
        self.written = self.digest  # D of what was written last

    @property
    def digest(self) -> int:
        return noise.digest(self.master, KEY)

    @property
    def damaged(self) -> bool:
        """Whether memory has changed by itself."""
        return self.digest != self.written

    def write(self, master: Weights) -> None:
        """Overwrite it."""
        self.master = master.copy()
        self.written = self.digest

    def flip(self, index: int, bit: int, *, seen: bool) -> None:
        """One bit of one weight turns over; unless `seen`, what was written last is forgotten with it."""
        self.master = self.master.copy()
        self.master.view("uint32")[index] ^= 1 << bit
        self.written = self.written if seen else self.digest

    def apply(self, entries: tuple[Entry, ...]) -> tuple[int, ...]:
        """Fold entries into the master; D after each."""
        digests = []
        for entry in entries:
            step = step_of(self.lock, entry)
            if step is not None:
                self.master = noise.update(self.master, _sum(step.seeds, step.c), step.shift)
                self.written = self.digest
                if entry.hash == self.errs:
                    self.flip(self.weight, 3, seen=False)
            digests.append(self.written)
        return tuple(digests)


class Truth:
    """An independent replay, one member after the other: what a commit makes of a master, and each reward."""

    def __init__(self, lock: Lock) -> None:
        self.lock = lock
        self.base = base()

    def member_reward(self, master: Weights, round: int, member: int, sigma: float) -> float:
        """fsum(chunk sums) / prompts, measured on the true master of the round."""
        unit = Unit(round, Kind.MEMBER, member, 0, self.lock.chunk_count(Kind.MEMBER) - 1)
        return math.fsum(measure(self.lock, master, unit, sigma).sums) / self.lock.per_round

    def probe(self, master: Weights, round: int) -> Outcome:
        """The held-out result of the true master after `round` commits."""
        unit = Unit(round, Kind.PROBE, 0, 0, self.lock.chunk_count(Kind.PROBE) - 1)
        return measure(self.lock, master, unit)

    def moved(self, master: Weights, round: int, body: CommitBody) -> Weights:
        """The master after the commit of this round."""
        lock = self.lock
        found = coefficients([m.reward for m in body.members], body.alpha, "zscore")
        if found is None:
            return master
        a = np.zeros(SIZE, np.int64)
        for member, c in zip(body.members, found.c, strict=True):
            sign = seeds.member_sign(member.index, lock.mirrored)
            seed = seeds.member_seed(lock.run_id, round, member.index, lock.mirrored)
            a += sign * c * _noise(seed).astype(np.int64)
        return noise.update(master, a.astype(np.int32), found.shift)
