"""Many random elements through every operation of every backend, and many perturb and restore cycles."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from esnode.kernels import create
from esnode.kernels.interface import Region
from protocol import noise
from tests.slow_law import BACKENDS, LIVE, SIGMA, TOP, bits, law_bits, law_update, steps_for, weights


def backends(part: int) -> list[str]:
    """Every fifth part is also Triton's, whose interpreter takes ten times as long as all else together."""
    return [name for name in BACKENDS if name != "triton" or part % 5 == 0]


def compare_everything(count: int, seed: int) -> int:
    """Random elements through every operation of the backends and the slow law; how many were compared."""
    draw = random.Random(seed)
    start, tid = draw.randrange(TOP - count), draw.getrandbits(32)
    noise_seed, region = draw.getrandbits(64), Region.whole(count, start)
    values = weights(count, seed)
    m = noise.integers(noise_seed, tid, start, count)
    step = steps_for(1, seed)
    expected, digests = law_update(values, step, tid, start)
    narrow = noise.round_bf16(values)
    expected_narrow, digests_narrow = law_update(narrow, step, tid, start, narrow=True)
    for name in backends(seed):
        kernels = create(name, threads=draw.choice([1, 2]))
        out = torch.empty(count, dtype=torch.int32)
        kernels.fill(noise_seed, tid, region, out)
        assert (out.numpy() == m).all()
        for dtype, live_dtype in LIVE.items():
            live = torch.empty(count, dtype=live_dtype)
            kernels.perturb(torch.from_numpy(values), live, noise_seed, tid, region, SIGMA, 1)
            assert (bits(live) == law_bits(noise.perturb(values, m, SIGMA, 1, dtype))).all()
        master = torch.from_numpy(values.copy())
        assert kernels.update(master, step, tid, region) == digests
        assert (bits(master) == expected).all()
        state = torch.from_numpy(narrow.copy().view(np.int16)).view(torch.bfloat16)
        assert kernels.update(state, step, tid, region) == digests_narrow
        assert (bits(state) == expected_narrow).all()
    return count


def test_a_million_random_elements():
    assert sum(compare_everything(100_000, seed) for seed in range(10)) == 10**6


@pytest.mark.slow
def test_ten_million_random_elements():
    assert sum(compare_everything(100_000, 1000 + seed) for seed in range(100)) == 10**7


def test_ten_million_noise_values():
    for part in range(10):
        start = random.Random(part).randrange(TOP - 10**6)
        expected = noise.integers(part, 7, start, 10**6)
        for name in backends(part):
            out = torch.empty(10**6, dtype=torch.int32)
            create(name).fill(part, 7, Region.whole(10**6, start), out)
            assert (out.numpy() == expected).all()


def cycles(kernels, count: int, size: int) -> None:
    master = torch.from_numpy(weights(size))
    before = bits(master).copy()
    region = Region.whole(size, 2**34 - size // 2)
    for live_dtype in LIVE.values():
        live = torch.empty(size, dtype=live_dtype)
        kernels.restore(master, live)
        pristine = bits(live).copy()
        for seed in range(count):
            kernels.perturb(master, live, seed, 3, region, SIGMA, 1 - 2 * (seed % 2))
            kernels.restore(master, live)
        assert (bits(live) == pristine).all()
    assert (bits(master) == before).all()


def test_a_thousand_perturb_and_restore_cycles():
    cycles(create("cpu"), 1000, 4096)
    cycles(create("reference"), 20, 4096)
