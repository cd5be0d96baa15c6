"""The node's pure core: what it answers to every event.

Lives here: `new`, `step`, and what is due after each.

Pure: protocol and the node's pure modules only; no clock, chance, sockets, files, threads. Called by
`daemon.py` and the simulator, which perform the effects in order (see `events.py`). Messages are handled in
`inbox.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from esnode import catchup, evidence, inbox, pausing, proof, sources
from esnode.events import (
    About,
    Apply,
    Cancelled,
    Effect,
    EntriesApplied,
    Evaluate,
    Evaluated,
    EvaluationFailed,
    Event,
    Generated,
    LanesChanged,
    Leave,
    Outcome,
    Progress,
    Received,
    Rewind,
    Rewound,
    Started,
    Tick,
)
from esnode.nodestate import FINISHED, HELLO_FIRST, Running, Sent, State, Turn
from protocol.chain import BrokenChain, Chain
from protocol.counting import rounds
from protocol.entries import CommitBody, EntryKind
from protocol.lock import Lock
from protocol.messages import RELEASED, RUN_ENDED, Failed, Kind, NodeBeat, Release, Result, Unit
from protocol.ranges import MAX_ENGINES
from protocol.seeds import member_seed
from protocol.shaping import mean_and_std

__all__ = ["State", "new", "step"]

BEAT_EVERY = 2.0  # seconds without sending
SILENCE = 10.0  # of the coordinator, until Hello is said again
FAREWELL = 3.0  # a leaving or ended node waits for the Bye
TELL_EVERY = 4  # beats between repeated words on D: a lost Applied must not be lost for good


def new(lock: Lock, about: About) -> State:
    """A node of this run before its first event: `Started`, or a `Pause` and then `Started`."""
    return State(lock, about, engines=(about.fingerprint, *about.others))


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The node's answer to one event: its next state and the effects to perform in order."""
    if state.stopped:
        return state, ()
    turn = Turn(state)
    _mind_time(turn, event)
    _ON_EVENT[type(event)](turn, event)
    if not turn.state.stopped:
        _go_on(turn)
    return turn.state, tuple(turn.effects)


def _mind_time(turn: Turn, event: Event) -> None:
    """Time never goes back: after a clock that jumps back it goes on from where it was."""
    state = turn.state
    slip = 0.0 if isinstance(event, Started) else max(state.slip, state.now - event.now)
    turn.set(now=event.now + slip, slip=slip)


# ---------------------------------------------------------------- start, time, leaving


def _on_started(turn: Turn, event: Started) -> None:
    """Verify the ledger on disk; what is beyond its first bad entry is fetched again."""
    chain = Chain()
    for raw in event.raws:
        try:
            chain.append(raw)
        except BrokenChain as error:
            turn.note("ledger", reason=f"entry {chain.height} on disk is not used: {error.reason}")
            break
    held = tuple(catchup.Held(round, root, size, entry) for round, entry, root, size in event.snapshots)
    turn.set(held_snapshots=held)
    turn.set(chain=chain, applied=event.height, digest=event.digest, heard=turn.state.now)
    turn.set(term=event.term, term_proof=event.proof)
    if chain.height and chain.lock.run_id != turn.state.lock.run_id:
        turn.stop("the ledger in this node's folder is of another run: use another folder", 1)
    elif event.height and not turn.fits(event.height, event.digest):
        turn.note("checkpoint", reason=f"it does not fit the ledger at entry {event.height}: from the base")
        turn.rewind(far=True)
    else:
        turn.check_digest()
    if turn.state.paused:
        turn.set(unknown=True)
    elif not turn.state.stopped:
        turn.say_hello()


def _on_tick(turn: Turn, event: Tick) -> None:
    state = turn.state
    if state.until is not None and state.now >= state.until and _unheard(state):
        return turn.stop(state.leaving or RUN_ENDED + pausing.late(turn), 0)
    if state.paused:
        return pausing.on_tick(turn)
    if state.joined and state.now - state.heard > SILENCE:
        turn.note("link", reason=f"the coordinator is silent for {state.now - state.heard:.0f} s")
        turn.set(joined=False, hello_at=state.now, hello_wait=HELLO_FIRST)
    if turn.state.joined:
        if _beat_due(state):
            _beat(turn)
    elif state.now >= turn.state.hello_at and not state.leaving:
        turn.say_hello()


