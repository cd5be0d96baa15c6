"""A node that asks for the whole ledger again and again, reads nothing and is stopped with all queues full.

`python -m tests.stuck_peer RUN NAME ASKS`: as the node NAME of the folder RUN it says Hello, sends ASKS
Fetches and stops itself (SIGSTOP).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from esnode import nodeoptions
from esnode.events import About
from esnode.link import Link
from esnode.nodestate import State, Turn
from protocol import keys
from protocol.messages import Fetch, Hello, Welcome
from tests import toy_engine
from tests.runs import wait_for


def main() -> None:
    """Say Hello, ask, stop."""
    run, name, asks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    lock = nodeoptions.read_lock(run)
    secret = keys.read_curve(run / "nodes" / name / "curve.key")
    link = Link(nodeoptions.published_address(run), nodeoptions.pinned_key(run), secret)
    wait_for(lambda: link.receive() or link.connections)
    link.send(hello(toy_engine.ToyWorkshop(lock, name).about, lock))
    wait_for(lambda: any(isinstance(message, Welcome) for message in link.receive()))
    while asks:
        if link.send(Fetch(0, 256)):
            asks -= 1
        else:
            time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def hello(about: About, lock: object) -> Hello:
    """What an honest node would say before its first entry."""
    turn = Turn(State(lock, about))  # type: ignore[arg-type]
    turn.say_hello()
    return turn.effects[0].message  # type: ignore[union-attr,return-value]


if __name__ == "__main__":
    main()
