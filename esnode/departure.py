"""SIGTERM ends a node within seconds: at once and with one line before it holds anything, else by force.

Shell. Imports next to nothing, because it is called before the slow imports of `daemon.py` and by the
commands `join` and `node`. Once the daemon is at work its own handler takes over, which sets the limit here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import Any, NoReturn

SECONDS = 3.0  # for what cleans up behind itself; then the process ends wherever it is
_WORDS = b"esnode: left before it had begun to work; the same command goes on\n"


def at_once(*numbers: signal.Signals) -> None:
    """Install the handler, in the main thread, for these signals besides SIGTERM."""
    for number in (signal.SIGTERM, *numbers):
        signal.signal(number, leave)


def leave(number: int = signal.SIGTERM, _frame: Any = None) -> NoReturn:
    """End this process with code 0: by unwinding, or by force when native code or threads do not let go."""
    for ignored in {signal.SIGTERM, number}:
        signal.signal(ignored, signal.SIG_IGN)
    os.write(2, _WORDS)
    limit(SECONDS)
    atexit.register(_end)  # the last that is registered comes first: before torch takes itself apart
    raise SystemExit(0)


def _end() -> None:
    """Skip the interpreter's own end: it takes seconds on a busy machine, and no limit holds during it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone: nothing to say any more
            stream.flush()
    os._exit(0)


def limit(seconds: float) -> None:
    """End this process with code 0 after so long, wherever it is: what matters is on the disk already."""
    force = threading.Timer(seconds, os._exit, (0,))
    force.daemon = True
    force.start()
