"""Everything that can happen to a node and everything it can cause.

Pure: protocol types only. The contract of order, for every shell (daemon and simulator alike): compute
`step`, adopt the new state, then perform the effects in order. `Store`, `Orphan` and `StoreTerm` are on disk
(flushed) before the next effect is performed, so a node never answers a term, or reports an entry, that it
could forget.

The engine evaluates as many units at once as it has lanes. Each `Evaluate` is answered by exactly one of
`Evaluated`, `EvaluationFailed`, `Cancelled` or `Damaged`; from `Generated` on, which may come before, the
unit needs the weights no more and its lane is free. Everything else is asked for one at a time and only while
no unit needs the weights: `Apply` is answered by `EntriesApplied`, `Rewind` by `Rewound`. `CancelUnit` only
asks a running evaluation to end soon; its answer is still one of those above.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from esnode.proofevents import Damaged, Digested, Heal, Mend, Mended, Prove, Proved, TakeDigests
from esnode.snapshotevents import PeerEffect, PeerEvent
from protocol.entries import Entry
from protocol.messages import Message, Unit


@dataclass(frozen=True, slots=True)
class About:
    """What a node says of itself in Hello; nothing here is decided by the core."""

    name: str  # a label
    backend: str  # kernel implementation
    device: str
    selftest: bytes  # 8-byte digest of the golden self-test
    fingerprint: bytes  # 8 bytes over everything that may change an answer
    versions: str = ""  # of esnode and what computes here, for people
    addresses: tuple[str, ...] = ()  # where its peer socket listens; none: it serves nobody
    catch_up: str = "auto"  # the way its owner wants, "replay" or "snapshot"; else the quicker one
    lanes: int = 1  # units it evaluates at once, 1 to ranges.MAX_LANES
    lost: str = ""  # which engines do not work, and why
    others: tuple[bytes, ...] = ()  # fingerprints of further engines


class Outcome(Protocol):
    """A measured unit, as `esnode.worker` returns it."""

    @property
    def sums(self) -> tuple[float, ...]:
        """One float64 sum of rewards per chunk."""

    @property
    def correct(self) -> int:
        """Answers the task counts correct."""

    @property
    def floored(self) -> int:
        """Answers given the task's floor because their scorer failed."""

    @property
    def tokens(self) -> int:
        """Tokens generated or scored."""

    @property
    def times(self) -> tuple[int, int, int]:
        """Milliseconds: perturb or restore, generate, score."""

    @property
    def evidence(self) -> bytes:
        """First 8 bytes of the hash over the per-prompt scores."""

    @property
    def scores(self) -> tuple[float, ...]:
        """The per-prompt scores, in order."""

    @property
    def fingerprint(self) -> bytes:
        """8 bytes over everything of the engine that may change an answer."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a process, after the engine is loaded.

    `raws`: the ledger entries on disk, from entry 0. `height`: how many of them the loaded master already
    reflects (0 for the base checkpoint); `digest`: its D. `term`: the highest term on disk, 0 for none, and
    its `proof`. `snapshots`: (round, entry hash, root, bytes) of each whole snapshot on disk.
    """

    now: float
    term: int
    raws: tuple[bytes, ...]
    height: int
    digest: int
    snapshots: tuple[tuple[int, bytes, bytes, int], ...] = ()
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes; at least twice a second. `now` is monotonic seconds of the shell's clock."""

    now: float


@dataclass(frozen=True, slots=True)
class Received:
    """A well-formed message from the coordinator."""

    now: float
    message: Message


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The engine finished the unit of an `Evaluate`."""

    now: float
    unit: Unit
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class EvaluationFailed:
    """The engine could not evaluate the unit of an `Evaluate`; the reason in words."""

    now: float
    unit: Unit
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The engine ended the unit of an `Evaluate` early, because of `CancelUnit`."""

    now: float
    unit: Unit


@dataclass(frozen=True, slots=True)
class Generated:
    """All answers of the unit are there and only their scoring is left: its lane is free for the next."""

    now: float
    unit: Unit


@dataclass(frozen=True, slots=True)
class LanesChanged:
    """From now on so many units, at least one, may run at once. `lost`: engines that fail, and why."""

    now: float
    lanes: int
    lost: str = ""


@dataclass(frozen=True, slots=True)
class LaneRepaired:
    """One of several engines held other weights than it should, and has the right ones again."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class LanesDiffer:
    """Engines of this node hold unlike weights and none is known to be right: answers Apply, or comes alone.

    Nothing is folded in then. `far`: no snapshot is to be trusted.
    """

    now: float
    reason: str
    far: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running unit is, in thousandths. May be sent as often as the shell likes."""

    now: float
    unit: Unit
    thousandths: int


@dataclass(frozen=True, slots=True)
class EntriesApplied:
    """The master reflects the entries of the last `Apply`:

    One D after each of them, in order; ms of the whole.
    """

    now: float
    digests: tuple[int, ...]
    ms: int


@dataclass(frozen=True, slots=True)
class Rewound:
    """The master reflects the first `height` entries of the last `Rewind`, and D of it is `digest`."""

    now: float
    height: int
    digest: int
    ms: int


@dataclass(frozen=True, slots=True)
class Leave:
    """SIGTERM or the operator: hand everything back and stop within seconds."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Pause:
    """The machine's owner wants it back for a while: hand everything back, stay connected, take nothing.

    May come before `Started`: then nothing is said until `Resume`.
    """

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """The pause is over."""

    now: float


Event: TypeAlias = (
    Started
    | Tick
    | Received
    | Evaluated
    | EvaluationFailed
    | Cancelled
    | Generated
    | LanesChanged
    | LaneRepaired
    | LanesDiffer
    | Progress
    | EntriesApplied
    | Rewound
    | Damaged
    | Mended
    | Digested
    | Proved
    | PeerEvent
    | Leave
    | Pause
    | Resume
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    """To the coordinator; may be lost."""

    message: Message


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Start this unit. A lane is free and the master stands at the unit's parent.

    `sigma` is the ledger's for that round: the lock's schedule or an amendment. 0 for a probe.
    """

    unit: Unit
    sigma: float


@dataclass(frozen=True, slots=True)
class CancelUnit:
    """Ask the evaluation of this unit to end between two decode steps."""

    unit: Unit


@dataclass(frozen=True, slots=True)
class Apply:
    """Fold these consecutive entries into the master, in one pass. The engine is idle."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Rewind:
    """Make the master a state of this beginning of the ledger, whatever it holds now. The engine is idle.

    The newest checkpoint that fits the entries, else the base (always the base when there are none).
    """

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Append these entries to the node's ledger file; the first has height `first`."""

    first: int
    raws: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Orphan:
    """Take the entries from height `first` on out of the ledger file and keep them in one of their own."""

    first: int
    raws: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StoreTerm:
    """Write the highest term answered and its proof (`protocol/terms.py`), flushed."""

    term: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a line in the log; never needed for correctness."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop:
    """The process ends: the run is over or the node leaves (code 0), or it must not go on (code 1)."""

    reason: str
    code: int


Effect: TypeAlias = (
    Send
    | Evaluate
    | CancelUnit
    | Apply
    | Rewind
    | Heal
    | Mend
    | TakeDigests
    | Prove
    | PeerEffect
    | Store
    | Orphan
    | StoreTerm
    | Note
    | Stop
)
