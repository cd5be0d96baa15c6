"""Kernels: equal bits from every backend, however a tensor is cut, whatever the dtype, index and threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from esnode.kernels import create
from esnode.kernels.interface import Region, Slice
from esnode.kernels.streamed import StreamedKernels
from protocol import noise
from protocol.shaping import MAX_SUM, Step
from tests.slow_law import (
    BACKENDS,
    LIVE,
    SIGMA,
    STARTS,
    TOP,
    bits,
    law_bits,
    law_update,
    steps_for,
    weights,
)


@pytest.fixture(scope="module", params=[*BACKENDS, "streamed"])
def kernels(request):
    if request.param == "streamed":  # every chunk and fold on its way through a "device", which is the CPU
        return StreamedKernels(create("cpu"), create("cpu"), "cpu", chunk=1000, fold_on_device=True)
    return create(request.param)


def sub_region(rows: int, columns: int, r0: int, r1: int, c0: int, c1: int, start: int) -> Region:
    """Rows r0..r1 and columns c0..c1 of a rows x columns tensor whose first element has index `start`."""
    return Region(start + r0 * columns + c0, r1 - r0, c1 - c0, columns)


# --- equal to the law ---


@pytest.mark.parametrize("start", STARTS)
def test_noise_is_the_laws_at_every_index(kernels, start):
    count = min(3001, TOP - start)
    out = torch.empty(count, dtype=torch.int32)
    kernels.fill(2**64 - 3, 0xFFFFFFFF, Region.whole(count, start), out)
    assert (out.numpy() == noise.integers(2**64 - 3, 0xFFFFFFFF, start, count)).all()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("dtype", LIVE)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 master", "bf16 master"])
def test_perturb_and_restore(kernels, start, dtype, sign, narrow):
    values = weights(1703)
    master = torch.from_numpy(values)
    if narrow:
        master = master.to(torch.bfloat16)
        values = master.to(torch.float32).numpy()
    live = torch.empty(1703, dtype=LIVE[dtype])
    kernels.perturb(master, live, 17, 99, Region.whole(1703, start), SIGMA, sign)
    m = noise.integers(17, 99, start, 1703)
    assert (bits(live) == law_bits(noise.perturb(values, m, SIGMA, sign, dtype))).all()
    kernels.restore(master, live)
    assert (bits(live) == law_bits(noise.round_to(values, dtype))).all()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 master", "bf16 master"])
def test_update_of_fused_rounds(kernels, start, narrow):
    values = noise.round_bf16(weights(1300)) if narrow else weights(1300)
    expected, digests = law_update(values, steps_for(4), 0x80000001, start, narrow)
    master = torch.from_numpy(values.copy().view(np.int16) if narrow else values.copy())
    master = master.view(torch.bfloat16) if narrow else master
    region = Region.whole(1300, start)
    assert kernels.update(master, steps_for(4), 0x80000001, region) == digests
    assert (bits(master) == expected).all()
    assert kernels.digest(master, 0x80000001, region) == digests[-1]


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 master", "bf16 master"])
def test_fused_rounds_equal_rounds_one_by_one(kernels, narrow):
    dtype = torch.bfloat16 if narrow else torch.float32
    fused = torch.from_numpy(weights(2000)).to(dtype)
    single = fused.clone()
    region, steps = Region.whole(2000, 12345), steps_for(7, seed=3)
    one_by_one = [kernels.update(single, [step], 5, region)[0] for step in steps]
    assert kernels.update(fused, steps, 5, region) == one_by_one
    assert (bits(fused) == bits(single)).all()
    assert kernels.update(fused, [], 5, region) == []


def test_long_replays_are_cut_into_passes(monkeypatch):
    from esnode.kernels import cpu

    steps, region = steps_for(30), Region.whole(700)
    kernels, seen = create("cpu"), []
    for most in (2048, 10, 1):
        monkeypatch.setattr(cpu, "_MOST_NOISES", most)
        master = torch.from_numpy(weights(700))
        seen.append((kernels.update(master, steps, 5, region), bits(master).tobytes()))
    assert seen[0] == seen[1] == seen[2] and len(seen[0][0]) == 30


def test_a_step_without_noise_clears_the_sign_of_zero(kernels):
    master = torch.tensor([-0.0, 0.0, 1.5])
    kernels.update(master, [Step((), (), 40, 0)], 1, Region.whole(3))
    assert bits(master).tolist() == [0, 0, 0x3FC00000]


@pytest.mark.parametrize("c", [(MAX_SUM,), (-MAX_SUM,), (24024, -24024), (MAX_SUM - 1, 1)])
def test_the_largest_sums_do_not_wrap(kernels, c):
    step = Step(tuple(range(len(c))), c, 60, 0)
    master = torch.zeros(40000)
    (digest,) = kernels.update(master, [step], 3, Region.whole(40000))
    expected, digests = law_update(np.zeros(40000, np.float32), [step], 3, 0)
    assert (bits(master) == expected).all() and digests == [digest]


# --- any slice, any thread count ---


def test_digests_of_slices_add_up(kernels):
    values = torch.from_numpy(weights(30 * 577)).reshape(30, 577)
    whole = kernels.digest(values, 9, Region.whole(30 * 577, 2**33))
    total = 0
    for c0, c1 in [(0, 100), (100, 577)]:
        part = values[:, c0:c1].contiguous()
        total += kernels.digest(part, 9, sub_region(30, 577, 0, 30, c0, c1, 2**33))
    assert total % 2**64 == whole


@pytest.mark.parametrize(
    "region",
    [
        Region.whole(300_001, 2**34 - 150_003),
        Region.whole(131_072 + 5),
        Region(77, 301, 1000, 1024),
        Region(0, 1024, 300, 300),
        Region(5, 2, 100_000, 200_000),
    ],
    ids=lambda r: f"{r.start}-{r.rows}x{r.width}",
)
def test_threads_change_nothing(region, monkeypatch):
    from esnode.kernels import cpu

    monkeypatch.setattr(cpu, "_SMALL", 500)  # many small pieces, of which every thread gets some
    monkeypatch.setattr(cpu, "_LARGE", 5000)
    values = torch.from_numpy(weights(region.count))
    steps = steps_for(2)
    seen = []
    for threads in (1, 2, 3, 8):
        kernels = create("cpu", threads=threads)
        out = torch.empty(region.count, dtype=torch.int32)
        live = torch.empty(region.count, dtype=torch.float16)
        restored = torch.empty(region.count, dtype=torch.bfloat16)
        master, narrow = values.clone(), values.to(torch.bfloat16)
        kernels.fill(1, 2, region, out)
        kernels.perturb(master, live, 1, 2, region, SIGMA, 1)
        kernels.restore(master, restored)
        digests = kernels.update(master, steps, 2, region), kernels.update(narrow, steps, 2, region)
        tensors = (out, live, restored, master, narrow)
        seen.append((*(bits(t).tobytes() for t in tensors), digests, kernels.digest(master, 2, region)))
    assert all(s == seen[0] for s in seen)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_slices_at_once_equal_one_by_one(kernels, threads, monkeypatch):
    from esnode.kernels import cpu

    monkeypatch.setattr(cpu, "_SMALL", 500)
    monkeypatch.setattr(cpu, "_LARGE", 5000)
    kernels.threads = threads
    sizes, dtypes = (1, 700, 40_000, 3, 9_999), list(LIVE.values())
    masters = [torch.from_numpy(weights(n, seed=n)) for n in sizes]
    regions = [Region.whole(n, 2**34 - 400) for n in sizes]
    lives = [torch.empty(n, dtype=dtypes[n % 3]) for n in sizes]
    slices = [
        Slice(m, live, k, r) for k, (m, live, r) in enumerate(zip(masters, lives, regions, strict=True))
    ]
    kernels.perturb_many(slices, 9, SIGMA, -1)
    for part in slices:
        single = torch.empty_like(part.live)
        kernels.perturb(part.master, single, 9, part.tid, part.region, SIGMA, -1)
        assert (bits(single) == bits(part.live)).all()
    kernels.restore_many(slices)
    for part in slices:
        single = torch.empty_like(part.live)
        kernels.restore(part.master, single)
        assert (bits(single) == bits(part.live)).all()
    kernels.perturb_many([], 9, SIGMA, 1)


def test_threads_follow_torch_unless_set():
    kernels = create("cpu")
    assert kernels.threads is None
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = torch.empty(100_000, dtype=torch.int32)
            kernels.fill(1, 2, Region.whole(100_000), out)
            assert (out.numpy() == noise.integers(1, 2, 0, 100_000)).all()
    finally:
        torch.set_num_threads(before)


def test_the_interpreter_runs_on_while_a_kernel_works():
    kernels, ticks, done = create("cpu", threads=1), [], threading.Event()
    master = torch.zeros(3_000_000)
    steps = steps_for(6)
    kernels.update(master[:1000].clone(), steps, 1, Region.whole(1000))  # compile first

    def work():
        kernels.update(master, steps, 1, Region.whole(len(master)))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        ticks.append(1)
    thread.join()
    assert len(ticks) > 5


def test_concurrent_callers_do_not_disturb_each_other():
    kernels = create("cpu", threads=3)
    results = [None] * 6

    def work(k):
        out = torch.empty(200_000, dtype=torch.int32)
        kernels.fill(k, 1, Region.whole(200_000), out)
        results[k] = out.numpy()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, got in enumerate(results):
        assert (got == noise.integers(k, 1, 0, 200_000)).all()


# --- rounding, exhaustively where it is cheap ---


def test_restore_rounds_every_kind_of_float(kernels):
    rng = np.random.default_rng(5)
    patterns = rng.integers(0, 2**32, 400_000, dtype=np.uint32)
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    with np.errstate(over="ignore"):
        ties = ((halves[1:-1] + halves[:-2]) / 2).astype(np.float32).view(np.uint32)
    patterns = np.concatenate([patterns, ties, ties + 1, ties - 1, ties | np.uint32(1 << 31)])
    values = patterns.view(np.float32)
    values = values[np.isfinite(values)]
    for dtype, live_dtype in LIVE.items():
        live = torch.empty(len(values), dtype=live_dtype)
        kernels.restore(torch.from_numpy(values), live)
        with np.errstate(over="ignore"):
            expected = values.astype(np.float16) if dtype == "float16" else noise.round_to(values, dtype)
        assert (bits(live) == law_bits(expected)).all()
