"""The kernels' self-test, the choice of a backend, and what all backends refuse."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from esnode.kernels import (
    KernelUnavailable,
    SelftestFailed,
    available,
    create,
    pick,
    selftest,
    selftest_digest,
)
from esnode.kernels.cpu import CpuKernels
from esnode.kernels.interface import Region
from esnode.kernels.streamed import StreamedKernels
from protocol.shaping import Step

BACKENDS = ["reference", "cpu"]
TOP = 2**62
SIGMA = 0.0019989013671875


@pytest.fixture(scope="module", params=[*BACKENDS, "streamed"])
def kernels(request):
    if request.param == "streamed":
        return StreamedKernels(create("cpu"), create("reference"), "cpu", chunk=256, fold_on_device=True)
    return create(request.param)


def flip_last_bit(tensor: torch.Tensor) -> None:
    size = tensor.dtype.itemsize
    bits = tensor.view(-1).view(torch.int16 if size == 2 else torch.int32).numpy()
    bits.view(np.uint16 if size == 2 else np.uint32)[-1] ^= 1


# --- refusals ---


def test_tensors_that_do_not_fit_are_refused(kernels):
    master, live = torch.zeros(10), torch.zeros(10, dtype=torch.bfloat16)
    region = Region.whole(10)
    wrong = [
        lambda: kernels.perturb(master, live, 1, 1, Region.whole(11), SIGMA, 1),
        lambda: kernels.perturb(master, live[:9], 1, 1, region, SIGMA, 1),
        lambda: kernels.perturb(master.double(), live, 1, 1, region, SIGMA, 1),
        lambda: kernels.perturb(master, live.double(), 1, 1, region, SIGMA, 1),
        lambda: kernels.perturb(torch.zeros(20)[::2], live, 1, 1, region, SIGMA, 1),
        lambda: kernels.perturb(master, live, 2**64, 1, region, SIGMA, 1),
        lambda: kernels.perturb(master, live, 1, 2**32, region, SIGMA, 1),
        lambda: kernels.perturb(master, live, 1, 1, region, 0.001, 1),
        lambda: kernels.perturb(master, live, 1, 1, region, 0.0, 1),
        lambda: kernels.perturb(master, live, 1, 1, region, SIGMA, 2),
        lambda: kernels.fill(1, 1, region, torch.zeros(10, dtype=torch.int64)),
        lambda: kernels.digest(master, -1, region),
        lambda: kernels.update(master.half(), [], 1, region),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize(
    "region", [(-1, 1, 1, 1), (0, 2, 5, 4), (TOP, 1, 1, 1), (0, 3, 10, TOP // 2), (0, -1, 1, 1)]
)
def test_impossible_regions_are_refused(region):
    with pytest.raises(ValueError):
        Region(*region)


def test_empty_slices_are_legal(kernels):
    for region in (Region.whole(0), Region(5, 0, 7, 7), Region(5, 7, 0, 7)):
        nothing = torch.zeros(0)
        kernels.fill(1, 1, region, torch.zeros(0, dtype=torch.int32))
        kernels.perturb(nothing, nothing.half(), 1, 1, region, SIGMA, 1)
        kernels.restore(nothing, nothing.half())
        assert kernels.update(nothing, [Step((1,), (5,), 40, 0)] * 2, 1, region) == [0, 0]
        assert kernels.digest(nothing, 1, region) == 0


# --- the self-test and the choice of a backend ---


def test_all_backends_pass_with_one_digest():
    reports = [selftest(create(name)) for name in BACKENDS]
    assert reports[0] == reports[1] and len(reports[0].digest) == 8
    assert reports[0].checked > 50


class OneBitWrong:
    """A backend whose chosen operation flips the lowest bit of the last element it writes."""

    name = "broken"

    def __init__(self, operation: str) -> None:
        self.inner, self.operation, self.threads = CpuKernels(threads=1), operation, 1

    def __getattr__(self, attribute):
        function = getattr(self.inner, attribute)
        if attribute != self.operation:
            return function

        def wrong(*arguments):
            result = function(*arguments)
            if attribute == "digest":
                return result ^ 1
            written = {"fill": 3, "perturb": 1, "restore": 1, "update": 0}[attribute]
            flip_last_bit(arguments[written])
            return result

        return wrong


@pytest.mark.parametrize(
    ("operation", "vector"),
    [
        ("fill", "values[0x0000000000000000, 0x00000000, 0]"),
        ("perturb", "perturb.live_bf16"),
        ("restore", "update.nearest_bf16"),
        ("update", "update."),
        ("digest", "fp32.digest_before"),
    ],
)
def test_one_wrong_bit_is_refused_and_named(operation, vector):
    with pytest.raises(SelftestFailed) as failure:
        selftest(OneBitWrong(operation))
    assert "'broken'" in str(failure.value) and f"vector {vector}" in str(failure.value)


def test_pick_refuses_a_broken_backend(monkeypatch):
    import esnode.kernels as registry

    monkeypatch.setattr(registry, "_passed", {})
    monkeypatch.setitem(registry._BACKENDS, "cpu", (lambda threads: OneBitWrong("perturb"), ("cpu",), None))
    with pytest.raises(SelftestFailed, match=r"perturb\.live_bf16"):
        pick("cpu")
    assert pick("cpu", "reference").name == "reference"


def test_pick_chooses_by_device_and_name():
    assert pick("cpu").name == "cpu"
    assert pick("cpu", "reference").name == "reference"
    assert available("cuda:0")["cpu"] is not None and available("cuda:0")["reference"] is None
    with pytest.raises(KernelUnavailable, match="no kernel 'abacus'"):
        pick("cpu", "abacus")
    with pytest.raises(KernelUnavailable, match="runs on cpu"):
        create("cpu", "cuda")
    assert selftest_digest(pick("cpu")) == selftest_digest(pick("cpu", "reference"))


def test_without_numba_the_reference_takes_over(monkeypatch):
    import esnode.kernels as registry

    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert "numba" in available("cpu")["cpu"]
    assert pick("cpu").name == "reference"


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch):
    from numba.core import caching

    from esnode.kernels import cpu_compile

    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert cpu_compile.compiled(lambda x: x + 1)(3) == 4


def test_the_table_is_read_without_gathers_in_the_widest_vectors():
    import llvmlite.binding as llvm
    import numba

    from esnode.kernels import cpu_loops

    compiled = numba.njit(cpu_loops._noise.py_func)
    room, one_block = np.zeros(cpu_loops.BLOCK, np.uint32), 1
    compiled(0, one_block, np.zeros(cpu_loops.KEYS, np.uint64), room, room.copy())
    assembly = "".join(compiled.inspect_asm().values())
    assert "gather" not in assembly
    wide = "NUMBA_CPU_NAME" in os.environ and llvm.get_host_cpu_features().get("avx512f")
    assert ("zmm" in assembly) == bool(wide)


PROBE = """
import zlib
import torch
from esnode.kernels import create, selftest
from esnode.kernels.interface import Region
from esnode.kernels.streamed import StreamedKernels
out = torch.empty(70000, dtype=torch.int32)
create("cpu").fill(5, 6, Region.whole(70000, 2**34 - 35000), out)
print(zlib.crc32(out.numpy().tobytes()))
print(selftest(create("cpu")).digest.hex())
"""


def probe(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_narrow_processors_compute_the_same(tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    wide = probe(**cache)
    assert probe(**cache) == wide  # from the cache
    for features in ("", "+sse4.1", "+avx2"):
        assert probe(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=features, **cache) == wide
