"""What the coordinator's process asks of the system: open files, turns of the processor, memory.

Shell. Called by `server.py` at its start.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource

from protocol.errors import UserError
from protocol.logfile import remedy

SPARE_FILES = 64  # descriptors beyond one per node
FEWEST_FILES = 48  # it does not start with less
MOST_FILES = 65_536  # taken when the system allows it: who will be invited is not known at the start
GC_AFTER = 50_000  # new objects between looks for cycles
KEPT_BYTES = 16 * 1024 * 1024  # of free memory; by itself glibc gives back and asks again for 128 KB
_M_TRIM_THRESHOLD = -1  # glibc's malloc.h


class TooFewFiles(UserError):
    """The system lets this process open too few files to work at all."""


def raise_file_limit(nodes: int, log: logging.Logger) -> None:
    """One descriptor per connection: use what the system allows, and say so when it is too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft < allowed:
        soft = allowed
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < FEWEST_FILES:  # libzmq would end the process without a word of ours
        raise TooFewFiles(f"this process may open {soft} files only; {remedy(errno.EMFILE)}")
    if soft < nodes + SPARE_FILES:
        log.warning(
            "the limit of open files (%d) is too low for %d nodes; raise it with ulimit -n", soft, nodes
        )


def take_turns() -> None:
    """Let the threads of this process finish what they are at: a message wakes one for the other.

    Under SCHED_BATCH whoever is woken waits for its turn, at most some milliseconds, and finds many messages
    then. Started threads and processes inherit it. Where the system has no such thing, nothing changes.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_memory() -> None:
    """Look for garbage rarely, and hold on to memory that was freed: the next batch of messages needs it."""
    gc.freeze()  # what a start has read lives as long as the process
    gc.set_threshold(GC_AFTER)  # values hold no cycles: looking at all of them often would find nothing
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
