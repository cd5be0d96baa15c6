"""Several engines of one machine as one: who gets a unit, whether all agree, what becomes of a lost one.

Pure: the node's events only; no clock, chance, processes. A lane is an engine in a process of its own with a
replica of its own (on one device, or a tensor-parallel group). The node's core sees one engine that evaluates
as many units at once as lanes are ready: entries are folded in by all of them, and it hears their D only once
they agree. Truth is replay: an odd lane is rebuilt from the newest snapshot while the others work on; where
nobody can say which one is odd, all are. Called by `fleet.py`; the types are in `laneevents.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from esnode import events as ne
from esnode import laneerrands, laneshare
from esnode import proofevents as pe
from esnode import snapshotevents as se
from esnode.laneevents import (
    Advance,
    Asked,
    Clock,
    Died,
    Effect,
    Event,
    Fail,
    GoBack,
    Heard,
    Kill,
    Refreshed,
    Said,
    Start,
    Tell,
    Tidings,
    Up,
    Wants,
)
from esnode.lanestate import (
    BEHIND,
    BUILDING,
    DOWN,
    FOLLOWS,
    GONE,
    READY,
    STARTING,
    Job,
    Lane,
    Moved,
    State,
    Turn,
    digest_of,
    lost,
)
from protocol.messages import Unit

MOST_CRASHES = 5  # in a row, without a unit measured in between; then the lane is given up
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds until a crashed lane is started again, doubling
DEADLY = 2  # lanes that ended over a unit before it counts as failed here
DEAF = 60.0  # seconds a lane may go on with a cancelled unit until it is ended,
STILL = 900.0  # may say nothing of a unit,
LATE, SLOWER = 300.0, 10.0  # and may need for an update beyond so many times what the first needed
SILENT = 120.0  # seconds without any word of a lane, a sign of life included, until it is ended
AWAY = 5.0  # seconds without an event: this process stood still itself, and nobody could be heard
MOST_DOUBTS = 2  # times in a row that replay may leave lanes with unlike bits


def new(devices: tuple[tuple[str, ...], ...], digest: int) -> tuple[State, tuple[Effect, ...]]:
    """Lanes on these devices, to be started. `digest`: D of the base model."""
    state = State(tuple(Lane(group) for group in devices), digest, offered=len(devices))
    return state, tuple(Start(k) for k in range(len(devices)))


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The answer to one event: the next state and the effects to perform in order."""
    if state.failed:
        return state, ()
    turn = Turn(replace(state, now=max(state.now, event.now)))
    _listen(turn, event, turn.state.now - state.now > AWAY)
    _ON_EVENT[type(event)](turn, event)
    _go_on(turn)
    return turn.state, tuple(turn.effects)


def _listen(turn: Turn, event: Event, away: bool) -> None:
    """A process that was stopped, or holds on to the interpreter, says nothing at all: it is ended."""
    now = turn.state.now
    heard = {event.lane} if isinstance(event, Up | Heard | Said | Wants | Refreshed) else set()
    for number, lane in enumerate(turn.state.lanes):
        if number in heard or away:
            turn.change(number, heard=now)
        elif now - lane.heard > SILENT and lane.phase not in (DOWN, GONE):
            turn.change(number, heard=now)
            turn.do(Tidings(f"{turn.name(number)} says nothing any more and is ended"), Kill(number))


# ---------------------------------------------------------------- what the node asks


def _on_asked(turn: Turn, event: Asked) -> None:
    effect, state = event.effect, turn.state
    match effect:
        case ne.Evaluate():
            turn.set(waiting=(*state.waiting, Job(effect, height=state.height)))
        case ne.CancelUnit(unit):
            _cancel(turn, unit, effect)
        case ne.Apply() | ne.Rewind():
            assert state.order is None
            turn.set(order=effect, upto=event.upto, asked=frozenset(), answers={})
            for number in turn.phase(BUILDING) if isinstance(effect, ne.Rewind) else ():
                turn.change(number, stale=True)
        case se.Save(round, entry, _) if not turn.phase(READY):
            turn.answer(se.Saved(0.0, round, entry, b"", 0, "no engine is ready", 0))
        case pe.Mend() if state.prover not in turn.phase(READY):
            laneerrands.lose_proof(turn, effect, "the engine that replayed pieces has ended")
        case _:
            turn.set(errands=(*state.errands, (-1, effect)))


