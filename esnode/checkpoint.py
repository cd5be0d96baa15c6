"""A node's own snapshots: written while it goes on working, two kept, the newest that fits loaded.

Shell. The writer is a thread that reads the masters in place: between two applies nothing moves them (law
L3), so there is no copy to pay for, and hashing and writing leave the interpreter free for the engine. An
apply or rewind that comes while it writes waits for it (`settle`). Called by the workshops, from the engine's
thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from esnode import snapshot
from esnode.room import Room
from esnode.snapshot import Header, Reader, SnapshotError
from protocol.counting import milliseconds, rounds
from protocol.entries import Entry, EntryKind
from protocol.lock import Lock

KEPT = 2  # a donor of the last one may still be busy when the next is written
LAST_SECONDS = 2.0  # for a file that is being written when its node ends; a large one is given up then
FOLDER = "checkpoint"

log = logging.getLogger(__name__)


class Masters(Protocol):
    """The state arrays of an engine, in the order of `snapshot.header_for`."""

    def chunk(self, array: int, first: int, end: int) -> Any:
        """Bytes `first` to `end` of an array, as a buffer."""

    def digest_of(self, name: str, first: int, data: Any) -> int:
        """What these bytes of a tensor's master, from element `first` on, add to D."""

    def refill(self, pieces: Iterable[tuple[int, int, memoryview]]) -> int:
        """Overwrite all arrays with (array, first byte, buffer) pieces and take D afresh; returns it.

        What raises in between leaves masters that refuse to be used until they are refilled or reset.
        """


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot was written (`root`), or was not (`reason`)."""

    round: int
    entry: bytes  # hash of the commit it stands behind
    root: bytes
    size: int
    reason: str
    ms: int


class Checkpoints:
    """The checkpoint folder of one node."""

    def __init__(self, folder: Path, lock: Lock, masters: Masters, room: Room) -> None:
        """`folder`: the node's own."""
        self.folder = folder / FOLDER
        self._lock = lock
        self._masters = masters
        self._room = room
        self._writer: threading.Thread | None = None
        self._leaving = False

    # ------------------------------------------------------------ writing

    def begin(self, round: int, entry: bytes, digest: int, done: Callable[[Saved], None]) -> None:
        """Start writing the masters as they are now; `done` is called from the writing thread."""
        self.settle()
        header = snapshot.header_for(self._lock, round, entry, digest)
        self._writer = threading.Thread(
            target=lambda: done(self._write(header)), name="checkpoint", daemon=True
        )
        self._writer.start()

    def settle(self) -> None:
        """Wait until nothing reads the masters; call it before they change."""
        writer, self._writer = self._writer, None
        if writer is not None and writer.is_alive():
            began = time.monotonic()
            writer.join()
            log.info("waited %.2f s for a checkpoint to be written", time.monotonic() - began)

    def close(self) -> None:
        """Finish the file that is being written if that is soon done, else give it up with its draft."""
        if self._writer is not None:
            self._writer.join(LAST_SECONDS)
        self._leaving = True
        self.settle()

    def _write(self, header: Header) -> Saved:
        began = time.monotonic()

        def spent() -> int:
            return milliseconds(time.monotonic() - began)

        try:
            short = self._make_room(header)
            if short:
                return Saved(header.round, header.entry, b"", 0, short, spent())
            path, root = snapshot.write(self.folder, header, self._proven(header))
            self._prune(KEPT)
            return Saved(header.round, header.entry, root, path.stat().st_size, "", spent())
        except SnapshotError as error:
            return Saved(header.round, header.entry, b"", 0, str(error), spent())
        except OSError as error:  # the run goes on without this checkpoint
            return Saved(header.round, header.entry, b"", 0, f"{error.strerror} ({self.folder})", spent())

    def _proven(self, header: Header) -> snapshot.Read:
        """The masters' bytes in order, whose digest must have come to D when the last are read.

        So what is written, and the root told of it, is the state the ledger speaks of, or nothing is. The
        draft has taken its room by then: nothing is written either where that leaves the disk too little,
        as when another node of this machine was about to write as well.
        """
        seen = summed = 0

        def read(array: int, first: int, end: int) -> Any:
            nonlocal seen, summed
            if self._leaving:
                raise SnapshotError("this node is leaving")
            if not seen and (short := self._room.short(self.folder, 0)):
                raise SnapshotError(short)
            data, spec = self._masters.chunk(array, first, end), header.arrays[array]
            summed += self._masters.digest_of(spec.name, first // spec.item, data)
            seen += end - first
            if seen == header.total and summed % 2**64 != header.digest:
                raise SnapshotError(
                    f"what was read of the weights has digest {summed % 2**64:016x}, the state "
                    f"{header.digest:016x}"
                )
            return data

        return read

    def _make_room(self, header: Header) -> str:
        """Why there is no room for this snapshot; "" when there is. All but the newest may go for it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(self.folder)
        if not self._room.short(self.folder, header.total):
            return ""
        self._prune(1)
        return self._room.short(self.folder, header.total)

    def _prune(self, keep: int) -> None:
        for old in snapshot.files(self.folder)[keep:]:
            old.unlink(missing_ok=True)

    # ------------------------------------------------------------ reading

    def load(self, entries: Sequence[Entry]) -> tuple[int, int] | None:
        """Refill the masters from the newest file that is a state of these entries: (entries reflected, D).

        None when there is none; the masters may have been touched then and must be reset.
        """
        self.settle()
        heights = {entry.hash: k for k, entry in enumerate(entries) if entry.kind is EntryKind.COMMIT}
        for path in snapshot.files(self.folder):
            try:
                with Reader(path) as reader:
                    header = reader.header
                    height = heights.get(header.entry)
                    why = self._misfit(header, entries, height)
                    if not why and height is not None:
                        digest = self._masters.refill(_pieces(reader))
                        if digest == header.digest:
                            return height + 1, digest
                        why = f"its weights have digest {digest:016x}, its header says {header.digest:016x}"
                        path.unlink(missing_ok=True)  # nobody else shall load it
            except SnapshotError as error:
                why = str(error)
                path.unlink(missing_ok=True)  # another lane may have been faster
            except OSError as error:
                why = str(error)
            log.warning("checkpoint %s is not used: %s", path.name, why)
        return None

    def stated(self, entries: Sequence[Entry]) -> tuple[Path, int] | None:
        """The newest file whose D these entries state after its round, and how many of them it reflects."""
        heights = {entry.hash: k for k, entry in enumerate(entries[:-1]) if entry.kind is EntryKind.COMMIT}
        for path in snapshot.files(self.folder):
            with contextlib.suppress(SnapshotError, OSError), Reader(path) as reader:
                height = heights.get(reader.header.entry)
                if height is not None and not self._misfit(reader.header, entries, height):
                    return path, height + 1
        return None

    def _misfit(self, header: Header, entries: Sequence[Entry], height: int | None) -> str:
        """Why a file is no state of these entries; "" when it is one."""
        expected = snapshot.header_for(self._lock, header.round, header.entry, header.digest)
        if header != expected:
            return "it is of another run or another model"
        if height is None or entries[height].round + 1 != header.round:
            return f"its state after {rounds(header.round)} is not in this ledger"
        if height + 1 < len(entries) and entries[height + 1].digest != header.digest:
            return f"the ledger states another digest after {rounds(header.round)}"
        return ""


def sweep(folder: Path) -> None:
    """Remove the drafts of a process that was killed: each is as large as a snapshot."""
    for draft in folder.glob("*.new"):
        draft.unlink(missing_ok=True)


def kept(folder: Path, lock: Lock) -> tuple[tuple[int, bytes, bytes, int], ...]:
    """(round, entry hash, root, bytes) of the run's snapshots in a node's folder; parts are not read."""
    found = []
    for path in snapshot.files(folder / FOLDER):
        try:
            with Reader(path) as reader:
                header = reader.header
                if header.run == lock.run_id:
                    size = reader.manifest.data_start + header.total
                    found.append((header.round, header.entry, reader.manifest.root, size))
        except (SnapshotError, OSError) as error:
            log.warning("snapshot %s is not served: %s", path.name, error)
    return tuple(found)


def _pieces(reader: Reader) -> Iterator[tuple[int, int, memoryview]]:
    for first, data in reader.parts():
        view, place = memoryview(data), 0
        for array, low, high in snapshot.spans(reader.header, first, len(data)):
            yield array, low, view[place : place + high - low]
            place += high - low
