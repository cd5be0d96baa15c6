"""Lanes that read one master in host memory: who leads it, when it may be written, when readers take over.

Pure: the node's events only. The first lane that needs a host master leads: it alone folds, rewinds and
mends. The others follow: while it writes none of them evaluates, and each rereads the master afterwards and
must see the leader's D. With the leader its readers start again, and the first of them leads. Part of the
core of lanes; called by `lanes.py` and `laneerrands.py`.
"""

from __future__ import annotations

from esnode import proofevents as pe
from esnode.laneevents import Kill, Place, Refreshed, Reread, Tidings, Wants
from esnode.lanestate import BEHIND, BUILDING, FOLLOWS, READY, STARTING, WAITS, Lane, State, Turn

LONGEST_READ = 300.0  # seconds a reader may take for it


def on_wants(turn: Turn, event: Wants) -> None:
    """A lane that loads has found that its master belongs in host memory."""
    leader = turn.state.leader
    if leader < 0:
        _appoint(turn, event.lane)
    elif turn.state.lanes[leader].phase == STARTING:  # what it fills is not whole yet
        turn.change(event.lane, role=WAITS)
    else:
        _attach(turn, event.lane)


def on_up(turn: Turn, number: int) -> None:
    """A lane has loaded: those that waited for it attach."""
    for other, lane in enumerate(turn.state.lanes) if number == turn.state.leader else ():
        if lane.role == WAITS:
            _attach(turn, other)


def on_refreshed(turn: Turn, event: Refreshed) -> None:
    """A reader has taken over what the leader wrote; it sees the leader's D, or it starts again."""
    number, state = event.lane, turn.state
    lane = state.lanes[number]
    if lane.phase != BUILDING or lane.pulled:
        return
    if lane.stale or not _leader_ready(state):
        turn.change(number, phase=BEHIND, stale=False)
    elif event.digest == state.digest:
        turn.change(number, phase=READY, why="")
    else:
        why = f"it reads digest {event.digest:016x} where its leader wrote {state.digest:016x}"
        turn.do(Tidings(f"{turn.name(number)}: {why}; it starts again"), Kill(number))


def lost(turn: Turn, number: int) -> None:
    """A lane is gone. If it led, readers of its master start again, behind a new leader."""
    turn.change(number, role="")
    if turn.state.leader != number:
        return
    turn.set(leader=-1)
    readers = [k for k, lane in enumerate(turn.state.lanes) if lane.role == FOLLOWS]
    for other in readers:
        phase = turn.state.lanes[other].phase
        turn.change(other, pulled=True, phase=phase if phase == STARTING else BEHIND)
        turn.do(Kill(other))
    if readers:
        turn.do(Tidings(f"{turn.name(number)} led the shared master: lanes that read it start again"))
    waiting = [k for k, lane in enumerate(turn.state.lanes) if lane.role == WAITS]
    if waiting:
        _appoint(turn, waiting[0])


def writers(state: State) -> list[int]:
    """Lanes that are at the node's state and may write their master."""
    return [k for k, lane in enumerate(state.lanes) if lane.phase == READY and lane.role != FOLLOWS]


def quiet(turn: Turn) -> bool:
    """Let readers take nothing new; whether the shared master may be written, for nobody reads it."""
    readers = [(k, lane) for k, lane in enumerate(turn.state.lanes) if _reads(lane)]
    for number, lane in readers:
        if lane.phase == READY:
            turn.change(number, phase=BEHIND)
    return not any(lane.phase == BUILDING or lane.evaluates for _, lane in readers)


def follow(turn: Turn) -> None:
    """Readers that are behind take over what was written, unless more is about to be."""
    for number, lane in enumerate(turn.state.lanes):
        if _reads(lane) and lane.phase == BUILDING and turn.state.now - lane.since > LONGEST_READ:
            turn.do(Tidings(f"{turn.name(number)} does not end reading the shared master and is ended"))
            turn.do(Kill(number))
            turn.change(number, since=turn.state.now)
    mending = any(isinstance(what, pe.Mend) for _, what in turn.state.errands)
    if mending or turn.state.order is not None or not _leader_ready(turn.state):
        return
    for number in turn.phase(BEHIND):
        lane = turn.state.lanes[number]
        if _reads(lane) and not lane.evaluates:
            turn.change(number, phase=BUILDING, since=turn.state.now)
            turn.do(Reread(number))


def offered(state: State) -> int:
    """Lanes that work, those counted that are only rereading."""
    soon = (BEHIND, BUILDING) if _leader_ready(state) else ()
    return sum(lane.phase == READY or (_reads(lane) and lane.phase in soon) for lane in state.lanes)


def _reads(lane: Lane) -> bool:
    return lane.role == FOLLOWS and not lane.pulled


def _leader_ready(state: State) -> bool:
    return state.leader >= 0 and state.lanes[state.leader].phase == READY


def _appoint(turn: Turn, number: int) -> None:
    turn.set(leader=number)
    turn.change(number, role="")
    turn.do(Place(number, -1))


def _attach(turn: Turn, number: int) -> None:
    turn.change(number, role=FOLLOWS)
    turn.do(Place(number, turn.state.leader))
