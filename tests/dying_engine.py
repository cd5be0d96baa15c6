"""The toy engine, and a kill -9 at one chosen moment: the loader `tests.dying_engine:load`.

DIE_AT names the moment, DIE_NODE the node that dies there, once: a file in its folder remembers it. Moments:
`write` (half of a checkpoint is on the disk), `synced` (all of it, under its draft's name), `renamed` (before
older ones go), `load` (half of a checkpoint is in the master), `rewind` (before anything is touched),
`rewound`, `apply` (before an update), `applied` (after it, before anybody knows).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from esnode import snapshot
from esnode.nodeoptions import Options
from protocol.entries import Entry
from protocol.lock import Lock
from tests.toy_engine import ToyWorkshop

MARK = "died"


class DyingWorkshop(ToyWorkshop):
    """Dies where it is told to."""

    def __init__(self, lock: Lock, name: str, folder: Path, moment: str) -> None:
        self.moment, self.place = moment, folder
        self.armed = name == os.environ.get("DIE_NODE")
        super().__init__(lock, name, folder=folder)

    def die(self, moment: str) -> None:
        mark = self.place / MARK
        if self.armed and moment == self.moment and not mark.exists():
            mark.write_text(moment)
            os.kill(os.getpid(), signal.SIGKILL)

    def apply(self, entries: Sequence[Entry]) -> list[int]:
        self.die("apply")
        digests = super().apply(entries)
        self.die("applied")
        return digests

    def rewind(self, entries: Sequence[Entry]) -> tuple[int, int]:
        self.die("rewind")
        found = super().rewind(entries)
        self.die("rewound")
        return found

    def refill(self, pieces: Iterable[tuple[int, int, memoryview]]) -> int:
        return super().refill(self._half(pieces))

    def _half(self, pieces: Iterable[tuple[int, int, memoryview]]) -> Iterator[tuple[int, int, memoryview]]:
        for array, first, data in pieces:
            yield array, first, data[: len(data) // 2]
            self.die("load")
            yield array, first + len(data) // 2, data[len(data) // 2 :]


def load(options: Options, lock: Lock) -> DyingWorkshop:
    """Called by the daemon."""
    made = DyingWorkshop(lock, options.name, options.folder, os.environ.get("DIE_AT", ""))
    write_at, replace = snapshot.write_at, os.replace

    def dying_write(descriptor: int, buffer: memoryview, place: int) -> int:
        if len(buffer) >= 2:
            write_at(descriptor, buffer[: len(buffer) // 2], place)
        made.die("write")
        return write_at(descriptor, buffer, place)

    def dying_replace(old: Any, new: Any) -> None:
        if str(new).endswith(snapshot.SUFFIX):
            made.die("synced")
        replace(old, new)
        if str(new).endswith(snapshot.SUFFIX):
            made.die("renamed")

    snapshot.write_at, os.replace = dying_write, dying_replace  # type: ignore[assignment]
    return made
