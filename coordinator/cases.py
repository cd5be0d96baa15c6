"""Audits in the making: values only.

Pure. `auditing.py` acts on them. Part of `state.State`; imports protocol only.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from protocol.messages import Unit

REFERENCES = 8  # members per side whose scores give the prompts' means
RECENT = 2 * REFERENCES + 2  # results on the same prompts remembered as references
OWN = REFERENCES + 1  # and of one node


class Half(msgspec.Struct, frozen=True):
    """One node's measurement of a unit: what it committed to, and the scores as they come in."""

    key: bytes
    unit: Unit
    evidence: bytes  # hash it sent with the result
    sums: tuple[float, ...]
    engine: bytes  # fingerprint of what measured it, b"" for unknown
    scores: tuple[float, ...] = ()
    done: bool = False  # all scores are here and fit the hash
    fault: str = ""  # why it cannot be used

    @property
    def missing(self) -> bool:
        """Whether more is expected."""
        return not self.done and not self.fault


class Case(msgspec.Struct, frozen=True):
    """One audit: the first result, the second, and other members on the same prompts for each of them."""

    round: int
    first: Half
    mine: tuple[Half, ...] = ()  # references of the first, measured by the same node; from the second on
    theirs: tuple[Half, ...] = ()  # and of the second, measured by others
    auditor: bytes = b""
    second: Half | None = None
    since: float = 0.0  # when the second came
    asked: float = 0.0
    number: int = -1  # among the audits; given by `Audits.begin`

    @property
    def pair(self) -> tuple[Half, ...]:
        """The first result and, once it is there, the second."""
        return (self.first,) if self.second is None else (self.first, self.second)

    @property
    def halves(self) -> tuple[Half, ...]:
        return (*self.pair, *self.mine, *self.theirs)

    @property
    def keys(self) -> set[bytes]:
        """CURVE keys of all who have a part in it."""
        return {half.key for half in self.halves} | ({self.auditor} if self.auditor else set())

    def with_halves(self, halves: tuple[Half, ...]) -> Case:
        """The case with its four parts replaced, in the order of `halves`; there is a second."""
        first, second, *others = halves
        mine = tuple(others[: len(self.mine)])
        return replace(self, first=first, second=second, mine=mine, theirs=tuple(others[len(mine) :]))


class Audits(msgspec.Struct):
    """The audits of the open round, and those of the last that wait for evidence.

    Thousands of results pass while a hundred audits are open: whom a message concerns is found by key. A
    value, like all that a state holds: what changes it in place is called on a `copy` of one's own.
    """

    by_number: dict[int, Case] = {}  # the oldest first
    recent: dict[tuple[int, int], tuple[Half, ...]] = {}  # by first and last chunk, the newest results
    own: dict[bytes, tuple[Half, ...]] = {}  # CURVE key -> its newest results of the round
    until: float | None = None  # a complete round waits until then
    of: dict[bytes, tuple[int, ...]] = {}  # CURVE key -> cases it has a part in, or is to have
    idle: tuple[int, ...] = ()  # cases without a second node

    def copy(self) -> Audits:
        """One that may be changed while this one stays."""
        tables = {name: getattr(self, name).copy() for name in ("by_number", "recent", "own", "of")}
        return replace(self, **tables)

    @property
    def cases(self) -> tuple[Case, ...]:
        """All of them, the oldest first."""
        return tuple(self.by_number.values())

    def unanswered(self, round: int) -> list[Case]:
        """The audits of a round that no second node has measured yet."""
        return [case for case in self.by_number.values() if case.round == round and not case.second]

    def about(self, key: bytes) -> list[Case]:
        """The cases that a node has a part in."""
        return [self.by_number[number] for number in self.of.get(key, ())]

    def references(self, audited: Half) -> tuple[tuple[Half, ...], tuple[Half, ...]]:
        """Other members on the same prompts, by the same node and by others: the newest of each."""
        unit = audited.unit
        at = (unit.first, unit.last)
        mine = [half for half in self.own.get(audited.key, ()) if (half.unit.first, half.unit.last) == at]
        theirs = [half for half in self.recent.get(at, ()) if half.key != audited.key]
        taken = {unit.member}
        return _some(mine, taken), _some(theirs, taken)

    # ------------------------------------------------------------ in place

    def remember(self, half: Half) -> None:
        """A first result: it may serve as a reference."""
        at = (half.unit.first, half.unit.last)
        self.recent[at] = (*self.recent.get(at, ())[1 - RECENT :], half)
        self.own[half.key] = (*self.own.get(half.key, ())[1 - OWN :], half)

    def begin(self, case: Case) -> None:
        """One more, which gets the next number."""
        self.put(replace(case, number=next(reversed(self.by_number), -1) + 1))

    def put(self, case: Case) -> None:
        """A case is as it is now."""
        number = case.number
        old = self.by_number.get(number)
        self.by_number[number] = case
        self._part(number, old.keys if old else set(), case.keys)
        self.idle = _listed(self.idle, number, not case.auditor)

    def end(self, cases: Iterable[Case]) -> None:
        """These cases are over."""
        for case in cases:
            del self.by_number[case.number]
            self._part(case.number, case.keys, set())
            self.idle = _listed(self.idle, case.number, False)

    def forget(self, key: bytes) -> None:
        """Drop what rests on anything that this node measured; what it was to measure, it still may."""
        self.end([case for case in self.about(key) if key in {half.key for half in case.pair}])
        for case in self.about(key):
            self.put(replace(case, mine=_others(case.mine, key), theirs=_others(case.theirs, key)))
        for half in self.own.pop(key, ()):
            at = (half.unit.first, half.unit.last)
            self.recent[at] = _others(self.recent[at], key)

    def close(self) -> None:
        """The round is closed: what lacks a second result will not get one."""
        self.end([case for case in self.cases if not case.second])
        self.recent, self.own, self.until = {}, {}, None

    def _part(self, number: int, before: set[bytes], after: set[bytes]) -> None:
        """Note who has a part in a case and who has none any more."""
        for key in before - after:
            left = _listed(self.of[key], number, False)
            if left:
                self.of[key] = left
            else:
                del self.of[key]
        for key in after - before:
            self.of[key] = (*self.of.get(key, ()), number)


def _listed(numbers: tuple[int, ...], number: int, there: bool) -> tuple[int, ...]:
    if (number in numbers) == there:
        return numbers
    return (*numbers, number) if there else tuple(other for other in numbers if other != number)


def _some(halves: Iterable[Half], taken: set[int]) -> tuple[Half, ...]:
    """The newest of them on members that are not `taken`, each once, as many as are of use."""
    found: list[Half] = []
    for half in reversed([*halves]):
        if half.unit.member not in taken and len(found) < REFERENCES:
            taken.add(half.unit.member)
            found.append(half)
    return tuple(found)


def _others(halves: tuple[Half, ...], key: bytes) -> tuple[Half, ...]:
    return tuple(half for half in halves if half.key != key)
