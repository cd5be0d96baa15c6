"""The Triton backend where no GPU is: what its code compiles to, and how launches are cut.

That it computes the law's bits is shown by `test_kernels.py` and `test_selftest.py`, in the interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from esnode.kernels.interface import Region

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
# A fused multiply-add of floats, or flushing of subnormals, in the assembly of NVIDIA or AMD.
INEXACT = re.compile(r"fma\.rn(\.ftz)?\.f32|\.ftz|v_(pk_)?(fma|fmac|mad|mac)_f32")
LAUNCHES = 34


@pytest.fixture(scope="module")
def assembly() -> dict[str, dict[str, str]]:
    """By target and launch."""
    command = [sys.executable, "-m", "tests.compile_kernels"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_launch_compiles_without_fused_or_flushed_floats(
    target: str, assembly: dict[str, dict[str, str]]
) -> None:
    assert len(assembly[target]) == LAUNCHES
    for label, text in assembly[target].items():
        assert len(text) > 500, label
        assert not INEXACT.search(text), f"{label}: {INEXACT.search(text)}"


@pytest.mark.parametrize(
    "region",
    [
        Region.whole(1000, 2**34 - 400),
        Region.whole(3 * 2**34, 7),
        Region(2**34 - 1000, 50, 30, 64),
        Region(2**34 - 64 * 3 - 10, 8, 64, 64),
        Region(5, 3, 7, 9),
    ],
    ids=str,
)
def test_no_launch_straddles_a_counter_carry(region: Region) -> None:
    from esnode.kernels.triton_kernels import ROW_ELEMENTS, _pieces

    pieces = list(_pieces(region))
    at = 0
    for offset, piece in pieces:
        last = piece.start + (piece.rows - 1) * piece.stride + piece.width - 1
        assert piece.start >> 34 == last >> 34 and piece.width <= ROW_ELEMENTS
        assert offset == at
        row, column = divmod(offset, region.width)
        assert piece.start == region.start + row * region.stride + column
        at += piece.count
    assert at == region.count


BARE = """
import importlib.metadata, re, sys
wanted = "torch triton numpy numba transformers safetensors msgpack click pytest".split()
allowed = set()
while wanted:
    name = wanted.pop().lower().replace("_", "-")
    if name in allowed:
        continue
    allowed.add(name)
    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    wanted += [re.match("[A-Za-z0-9_.-]+", need)[0] for need in needs if "extra ==" not in need]
for module, packages in importlib.metadata.packages_distributions().items():
    if not {package.lower().replace("_", "-") for package in packages} & allowed:
        if module not in ("esnode", "protocol", "coordinator"):
            sys.modules[module] = None  # importing it fails
"""


def test_the_gpu_check_needs_nothing_but_the_kernels() -> None:
    """It must run on a machine that has the packages named above only; what it tests works there."""
    program = (
        f"{BARE}\n"
        "import importlib.util, pytest\n"
        "spec = importlib.util.spec_from_file_location('gpu', 'benchmarks/gpu.py')\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "import benchmarks.gpu_kernels\n"
        "few = 'second_process or fifty_rounds_of or host_memory or engines or streamed_slices'\n"
        "arguments = ['-m', 'gpu', '-p', 'no:cacheprovider', '-k', few, 'tests/test_gpu.py']\n"
        "sys.exit(pytest.main(arguments))\n"
    )
    away = {"ESNODE_GPU": "cpu", "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=280, env=os.environ | away
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "failed" not in done.stdout and "skipped" not in done.stdout


def test_tests_of_kernels_and_replicas_are_collected_there_too() -> None:
    names = [
        "gpu", "kernels", "kernels_volume", "noise_law", "selftest", "compiled", "triton", "replica",
        "hostmaster", "placement",
    ]  # fmt: skip
    program = (
        f"{BARE}\n"
        "import pytest\n"
        "sys.exit(pytest.main(['--collect-only', '-p', 'no:cacheprovider', *sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-c", program, *(f"tests/test_{name}.py" for name in names)]
    away = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=280, env=os.environ | away
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(f"tests/test_{name}.py::" in done.stdout for name in names)
