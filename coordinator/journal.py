"""The coordinator's journal: every record that must survive a crash, flushed before anything is said.

Shell. Lives here: the SQLite file, its version stamp, the encoding of `coordinator.events` records, group
commit, replay and pruning. Called by `server.py` and `heir.py` only; nobody else opens the file, and SQLite's
exclusive lock sees to that.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from coordinator.events import (
    AmendOrdered,
    Audited,
    EntryAppended,
    FaultFound,
    InviteOpened,
    KeyAllowed,
    KeyRevoked,
    Record,
    Recovery,
    ResultAccepted,
    SecretTaken,
    TermSeen,
    TermTaken,
    UnitFailed,
)
from protocol.errors import UserError
from protocol.messages import Unit

VERSION = 1
_APPLICATION = 0x65736E64  # "esnd": tells our files from other SQLite files
_BUSY_SECONDS = 2.0  # a predecessor that is just exiting still holds the lock for a moment
_MAX_ROUND = 2**63 - 1  # SQLite integers are signed; the record itself keeps the full value

_TERM, _ENTRY, _RESULTS, _FAILED, _INVITE, _ALLOWED, _REVOKED = range(7)
_FAULT, _SECRET, _AUDIT = 7, 8, 9
_AMEND = 14
_TERM_SEEN, _RECOVERY = 10, 11
_SCHEMA = (
    "CREATE TABLE record (seq INTEGER PRIMARY KEY, kind INTEGER NOT NULL, round INTEGER,"
    " crc INTEGER NOT NULL, body BLOB NOT NULL)",
    "CREATE INDEX open_round ON record (round) WHERE round IS NOT NULL",
    "CREATE TABLE run (id BLOB NOT NULL)",
)


class JournalError(UserError):
    """The journal cannot be opened, read or written; the sentence says which and what to do."""


def rows_of(records: Iterable[Record]) -> Iterator[tuple[int, int | None, int, bytes]]:
    """(kind, round of results or a failure or None, CRC-32 of the body, msgpack body) as stored.

    Results of one round that follow each other share a row: nearly all records are some.
    """
    for round_, run in groupby(records, _round_of_result):
        found = [*run]
        stored = map(encode, found) if round_ is None else [(_RESULTS, min(round_, _MAX_ROUND), _PACK(found))]
        for kind, number, body in stored:
            yield kind, number, zlib.crc32(body), body


def _round_of_result(record: Record) -> int | None:
    return record.result.unit.round if isinstance(record, ResultAccepted) else None


def encode(record: Record) -> tuple[int, int | None, bytes]:
    """(kind, round of a failure or None, msgpack body) of a record that is no result."""
    pack = _PACK
    match record:
        case TermTaken(term, nonce):
            return _TERM, None, pack((term, nonce))
        case EntryAppended(height, raw):
            return _ENTRY, None, pack((height, raw))
        case UnitFailed(evaluator, unit, reason):
            return _FAILED, min(unit.round, _MAX_ROUND), pack((evaluator, unit, reason))
        case InviteOpened(number, key, expires, uses):
            return _INVITE, None, pack((number, key, expires, uses))
        case KeyAllowed(key, name, invite):
            return _ALLOWED, None, pack((key, name, invite))
        case KeyRevoked(key, reason):
            return _REVOKED, None, pack((key, reason))
        case FaultFound(key, commits, reason):
            return _FAULT, None, pack((key, commits, reason))
        case SecretTaken(secret):
            return _SECRET, None, pack(secret)
        case AmendOrdered(first, alpha, sigma, members, trusted):
            return _AMEND, None, pack((first, alpha, sigma, members, trusted))
        case TermSeen(term):
            return _TERM_SEEN, None, pack(term)
        case Recovery(open, height, key):
            return _RECOVERY, None, pack((open, height, key))
        case Audited(first, second, sums, faults, quarantine):
            return _AUDIT, None, pack((first, second, sums, faults, quarantine))
    raise AssertionError("results are stored together")


_PACK = msgspec.msgpack.Encoder().encode
_TERM_READER = msgspec.msgpack.Decoder(tuple[int, bytes])
_ENTRY_READER = msgspec.msgpack.Decoder(tuple[int, bytes])
_RESULTS_READER = msgspec.msgpack.Decoder(tuple[ResultAccepted, ...])
_FAILED_READER = msgspec.msgpack.Decoder(tuple[int, Unit, str])
_INVITE_READER = msgspec.msgpack.Decoder(tuple[int, bytes, int, int])
_ALLOWED_READER = msgspec.msgpack.Decoder(tuple[bytes, str, int])
_REVOKED_READER = msgspec.msgpack.Decoder(tuple[bytes, str])
_FAULT_READER = msgspec.msgpack.Decoder(tuple[bytes, int, str])
_TERM_SEEN_READER = msgspec.msgpack.Decoder(int)
_RECOVERY_READER = msgspec.msgpack.Decoder(tuple[bool, int, bytes])
_SECRET_READER = msgspec.msgpack.Decoder(bytes)
_AMEND_READER = msgspec.msgpack.Decoder(tuple[int, float | None, float | None, int | None, tuple[bytes, ...]])
_AUDIT_READER = msgspec.msgpack.Decoder(
    tuple[bytes, bytes, tuple[float, ...], tuple[tuple[bytes, str], ...], tuple[tuple[bytes, str], ...]]
)


def decode(kind: int, body: bytes) -> Sequence[Record]:
    """The records of a row again. ValueError (msgspec's included) when the bytes are none of ours."""
    return _RESULTS_READER.decode(body) if kind == _RESULTS else (_decoded(kind, body),)


def _decoded(kind: int, body: bytes) -> Record:
    if kind == _TERM:
        return TermTaken(*_TERM_READER.decode(body))
    if kind == _ENTRY:
        return EntryAppended(*_ENTRY_READER.decode(body))
    if kind == _FAILED:
        return UnitFailed(*_FAILED_READER.decode(body))
    if kind == _INVITE:
        return InviteOpened(*_INVITE_READER.decode(body))
    if kind == _ALLOWED:
        return KeyAllowed(*_ALLOWED_READER.decode(body))
    if kind == _REVOKED:
        return KeyRevoked(*_REVOKED_READER.decode(body))
    if kind == _FAULT:
        return FaultFound(*_FAULT_READER.decode(body))
    if kind == _SECRET:
        return SecretTaken(_SECRET_READER.decode(body))
    if kind == _AMEND:
        return AmendOrdered(*_AMEND_READER.decode(body))
    if kind == _TERM_SEEN:
        return TermSeen(_TERM_SEEN_READER.decode(body))
    if kind == _RECOVERY:
        return Recovery(*_RECOVERY_READER.decode(body))
    if kind == _AUDIT:
        return Audited(*_AUDIT_READER.decode(body))
    raise ValueError(f"unknown kind {kind}")


class Journal:
    """One open journal. Every method may raise JournalError; a failed `append` stores nothing."""

    def __init__(self, path: Path, run_id: bytes) -> None:
        """Open or create `path` for the run `run_id` (32 bytes), alone: a second process is refused."""
        self.path = path
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would make it 0644
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            with self._explained():
                self._prepare(run_id)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, run_id: bytes) -> None:
        run = self._db.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("BEGIN IMMEDIATE").execute("COMMIT")  # the lock, now: a second coordinator fails here
        application = run("PRAGMA application_id").fetchone()[0]
        version = run("PRAGMA user_version").fetchone()[0]
        tables = run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and application != _APPLICATION:
            raise JournalError(f"{self.path} is no journal of esnode; move it away or use another folder")
        if tables and version != VERSION:
            raise JournalError(
                f"{self.path} is a journal of version {version}, this program writes version {VERSION}; "
                "finish the run with the program that began it"
            )
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        if not tables:
            self._create(run_id)
        elif run("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise JournalError(f"{self.path} is damaged; restore it from a copy")
        stored = run("SELECT id FROM run").fetchone()[0]
        if stored != run_id:
            raise JournalError(
                f"{self.path} belongs to run {stored.hex()[:12]}, not to this plan's run "
                f"{run_id.hex()[:12]}; give the new plan its own folder"
            )

    def _create(self, run_id: bytes) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for statement in (
            *_SCHEMA,
            f"PRAGMA application_id = {_APPLICATION}",
            f"PRAGMA user_version = {VERSION}",
        ):
            self._db.execute(statement)
        self._db.execute("INSERT INTO run VALUES (?)", (run_id,))
        self._db.execute("COMMIT")

    def append(self, records: Sequence[Record]) -> None:
        """Store all records in one transaction; on return they are on the disk."""
        if not records:
            return
        rows = [*rows_of(records)]
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany("INSERT INTO record (kind, round, crc, body) VALUES (?, ?, ?, ?)", rows)
                self._db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def prune(self, closed_round: int) -> None:
        """Forget results and failures of rounds up to `closed_round`: their commit is in the chain."""
        with self._explained():
            self._db.execute("DELETE FROM record WHERE round <= ?", (min(closed_round, _MAX_ROUND),))

    def replay(self) -> Iterator[Record]:
        """All records in the order they were appended."""
        with self._explained():
            for seq, kind, crc, body in self._db.execute(
                "SELECT seq, kind, crc, body FROM record ORDER BY seq"
            ):
                try:
                    if zlib.crc32(body) != crc:
                        raise ValueError("checksum")
                    found = decode(kind, body)
                except (ValueError, TypeError) as error:
                    raise JournalError(
                        f"{self.path} is damaged at record {seq} ({error}); restore it from a copy"
                    ) from error
                yield from found

    def close(self) -> None:
        """Fold the write-ahead log into the file and let go of it."""
        with self._explained():
            self._db.close()

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # a full disk may have ended the transaction already
            self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(_sentence(self.path, error)) from error
        except OSError as error:
            raise JournalError(f"cannot use the journal {self.path}: {error.strerror}") from error


def _sentence(path: Path, error: sqlite3.Error) -> str:
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # the low byte is the primary code
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} is in use: another coordinator runs on this folder. Stop it first"
    if code == sqlite3.SQLITE_FULL:
        return (
            f"the disk is full: cannot write {path}. Free some space and resume; nothing acknowledged is lost"
        )
    if code == sqlite3.SQLITE_READONLY:
        return (
            f"{path} cannot be written (read-only file or file system). Make it writable or copy the folder"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return f"{path} is damaged ({error}); restore it from a copy"
    return f"cannot use the journal {path}: {error}"


def entries_of(records: Iterable[Record]) -> list[bytes]:
    """The raw ledger entries among journal records, in order of height."""
    return [record.raw for record in records if isinstance(record, EntryAppended)]
