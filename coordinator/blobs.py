"""What the coordinator hands to nodes before they can work: the lock, and the task's data as one blob.

Shell (reads one file). Both are known by their digest, so the asker checks every byte; nothing else is ever
served, and code never is. `gate.py` asks, for admitted keys only and also before Hello: a machine that has
just enrolled holds nothing yet. One question brings one part, so a peer never has more than one in flight
that it did not ask for.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from protocol.lock import Lock
from protocol.messages import BLOB_PART, WIRE_VERSION, Blob, BlobAsk, Refuse


class Shelf:
    """The blobs of one run folder."""

    def __init__(self, lock: Lock, task: Path) -> None:
        """`task`: the file whose SHA-256 the lock states; it is checked when first asked for."""
        self._run = lock.run_id
        self._lock = lock.to_bytes()
        self._data = bytes.fromhex(lock.data)
        self._task = task
        self._checked: tuple[int, int, int] | None = None  # the file as it was when its digest fitted

    def answer(self, ask: BlobAsk) -> Blob | Refuse:
        """One part, or the reason in words why there is none."""
        if not ask.wire_min <= WIRE_VERSION <= ask.wire_max:
            return Refuse(
                f"the coordinator speaks wire version {WIRE_VERSION}, this node {ask.wire_min} to "
                f"{ask.wire_max}: install the same release of esnode on both"
            )
        if ask.digest == self._run:
            part = self._lock[ask.offset : ask.offset + BLOB_PART]
            return self._part(ask, len(self._lock), part)
        if ask.digest == self._data:
            return self._of_task(ask)
        return Refuse(f"this coordinator serves run {self._run.hex()[:16]} and nothing else")

    def _of_task(self, ask: BlobAsk) -> Blob | Refuse:
        try:
            with self._task.open("rb") as file:
                status = os.fstat(file.fileno())
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                if stamp != self._checked:
                    if hashlib.file_digest(file, "sha256").digest() != self._data:
                        return Refuse("the coordinator's task.jsonl was altered; its operator has to mend it")
                    self._checked = stamp
                part = os.pread(file.fileno(), BLOB_PART, ask.offset)
        except OSError as error:
            return Refuse(f"the coordinator cannot read its task.jsonl: {error.strerror}")
        return self._part(ask, status.st_size, part)

    def _part(self, ask: BlobAsk, total: int, part: bytes) -> Blob | Refuse:
        if ask.offset > total:
            return Refuse(f"the blob asked for has {total} bytes, not {ask.offset}")
        return Blob(ask.digest, ask.offset, total, part)
