"""A child process that cannot outlive its parent: `python -m esnode.leash MODULE ARGUMENT...` runs MODULE so.

The parent holds the other end of the child's stdin and never writes to it. When the parent is gone, however
it went (kill -9 included), that pipe ends, and the child's whole process group is killed at once: by Linux
itself, also while native code keeps the interpreter; elsewhere by a thread. Used by `children.py`, and by
processes of ours that are started in another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import runpy
import signal
import sys
import threading
import traceback
from typing import NoReturn

EXIT_BUG = 70
PR_SET_PDEATHSIG = 1


def hold(pipe: int) -> None:
    """End this process's group, which it leads, when the pipe's other end is gone. Nobody may write there."""
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_die_with_parent, args=(pipe,), name="leash", daemon=True).start()


def _die_with_parent(pipe: int) -> NoReturn:
    """For other systems, and for a parent that was gone before the kernel was asked."""
    with contextlib.suppress(OSError):  # a broken pipe means the same as its end
        while os.read(pipe, 64):
            pass
    end_group()


def end_group() -> NoReturn:
    """kill -9 of this process and of what it started: nobody is left to tell. What matters is on the disk."""
    with contextlib.suppress(PermissionError):  # a fenced scorer may kill nobody, and has started nobody
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(EXIT_BUG)


def die_with_thread() -> None:
    """Linux ends this process with the thread that started it, a parent's main one: also a process that is
    stopped, or inside native code. What it started itself stays.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run the module named on the command line as `__main__` with the remaining arguments."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # the group that dies with the parent must hold this child and its children only
    hold(0)
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        # Python's own exit code for this is 1, which here means a refusal that trying again cannot mend.
        traceback.print_exc()
        sys.exit(EXIT_BUG)


if __name__ == "__main__":
    main()
