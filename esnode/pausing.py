"""What a node does when its machine's owner pauses it, and when the pause ends.

Pure: protocol and the node's pure modules only. A pause is a clean leave that keeps the process, the replica
and the connection: everything is handed back, nothing is taken. The end of it is a Hello, which brings the
rounds that were missed. Called by `node.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from esnode.events import Event, Pause, Resume
from esnode.nodestate import HELLO_FIRST, Turn
from protocol.messages import Release


def _on_pause(turn: Turn, event: Pause) -> None:
    state = turn.state
    turn.set(paused=event.reason)
    if state.leaving or state.paused:
        return
    turn.note("pause", reason=event.reason)
    turn.set(queue=())
    turn.cancel_running()
    if state.joined:
        turn.send(Release(event.reason))
        turn.set(joined=False)


def _on_resume(turn: Turn, event: Resume) -> None:
    if not turn.state.paused:
        return
    turn.note("pause", reason="it is over")
    turn.set(paused="", hello_wait=HELLO_FIRST, fetched=None)
    turn.say_hello()


HANDLERS: dict[type[Event], Callable[[Turn, Any], None]] = {Pause: _on_pause, Resume: _on_resume}
