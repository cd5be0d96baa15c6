"""Kernels and law on drawn inputs. Apart from the other tests of both, which run without hypothesis too."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from esnode.kernels import create
from esnode.kernels.interface import Region
from protocol import noise, seeds, shaping
from tests.slow_law import BACKENDS, LIVE, SIGMA, STARTS, TOP, bits, law_bits, steps_for, weights
from tests.test_kernels import sub_region
from tests.test_noise_law import RUN_ID, plain_m


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 700), st.sampled_from(STARTS), st.randoms(use_true_random=False))
def test_a_slice_holds_the_elements_of_the_whole(rows, columns, start, draw):
    start = min(start, TOP - rows * columns)
    r0, c0 = draw.randrange(rows), draw.randrange(columns)
    r1, c1 = draw.randint(r0 + 1, rows), draw.randint(c0 + 1, columns)
    values = weights(rows * columns).reshape(rows, columns)
    m = noise.integers(3, 4, start, rows * columns).reshape(rows, columns)
    dtype, live_dtype = draw.choice(list(LIVE.items()))
    steps = [replace(step, seeds=step.seeds[:2], c=step.c[:2]) for step in steps_for(2, seed=rows)]
    moved = torch.from_numpy(values.copy())
    create("cpu").update(moved, steps, 4, Region.whole(rows * columns, start))
    for name in BACKENDS:
        end = min(r1, r0 + 2) if name == "triton" else r1  # its interpreter is slow, row by row
        region = sub_region(rows, columns, r0, end, c0, c1, start)
        part, part_m = values[r0:end, c0:c1].copy(), m[r0:end, c0:c1].copy()
        kernels = create(name)
        out = torch.empty(part.shape, dtype=torch.int32)
        kernels.fill(3, 4, region, out)
        assert (out.numpy() == part_m).all()
        live = torch.empty(part.shape, dtype=live_dtype)
        kernels.perturb(torch.from_numpy(part), live, 3, 4, region, SIGMA, -1)
        expected = noise.perturb(part.reshape(-1), part_m.reshape(-1), SIGMA, -1, dtype)
        assert (bits(live) == law_bits(expected)).all()
        master = torch.from_numpy(part)
        kernels.update(master, steps, 4, region)
        assert (bits(master) == bits(moved[r0:end, c0:c1].contiguous())).all()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**62 - 1))
def test_integers_agree_with_plain_python(seed, tensor, index):
    assert noise.integers(seed, tensor, index, 1).tolist() == [plain_m(seed, tensor, index)]


@given(st.integers(0, 2**62 - 400), st.integers(0, 300), st.integers(1, 90))
def test_a_run_is_its_elements(start, offset, count):
    whole = noise.integers(11, 13, start, 400)
    assert (noise.integers(11, 13, start + offset, count) == whole[offset : offset + count]).all()


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=200),
    st.floats(1e-9, 1e3),
    st.sampled_from(["zscore", "ranks"]),
    st.sampled_from([0.0, 1.0, 2.5]),
)
def test_sums_stay_within_int32(rewards, alpha, kind, clip):
    found = shaping.coefficients(rewards, alpha, kind, clip)
    assume(found is not None)
    assert sum(map(abs, found.c)) <= shaping.MAX_SUM
    assert shaping.MAX_SUM * noise.LARGEST_M < 2**31
    assert sum(map(abs, found.c)) > 22900 - len(rewards)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_mirrored_pairs_merge(plus_minus):
    rewards = [r for p in plus_minus for r in (p, 1 - p)]
    found = shaping.coefficients(rewards, 0.01, "zscore")
    pairs = len(plus_minus)
    doubled = [s for k in range(pairs) for s in (k + 7, k + 7)]
    step = shaping.make_step(found, doubled, mirrored=True, rounding_seed=3)
    if found is None:
        assert step is None
        return
    merged = shaping.merge_pairs(found.c)
    assert [found.c[2 * k] - found.c[2 * k + 1] for k in range(pairs)] == list(merged)
    # The merged noise moves the master exactly as its two sides do.
    both = noise.weighted_sum(doubled, [c * (1, -1)[i % 2] for i, c in enumerate(found.c)], 9, 100, 50)
    assert (noise.weighted_sum(step.seeds, step.c, 9, 100, 50) == both).all()


@given(st.integers(1, 9), st.integers(1, 13), st.integers(0, 50))
def test_rounds_walk_through_the_epochs(total, per_round, round):
    joined = []
    for epoch in range(per_round * 51 // total + 1):
        joined += seeds.prompt_order(RUN_ID, epoch, total)
    start = round * per_round
    assert seeds.prompts_of_round(RUN_ID, round, per_round, total) == joined[start : start + per_round]
