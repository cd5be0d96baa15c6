"""The task's data of a run's folder, given away in parts to who asks for them by their digest.

Shell. Called by `donor.py`: a successor on an empty machine gets them from any node, as a joiner gets them
from the coordinator.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from protocol.messages import BLOB_PART, Blob, BlobAsk
from protocol.peers import Sorry


class TaskData:
    """`task.jsonl` of one run; hashed again only when the file has changed."""

    def __init__(self, run: Path) -> None:
        self._path = run / "task.jsonl"
        self._stamp: tuple[int, int, int] | None = None
        self._digest = b""

    def part(self, ask: BlobAsk) -> Blob | Sorry:
        """The bytes from `ask.offset` on, or why there are none."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                if stamp != self._stamp:
                    self._digest = hashlib.file_digest(file, "sha256").digest()
                    self._stamp = stamp
                data = os.pread(file.fileno(), BLOB_PART, ask.offset)
        except OSError as error:
            return Sorry(ask.digest, f"it cannot read its task.jsonl: {error.strerror}")
        if ask.digest != self._digest:
            return Sorry(ask.digest, "its task.jsonl is not that of the run")
        if ask.offset > status.st_size:
            return Sorry(ask.digest, f"the task's data have {status.st_size} bytes only")
        return Blob(ask.digest, ask.offset, status.st_size, data)
