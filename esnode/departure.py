"""SIGTERM before a node holds anything: it ends at once, with exit code 0 and one line.

Shell. Imports next to nothing, because it is called before the slow imports of `daemon.py` and by the
commands `join` and `node`. Once the daemon is at work its own handler takes over.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, NoReturn

SECONDS = 3.0  # for what cleans up behind itself; then the process ends wherever it is
_WORDS = b"esnode: left before it had begun to work; the same command goes on\n"


def at_once() -> None:
    """Install the handler, in the main thread."""
    signal.signal(signal.SIGTERM, leave)


def leave(_number: int = 0, _frame: Any = None) -> NoReturn:
    """End this process with code 0: by unwinding, or by force when native code or threads do not let go."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(2, _WORDS)
    force = threading.Timer(SECONDS, os._exit, (0,))
    force.daemon = True
    force.start()
    raise SystemExit(0)
