"""The snapshot file: one state of a run, the same bytes on every node that stands there.

Lives here: header, part hashes and root, writing (atomic) and reading (every part checked), as
docs/snapshot-format.md describes them. Knows arrays of bytes, no torch and no engine, so that a donor can
serve files without either. Called by `checkpoint.py`, `donor.py`, `receiver.py` and `rederive.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from protocol.errors import UserError
from protocol.ledger import sync_path
from protocol.lock import Lock

MAGIC = b"ESSNAP01"
HASH = 32
MASTER = "master"  # the only state array so far
SUFFIX = ".snapshot"
MAX_HEADER = 8 * 1024 * 1024 - 4096  # with its message it must fit the wire
SMALLEST_PART, LARGEST_PART, WANTED_PARTS = 1 << 14, 1 << 22, 256
_ITEM = {"float32": 4, "bfloat16": 2}
_MAX_BYTES = 1 << 50
MAX_DIMENSIONS = 16

_U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
_Hash = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_BYTES)]
# Without a limit the product of a million dimensions would keep a processor busy for minutes.
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
_Array = tuple[str, str, str, _Shape]
_DECODER = msgspec.msgpack.Decoder(tuple[_U32, _Hash, _U32, _Hash, int, _U32, tuple[_Array, ...]])


class SnapshotError(UserError):
    """A file or header that is no whole snapshot; the sentence says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Array:
    """One state array of one tensor: `role` is "master", `dtype` "float32" or "bfloat16"."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return _ITEM[self.dtype]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.item


@dataclass(frozen=True, slots=True)
class Header:
    """Which state a snapshot holds: after `round` commits, the last of which has the hash `entry`."""

    law: int
    run: bytes
    round: int
    entry: bytes
    digest: int
    arrays: tuple[Array, ...]

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(array.size for array in self.arrays)

    @property
    def part_size(self) -> int:
        """Bytes of every part but the last: a power of two that follows from the total alone."""
        wanted = -(-self.total // WANTED_PARTS)
        return min(max(SMALLEST_PART, 1 << (max(wanted, 1) - 1).bit_length()), LARGEST_PART)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return -(-self.total // self.part_size)

    def part(self, number: int) -> tuple[int, int]:
        """(first byte in the stream of arrays, bytes) of a part. IndexError when there is none such."""
        if not 0 <= number < self.parts:
            raise IndexError(f"part {number} of {self.parts}")
        start = number * self.part_size
        return start, min(self.part_size, self.total - start)

    def encode(self) -> bytes:
        """Canonical msgpack."""
        rows = tuple((a.name, a.role, a.dtype, a.shape) for a in self.arrays)
        fields = (self.law, self.run, self.round, self.entry, self.digest, self.part_size, rows)
        return msgspec.msgpack.encode(fields)


def decode_header(data: bytes) -> Header:
    """The inverse of `Header.encode`; SnapshotError for anything it would not have written."""
    try:
        law, run, round, entry, digest, part_size, rows = _DECODER.decode(data)
        arrays = tuple(Array(*row) for row in rows)
        header = Header(law, run, round, entry, digest, arrays)
        canonical = header.total <= _MAX_BYTES and header.encode() == data and header.part_size == part_size
    except (msgspec.DecodeError, KeyError, UnicodeError, OverflowError, MemoryError) as error:
        raise SnapshotError(f"the header of a snapshot is malformed: {error}") from error
    names = [(array.name, array.role) for array in arrays]
    if not canonical or names != sorted(set(names)) or any(a.role != MASTER for a in arrays):
        raise SnapshotError("the header of a snapshot is not in canonical form")
    return header


def header_for(lock: Lock, round: int, entry: bytes, digest: int) -> Header:
    """The header of a run's state: one master per trained tensor, in name order."""
    trained = sorted((spec for spec in lock.manifest if spec.trained), key=lambda spec: spec.name)
    arrays = tuple(Array(spec.name, MASTER, lock.master, tuple(spec.shape)) for spec in trained)
    return Header(lock.law, lock.run_id, round, entry, digest, arrays)


def hash_of(data: Any) -> bytes:
    """BLAKE2b-256 of a part."""
    return hashlib.blake2b(data, digest_size=HASH).digest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A header and the hash of every part: what must be known to check parts from anywhere."""

    header: Header
    hashes: tuple[bytes, ...]

    @property
    def root(self) -> bytes:
        """The one hash that stands for all: it covers header and parts."""
        top = hashlib.blake2b(MAGIC, digest_size=HASH)
        top.update(hash_of(self.header.encode()))
        for part in self.hashes:
            top.update(part)
        return top.digest()

    @property
    def head(self) -> bytes:
        """The file's bytes before the arrays."""
        header = self.header.encode()
        return MAGIC + len(header).to_bytes(4, "little") + header + b"".join(self.hashes) + self.root

    @property
    def data_start(self) -> int:
        """Offset of the arrays in the file."""
        return len(MAGIC) + 4 + len(self.header.encode()) + HASH * (len(self.hashes) + 1)


def manifest_of(header: bytes, hashes: Sequence[bytes], root: bytes) -> Manifest:
    """Header and hashes as they came from a peer, checked against a root. SnapshotError if they differ."""
    found = Manifest(decode_header(header), tuple(hashes))
    if len(found.hashes) != found.header.parts or any(len(part) != HASH for part in found.hashes):
        raise SnapshotError(f"a snapshot of {found.header.parts} parts with {len(found.hashes)} hashes")
    if found.root != root:
        raise SnapshotError(f"header and hashes belong to {found.root.hex()[:16]}, not {root.hex()[:16]}")
    return found


