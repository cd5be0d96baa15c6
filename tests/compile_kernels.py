"""Compiles every Triton kernel for GPUs that are not here and prints their assembly, by target and
kernel, as JSON: `python -m tests.compile_kernels`.

A process of its own, because TRITON_INTERPRET, which the other tests set, turns compilation off.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from esnode.kernels import triton_kernels
from esnode.kernels import triton_loops as loops

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "ptx"),
    "sm_90": (GPUTarget("cuda", 90, 32), "ptx"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "amdgcn"),
}
_PLACE = {"first": "i64", "stride": "i64", "width": "i32", "per_row": "i32"}
_NOISE = {"table": "*i32", "k0": "i32", "k1": "i32", "tid": "i32"}


def _sources() -> list[tuple[str, object, dict[str, str], dict[str, object]]]:
    """(label, kernel, types of its arguments, constants) of every variant."""
    block = {"BLOCK": triton_kernels.GPU_BLOCK}
    found: list[tuple[str, object, dict[str, str], dict[str, object]]] = []
    found.append(("fill", loops.fill, {"out": "*i32", **_NOISE, **_PLACE}, block))
    for narrow in (False, True):
        master = "*i16" if narrow else "*i32"
        steps = dict.fromkeys(("table", "low", "high_keys", "weights", "begins", "odds"), "*i32")
        steps |= {"factors": "*fp32", "rounding_low": "*i32", "rounding_high": "*i32", "sums": "*i64"}
        steps |= {"steps": "i32", "programs": "i32", "tid": "i32"}
        constants = {"NARROW": narrow, **block}
        found.append((f"update {master}", loops.update, {"master": master, **steps, **_PLACE}, constants))
        sums = {"master": master, "sums": "*i64", "tid": "i32"}
        found.append((f"digest {master}", loops.digest, {**sums, **_PLACE}, constants))
        for kind, live in ((0, "*i16"), (1, "*i16"), (2, "*i32")):
            types = {"master": master, "live": live}
            label, constants = f"{master} to {kind}", {"NARROW": narrow, "KIND": kind, **block}
            perturb = {**types, "table": "*i32", "scale": "*fp32", **_NOISE, **_PLACE}
            found.append((f"perturb {label}", loops.perturb, perturb, constants))
            found.append((f"restore {label}", loops.restore, {**types, "count": "i64"}, constants))
    return found


def compiled(target: str) -> dict[str, str]:
    """Assembly of every variant."""
    gpu, assembly = TARGETS[target]
    found = {}
    for label, kernel, types, constants in _sources():
        names = kernel.arg_names  # type: ignore[attr-defined]
        signature = {arg: types.get(arg, "constexpr") for arg in names}
        source = ASTSource(kernel, signature, constexprs={(names.index(k),): v for k, v in constants.items()})
        found[label] = compile(source, target=gpu, options={"enable_fp_fusion": False}).asm[assembly]
    return found


if __name__ == "__main__":
    json.dump({target: compiled(target) for target in TARGETS}, sys.stdout)
