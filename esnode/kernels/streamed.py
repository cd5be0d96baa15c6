"""Masters in host memory, live weights on a GPU: a master passes through two small buffers on the device.

A wrapper of two backends, the GPU's and the host's, itself a backend. Chunks alternate between two buffers
with a stream each, so that one is copied while another is computed; the copies overlap only where the host
memory is pinned (`esnode.hostmaster`). Rounds are folded on the host or on the way through the device,
whichever is estimated to be faster. Nothing here computes a bit: each element depends on its own address
only, so chunks change nothing. On device "cpu" the same code runs with plain copies, for tests. May import
torch and `protocol`; called by `esnode.placement`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from esnode.kernels.interface import (
    Kernels,
    Region,
    Slice,
    Together,
    check_address,
    check_master,
    check_size,
    noise_scale,
)
from protocol.seeds import U64
from protocol.shaping import Step

CHUNK = 1 << 22  # elements: 16 MB of float32 take .7 ms of PCIe, a thousand times a launch
BUFFERS = 2
# For the choice of where to fold: bytes/s of a GPU link each way (PCIe 4 x16, pinned), noise values/s of one
# host thread (measured, benchmarks/noise.py) and of a GPU (from the instruction count).
LINK, HOST_NOISES, GPU_NOISES = 25e9, 1.4e9, 1e12
_READING = 0.25  # what reading and writing an element costs on the host, in noise values


def passes_through(noises: int, itemsize: int, threads: int) -> bool:
    """Whether folding `noises` members into a weight is faster on the device, its way there included."""
    on_host = (noises + _READING) / (HOST_NOISES * threads)
    return max(itemsize / LINK, noises / GPU_NOISES) < on_host


class _Belt:
    """The device's buffers and their streams. One thread at a time has them: a snapshot and the replica proof
    take digests beside the engine, and would take its buffers.
    """

    def __init__(self, device: torch.device, chunk: int) -> None:
        self._device = device
        self._buffers = [torch.empty(4 * chunk, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(BUFFERS)] if cuda else []
        self._turn = 0
        self._taken = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Chunks begin when everything queued so far is done, and are all done at the end."""
        with self._taken:
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                yield
            finally:
                for stream in self._streams:
                    stream.synchronize()

    @contextlib.contextmanager
    def chunk(self, host: torch.Tensor) -> Iterator[torch.Tensor]:
        """A copy of some host memory on the device, on the stream that is current meanwhile."""
        self._turn = (self._turn + 1) % BUFFERS
        raw = self._buffers[self._turn][: host.numel() * host.dtype.itemsize]
        with torch.cuda.stream(self._streams[self._turn]) if self._streams else contextlib.nullcontext():
            buffer = raw.view(host.dtype)
            buffer.copy_(host, non_blocking=True)
            yield buffer


class StreamedKernels(Together):
    """See `interface.Kernels`: masters are on the host, live weights on the device."""

    def __init__(
        self,
        inner: Kernels,
        host: Kernels,
        device: str,
        *,
        chunk: int = CHUNK,
        fold_on_device: bool | None = None,
    ) -> None:
        """`inner` computes on `device`, `host` on the CPU. `fold_on_device` None: as estimated."""
        self.name = inner.name
        self._inner, self._host = inner, host
        self._device, self._chunk = torch.device(device), chunk
        self._fold_on_device = fold_on_device
        self._belt = _Belt(self._device, chunk)

    @property
    def threads(self) -> int | None:
        """The host's threads; None follows torch's setting."""
        return self._host.threads

    @threads.setter
    def threads(self, threads: int | None) -> None:
        self._host.threads = threads

    def fill(self, seed: int, tid: int, region: Region, out: torch.Tensor) -> None:
        self._of(out).fill(seed, tid, region, out)

    def perturb_many(self, slices: Sequence[Slice], seed: int, sigma: float, sign: int) -> None:
        noise_scale(sigma, sign)
        for part in slices:
            check_address(seed, part.tid)
            check_master(part.master, part.region)

        def move(master: torch.Tensor, live: torch.Tensor, part: Slice, piece: Region) -> None:
            self._inner.perturb(master, live, seed, part.tid, piece, sigma, sign)

        self._write(slices, move)

    def restore_many(self, slices: Sequence[Slice]) -> None:
        for part in slices:
            check_master(part.master)
        flat = [Slice(part.master, part.live, 0, Region.whole(part.master.numel())) for part in slices]
        self._write(flat, lambda master, live, part, piece: self._inner.restore(master, live))

    def _write(
        self, slices: Sequence[Slice], move: Callable[[torch.Tensor, torch.Tensor, Slice, Region], None]
    ) -> None:
        """Live weights of all slices, chunk by chunk."""
        for part in slices:
            check_size(part.master, part.live)
        with self._belt.running():
            for part in slices:
                source, target = part.master.detach().view(-1), part.live.detach().view(-1)
                for first, piece in part.region.pieces(self._chunk):
                    here = slice(first, first + piece.count)
                    with self._belt.chunk(source[here]) as buffer:
                        move(buffer, target[here], part, piece)

    def update(self, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region) -> list[int]:
        noises = sum(len(step.seeds) for step in steps)
        if master.device.type != "cpu" or not self._through(noises, master):
            return self._of(master).update(master, steps, tid, region)
        check_address(0, tid)
        check_master(master, region)
        flat, shares = master.detach().view(-1), []
        with self._belt.running():
            for first, piece in region.pieces(self._chunk):
                here = flat[first : first + piece.count]
                with self._belt.chunk(here) as buffer:
                    shares.append(self._inner.start_update(buffer, steps, tid, piece))
                    here.copy_(buffer, non_blocking=True)
        digests = [share() for share in shares] or [[0] * len(steps)]
        return [sum(column) % U64 for column in zip(*digests, strict=True)]

    def digest(self, master: torch.Tensor, tid: int, region: Region) -> int:
        if master.device.type != "cpu" or not self._through(0, master):
            return self._of(master).digest(master, tid, region)
        check_address(0, tid)
        check_master(master, region)
        flat, total = master.detach().view(-1), 0
        with self._belt.running():
            for first, piece in region.pieces(self._chunk):
                with self._belt.chunk(flat[first : first + piece.count]) as buffer:
                    total += self._inner.digest(buffer, tid, piece)
        return total % U64

    def _through(self, noises: int, master: torch.Tensor) -> bool:
        if self._fold_on_device is not None:
            return self._fold_on_device
        threads = self.threads or torch.get_num_threads()
        return self._device.type != "cpu" and passes_through(noises, master.dtype.itemsize, threads)

    def _of(self, tensor: torch.Tensor) -> Kernels:
        """The backend of the place where a tensor is."""
        return self._host if tensor.device.type == "cpu" else self._inner
