"""What a node does when its machine's owner pauses it, and when the pause ends.

Pure: protocol and the node's pure modules only. A pause is a clean leave that keeps the process, the replica
and the connection: everything is handed back, nothing is taken. On every new connection the node says who it
is and that it takes nothing, so that it is told of the run's end: then it fetches the rest of the ledger,
computing nothing, and ends. It repeats every few seconds that it is paused, so that a machine that was
switched off meanwhile reads as lost. The end of the pause is a Hello, which brings the rounds that were
missed. Called by `node.py` and `inbox.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from esnode.events import Event, Pause, Resume
from esnode.nodestate import HELLO_FIRST, Turn
from protocol.counting import rounds
from protocol.messages import RUN_ENDED, Message, Rehello, Release

REPEAT_EVERY = 5.0  # seconds between two words that it is here, and paused; a third of what makes it lost
CLOSING = 15.0  # seconds to get the rest of the ledger in, once the run has ended


def _on_pause(turn: Turn, event: Pause) -> None:
    state = turn.state
    turn.set(paused=event.reason)
    if state.leaving or state.paused:
        return
    turn.note("pause", reason=event.reason)
    turn.set(queue=())
    turn.cancel_running()
    if state.joined:
        turn.send(Release(event.reason, stays=True))
    turn.set(joined=False, unknown=not state.joined)


def _on_resume(turn: Turn, event: Resume) -> None:
    if not turn.state.paused:
        return
    turn.note("pause", what="over")
    turn.set(paused="", unknown=False, hello_wait=HELLO_FIRST, fetched=None, closing=False)
    if not turn.state.leaving:
        turn.set(until=None)
    turn.say_hello()


def close(turn: Turn) -> None:
    """The run has ended: introduce this node once more, for the entries up to END."""
    if not turn.state.closing:
        turn.note("pause", what="the run has ended, the rest of the ledger is fetched")
        turn.set(closing=True, joined=False, unknown=False, fetched=None, hello_wait=HELLO_FIRST)
        turn.set(until=turn.state.now + CLOSING)
        turn.say_hello()


def closed(turn: Turn) -> None:
    """Called after every event of a node that is closing: it ends as soon as its ledger does."""
    if turn.state.chain.ended:
        turn.send(Release(RUN_ENDED))
        turn.stop(RUN_ENDED, 0)


def late(turn: Turn) -> str:
    """What a node says that ends without END in its ledger; "" for one that has it."""
    state = turn.state
    if not state.closing or state.chain.ended:
        return ""
    return f"; the ledger here stops after {rounds(state.chain.round)}: copy another node's"


def hear(turn: Turn, message: Message) -> None:
    """Anything but a goodbye, during a pause: most was said before the coordinator knew of it."""
    if isinstance(message, Rehello):
        turn.set(unknown=True)


def on_tick(turn: Turn) -> None:
    """That it takes nothing, again and again; over a connection that does not know this node, who is here."""
    state = turn.state
    if state.closing:
        if not state.joined and state.now >= state.hello_at:
            turn.say_hello()
    elif state.unknown:
        if state.now >= state.hello_at:
            turn.set(unknown=False)
            turn.say_hello()
            turn.send(Release(state.paused, stays=True))
    elif not state.leaving and state.now - state.spoke >= REPEAT_EVERY:
        turn.send(Release(state.paused, stays=True))


HANDLERS: dict[type[Event], Callable[[Turn, Any], None]] = {Pause: _on_pause, Resume: _on_resume}
