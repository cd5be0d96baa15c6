"""Who evaluates what next: fresh work, and what an idle node can take over at the tail of a round.

Pure. Both decisions return what to do and why. Members go out whole while there are enough of them; when
nodes outnumber members each takes the same chunks of every one. Where the plan makes results independent of
batching (`repeatable`) the tail is split by chunk too, by speed, and idle nodes share what comes in last;
otherwise a member stays one unit, so that a resumed run finds the same rewards. A probe moves no weights: it
goes out in even shares. Called by `work.py`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from coordinator import membership
from coordinator.cells import MEMBER
from coordinator.membership import SUSPECT_AFTER, TELLING, Lease, Node, median_pace
from coordinator.rounds import NOBODY, Cells, Round
from protocol.lock import Lock
from protocol.messages import Kind, Unit

WORTH = 0.1  # seconds that doing a unit twice must save at least
MOST_HOLDERS = 3  # nodes that run the same chunk
INCREDIBLE = 4.0  # one that takes so many times them is not believed to be nearly done
OVERDUE = 1.5  # a unit that takes this many times its usual seconds may take as long again


class Rescue(msgspec.Struct, frozen=True):
    """An idle node takes `unit`.

    With `victim` its waiting lease `old` is taken back and it keeps `keep` of it.
    """

    unit: Unit
    victim: bytes | None = None
    old: Unit | None = None
    keep: Unit | None = None


class Pool(msgspec.Struct, frozen=True):
    """Who shares the work, as of the last look at everybody."""

    ready: int  # nodes that may take units
    lanes: int  # of them all
    speed: float = 0.0  # chunks a second of them all; 0 while that of one is not known
    round: int = -1  # of the columns
    columns: Mapping[int, tuple[int, int]] = {}  # roster number -> its chunks of every member

    def column(self, round: Round, node: Node) -> tuple[int, int] | None:
        """The node's chunks of every member; None where members go out whole, or it came later."""
        if self.round != round.number or node.number is None:
            return None
        return self.columns.get(node.number)


