"""What the nodes of a joined run share, looked at when one starts: lost or altered files are fetched again.

Shell. The note of the run (`joined.json`) names the lock by its digest, the lock names the task's data by
theirs, so an altered file is never used. In the coordinator's own folder the lock may not be made yet: it is
waited for. Called by `daemon.py`; `esnode join` does the same before it.
"""

from __future__ import annotations

import logging
import sys
import time

from esnode import fetch, folder, joined, nodeoptions
from esnode.contact import Contact, ContactError
from esnode.duty import read_policy
from esnode.nodeoptions import FolderMissing, Options
from protocol.errors import UserError
from protocol.lock import Lock, LockError, lock_from_bytes

LOOK_SECONDS = 0.2
log = logging.getLogger("esnode.mending")


def lock_of(options: Options) -> Lock:
    """The run's lock, after mending what a joined run's folder lacks. UserError names file and remedy."""
    note = joined.read(options.run)
    if note is None:
        _await_lock(options)
        return nodeoptions.read_lock(options.run)
    path, task = options.run / "lock.json", options.run / "task.jsonl"
    try:
        lock = lock_from_bytes(path.read_bytes())
    except (OSError, LockError):
        lock = None
    if lock is not None and lock.run_id == note.run and fetch.has_task(lock, task):
        return lock
    broken = task if lock is not None and lock.run_id == note.run else path
    log.warning("%s is lost or altered: it is fetched again from the coordinator", broken)
    try:
        secret = nodeoptions.own_key(options.folder)
        with Contact(note.addresses, nodeoptions.pinned_key(options.run), secret) as contact:
            lock = fetch.lock(contact, note.run, path)
            fetch.keep_lock(lock, path)
            fetch.task(contact, lock, task, read_policy().pace())
    except UserError as error:
        if lock is None or lock.run_id != note.run:
            raise FolderMissing(
                f"{path} is lost or altered and cannot be fetched again ({error}): start this node once the "
                "coordinator can be reached, or copy the file from another machine of the run"
            ) from error
        if not isinstance(error, ContactError):
            raise
        log.warning("%s cannot be fetched: %s", task, error)  # whoever needs it says so
    return lock


def _await_lock(options: Options) -> None:
    """Wait for the lock of a run that was just begun: making it takes as long as the model takes to read.

    For `--wait` seconds, and as long as a coordinator has the folder: a dead one holds nothing.
    """
    place = folder.RunFolder(options.run)

    def begun() -> bool:
        return (place.plan.exists() or place.busy.exists()) and not place.lock.exists()

    if not begun():
        return
    until = time.monotonic() + options.wait
    # Not in the log: a folder that holds one is taken for more than a first start that failed.
    print(  # noqa: T201
        f"{options.name}: the coordinator has not made {place.lock} yet: waiting for it (--wait)",
        file=sys.stderr,
        flush=True,
    )
    while begun():
        if time.monotonic() > until and not folder.busy(place):
            raise FolderMissing(
                f"{options.run} has a plan but no lock, and nobody is making it: start the coordinator, "
                f"`esnode coordinator serve --data {options.run}`"
            )
        time.sleep(LOOK_SECONDS)
