"""A successor's folder from a ledger that survived, and the ledger file of a run that dropped entries.

Shell. Lives here: what `--recover-from` does before the first start, and cutting `run.ledger` back to the
journal's chain while keeping what is cut. Called by `server.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from coordinator.events import EntryAppended, Record, Recovery
from coordinator.journal import Journal
from protocol import ledger
from protocol.entries import parse
from protocol.errors import UserError
from protocol.ledger import LedgerError, LedgerFile


class RecoverError(UserError):
    """Nothing can be recovered from what was given; the sentence says why and what to do."""


def prepare(journal: Journal, source: Path) -> None:
    """Begin an empty journal with the entries of a ledger file, in one transaction; a begun one goes on.

    RecoverError when the file holds no run that can go on, or when the journal is that of a coordinator which
    never was a successor.
    """
    first = [record for _, record in zip(range(2), journal.replay(), strict=False)]
    if not first:
        raws = read(source)
        journal.append([EntryAppended(height, raw) for height, raw in enumerate(raws)])
    elif not isinstance(first[0], EntryAppended):
        raise RecoverError(
            f"{journal.path} is the journal of this run: start without --recover-from, or recover into an "
            "empty folder"
        )


def read(source: Path) -> list[bytes]:
    """The verified entries of a ledger file, as far as they are whole. RecoverError when there is none."""
    reading = ledger.read(source)
    if not reading.chain.height:
        raise RecoverError(f"nothing can be recovered from {source}: it is {reading}")
    return [entry.raw for entry in reading.chain.entries]


def open_file(path: Path, raws: Sequence[bytes], cut: bool) -> tuple[LedgerFile, int]:
    """The ledger file, brought to the journal's entries, and how many it lacked.

    `cut`: this run has dropped entries, so what the file holds beyond is set aside; else that is LedgerError.
    """
    file = LedgerFile(path)
    if cut and file.entries != list(raws[: len(file.entries)]):
        file = set_aside(file, next(k for k, raw in enumerate(file.entries) if raw not in raws[k : k + 1]))
    return file, file.repair_from(raws)


def extend(file: LedgerFile, records: Sequence[Record]) -> LedgerFile:
    """The file with the new entries among journal records; what a successor drops is set aside.

    LedgerError when the disk is full: the journal has the entries, the next start completes the file.
    """
    raws: list[bytes] = []
    try:
        for record in records:
            if isinstance(record, Recovery) and not record.open:
                file.append(*raws)
                raws = []
                file = set_aside(file, record.height)
            elif isinstance(record, EntryAppended):
                raws.append(record.raw)
        if raws:
            file.append(*raws)
    except OSError as error:
        raise LedgerError(
            f"cannot write {file.path}: {error.strerror}. Free some space and start again"
        ) from error
    return file


def set_aside(file: LedgerFile, height: int) -> LedgerFile:
    """The file without its entries from `height` on; the whole of it is kept beside it."""
    path, kept = file.path, file.entries[:height]
    if height >= len(file.entries):
        return file
    tip = parse(file.entries[-1]).hash.hex()[:16]
    file.close()
    aside = path.with_name(f"orphans-{height}-{tip}.ledger")
    _write(aside, path.read_bytes())
    _write(path, ledger.MAGIC + b"".join(kept))
    return LedgerFile(path)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    ledger.sync_path(path.parent)
