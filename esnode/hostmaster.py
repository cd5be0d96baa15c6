"""Masters in host memory that several processes share: one leader writes, the others only read.

One memory file (memfd: without the size limit of /dev/shm, and gone with the last process that holds it),
known to other processes of the same user by its `path`. It holds a header, the digest of each array as it was
written last, then the arrays. Pages are pinned where there is a GPU, so that copies overlap with computing.
May import torch; called by `state.py` and `placement.py`. Linux only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import resource
import struct
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from esnode import memory
from esnode.engines.wish import HostMasterUnavailable, LeaderGone
from protocol.errors import first_line
from protocol.lock import Lock

SPARE = 1 << 30  # bytes of host memory that are left to everything else
_HEADER = struct.Struct("<8s32sIQ")  # magic, identity, 1 when whole, how often it was written
_MAGIC = b"ESMASTR1"
_ADD_SEALS, _SEALS = 1033, 2 | 4  # fcntl.h: nobody may shrink or grow it, which would kill whoever reads it
_PORTABLE = 1  # pinned for every GPU of the process


class NotLeader(RuntimeError):
    """A process that only reads a shared master was told to write it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Elements of each array by name, in name order; the dtype of all; what they are the arrays of."""

    counts: tuple[tuple[str, int], ...]
    dtype: torch.dtype
    identity: bytes

    @staticmethod
    def of(lock: Lock, counts: Mapping[str, int]) -> Layout:
        """The layout of a lock's masters, or of what one process holds of them."""
        rows = tuple(sorted(counts.items()))
        known = repr((lock.run_id, lock.master, rows)).encode()
        return Layout(rows, getattr(torch, lock.master), hashlib.blake2b(known, digest_size=32).digest())

    def offsets(self) -> tuple[list[int], int]:
        """First byte of each array, and the size of the file."""
        at, found = _up(_HEADER.size + 8 * len(self.counts), mmap.PAGESIZE), []
        for _, count in self.counts:
            found.append(at)
            at = _up(at + count * self.dtype.itemsize, 256)
        return found, _up(at, mmap.PAGESIZE)


