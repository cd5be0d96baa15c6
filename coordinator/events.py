"""Everything that can happen to a coordinator and everything it can cause.

Pure. The contract of order, for every shell (server and simulator alike): compute `step`, perform every
`Persist` of the returned effects in order, flush, adopt the new state, then perform the other effects in
order. A crash before the flush leaves the old state; a crash after it loses nothing but messages, which
heartbeats repair.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from protocol.messages import Message, Result, Unit
from protocol.plan import Ops

# ---------------------------------------------------------------- events


class Started(msgspec.Struct, frozen=True):
    """First event of a process, with a new `term` and entropy from the shell.

    `nonce`: 8 bytes that mark the term in every entry. `secret`: 32 bytes nobody else sees; the first one a
    run is given is kept in its journal.
    """

    now: float
    term: int
    nonce: bytes
    wall: float = 0.0  # unix seconds; only invites expire by them. 0: the shell has no such clock
    secret: bytes = b""
    recover: str = ""  # a successor: "wait" until enough nodes have answered, "force" not to count them


class Tick(msgspec.Struct, frozen=True):
    """Time passes. `now` is monotonic seconds of the shell's clock."""

    now: float
    wall: float = 0.0  # as in Started


class Received(msgspec.Struct, frozen=True):
    """A well-formed message from the holder of CURVE key `peer` (32 bytes)."""

    now: float
    peer: bytes
    message: Message
    size: int = 0  # bytes it took on the wire, for those who read about the run


class OpsChanged(msgspec.Struct, frozen=True):
    """The operator changed `[ops]`."""

    now: float
    ops: Ops


class RelayOpened(msgspec.Struct, frozen=True):
    """The relay process listens on this port (0: it is gone)."""

    now: float
    port: int


class StopRequested(msgspec.Struct, frozen=True):
    """SIGTERM or Ctrl-C: say Bye to everybody and stop; the open round stays in the journal."""

    now: float
    reason: str


class InviteMade(msgspec.Struct, frozen=True):
    """The operator made an invite. Its secret half is in the text that was printed and nowhere else."""

    now: float
    key: bytes  # public half of the one-time key
    expires: int  # unix seconds
    uses: int  # machines it lets in


class NodeAllowed(msgspec.Struct, frozen=True):
    """The operator puts a key on the list by hand, or puts a revoked one back."""

    now: float
    key: bytes
    name: str


class NodeRevoked(msgspec.Struct, frozen=True):
    """The operator takes a node's key off the list, or withdraws an invite by its key."""

    now: float
    key: bytes
    reason: str


class AmendAsked(msgspec.Struct, frozen=True):
    """The operator changes settings from a later round on; None and () leave one as it is."""

    now: float
    from_round: int
    alpha: float | None
    sigma: float | None
    members: int | None
    trusted: tuple[bytes, ...] = ()  # the whole new list of signing keys


Event: TypeAlias = (
    AmendAsked
    | Started
    | Tick
    | Received
    | OpsChanged
    | RelayOpened
    | StopRequested
    | InviteMade
    | NodeAllowed
    | NodeRevoked
)

# ---------------------------------------------------------------- journal records


class TermTaken(msgspec.Struct, frozen=True):
    """This coordinator has begun a term; `nonce` (8 bytes) names this start of it."""

    term: int
    nonce: bytes


class TermSeen(msgspec.Struct, frozen=True):
    """Another coordinator proved this term: the next start takes a higher one."""

    term: int


class Recovery(msgspec.Struct, frozen=True):
    """A successor goes on from the first `height` entries, those behind them are dropped.

    `open`: it has begun; before, it only waits. `key`: who signed the last of the entries.
    """

    open: bool
    height: int
    key: bytes


class EntryAppended(msgspec.Struct, frozen=True):
    """A ledger entry of this coordinator, signed: its height and its bytes."""

    height: int
    raw: bytes


class ResultAccepted(msgspec.Struct, frozen=True, array_like=True):
    """`evaluator` is the roster number. The journal keeps it as the array it is."""

    evaluator: int
    result: Result


class UnitFailed(msgspec.Struct, frozen=True):
    """A node could not evaluate a unit: it counts towards the void of its member."""

    evaluator: int
    unit: Unit
    reason: str


class AmendOrdered(msgspec.Struct, frozen=True):
    """An order for an amendment. The entry that fulfils it is a record of its own, later."""

    from_round: int
    alpha: float | None
    sigma: float | None
    members: int | None
    trusted: tuple[bytes, ...] = ()


class InviteOpened(msgspec.Struct, frozen=True):
    """An invite was made; `expires` is in unix seconds, `uses` how many keys it lets in."""

    number: int
    key: bytes  # the public half: the journal lets nobody in
    expires: int
    uses: int


class KeyAllowed(msgspec.Struct, frozen=True):
    """One record for both: the key is on the list, and invite number `invite` is used (0: by hand)."""

    key: bytes
    name: str
    invite: int


class KeyRevoked(msgspec.Struct, frozen=True):
    """`key` is a node's or an invite's."""

    key: bytes
    reason: str


class FaultFound(msgspec.Struct, frozen=True):
    """A node's replica was not what replay gives; what it measured in the open round is dropped."""

    key: bytes
    commits: int
    reason: str


class Audited(msgspec.Struct, frozen=True):
    """An audit has been judged: what it adds to the evidence, who failed it, who is in quarantine by it."""

    first: bytes  # CURVE keys
    second: bytes
    sums: tuple[float, ...]  # fields of audit.Sums, the first node against the second
    faults: tuple[tuple[bytes, str], ...]
    quarantine: tuple[tuple[bytes, str], ...]


class SecretTaken(msgspec.Struct, frozen=True):
    """32 bytes that decide, unknown to the nodes, what is checked."""

    secret: bytes


Record: TypeAlias = (
    TermTaken
    | EntryAppended
    | ResultAccepted
    | UnitFailed
    | InviteOpened
    | KeyAllowed
    | KeyRevoked
    | FaultFound
    | SecretTaken
    | AmendOrdered
    | TermSeen
    | Recovery
    | Audited
)

# ---------------------------------------------------------------- effects


class Persist(msgspec.Struct, frozen=True):
    """Write this record to the journal, flushed before any later effect."""

    record: Record


class Send(msgspec.Struct, frozen=True):
    """To the holder of this key; may be lost."""

    peer: bytes
    message: Message


class Note(msgspec.Struct, frozen=True):
    """Something worth a line in metrics, units or the log; never needed for correctness."""

    kind: str  # "unit", "commit", "score", "refused", "membership", "failed", "dispute", ...
    fields: dict[str, Any] = msgspec.field(default_factory=dict)


class Stop(msgspec.Struct, frozen=True):
    """The process ends: the run is over (code 0) or must not go on (code 1)."""

    reason: str
    code: int


Effect: TypeAlias = Persist | Send | Note | Stop
