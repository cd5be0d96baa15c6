"""The coordinator's pure core, a sequencer that never holds a model.

Lives here: `step`, what it does per event, and `fold`, the same for many.

Pure: protocol and coordinator's pure modules only. Called by `server.py` and the simulator, which perform the
effects in the order of `events.py`. `State`, `new`, `recall` and `status` are reached through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from coordinator import (
    amend,
    answers,
    auditing,
    claims,
    disputes,
    donors,
    enrolment,
    membership,
    roster,
    rounds,
    succession,
    work,
)
from coordinator.events import (
    AmendAsked,
    Effect,
    Event,
    OpsChanged,
    Received,
    RelayOpened,
    SecretTaken,
    Started,
    StopRequested,
    TermTaken,
    Tick,
)
from coordinator.membership import Node
from coordinator.picture import status
from coordinator.state import State, new, recall
from coordinator.terms import next_term
from coordinator.turn import Turn
from protocol.entries import LockBody, public_key
from protocol.messages import (
    RELEASED,
    RUN_ENDED,
    STOPPED,
    Applied,
    Bye,
    CoordBeat,
    Enrol,
    Entries,
    Failed,
    Fetch,
    Hello,
    Message,
    NodeBeat,
    Refuse,
    Rehello,
    Release,
    Result,
)

__all__ = ["State", "fold", "new", "next_term", "recall", "status", "step"]

LINGER = 60.0  # seconds END is served at most to nodes that have not confirmed it
LINGER_RELEASED = 3.0  # and to nodes that have left: one that is paused comes for it
LINGER_ALONE = 5.0  # and to nodes that might return, after a start on one's own run that has ended
ENTRIES_BYTES = 256 * 1024  # one Entries message; up to 64 wait for a node that does not read
UNITS_IN_BEAT = 64
MAX_NOTE = 200  # characters of a node's words that are kept


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The coordinator's answer to one event: its next state and the effects, in the order of `events.py`."""
    state, caused = fold(state, (event,))
    return state, caused[0]


def fold(state: State, events: Iterable[Event]) -> tuple[State, list[tuple[Effect, ...]]]:
    """Many events, one after the other: what `step` gives for each, with the copies made once."""
    turn = Turn(state)
    caused = []
    for event in events:
        if not turn.stopped:
            _handle(turn, event)
        caused.append(turn.taken())
    return turn.state, caused


def _handle(turn: Turn, event: Event) -> None:
    if not turn.started and not isinstance(event, Started):
        raise AssertionError("the first event of a process is Started")
    turn.set_clock(event.now)
    if isinstance(event, Received):
        _on_message(turn, event.peer, event.message)
    elif isinstance(event, Tick):
        turn.set(wall=event.wall)
        _on_tick(turn)
    elif isinstance(event, Started):
        _on_started(turn, event)
    elif isinstance(event, OpsChanged):
        _on_ops(turn, event)
    elif isinstance(event, RelayOpened):
        turn.set(relay=event.port)
        donors.announce(turn)
    elif isinstance(event, StopRequested):
        turn.stop(event.reason, 0, f"{STOPPED}: {event.reason}")
    elif isinstance(event, AmendAsked):
        amend.on_asked(turn, event)
    else:
        roster.ORDERS[type(event)](turn, event)


# ---------------------------------------------------------------- start, time, operator


def _on_started(turn: Turn, event: Started) -> None:
    state = turn.state
    assert event.term > state.term, "a term is used once"
    record = TermTaken(event.term, event.nonce)
    turn.persist(record)
    turn.state = replace(recall(state, record), started=True, wall=event.wall)
    if event.secret and not state.secret:
        turn.persist(SecretTaken(event.secret))
        turn.set(secret=event.secret)
    if state.chain.height and state.chain.lock.run_id != state.lock.run_id:
        recorded, given = state.chain.lock.run_id.hex()[:16], state.lock.run_id.hex()[:16]
        return turn.stop(f"this folder holds run {recorded}, the plan is that of run {given}", 1)
    trusted = state.chain.trusted if state.chain.height else [bytes.fromhex(k) for k in state.lock.trusted]
    if public_key(state.key) not in trusted:
        return turn.stop(
            f"the run does not trust this coordinator's signing key {public_key(state.key).hex()[:16]}, so "
            "nobody would follow it: use one that the lock names in `trusted`, or amend the run to trust it",
            1,
        )
    if not state.chain.height:
        turn.append(LockBody(state.lock.to_bytes()))
    turn.round = replace(turn.round, opened=event.now)
    if turn.chain.ended:
        turn.set(ending=event.now)
    succession.begin(turn, event.recover)
    work.close(turn)


def _on_ops(turn: Turn, event: OpsChanged) -> None:
    changed = event.ops.snapshot_every != turn.ops.snapshot_every
    turn.set(ops=event.ops)
    if changed:
        donors.announce(turn)
    if turn.over:
        return
    if turn.round.final and turn.round.number < event.ops.rounds:
        for key in turn.nodes:
            turn.take_all(key)
        turn.round = rounds.open_round(turn.chain, event.ops, turn.now)
    work.close(turn)
    work.assign(turn)


