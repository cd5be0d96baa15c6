"""What ledger entries say: the payload of every kind, an entry's fields, what a commit does to the weights.

Pure, and free of msgpack and signatures, so that whoever only moves weights needs neither. Bytes and
signatures are `entries.py`'s, the rules of their order `chain.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias, cast

from protocol.lock import Lock
from protocol.seeds import member_seed, rounding_seed
from protocol.shaping import Shaping, Step, coefficients, make_step

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


@dataclass(frozen=True, slots=True)
class LockBody:
    """The first entry: the lock's canonical bytes."""

    lock: bytes


@dataclass(frozen=True, slots=True)
class CommitBody:
    """Closes a round: what moves the weights. `voids`: (index, reason) of members that could not be had."""

    alpha: float
    sigma: float
    members: tuple[MemberReward, ...]
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


def step_of(lock: Lock, entry: Entry) -> Step | None:
    """What a commit does to the master, ready for the kernels; None when it moves nothing or is no commit."""
    body = entry.body
    if not isinstance(body, CommitBody) or not lock.update:
        return None
    rewards = [member.reward for member in body.members]
    found = coefficients(rewards, body.alpha, cast(Shaping, lock.shaping), lock.clip, lock.std_floor)
    seeds = [member_seed(lock.run_id, entry.round, member.index, lock.mirrored) for member in body.members]
    return make_step(
        found, seeds, mirrored=lock.mirrored, rounding_seed=rounding_seed(lock.run_id, entry.round)
    )
