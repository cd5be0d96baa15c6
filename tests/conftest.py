"""For all tests: nothing they start outlives them, and a run started in the background knows Ctrl-C.

A test run started in the background ignores Ctrl-C, and everything it starts would ignore it too.
"""

from __future__ import annotations

import signal

from tests import warden

warden.watch()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
