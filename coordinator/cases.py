"""Audits in the making: values only.

Pure. `auditing.py` acts on them. Part of `state.State`; imports protocol only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from protocol.messages import Unit

REFERENCES = 8  # members per side whose scores give the prompts' means


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
    mine: tuple[Half, ...] = ()  # references of the first, measured by the same node
    theirs: tuple[Half, ...] = ()  # and of the second, measured by others
    auditor: bytes = b""
    second: Half | None = None
    since: float = 0.0  # when the second came
    asked: float = 0.0
    number: int = -1  # among the audits; given by `Audits.begun`

    @property
    def halves(self) -> tuple[Half, ...]:
        second = () if self.second is None else (self.second,)
        return (self.first, *second, *self.mine, *self.theirs)

    @property
    def keys(self) -> set[bytes]:
        """CURVE keys of all who have a part in it."""
        return {half.key for half in self.halves} | ({self.auditor} if self.auditor else set())

    @property
    def hungry(self) -> bool:
        """Whether a result of any other node would be a reference."""
        return not self.second and len(self.theirs) < REFERENCES

    def with_halves(self, halves: tuple[Half, ...]) -> Case:
        """The case with its four parts replaced, in the order of `halves`; there is a second."""
        first, second, *others = halves
        mine = tuple(others[: len(self.mine)])
        return replace(self, first=first, second=second, mine=mine, theirs=tuple(others[len(mine) :]))

    def with_reference(self, half: Half) -> Case:
        """One more member on the same prompts, on the side it belongs to, if there is room."""
        mine, theirs, unit, audited = self.mine, self.theirs, half.unit, self.first.unit
        same = half.key == self.first.key
        if len(mine if same else theirs) >= REFERENCES:
            return self
        if (unit.round, unit.first, unit.last) != (self.round, audited.first, audited.last):
            return self
        if any(unit.member == other.unit.member for other in self.halves):
            return self
        return replace(self, mine=(*mine, half)) if same else replace(self, theirs=(*theirs, half))


class Audits(msgspec.Struct, frozen=True):
    """The audits of the open round, and those of the last that wait for evidence.

    Thousands of results pass while a hundred audits are open: whom a message concerns is found by key.
    """

    by_number: Mapping[int, Case] = {}  # the oldest first
    recent: tuple[Half, ...] = ()  # the newest results of the round, for references
    until: float | None = None  # a complete round waits until then
    of: Mapping[bytes, tuple[int, ...]] = {}  # CURVE key -> cases it has a part in, or is to have
    idle: tuple[int, ...] = ()  # cases without a second node
    hungry: tuple[int, ...] = ()  # cases that lack references measured by others

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

    def wanting(self, key: bytes) -> list[Case]:
        """Cases that a result of this node might be a reference of."""
        part = self.of.get(key, ())
        numbers = sorted({*self.hungry, *part}) if self.hungry else sorted(part)
        return [case for case in map(self.by_number.__getitem__, numbers) if not case.second]

    def begun(self, case: Case) -> Audits:
        """With one more, which gets the next number."""
        return self.put(replace(case, number=max(self.by_number, default=-1) + 1))

    def put(self, case: Case) -> Audits:
        """With a case as it is now."""
        number = case.number
        old = self.by_number.get(number)
        return replace(
            self,
            by_number={**self.by_number, number: case},
            of=self._parts(number, old.keys if old else set(), case.keys),
            idle=_listed(self.idle, number, not case.auditor),
            hungry=_listed(self.hungry, number, case.hungry),
        )

    def ended(self, cases: Iterable[Case]) -> Audits:
        """These cases are over."""
        left = self
        for case in cases:
            left = replace(
                left,
                by_number={k: other for k, other in left.by_number.items() if k != case.number},
                of=left._parts(case.number, case.keys, set()),
                idle=_listed(left.idle, case.number, False),
                hungry=_listed(left.hungry, case.number, False),
            )
        return left

    def without(self, key: bytes) -> Audits:
        """What does not rest on anything that this node measured."""
        left = self.ended(case for case in self.about(key) if key in (case.first.key, case.auditor))
        for case in left.about(key):
            left = left.put(replace(case, mine=_others(case.mine, key), theirs=_others(case.theirs, key)))
        return replace(left, recent=_others(self.recent, key))

    def closed(self) -> Audits:
        """The round is: what lacks a second result will not get one."""
        left = self.ended(case for case in self.cases if not case.second)
        return replace(left, recent=(), until=None)

    def _parts(self, number: int, before: set[bytes], after: set[bytes]) -> Mapping[bytes, tuple[int, ...]]:
        if before == after:
            return self.of
        of = dict(self.of)
        for key in before - after:
            of[key] = _listed(of[key], number, False)
            if not of[key]:
                del of[key]
        for key in after - before:
            of[key] = (*of.get(key, ()), number)
        return of


def _listed(numbers: tuple[int, ...], number: int, there: bool) -> tuple[int, ...]:
    if (number in numbers) == there:
        return numbers
    return (*numbers, number) if there else tuple(other for other in numbers if other != number)


def _others(halves: tuple[Half, ...], key: bytes) -> tuple[Half, ...]:
    return tuple(half for half in halves if half.key != key)
