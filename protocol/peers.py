"""Messages around snapshots: what nodes and coordinator say of them, and what peers say to each other.

Pure. They live apart from `messages.py` because peers talk on sockets of their own; `wire.py` joins both
tables. "peer" as a sender is a node that speaks to another node.
"""

from __future__ import annotations

from protocol.messages import Message, Rule

SLICE = 256 * 1024  # bytes of a snapshot in one message
GRANT = 1 << 20  # bytes asked for in one message at most
MOST_OWED = 1 << 26  # bytes one peer may have asked a donor for that have not left yet
MOST_DONORS = 16
MOST_ADDRESSES = 8
MOST_NEIGHBOURS = 4


class Reach(Message, frozen=True):
    """node -> coordinator, after Welcome and every minute: where my peer socket listens, () when nowhere."""

    addresses: tuple[str, ...]


class Snapshots(Message, frozen=True):
    """coordinator -> node: write a snapshot every so many rounds (0: none); the relay's port (0: none)."""

    every: int
    relay: int


class Kept(Message, frozen=True):
    """node -> coordinator: a snapshot of this round lies here, `size` bytes, under this root."""

    round: int
    root: bytes
    size: int


class DonorsAsk(Message, frozen=True):
    """node -> coordinator: my replica is at this round, who has a snapshot of a later one?"""

    round: int


class Donor(Message, frozen=True):
    """A node that has the snapshot, and where its peer socket listens."""

    key: bytes
    name: str
    addresses: tuple[str, ...]


class Donors(Message, frozen=True):
    """coordinator -> node: the newest snapshot whose root is in the chain, and up to 16 that have it."""

    round: int
    root: bytes
    size: int
    donors: tuple[Donor, ...]  # the first is the least busy; none: there is no such snapshot


class CatchUp(Message, frozen=True):
    """node -> coordinator: how this node catches up ("replay", "snapshot"), with the numbers behind it."""

    way: str
    reason: str


class PeerWay(Message, frozen=True):
    """node -> coordinator: how I reach this peer ("direct", "relay", "none"), and why not directly."""

    key: bytes
    way: str
    reason: str


class PeerFault(Message, frozen=True):
    """node -> coordinator: this peer sent a part that its hash does not fit."""

    key: bytes
    root: bytes
    part: int
    reason: str


class HeadAsk(Message, frozen=True):
    """peer -> peer: the file's bytes before the arrays, from `offset` on."""

    root: bytes
    offset: int


class Head(Message, frozen=True):
    """peer -> peer: a piece of the head of `total` bytes."""

    root: bytes
    offset: int
    total: int
    data: bytes


class PartAsk(Message, frozen=True):
    """peer -> peer: send these bytes of a part. Each is a grant of credit: nothing is sent without one."""

    root: bytes
    part: int
    offset: int
    size: int


class PartData(Message, frozen=True):
    """peer -> peer: bytes of a part from `offset` on."""

    root: bytes
    part: int
    offset: int
    data: bytes


class Sorry(Message, frozen=True):
    """peer -> peer: this snapshot is not (or no longer) served here."""

    root: bytes
    reason: str


class WrongFile(Message, frozen=True):
    """coordinator -> node: the snapshot of this round that you keep has another root than the signed one."""

    round: int
    root: bytes  # the one that is kept
    reason: str


class Neighbours(Message, frozen=True):
    """coordinator -> node, after Reach: a few peers that give ledger entries when I am slow or silent."""

    peers: tuple[Donor, ...]


_KB = 1024

SCHEMA: tuple[Rule, ...] = (
    Rule(36, Reach, "node", 2 * _KB, ""),
    Rule(37, Snapshots, "coordinator", 16, ""),
    Rule(38, Kept, "node", 64, ""),
    Rule(39, DonorsAsk, "node", 16, "Donors"),
    Rule(40, Donors, "coordinator", 24 * _KB, ""),
    Rule(41, CatchUp, "node", 3 * _KB, ""),
    Rule(42, PeerWay, "node", 3 * _KB, ""),
    Rule(43, PeerFault, "node", 3 * _KB, ""),
    Rule(44, HeadAsk, "peer", 64, "Head, Sorry"),
    Rule(45, Head, "peer", SLICE + 128, ""),
    Rule(46, PartAsk, "peer", 64, "PartData, Sorry"),
    Rule(47, PartData, "peer", SLICE + 128, ""),
    Rule(48, Sorry, "peer", 3 * _KB, ""),
    Rule(49, WrongFile, "coordinator", 3 * _KB, ""),
    Rule(51, Neighbours, "coordinator", 6 * _KB, ""),
)
