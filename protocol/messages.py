"""Every message that crosses the wire, and the one table that says who may send it and how large it may be.

Pure. A message is a frozen msgspec struct encoded as a msgpack array `[tag, field, ...]`; fields are only
ever appended, together with a new wire version. `wire.py` turns bytes into these and back, nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from protocol.lock import Kind as Kind  # noqa: PLC0414  a message's word, found with the others

WIRE_VERSION = 1
BLOB_PART = 256 * 1024  # bytes of one Blob
MOST_FRAMES = 64  # in one Bundle
LONGEST_FRAME = 512  # bytes of one of them: what is larger goes by itself

# How the reason of a Bye begins that is no fault: a node that hears it stops with exit code 0.
RUN_ENDED = "the run has ended"
STOPPED = "the coordinator stops"
RELEASED = "released"


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. Encoded without field names."""


class Unit(Message, frozen=True):
    """The atom of assignment: chunks `first..last` (inclusive) of one member of one round.

    For `Kind.PROBE` the member is 0 and the chunks are those of the held-out prompts.
    """

    round: int
    kind: int
    member: int
    first: int
    last: int


class Hello(Message, frozen=True):
    """node -> coordinator: who I am (the key comes from ZAP, never from here), what I run, where I stand."""

    wire_min: int
    wire_max: int
    law: int
    run: bytes  # 32-byte run id, or b"" when the node does not know it yet
    name: str  # a label, nothing is decided by it
    backend: str  # kernel implementation, e.g. "cpu"
    device: str
    selftest: bytes  # 8-byte digest of the golden self-test's outputs
    fingerprints: tuple[bytes, ...]  # 8 bytes per engine; equal ones are expected to give equal answers
    height: int  # entries applied or held (ledger length)
    tip: bytes  # hash of the last of them, b"" for none
    digest: int  # D of the state this node's master is in
    term: int  # highest term ever answered
    units: tuple[Unit, ...]  # still running here
    proof: bytes = b""  # of that term (`terms.py`)
    lanes: int = 1  # units it evaluates at once
    lost: str = ""  # which of its engines do not work, and why


class Welcome(Message, frozen=True):
    """coordinator -> node: the agreed wire version, the lock, and the tip of the chain."""

    wire: int
    run: bytes
    lock: bytes
    term: int
    height: int
    tip: bytes
    proof: bytes  # that the coordinator's key took the term (`terms.py`)


class Refuse(Message, frozen=True):
    """coordinator -> node: not admitted; the reason is shown to the node's user."""

    reason: str


class Rehello(Message, frozen=True):
    """coordinator -> node: I do not know this connection; say Hello first."""


class Fetch(Message, frozen=True):
    """Ask for ledger entries `first .. first+count-1`."""

    first: int
    count: int


class Entries(Message, frozen=True):
    """Ledger entries as stored, from height `first`; none: there are no more. Signed, whoever sends them."""

    first: int
    entries: tuple[bytes, ...]


class Assign(Message, frozen=True):
    """coordinator -> node: evaluate this unit on the state `parent`; the lease is in seconds."""

    unit: Unit
    parent: bytes  # first 8 bytes of the tip hash the unit belongs to
    lease: int


class Result(Message, frozen=True):
    """node -> coordinator: the unit's rewards, one float64 sum per chunk."""

    unit: Unit
    seed: int  # derived by both sides; sent to check that both hold the same rule. 0 for probes
    sums: tuple[float, ...]
    parent: bytes
    digest: int  # D of the master the unit was measured on
    correct: int  # answers counted correct by the task
    floored: int  # answers given the task's floor because their scorer failed
    tokens: int  # generated, or scored for likelihood tasks
    times: tuple[int, int, int]  # milliseconds: perturb or restore, generate, score
    evidence: bytes  # first 8 bytes of the hash over the per-prompt scores
    engine: int  # which of Hello's fingerprints measured it


class Ack(Message, frozen=True):
    """coordinator -> node: the result is safely journaled, or why it does not count."""

    unit: Unit
    verdict: str  # "ok", "late", "duplicate" or "refused: <reason>"


