"""What a kernel backend must do: five operations on a slice of a tensor, with equal bits on every backend.

Lives here: the address of a slice (`Region`), the `Kernels` protocol, and the checks all backends share. May
import torch and `protocol` only. Called by `esnode.replica` and by the backends themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from protocol import noise
from protocol.shaping import Step

MASTER_DTYPES = (torch.float32, torch.bfloat16)
LIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Far from float32's subnormals and infinities: m * sigma * 2^-13 is exact whatever a processor flushes.
_SMALLEST_SIGMA, _LARGEST_SIGMA = 2.0**-80, 2.0**20


@dataclass(frozen=True, slots=True)
class Region:
    """A slice: `rows` rows of `width` elements of a tensor; element (i, j) has index start + i * stride + j.

    The index is row-major in the full, unsharded tensor; the slice itself is stored contiguously, row after
    row. A whole tensor, or any run of consecutive elements, is one row. ValueError when an index leaves 0 ..
    2^62.
    """

    start: int
    rows: int
    width: int
    stride: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.rows < 0 or self.width < 0:
            raise ValueError(f"{self} has a negative field")
        if self.rows > 1 and self.stride < self.width:
            raise ValueError(f"{self} has rows that overlap")
        if self.start + max(self.rows - 1, 0) * max(self.stride, 0) + self.width > noise.MAX_INDEX:
            raise ValueError(f"{self} reaches beyond index 2^62")

    @staticmethod
    def whole(count: int, start: int = 0) -> Region:
        """`count` consecutive elements: a full tensor, or a run of one from index `start`."""
        return Region(start, 1, count, count)

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.rows * self.width

    def flat(self) -> Region:
        """The same elements in as few rows as possible: rows that touch become one."""
        if self.rows > 1 and self.stride == self.width:
            return Region(self.start, 1, self.count, self.count)
        return self

    def pieces(self, most: int) -> Iterator[tuple[int, Region]]:
        """Parts of at most `most` elements: (position of the first one in the slice, part)."""
        whole = self.flat()
        if whole.width > most:
            for row in range(whole.rows):
                for first in range(0, whole.width, most):
                    count = min(most, whole.width - first)
                    at = whole.start + row * whole.stride + first
                    yield row * whole.width + first, Region.whole(count, at)
        elif whole.count:
            step = most // whole.width
            for row in range(0, whole.rows, step):
                rows = min(step, whole.rows - row)
                at = whole.start + row * whole.stride
                yield row * whole.width, Region(at, rows, whole.width, whole.stride)


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of the weights: its master, its live weights, its tensor's key, its elements' indices."""

    master: torch.Tensor
    live: torch.Tensor
    tid: int
    region: Region


class Kernels(Protocol):
    """One backend. Tensors are contiguous and hold exactly the region's elements; ValueError if not.

    `tid` is the tensor's u32 key, `seed` a u64. Masters are float32, or bfloat16 rounded stochastically; live
    weights are bfloat16, float16 or float32. No result depends on `threads` or on how a tensor is cut.
    """

    name: str
    threads: int | None
    """Threads to use; None follows torch's setting."""

    def fill(self, seed: int, tid: int, region: Region, out: torch.Tensor) -> None:
        """Write m of every element (int32); eps = m * 2^-13."""

    def perturb(
        self,
        master: torch.Tensor,
        live: torch.Tensor,
        seed: int,
        tid: int,
        region: Region,
        sigma: float,
        sign: int,
    ) -> None:
        """live = round(master + sign * sigma * eps). sigma is a positive bfloat16 value, sign 1 or -1."""

    def perturb_many(self, slices: Sequence[Slice], seed: int, sigma: float, sign: int) -> None:
        """`perturb` of several slices. Threads share them all instead of meeting once per slice."""

    def restore(self, master: torch.Tensor, live: torch.Tensor) -> None:
        """live = round(master)."""

    def restore_many(self, slices: Sequence[Slice]) -> None:
        """`restore` of several slices, shared like those of `perturb_many`."""

    def update(self, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region) -> list[int]:
        """Apply rounds to the master in place, in order, in one pass; this slice's u64 digest after each."""

    def start_update(
        self, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region
    ) -> Callable[[], list[int]]:
        """`update`, perhaps still in a GPU's current stream; what is returned waits for the digests."""

    def digest(self, master: torch.Tensor, tid: int, region: Region) -> int:
        """This slice's share of the state digest: u64, to be summed mod 2^64 over slices."""


