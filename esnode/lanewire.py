"""Frames between a node and the processes of its lanes: what one asks and the other answers, as msgpack.

Both ends are processes of one user on one machine, started by each other; even so nothing is read but the
types listed here. A frame is a u32 length, little-endian, and a msgpack array: a name, then fields. Called by
`fleet.py` and `laneprocess.py`.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

import msgpack

from esnode import events as ne
from esnode import proofevents as pe
from esnode import snapshotevents as se
from protocol.entries import Entry, parse
from protocol.messages import Unit

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measured unit; see `esnode.events.Outcome`."""

    sums: tuple[float, ...]
    correct: int
    floored: int
    tokens: int
    times: tuple[int, int, int]
    evidence: bytes
    scores: tuple[float, ...]
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """Its engine is ready, on the base model of the run whose lock it has read."""

    run: bytes
    backend: str
    device: str
    selftest: bytes
    fingerprint: bytes
    versions: str
    host_path: str | None = None  # of a master in host memory


@dataclass(frozen=True, slots=True)
class Planned:
    """What it is about to allocate, in bytes: in host memory, and in all."""

    host: int
    total: int


@dataclass(frozen=True, slots=True)
class Need:
    """A lane that loads needs a master in host memory, and waits for a `Where`."""


@dataclass(frozen=True, slots=True)
class Where:
    """The path of the master to read; empty: make one and lead it."""

    path: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """Take over what the leader of the shared master has written."""


@dataclass(frozen=True, slots=True)
class Reread:
    """The answer: the D that is there."""

    digest: int


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the node's log, or a traceback."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing has happened; said every few seconds, also while the engine is loading or at work."""


@dataclass(frozen=True, slots=True)
class Bound:
    """It ends for want of memory: a new engine in its place takes so many rows at once at most."""

    rows: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Last word of a lane that cannot work here; the sentence says why."""

    sentence: str


TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(ne.Evaluate, ne.CancelUnit, ne.Apply, ne.Rewind, pe.Mend, pe.TakeDigests, pe.Prove, se.Save),
        *(ne.Evaluated, ne.EvaluationFailed, ne.Cancelled, ne.Generated, ne.Progress),
        *(ne.EntriesApplied, ne.Rewound, pe.Damaged, pe.Mended, pe.Digested, pe.Proved, se.Saved),
        *(Loaded, Log, Alive, Bound, Refused, Planned, Need, Where, Refresh, Reread),
    )
}


def pack(value: Any) -> bytes:
    """One frame."""
    row = [type(value).__name__, *(_plain(getattr(value, field.name)) for field in fields(value))]
    body: bytes = msgpack.packb(row, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """The value of a frame's body. ValueError or TypeError for what is none."""
    row = msgpack.unpackb(body, use_list=False, unicode_errors="surrogatepass")
    kind = TYPES.get(row[0])
    if kind is None:
        raise ValueError(f"no frame of a lane: {row[0]!r}")
    names = [field.name for field in fields(kind)]
    return kind(*(_whole(name, value) for name, value in zip(names, row[1:], strict=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, Unit):
        return (value.round, int(value.kind), value.member, value.first, value.last)
    if isinstance(value, tuple) and value and isinstance(value[0], Entry):
        return tuple(entry.raw for entry in value)
    if hasattr(value, "evidence"):
        return tuple(getattr(value, field.name) for field in fields(Outcome))
    return value


def _whole(name: str, value: Any) -> Any:
    if name == "unit" and value is not None:
        return Unit(*value)
    if name == "entries":
        return tuple(parse(raw) for raw in value)
    return Outcome(*value) if name == "outcome" else value


class Pipe:
    """One end of the connection. Sending is safe from any thread; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(None)
        self._stream: BinaryIO = end.makefile("rb")
        self._lock = threading.Lock()

    def send(self, value: Any) -> None:
        """OSError when the other side is gone, or takes nothing."""
        with self._lock:
            self._socket.sendall(pack(value))

    def receive(self) -> Any | None:
        """The next value; None when the other side is gone."""
        try:
            length = self._stream.read(_LENGTH.size)
            body = self._stream.read(_LENGTH.unpack(length)[0]) if len(length) == _LENGTH.size else b""
        except OSError:
            return None
        return unpack(body) if body else None

    def close(self) -> None:
        self._socket.close()