class Failed(Message, frozen=True):
    """node -> coordinator: this unit cannot be evaluated here; the reason in words."""

    unit: Unit
    reason: str


class Release(Message, frozen=True):
    """node -> coordinator: a clean leave; all units go back."""

    reason: str
    stays: bool = False  # it is paused: it stays connected, and says Hello when it works again


class Cancel(Message, frozen=True):
    """coordinator -> node: stop this unit, its result is no longer needed."""

    unit: Unit


class Commit(Message, frozen=True):
    """coordinator -> all: one new ledger entry, of whatever kind, at this height."""

    height: int
    entry: bytes


class Applied(Message, frozen=True):
    """node -> coordinator: D of the master after the entries below `height`; ms the last apply took."""

    height: int
    tip: bytes  # first 8 bytes of the hash of entry height-1
    digest: int
    ms: int


class NodeBeat(Message, frozen=True):
    """node -> coordinator, every 2 s unless something else was sent: where I stand and what I hold."""

    height: int
    tip: bytes  # first 8 bytes
    units: tuple[tuple[Unit, int], ...]  # unit and progress in thousandths


class CoordBeat(Message, frozen=True):
    """coordinator -> node, answering a beat: the chain's tip and the units I believe you hold."""

    term: int
    height: int
    tip: bytes
    units: tuple[Unit, ...]


class Return(Message, frozen=True):
    """coordinator -> node: your ledger leaves mine at `height`, where mine holds `entry`: go back there."""

    term: int
    height: int
    entry: bytes


class Bye(Message, frozen=True):
    """coordinator -> node: the run ended, or you were superseded or revoked."""

    reason: str


class Enrol(Message, frozen=True):
    """newcomer -> coordinator, under an invite's one-time key: let this permanent key in."""

    key: bytes  # 32-byte CURVE public key under which the machine will say Hello
    name: str  # a label, as in Hello


class Enrolled(Message, frozen=True):
    """coordinator -> newcomer: the key is on the list; say Hello under it. Repeated for the same key."""

    run: bytes
    number: int  # of the invite that was used, as `esnode nodes list` shows it; 0 when none was needed


class BlobAsk(Message, frozen=True):
    """To the coordinator, also before Hello, or to a node's peer socket: a part of a blob by its digest.

    The lock goes by the run id (BLAKE2b-256), the task's data by the lock's SHA-256. It may be the first
    thing said on a connection, so it offers a range of wire versions as Hello does.
    """

    wire_min: int
    wire_max: int
    digest: bytes  # 32 bytes
    offset: int


class Blob(Message, frozen=True):
    """The answer: bytes from `offset` on of a blob of `total` bytes, at most `BLOB_PART` of them."""

    digest: bytes
    offset: int
    total: int
    data: bytes


class DigestAsk(Message, frozen=True):
    """coordinator -> node: digests of the pieces of your master after so many commits, read afresh.

    `first` is the first piece asked for; pieces are those of `protocol.pieces`.
    """

    commits: int
    first: int
    reason: str


class TensorDigests(Message, frozen=True):
    """node -> coordinator: digests of pieces `first ..` of `total`; the sum over all is D."""

    commits: int
    first: int
    total: int
    digests: tuple[int, ...]


class Rederive(Message, frozen=True):
    """coordinator -> node: replay these pieces with the reference kernel, keep what comes out.

    From the node's newest checkpoint whose D the ledger states. No pieces: rebuild the whole master from the
    base and compare every digest the ledger states.
    """

    commits: int
    pieces: tuple[int, ...]
    reason: str
    base: int  # not 0: from the base, whatever checkpoint there is; another number is another question


class Rederived(Message, frozen=True):
    """node -> coordinator: what the master held and what replay gave; it holds the latter now.

    Unasked, with no pieces and the damaged tensors in `reason`: the node found and mended damage itself.
    """

    commits: int
    pieces: tuple[int, ...]
    held: tuple[int, ...]  # digest per piece; one D for a whole rebuild
    derived: tuple[int, ...]  # likewise
    digest: int  # D of the master now
    contradicted: int  # 1 + first round whose stated D the replay contradicts, 0 for none
    by: str  # kernel and versions
    reason: str
    since: int  # rounds the state had that replay began from; 0: the base


