"""What a joined node gets from the coordinator before it can work: the lock and the task's data.

Shell. Both come as blobs that are known by their digest, one part at a time; what does not have that digest
is never used. A cut transfer goes on where it stopped. Code never travels. Called by `join.py` and
`mending.py`.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from pathlib import Path
from typing import BinaryIO

from esnode.contact import Contact, Refused
from esnode.folder import write_file
from esnode.policy import Pace
from esnode.tell import Tell, silent
from protocol.errors import UserError
from protocol.ledger import sync_path
from protocol.lock import MAX_LOCK_BYTES, Lock, LockError, lock_from_bytes
from protocol.messages import WIRE_VERSION, Blob, BlobAsk

MAX_TASK_BYTES = 2**32 - 1


class FetchError(UserError):
    """The coordinator sent something else than what was asked for."""


def lock(contact: Contact, run: bytes, kept: Path) -> Lock:
    """The lock whose digest is `run`; one that lies at `kept` already is not fetched again.

    The coordinator is asked all the same, so that what it has to say against this node is heard before
    minutes of work.
    """
    whole = io.BytesIO()
    if kept.exists() and _run_id(kept.read_bytes()) == run:
        whole.write(kept.read_bytes())
    _pull(contact, run, whole, MAX_LOCK_BYTES, Pace(0), silent)
    data = whole.getvalue()
    if _run_id(data) != run:
        raise FetchError(
            f"the coordinator's lock is not that of run {run.hex()[:16]}: the invite names another"
        )
    try:
        return lock_from_bytes(data)
    except LockError as error:
        raise FetchError(
            f"the run's lock cannot be read by this release of esnode ({error}): install the coordinator's"
        ) from error


def _run_id(lock: bytes) -> bytes:
    return hashlib.blake2b(lock, digest_size=32).digest()


def has_task(lock: Lock, path: Path) -> bool:
    """Whether `path` holds the task data of the lock."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == lock.data
    except (FileNotFoundError, IsADirectoryError):
        return False


def task(contact: Contact, lock: Lock, path: Path, pace: Pace, tell: Tell = silent) -> None:
    """The task's data at `path`, which is left alone when it is right already."""
    if has_task(lock, path):
        return
    partial = path.with_name(f"{path.name}.{lock.data[:16]}.part")
    for attempt in (1, 2):
        try:
            with partial.open("ab") as file:
                _pull(contact, bytes.fromhex(lock.data), file, MAX_TASK_BYTES, pace, tell)
                os.fsync(file.fileno())
        except Refused:
            if attempt == 2 or partial.stat().st_size == 0:
                partial.unlink(missing_ok=True)
                raise
            partial.unlink()  # longer than the blob: it cannot be a part of it
            continue
        if has_task(lock, partial):
            os.replace(partial, path)
            sync_path(path.parent)
            return
        partial.unlink()  # damaged on this disk, or sent wrong: once more from the start
    raise FetchError(
        "the task data arrived damaged twice; ask the coordinator's operator to check its folder"
    )


def keep_lock(lock: Lock, path: Path) -> None:
    """Write the lock down."""
    if not path.exists() or path.read_bytes() != lock.to_bytes():
        write_file(path, lock.to_bytes())


def _pull(contact: Contact, digest: bytes, sink: BinaryIO, most: int, pace: Pace, tell: Tell) -> None:
    """Append the rest of a blob to `sink`, one part in flight."""
    offset = sink.seek(0, io.SEEK_END)
    while True:
        at = offset
        blob = contact.ask(
            BlobAsk(WIRE_VERSION, WIRE_VERSION, digest, at),
            Blob,
            lambda blob, at=at: blob.digest == digest and blob.offset == at,  # type: ignore[misc]
        )
        if blob.total > most:
            raise FetchError(
                f"the coordinator offers {blob.total} bytes where {most} are the most there can be"
            )
        sink.write(blob.data)
        offset += len(blob.data)
        tell("fetching the task's data", offset, blob.total)
        if offset == blob.total:
            sink.flush()
            return
        time.sleep(pace.spend(time.monotonic(), len(blob.data)))