def _on_tick(turn: Turn) -> None:
    if turn.lineage.waiting:
        succession.weigh_shown(turn)
        return None if turn.stopped else succession.on_tick(turn)
    if turn.state.ending is not None:
        return _linger(turn, turn.state.ending)
    _expire(turn)
    turn.census()
    disputes.on_tick(turn)
    if turn.over:
        return
    auditing.on_tick(turn)
    roster.renew(turn)
    amend.on_tick(turn)
    work.give_up(turn)
    work.close(turn)
    work.assign(turn)


def _linger(turn: Turn, since: float) -> None:
    """After END: wait for the nodes that are there and have not confirmed it, then stop.

    After a start on a run that has ended it also waits, for a time, for those who worked lately.
    Those that have left may be paused and connected: they are told, and may come for the rest of the ledger.
    """
    state = turn.state
    released = [key for key, node in state.nodes.items() if node.left.startswith(RELEASED)]
    rest = released if state.now - since < LINGER_RELEASED else []
    for key in rest:
        turn.send(key, Bye(RUN_ENDED))
    present = any(claims.there(node, state.now) for node in state.nodes.values())
    if present:
        over = state.now - since >= LINGER
    else:
        alone = LINGER if answers.inherited(state) else LINGER_ALONE
        told = bool(state.nodes) and not rest and not answers.unheard(state)
        over = told or state.now - since >= alone
    if over:
        turn.stop(answers.last_words(state), 0)


def _expire(turn: Turn) -> None:
    """End the leases of nodes that are lost or whose running unit stands still."""
    state = turn.state
    pool = membership.median_pace(list(state.nodes.values()))
    for key, node in state.nodes.items():
        for running in membership.running(node):
            verdict = membership.expiry(node, running, state.ops.stall_seconds, pool, state.now)
            if verdict.ok:
                turn.take_all(key)
                still, late = (running.unit, running.progress), membership.overdue(node, running, state.now)
                turn.set_node(replace(turn.nodes[key], stalled=still, overdue=late))
                turn.note("membership", node=node.name, what="leases ended", reason=verdict.reason)
                break


def _on_message(turn: Turn, peer: bytes, message: Message) -> None:
    if isinstance(message, Enrol):
        return roster.on_enrol(turn, peer, message)
    if peer in turn.guests.revoked:
        return turn.send(peer, Bye(f"{roster.REVOKED}: {turn.guests.revoked[peer]}"))
    if isinstance(message, Hello):
        return _on_hello(turn, peer, message)
    if peer not in turn.guests.allowed:
        return _refuse(turn, peer, "a stranger", "this key is not on the coordinator's list")
    if isinstance(message, Entries):
        return _on_entries(turn, peer, message)
    node = turn.nodes.get(peer)
    if node is None:
        return turn.send(peer, Rehello())
    if node.left and not (node.paused and isinstance(message, Release)):
        return turn.send(peer, Bye(_goodbye(turn, node.left)))
    turn.own(peer).heard = turn.now
    handler = _HANDLERS.get(type(message))
    if turn.lineage.waiting and isinstance(message, Result | Failed):
        return  # not before this successor begins; the node says it again
    if handler is not None:
        handler(turn, peer, message)


def _refuse(turn: Turn, peer: bytes, name: str, reason: str) -> None:
    turn.send(peer, Refuse(reason))
    turn.count("refused nodes", f"{name}: {reason}")
    turn.note("membership", node=name, what="refused", reason=reason)


def _on_hello(turn: Turn, peer: bytes, hello: Hello) -> None:
    """Admit or refuse. A newer Hello of a key supersedes what was known of it; its units stay its own."""
    state = turn.state
    name = state.allowed.get(peer) or enrolment.label(hello.name, peer)
    answered = (node.hello.selftest for node in state.nodes.values() if membership.alive(node, state.now))
    if hello.selftest != state.selftest and state.selftest not in answered:
        turn.set(selftest=b"")  # nobody who is there stands for it: whoever brought it may have been put out
    verdict = membership.admit(hello, state.lock, peer in state.allowed, turn.state.selftest)
    if reason := verdict.reason if not verdict.ok else claims.barred(state, peer):
        return _refuse(turn, peer, name, reason)
    asked = answers.unsure(turn, peer)
    place = succession.place(turn, peer, name, hello)
    if not place.ok:
        return _refuse(turn, peer, name, place.reason) if place.reason else None
    state, chain = turn.state, turn.chain  # it may have brought entries
    old = state.nodes.get(peer)
    if old is not None:
        turn.take_all(peer)
    known = hello.digest and place.astray is None
    commits = membership.commits_below(chain, hello.height) if known else -1
    node = Node(peer, name, state.numbers.get(peer), hello, state.now, hello.height, hello.tip[:8], commits)
    node = replace(node, astray=place.astray, quarantined=state.quarantined.get(peer, ""))
    auditing.forget(turn, peer)
    if old is not None:
        node = replace(node, pace=old.pace, ms=old.ms, **membership.tally(old))
    turn.set_node(node)
    turn.set(selftest=turn.state.selftest or hello.selftest)
    answers.greet(turn, peer)
    reason = (old and membership.changed(old.hello, hello)) or place.reason
    kept = asked and not answers.unsure(turn, peer)
    what = "answered" if kept else "returned" if old else "joined"
    turn.note("membership", node=name, what=what, reason=reason)
    if place.astray is not None:
        return succession.stray(turn, peer, hello.height)
    if known:
        disputes.observe(turn, peer, commits, hello.digest)
    if turn.over:
        return
    work.reconcile(turn, peer, dict.fromkeys(hello.units, 0))
    turn.count_in(turn.nodes[peer])
    work.close(turn)
    work.assign(turn, [peer])


