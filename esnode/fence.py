"""A fence round scorers that read what a model wrote. Standard library only; called by `scoring_worker.py`.

Some third-party scorers evaluate a model's text as Python (four of reasoning-gym's call eval, others and
math-verify go through sympy, which does). Nothing a model says may act on the machine, so once such a task
is loaded its process gives up starting programs, networking, changing files and loading native code: an
answer that tries costs the floor. This is a fence, not a prison: a Python audit hook and a limit on file
sizes, inside a process that has little to lose.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

# Beginnings of the names of audit events (docs.python.org/3/library/audit_events.html).
FORBIDDEN = (
    "ctypes.", "os.ch", "os.exec", "os.fork", "os.kill", "os.link", "os.lockf", "os.mkdir", "os.posix_spawn",
    "os.remove", "os.rename", "os.rmdir", "os.setxattr", "os.spawn", "os.symlink", "os.system", "os.truncate",
    "os.utime", "pty.", "shutil.", "signal.pthread_kill", "socket.", "sqlite3.", "subprocess.",
    "sys.remote_exec", "urllib.", "webbrowser.",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Fenced(PermissionError):
    """Scored text tried to act on the machine."""


def close() -> None:
    """From here on, for the rest of the process. Imports still work; they write no bytecode."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # pipes are no files: answers still pass

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            raise Fenced(f"writing {arguments[0]!r:.80} is not for a scorer")
        if event.startswith(FORBIDDEN):
            raise Fenced(f"{event} is not for a scorer")

    sys.addaudithook(watch)
