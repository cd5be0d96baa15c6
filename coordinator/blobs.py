"""What the coordinator hands to nodes before they can work: the lock, and the task's data as one blob.

Shell (reads one file). Both are known by their digest, so the asker checks every byte; nothing else is ever
served, and code never is. `gate.py` asks, for admitted keys only and also before Hello: a machine that has
just enrolled holds nothing yet. One question brings one part. A key that asks for more than it could need is
refused: parts it does not read would fill this process's memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.limits import Limits, Rate
from protocol.lock import Lock
from protocol.messages import BLOB_PART, WIRE_VERSION, Blob, BlobAsk, Refuse

AT_ONCE, AGAIN_SECONDS = 4.0, 600.0  # a key gets everything so often, then once more per so many seconds


class Shelf:
    """The blobs of one run folder."""

    def __init__(self, lock: Lock, task: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`task`: the file whose SHA-256 the lock states; it is checked when first asked for."""
        self._run = lock.run_id
        self._lock = lock.to_bytes()
        self._data = bytes.fromhex(lock.data)
        self._task = task
        self._clock = clock
        whole = len(self._lock) + (task.stat().st_size if task.exists() else 0) + 4 * BLOB_PART
        self._limits = Limits(Rate(1e6, 1e6, whole / AGAIN_SECONDS, AT_ONCE * whole))
        self._checked: tuple[int, int, int] | None = None  # the file as it was when its digest fitted

    def answer(self, peer: bytes, ask: BlobAsk) -> Blob | Refuse:
        """One part for the holder of key `peer`, or the reason in words why there is none."""
        answer = self._find(ask)
        if isinstance(answer, Blob) and self._limits.spend(peer, len(answer.data), self._clock()):
            return Refuse("this machine has fetched the run's data several times already; wait ten minutes")
        return answer

    def _find(self, ask: BlobAsk) -> Blob | Refuse:
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
