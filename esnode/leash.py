"""A child process that cannot outlive its parent: `python -m esnode.leash MODULE ARGUMENT...` runs MODULE so.

The parent holds the other end of the child's stdin and never writes to it. When the parent is gone, however
it went (kill -9 included), that pipe ends, and the child kills its whole process group at once. This works on
every POSIX system, unlike Linux's parent-death signal, and takes a node's scoring processes along. Used by
`children.py`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
from typing import NoReturn

EXIT_BUG = 70


def _die_with_parent() -> NoReturn:
    with contextlib.suppress(OSError):  # a broken pipe means the same as its end
        while os.read(0, 64):
            pass
    os.killpg(0, signal.SIGKILL)  # nobody is left to tell; the journal is written for exactly this
    raise AssertionError("unreachable: the signal above cannot be caught")


def main() -> None:
    """Run the module named on the command line as `__main__` with the remaining arguments."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # the group that dies with the parent must hold this child and its children only
    threading.Thread(target=_die_with_parent, name="leash", daemon=True).start()
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
