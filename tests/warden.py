"""Nothing that a test starts outlives the tests: a process beside them ends what is left when they are gone.

`watch` marks the environment, which every process inherits that a test starts, in whatever session or
process group, and starts the warden: `python -m tests.warden MARK PID`. It waits until PID is no more its
parent (kill -9 included), then kills whoever carries the mark, again and again until nobody is left. Only
Linux shows a process's environment (/proc); elsewhere the warden finds nobody. Processes that are forked and
never call exec carry no mark: they use `leave_with_parent`. Called by `conftest.py` and `chaos.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "ESNODE_TESTS"  # in the environment of all that the tests start
LOOK = 0.2  # seconds
PR_SET_PDEATHSIG = 1


def watch() -> str:
    """From now on all processes started here, and theirs, end with this one at the latest. Their mark."""
    outside = {name: value for name, value in os.environ.items() if name != MARK}
    mark = os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(8)}"
    command = [sys.executable, "-m", "tests.warden", mark, str(os.getpid())]
    subprocess.Popen(
        command,
        cwd=Path(__file__).resolve().parent.parent,
        env=outside,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # whoever kills the tests' process group does not kill their warden
    )
    return mark


def marked(mark: str) -> list[int]:
    """Who carries a mark."""
    found = []
    words = f"{MARK}={mark}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if words in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return found


def end(mark: str) -> None:
    """kill -9 to all with a mark, until nobody is left who could start another, or a minute has passed."""
    limit = time.monotonic() + 60
    while (left := marked(mark)) and time.monotonic() < limit:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(LOOK)


def leave_with_parent(parent: int) -> None:
    """In a child that `parent` forked: die with it (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it was asked for
            os._exit(1)


def main() -> None:
    mark, parent = sys.argv[1], int(sys.argv[2])
    while os.getppid() == parent:
        time.sleep(LOOK)
    end(mark)


if __name__ == "__main__":
    main()
