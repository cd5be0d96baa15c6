"""What ledger entries say: the payload of every kind, an entry's fields, what a commit does to the weights.

Pure, and free of msgpack and signatures, so that whoever only moves weights needs neither. Bytes and
signatures are `entries.py`'s, the rules of their order `chain.py`'s.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias, cast, overload

from protocol.counting import nth
from protocol.lock import Lock
from protocol.seeds import member_seed, rounding_seed
from protocol.shaping import Coefficients, Shaping, Step, coefficients, make_step

HASH = 32  # bytes of an entry's name
SIGNATURE = 64


class EntryKind(IntEnum):
    """First element of the body."""

    LOCK = 0
    COMMIT = 1
    ROSTER = 2
    AMEND = 3
    SCORE = 4
    END = 5


COMPLETE = 0  # a commit closed because every member was in or void
QUORUM = 1  # closed by the plan's quorum, members are missing


class MemberReward(NamedTuple):
    """One row of a commit, 12 bytes. `evaluator`: a roster number. The member's seed follows from the run."""

    index: int  # type: ignore[assignment]  # a row has no use for tuple.index
    reward: float
    evaluator: int


ROW = struct.Struct("<HdH")  # index, reward, evaluator


class Rows(Sequence[MemberReward]):
    """The rows of a commit as they lie in its entry, read when they are asked for.

    A chain keeps every commit of a run: 12 bytes a row and member here, some hundred as objects. Equal to any
    sequence of the same rows.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes | memoryview) -> None:
        """`packed`: whole rows; ValueError when it is cut inside one."""
        if len(packed) % ROW.size:
            raise ValueError(f"the member table has {len(packed)} bytes, no multiple of {ROW.size}")
        self.packed = packed

    @classmethod
    def of(cls, rows: Iterable[tuple[int, float, int]]) -> Rows:
        """Packed now; struct.error when a number does not fit."""
        return cls(b"".join(starmap(ROW.pack, rows)))

    def __len__(self) -> int:
        return len(self.packed) // ROW.size

    def __iter__(self) -> Iterator[MemberReward]:
        return map(MemberReward._make, ROW.iter_unpack(self.packed))

    @overload
    def __getitem__(self, at: int) -> MemberReward: ...
    @overload
    def __getitem__(self, at: slice) -> Rows: ...
    def __getitem__(self, at: int | slice) -> MemberReward | Rows:
        if isinstance(at, slice):
            return Rows.of([*self][at])
        return MemberReward._make(ROW.unpack_from(self.packed, range(len(self))[at] * ROW.size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    def __hash__(self) -> int:
        return tuple(self).__hash__()

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (bytes(self.packed),)  # a view of an entry cannot travel to another process


@dataclass(frozen=True, slots=True)
class LockBody:
    """The first entry: the lock's canonical bytes."""

    lock: bytes


@dataclass(frozen=True, slots=True)
class CommitBody:
    """Closes a round: what moves the weights. `voids`: (index, reason) of members that could not be had."""

    alpha: float
    sigma: float
    members: Sequence[MemberReward]
    voids: tuple[tuple[int, str], ...] = ()
    closed: int = COMPLETE
    snapshot: bytes = b""


@dataclass(frozen=True, slots=True)
class Admission:
    """A node's roster number, its 32-byte CURVE public key and its label."""

    number: int
    key: bytes
    name: str


@dataclass(frozen=True, slots=True)
class RosterBody:
    """Keys admitted and roster numbers revoked."""

    admitted: tuple[Admission, ...] = ()
    revoked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AmendBody:
    """New settings from round `from_round` on; None and () change nothing, `trusted` replaces the list."""

    from_round: int
    alpha: float | None = None
    sigma: float | None = None
    members: int | None = None
    trusted: tuple[bytes, ...] = ()

    def words(self) -> str:
        """What changes and from when on, for a person."""
        numbers = {"alpha": self.alpha, "sigma": self.sigma, "members": self.members}
        said = [f"{name} {value:g}" for name, value in numbers.items() if value is not None]
        if self.trusted:
            said.append(f"trusted keys {', '.join(key.hex()[:16] for key in self.trusted)}")
        return f"{', '.join(said)} from {nth(self.from_round)} on"


@dataclass(frozen=True, slots=True)
class ScoreBody:
    """Held-out result of the state after `state_round` commits: mean = fsum(sums) / prompts, by chunk."""

    state_round: int
    prompts: int
    mean: float
    correct: int
    sums: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EndBody:
    """The run is over; nothing follows."""

    reason: str


Body: TypeAlias = LockBody | CommitBody | RosterBody | AmendBody | ScoreBody | EndBody


@dataclass(frozen=True, slots=True)
class Entry:
    """One parsed entry. `digest` is D of the state before it; `raw` is everything from the length on."""

    kind: EntryKind
    parent: bytes
    term: int
    nonce: bytes
    round: int
    digest: int
    body: Body
    raw: bytes
    hash: bytes

    @property
    def signature(self) -> bytes:
        """Ed25519 over `hash`."""
        return self.raw[-SIGNATURE:]


def coefficients_of(lock: Lock, entry: Entry) -> Coefficients | None:
    """The members' coefficients in a commit's step; None when it moves nothing or is no commit."""
    body = entry.body
    if not isinstance(body, CommitBody) or not lock.update:
        return None
    rewards = [member.reward for member in body.members]
    return coefficients(rewards, body.alpha, cast(Shaping, lock.shaping), lock.clip, lock.std_floor)


def step_of(lock: Lock, entry: Entry) -> Step | None:
    """What a commit does to the master, ready for the kernels; None when it moves nothing or is no commit."""
    found = coefficients_of(lock, entry)
    if found is None:
        return None
    body = cast(CommitBody, entry.body)
    seeds = [member_seed(lock.run_id, entry.round, member.index, lock.mirrored) for member in body.members]
    return make_step(
        found, seeds, mirrored=lock.mirrored, rounding_seed=rounding_seed(lock.run_id, entry.round)
    )
