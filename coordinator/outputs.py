"""What people read about a run: metrics.jsonl, units.jsonl and the log, written from the core's notes.

Shell. Never needed for correctness: the journal is the truth. Lines are flushed once per turn of the server's
loop; a line that a crash cut is removed at the next start. Called by `server.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.events import Note, ResultAccepted
from coordinator.limits import Limits, Rate
from protocol import logfile
from protocol.errors import UserError

METRIC_NOTES = frozenset({"commit", "score"})
# Log lines of one kind about one node: what it says 2,000 times a second must not fill the disk.
LINES = Rate(2, 100, 1, 1)
_ENCODER = msgspec.json.Encoder(enc_hook=str)
_LEVELS = {
    "dispute": logging.ERROR,
    "refused": logging.WARNING,
    "failed": logging.WARNING,
}


class UnitLine(msgspec.Struct):
    """A line of units.jsonl: one accepted result. `kind` is the unit's, `bytes` go by message type."""

    kind: int
    time: float
    round: int
    member: int
    first: int
    last: int
    node: str
    tokens: int
    times: tuple[int, int, int]
    sums: tuple[float, ...]
    floored: int
    bytes: dict[str, int]


class OutputError(UserError):
    """A file of the run folder cannot be written."""


class JsonLines:
    """An append-only file of JSON objects, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 - lives as long as the process
            self._heal()
        except OSError as error:
            raise OutputError(_sentence(path, error)) from error

    def write(self, rows: Sequence[Any]) -> None:
        """Append objects; they are in the file after the next `flush`. OutputError when the disk refuses."""
        with self._explained():
            self._file.write(_ENCODER.encode_lines(rows))

    def flush(self) -> None:
        """Hand what was written to the system; OutputError when the disk refuses."""
        with self._explained():
            self._file.flush()

    def close(self) -> None:
        """Let go of the file, written to its end. OutputError as before."""
        with self._explained():
            self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(_sentence(self._path, error)) from error

    def _heal(self) -> None:
        """Cut a last line that has no end: its writer was killed."""
        size = end = self._file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            self._file.truncate(end)


class Outputs:
    """Sorts notes into the files they belong to."""

    def __init__(self, folder: Path, log: logging.Logger) -> None:
        """`folder` is the run's."""
        self._metrics = JsonLines(folder / "metrics.jsonl")
        self._units = JsonLines(folder / "units.jsonl")
        self._accepted: list[UnitLine] = []
        self._log = log
        self._lines = Limits(LINES)
        self._left_out: Counter[bytes] = Counter()

    def note(self, note: Note, **extra: Any) -> None:
        """Write one note; `extra` fields (bytes by message type) join those of the core."""
        row = {"kind": note.kind, "time": round(time.time(), 3), **note.fields, **extra}
        if note.kind in METRIC_NOTES:
            self._metrics.write([row])
        level = _LEVELS.get(note.kind, logging.INFO)
        if self._log.isEnabledFor(level):
            self._say(level, note)

    def unit(self, record: ResultAccepted, node: str, sizes: dict[str, int]) -> None:
        """Write one accepted result. `node`: its evaluator's name; `sizes`: bytes by message type.

        More of these may be known before the next `flush`.
        """
        result, unit = record.result, record.result.unit
        line = UnitLine(
            unit.kind,
            0.0,
            unit.round,
            unit.member,
            unit.first,
            unit.last,
            node,
            result.tokens,
            result.times,
            result.sums,
            result.floored,
            sizes,
        )
        self._accepted.append(line)

    def _say(self, level: int, note: Note) -> None:
        """A line of the log, unless too many of its kind were about this node."""
        about = f"{note.kind} {note.fields.get('node', '')}".encode()
        if "node" in note.fields and self._lines.spend(about, 0, time.monotonic()):
            self._left_out[about] += 1
            return
        missing = self._left_out.pop(about, 0)
        more = f" ({missing} lines like it left out before)" * bool(missing)
        self._log.log(level, "%s", logfile.sentence(note.kind, note.fields) + more)

    def flush(self) -> None:
        """Hand the lines written so far to the system."""
        if self._accepted:
            now = round(time.time(), 3)
            for line in self._accepted:
                line.time = now
            self._units.write(self._accepted)
            self._accepted = []
        self._metrics.flush()
        self._units.flush()

    def close(self) -> None:
        """Let go of the files."""
        self._metrics.close()
        self._units.close()


def _sentence(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror}. Free some space or mend the folder, then resume"