def next_unit(
    round: Round, lock: Lock, node: Node, pool: Pool, others: Sequence[int], room: int | None = None
) -> tuple[Unit | None, str]:
    """Work nobody holds yet. `others`: roster numbers of all alive; `room`: chunks it may still take."""
    probe = round.probe
    if probe and probe.free and not _spared(probe, node, others):
        found = _free_run(probe, -(-len(probe.sums) // max(pool.lanes, 1)))
        assert found is not None
        return Unit(round.number, Kind.PROBE, 0, *found), "held-out prompts, an even share"
    if not round.free:
        return None, "every chunk is in or in work"
    width, reason = _width(round, lock, node, pool)
    if room is not None and room < width:
        if room < 1 or not lock.repeatable:
            return None, "it has the plan's share of this round"
        width, reason = room, "what is left of the plan's share"
    column = pool.column(round, node)
    if column is not None:
        unit = _first_free(round, node, others, width, *column)
        if unit is not None:
            return unit, "its slice of every member"
        reason = "its own slice is done everywhere, it helps with others"
    unit = _first_free(round, node, others, width)
    return unit, reason if unit else "what is left failed here and waits for another node"


def _first_free(
    round: Round, node: Node, others: Sequence[int], width: int, low: int = 0, high: int | None = None
) -> Unit | None:
    """The first free chunks between `low` and `high` of any member that is not spared this node."""
    for member in range(round.cursor, len(round.members)):
        cells = round.members[member]
        if cells.free and not _spared(cells, node, others):
            found = _free_run(cells, width, low, high)
            if found is not None:
                return Unit(round.number, MEMBER, member, *found)
    return None


def _width(round: Round, lock: Lock, node: Node, pool: Pool) -> tuple[int, str]:
    """Chunks of a fresh unit and why: a whole member, or this lane's share of the rest where that is less.

    The share is a lane's, by speed, so that nobody begins a long unit just before the others are done; half
    of it for a unit that waits behind another, as nobody knows yet who will be idle first.
    Where batches change answers a member is only split when there are more nodes than members.
    """
    whole = lock.chunk_count(MEMBER)
    columns = pool.columns if pool.round == round.number else {}
    if columns:
        low, high = pool.column(round, node) or next(iter(columns.values()))
        whole = high - low + 1
    elif not lock.repeatable:
        return whole, "a whole member"
    share = 1 / (node.pace * pool.speed) if node.pace and pool.speed else 1 / max(pool.lanes, 1)
    if len(node.leases) >= node.hello.lanes:
        share /= 2
    width = max(1, min(whole, math.ceil(round.free * share - 1e-9)))
    if width < whole:
        return width, f"its share by speed of what is left, chunks: {round.free}"
    return width, "a slice of a member" if columns else "a whole member"


def columns(nodes: Sequence[Node], chunks: int) -> dict[int, tuple[int, int]]:
    """Which chunks of every member each node takes when members are split, by roster number.

    The same for every member, so that what one node's engine does differently moves all rewards alike. With
    at least as many nodes as chunks they take turns; otherwise widths go by speed.
    """
    numbers = [node.number for node in nodes if node.number is not None]
    if len(numbers) >= chunks:
        return {number: (k % chunks, k % chunks) for k, number in enumerate(numbers)}
    usual = median_pace(list(nodes)) or 1.0
    speeds = [node.hello.lanes / (node.pace or usual) for node in nodes if node.number is not None]
    spare, total = chunks - len(numbers), sum(speeds)
    found: dict[int, tuple[int, int]] = {}
    first, ahead = 0, 0.0
    for number, speed in zip(numbers, speeds, strict=True):
        ahead += spare * speed / total
        last = max(first, int(ahead + 0.5) + len(found))
        found[number] = (first, last)
        first = last + 1
    return found


def speed_of(nodes: Sequence[Node]) -> float:
    """Chunks a second of all nodes together; 0 while nobody has finished a unit."""
    usual = median_pace(list(nodes))
    return sum(node.hello.lanes / (node.pace or usual) for node in nodes) if usual else 0.0


def held(round: Round, node: Node) -> int:
    """Chunks of the open round's members that this node has measured or holds."""
    number = NOBODY - 1 if node.number is None else node.number
    done = sum(cells.evaluators.count(number) for cells in round.members)
    leased = (lease.unit for lease in node.leases if lease.unit.kind == MEMBER)
    return done + sum(_chunks(unit) for unit in leased)


def _spared(cells: Cells, node: Node, others: Sequence[int]) -> bool:
    """A node that failed a member does not get it again while somebody else has not tried."""
    return node.number in cells.failures and any(number not in cells.failures for number in others)


def _free_run(cells: Cells, width: int, low: int = 0, high: int | None = None) -> tuple[int, int] | None:
    """The first run of free chunks between `low` and `high`, at most `width` long."""
    end = len(cells.sums) if high is None else high + 1
    if cells.free == len(cells.sums):
        return low, min(low + width, end) - 1
    free = [s is None and not n for s, n in zip(cells.sums[low:end], cells.leases[low:end], strict=True)]
    if True not in free:
        return None
    first = last = free.index(True)
    while last + 1 < len(free) and free[last + 1] and last + 1 - first < width:
        last += 1
    return low + first, low + last


# ---------------------------------------------------------------- the tail


class Outstanding(msgspec.Struct, frozen=True):
    """A unit in work: who holds it, and the seconds from now until it should begin and end there."""

    victim: Node
    lease: Lease
    begin: float  # 0 for the running one
    end: float
    waits: bool


Ends = Mapping[tuple[int, int], tuple[tuple[int, int, float], ...]]  # by kind and member: chunks, seconds


class Tail(msgspec.Struct, frozen=True):
    """Everything in work, the slowest first, and the pool's usual pace: what idle nodes choose from."""

    waiting: tuple[Outstanding, ...]
    running: tuple[Outstanding, ...]
    usual: float | None
    ends: Ends

    def without(self, victim: bytes, unit: Unit) -> Tail:
        """What is left after a waiting unit has been taken back."""
        kept = tuple(row for row in self.waiting if (row.victim.key, row.lease.unit) != (victim, unit))
        return replace(self, waiting=kept)

    def along(self, unit: Unit, idle: Node) -> Tail:
        """The same, now that an idle node runs this unit as well."""
        at, end = (unit.kind, unit.member), _pace(idle, self.usual) * _chunks(unit)
        more = (*self.ends.get(at, ()), (unit.first, unit.last, end))
        return replace(self, ends={**self.ends, at: more})

    def soonest(self, unit: Unit) -> list[float]:
        """Seconds until each chunk of the unit should be in, by whoever holds it; endless for nobody."""
        held = self.ends.get((unit.kind, unit.member), ())
        return [
            min((end for first, last, end in held if first <= k <= last), default=math.inf)
            for k in range(unit.first, unit.last + 1)
        ]


def tail(nodes: Iterable[Node], now: float) -> Tail:
    """One look at everybody's work."""
    everybody = list(nodes)
    usual = median_pace(everybody)
    rows = [row for node in everybody if node.leases for row in _work_of(node, usual, now)]
    rows.sort(key=lambda row: (-row.end, row.victim.number or 0))
    ends: dict[tuple[int, int], tuple[tuple[int, int, float], ...]] = {}
    for row in rows:
        unit = row.lease.unit
        at = (unit.kind, unit.member)
        ends[at] = (*ends.get(at, ()), (unit.first, unit.last, row.end))
    waiting = tuple(row for row in rows if row.waits and not row.lease.progress)
    return Tail(waiting, tuple(row for row in rows if not row.waits), usual, ends)


def _work_of(node: Node, usual: float | None, now: float) -> Iterator[Outstanding]:
    running = membership.running(node)
    free = [_left(node, lease, usual, now) for lease in running]  # when each lane should be
    for lease, end in zip(running, free, strict=True):
        yield Outstanding(node, lease, 0.0, end, False)
    free.sort()
    for lease in node.leases[len(running) :]:
        begin = free.pop(0)
        end = begin + _pace(node, usual) * _chunks(lease.unit)
        bisect.insort(free, end)
        yield Outstanding(node, lease, begin, end, True)


def rescue(round: Round, lock: Lock, tail: Tail, idle: Node) -> tuple[Rescue | None, str]:
    """What an idle node takes over when nothing is free: waiting units first, then the slowest running one.

    It is taken only when that should end it sooner, by the seconds per chunk observed of all who hold it.
    """
    for row in tail.waiting:
        if _holds(idle, row.lease.unit) or not _useful(round, row.lease.unit, idle):
            continue
        take, keep = _share(lock, _missing(round, row.lease.unit), idle, row, tail.usual)
        if take is not None:
            reason = f"{row.victim.name} {_would_end(row.end)}"
            return Rescue(take, row.victim.key, row.lease.unit, keep), reason
    for row in tail.running:
        if row.end <= WORTH:
            break
        if _holds(idle, row.lease.unit) or not _useful(round, row.lease.unit, idle):
            continue
        unit = _late_part(round, lock, tail, _missing(round, row.lease.unit), _pace(idle, tail.usual))
        if unit is not None:
            more = f"seems to need {row.end:.0f} s more" if math.isfinite(row.end) else "is silent"
            return Rescue(unit), f"{row.victim.name} {more}"
    return None, "nothing would end sooner here"


def _would_end(seconds: float) -> str:
    return f"would have ended it in {seconds:.0f} s" if math.isfinite(seconds) else "is silent"


def _chunks(unit: Unit) -> int:
    return unit.last - unit.first + 1


def _pace(node: Node, usual: float | None) -> float:
    return node.pace or usual or 1.0


def _left(node: Node, lease: Lease, usual: float | None, now: float) -> float:
    """Seconds until the node ends its running lease; 0 while nothing is known, endless when silent."""
    if now - node.heard > SUSPECT_AFTER:
        return float("inf")
    elapsed = 0.0 if lease.began is None else max(now - lease.began, 0.0)
    known = node.pace is not None or usual is not None
    expected = _pace(node, usual) * _chunks(lease.unit)
    if known and elapsed > INCREDIBLE * expected:
        return elapsed  # whatever it says: an end that is always near keeps the round from closing
    if lease.progress >= TELLING:
        return elapsed * (1000 - lease.progress) / lease.progress
    if not known:
        return 0.0
    return elapsed if elapsed > OVERDUE * expected else max(expected - elapsed, 0.0)


def _useful(round: Round, unit: Unit, idle: Node) -> bool:
    cells = round.cells(unit)
    return cells is not None and round.needs(unit) and idle.number not in cells.failures


def _holds(node: Node, unit: Unit) -> bool:
    """Whether a node has any chunk of the unit in work."""
    held = [lease.unit for lease in node.leases]
    return any(
        (other.kind, other.member) == (unit.kind, unit.member)
        and other.first <= unit.last
        and unit.first <= other.last
        for other in held
    )


def _late_part(round: Round, lock: Lock, tail: Tail, unit: Unit, pace: float) -> Unit | None:
    """What of a running unit a node of this pace should run as well, to end it sooner; None for nothing.

    Where members may be split: half of what comes in last, its end; the next idle node finds the rest.
    """
    cells = round.cells(unit)
    assert cells is not None
    n, split = _chunks(unit), lock.repeatable and unit.kind == MEMBER
    rows = zip(tail.soonest(unit), cells.sums[unit.first :], cells.leases[unit.first :], strict=False)
    ends = [end if value is None and held < MOST_HOLDERS else 0.0 for end, value, held in rows]
    latest = max(ends)
    if latest <= pace * (1 if split else n) + WORTH:
        return None
    if not split:
        return unit
    last = max(k for k in range(n) if ends[k] == latest)
    first = last
    while first and ends[first - 1] == latest:
        first -= 1
    width = (last - first) // 2 + 1
    if math.isfinite(latest):
        width = min(width, math.ceil(latest / pace) - 1)
    return Unit(unit.round, unit.kind, unit.member, unit.first + last - width + 1, unit.first + last)


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
    if lock.repeatable and unit.kind == MEMBER and end != float("inf"):
        take = max(1, min(n, int(end / (mine + theirs) + 0.5)))
    rest = row.begin + theirs * (n - take) if take < n else 0.0
    if max(rest, mine * take) >= end:
        return None, None
    keep = Unit(unit.round, unit.kind, unit.member, unit.first, unit.last - take) if take < n else None
    return Unit(unit.round, unit.kind, unit.member, unit.last - take + 1, unit.last), keep
