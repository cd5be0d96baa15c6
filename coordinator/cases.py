"""Audits in the making: values only.

Pure. `auditing.py` acts on them. Part of `state.State`; imports protocol only.
"""

from __future__ import annotations

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

    @property
    def halves(self) -> tuple[Half, ...]:
        second = () if self.second is None else (self.second,)
        return (self.first, *second, *self.mine, *self.theirs)

    def with_halves(self, halves: tuple[Half, ...]) -> Case:
        """The case with its four parts replaced, in the order of `halves`; there is a second."""
        first, second, *others = halves
        mine = tuple(others[: len(self.mine)])
        return replace(self, first=first, second=second, mine=mine, theirs=tuple(others[len(mine) :]))

    def with_reference(self, half: Half) -> Case:
        """One more member on the same prompts, on the side it belongs to, if there is room."""
        mine, theirs = self.mine, self.theirs
        same = (half.unit.first, half.unit.last) == (self.first.unit.first, self.first.unit.last)
        known = any(half.unit.member == other.unit.member for other in self.halves)
        if not same or known or half.unit.round != self.round:
            return self
        if half.key == self.first.key:
            return self if len(mine) >= REFERENCES else replace(self, mine=(*mine, half))
        return self if len(theirs) >= REFERENCES else replace(self, theirs=(*theirs, half))


class Audits(msgspec.Struct, frozen=True):
    """The audits of the open round, and those of the last that wait for evidence."""

    cases: tuple[Case, ...] = ()
    recent: tuple[Half, ...] = ()  # the newest results of the round, for references
    until: float | None = None  # a complete round waits until then

    def without(self, key: bytes) -> Audits:
        """What does not rest on anything that this node measured."""
        kept = tuple(
            replace(case, mine=_others(case.mine, key), theirs=_others(case.theirs, key))
            for case in self.cases
            if key not in (case.first.key, case.auditor)
        )
        return replace(self, cases=kept, recent=_others(self.recent, key))


def _others(halves: tuple[Half, ...], key: bytes) -> tuple[Half, ...]:
    return tuple(half for half in halves if half.key != key)
