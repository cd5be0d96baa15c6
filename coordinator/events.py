"""Everything that can happen to a coordinator and everything it can cause.

Pure. The contract of order, for every shell (server and simulator alike): compute `step`, perform every
`Persist` of the returned effects in order, flush, adopt the new state, then perform the other effects in
order. A crash before the flush leaves the old state; a crash after it loses nothing but messages, which
heartbeats repair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from protocol.messages import Message, Result, Unit
from protocol.plan import Ops

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a process, with a new `term` and 8 bytes of secret entropy from the shell."""

    now: float
    term: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. `now` is monotonic seconds of the shell's clock."""

    now: float


@dataclass(frozen=True, slots=True)
class Received:
    """A well-formed message from the holder of CURVE key `peer` (32 bytes)."""

    now: float
    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class OpsChanged:
    """The operator changed `[ops]`."""

    now: float
    ops: Ops


@dataclass(frozen=True, slots=True)
class StopRequested:
    """SIGTERM or Ctrl-C: say Bye to everybody and stop; the open round stays in the journal."""

    now: float
    reason: str


Event: TypeAlias = Started | Tick | Received | OpsChanged | StopRequested

# ---------------------------------------------------------------- journal records


@dataclass(frozen=True, slots=True)
class TermTaken:
    term: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class EntryAppended:
    height: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class ResultAccepted:
    """`evaluator` is the roster number."""

    evaluator: int
    result: Result


@dataclass(frozen=True, slots=True)
class UnitFailed:
    evaluator: int
    unit: Unit
    reason: str


Record: TypeAlias = TermTaken | EntryAppended | ResultAccepted | UnitFailed

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Persist:
    record: Record


@dataclass(frozen=True, slots=True)
class Send:
    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a line in metrics, units or the log; never needed for correctness."""

    kind: str  # "unit", "commit", "score", "refused", "membership", "failed", "dispute", ...
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop:
    """The process ends: the run is over (code 0) or must not go on (code 1)."""

    reason: str
    code: int


Effect: TypeAlias = Persist | Send | Note | Stop
