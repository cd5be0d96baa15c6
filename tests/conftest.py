"""A test run started in the background ignores Ctrl-C, and everything it starts would ignore it too."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
