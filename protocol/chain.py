"""The chain of a run's entries: what each means after the ones before it, checked before it enters.

Lives here: `Chain`, with every rule of docs/ledger-format.md. No files: `ledger.py` reads and writes those.
Forks are `forks.py`'s. Called by whoever keeps a ledger: the cores of coordinator and node, and `ledger.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from protocol.bodies import coefficients_of
from protocol.counting import nth, rounds
from protocol.entries import (
    COMPLETE,
    GENESIS,
    AmendBody,
    CommitBody,
    Entry,
    EntryKind,
    LockBody,
    MalformedEntry,
    RosterBody,
    ScoreBody,
    parse,
    signed_by,
)
from protocol.errors import UserError
from protocol.fields import ALPHA, EXACT_SIGMA, LARGEST_ALPHA
from protocol.growing import Growing
from protocol.lock import Lock, LockError, lock_from_bytes
from protocol.shaping import MAX_MEMBERS


class BrokenChain(UserError):
    """An entry that may not follow the ones before it. `round` is where the chain stood."""

    def __init__(self, reason: str, round: int) -> None:
        super().__init__(f"after {rounds(round)}: {reason}")
        self.reason = reason
        self.round = round


class Chain:
    """A verified chain. `append` either accepts an entry whole or raises and leaves the chain as it was."""

    def __init__(self, entries: Iterable[bytes | Entry] = ()) -> None:
        self._lock: Lock | None = None
        self._entries: Growing[Entry] = Growing()
        self._commits: Growing[Entry] = Growing()
        self._digest: int | None = None  # D of the tip's state, where an entry states it
        self._amends: list[AmendBody] = []
        self._roster: dict[int, tuple[bytes, str]] = {}
        self._numbers: dict[int, bytes] = {}  # every roster number ever given, and the key it was given to
        self._signer = b""  # key of the current term
        for entry in entries:
            self.append(entry)

    def __repr__(self) -> str:
        return f"<chain of {self.height} entries up to {self.tip.hex()[:16]}>"

    def copy(self) -> Chain:
        """An independent chain with the same entries; entries themselves are shared, they are immutable."""
        twin = Chain()
        for name, value in vars(self).items():
            setattr(twin, name, value.copy() if isinstance(value, Growing | list | dict) else value)
        return twin

    def prefix(self, height: int) -> Chain:
        """An independent chain of the first `height` entries, which need not be verified again."""
        twin = Chain()
        if not height:
            return twin
        twin._lock = self._lock
        *before, last = self._entries[:height]
        for entry in before:
            twin._adopt(entry, self.lock, b"", False)
        signer = signed_by(last, twin.trusted)
        assert signer is not None, "it was verified when it entered"
        twin._adopt(last, self.lock, signer, self._moves(last, self.lock))
        return twin

    # ------------------------------------------------------------ what it says

    @property
    def lock(self) -> Lock:
        """The run's lock; BrokenChain while the chain is empty."""
        if self._lock is None:
            raise BrokenChain("the chain is empty, it has no lock yet", 0)
        return self._lock

    @property
    def entries(self) -> Sequence[Entry]:
        """All entries in order."""
        return self._entries

    @property
    def commits(self) -> Sequence[Entry]:
        """The commit of round k is element k."""
        return self._commits

    def announces(self, round: int, root: bytes) -> bool:
        """Whether a commit after this round carries the root of a snapshot."""
        bodies = (entry.body for entry in self._commits[round:])
        return any(isinstance(body, CommitBody) and body.snapshot == root for body in bodies)

    @property
    def height(self) -> int:
        """Number of entries."""
        return len(self._entries)

    @property
    def tip(self) -> bytes:
        """Hash of the last entry; 32 zero bytes while empty."""
        return self._entries[-1].hash if self._entries else GENESIS

    @property
    def round(self) -> int:
        """The round the next commit closes: the number of commits so far."""
        return len(self._commits)

    @property
    def term(self) -> int:
        """Term of the last entry, 0 while empty."""
        return self._entries[-1].term if self._entries else 0

    @property
    def ended(self) -> bool:
        """Whether an END entry closed the run."""
        return bool(self._entries) and self._entries[-1].kind is EntryKind.END

    @property
    def roster(self) -> dict[int, tuple[bytes, str]]:
        """Nodes admitted now: number -> (CURVE key, label)."""
        return self._roster

    @property
    def numbers(self) -> Mapping[int, bytes]:
        """Every roster number ever given, also to keys that are revoked now, and the key it was given to."""
        return self._numbers

    @property
    def next_number(self) -> int:
        """The roster number of the next key that is admitted: each is given once."""
        return max(self._numbers, default=-1) + 1

    @property
    def trusted(self) -> tuple[bytes, ...]:
        """Ed25519 keys that may sign the next entry."""
        keys = tuple(bytes.fromhex(key) for key in self.lock.trusted)
        return next((a.trusted for a in self._amended(self.round) if a.trusted), keys)

    @property
    def signer(self) -> bytes:
        """Ed25519 key that signed the last entry, which need not be trusted any more; b"" while empty."""
        return self._signer

    @property
    def digest(self) -> int | None:
        """D of the tip's state; None while no entry states it: the tip is a commit that moved the weights."""
        return self._digest

    def digest_at(self, round: int) -> int | None:
        """D of the state after `round` commits, None when no entry states it."""
        if 0 <= round < self.round:
            return self._commits[round].digest
        return self._digest if round == self.round else None

    @property
    def amendments(self) -> tuple[AmendBody, ...]:
        """Every change of the lock's settings, in the order of their entries."""
        return tuple(self._amends)

    def alpha_at(self, round: int) -> float:
        """The lock's schedule or the amendment in force."""
        return next((a.alpha for a in self._amended(round) if a.alpha is not None), self.lock.alpha_at(round))

    def sigma_at(self, round: int) -> float:
        """The lock's schedule or the amendment in force."""
        return next((a.sigma for a in self._amended(round) if a.sigma is not None), self.lock.sigma_at(round))

    def members_at(self, round: int) -> int:
        """N of a round: the lock's or the amendment's in force."""
        return next((a.members for a in self._amended(round) if a.members is not None), self.lock.members)

    def _amended(self, round: int) -> list[AmendBody]:
        """Amendments in force, the deciding one first: the latest start wins, then the later entry."""
        active = [(a.from_round, k, a) for k, a in enumerate(self._amends) if a.from_round <= round]
        return [a for _, _, a in sorted(active, key=lambda item: item[:2], reverse=True)]

    # ------------------------------------------------------------ what may follow

    def append(self, item: bytes | Entry) -> Entry:
        """Verify one entry against all before it and take it in; BrokenChain with the reason if not."""
        try:
            entry = parse(item) if isinstance(item, bytes) else item
        except MalformedEntry as error:
            raise BrokenChain(str(error), self.round) from error
        self._check_link(entry)
        lock = self._read_lock(entry) if not self._entries else self.lock
        signer = self._check_signature(entry, lock)
        self._check_digest(entry, lock)
        self._check_body(entry)
        moves = self._moves(entry, lock)
        self._adopt(entry, lock, signer, moves)
        return entry

    def _refuse(self, reason: str) -> BrokenChain:
        return BrokenChain(reason, self.round)

    def _check_link(self, entry: Entry) -> None:
        if self.ended:
            raise self._refuse("an entry follows the END entry")
        if (entry.kind is EntryKind.LOCK) != (not self._entries):
            raise self._refuse("the first entry, and only the first, must be the lock")
        if entry.parent != self.tip:
            raise self._refuse(
                f"entry {self.height} names {entry.parent.hex()[:16]} as its parent, the chain's tip is "
                f"{self.tip.hex()[:16]}"
            )
        if entry.round != self.round:
            raise self._refuse(f"the {entry.kind.name} entry says it comes after {rounds(entry.round)}")
        if entry.term < self.term:
            raise self._refuse(f"term {entry.term} follows term {self.term}: terms only grow")
        if self._entries and entry.term == self.term and entry.nonce != self._entries[-1].nonce:
            raise self._refuse(f"term {entry.term} was started twice: its entries carry different nonces")

    def _read_lock(self, entry: Entry) -> Lock:
        assert isinstance(entry.body, LockBody)
        try:
            lock = lock_from_bytes(entry.body.lock)
        except LockError as error:
            raise self._refuse(str(error)) from error
        if not lock.trusted:
            raise self._refuse("the lock trusts no coordinator key, so nothing could be signed")
        return lock

    def _check_signature(self, entry: Entry, lock: Lock) -> bytes:
        keys = self.trusted if self._entries else tuple(bytes.fromhex(key) for key in lock.trusted)
        same_term = bool(self._entries) and entry.term == self.term
        if same_term and self._signer in keys:
            keys = (self._signer, *(key for key in keys if key != self._signer))
        signer = signed_by(entry, keys)
        if signer is None:
            raise self._refuse(f"the {entry.kind.name} entry is not signed by a key this run trusts")
        if same_term and signer != self._signer:
            raise self._refuse(f"term {entry.term} has entries of two signing keys")
        return signer

    def _check_digest(self, entry: Entry, lock: Lock) -> None:
        known = lock.digest if not self._entries else self._digest
        if known is not None and entry.digest != known:
            raise self._refuse(
                f"the {entry.kind.name} entry states digest {entry.digest:016x}, the state's is {known:016x}"
            )

    def _check_body(self, entry: Entry) -> None:
        body = entry.body
        if isinstance(body, CommitBody):
            self._check_commit(body)
        elif isinstance(body, RosterBody):
            self._check_roster(body)
        elif isinstance(body, AmendBody):
            self.check_amend(body)
        elif isinstance(body, ScoreBody):
            self._check_score(body)

    def _check_commit(self, body: CommitBody) -> None:
        total = self.members_at(self.round)
        if (body.alpha, body.sigma) != (self.alpha_at(self.round), self.sigma_at(self.round)):
            raise self._refuse(f"alpha {body.alpha} and sigma {body.sigma} are not the schedule's")
        indices = [member.index for member in body.members]
        if len(indices) < 2:
            raise self._refuse(f"a commit needs at least 2 members, this one has {len(indices)}")
        self._check_order(indices, total, "members")
        if self.lock.mirrored and (
            indices[::2] != [k - 1 for k in indices[1::2]] or any(k % 2 for k in indices[::2])
        ):
            raise self._refuse("a mirrored pair is not whole")
        for member in body.members:
            self._check_member(*member)
        self._check_voids(body, set(indices), total)

    def _check_order(self, indices: Sequence[int], total: int, what: str) -> None:
        if any(a >= b for a, b in pairwise(indices)) or (indices and indices[-1] >= total):
            raise self._refuse(f"{what} must be in ascending order, each once, below {total}")

    def _check_member(self, index: int, reward: float, evaluator: int) -> None:
        lock = self.lock
        if not lock.mean_ok(reward):
            raise self._refuse(
                f"member {index} has reward {reward}, outside {lock.reward_low} .. {lock.reward_high}"
            )
        if evaluator not in self._numbers:
            raise self._refuse(
                f"member {index} was evaluated by number {evaluator}, which is not in the roster"
            )

    def _check_voids(self, body: CommitBody, present: set[int], total: int) -> None:
        void = [index for index, _ in body.voids]
        self._check_order(void, total, "void members")
        if present & set(void):
            raise self._refuse(f"member {min(present & set(void))} is both counted and void")
        if body.closed != COMPLETE:
            return
        excused = set(void)
        if self.lock.mirrored:  # the partner of a void member is left out with it
            excused |= {index ^ 1 for index in void}
        missing = set(range(total)) - present - excused
        if missing:
            raise self._refuse(f"member {min(missing)} is missing from a commit that says it is complete")

    def _check_roster(self, body: RosterBody) -> None:
        if not body.admitted and not body.revoked:
            raise self._refuse("a roster entry that changes nothing")
        numbers = [admission.number for admission in body.admitted]
        keys = [admission.key for admission in body.admitted]
        if len(set(numbers)) < len(numbers) or self._numbers.keys() & set(numbers):
            raise self._refuse("a roster number is given twice")
        gone = set(body.revoked)
        if len(gone) < len(body.revoked) or not gone <= self._roster.keys():
            raise self._refuse("a roster number is revoked that is not admitted")
        staying = {key for number, (key, _) in self._roster.items() if number not in gone}
        if len(set(keys)) < len(keys) or staying & set(keys):
            raise self._refuse("a node's key is admitted twice")

    def check_amend(self, body: AmendBody) -> None:
        """BrokenChain with the reason when this amendment may not follow."""
        if body.from_round < self.round:
            raise self._refuse(f"an amendment is for {nth(body.from_round)}, which is closed")
        if (body.alpha, body.sigma, body.members, body.trusted) == (None, None, None, ()):
            raise self._refuse("an amendment changes nothing")
        alpha, sigma, count = body.alpha, body.sigma, body.members
        if alpha is not None and not (ALPHA.accepts(alpha) and (alpha > 0 or not self.lock.update)):
            raise self._refuse(
                f"alpha = {alpha:g} cannot be: it has to be above 0 and at most {LARGEST_ALPHA:g}"
            )
        if sigma is not None and not EXACT_SIGMA.accepts(sigma):
            raise self._refuse(f"sigma = {sigma:g} cannot be: it has to be a positive bf16 number")
        if count is not None and not (2 <= count <= MAX_MEMBERS and not (self.lock.mirrored and count % 2)):
            even = "an even number" if self.lock.mirrored else "a number"
            raise self._refuse(f"members = {count} cannot be: it has to be {even} from 2 to {MAX_MEMBERS}")

    def _check_score(self, body: ScoreBody) -> None:
        if body.state_round > self.round:
            raise self._refuse(f"a score after {rounds(body.state_round)}, which are not reached yet")
        if body.prompts < 1 or not body.sums or body.correct > body.prompts:
            raise self._refuse(
                "a score without prompts, without sums or with more correct answers than prompts"
            )
        try:
            total = math.fsum(body.sums)
        except (OverflowError, ValueError):  # finite numbers whose sum is none; infinities of both signs
            raise self._refuse("a score whose sums cannot be added") from None
        if not math.isfinite(total) or total / body.prompts != body.mean:
            raise self._refuse("a score whose mean is not that of its sums")
        if not self.lock.mean_ok(body.mean):
            raise self._refuse(
                f"a score of {body.mean}, outside {self.lock.reward_low} .. {self.lock.reward_high}"
            )

    def _moves(self, entry: Entry, lock: Lock) -> bool:
        try:
            return coefficients_of(lock, entry) is not None
        except ValueError as error:  # finite rewards and a finite alpha can still overflow a step
            raise self._refuse(f"the commit makes no legal step: {error}") from error

    def _adopt(self, entry: Entry, lock: Lock, signer: bytes, moves: bool) -> None:
        self._lock = lock
        self._signer = signer
        self._digest = None if moves else entry.digest
        body = entry.body
        if isinstance(body, CommitBody):
            self._commits.append(entry)
        elif isinstance(body, AmendBody):
            self._amends.append(body)
        elif isinstance(body, RosterBody):
            for number in body.revoked:
                del self._roster[number]
            for admission in body.admitted:
                self._numbers[admission.number] = admission.key
                self._roster[admission.number] = (admission.key, admission.name)
        self._entries.append(entry)
