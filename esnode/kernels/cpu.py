"""The `cpu` backend: numba loops, cut over threads of our own.

May import torch, numpy, numba (through `cpu_loops`) and `protocol`. Threads are a plain pool calling compiled
code that holds no interpreter lock, not numba's own: its OpenMP layer forbids fork and spins beside torch's,
and its work queue aborts when two threads use it. Each element depends on its own address only, so cuts
change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from esnode.kernels import cpu_loops as loops
from esnode.kernels.interface import (
    Region,
    Slice,
    Together,
    check_address,
    check_live,
    check_master,
    check_out,
    noise_scale,
)
from protocol.seeds import U64
from protocol.shaping import Step

_KINDS = {torch.bfloat16: loops.BF16, torch.float16: loops.FP16, torch.float32: loops.FP32}
_NO_U32, _NO_U16 = np.empty(0, np.uint32), np.empty(0, np.uint16)
_SMALL = 1 << 16  # noise values that take as long as waking another thread
_LARGE = 1 << 18  # noise values per thread from which they come in several pieces
_COPY = 0.25  # an element read and written, in noise values
_MOST_THREADS = 256
_MOST_NOISES = 2048  # fused in one pass: their constants (128 bytes each) stay in the second-level cache


def _bits(tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A tensor's memory as (u32 array, u16 array), the one of another width being empty."""
    if tensor.device.type != "cpu":
        raise ValueError(f"the cpu kernels got a tensor on {tensor.device}")
    flat = tensor.detach().view(-1)
    if flat.dtype.itemsize == 4:
        return flat.view(torch.int32).numpy().view(np.uint32), _NO_U16
    return _NO_U32, flat.view(torch.int16).numpy().view(np.uint16)