def _cancel(turn: Turn, unit: Unit, effect: ne.CancelUnit) -> None:
    waiting = tuple(job for job in turn.state.waiting if job.unit != unit)
    if waiting != turn.state.waiting:
        turn.set(waiting=waiting)
        return turn.answer(ne.Cancelled(0.0, unit))
    for number, lane in enumerate(turn.state.lanes):
        if any(job.unit == unit and job.cancelled is None for job in lane.jobs):
            turn.change_job(number, unit, cancelled=turn.state.now)
            turn.do(Tell(number, effect))


# ---------------------------------------------------------------- what lanes say


def _on_up(turn: Turn, event: Up) -> None:
    height = 0 if turn.state.height == 0 else None  # the shell has compared its base model with the run's
    turn.change(event.lane, phase=BEHIND, height=height, digest=turn.state.digest, far=False)
    laneshare.on_up(turn, event.lane)


def _on_said(turn: Turn, event: Said) -> None:
    number, said = event.lane, event.event
    match said:
        case ne.EntriesApplied() | ne.Rewound():
            _on_moved(turn, number, said)
        case pe.Damaged(_, unit, tensors):
            _on_damaged(turn, number, unit, tensors)
        case ne.Generated(_, unit):
            turn.change_job(number, unit, scoring=True)
            turn.answer(said)
        case ne.Progress(_, unit):
            turn.change_job(number, unit, moved=turn.state.now)
            turn.answer(said)
        case ne.Evaluated(_, unit) | ne.EvaluationFailed(_, unit) | ne.Cancelled(_, unit):
            _on_measured(turn, number, unit, said)
        case _:
            laneerrands.answered(turn, number, said)


def _on_measured(turn: Turn, number: int, unit: Unit, said: ne.Event) -> None:
    lane = turn.state.lanes[number]
    (job,) = (job for job in lane.jobs if job.unit == unit)
    turn.change(number, jobs=tuple(other for other in lane.jobs if other is not job))
    if isinstance(said, ne.Evaluated):
        turn.change(number, crashes=0, pace=turn.state.now - job.began)
    turn.answer(said)


def _on_damaged(turn: Turn, number: int, unit: Unit | None, tensors: tuple[str, ...]) -> None:
    """The lane found its master changed by itself, and did nothing with it. A sibling does its unit."""
    jobs = turn.state.lanes[number].jobs
    turn.change(number, jobs=tuple(job for job in jobs if job.unit != unit))
    _again(turn, tuple(job for job in jobs if job.unit == unit))
    turn.set(asked=turn.state.asked - {number})
    turn.suspect(number, f"{', '.join(tensors[:3])} changed in memory")


def _on_moved(turn: Turn, number: int, said: Moved) -> None:
    state, lane = turn.state, turn.state.lanes[number]
    expected = ne.EntriesApplied if isinstance(state.order, ne.Apply) else ne.Rewound
    if number in state.asked and isinstance(said, expected):
        first = state.answered if state.answers else state.now
        answers = {**state.answers, number: said}
        turn.set(asked=state.asked - {number}, answers=answers, answered=first)
    elif lane.phase != BUILDING:
        return
    elif lane.stale:
        turn.change(number, phase=BEHIND, height=None, stale=False)
    else:
        height = said.height if isinstance(said, ne.Rewound) else state.lanes[number].height
        turn.change(number, phase=BEHIND, height=height, digest=digest_of(said))


def _arrived(turn: Turn, number: int, lane: Lane) -> None:
    """A lane that was behind reflects as many entries as the node's master: is it the same?"""
    state = turn.state
    why = lane.odd or "its replay gave another digest"
    if state.asked or state.answers:
        return  # it comes after what the others do now
    if lane.digest == state.digest:
        turn.change(number, phase=READY, odd="", why="", far=False)
        if lane.odd:
            turn.answer(ne.LaneRepaired(0.0, f"{turn.name(number)}: {lane.odd}"))
    elif not lane.far:
        turn.change(number, far=True, height=None, odd=why)
    elif len(turn.phase(READY)) > 1:
        _give_up(turn, number, "replay from the base model gives other bits there than the other lanes hold")
    else:
        turn.change(number, far=False, height=None, odd=why)
        _doubt(turn, f"{turn.name(number)} comes to another digest by replay than the others hold")


