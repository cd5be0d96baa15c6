"""The lock: what all replicas of a run agree on, as canonical bytes whose digest is the run id.

Pure. Lives here: `Lock` and its parts, the canonical encoding, the strict reader, schedules and chunks. `plan.py` writes
the user's side of it; `esnode.locking` resolves one into the other; everything that replays a run reads a lock only.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from protocol.errors import UserError
from protocol.messages import Kind

LAW = 1
MAX_MEMBERS = 4096


class LockError(UserError):
    """Bytes that are no lock of this version, or a lock whose fields contradict each other; the field is named."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor of the base checkpoint: its safetensors name, full shape and stored dtype ("bfloat16", ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a fork starts: the state of run `run` after `round` commits.

    `entry` is the hash of the commit that closed round `round - 1` (of the lock entry when `round` is 0), `digest` the
    D of that state. `run` and `entry` are 64 hex digits.
    """

    run: str
    round: int
    entry: str
    digest: int


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The resolved plan. Field meanings: docs/plan.md and docs/ledger-format.md. Immutable; hashes are hex text."""

    law: int = LAW
    model: str  # a label, nothing is decided by it
    base: str  # BLAKE2b-256 of the base checkpoint (manifest and fp32 images)
    digest: int  # D of the state the run starts from
    manifest: tuple[TensorSpec, ...]  # in name order
    parent: Parent | None = None

    task: str
    task_options: dict[str, Any] = field(default_factory=dict)
    data: str  # SHA-256 of the task's data blob
    scorer: str  # SHA-256 of the scorer's source
    packages: dict[str, str] = field(default_factory=dict)
    date: str = "2026-01-01"
    train_prompts: int
    heldout_prompts: int
    train_tokens: str  # SHA-256 of all rendered token ids of the split
    heldout_tokens: str
    stop_ids: tuple[int, ...] = ()
    reward_low: float
    reward_high: float

    members: int
    mirrored: bool
    sigma: tuple[float, ...]  # bf16 values; the last one repeats
    alpha: tuple[float, ...]
    shaping: str = "zscore"
    clip: float = 0.0
    std_floor: float = 0.0
    update: bool = True
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    live_dtype: str = "bfloat16"
    master: str = "float32"
    repeatable: bool = False
    per_round: int  # prompts of a round, resolved: 1 .. train_prompts
    chunk: int  # prompts of a chunk, resolved: 1 .. per_round
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    trusted: tuple[str, ...]  # Ed25519 public keys that may sign entries

    def to_bytes(self) -> bytes:
        """Canonical JSON: keys sorted, no spaces, UTF-8, floats by their shortest decimal form."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        plain = asdict(self)
        for name in _FLOATS:
            plain[name] = float(plain[name])
        for name in ("sigma", "alpha"):
            plain[name] = [float(value) for value in plain[name]]
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")

    @cached_property
    def run_id(self) -> bytes:
        """32 bytes: BLAKE2b-256 of the canonical bytes."""
        return hashlib.blake2b(self.to_bytes(), digest_size=32).digest()

    def sigma_at(self, round: int) -> float:
        """The schedule's value; the last one repeats."""
        return self.sigma[min(round, len(self.sigma) - 1)]

    def alpha_at(self, round: int) -> float:
        """The schedule's value; the last one repeats."""
        return self.alpha[min(round, len(self.alpha) - 1)]

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, count) of every chunk over the round's prompts."""
        return _slices(self.per_round, self.chunk)

    @cached_property
    def heldout_chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, count) of every chunk over the held-out prompts."""
        return _slices(self.heldout_prompts, self.chunk)

    def chunks_of(self, kind: int) -> tuple[tuple[int, int], ...]:
        """The chunks a unit of this kind counts in."""
        return self.heldout_chunks if kind == Kind.PROBE else self.chunks

    def chunk_count(self, kind: int) -> int:
        """How many chunks a whole member or probe has."""
        return len(self.chunks_of(kind))

    def chunk_size(self, kind: int, index: int) -> int:
        """Prompts in one chunk."""
        return self.chunks_of(kind)[index][1]

    def reward_ok(self, value: float, prompts: int = 1) -> bool:
        """Whether `value` can be the sum of `prompts` rewards of the declared range.

        Sums round: the range is widened by 2^-40 of its larger bound, so that an honest sum of extreme rewards passes.
        """
        slack = max(abs(self.reward_low), abs(self.reward_high)) * 2.0**-40
        low, high = (self.reward_low - slack) * prompts, (self.reward_high + slack) * prompts
        return math.isfinite(value) and low <= value <= high

    def __hash__(self) -> int:
        return int.from_bytes(self.run_id[:8], "little")


_FLOATS = ("reward_low", "reward_high", "clip", "std_floor", "temperature", "top_p")


def _slices(total: int, size: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(size, total - start)) for start in range(0, total, size))


def resolve_slice(per_round: int, chunk: int, train_prompts: int) -> tuple[int, int]:
    """Concrete (per_round, chunk) from the plan's values, 0 meaning all prompts and a quarter of the round."""
    prompts = per_round or train_prompts
    return prompts, chunk or max(1, prompts // 4)


def bf16(value: float) -> float:
    """The nearest bf16 value (ties to even): the float64 is rounded once, to 8 significant bits."""
    if value == 0 or not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)
    step = max(exponent, -125) - 8  # below 2^-126 bf16 is denormal, its step stays 2^-133
    return math.ldexp(round(math.ldexp(mantissa, exponent - step)), step)
