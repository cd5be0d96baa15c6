"""Who is on the roster, read from a ledger file that another process is writing; and that file's entries.

Shell. The writer has checked every entry before it wrote it, so here only its place in the chain is looked
at. A file that was cut or replaced (a dead branch was left) is read again from the start. Called by
`coordinator/relay.py` and `esnode/donor.py`, which know nothing else of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from protocol.entries import (
    GENESIS,
    AmendBody,
    CommitBody,
    Entry,
    LockBody,
    MalformedEntry,
    RosterBody,
    parse,
    split,
)
from protocol.keys import heir_public
from protocol.ledger import MAGIC
from protocol.lock import lock_from_bytes

LOOK_SECONDS = 0.5


class Rolls:
    """The keys of a ledger's roster, brought up to date when asked, at most twice a second."""

    def __init__(self, path: Path, always: Iterable[bytes] = ()) -> None:
        """`always`: keys that are let in besides the roster's."""
        self._path = path
        self._always = frozenset(always)
        self._looked = 0.0
        self._reset()

    def _reset(self) -> None:
        self._file = -1  # inode
        self._offset = len(MAGIC)
        self._tip = GENESIS
        self._roster: dict[int, bytes] = {}
        self._places: list[tuple[int, int]] = []  # (offset, length) of every entry
        self._keys: frozenset[bytes] = self._always
        self._round = 0
        self._trusted: list[tuple[int, int, tuple[bytes, ...]]] = []  # (from round, place, signing keys)
        self._heirs: frozenset[bytes] = frozenset()

    @property
    def heirs(self) -> frozenset[bytes]:
        """CURVE keys of those who hold a signing key that the ledger trusts now (`keys.heir_public`)."""
        self._look()
        return self._heirs

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys on the roster now."""
        self._look()
        return self._keys

    def entries(self, first: int, count: int, room: int) -> tuple[bytes, ...]:
        """Raw entries from height `first` on: at most `count`, at most `room` bytes unless one is larger."""
        self._look()
        found: list[bytes] = []
        try:
            with self._path.open("rb") as file:
                for offset, length in self._places[first : first + count]:
                    room -= length
                    if found and room < 0:
                        break
                    file.seek(offset)
                    found.append(split(file.read(length)))
        except (OSError, MalformedEntry):  # cut meanwhile: what was read before is still right
            self._looked = 0.0
        return tuple(found)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            stats = self._path.stat()
        except FileNotFoundError:
            return self._reset()
        if stats.st_ino != self._file or stats.st_size < self._offset:
            self._reset()
            self._file = stats.st_ino
        if stats.st_size > self._offset and not self._read():
            self._reset()  # the file has another chain now
            self._file = stats.st_ino
            self._read()

    def _read(self) -> bool:
        """Take the new entries in; False when they do not continue what was read before."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        place = 0
        while place < len(data):
            try:
                raw = split(data, place)
                entry = parse(raw)
            except MalformedEntry:
                break  # still being written
            if entry.parent != self._tip:
                return False
            self._tip = entry.hash
            self._places.append((self._offset + place, len(raw)))
            self._heed(entry)
            place += len(raw)
        self._offset += place
        self._keys = self._always | frozenset(self._roster.values())
        begun = [row for row in self._trusted if row[0] <= self._round]
        self._heirs = frozenset(map(heir_public, max(begun)[2] if begun else ())) - {b""}
        return True

    def _heed(self, entry: Entry) -> None:
        body = entry.body
        if isinstance(body, RosterBody):
            for number in body.revoked:
                self._roster.pop(number, None)
            self._roster.update({admission.number: admission.key for admission in body.admitted})
        elif isinstance(body, CommitBody):
            self._round += 1
        elif isinstance(body, LockBody):
            trusted = lock_from_bytes(body.lock).trusted
            self._trusted.append((0, -1, tuple(bytes.fromhex(key) for key in trusted)))
        elif isinstance(body, AmendBody) and body.trusted:
            self._trusted.append((body.from_round, len(self._trusted), body.trusted))
