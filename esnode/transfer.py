"""A snapshot on its way from several donors: which part is asked of whom, how much, what is thrown away.

Pure. `step(state, event)` answers with actions; the shell (`receiver.py`) moves, hashes and writes bytes.
Every `Ask` is a grant of credit, and no donor sends without one, so what is in flight is bounded by the
window here. A part comes from one donor alone: who sent a poisoned one is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from esnode.transferevents import (
    Action,
    Ask,
    AskHead,
    Banned,
    Began,
    Came,
    Checked,
    Drop,
    Event,
    Finish,
    Lost,
    Opened,
    Report,
)
from protocol.envelope import FRAME, READER
from protocol.peers import GRANT, MOST_OWED

FIRST_WINDOW = 1 << 19  # bytes in flight from a donor that has not been measured
SMALLEST_WINDOW, LARGEST_WINDOW = 1 << 17, MOST_OWED // 2  # of what was dropped some may be owed yet
WINDOW_SECONDS = 1.0  # of a donor's measured rate are in flight,
ASK_SECONDS = 0.5  # in questions of so much of it: a slow line brings many small messages, not one for long
SMALLEST_ASK = 1 << 15
MEASURE_EVERY = 0.25  # seconds between measurements of a donor's rate
MOST_UNCHECKED = 1 << 26  # bytes of whole parts that wait in memory for the disk, which so sets the pace
STALL_SECONDS = 6.0  # a donor that was asked and sends nothing for this long is given up, see `_silent`
RETRY_SECONDS = 5.0  # before a donor that was lost is asked again
LOOK_SECONDS = 3.0  # between two events at most, in a process that runs
PATIENCE = 30.0  # the transfer fails without any open donor for so long,
STANDSTILL = 300.0  # and without one more whole part, whatever the donors begin and never end
NEW, OPEN, GONE, BANNED = "new", "open", "gone", "banned"


@dataclass(frozen=True, slots=True)
class Job:
    """One part asked of one donor: bytes granted and bytes that came."""

    part: int
    size: int
    granted: int = 0
    got: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """One donor as this transfer sees it."""

    key: bytes
    status: str = NEW
    way: str = ""
    reason: str = ""
    jobs: tuple[Job, ...] = ()  # in the order they were asked for
    window: int = FIRST_WINDOW
    heard: float = 0.0  # bytes or a grant, last
    due: int = 0  # what was asked of anybody before that has come when so many bytes have come in all
    sent: int = 0  # bytes that came from it
    first: int = 0  # `sent` when it was opened
    vain: int = 0  # bytes it was asked for and may send yet, of parts that another one has sent
    rate: float = 0.0  # bytes per second
    mark: tuple[float, int] = (0.0, 0)  # when the rate was measured, and `sent` then
    lost: float = float("-inf")  # when it was lost, last

    @property
    def flying(self) -> int:
        """Bytes granted that have not come yet."""
        return sum(job.granted - job.got for job in self.jobs)


@dataclass(frozen=True, slots=True)
class State:
    """The transfer; a value. Until `Began` only the donors are known."""

    sources: dict[bytes, Source] = field(default_factory=dict)
    total: int = 0
    part_size: int = 0
    have: int = 0  # bit k: part k is on the disk and was checked
    cursor: int = 0  # no part below it was never asked for
    back: tuple[int, ...] = ()  # parts asked for in vain
    now: float = 0.0
    began: float | None = None  # first byte asked for
    received: int = 0  # bytes since, poisoned ones included
    heard: float = 0.0  # when the last of them came, or one was asked for while none was on its way
    alone: float = 0.0  # since when no donor is open
    moved: float = 0.0  # when the last whole part, or the head, came
    asked_head: float | None = None
    over: str = ""  # "done" or why it failed

    @property
    def parts(self) -> int:
        return -(-self.total // self.part_size) if self.part_size else 0

    def size_of(self, part: int) -> int:
        return min(self.part_size, self.total - part * self.part_size)

    @property
    def done(self) -> int:
        """Bytes on the disk, checked."""
        last = max(self.parts - 1, 0)
        short = self.part_size - self.size_of(last) if self.have >> last & 1 else 0
        return self.have.bit_count() * self.part_size - short

    @property
    def flying(self) -> int:
        """Bytes on their way from all donors."""
        return sum(source.flying for source in self.sources.values())


def new(keys: tuple[bytes, ...], now: float) -> State:
    """A transfer from these donors, none of which is reached yet."""
    return State({key: Source(key) for key in keys}, now=now, alone=now, moved=now)


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """What follows from one event."""
    if state.over:
        return state, ()
    if event.now - state.now > LOOK_SECONDS:
        state = _later(state, event.now - state.now)
    turn = _Turn(replace(state, now=max(event.now, state.now)))
    if isinstance(event, Opened):
        turn.opened(event)
    elif isinstance(event, Lost):
        turn.lose(event.key, event.reason)
    elif isinstance(event, Banned):
        turn.lose(event.key, event.reason, BANNED)
    elif isinstance(event, Began):
        turn.began(event)
    elif isinstance(event, Came):
        turn.came(event)
    elif isinstance(event, Checked):
        turn.checked(event)
    turn.watch()
    if not turn.state.over:
        turn.fill()
    return turn.state, tuple(turn.actions)


def _later(state: State, gap: float) -> State:
    """Nobody was silent for this long: this process was stopped, or its machine slept."""
    sources = {key: replace(source, heard=source.heard + gap) for key, source in state.sources.items()}
    alone, moved, heard = state.alone + gap, state.moved + gap, state.heard + gap
    return replace(state, sources=sources, alone=alone, moved=moved, heard=heard)


class _Turn:
    """One step in the making."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.actions: list[Action] = []
        self._sources: dict[bytes, Source] | None = None

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def put(self, source: Source) -> None:
        if self._sources is None:
            self._sources = dict(self.state.sources)
            self.set(sources=self._sources)
        self._sources[source.key] = source

    def finish(self, reason: str) -> None:
        self.actions.append(Finish(reason))
        self.set(over=reason or "done")

    # ------------------------------------------------------------ events

    def opened(self, event: Opened) -> None:
        source = self.state.sources.get(event.key)
        now = self.state.now
        if source is not None and source.status in (NEW, GONE) and now - source.lost >= RETRY_SECONDS:
            fresh = Source(source.key, OPEN, event.way, event.reason, heard=now)
            self.put(replace(fresh, sent=source.sent, first=source.sent, mark=(now, source.sent)))

    def lose(self, key: bytes, reason: str, status: str = GONE) -> None:
        source = self.state.sources.get(key)
        if source is None or source.status == BANNED:
            return
        for job in source.jobs:
            self.actions.append(Drop(key, job.part))
        self.put(replace(source, status=status, reason=reason, jobs=(), rate=0.0, lost=self.state.now))
        wanted = [job.part for job in source.jobs if not self._wanted_elsewhere(job.part)]
        self.set(back=(*self.state.back, *wanted), asked_head=None)

    def _wanted_elsewhere(self, part: int) -> bool:
        return bool(self.state.have >> part & 1) or any(
            job.part == part for other in self.state.sources.values() for job in other.jobs
        )

    def began(self, event: Began) -> None:
        if not self.state.part_size:
            self.set(total=event.total, part_size=event.part_size, have=event.have, moved=self.state.now)

    def came(self, event: Came) -> None:
        source, now = self.state.sources.get(event.key), self.state.now
        if source is None:
            return
        if not any(job.part == event.part for job in source.jobs):
            if source.vain:  # it took its turn
                self.put(replace(source, heard=now, vain=max(source.vain - event.size, 0)))
                self.set(heard=now)
            return
        jobs = tuple(replace(j, got=j.got + event.size) if j.part == event.part else j for j in source.jobs)
        self.set(received=self.state.received + event.size, heard=now)
        due = self.state.received + self.state.flying
        self.put(replace(source, jobs=jobs, heard=now, due=due, sent=source.sent + event.size))

    def checked(self, event: Checked) -> None:
        if (source := self.state.sources.get(event.key)) is None:
            return
        if not event.good:
            self.actions.append(Report(event.key, event.part))
            return self.lose(event.key, f"part {event.part} was poisoned", BANNED)
        self.put(replace(source, jobs=tuple(job for job in source.jobs if job.part != event.part)))
        for other in self.state.sources.values():
            late = next((job for job in other.jobs if job.part == event.part), None)
            if late is not None:
                jobs = tuple(job for job in other.jobs if job is not late)
                self.put(replace(other, jobs=jobs, vain=other.vain + late.granted - late.got))
                self.actions.append(Drop(other.key, event.part))
        self.set(have=self.state.have | 1 << event.part, moved=self.state.now)

    # ------------------------------------------------------------ after every event

    def watch(self) -> None:
        """Measure rates, give up silent donors, see whether it is over."""
        now = self.state.now
        for source in self.state.sources.values():
            if source.status != OPEN:
                continue
            if self._silent(source):
                self.lose(source.key, f"silent for {now - source.heard:.0f} s")
            elif now - source.mark[0] >= MEASURE_EVERY:
                self._measure(source)
        state = self.state
        if state.part_size and state.have == (1 << state.parts) - 1:
            return self.finish("")
        if now - state.moved > STANDSTILL:
            self.finish(f"no donor has sent a whole part for {STANDSTILL:.0f} s")
        elif any(source.status == OPEN for source in state.sources.values()):
            self.set(alone=now)
        elif now - state.alone > PATIENCE or all(s.status == BANNED for s in state.sources.values()):
            why = {source.reason or "no answer" for source in state.sources.values()}
            self.finish("no donor can be reached: " + "; ".join(sorted(why)))

    def _silent(self, source: Source) -> bool:
        """Asked, and nothing came, though what was on its way before has come, and more; or nobody sends.

        Where many donors share a slow line each one's turn comes late: giving it up wastes what came.
        """
        state = self.state
        long = source.flying and state.now - source.heard > STALL_SECONDS
        overtaken = state.received > source.due + GRANT or state.now - state.heard > STALL_SECONDS
        return bool(long and overtaken)

    def _measure(self, source: Source) -> None:
        now, (since, before) = self.state.now, source.mark
        rate = (source.sent - before) / (now - since)
        if source.rate:
            rate = 0.5 * source.rate + 0.5 * rate
        window = min(max(int(rate * WINDOW_SECONDS), SMALLEST_WINDOW), LARGEST_WINDOW)
        self.put(replace(source, rate=rate, mark=(now, source.sent), window=window))

    def fill(self) -> None:
        """Grant credit to every open donor up to its window; first of all get the head."""
        state = self.state
        if not state.part_size:
            return self._ask_head()
        for key in state.sources:
            while self._grant(self.state.sources[key]):
                ...

    def _ask_head(self) -> None:
        state = self.state
        if state.asked_head is not None and state.now - state.asked_head < STALL_SECONDS:
            return
        # another one each time: the first may not answer
        found = sorted((s for s in state.sources.values() if s.status == OPEN), key=lambda s: s.heard)
        if found:
            self.actions.append(AskHead(found[0].key))
            self.put(replace(found[0], heard=state.now))
            self.set(asked_head=state.now)

    def _grant(self, source: Source) -> bool:
        if source.status != OPEN or source.flying >= source.window or self._relay_full(source):
            return False
        jobs = source.jobs
        if not jobs or jobs[-1].granted >= jobs[-1].size:
            everywhere = (job for other in self.state.sources.values() for job in other.jobs)
            unchecked = sum(job.size for job in everywhere if job.got == job.size)
            part = self._next_part(source) if unchecked < MOST_UNCHECKED else None
            if part is None:
                return False
            jobs = (*jobs, Job(part, self.state.size_of(part)))
        job = jobs[-1]
        size = min(_ask_size(source), job.size - job.granted)
        self.actions.append(Ask(source.key, job.part, job.granted, size))
        state, now = self.state, self.state.now
        if not state.flying:
            self.set(heard=now)
        if not source.flying:
            source = replace(source, heard=now, due=state.received + state.flying)
        self.put(replace(source, jobs=(*jobs[:-1], replace(job, granted=job.granted + size))))
        if self.state.began is None:
            self.set(began=now)
        return True

    def _relay_full(self, source: Source) -> bool:
        """The relay queues so much for one reader, in so many frames, and throws away what is beyond."""
        if source.way != "relay":
            return False
        relayed = (job for other in self.state.sources.values() if other.way == "relay" for job in other.jobs)
        owed = sum(job.granted - job.got + FRAME for job in relayed if job.granted > job.got)
        return owed > READER - GRANT

    def _next_part(self, source: Source) -> int | None:
        """A part nobody is asked for; at the end one that another donor is slow with."""
        state = self.state
        for k, part in enumerate(state.back):
            if not any(job.part == part for job in source.jobs):
                self.set(back=(*state.back[:k], *state.back[k + 1 :]))
                return part
        cursor = state.cursor
        while cursor < state.parts and state.have >> cursor & 1:
            cursor += 1
        if cursor < state.parts:
            self.set(cursor=cursor + 1)
            return cursor
        return self._slow_part(source) if not source.jobs else None

    def _slow_part(self, source: Source) -> int | None:
        """The part with most bytes to come of those that one other donor alone was asked for."""
        asked = [job for other in self.state.sources.values() for job in other.jobs]
        single = [job for job in asked if sum(other.part == job.part for other in asked) == 1]
        return max(single, key=lambda job: job.size - job.got).part if single else None


def _ask_size(source: Source) -> int:
    """Bytes of the next question: by the measured rate, and before there is one by what has come so far."""
    wanted = int(source.rate * ASK_SECONDS) if source.rate else (source.sent - source.first) // 4
    return min(max(wanted, 2 * SMALLEST_ASK if not source.rate else SMALLEST_ASK), GRANT)
