"""The part of `events.py` that is about peers: snapshots written here or fetched, entries fetched.

Pure. Under the same contract of order; reached through `esnode.events`, which joins both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protocol.peers import Donor

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Saved:
    """The snapshot of the last `Save` is on the disk, or is not and `reason` says why."""

    now: float
    round: int
    entry: bytes  # hash of the commit it stands behind
    root: bytes
    size: int
    reason: str
    ms: int


@dataclass(frozen=True, slots=True)
class Fetching:
    """How the transfer of the last `FetchSnapshot` goes: checked bytes, all bytes, bytes per second.

    Not before the rate was measured over a second or some megabytes.
    """

    now: float
    done: int
    total: int
    rate: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """The snapshot is in the node's folder, every part checked under its root; a line about the transfer."""

    now: float
    round: int
    entry: bytes
    root: bytes
    size: int
    words: str


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The transfer cannot go on; what came stays on the disk for the next attempt."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class PeerReached:
    """A peer was tried: "direct", "relay" or "none", and why not directly."""

    now: float
    key: bytes
    way: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerPoisoned:
    """A peer sent a part that its hash does not fit; it is not asked again."""

    now: float
    key: bytes
    root: bytes
    part: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerEntries:
    """A peer's answer to `FetchEntries`: raw entries from height `first` on, none when it has no more."""

    now: float
    key: bytes
    first: int
    raws: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Peers may dial this node at other addresses than before."""

    now: float
    addresses: tuple[str, ...]


PeerEvent: TypeAlias = (
    Saved | Fetching | Fetched | FetchFailed | PeerReached | PeerPoisoned | PeerEntries | Moved
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Save:
    """Begin to write the master, which is the state after `round` commits, as a snapshot; `Saved` follows.

    The engine may go on meanwhile.
    """

    round: int
    entry: bytes
    digest: int


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Fetch this snapshot from these donors, beside all other work, until `Fetched` or `FetchFailed`."""

    round: int
    root: bytes
    size: int
    donors: tuple[Donor, ...]
    relay: int  # port of the relay on the coordinator's machine, 0 for none


@dataclass(frozen=True, slots=True)
class StopFetch:
    """Stop the transfer; nothing more is said of it."""


@dataclass(frozen=True, slots=True)
class FetchEntries:
    """Ask this peer for ledger entries, beside all other work; `PeerEntries` follows if it answers.

    An earlier question that was not answered is forgotten.
    """

    peer: Donor
    first: int
    count: int


PeerEffect: TypeAlias = Save | FetchSnapshot | FetchEntries | StopFetch