def _unheard(state: State) -> bool:
    """Whether an ended node waits in vain for its Bye.

    While a coordinator speaks and says none, this END may be none of the run's.
    """
    return bool(state.leaving or state.paused) or state.now - state.heard >= BEAT_EVERY + FAREWELL


def _on_leave(turn: Turn, event: Leave) -> None:
    if turn.state.leaving:
        return
    turn.set(leaving=event.reason or RELEASED, until=turn.state.now + FAREWELL, queue=())
    turn.cancel_running()
    turn.send(Release(event.reason))
    if not turn.state.joined:
        turn.stop(turn.state.leaving, 0)


def _beat_due(state: State) -> bool:
    """After two seconds without a word of either side: only a beat is always answered."""
    quiet = state.now - max(state.heard, state.beaten) >= BEAT_EVERY
    return quiet or state.now - state.spoke >= BEAT_EVERY


def _beat(turn: Turn) -> None:
    state = turn.state
    turn.send(NodeBeat(state.chain.height, state.chain.tip[:8], state.held))
    turn.set(beats=state.beats + 1, beaten=state.now)
    if turn.state.beats % TELL_EVERY == 0:
        turn.tell_applied()
        catchup.on_beat(turn)


# ---------------------------------------------------------------- the engine's answers


def _on_evaluated(turn: Turn, event: Evaluated) -> None:
    running = turn.end(event.unit)
    if running.cancelled or turn.state.leaving:
        return turn.note("unit", member=event.unit.member, what="dropped, it was cancelled")
    fingerprint, engines = event.outcome.fingerprint, turn.state.engines
    if new := fingerprint not in engines and len(engines) < MAX_ENGINES:
        turn.set(engines=(*engines, fingerprint))
    result = _result(turn.state, event.unit, event.outcome)
    evidence.keep(turn, event.unit, event.outcome.scores)
    turn.set(unacked=(*turn.state.unacked, Sent(result, turn.state.now)))
    if new:  # an engine that answers otherwise than those told of: before its result
        turn.say_hello_again()
    turn.send(result)


def _result(state: State, unit: Unit, outcome: Outcome) -> Result:
    lock, seed = state.lock, 0
    engines = {fingerprint: k for k, fingerprint in enumerate(state.engines)}
    if unit.kind == Kind.MEMBER:
        seed = member_seed(lock.run_id, unit.round, unit.member, lock.mirrored)
    return Result(
        unit=unit,
        seed=seed,
        sums=outcome.sums,
        parent=state.parent,
        digest=state.digest,
        correct=outcome.correct,
        floored=outcome.floored,
        tokens=outcome.tokens,
        times=outcome.times,
        evidence=outcome.evidence,
        engine=engines.get(outcome.fingerprint, MAX_ENGINES),
    )


def _on_failed(turn: Turn, event: EvaluationFailed) -> None:
    running = turn.end(event.unit)
    if not running.cancelled and not turn.state.leaving:
        turn.note("failed", member=event.unit.member, reason=event.reason)
        turn.send(Failed(event.unit, event.reason))


def _on_cancelled(turn: Turn, event: Cancelled) -> None:
    turn.end(event.unit)


def _on_progress(turn: Turn, event: Progress) -> None:
    turn.change(event.unit, progress=max(0, min(event.thousandths, FINISHED - 1)))


def _on_generated(turn: Turn, event: Generated) -> None:
    turn.change(event.unit, scoring=True)


def _on_lanes(turn: Turn, event: LanesChanged) -> None:
    """The coordinator gives work for so many lanes once it has heard of it."""
    about = replace(turn.state.about, lanes=event.lanes, lost=event.lost)
    if about != turn.state.about:
        turn.set(about=about)
        turn.say_hello_again()


def _on_applied(turn: Turn, event: EntriesApplied) -> None:
    state = turn.state
    assert len(event.digests) == state.applying > 0
    if state.rewind:
        return turn.set(applying=0)
    for height, digest in enumerate(event.digests[:-1], state.applied + 1):
        turn.agrees(height, digest)
    if turn.state.stopped:
        return
    reached = state.applied + state.applying
    bodies = [entry.body for entry in state.chain.entries[state.applied : reached]]
    commits = [body for body in bodies if isinstance(body, CommitBody)]
    turn.set(applied=reached, applying=0, digest=event.digests[-1], ms=event.ms)
    turn.check_digest()
    if not turn.state.stopped:
        turn.tell_applied()
        if commits:  # where this node is, for who watches it
            mean, _ = mean_and_std([member.reward for member in commits[-1].members])
            behind = f"{turn.state.rounds} of " * (turn.state.rounds < state.chain.round)
            turn.note("applied", what=behind + rounds(state.chain.round), mean=mean, ms=event.ms)
        catchup.after_apply(turn, len(commits))
        proof.after_applied(turn)