class _AtOnce:
    """A backend whose updates are done when they return."""

    def start_update(
        self: Kernels, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region
    ) -> Callable[[], list[int]]:
        """See `Kernels`."""
        digests = self.update(master, steps, tid, region)
        return lambda: digests


class OneByOne(_AtOnce):
    """A backend that gains nothing from seeing several slices at once: it writes `perturb` and `restore`."""

    def perturb_many(self: Kernels, slices: Sequence[Slice], seed: int, sigma: float, sign: int) -> None:
        """See `Kernels`."""
        for part in slices:
            self.perturb(part.master, part.live, seed, part.tid, part.region, sigma, sign)

    def restore_many(self: Kernels, slices: Sequence[Slice]) -> None:
        """See `Kernels`."""
        for part in slices:
            self.restore(part.master, part.live)


class Together(_AtOnce):
    """A backend for which one slice is a list of one: it writes `perturb_many` and `restore_many`."""

    def perturb(
        self: Kernels,
        master: torch.Tensor,
        live: torch.Tensor,
        seed: int,
        tid: int,
        region: Region,
        sigma: float,
        sign: int,
    ) -> None:
        """See `Kernels`."""
        self.perturb_many([Slice(master, live, tid, region)], seed, sigma, sign)

    def restore(self: Kernels, master: torch.Tensor, live: torch.Tensor) -> None:
        """See `Kernels`."""
        self.restore_many([Slice(master, live, 0, Region.whole(master.numel()))])


def check_master(master: torch.Tensor, region: Region | None = None) -> None:
    """ValueError unless `master` is a contiguous float32 or bfloat16 tensor of the region's size."""
    _check("master", master, MASTER_DTYPES, region)


def check_size(master: torch.Tensor, live: torch.Tensor) -> None:
    """ValueError unless `live` is contiguous, of a live dtype, as large as the master."""
    _check("live", live, LIVE_DTYPES, None)
    if live.numel() != master.numel():
        raise ValueError(f"live weights ({live.numel()}) do not match the master ({master.numel()})")


def check_live(master: torch.Tensor, live: torch.Tensor) -> None:
    """ValueError unless `live` is as of `check_size` and on the master's device."""
    check_size(master, live)
    if live.device != master.device:
        raise ValueError(f"live weights are on {live.device}, the master is on {master.device}")


def check_out(out: torch.Tensor, region: Region) -> None:
    """ValueError unless `out` is a contiguous int32 tensor of the region's size."""
    _check("out", out, (torch.int32,), region)


def check_address(seed: int, tid: int) -> None:
    """ValueError unless seed is a u64 and the tensor key a u32."""
    if not (0 <= seed < 1 << 64 and 0 <= tid < 1 << 32):
        raise ValueError(f"seed {seed} is no u64, or tensor key {tid} no u32")


def noise_scale(sigma: float, sign: int) -> float:
    """sign * sigma * 2^-13, the factor of m; ValueError unless sigma is a positive bfloat16 value."""
    if not (_SMALLEST_SIGMA <= sigma <= _LARGEST_SIGMA and noise.is_bf16(sigma)) or sign not in (1, -1):
        raise ValueError(
            f"sigma {sigma} is not a positive bfloat16 of usual size, or sign {sign} not 1 or -1"
        )
    return sign * sigma * 2.0**-13


def _check(what: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], region: Region | None) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{what} is {tensor.dtype}, not one of {', '.join(map(str, dtypes))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} is not contiguous")
    if region is not None and tensor.numel() != region.count:
        raise ValueError(f"{what} has {tensor.numel()} elements, its region {region.count}")