class EvidenceAsk(Message, frozen=True):
    """coordinator -> node: the per-prompt rewards behind a unit of the open round, from prompt `first` on."""

    unit: Unit
    first: int


class Evidence(Message, frozen=True):
    """node -> coordinator: rewards of prompts `first ..` of a unit with `total`; none of 0 were kept here."""

    unit: Unit
    first: int
    total: int
    scores: tuple[float, ...]


class Bundle(Message, frozen=True):
    """coordinator -> node: several messages in order, each as a frame of its own. Bundles hold no Bundles."""

    frames: tuple[bytes, ...]


AnyMessage: TypeAlias = (
    Hello
    | Welcome
    | Refuse
    | Rehello
    | Fetch
    | Entries
    | Assign
    | Result
    | Ack
    | Failed
    | Release
    | Cancel
    | Commit
    | Applied
    | NodeBeat
    | CoordBeat
    | Bye
    | Enrol
    | Enrolled
    | Return
    | BlobAsk
    | Blob
    | DigestAsk
    | TensorDigests
    | Rederive
    | Rederived
    | EvidenceAsk
    | Evidence
    | Bundle
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the schema table."""

    tag: int
    type: type[Message]
    sender: str  # "node", "coordinator", "peer" (to or from a peer socket), two of them, or "any"
    limit: int  # largest encoded size in bytes
    answer: str  # what answers it, for the reader


_KB = 1024
_MB = 1024 * 1024

SCHEMA: tuple[Rule, ...] = (
    Rule(1, Hello, "node", 4 * _KB, "Welcome, Refuse"),
    Rule(2, Welcome, "coordinator", 8 * _MB, ""),
    Rule(3, Refuse, "coordinator", 2 * _KB, ""),
    Rule(4, Rehello, "coordinator", 16, "Hello"),
    Rule(5, Fetch, "any", 32, "Entries"),
    Rule(6, Entries, "any", 8 * _MB, ""),
    Rule(7, Assign, "coordinator", 96, "Result, Failed"),
    Rule(8, Result, "node", 48 * _KB, "Ack"),
    Rule(9, Ack, "coordinator", 512, ""),
    Rule(10, Failed, "node", 2 * _KB, ""),
    Rule(11, Release, "node", 2 * _KB, "Bye"),
    Rule(12, Cancel, "coordinator", 64, ""),
    Rule(13, Commit, "coordinator", 8 * _MB, "Applied"),
    Rule(14, Applied, "node", 64, ""),
    Rule(15, NodeBeat, "node", 4 * _KB, "CoordBeat"),
    Rule(16, CoordBeat, "coordinator", 4 * _KB, ""),
    Rule(17, Bye, "coordinator", 2 * _KB, ""),
    Rule(18, Enrol, "node", 512, "Enrolled, Refuse"),
    Rule(19, Enrolled, "coordinator", 64, ""),
    Rule(20, Bundle, "coordinator", MOST_FRAMES * (LONGEST_FRAME + 3) + 8, "what is in it"),
    Rule(22, BlobAsk, "node, peer", 64, "Blob, Refuse, Sorry"),
    Rule(23, Blob, "coordinator, peer", BLOB_PART + 128, ""),
    Rule(26, DigestAsk, "coordinator", 2 * _KB, "TensorDigests"),
    Rule(27, TensorDigests, "node", 24 * _KB, ""),
    Rule(28, Rederive, "coordinator", 3 * _KB, "Rederived"),
    Rule(29, Rederived, "node", 4 * _KB, ""),
    Rule(30, EvidenceAsk, "coordinator", 64, "Evidence"),
    Rule(31, Evidence, "node", 20 * _KB, ""),
    Rule(50, Return, "coordinator", 8 * _MB, "NodeBeat"),
)