def _cut(region: Region, parts: int) -> list[tuple[int, Region]]:
    """Split a region into at most `parts` pieces: (position of its first element, piece)."""
    if parts <= 1:
        return [(0, region)]
    if region.rows > 1:
        parts = min(parts, region.rows)
        edges = [region.rows * k // parts for k in range(parts + 1)]
        return [
            (a * region.width, Region(region.start + a * region.stride, b - a, region.width, region.stride))
            for a, b in pairwise(edges)
        ]
    # Cut between blocks of noise, so that no block is made twice.
    inner = [(region.start + region.count * k // parts) // loops.BLOCK * loops.BLOCK for k in range(1, parts)]
    edges = [region.start, *inner, region.start + region.count]
    return [(a - region.start, Region.whole(b - a, a)) for a, b in pairwise(edges) if b > a]


def _batches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps in runs that are worth one pass over the weights each."""
    batch: list[Step] = []
    noises = 0
    for step in steps:
        if batch and noises + len(step.seeds) > _MOST_NOISES:
            yield batch
            batch, noises = [], 0
        batch.append(step)
        noises += len(step.seeds)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Task:
    """`work(position, piece)` on a region that may be cut; `cost` is an element's work in noise values."""

    region: Region
    cost: float
    work: Callable[[int, Region], Any]

    def jobs(self, threads: int, alone: bool) -> list[Callable[[], Any]]:
        """The task in pieces. Alone it must employ all threads; among others only a large one is cut.

        Large ones make several pieces per thread: a thread that comes late or shares its core does less.
        """
        region = self.region.flat()
        work = int(region.count * self.cost)
        parts = work // _LARGE
        if alone:
            parts = threads * min(max(parts // threads, 1), 8)
        most = work // _SMALL if threads > 1 else 1
        return [partial(self.work, *piece) for piece in _cut(region, min(parts, most))]


def _perturbing(part: Slice, seed: int, scale: np.float32) -> _Task:
    check_address(seed, part.tid)
    check_master(part.master, part.region)
    check_live(part.master, part.live)
    (m32, m16), (l32, l16) = _bits(part.master), _bits(part.live)
    wide, kind = bool(len(m32)), _KINDS[part.live.dtype]
    address = np.uint64(seed), np.uint64(part.tid)

    def work(at: int, piece: Region) -> None:
        place = piece.start, piece.rows, piece.width, piece.stride
        loops.perturb(*address, *place, scale, m32[at:], m16[at:], wide, kind, l32[at:], l16[at:])

    return _Task(part.region, 1 + _COPY, work)


def _restoring(master: torch.Tensor, live: torch.Tensor) -> _Task:
    check_master(master)
    check_live(master, live)
    (m32, m16), (l32, l16) = _bits(master), _bits(live)
    wide, kind = bool(len(m32)), _KINDS[live.dtype]

    def work(at: int, piece: Region) -> None:
        loops.restore(at, at + piece.count, m32, m16, wide, kind, l32, l16)

    return _Task(Region.whole(master.numel()), _COPY, work)


class CpuKernels(Together):
    """See `interface.Kernels`. `threads` None follows torch.get_num_threads() at each call. Thread-safe."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="kernels")  # starts none until used

    def _run(self, *tasks: _Task) -> list[Any]:
        """Do tasks on this thread and on helpers; the results of their pieces in any order."""
        threads = self.threads or torch.get_num_threads()
        todo = deque(job for task in tasks for job in task.jobs(threads, alone=len(tasks) == 1))
        results: list[Any] = []

        def drain() -> None:
            while todo:
                try:
                    job = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                results.append(job())

        helpers = [self._pool.submit(drain) for _ in range(min(threads, len(todo)) - 1)]
        try:
            drain()
        finally:
            todo.clear()
            started = [helper for helper in helpers if not helper.cancel()]
            for helper in started:
                helper.result()
        return results

    def fill(self, seed: int, tid: int, region: Region, out: torch.Tensor) -> None:
        check_address(seed, tid)
        check_out(out, region)
        array = _bits(out)[0].view(np.int32)
        address = np.uint64(seed), np.uint64(tid)

        def work(at: int, piece: Region) -> None:
            loops.fill(*address, piece.start, piece.rows, piece.width, piece.stride, array[at:])

        self._run(_Task(region, 1 + _COPY, work))

    def perturb_many(self, slices: Sequence[Slice], seed: int, sigma: float, sign: int) -> None:
        scale = np.float32(noise_scale(sigma, sign))
        self._run(*[_perturbing(part, seed, scale) for part in slices])

    def restore_many(self, slices: Sequence[Slice]) -> None:
        self._run(*[_restoring(part.master, part.live) for part in slices])

    def update(self, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region) -> list[int]:
        check_address(0, tid)
        check_master(master, region)
        digests: list[int] = []
        for batch in _batches(steps):
            digests += self._update(master, batch, tid, region)
        return digests

    def _update(self, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region) -> list[int]:
        m32, m16 = _bits(master)
        wide = bool(len(m32))
        seeds = np.array([seed for step in steps for seed in step.seeds], np.uint64)
        c = np.array([weight for step in steps for weight in step.c], np.int32)
        ends = np.array(list(accumulate(len(step.seeds) for step in steps)), np.int64)
        scales = np.array([2.0**-step.shift for step in steps], np.float32)
        rounding = np.array([step.rounding_seed for step in steps], np.uint64)

        def work(at: int, piece: Region) -> list[int]:
            sums = np.zeros(len(steps), np.uint64)
            place = piece.start, piece.rows, piece.width, piece.stride
            table = seeds, c, ends, scales, rounding
            loops.update(np.uint64(tid), *place, *table, m32[at:], m16[at:], wide, sums)
            return [int(share) for share in sums]

        shares = self._run(_Task(region, len(seeds) + _COPY, work))
        return [sum(column) % U64 for column in zip(*shares, strict=True)]

    def digest(self, master: torch.Tensor, tid: int, region: Region) -> int:
        check_address(0, tid)
        check_master(master, region)
        m32, m16 = _bits(master)

        def work(at: int, piece: Region) -> int:
            place = piece.start, piece.rows, piece.width, piece.stride
            return int(loops.digest(np.uint64(tid), *place, m32[at:], m16[at:], bool(len(m32))))

        return int(sum(self._run(_Task(region, _COPY, work)))) % U64