def _on_died(turn: Turn, event: Died) -> None:
    """The process of a lane has ended, whatever the reason; its unit is run again."""
    number, state = event.lane, turn.state
    lane = state.lanes[number]
    laneshare.lost(turn, number)
    turn.set(asked=state.asked - {number}, answers={k: a for k, a in state.answers.items() if k != number})
    own = 0 if lane.pulled else 1
    crashes = lane.crashes + own
    phase = GONE if lane.phase == GONE else DOWN
    turn.change(number, jobs=(), phase=phase, crashes=crashes, stale=False, height=None, pulled=False)
    if own and phase != GONE:
        turn.change(number, why=f"has ended: {event.reason}")
    _again(turn, tuple(replace(job, deaths=job.deaths + own, scoring=False) for job in lane.jobs))
    laneerrands.drop(turn, number)
    if phase == GONE:
        return
    if lane.pulled:
        return turn.change(number, retry=state.now)
    if event.refused:
        return _give_up(turn, number, event.reason)
    if crashes >= MOST_CRASHES:
        return _give_up(turn, number, f"it has ended {crashes} times in a row, at last: {event.reason}")
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (crashes - 1)) * (0.5 + event.jitter)
    turn.change(number, retry=state.now + pause)
    turn.do(Tidings(f"{turn.name(number)} has ended: {event.reason}; it starts again in {pause:.1f} s"))


def _again(turn: Turn, jobs: tuple[Job, ...]) -> None:
    """Units that a lane could not finish: another one does them, unless they are not wanted or not borne."""
    for job in jobs:
        if job.cancelled is not None:
            turn.answer(ne.Cancelled(0.0, job.unit))
        elif job.deaths >= DEADLY:
            why = f"{job.deaths} engines ended while they evaluated it"
            turn.answer(ne.EvaluationFailed(0.0, job.unit, why))
        else:
            turn.set(waiting=(job, *turn.state.waiting))


def _give_up(turn: Turn, number: int, why: str) -> None:
    turn.change(number, phase=GONE, why=f"is given up: {why}")
    laneshare.lost(turn, number)
    turn.do(Kill(number))
    words = f"{turn.name(number)} is given up: {why}"
    if all(lane.phase == GONE for lane in turn.state.lanes):
        turn.set(failed=True)
        return turn.do(Fail(f"no engine of this node is left. {words}"))
    turn.do(Tidings(words))


def _doubt(turn: Turn, why: str) -> None:
    """Nobody can say which lane is right: the node goes back, and replay decides."""
    if isinstance(turn.state.order, ne.Rewind):
        return
    turn.set(order=None, asked=frozenset(), answers={}, doubts=turn.state.doubts + 1)
    if turn.state.doubts > MOST_DOUBTS:
        turn.set(failed=True)
        return turn.do(Fail(f"the engines here compute different bits ({why}): run `esnode doctor`"))
    turn.answer(ne.LanesDiffer(0.0, why, far=turn.state.doubts > 1))


# ---------------------------------------------------------------- what is due after every event


def _go_on(turn: Turn) -> None:
    if turn.state.failed:
        return
    for number in turn.phase(DOWN):
        if turn.state.now >= turn.state.lanes[number].retry:
            turn.change(number, phase=STARTING, heard=turn.state.now)
            turn.do(Start(number))
    _catch_up(turn)
    laneerrands.run(turn)
    _carry_out(turn)
    laneshare.follow(turn)
    if turn.state.order is None:
        _deal(turn)
    count, words = max(1, laneshare.offered(turn.state)), lost(turn.state)
    if (count, words) != (turn.state.offered, turn.state.lost) and turn.state.order is None:
        turn.set(offered=count, lost=words)
        turn.answer(ne.LanesChanged(0.0, count, words))


def _catch_up(turn: Turn) -> None:
    """Lanes that are behind go back to the newest snapshot that fits, or fold in what they lack."""
    for number in turn.phase(BEHIND):
        state = turn.state
        lane = state.lanes[number]
        if lane.role == FOLLOWS or isinstance(state.order, ne.Rewind) or lane.evaluates:
            continue
        if number == state.leader and not laneshare.quiet(turn):
            continue
        if lane.height is None or lane.height > state.height:
            turn.change(number, phase=BUILDING)
            turn.do(GoBack(number, 0 if lane.far else state.height))
        elif lane.height < state.height:
            turn.change(number, phase=BUILDING, height=state.height)
            turn.do(Advance(number, lane.height, state.height))
        else:
            _arrived(turn, number, lane)


