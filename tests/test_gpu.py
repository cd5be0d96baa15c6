"""The kernels on a real GPU (`make gpu-check`). Skipped, with the reason, where there is none.

Imports torch, triton, numba, numpy, pytest and the kernels only, so that it runs in a bare environment.
"""

from __future__ import annotations

import random

import pytest
import torch

from esnode.kernels import create, selftest
from esnode.kernels.interface import Region
from tests.slow_law import LIVE, SIGMA, STARTS, TOP, bits, steps_for, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm GPU in this machine"),
]
DEVICE = "cuda"


@pytest.fixture(params=["triton", "reference"])
def kernels(request):
    return create(request.param, DEVICE)


def same(kernels, values: torch.Tensor, region: Region, seed: int, narrow: bool) -> None:
    """Every operation on the GPU against numba on the CPU, bit for bit."""
    cpu, steps, tid = create("cpu"), steps_for(3, seed), seed * 0x9E3779B1 & 0xFFFFFFFF
    ours = values.to(torch.bfloat16) if narrow else values.clone()
    theirs = ours.to(DEVICE)
    noise_here = torch.empty(region.count, dtype=torch.int32)
    noise_there = noise_here.to(DEVICE)
    cpu.fill(seed, tid, region, noise_here)
    kernels.fill(seed, tid, region, noise_there)
    assert torch.equal(noise_here, noise_there.cpu())
    for live in LIVE.values():
        here, there = (
            torch.empty(region.count, dtype=live),
            torch.empty(region.count, dtype=live, device=DEVICE),
        )
        for sign in (1, -1):
            cpu.perturb(ours, here, seed, tid, region, SIGMA, sign)
            kernels.perturb(theirs, there, seed, tid, region, SIGMA, sign)
            assert (bits(here) == bits(there.cpu())).all()
        cpu.restore(ours, here)
        kernels.restore(theirs, there)
        assert (bits(here) == bits(there.cpu())).all()
    assert cpu.digest(ours, tid, region) == kernels.digest(theirs, tid, region)
    assert cpu.update(ours, steps, tid, region) == kernels.update(theirs, steps, tid, region)
    assert (bits(ours) == bits(theirs.cpu())).all()


def test_selftest(kernels):
    assert selftest(kernels, DEVICE).digest == selftest(create("cpu")).digest


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 master", "bf16 master"])
@pytest.mark.parametrize("start", STARTS)
def test_runs_at_every_kind_of_index(kernels, start, narrow):
    count = min(5003, TOP - start)
    same(kernels, torch.from_numpy(weights(count, start % 97)), Region.whole(count, start), 17, narrow)


@pytest.mark.parametrize("case", range(20))
def test_slices(kernels, case):
    draw = random.Random(case)
    rows, width = draw.randint(1, 60), draw.randint(1, 900)
    stride = width + draw.choice([0, 0, 1, 31, 576])
    region = Region(draw.choice(STARTS[:-1]), rows, width, stride)
    same(kernels, torch.from_numpy(weights(rows * width, case)), region, case, bool(case % 2))


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 master", "bf16 master"])
def test_ten_million_elements(narrow):
    count = 10**7
    same(
        create("triton", DEVICE), torch.from_numpy(weights(count)), Region.whole(count, 2**33 - 5), 5, narrow
    )


def test_fifty_rounds_leave_equal_bits_everywhere():
    region, cpu, gpu = Region.whole(100_003, 12345), create("cpu"), create("triton", DEVICE)
    here = torch.from_numpy(weights(region.count))
    there = here.to(DEVICE)
    for first in range(0, 50, 5):
        steps = steps_for(5, first)
        assert cpu.update(here, steps, 3, region) == gpu.update(there, steps, 3, region)
    assert (bits(here) == bits(there.cpu())).all()
