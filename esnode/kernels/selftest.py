"""The golden self-test every backend must pass at start: the law's vectors, then runs against the slow law.

May import torch and `protocol` only; called by `pick`, `doctor` and the tests. The vectors are
`protocol/vectors.json` (8 elements each); the runs cover every lane of a vector unit, every dtype, cut rows
and indices around 2^34.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esnode.kernels.interface import Kernels, Region
from protocol import noise
from protocol.errors import UserError
from protocol.seeds import tensor_key
from protocol.shaping import Step

# What a check yields: the vector's name, what came out, what the law says (integers, one per element).
Check = tuple[str, np.ndarray, np.ndarray]

_LIVE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_RUN = 1500


class SelftestFailed(UserError):
    """A kernel computes something else than the law; weights would differ from everybody else's."""


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """`digest`: 8 bytes over the golden vectors' outputs, equal for all correct kernels of one law.

    `checked`: how many comparisons were made.
    """

    digest: bytes
    checked: int


def selftest(kernels: Kernels, device: str = "cpu") -> SelftestReport:
    """Run every operation on every vector; SelftestFailed names the first vector that differs."""
    outputs = hashlib.blake2b(digest_size=8)
    checked = 0
    for check in (_values, _vectors, _fp32_vector, _digests, _runs):
        for name, got, expected in check(kernels, torch.device(device)):
            different = np.flatnonzero(got != expected)
            if len(different):
                at = int(different[0])
                raise SelftestFailed(
                    f"kernel {kernels.name!r} on {device} fails its self-test: vector {name}, element {at} "
                    f"is {int(got[at]):#x}, the law says {int(expected[at]):#x}.\n"
                    "Choose another kernel (reference), and report this processor and the library versions."
                )
            checked += 1
            if check is not _runs:  # the digest must not change when a later version tests more
                outputs.update(f"{name} {got.tolist()}\n".encode())
    return SelftestReport(outputs.digest(), checked)


@cache
def vectors() -> dict[str, Any]:
    """The golden vectors that ship with the law."""
    path = Path(noise.__file__).parent / "vectors.json"
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def _number(value: str | int) -> int:
    return int(value, 16) if isinstance(value, str) else value