def _carry_out(turn: Turn) -> None:
    """Have the order done by every lane that is at the state before it; compare once all have answered."""
    state = turn.state
    if state.answers and state.now - state.answered > LATE + SLOWER * (state.answered - state.ordered):
        for number in state.asked:
            turn.do(Tidings(f"{turn.name(number)} does not end an update and is ended"), Kill(number))
        turn.set(answered=state.now)
    if state.order is None or state.asked:
        return
    if state.answers:
        return _compare(turn)
    if isinstance(state.order, ne.Rewind):  # whatever a lane holds
        for number in turn.phase(BEHIND):
            if state.lanes[number].role != FOLLOWS:
                turn.change(number, phase=READY, why="")
    writers = laneshare.writers(turn.state)
    if state.leader in writers and not laneshare.quiet(turn):
        return
    turn.set(asked=frozenset(writers), ordered=state.now)
    for number in writers:
        turn.do(Tell(number, state.order))


def _compare(turn: Turn) -> None:
    state = turn.state
    votes = Counter(_vote(answer) for answer in state.answers.values())
    best, most = votes.most_common(1)[0]
    if 2 * most <= len(state.answers) and isinstance(state.order, ne.Apply):
        told = ", ".join(f"{turn.name(k)} {digest_of(said):016x}" for k, said in state.answers.items())
        return _doubt(turn, f"lanes differ after one update: {told}")
    for number, said in state.answers.items():
        if _vote(said) != best and isinstance(state.order, ne.Apply):
            turn.suspect(number, f"its digest was {digest_of(said):016x}, another than {most} lanes had")
        elif _vote(said) != best:
            turn.change(number, phase=BEHIND, height=None)
    said = max((said for said in state.answers.values() if _vote(said) == best), key=lambda said: said.ms)
    height = said.height if isinstance(said, ne.Rewound) else state.upto
    doubts = state.doubts if isinstance(said, ne.Rewound) else 0
    turn.set(order=None, answers={}, height=height, digest=digest_of(said), doubts=doubts)
    turn.answer(said)


def _vote(said: Moved) -> tuple[int, ...]:
    return said.digests if isinstance(said, ne.EntriesApplied) else (said.height, said.digest)


def _deal(turn: Turn) -> None:
    """Give waiting units to free lanes, the quickest first. A lane that hangs is ended."""
    now = turn.state.now
    for number, lane in enumerate(turn.state.lanes):
        for job in lane.jobs:
            deaf = job.cancelled is not None and now - job.cancelled > DEAF
            if deaf or now - job.moved > STILL:
                what = "goes on with a cancelled unit" if deaf else "stands still with a unit"
                turn.change_job(number, job.unit, moved=now, cancelled=now if deaf else job.cancelled)
                turn.do(Tidings(f"{turn.name(number)} {what} and is ended"), Kill(number))
                break
    for job in turn.state.waiting:  # its answers were lost after the weights had moved on
        if job.height != turn.state.height:
            turn.answer(ne.EvaluationFailed(0.0, job.unit, "its engine ended while the answers were scored"))
    turn.set(waiting=tuple(job for job in turn.state.waiting if job.height == turn.state.height))
    free = sorted((lane.pace, k) for k, lane in enumerate(turn.state.lanes) if lane.free)
    for _, number in free[: len(turn.state.waiting)]:
        job, *rest = turn.state.waiting
        jobs = (*turn.state.lanes[number].jobs, replace(job, began=now, moved=now))
        turn.set(waiting=tuple(rest))
        turn.change(number, jobs=jobs)
        turn.do(Tell(number, job.what))


def _on_clock(turn: Turn, event: Clock | Heard) -> None:
    """Only time passes."""


_ON_EVENT: dict[type[Any], Callable[[Turn, Any], None]] = {
    Asked: _on_asked,
    Up: _on_up,
    Said: _on_said,
    Died: _on_died,
    Wants: laneshare.on_wants,
    Refreshed: laneshare.on_refreshed,
    Clock: _on_clock,
    Heard: _on_clock,
}
