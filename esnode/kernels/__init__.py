"""Noise kernels: one interface (`interface.py`), several backends with equal bits, and the choice of one.

Importing this package loads torch but no backend; `pick` does. A backend that fails its golden self-test is
refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable

from esnode.kernels.interface import Kernels, Region, Slice
from esnode.kernels.selftest import SelftestFailed, SelftestReport, selftest
from protocol.errors import UserError

__all__ = [
    "KernelUnavailable",
    "Kernels",
    "Region",
    "SelftestFailed",
    "SelftestReport",
    "Slice",
    "available",
    "create",
    "pick",
    "selftest",
    "selftest_digest",
]


class KernelUnavailable(UserError):
    """The kernel asked for does not exist or cannot run here."""


def _reference(threads: int | None) -> Kernels:
    from esnode.kernels.reference import ReferenceKernels

    return ReferenceKernels(threads)


def _cpu(threads: int | None) -> Kernels:
    from esnode.kernels.cpu import CpuKernels

    return CpuKernels(threads)


def _triton(threads: int | None) -> Kernels:
    from esnode.kernels.triton_kernels import TritonKernels

    return TritonKernels(threads)


# Best first: name -> (how to make it, device kinds it runs on (None: any), module it needs besides torch).
_BACKENDS: dict[str, tuple[Callable[[int | None], Kernels], tuple[str, ...] | None, str | None]] = {
    "cpu": (_cpu, ("cpu",), "numba"),
    "triton": (_triton, ("cuda",), "triton"),
    "reference": (_reference, None, None),
}

_passed: dict[tuple[str, str], SelftestReport] = {}


def _obstacle(name: str, device: str) -> str | None:
    """Why a backend cannot run on a device here, or None."""
    _, kinds, module = _BACKENDS[name]
    kind = device.split(":", maxsplit=1)[0]
    if kinds is not None and kind not in kinds:
        return f"it runs on {', '.join(kinds)}, not on {kind}"
    if module is not None and importlib.util.find_spec(module) is None:
        return f"it needs {module}; install esnode with its 'node' extra"
    return None


def available(device: str) -> dict[str, str | None]:
    """Every backend, best first, with the reason why it cannot run on `device`, or None when it can."""
    return {name: _obstacle(name, device) for name in _BACKENDS}


def create(name: str, device: str = "cpu", threads: int | None = None) -> Kernels:
    """A backend by name, without the self-test. KernelUnavailable when there is none or it cannot run."""
    if name not in _BACKENDS:
        raise KernelUnavailable(f"there is no kernel {name!r}. Choose one of: {', '.join(_BACKENDS)}.")
    # Its interpreter runs on a CPU, when asked for by name: for tests, too slow for anything else.
    interpreted = name == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    obstacle = None if interpreted else _obstacle(name, device)
    if obstacle:
        raise KernelUnavailable(f"kernel {name!r} cannot be used: {obstacle}.")
    return _BACKENDS[name][0](threads)


def pick(device: str, name: str | None = None, threads: int | None = None) -> Kernels:
    """The best backend for a torch device ("cpu", "cuda:0"), or the one called `name`, self-tested.

    The test runs once per process, backend and device. SelftestFailed when a kernel differs from the law
    (there is no silent fall-back: it would hide a broken machine), KernelUnavailable when it cannot run.
    """
    if name is None:
        name = next(n for n, obstacle in available(device).items() if obstacle is None)
    kernels = create(name, device, threads)
    if (name, device) not in _passed:
        _passed[name, device] = selftest(kernels, device)
    return kernels


def selftest_digest(kernels: Kernels, device: str = "cpu") -> bytes:
    """8 bytes over the self-test's outputs, for Hello; runs the test if `pick` has not."""
    if (kernels.name, device) not in _passed:
        _passed[kernels.name, device] = selftest(kernels, device)
    return _passed[kernels.name, device].digest