class HostMaster:
    """The arrays, and whether this process may write them. `views`: flat tensors by name, shared memory."""

    def __init__(self, file: int, path: str, layout: Layout, device: str, leader: bool) -> None:
        """Use `create` or `attach`."""
        self.path, self.leader, self.layout = path, leader, layout
        weakref.finalize(self, os.close, file)
        offsets, size = layout.offsets()
        pinned = device != "cpu"
        # CUDA pins nothing that it may not write; without it the system itself keeps readers from writing.
        access = mmap.ACCESS_WRITE if leader or pinned else mmap.ACCESS_READ
        self._map = mmap.mmap(file, size, access=access)
        raw = np.frombuffer(self._map, np.uint8)
        self._digests = raw[_HEADER.size : _HEADER.size + 8 * len(layout.counts)].view(np.uint64)
        self.views: dict[str, torch.Tensor] = {}
        for (name, count), at in zip(layout.counts, offsets, strict=True):
            array = raw[at : at + count * layout.dtype.itemsize]
            self.views[name] = _tensor(array).view(layout.dtype)
        self.obstacle = _pin(self, raw, device) if pinned else None  # why it is not pinned, in a sentence

    @classmethod
    def create(cls, layout: Layout, device: str = "cpu") -> HostMaster:
        """New memory, led by this process. HostMasterUnavailable, before any is taken, when there is too
        little.
        """
        _, size = layout.offsets()
        require(size)
        if not hasattr(os, "memfd_create"):
            raise HostMasterUnavailable("a master in shared host memory needs Linux; use --master device")
        file = os.memfd_create("esnode-master", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            os.close(file)
            raise _too_little(size, memory.available(), error.strerror or "refused") from None
        fcntl.fcntl(file, _ADD_SEALS, _SEALS)
        made = cls(file, f"/proc/{os.getpid()}/fd/{file}", layout, device, leader=True)
        made._write(whole=False, writes=0)
        return made

    @classmethod
    def attach(cls, path: str, layout: Layout, device: str = "cpu") -> HostMaster:
        """The memory another process leads, to be read only. HostMasterUnavailable when that process is gone
        or holds something else.
        """
        try:
            file = os.open(path, os.O_RDONLY if device == "cpu" else os.O_RDWR)
        except OSError as error:
            raise LeaderGone(
                f"the shared master {path} cannot be opened ({error.strerror}): the process that leads it is "
                "gone, or belongs to another user. Start all engines of this machine again."
            ) from None
        head = os.pread(file, _HEADER.size, 0)
        magic, identity = _HEADER.unpack(head)[:2] if len(head) == _HEADER.size else (b"", b"")
        if magic != _MAGIC or identity != layout.identity or os.fstat(file).st_size != layout.offsets()[1]:
            os.close(file)
            raise HostMasterUnavailable(f"{path} is not a shared master of this run and these tensors")
        return cls(file, path, layout, device, leader=False)

    def begin(self) -> None:
        """Nobody may use the arrays until `publish`. NotLeader for a reader."""
        self._require_leader()
        self._write(whole=False, writes=self.writes())

    def publish(self, digests: Mapping[str, int]) -> None:
        """The arrays are whole and have these digests."""
        self._require_leader()
        self._digests[:] = [digests[name] for name, _ in self.layout.counts]
        self._write(whole=True, writes=self.writes() + 1)

    @property
    def whole(self) -> bool:
        """Whether the leader is not in the middle of writing, nor died there."""
        return bool(_HEADER.unpack_from(self._map)[2])

    def digests(self) -> dict[str, int] | None:
        """What the leader last wrote, by array; None unless it is whole."""
        if not self.whole:
            return None
        return {name: int(d) for (name, _), d in zip(self.layout.counts, self._digests, strict=True)}

    def _require_leader(self) -> None:
        if not self.leader:
            raise NotLeader(f"{self.path} is written by the process that leads it")

    def writes(self) -> int:
        """How often the arrays have been written: rises whenever they have become something else."""
        return int(_HEADER.unpack_from(self._map)[3])

    def _write(self, *, whole: bool, writes: int) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, self.layout.identity, int(whole), writes)


def require(size: int) -> None:
    """HostMasterUnavailable unless the host has this much memory to spare."""
    free = memory.available()
    if size + SPARE > free:
        raise _too_little(size, free, "too little")


def _too_little(size: int, free: int, reason: str) -> HostMasterUnavailable:
    return HostMasterUnavailable(
        f"the master needs {memory.gb(size)} of host memory and {memory.gb(SPARE)} must stay free, but "
        f'{memory.gb(free)} are free ({reason}). Use a smaller model, master = "bfloat16", or --master '
        "device."
    )


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Without torch's warning about memory it may only read: `State` writes none that it does not lead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _pin(owner: object, raw: np.ndarray, device: str) -> str | None:
    """Pin all of it for the GPUs while `owner` lives; a sentence when the driver will not."""
    runtime, address = torch.cuda.cudart(), raw.ctypes.data
    try:
        code = int(runtime.cudaHostRegister(address, raw.nbytes, _PORTABLE))
    except RuntimeError as error:
        code, reason = 1, first_line(error)
    else:
        reason = f"error {code}"
    if code == 0:
        weakref.finalize(owner, runtime.cudaHostUnregister, address)
        return None
    with contextlib.suppress(RuntimeError):  # CUDA tells it once more, to whatever is launched next
        torch.ones(1, device=device)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "no limit" if limit == resource.RLIM_INFINITY else f"{limit / 1e9:.2f} GB"
    return (
        f"the master in host memory could not be pinned ({reason}; `ulimit -l` allows {allowed}): copies to "
        "the GPU take two to three times as long"
    )
