"""Memory that the engines of this machine have planned and not yet taken, known to each other.

Loading takes minutes where a model is large, and several nodes are often started in one moment: each would
find the same memory free. A file per engine says what it will take, locked as long as the engine lives; what
its process holds already the system counts itself. Whoever cannot write there reserves nothing. Linux; called
by `memory.py`, `engines/transformers_engine.py` and `engines/packing.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PROC = Path("/proc")
_numbers = itertools.count()


def take(size: int) -> IO[str] | None:
    """Reserve bytes for this process as long as what is returned is open; None where that cannot be."""
    try:
        place = _place()
        place.mkdir(mode=0o700, exist_ok=True)
        path = place / f"{os.getpid()}-{next(_numbers)}"
        draft = path.with_name(f".{path.name}")
        file = draft.open("w", encoding="ascii")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(size))
        file.flush()
        draft.rename(path)  # from now on it counts, and its ctime says since when
    except OSError:
        return None
    return file


def outstanding() -> int:
    """Bytes that other processes have reserved and do not hold yet; where we have reserved, of those before
    us: of two that plan in one moment the first may go on.
    """
    found = sorted(_living())
    ours = [row for row in found if row[1] == os.getpid()]
    planned: dict[int, int] = {}
    for when, process, size in found:
        if process != os.getpid() and (not ours or (when, process) < ours[-1][:2]):
            planned[process] = planned.get(process, 0) + size
    return sum(max(0, size - _held(process)) for process, size in planned.items())


def engines() -> int:
    """How many engines of this machine have reserved memory."""
    return len(list(_living()))


def _place() -> Path:
    return Path(tempfile.gettempdir()) / f"esnode-memory-{os.getuid()}"


def _living() -> Iterator[tuple[int, int, int]]:
    """(since when, process, bytes) of each; files of engines that are gone are removed.

    A folder that another user has made in our name says nothing.
    """
    place = _place()
    if not place.is_dir() or place.stat().st_uid != os.getuid():
        return
    for path in place.glob("[0-9]*-*"):
        with contextlib.suppress(OSError, ValueError), path.open(encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield os.fstat(file.fileno()).st_ctime_ns, int(path.name.partition("-")[0]), int(file.read())
            else:
                path.unlink()


def _held(process: int) -> int:
    """Bytes of memory that a process has taken, shared memory included, files that are mapped not."""
    try:
        lines = (_PROC / str(process) / "status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in fields)
