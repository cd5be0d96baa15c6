"""The open round as values: the chunks of its members and of its probe, what is in and who works on them.

Pure, no decisions: those, and every change, are in `rounds.py`, where these names are found too.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from protocol.messages import Kind, Unit

MEMBER = int(Kind.MEMBER)  # a member of an enum takes a while to be looked up


class Cells(msgspec.Struct, frozen=True):
    """The chunks of one member or of the probe. All tuples have one element per chunk."""

    sums: tuple[float | None, ...]
    evaluators: tuple[int, ...]  # roster numbers, NOBODY where the sum is missing
    leases: tuple[int, ...]  # how many nodes hold a unit with this chunk
    free: int  # chunks that are missing and that nobody works on: `free_of`
    correct: int = 0
    failures: tuple[int, ...] = ()  # roster number of each failure
    reason: str = ""  # of the last failure
    void: str = ""  # why nobody can evaluate it; "" while it can

    @property
    def complete(self) -> bool:
        return None not in self.sums

    @property
    def settled(self) -> bool:
        """Nothing more is expected of it."""
        return bool(self.void) or self.complete


class Round(msgspec.Struct):
    """The open round. `parent` is the hash of the entry that made the state it is measured on.

    A value, like all that a state holds, unless it is a `draft`: that one belongs to a single `Turn`, and the
    functions below change it in place instead of making another one, so that a batch of results copies the
    list of members once.
    """

    number: int
    parent: bytes
    members: list[Cells]  # empty in the final round, which only holds a probe
    probe: Cells | None  # None: nothing (more) to measure on held-out prompts
    opened: float
    unsettled: int  # members that are neither complete nor void
    free: int  # member chunks that are missing and that nobody works on
    cursor: int = 0  # no member below it has free chunks
    quorum: float | None = None  # when the plan's quorum was in
    draft: bool = False

    def drafted(self) -> Round:
        """A copy that may be changed in place."""
        return replace(self, members=self.members.copy(), draft=True)

    @property
    def final(self) -> bool:
        """All commits are made; only the last probe and the END entry are missing."""
        return not self.members

    def cells(self, unit: Unit) -> Cells | None:
        """What the unit is about; None when this round has no such member or chunks."""
        member = unit.member
        if unit.kind == MEMBER:
            found = self.members[member] if member < len(self.members) else None
        else:
            found = self.probe if member == 0 else None
        return found if found is not None and unit.first <= unit.last < len(found.sums) else None

    def needs(self, unit: Unit) -> bool:
        """Whether a result of this unit would still change something."""
        cells = self.cells(unit) if unit.round == self.number else None
        return cells is not None and not cells.void and None in cells.sums[unit.first : unit.last + 1]


def free_of(cells: Cells) -> int:
    """Chunks that are missing and that nobody works on."""
    return 0 if cells.void else [*zip(cells.sums, cells.leases, strict=True)].count((None, 0))
