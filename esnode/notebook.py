"""What a node keeps between two lives: its copy of the ledger and the highest term it ever answered.

Shell. The folder is `DIR/nodes/NAME`, held by one process at a time. Entries are checked when they are read
(hash links and signatures); what does not check is moved aside and fetched again. Called by `daemon.py` and
`join.py`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from esnode.folder import write_file
from protocol import ledger
from protocol.counting import rounds
from protocol.entries import Entry, EntryKind, parse
from protocol.errors import UserError
from protocol.ledger import LedgerFile
from protocol.messages import RUN_ENDED
from protocol.terms import PROOF


class NotebookError(UserError):
    """The node's folder cannot be used: in use, of another run, or not writable."""


class RunOver(UserError):
    """The ledger in the folder holds the run's END: nothing is left to do, and that is no failure."""

    exit_code = 0


def refuse_if_over(folder: Path) -> None:
    """RunOver when the ledger in a node's folder is whole and ends with END. The folder is only looked at."""
    path = folder / "node.ledger"
    if path.exists() and ledger.ends(path.read_bytes()):
        reading = ledger.read(path)
        if reading.ended and reading.problem is None:
            raise RunOver(_over(path, reading.chain.entries[-1]))


class Notebook:
    """The open folder of one node. Everything written is on the disk when a method returns."""

    def __init__(self, folder: Path, run_id: bytes) -> None:
        """Take the folder. `run_id`: 32 bytes; a ledger of another run is refused."""
        self.folder = folder
        self.warning = ""  # one sentence when something had to be moved aside
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held = _occupy(folder)
            self._set_aside_damage(run_id)
            self._file = LedgerFile(folder / "node.ledger")
            self.term, self.proof = self._read_term()
        except OSError as error:
            raise NotebookError(_unwritable(folder, error)) from error

    @property
    def raws(self) -> tuple[bytes, ...]:
        """The entries held, from entry 0."""
        return tuple(self._file.entries)

    def refuse_if_over(self) -> None:
        """RunOver when the ledger held ends with the run's END."""
        last = parse(self.raws[-1]) if self.raws else None
        if last is not None and last.kind is EntryKind.END:
            raise RunOver(_over(self._file.path, last))

    def store(self, first: int, raws: Sequence[bytes]) -> None:
        """Append entries of which the first has height `first`; those already held are not written again."""
        held = len(self._file.entries)
        if first > held:
            raise ValueError(f"entry {first} would leave a gap after {held}")
        try:
            self._file.append(*raws[held - first :])
        except OSError as error:
            raise NotebookError(_unwritable(self.folder, error)) from error

    def orphan(self, first: int, raws: Sequence[bytes]) -> Path:
        """Keep the whole ledger as a file of its own and go on with the entries below `first`.

        `raws` are those from `first` on. The file is a ledger like any other: it can be verified, exported,
        forked or recovered from.
        """
        path = self._file.path
        if tuple(self._file.entries[first:]) != tuple(raws):
            raise ValueError(f"the entries from {first} on are not those on disk")
        tip = parse(raws[-1]).hash.hex()[:16]
        aside = self.folder / f"orphans-{first}-{tip}.ledger"
        try:
            write_file(aside, path.read_bytes())
            write_file(path, ledger.MAGIC + b"".join(self._file.entries[:first]))
            self._file.close()
            self._file = LedgerFile(path)
        except OSError as error:
            raise NotebookError(_unwritable(self.folder, error)) from error
        return aside

    def store_term(self, term: int, proof: bytes) -> None:
        """Remember the highest term answered and its proof."""
        try:
            write_file(self.folder / "term", f"{term} {proof.hex()}\n".encode())
        except OSError as error:
            raise NotebookError(_unwritable(self.folder, error)) from error
        self.term, self.proof = term, proof

    def _read_term(self) -> tuple[int, bytes]:
        """The term on disk and its proof; a damaged one is made again from the entries, which bear theirs."""
        path = self.folder / "term"
        try:
            number, _, proof = path.read_text().strip().partition(" ")
            found = int(number), bytes.fromhex(proof)
        except FileNotFoundError:
            return 0, b""
        except ValueError:
            found = -1, b""
        if not (0 <= found[0] < 2**32 and len(found[1]) in (0, PROOF)):
            found = max((parse(raw).term for raw in self.raws), default=0), b""
            damaged = f"{path} was damaged and is made again from the ledger: {found[0]}"
            self.warning = f"{self.warning}; {damaged}" if self.warning else damaged
            self.store_term(*found)
        return found

    def close(self) -> None:
        """Let go of the folder."""
        self._file.close()
        os.close(self._held)

    def _set_aside_damage(self, run_id: bytes) -> None:
        path = self.folder / "node.ledger"
        if not path.exists() or ledger.MAGIC.startswith(path.read_bytes()):
            return  # nothing, or no more than a beginning: killed before the first entry
        reading = ledger.read(path)
        if reading.chain.height and reading.chain.lock.run_id != run_id:
            raise NotebookError(f"{path} belongs to another run; give this run another folder or node name")
        if reading.problem is not None:
            aside = path.with_name(f"node.ledger.damaged-{int(time.time())}")
            os.replace(path, aside)
            with LedgerFile(path) as fresh:
                fresh.append(*(entry.raw for entry in reading.chain.entries))
            self.warning = (
                f"{path} was {reading.problem}; it is kept as {aside.name}, the rest is fetched again"
            )


def _over(path: Path, end: Entry) -> str:
    name = f"entry {end.hash.hex()[:16]} of term {end.term}"
    return f"{RUN_ENDED} after {rounds(end.round)} with {name}; the whole ledger is {path}"


def _unwritable(folder: Path, error: OSError) -> str:
    return f"cannot write {folder}: {error.strerror}. Free some space or mend the folder, then start again"


def _occupy(folder: Path) -> int:
    held = os.open(folder / ".busy", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise NotebookError(
            f"another node process uses {folder}; stop it or give this one another name"
        ) from None
    return held
