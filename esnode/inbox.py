"""What a node does with each message of the coordinator.

Pure: protocol and the node's pure modules only. Each handler takes the `Turn` of the step it is part of; what
follows from the new state (apply, fetch, start the next unit) is `node.py`'s. Called by `node.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from esnode import branches, catchup, evidence, pausing, proof, sources
from esnode.events import Event, StoreTerm
from esnode.nodestate import HELLO_FIRST, UNITS_TOLD, Sent, Turn, Work
from esnode.snapshotevents import PeerEntries
from protocol.messages import (
    RELEASED,
    RUN_ENDED,
    STOPPED,
    Ack,
    Assign,
    Bye,
    Cancel,
    Commit,
    CoordBeat,
    Entries,
    Message,
    Refuse,
    Rehello,
    Welcome,
)
from protocol.terms import read_proof

# What a coordinator says once its Welcome was taken; before, it may be one that this node must not follow.
_OF_MY_COORDINATOR = (Assign, Cancel, Commit, CoordBeat, Entries)
RESEND_AFTER = 2.0  # an unacknowledged result


def receive(turn: Turn, message: Message) -> None:
    """Act on one message. What comes from a coordinator of a lower term than one answered is ignored."""
    handler = _HANDLERS.get(type(message))
    if handler is None or (isinstance(message, _OF_MY_COORDINATOR) and not turn.state.joined):
        return
    if turn.state.paused and not turn.state.closing and not isinstance(message, Refuse | Bye):
        return pausing.hear(turn, message)
    if isinstance(message, Welcome | CoordBeat) and message.term < turn.state.term:
        why = f"a coordinator of term {message.term} is ignored, one of term {turn.state.term} was answered"
        return turn.note("link", reason=why)
    turn.set(heard=turn.state.now)
    handler(turn, message)


# ---------------------------------------------------------------- the link


def _on_welcome(turn: Turn, message: Welcome) -> None:
    lock = turn.state.lock
    if message.run != lock.run_id or message.lock != lock.to_bytes():
        return turn.stop("the coordinator serves another run than this node's lock", 1)
    if not _answers_term(turn, message):
        return
    turn.set(joined=True, hello_wait=HELLO_FIRST, wanted=message.height, fetched=None)
    _resend(turn, after=0.0)  # to a coordinator that restarted before it had them, and waits for them
    catchup.on_welcome(turn)


def _answers_term(turn: Turn, message: Welcome) -> bool:
    """Whether the term is one to answer; a new one is on disk from then on."""
    state = turn.state
    claim = read_proof(state.lock.run_id, message.term, message.proof)
    if claim is None:
        turn.note("link", reason=f"a coordinator does not prove its term {message.term}, it is ignored")
        return False
    if message.term > state.term:
        turn.do(StoreTerm(message.term, message.proof))
        turn.set(term=message.term, term_proof=message.proof)
        return True
    answered = read_proof(state.lock.run_id, state.term, state.term_proof)
    if answered not in (None, claim):
        turn.note(
            "link", reason=f"{claim} is refused: {answered} was answered, and a term has one coordinator"
        )
        return False
    return True


def _on_refuse(turn: Turn, message: Refuse) -> None:
    turn.stop(f"the coordinator refuses this node: {message.reason}", 1)


def _on_rehello(turn: Turn, message: Rehello) -> None:
    """The coordinator restarted. One Hello answers all the Rehellos that are on their way."""
    if turn.state.joined and not turn.state.leaving:
        turn.set(joined=False, hello_wait=HELLO_FIRST)
        turn.say_hello()


def _on_coord_beat(turn: Turn, message: CoordBeat) -> None:
    if message.term > turn.state.term:
        turn.set(joined=False)  # its Welcome was lost: the next tick says Hello again
    if turn.state.joined:
        _learn_height(turn, message.height)
        _resend(turn, RESEND_AFTER)


def _resend(turn: Turn, after: float) -> None:
    """Send results again that are not acknowledged after so long: the result or its Ack was lost."""
    now = turn.state.now
    due = [sent for sent in turn.state.unacked if now - sent.at >= after]
    for sent in due:
        turn.send(sent.result)
    turn.set(unacked=tuple(Sent(s.result, now) if s in due else s for s in turn.state.unacked))


def _on_bye(turn: Turn, message: Bye) -> None:
    if message.reason.startswith(RELEASED) and not turn.state.leaving:
        # meant for an earlier process with this key, or for a pause that is over: say that this node is here
        return _on_rehello(turn, Rehello()) if not turn.state.paused else None
    if message.reason.startswith(STOPPED) and not turn.state.leaving:
        return turn.note("link", reason=f"{message.reason}; this node waits for its return")
    if turn.state.paused and message.reason.startswith(RUN_ENDED) and not turn.state.chain.ended:
        return pausing.close(turn)
    harmless = message.reason.startswith(RUN_ENDED) or bool(turn.state.leaving)
    turn.stop(message.reason, 0 if harmless else 1)


# ---------------------------------------------------------------- work


def _on_assign(turn: Turn, message: Assign) -> None:
    state, unit = turn.state, message.unit
    if state.leaving or unit.round < state.chain.round or len(state.queue) >= UNITS_TOLD:
        return
    if state.chain.height and unit.round == state.chain.round and message.parent != state.parent:
        return turn.note("assign", reason=f"unit of another state {message.parent.hex()} is ignored")
    if not any(unit == held for held, _ in state.held):
        turn.set(queue=(*state.queue, Work(unit, message.parent)))


def _on_cancel(turn: Turn, message: Cancel) -> None:
    turn.set(queue=tuple(work for work in turn.state.queue if work.unit != message.unit))
    turn.cancel_running(message.unit.__eq__)


def _on_ack(turn: Turn, message: Ack) -> None:
    turn.set(unacked=tuple(sent for sent in turn.state.unacked if sent.result.unit != message.unit))
    if message.verdict not in ("ok", "duplicate"):
        turn.note("ack", member=message.unit.member, round=message.unit.round, verdict=message.verdict)


# ---------------------------------------------------------------- the ledger


def _on_commit(turn: Turn, message: Commit) -> None:
    if message.height > turn.state.chain.height:
        _learn_height(turn, message.height + 1)
    else:
        _take_entries(turn, message.height, (message.entry,))


def _on_entries(turn: Turn, message: Entries) -> None:
    turn.set(fetched=None)
    _take_entries(turn, message.first, message.entries)


def _learn_height(turn: Turn, height: int) -> None:
    turn.set(wanted=max(turn.state.wanted, height))


def _take_entries(turn: Turn, first: int, raws: tuple[bytes, ...]) -> None:
    sources.take(turn, first, raws)
    _forget_old_rounds(turn)


def _on_peer_entries(turn: Turn, event: PeerEntries) -> None:
    sources.answered(turn, event)
    _forget_old_rounds(turn)


def _forget_old_rounds(turn: Turn) -> None:
    """A commit cancels the open units of its round: their results would be late."""
    state, round = turn.state, turn.state.chain.round
    turn.set(
        queue=tuple(
            work
            for work in state.queue
            if work.unit.round > round or (work.unit.round == round and work.parent == state.parent)
        ),
        unacked=tuple(sent for sent in state.unacked if sent.result.unit.round >= round),
    )
    turn.cancel_running(lambda unit: unit.round < round)


_HANDLERS: dict[type[Message], Callable[[Turn, Any], None]] = {
    Welcome: _on_welcome,
    Refuse: _on_refuse,
    Rehello: _on_rehello,
    CoordBeat: _on_coord_beat,
    Bye: _on_bye,
    Assign: _on_assign,
    Cancel: _on_cancel,
    Ack: _on_ack,
    Commit: _on_commit,
    Entries: _on_entries,
    **proof.HANDLERS,
    **evidence.HANDLERS,
    **catchup.HANDLERS,
    **branches.HANDLERS,
    **sources.HANDLERS,
}
ON_EVENT: dict[type[Event], Callable[[Turn, Any], None]] = {PeerEntries: _on_peer_entries}
