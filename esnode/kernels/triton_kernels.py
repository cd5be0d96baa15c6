"""The law in Triton, for GPUs; with TRITON_INTERPRET=1 in the environment also on a CPU, for tests.

Lives here: how a region becomes launches; the device code is in `triton_loops.py`. May import torch, triton
and `protocol` only; called through `pick`. Fusion of multiplications with additions is off, although the law
does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton

from esnode.kernels import triton_loops as loops
from esnode.kernels.interface import (
    OneByOne,
    Region,
    check_address,
    check_live,
    check_master,
    check_out,
    noise_scale,
)
from protocol import noise
from protocol.seeds import U64
from protocol.shaping import Step

GPU_BLOCK, CPU_BLOCK = 256, 4096  # counters per program; the interpreter pays per program, not per element
MOST_STEPS = 64  # rounds fused in one launch
ROW_ELEMENTS = 1 << 30  # of one launch's row: local offsets stay below 2^31
_HIGH_WORD = 34  # the counter's upper 32 bits are those of the element index from here on
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as triton_loops._store_live knows them


def _pieces(region: Region) -> Iterator[tuple[int, Region]]:
    """A region in parts (offset of their first element, part) none of which straddles a multiple of 2^34.

    Rows longer than `ROW_ELEMENTS` are cut too.
    """
    region = region.flat()
    last = region.start + (region.rows - 1) * region.stride + region.width - 1
    if region.start >> _HIGH_WORD == last >> _HIGH_WORD and region.width <= ROW_ELEMENTS:
        yield 0, region
        return
    for row in range(region.rows):
        at, end = region.start + row * region.stride, region.start + row * region.stride + region.width
        offset = row * region.width
        while at < end:
            edge = min(end, ((at >> _HIGH_WORD) + 1) << _HIGH_WORD, at + ROW_ELEMENTS)
            yield offset, Region.whole(edge - at, at)
            offset, at = offset + edge - at, edge


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a flat tensor of integers."""
    return tensor.detach().view(-1).view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def _low_high(values: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two 32-bit halves of u64s, as int32 tensors."""
    low = torch.tensor([_signed32(v & 0xFFFFFFFF) for v in values], dtype=torch.int32)
    high = torch.tensor([_signed32(v >> 32) for v in values], dtype=torch.int32)
    return low.to(device), high.to(device)


def _address(seed: int, tid: int) -> tuple[int, int, int]:
    """k0, k1 and tid as the kernels take them: always int32, so that a kernel is compiled once."""
    return _signed32(seed & 0xFFFFFFFF), _signed32(seed >> 32), _signed32(tid)


def _signed32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


class TritonKernels(OneByOne):
    """See `interface.Kernels`. `threads` is accepted and changes nothing."""

    name = "triton"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._rounds: tuple[Any, Any, tuple[torch.Tensor, ...]] = (None, None, ())
        self._scale: tuple[Any, Any, Any] = (None, None, None)

    def _table(self, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            self._tables[device] = torch.from_numpy(noise.TABLE.view("int32").copy()).to(device)
            _settle(device)
        return self._tables[device]

    def _factor(self, value: float, device: torch.device) -> torch.Tensor:
        """The scale of the noise on the device, kept for the next tensor of the same member."""
        if self._scale[:2] != (value, device):
            self._scale = (value, device, torch.tensor([value], dtype=torch.float32, device=device))
            _settle(device)
        return self._scale[2]  # type: ignore[no-any-return]

    def _launches(
        self, region: Region, device: torch.device
    ) -> Iterator[tuple[int, int, int, tuple[Any, ...]]]:
        """Per piece: (offset, programs, block, the last arguments but the constants)."""
        largest = GPU_BLOCK if device.type != "cpu" else CPU_BLOCK
        for offset, piece in _pieces(region):
            if piece.count:
                block = min(largest, triton.next_power_of_2((piece.width + 127) // 4 + 1))
                per_row = -(-(piece.width + 127) // (4 * block))
                place = (piece.start, piece.stride, piece.width, per_row)
                yield offset, per_row * piece.rows, block, place

    def fill(self, seed: int, tid: int, region: Region, out: torch.Tensor) -> None:
        check_address(seed, tid)
        check_out(out, region)
        flat = out.view(-1)
        with _on(out.device):
            for offset, programs, block, place in self._launches(region, out.device):
                loops.fill[(programs,)](
                    flat[offset:],
                    self._table(out.device),
                    *_address(seed, tid),
                    *place,
                    BLOCK=block,
                    enable_fp_fusion=False,
                )

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
        check_address(seed, tid)
        check_master(master, region)
        check_live(master, live)
        device = master.device
        scale = self._factor(noise_scale(sigma, sign), device)
        source, target = _bits(master), _bits(live)
        with _on(device):
            for offset, programs, block, place in self._launches(region, device):
                loops.perturb[(programs,)](
                    source[offset:],
                    target[offset:],
                    self._table(device),
                    scale,
                    *_address(seed, tid),
                    *place,
                    NARROW=master.dtype == torch.bfloat16,
                    KIND=_KINDS[live.dtype],
                    BLOCK=block,
                    enable_fp_fusion=False,
                )

    def restore(self, master: torch.Tensor, live: torch.Tensor) -> None:
        check_master(master)
        check_live(master, live)
        if not master.numel():
            return
        block = 4 * (GPU_BLOCK if master.device.type != "cpu" else CPU_BLOCK)
        with _on(master.device):
            loops.restore[(triton.cdiv(master.numel(), block),)](
                _bits(master),
                _bits(live),
                master.numel(),
                NARROW=master.dtype == torch.bfloat16,
                KIND=_KINDS[live.dtype],
                BLOCK=block,
                enable_fp_fusion=False,
            )

    def update(self, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region) -> list[int]:
        return self.start_update(master, steps, tid, region)()

    def start_update(
        self, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region
    ) -> Callable[[], list[int]]:
        check_address(0, tid)
        check_master(master, region)
        fused = [tuple(steps[first : first + MOST_STEPS]) for first in range(0, len(steps), MOST_STEPS)]
        totals = [self._fold(master, batch, tid, region) for batch in fused]
        return lambda: [value % U64 for total in totals for value in total.tolist()]

    def _fold(self, master: torch.Tensor, steps: tuple[Step, ...], tid: int, region: Region) -> torch.Tensor:
        """Launch the update of every piece; the digest after each step, as int64 on the device."""
        device, bits = master.device, _bits(master)
        constants = self._of_steps(steps, device)
        total = torch.zeros(len(steps), dtype=torch.int64, device=device)
        with _on(device):
            for offset, programs, block, place in self._launches(region, device):
                sums = torch.empty((max(len(steps), 1), programs), dtype=torch.int64, device=device)
                loops.update[(programs,)](
                    bits[offset:],
                    self._table(device),
                    *constants,
                    sums,
                    len(steps),
                    programs,
                    _signed32(tid),
                    *place,
                    NARROW=master.dtype == torch.bfloat16,
                    BLOCK=block,
                    enable_fp_fusion=False,
                )
                total += sums[: len(steps)].sum(dim=1)
        return total

    def _of_steps(self, steps: tuple[Step, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
        """What the update reads of its rounds, on the device: kept for the next tensor of the same rounds,
        since every copy from a program's own memory waits for the device.
        """
        if self._rounds[:2] != (steps, device):
            seeds = [seed for step in steps for seed in step.seeds]
            weights = [c for step in steps for c in step.c]
            begins = [0, *accumulate(len(step.seeds) for step in steps)]
            integers = torch.tensor(weights + begins + [sum(step.c) for step in steps], dtype=torch.int32)
            lists = integers.to(device).split([len(weights), len(begins), len(steps)])
            factors = torch.tensor([2.0**-step.shift for step in steps], dtype=torch.float32, device=device)
            rounding = _low_high([step.rounding_seed for step in steps], device)
            self._rounds = (steps, device, (*_low_high(seeds, device), *lists, factors, *rounding))
            _settle(device)
        return self._rounds[2]

    def digest(self, master: torch.Tensor, tid: int, region: Region) -> int:
        check_address(0, tid)
        check_master(master, region)
        device, bits, total = master.device, _bits(master), 0
        with _on(device):
            for offset, programs, block, place in self._launches(region, device):
                sums = torch.empty(programs, dtype=torch.int64, device=device)
                loops.digest[(programs,)](
                    bits[offset:],
                    sums,
                    _signed32(tid),
                    *place,
                    NARROW=master.dtype == torch.bfloat16,
                    BLOCK=block,
                    enable_fp_fusion=False,
                )
                total += int(sums.sum())
        return total % U64


def _settle(device: torch.device) -> None:
    """Wait for a constant to be there: other streams will read it too."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _on(device: torch.device) -> Any:
    """Launches go to the current device: make it the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.inference_mode()