def parse_head(data: bytes, root: bytes) -> Manifest:
    """The manifest of a file's bytes before the arrays, checked against a root. SnapshotError if not."""
    length = int.from_bytes(data[8:12], "little")
    if data[:8] != MAGIC or not 12 <= 12 + length <= len(data):
        raise SnapshotError("this is no head of a snapshot")
    table = data[12 + length :]
    hashes = [table[k : k + HASH] for k in range(0, len(table) - HASH, HASH)]
    manifest = manifest_of(data[12 : 12 + length], hashes, root)
    if manifest.head != data:
        raise SnapshotError("the head of a snapshot is not in canonical form")
    return manifest


def file_name(round: int) -> str:
    """How the snapshot of a round is called in its folder."""
    return f"round-{round:010d}{SUFFIX}"


# ---------------------------------------------------------------- writing

Read = Callable[[int, int, int], Any]  # (array number, first byte, end) -> a buffer of those bytes


def write(folder: Path, header: Header, read: Read) -> tuple[Path, bytes]:
    """Write a snapshot and return its path and root. A crash leaves the whole file or none.

    `read` is asked for consecutive ranges of at most a part. OSError when the disk does not take it; nothing
    half-written stays behind then. All of the file's room is taken before the first range is asked for.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / file_name(header.round)
    draft = path.with_name(path.name + ".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        try:
            os.posix_fallocate(descriptor, 0, _data_start(header) + header.total)
            manifest = _write_parts(descriptor, header, read)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_path(folder)
    return path, manifest.root


def _write_parts(descriptor: int, header: Header, read: Read) -> Manifest:
    start = _data_start(header)
    hashes = []
    for number in range(header.parts):
        first, size = header.part(number)
        part = hashlib.blake2b(digest_size=HASH)
        place = start + first
        for array, low, high in spans(header, first, size):
            buffer = memoryview(read(array, low, high)).cast("B")
            part.update(buffer)
            place += write_at(descriptor, buffer, place)
        hashes.append(part.digest())
    manifest = Manifest(header, tuple(hashes))
    write_at(descriptor, memoryview(manifest.head), 0)
    return manifest


def _data_start(header: Header) -> int:
    """Offset of the arrays in the file of a header whose hashes are not known yet."""
    return Manifest(header, (bytes(HASH),) * header.parts).data_start


def write_at(descriptor: int, buffer: memoryview, place: int) -> int:
    """All of a buffer at an offset; the bytes written. OSError when the disk is full."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(descriptor, buffer[done:], place + done)
    return done


def spans(header: Header, first: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(array number, first byte, end) of each piece of a range of the stream of arrays."""
    begin = 0
    for number, array in enumerate(header.arrays):
        low, high = max(first - begin, 0), min(first + size - begin, array.size)
        if low < high:
            yield number, low, high
        begin += array.size
        if begin >= first + size:
            return


# ---------------------------------------------------------------- reading


class Reader:
    """An open snapshot whose head is checked. Parts are checked as they are read. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        """SnapshotError when the file is cut, altered or none of ours; OSError when it cannot be read."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self.manifest = self._head()
        except BaseException:
            self.close()
            raise

    @property
    def header(self) -> Header:
        return self.manifest.header

    def _head(self) -> Manifest:
        size = os.fstat(self._descriptor).st_size
        start = os.pread(self._descriptor, 12, 0)
        length = int.from_bytes(start[8:], "little")
        if len(start) < 12 or start[:8] != MAGIC or not length <= min(size, MAX_HEADER):
            raise SnapshotError(f"{self.path} is no snapshot, or was cut")
        header = decode_header(os.pread(self._descriptor, length, 12))
        table = os.pread(self._descriptor, HASH * (header.parts + 1), 12 + length)
        hashes = [table[k : k + HASH] for k in range(0, HASH * header.parts, HASH)]
        manifest = manifest_of(header.encode(), hashes, table[HASH * header.parts :])
        if size != manifest.data_start + header.total:
            raise SnapshotError(f"{self.path} has {size} bytes, {manifest.data_start + header.total} belong")
        return manifest

    def raw(self, number: int, offset: int, size: int) -> bytes:
        """Bytes of a part as they lie on the disk, unchecked: for a donor, whose peers check them."""
        first, length = self.header.part(number)
        if not 0 <= offset <= offset + size <= length:
            raise IndexError(f"bytes {offset} to {offset + size} of a part of {length}")
        return os.pread(self._descriptor, size, self.manifest.data_start + first + offset)

    def part(self, number: int) -> bytes:
        """A part, checked; SnapshotError when it is not what its hash says."""
        data = self.raw(number, 0, self.header.part(number)[1])
        if hash_of(data) != self.manifest.hashes[number]:
            raise SnapshotError(f"part {number} of {self.path} is damaged")
        return data

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """(first byte in the stream of arrays, data) of every part, each checked first."""
        for number in range(self.header.parts):
            yield self.header.part(number)[0], self.part(number)

    def span(self, array: int, first: int, end: int) -> bytes:
        """Bytes `first` to `end` of one array; every part they lie in is checked."""
        begin = sum(before.size for before in self.header.arrays[:array])
        low, high, size = begin + first, begin + end, self.header.part_size
        numbers = range(low // size, -(-high // size))
        data = b"".join(self.part(number) for number in numbers)
        return data[low % size : low % size + high - low]

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def files(folder: Path) -> list[Path]:
    """The snapshots of a folder, the newest round first; nothing of what is inside them is checked."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(folder.glob(f"round-*{SUFFIX}"), reverse=True)
    return []