def _hexadecimals(values: list[str]) -> np.ndarray:
    return np.array([int(v, 16) for v in values], np.int64)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bits as non-negative integers."""
    size = 8 * tensor.dtype.itemsize
    view = tensor.detach().cpu().view(torch.int16 if size == 16 else torch.int32)
    return view.numpy().astype(np.int64).reshape(-1) & ((1 << size) - 1)


def _floats(bits: np.ndarray, device: torch.device) -> torch.Tensor:
    """float32 tensor of the given bits."""
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy()).to(device)


def _bf16(bits: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16).to(device)


def _one(value: int) -> np.ndarray:
    return np.array([value], object)


def _values(kernels: Kernels, device: torch.device) -> Iterator[Check]:
    for case in vectors()["values"]:
        out = torch.zeros(1, dtype=torch.int32, device=device)
        seed, tid = _number(case["seed"]), _number(case["tensor"])
        kernels.fill(seed, tid, Region.whole(1, case["index"]), out)
        name = f"values[{case['seed']}, {case['tensor']}, {case['index']}]"
        yield name, out.cpu().numpy().astype(np.int64), np.array([case["m"]])


def _vectors(kernels: Kernels, device: torch.device) -> Iterator[Check]:
    v = vectors()["perturb"]
    base = _hexadecimals(v["base_bf16"])
    place = Region.whole(len(base), v["start"])
    live = torch.zeros(len(base), dtype=torch.bfloat16, device=device)
    for source in (_bf16(base, device), _floats(base << 16, device)):
        kernels.perturb(source, live, _number(v["seed"]), v["tensor"], place, v["sigma"], 1)
        yield "perturb.live_bf16", _bits(live), _hexadecimals(v["live_bf16"])
    v = vectors()["update"]
    base = _hexadecimals(v["base_bf16"])
    place = Region.whole(len(base), v["start"])
    step = Step(tuple(v["seeds"]), tuple(v["coefficients"]), v["shift"], _number(v["stochastic_seed"]))
    master = _floats(base << 16, device)
    kernels.update(master, [step], v["tensor"], place)
    kernels.restore(master, live)
    yield "update.nearest_bf16", _bits(live), _hexadecimals(v["nearest_bf16"])
    narrow = _bf16(base, device)
    kernels.update(narrow, [step], v["tensor"], place)
    yield "update.stochastic_bf16", _bits(narrow), _hexadecimals(v["stochastic_bf16"])


def _fp32_vector(kernels: Kernels, device: torch.device) -> Iterator[Check]:
    v = vectors()["fp32"]
    seeds, tid = tuple(_number(s) for s in v["seeds"]), tensor_key(v["tensor"])
    master = _floats(_hexadecimals(v["master_bits"]), device)
    place = Region.whole(len(master), v["start"])
    for dtype, key in (("bfloat16", "live_bf16"), ("float16", "live_fp16"), ("float32", "live_fp32_bits")):
        live = torch.zeros(len(master), dtype=_LIVE[dtype], device=device)
        kernels.perturb(master, live, seeds[v["member"]], tid, place, v["sigma"], 1)
        yield f"fp32.{key}", _bits(live), _hexadecimals(v[key])
    before = kernels.digest(master, tid, place)
    yield "fp32.digest_before", _one(before), _one(_number(v["digest_before"]))
    step = Step(seeds, tuple(v["coefficients"]), v["shift"], 0)
    (after,) = kernels.update(master, [step], tid, place)
    yield "fp32.updated_bits", _bits(master), _hexadecimals(v["updated_bits"])
    yield "fp32.digest_after", _one(after), _one(_number(v["digest_after"]))


def _digests(kernels: Kernels, device: torch.device) -> Iterator[Check]:
    for case in vectors()["digests"]:
        values = torch.tensor(case["values"], dtype=torch.float32, device=device)
        place = Region.whole(len(values), case["start"])
        got = kernels.digest(values, tensor_key(case["tensor"]), place)
        yield f"digests[{case['tensor']}]", _one(got), _one(_number(case["digest"]))


def _by_rows(region: Region, run: Callable[[int, int, slice], np.ndarray]) -> np.ndarray:
    """Join run(start, count, local slice) over the rows of a region: how the slow law sees a slice."""
    rows = [
        run(region.start + i * region.stride, region.width, slice(i * region.width, (i + 1) * region.width))
        for i in range(region.rows)
    ]
    return np.concatenate(rows)


def _runs(kernels: Kernels, device: torch.device) -> Iterator[Check]:
    seed, tid = 0x9E3779B97F4A7C15, 0xC255D1B2
    step = Step((seed, 2**64 - 1, 7), (46000, -1023, 1), 45, 0xFEDCBA9876543210)
    for region in (Region.whole(_RUN, 2**34 - 700), Region(5, 7, 201, 576)):
        where = f"from {region.start}, {region.rows} x {region.width}"
        m = _by_rows(region, lambda start, n, _: noise.integers(seed, tid, start, n))
        out = torch.zeros(region.count, dtype=torch.int32, device=device)
        kernels.fill(seed, tid, region, out)
        yield f"run fill, {where}", out.cpu().numpy().astype(np.int64), m.astype(np.int64)
        # Weights of many sizes, made from m itself: halves become subnormal, tie and overflow.
        weights = (m * np.float32(2.0) ** (np.arange(region.count) % 30 - 25)).astype(np.float32)
        master = torch.from_numpy(weights.copy()).to(device)
        for dtype, live_dtype in _LIVE.items():
            live = torch.zeros(region.count, dtype=live_dtype, device=device)
            kernels.perturb(master, live, seed, tid, region, 0.015625, -1)
            expected = noise.perturb(weights, m, 0.015625, -1, dtype)
            yield f"run perturb to {dtype}, {where}", _bits(live), _law_bits(expected)
            kernels.restore(master, live)
            expected = noise.round_to(weights, dtype)
            yield f"run restore to {dtype}, {where}", _bits(live), _law_bits(expected)
        yield from _updates(kernels, step, tid, region, master)


def _law_bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32).astype(np.int64)


def _updates(kernels: Kernels, step: Step, tid: int, region: Region, master: torch.Tensor) -> Iterator[Check]:
    """Two fused rounds on a float32 and on a bf16 master, with the digest after each."""
    where = f"from {region.start}, {region.rows} x {region.width}"
    a = _by_rows(region, lambda start, n, _: noise.weighted_sum(step.seeds, step.c, tid, start, n))
    for dtype in (torch.float32, torch.bfloat16):
        state = master.to(dtype)
        bits = _bits(state)
        digests = kernels.update(state, [step, step], tid, region)
        for k in range(2):
            bits = _law_update(bits, a, step, tid, region, narrow=dtype == torch.bfloat16)
            values = (bits << 16 if dtype == torch.bfloat16 else bits).astype(np.uint32).view(np.float32)
            shares = _by_rows(region, partial(_share, values, tid))
            expected = _one(int(shares.sum()) % 2**64)
            yield f"run digest {k} of {dtype}, {where}", _one(digests[k]), expected
        yield f"run update of {dtype}, {where}", _bits(state), bits


def _share(values: np.ndarray, tid: int, start: int, count: int, part: slice) -> np.ndarray:
    """The digest of one row, in a form that can be joined."""
    return _one(noise.digest(values[part], tid, start))


def _law_update(
    bits: np.ndarray, a: np.ndarray, step: Step, tid: int, region: Region, narrow: bool
) -> np.ndarray:
    if not narrow:
        return _law_bits(noise.update(bits.astype(np.uint32).view(np.float32), a, step.shift))
    master = bits.astype(np.uint16)
    return _by_rows(
        region,
        lambda start, n, part: noise.update_bf16(
            master[part], a[part], step.shift, step.rounding_seed, tid, start
        ),
    ).astype(np.int64)
