"""Compiles every Triton kernel, as `TritonKernels` launches it, for GPUs that are not here and prints their
assembly, by target and launch, as JSON: `python -m tests.compile_kernels`.

A process of its own, because TRITON_INTERPRET, which the other tests set, turns compilation off. Types and
constants of a kernel follow from the arguments of a launch (one that is 1 may become a constant), so nothing
here says what they are: the launches are made, for a driver that only says which GPU there is, and not run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from esnode.kernels import triton_kernels
from esnode.kernels.interface import LIVE_DTYPES, MASTER_DTYPES, Region
from protocol.shaping import Step

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "ptx"),
    "sm_90": (GPUTarget("cuda", 90, 32), "ptx"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "amdgcn"),
}
# Of one element, all of whose numbers are 1; and of numbers beyond 32 bits.
REGIONS = (Region.whole(1, 1), Region(2**35, 2, 2000, 2**33))
STEP = Step((1, 2**64 - 1), (3, -4), 45, 7)


class Away:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, number: int, target: GPUTarget) -> None:
        self._number, self._target = number, target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(target: str) -> dict[str, str]:
    """Assembly of every launch."""
    gpu, assembly = TARGETS[target]
    driver.set_active(Away(list(TARGETS).index(target), gpu))
    run, made = JITFunction.run, []

    def only_compile(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(0 < programs < 2**31 for programs in grid)
        made.append(run(kernel, *arguments, grid=grid, warmup=True, **options).asm[assembly])

    JITFunction.run = only_compile
    try:
        found = {}
        for label, launch in launches():
            launch()
            (found[label],) = made
            made.clear()
        return found
    finally:
        JITFunction.run = run


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """A launch of every kernel for both regions and all dtypes, with what it is called."""
    triton_kernels.CPU_BLOCK = triton_kernels.GPU_BLOCK
    kernels = triton_kernels.TritonKernels()
    for region in REGIONS:
        place = f"{region.rows} x {region.width}"
        out = torch.empty(region.count, dtype=torch.int32)
        yield f"fill {place}", partial(kernels.fill, 2, 3, region, out)
        for dtype in MASTER_DTYPES:
            master = torch.zeros(region.count, dtype=dtype)
            yield f"update {dtype} {place}", partial(kernels.start_update, master, [STEP], 3, region)
            yield f"digest {dtype} {place}", partial(kernels.digest, master, 3, region)
            for live_dtype in LIVE_DTYPES:
                live = torch.empty(region.count, dtype=live_dtype)
                perturb = partial(kernels.perturb, master, live, 2, 3, region, 0.0078125, -1)
                yield f"perturb {dtype} to {live_dtype} {place}", perturb
                yield f"restore {dtype} to {live_dtype} {place}", partial(kernels.restore, master, live)


if __name__ == "__main__":
    json.dump({target: compiled(target) for target in TARGETS}, sys.stdout)
