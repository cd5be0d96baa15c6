"""How the loops of the `cpu` backend are compiled: vector width, cache, and two casts that numba lacks.

May import numba only, and must be imported before numba compiles anything; called by `cpu_loops.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm


def _use_wide_vectors() -> None:
    """Ask for 512-bit vectors, which LLVM avoids on some Intel cores; a user's own numba settings win."""
    if {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & os.environ.keys():
        return
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this processor's features
        return
    if features.get("avx512f"):
        os.environ["NUMBA_CPU_NAME"] = llvm.get_host_cpu_name()
        os.environ["NUMBA_CPU_FEATURES"] = features.flatten() + ",-prefer-256-bit"


_use_wide_vectors()  # numba reads these when it compiles its first function

import numba  # noqa: E402
from llvmlite import ir  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False}


def compiled(function: Callable[..., Any]) -> Any:
    """An entry point, cached on disk where there is a place for it: beside its file, else the user's cache.

    numba compiles anew when that file changes, not when another does: what loops call belongs in their file.
    """
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba's "no locator available": compile anew in each process
        return numba.njit(**_OPTIONS)(function)


def shared(function: Callable[..., Any]) -> Any:
    """Compiled once for all that call it."""
    return numba.njit(**_OPTIONS)(function)


def inline(function: Callable[..., Any]) -> Any:
    """Compiled into each function that calls it."""
    return numba.njit(inline="always", error_model="numpy")(function)


@intrinsic
def float_of(typing, bits):  # type: ignore[no-untyped-def]
    """float32 with the given u32 bits."""
    return numba.float32(numba.uint32), lambda c, b, s, args: b.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of(typing, value):  # type: ignore[no-untyped-def]
    """u32 bits of a float32."""
    return numba.uint32(numba.float32), lambda c, b, s, args: b.bitcast(args[0], ir.IntType(32))
