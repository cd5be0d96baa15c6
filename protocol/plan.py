"""The plan: the TOML file a user writes. `[run]` becomes the lock, `[ops]` is read by the coordinator only.

Pure. `parse` validates every field, `render` writes a plan back, `template` gives a commented one for a task.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.errors import UserError
from protocol.fields import bf16
from protocol.lock import Lock, LockError, Parent, TensorSpec, lock_from_bytes, resolve_slice

__all__ = [
    "Lock",
    "LockError",
    "Ops",
    "Parent",
    "Plan",
    "PlanError",
    "TensorSpec",
    "bf16",
    "lock_from_bytes",
    "resolve_slice",
]


class PlanError(UserError):
    """A plan that cannot run: one line naming the field, its value and what to write instead."""


@dataclass(frozen=True, slots=True)
class Ops:
    """How the run is operated. May change while it runs; no replica's arithmetic depends on it."""

    rounds: int
    quorum: float = 1.0  # share of members that closes a round
    eval_every: int = 5  # rounds between held-out probes; 0 = only at the start and the end
    eval_samples: int = 0  # sampled answers per held-out prompt besides the greedy one
    stall_seconds: float = 30.0  # a unit without progress for this long is given to another node


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A parsed plan. Fields are those of docs/plan.md; names are the lock's wherever both have them."""

    model: str
    task: str
    ops: Ops
    live_dtype: str = "bfloat16"
    master: str = "float32"
    repeatable: bool = False
    trusted: tuple[str, ...] = ()
    date: str = "2026-01-01"
    members: int
    mirrored: bool = False
    sigma: tuple[float, ...]
    alpha: tuple[float, ...]
    shaping: str = "zscore"
    clip: float = 0.0
    std_floor: float = 0.0
    update: bool = True
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    per_round: int = 0
    chunk: int = 0
    max_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    task_options: dict[str, Any] = field(default_factory=dict)