def _on_fetch(turn: Turn, peer: bytes, message: Fetch) -> None:
    if turn.nodes[peer].astray is not None:
        return  # its entries are others': it has to go back first
    raws: list[bytes] = []
    size = 0
    for entry in turn.chain.entries[message.first : message.first + message.count]:
        size += len(entry.raw)
        if raws and size > ENTRIES_BYTES:
            break
        raws.append(entry.raw)
    if raws:
        turn.send(peer, Entries(message.first, tuple(raws)))


def _on_applied(turn: Turn, peer: bytes, message: Applied) -> None:
    if not _same_branch(turn, turn.nodes[peer], message.height, message.tip):
        return
    node, chain = turn.nodes[peer], turn.chain
    commits = membership.commits_below(chain, message.height)
    height = max(node.height, message.height)
    turn.set_node(replace(node, height=height, applied=commits, ms=message.ms or node.ms))
    disputes.observe(turn, peer, commits, message.digest)
    if turn.stopped:
        return
    if chain.ended and message.height == chain.height:
        turn.send(peer, Bye(RUN_ENDED))
        turn.set_node(replace(turn.nodes[peer], left=RUN_ENDED))
        return _linger(turn, turn.now)
    work.close(turn)
    work.assign(turn, [peer])


def _same_branch(turn: Turn, node: Node, height: int, tip: bytes) -> bool:
    """Whether a node's ledger is a beginning of mine; if not, it is asked for or sent back."""
    if not succession.holds(turn.chain, height, tip):
        succession.stray(turn, node.key, height)
        return False
    if node.astray is not None:
        succession.forget(turn, node.key)
        turn.set_node(replace(turn.nodes[node.key], astray=None))
        turn.note("membership", node=node.name, what="went back", reason=f"to entry {node.astray}")
    return True


def _on_entries(turn: Turn, peer: bytes, message: Entries) -> None:
    if reason := succession.on_entries(turn, peer, message):
        _refuse(turn, peer, turn.allowed[peer], reason)


def _in_check(turn: Turn, peer: bytes, message: Message) -> None:
    """An answer in a dispute or an audit; it may set work free or let the round close."""
    _CHECKS[type(message)](turn, peer, message)
    if not turn.over:
        work.close(turn)
        work.assign(turn)


def _on_release(turn: Turn, peer: bytes, message: Release) -> None:
    node, reason = turn.nodes[peer], message.reason[:MAX_NOTE]
    paused = (reason or "by its owner") if message.stays else ""
    if paused and paused == node.paused and not turn.chain.ended:
        return  # it says again that it is there
    turn.take_all(peer)
    turn.set_node(replace(node, left=f"{RELEASED}: {reason}", paused=paused))
    turn.send(peer, Bye(_goodbye(turn, RELEASED)))
    turn.note("membership", node=node.name, what="pauses" if paused else "left", reason=reason)
    turn.census()
    if turn.over:
        return
    work.give_up(turn)
    work.close(turn)
    work.assign(turn)


def _goodbye(turn: Turn, reason: str) -> str:
    """What a node that takes no more work is told: after END, that, for it may be paused and wait."""
    return RUN_ENDED if turn.chain.ended else reason


def _on_beat(turn: Turn, peer: bytes, message: NodeBeat) -> None:
    if not _same_branch(turn, turn.nodes[peer], message.height, message.tip):
        return
    node = turn.nodes[peer]
    turn.set_node(replace(node, height=message.height, tip=message.tip))
    if not turn.over:
        work.reconcile(turn, peer, dict(message.units))
    if answers.unsure(turn, peer):
        return turn.send(peer, Rehello())
    units = tuple(lease.unit for lease in turn.nodes[peer].leases)[:UNITS_IN_BEAT]
    turn.send(peer, CoordBeat(turn.term, turn.chain.height, turn.chain.tip[:8], units))
    work.assign(turn, [peer])


_CHECKS = {**disputes.HANDLERS, **auditing.HANDLERS}
_HANDLERS: dict[type[Message], Callable[[Turn, bytes, Any], None]] = {
    Fetch: _on_fetch,
    Applied: _on_applied,
    Result: work.on_result,
    Failed: work.on_failed,
    Release: _on_release,
    NodeBeat: _on_beat,
    **dict.fromkeys(_CHECKS, _in_check),
    **donors.HANDLERS,
}