def _on_rewound(turn: Turn, event: Rewound) -> None:
    """The master is a state of the entries given, unless the ledger changed meanwhile: then once more."""
    given = turn.state.rewinding
    assert given is not None and 0 <= event.height <= len(given)
    turn.set(rewinding=None)
    chain = turn.state.chain
    if tuple(chain.entries[: event.height]) != given[: event.height]:
        return  # `rewind` is still set
    if event.height and not turn.fits(event.height, event.digest):
        turn.note("checkpoint", reason=f"it does not fit the ledger at entry {event.height}: from the base")
        return turn.rewind(far=True)
    turn.set(rewind=False, applied=event.height, digest=event.digest, ms=event.ms)
    if given:
        catchup.after_rewind(turn)
    turn.note("rewound", entries=event.height, digest=f"{event.digest:016x}", ms=event.ms)
    turn.check_digest()
    if not turn.state.stopped:
        turn.tell_applied()


def _on_received(turn: Turn, event: Received) -> None:
    inbox.receive(turn, event.message)


# ---------------------------------------------------------------- what is due after every event


def _go_on(turn: Turn) -> None:
    """Fetch what is missing, move the master, start the next units, say farewell when the run is over."""
    sources.fetch(turn)
    if turn.state.closing:
        return pausing.closed(turn)
    catchup.consider(turn)
    if turn.state.applying or turn.state.rewinding is not None:
        return
    if proof.go_on(turn):
        return
    if turn.state.rewind:
        return _rewind(turn)
    _advance(turn)
    state = turn.state
    if not state.applying and not state.leaving:
        _start_next(turn)
    if state.chain.ended and state.applied == state.chain.height and state.until is None:
        turn.tell_applied()
        turn.set(until=state.now + FAREWELL)


def _advance(turn: Turn) -> None:
    """Hand pending commits to the idle engine; entries that move no weights need none."""
    state = turn.state
    pending = state.chain.entries[state.applied :]
    commits = [k for k, entry in enumerate(pending) if entry.kind is EntryKind.COMMIT]
    if not commits:
        turn.set(applied=state.chain.height)
    elif not state.busy and not state.leaving and (count := catchup.batch(state, len(commits))):
        entries = tuple(pending[: commits[:count][-1] + 1])
        turn.set(applying=len(entries))
        turn.do(Apply(entries))


def _rewind(turn: Turn) -> None:
    if not turn.state.busy and not turn.state.leaving:
        entries = () if turn.state.rewind_far else tuple(turn.state.chain.entries)
        turn.set(rewinding=entries)
        turn.do(Rewind(entries))


def _start_next(turn: Turn) -> None:
    """Give every free lane a unit. One that was cancelled and comes again waits until it has ended."""
    state = turn.state
    free = state.about.lanes - state.busy
    if state.applied < state.chain.height or free <= 0:
        return
    ending = [run.unit for run in state.running]
    ready = [w for w in state.queue if w.parent == state.parent and w.unit.round == state.chain.round]
    for work in [work for work in ready if work.unit not in ending][:free]:
        queue = tuple(other for other in turn.state.queue if other is not work)
        turn.set(queue=queue, running=(*turn.state.running, Running(work.unit)))
        sigma = state.chain.sigma_at(work.unit.round) if work.unit.kind == Kind.MEMBER else 0.0
        turn.do(Evaluate(work.unit, sigma))


_ON_EVENT: dict[type[Event], Callable[[Turn, Any], None]] = {
    Started: _on_started,
    Tick: _on_tick,
    Received: _on_received,
    Evaluated: _on_evaluated,
    EvaluationFailed: _on_failed,
    Cancelled: _on_cancelled,
    Generated: _on_generated,
    LanesChanged: _on_lanes,
    Progress: _on_progress,
    EntriesApplied: _on_applied,
    Rewound: _on_rewound,
    Leave: _on_leave,
    **catchup.ON_EVENT,
    **pausing.HANDLERS,
    **proof.ON_EVENT,
    **inbox.ON_EVENT,
}
