"""Who evaluates what next: fresh work, and what an idle node can take over at the tail of a round.

Pure. Both decisions return what to do and why. Members go out whole while there are enough of them; where the
plan makes results independent of batching (`repeatable`) the tail is split by chunk, otherwise a member stays
one unit, so that a resumed run finds the same rewards. A probe moves no weights: it goes out in even shares.
Called by `machine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from coordinator.membership import SUSPECT_AFTER, Lease, Node, median_pace
from coordinator.rounds import Cells, Round
from protocol.lock import Lock
from protocol.messages import Kind, Unit

WORTH = 0.1  # seconds that doing a unit twice must save at least
OVERDUE = 1.5  # a unit that takes this many times its usual seconds may take as long again


class Rescue(msgspec.Struct, frozen=True):
    """An idle node takes `unit`.

    With `victim` its waiting lease `old` is taken back and it keeps `keep` of it.
    """

    unit: Unit
    victim: bytes | None = None
    old: Unit | None = None
    keep: Unit | None = None


def next_unit(
    round: Round, lock: Lock, node: Node, ready: int, others: Sequence[int]
) -> tuple[Unit | None, str]:
    """Work nobody holds yet. `ready`: nodes that may take units; `others`: roster numbers of all alive."""
    probe = round.probe
    if probe and probe.free and not _spared(probe, node, others):
        first, last = _free_run(probe, -(-len(probe.sums) // max(ready, 1)))
        return Unit(round.number, Kind.PROBE, 0, first, last), "held-out prompts, an even share"
    if not round.free:
        return None, "every chunk is in or in work"
    width = _width(round, lock, ready)
    for member in range(round.cursor, len(round.members)):
        cells = round.members[member]
        if cells.free and not _spared(cells, node, others):
            first, last = _free_run(cells, width)
            return Unit(round.number, Kind.MEMBER, member, first, last), "fresh member"
    return None, "what is left failed here and waits for another node"


def _width(round: Round, lock: Lock, ready: int) -> int:
    """Chunks of a fresh unit: all of a member, or an even share of what is left where that is less."""
    whole = lock.chunk_count(Kind.MEMBER)
    if not lock.repeatable:
        return whole
    return max(1, min(whole, -(-round.free // max(ready, 1))))


def _spared(cells: Cells, node: Node, others: Sequence[int]) -> bool:
    """A node that failed a member does not get it again while somebody else has not tried."""
    return node.number in cells.failures and any(number not in cells.failures for number in others)


def _free_run(cells: Cells, width: int) -> tuple[int, int]:
    """The first run of free chunks, at most `width` long."""
    free = [s is None and not n for s, n in zip(cells.sums, cells.leases, strict=True)]
    first = free.index(True)
    last = first
    while last + 1 < len(free) and free[last + 1] and last + 1 - first < width:
        last += 1
    return first, last


# ---------------------------------------------------------------- the tail


class Outstanding(msgspec.Struct, frozen=True):
    """A unit in work: who holds it, and the seconds from now until it should begin and end there."""

    victim: Node
    lease: Lease
    begin: float  # 0 for the running one
    end: float
    waits: bool


class Tail(msgspec.Struct, frozen=True):
    """Everything in work, the slowest first, and the pool's usual pace: what idle nodes choose from."""

    waiting: tuple[Outstanding, ...]
    running: tuple[Outstanding, ...]
    usual: float | None

    def without(self, victim: bytes, unit: Unit) -> Tail:
        """What is left after a waiting unit has been taken back."""
        kept = tuple(row for row in self.waiting if (row.victim.key, row.lease.unit) != (victim, unit))
        return replace(self, waiting=kept)


def tail(nodes: Iterable[Node], now: float) -> Tail:
    """One look at everybody's work."""
    everybody = list(nodes)
    usual = median_pace(everybody)
    rows = [row for node in everybody if node.leases for row in _work_of(node, usual, now)]
    rows.sort(key=lambda row: (-row.end, row.victim.number or 0))
    waiting = tuple(row for row in rows if row.waits and not row.lease.progress)
    return Tail(waiting, tuple(row for row in rows if not row.waits), usual)


