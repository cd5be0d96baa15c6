"""The ledger file: a run's signed entries, one after the other, portable and checkable by anyone.

Lives here: reading with damage located, and `LedgerFile`, which appends and repairs. The format is in
docs/ledger-format.md. Entries are in `entries.py`, their rules in `chain.py`. Called by the shells and
whoever takes a ledger file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.chain import BrokenChain, Chain
from protocol.counting import rounds
from protocol.entries import EntryKind, MalformedEntry, parse, split
from protocol.errors import UserError

MAGIC = b"ESLEDG01"


class LedgerError(UserError):
    """A ledger file that cannot be used; the path and what to do are named."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Where a file stops being a ledger: `offset` of the bad entry, the `round` reached before, what."""

    offset: int
    round: int
    what: str

    def __str__(self) -> str:
        return f"damaged at byte {self.offset}, after {rounds(self.round)}: {self.what}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file holds: the verified chain up to the end or up to `problem`."""

    chain: Chain
    ended: bool
    problem: Damage | None

    def __str__(self) -> str:
        if self.problem is not None:
            return str(self.problem)
        if self.ended:
            return f"whole, ended after {rounds(self.chain.round)}"
        return f"unfinished after {rounds(self.chain.round)}"


def read_bytes(data: bytes) -> Reading:
    """Verify a ledger's bytes from first to last; never raises, `problem` says where it went wrong."""
    chain = Chain()
    if data[: len(MAGIC)] != MAGIC:
        return Reading(
            chain, False, Damage(0, 0, f"no ledger: the file does not start with {MAGIC.decode()}")
        )
    offset = len(MAGIC)
    if offset == len(data):
        return Reading(chain, False, Damage(offset, 0, "cut before the first entry"))
    while offset < len(data):
        try:
            raw = split(data, offset)
            chain.append(raw)
        except MalformedEntry as error:
            return Reading(chain, False, Damage(offset, chain.round, str(error)))
        except BrokenChain as error:
            return Reading(chain, False, Damage(offset, chain.round, error.reason))
        offset += len(raw)
    return Reading(chain, chain.ended, None)


def ends(data: bytes) -> bool:
    """Whether the last entry of a ledger's bytes is an END. Quick: no signature is verified."""
    offset, last = len(MAGIC), b""
    try:
        while offset < len(data):
            last = split(data, offset)
            offset += len(last)
        return parse(last).kind is EntryKind.END
    except MalformedEntry:
        return False


def read(path: str | os.PathLike[str]) -> Reading:
    """Read and verify a ledger file. LedgerError when it cannot be opened; damage is reported, not raised."""
    if Path(path).exists() and not Path(path).is_file():  # a device or a pipe has no end
        raise LedgerError(f"cannot read the ledger {path}: it is no regular file")
    try:
        return read_bytes(Path(path).read_bytes())
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}: {error.strerror}") from error


class LedgerFile:
    """A ledger file open for appending, read whole and trusted no further than its hashes (`read` verifies).

    One writer at a time; the caller holds whatever lock that needs. Opening creates a missing file and cuts a
    torn tail, an append that a crash interrupted, back to the last whole entry: `cut` then says what was cut,
    and the bytes are kept beside the file as NAME.cut-OFFSET. OSError (full or read-only disk) passes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.cut: Damage | None = None
        new = not self.path.exists()
        # Unbuffered: after a failed write nothing may linger that a later flush would bring out.
        self._file = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", 0)  # noqa: SIM115
        try:
            if new:
                sync_path(self.path.parent)
            self._load()
        except BaseException:
            self._file.close()
            raise

    def _load(self) -> None:
        data = self._file.read()
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise LedgerError(
                f"{self.path} is no ledger: it does not start with {MAGIC.decode()}; move it away"
            )
        self.entries: list[bytes] = []  # raw bytes of every whole entry
        if len(data) < len(MAGIC):
            self._rewrite_from(0, MAGIC)
            return
        offset = len(MAGIC)
        while offset < len(data):
            try:
                raw = split(data, offset)
            except MalformedEntry as error:
                self._cut_back(data, offset, str(error))
                return
            self.entries.append(raw)
            offset += len(raw)
        self._file.seek(offset)

    def _cut_back(self, data: bytes, offset: int, what: str) -> None:
        """Drop everything from `offset` on, after saving it: a flipped length looks like a torn tail."""
        self.cut = Damage(offset, _rounds(self.entries), what)
        self.path.with_name(f"{self.path.name}.cut-{offset}").write_bytes(data[offset:])
        self._rewrite_from(offset, b"")

    def _rewrite_from(self, offset: int, data: bytes) -> None:
        self._file.seek(offset)
        self._file.truncate()
        self._write(data)

    def _write(self, data: bytes) -> None:
        """All of it, to the disk."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def append(self, *raws: bytes) -> None:
        """Write entries behind the others and flush them to disk. An OSError leaves the file as it was."""
        end = self._file.tell()
        try:
            self._write(b"".join(raws))
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)
            raise
        self.entries += raws

    def repair_from(self, entries: Sequence[bytes]) -> int:
        """Complete the file from the journal's entries; returns how many were added.

        LedgerError when the file holds a whole entry that the journal lacks: the journal is then an old copy
        or another run's, and going on would sign a second history.
        """
        for height, raw in enumerate(self.entries):
            if height >= len(entries) or entries[height] != raw:
                raise LedgerError(
                    f"{self.path} holds entry {height} which this run's journal lacks: the journal is older "
                    "or of another run. Restore the right journal, let a successor go on with `esnode "
                    f"coordinator serve --recover-from {self.path}`, or train on in a new run: `esnode fork`"
                )
        self.entries = [*entries[: len(self.entries)]]  # the same objects: a run's bytes are kept once
        missing = entries[len(self.entries) :]
        if missing:
            self.append(*missing)
        return len(missing)

    def close(self) -> None:
        """Close the file; what was appended is already on the disk."""
        self._file.close()

    def __enter__(self) -> LedgerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rounds(raws: Sequence[bytes]) -> int:
    return sum(parse(raw).kind is EntryKind.COMMIT for raw in raws)


def sync_path(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk: only then a rename survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
