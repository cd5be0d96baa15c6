"""Noise kernels: one interface (`interface.py`), several backends with equal bits, and the choice of one.

Importing this package loads torch but no backend; `pick` does. A backend that fails its golden self-test is
refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable

from esnode.kernels.interface import Kernels, Region, Slice
from esnode.kernels.selftest import SelftestFailed, SelftestReport, selftest
from protocol.errors import UserError, first_line

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


log = logging.getLogger(__name__)


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


def _compiled(threads: int | None) -> Kernels:
    from esnode.kernels.compiled import CompiledKernels

    return CompiledKernels(threads)


# Best first: name -> (how to make it, device kinds it runs on (None: any), module it needs besides torch).
_BACKENDS: dict[str, tuple[Callable[[int | None], Kernels], tuple[str, ...] | None, str | None]] = {
    "cpu": (_cpu, ("cpu",), "numba"),
    "triton": (_triton, ("cuda",), "triton"),
    "compiled": (_compiled, ("cuda",), "triton"),  # what torch.compile makes for a GPU is Triton too
    "reference": (_reference, None, None),
}

_LAST = "reference"  # needs nothing but torch

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
    # On a CPU these are for tests, when asked for by name: Triton's interpreter, and what is compiled.
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    obstacle = None if device == "cpu" and (interpreted or name == "compiled") else _obstacle(name, device)
    if obstacle:
        raise KernelUnavailable(f"kernel {name!r} cannot be used: {obstacle}.")
    return _BACKENDS[name][0](threads)


def pick(device: str, name: str | None = None, threads: int | None = None) -> Kernels:
    """The best backend for a torch device ("cpu", "cuda:0"), or the one called `name`, self-tested.

    The test runs once per process, backend and device. SelftestFailed when a kernel differs from the law
    (there is no silent fall-back: it would hide a broken machine), KernelUnavailable when it cannot run. Only
    what cannot be compiled here, and `compiled` in any case, gives way to the next backend, with a warning.
    """
    names = [n for n, obstacle in available(device).items() if obstacle is None]
    if name is not None:
        names = [name, _LAST] if name == "compiled" else [name]
    for choice in names[:-1]:
        try:
            return _tested(choice, device, threads)
        except SelftestFailed as error:
            if choice != "compiled":
                raise
            reason = first_line(error)
        except UserError:
            raise
        except Exception as error:  # whatever a compiler, its assembler or its cache may raise
            reason = f"{type(error).__name__}: {first_line(error)}"
        following = names[names.index(choice) + 1]
        log.warning("kernel %r cannot be used on %s (%s); trying %r", choice, device, reason, following)
    return _tested(names[-1], device, threads)


def _tested(name: str, device: str, threads: int | None) -> Kernels:
    kernels = create(name, device, threads)
    selftest_digest(kernels, device)
    return kernels


def selftest_digest(kernels: Kernels, device: str = "cpu") -> bytes:
    """8 bytes over the self-test's outputs, for Hello; runs the test unless this process has."""
    if (kernels.name, device) not in _passed:
        _passed[kernels.name, device] = selftest(kernels, device)
    return _passed[kernels.name, device].digest
