"""Where the console script begins: a Ctrl-C during the imports of `main.py` is one line too, and code 130.

Imports next to nothing. What comes after the imports is `main.main`'s, which takes the signal over.
"""

from __future__ import annotations

import atexit
import os
import signal
from typing import Any, NoReturn

EXIT_INTERRUPTED = 130


def _interrupted(*_: Any) -> NoReturn:
    """At once: what is half imported may turn an exception into another one, or lose it."""
    os.write(2, b"esnode: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def main() -> NoReturn:
    """Run one command and exit, as `main.main`."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else somebody has Ctrl-C ignored
        signal.signal(signal.SIGINT, _interrupted)
    # The last to be called: when the interpreter goes, Python sets back its handler and a Ctrl-C would kill.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from esnode.cli import main as command

    command.main(interrupt=usual)