def _work_of(node: Node, usual: float | None, now: float) -> Iterator[Outstanding]:
    end = _left(node, node.leases[0], usual, now)
    yield Outstanding(node, node.leases[0], 0.0, end, False)
    for lease in node.leases[1:]:
        begin, end = end, end + _pace(node, usual) * _chunks(lease.unit)
        yield Outstanding(node, lease, begin, end, True)


def rescue(round: Round, lock: Lock, tail: Tail, idle: Node) -> tuple[Rescue | None, str]:
    """What an idle node takes over when nothing is free: waiting units first, then the slowest running one.

    It is taken only when that should end it sooner, by the seconds per chunk observed of both nodes.
    """
    for row in tail.waiting:
        if not _useful(round, row.lease.unit, idle):
            continue
        take, keep = _share(lock, _missing(round, row.lease.unit), idle, row, tail.usual)
        if take is not None:
            reason = f"{row.victim.name} would have ended it in {row.end:.0f} s"
            return Rescue(take, row.victim.key, row.lease.unit, keep), reason
    for row in tail.running:
        if row.end <= WORTH:
            break
        if not _useful(round, row.lease.unit, idle):
            continue
        unit = _missing(round, row.lease.unit)
        if _single(round, unit) and row.end > _pace(idle, tail.usual) * _chunks(unit):
            return Rescue(unit), f"{row.victim.name} seems to need {row.end:.0f} s more"
    return None, "nothing would end sooner here"


def _chunks(unit: Unit) -> int:
    return unit.last - unit.first + 1


def _pace(node: Node, usual: float | None) -> float:
    return node.pace or usual or 1.0


def _left(node: Node, lease: Lease, usual: float | None, now: float) -> float:
    """Seconds until the node ends its running lease; 0 while nothing is known, endless when silent."""
    if now - node.heard > SUSPECT_AFTER:
        return float("inf")
    elapsed = max(now - max(lease.since, node.done), 0.0)
    if lease.progress >= 100:
        return elapsed * (1000 - lease.progress) / lease.progress
    if node.pace is None and usual is None:
        return 0.0
    expected = _pace(node, usual) * _chunks(lease.unit)
    return elapsed if elapsed > OVERDUE * expected else max(expected - elapsed, 0.0)


def _useful(round: Round, unit: Unit, idle: Node) -> bool:
    cells = round.cells(unit)
    return cells is not None and round.needs(unit) and idle.number not in cells.failures


def _single(round: Round, unit: Unit) -> bool:
    """Whether only one node holds the unit's missing chunks."""
    cells = round.cells(unit)
    return cells is not None and all(
        cells.leases[k] <= 1 for k in range(unit.first, unit.last + 1) if cells.sums[k] is None
    )


def _missing(round: Round, unit: Unit) -> Unit:
    """The unit without chunks at its ends that are in already. It has missing ones."""
    cells = round.cells(unit)
    assert cells is not None
    missing = [k for k in range(unit.first, unit.last + 1) if cells.sums[k] is None]
    return Unit(unit.round, unit.kind, unit.member, missing[0], missing[-1])


def _share(
    lock: Lock, unit: Unit, idle: Node, row: Outstanding, usual: float | None
) -> tuple[Unit | None, Unit | None]:
    """How a waiting unit is shared: (what the idle node takes, what the other keeps); (None, None): not.

    The idle node takes the later part, as much as lets both end together; all of it where it must stay whole.
    """
    n, mine, theirs, end = _chunks(unit), _pace(idle, usual), _pace(row.victim, usual), row.end
    take = n
    if lock.repeatable and unit.kind == Kind.MEMBER and end != float("inf"):
        take = max(1, min(n, int(end / (mine + theirs) + 0.5)))
    rest = row.begin + theirs * (n - take) if take < n else 0.0
    if max(rest, mine * take) >= end:
        return None, None
    keep = Unit(unit.round, unit.kind, unit.member, unit.first, unit.last - take) if take < n else None
    return Unit(unit.round, unit.kind, unit.member, unit.last - take + 1, unit.last), keep
