"""Law version 1 in its plainest form: noise, perturbation, update and digest of one run of elements.

Pure (numpy only) and slow: this is what the fast kernels in `esnode.kernels` are compared with. An element is
addressed by its tensor's key and its row-major index in the full tensor; a run is `count` consecutive indices
from `start`. eps = m * 2^-13 with m odd; every product is exact in float32, so only the additions round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_INDEX = 1 << 62
LARGEST_M = 44401
TAG_EPS = 0
TAG_ROUNDING = 1

TABLE_SHA256 = "1f9b7dd1525b4f99d01cca4e2196bf398fea4544e982eb6db3bfad5880acbe00"
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7
_LOW32 = np.uint64(0xFFFFFFFF)


def load_table() -> NDArray[np.uint32]:
    """The 1536 u32 of the inverse normal CDF. RuntimeError when the shipped file is not the law's."""
    data = (Path(__file__).parent / "table_v1.bin").read_bytes()
    if hashlib.sha256(data).hexdigest() != TABLE_SHA256:
        raise RuntimeError(
            "protocol/table_v1.bin is damaged (SHA-256 differs from the law's): reinstall esnode"
        )
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


TABLE = load_table()


def words(seed: int, tensor_key: int, tag: int, start: int, count: int) -> NDArray[np.uint32]:
    """The random u32 per element: word ((i >> 5) & 3) of Philox4x32-7 at counter ((i >> 7) << 5) | (i & 31).

    seed u64, tensor_key and tag u32, 0 <= start and start + count <= 2^62; ValueError otherwise.
    """
    if not (0 <= seed < 1 << 64 and 0 <= tensor_key < 1 << 32 and 0 <= tag < 1 << 32):
        raise ValueError(f"seed {seed} is no u64, or tensor key {tensor_key} or tag {tag} no u32")
    if start < 0 or count < 0 or start + count > MAX_INDEX:
        raise ValueError(f"elements {start} .. {start + count} are not all within 0 .. 2^62")
    i = np.arange(start, start + count, dtype=np.uint64)
    counter = ((i >> np.uint64(7)) << np.uint64(5)) | (i & np.uint64(31))
    x0, x1 = counter & _LOW32, counter >> np.uint64(32)
    x2, x3 = np.full_like(i, tensor_key), np.full_like(i, tag)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(_ROUNDS):
        p0 = np.uint64(_MULTIPLIER_0) * x0
        p1 = np.uint64(_MULTIPLIER_1) * x2
        x0 = (p1 >> np.uint64(32)) ^ x1 ^ np.uint64(k0)
        x1 = p1 & _LOW32
        x2 = (p0 >> np.uint64(32)) ^ x3 ^ np.uint64(k1)
        x3 = p0 & _LOW32
        k0, k1 = (k0 + _WEYL_0) & 0xFFFFFFFF, (k1 + _WEYL_1) & 0xFFFFFFFF
    which = (i >> np.uint64(5)) & np.uint64(3)
    return np.select([which == 0, which == 1, which == 2], [x0, x1, x2], x3).astype(np.uint32)


def gaussian(random: NDArray[np.uint32]) -> NDArray[np.int32]:
    """m of each random word: odd, |m| <= 44401, normal with variance 2^26 (eps = m * 2^-13)."""
    k = (random & np.uint32(0x7FFFFF)).astype(np.int64)
    b = ((2 * k + 1) * 2.0**-24).astype(np.float32).view(np.uint32)
    entry = TABLE[(b >> np.uint32(17)) - np.uint32(6592)]
    z = entry - (((entry & np.uint32(0xFFF)) * (b & np.uint32(0x1FFFF))) >> np.uint32(7))
    sign = random.view(np.int32) >> np.int32(31)
    m: NDArray[np.int32] = ((z.view(np.int32) ^ sign) >> np.int32(15)) | np.int32(1)
    return m


def integers(seed: int, tensor_key: int, start: int, count: int) -> NDArray[np.int32]:
    """m of `count` consecutive elements from row-major index `start` of the tensor; eps = m * 2^-13."""
    return gaussian(words(seed, tensor_key, TAG_EPS, start, count))


def is_bf16(value: float) -> bool:
    """Whether a number is finite and exactly a bfloat16 (8 significant bits), as a sigma must be."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return bool(np.isfinite(single)) and float(single) == value and int(single.view(np.uint32)) & 0xFFFF == 0


def round_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits, round to nearest even, in integers. Values are not NaN."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def round_fp16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """IEEE half, nearest even, in integers: subnormals kept, 65520 and more become infinity. Not NaN."""
    bits = values.view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    exponent = size >> np.uint32(23)
    # Below 2^-14 a half is a multiple of 2^-24: shift the 24-bit significand until its unit is that.
    shift = np.clip(np.uint32(126) - np.minimum(exponent, np.uint32(112)), 14, 25).astype(np.uint32)
    significand = (size & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    tie = (np.uint32(1) << (shift - np.uint32(1))) - np.uint32(1)
    small = (significand + tie + ((significand >> shift) & np.uint32(1))) >> shift
    normal = size - np.uint32((127 - 15) << 23)
    normal = (normal + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
    rounded = np.where(exponent < 113, small, normal)
    rounded = np.where(size >= np.uint32(0x47800000), np.uint32(0x7C00), rounded)
    return (sign | rounded).astype(np.uint16).view(np.float16)


def round_to(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The live image of float32 values: "bfloat16" as u16 bits, "float16" and "float32" as numpy types."""
    if dtype == "bfloat16":
        return round_bf16(values)
    if dtype == "float16":
        return round_fp16(values)
    if dtype == "float32":
        return values.copy()
    raise ValueError(f"live dtype {dtype!r} is not bfloat16, float16 or float32")


def perturb(
    master: NDArray[np.float32], m: NDArray[np.int32], sigma: float, sign: int, dtype: str
) -> NDArray[Any]:
    """round_to(master + sign * sigma * eps): one float32 rounding, then the rounding to the live dtype.

    sigma is a positive bf16 value; ValueError otherwise.
    """
    if not (sigma > 0 and is_bf16(sigma)) or sign not in (1, -1):
        raise ValueError(f"sigma {sigma} is not a positive bfloat16, or sign {sign} not 1 or -1")
    scale = np.float32(sign * sigma * 2.0**-13)
    return round_to(master + m.astype(np.float32) * scale, dtype)


def weighted_sum(
    seeds: Sequence[int], c: Sequence[int], tensor_key: int, start: int, count: int
) -> NDArray[np.int32]:
    """A = sum of c_j * m_j per element, exact."""
    total = np.zeros(count, np.int64)
    for seed, weight in zip(seeds, c, strict=True):
        total += weight * integers(seed, tensor_key, start, count).astype(np.int64)
    if count and np.abs(total).max() >= 1 << 31:
        raise ValueError("coefficients out of bounds: the weighted sum does not fit int32")
    return total.astype(np.int32)


def _change(a: NDArray[np.int32], shift: int) -> NDArray[np.float32]:
    return a.astype(np.float32) * np.float32(2.0**-shift)


def update(master: NDArray[np.float32], a: NDArray[np.int32], shift: int) -> NDArray[np.float32]:
    """The float32 master after one round: A to float32 by nearest even, exact scaling, one addition."""
    return master + _change(a, shift)


def update_bf16(
    master: NDArray[np.uint16],
    a: NDArray[np.int32],
    shift: int,
    rounding_seed: int,
    tensor_key: int,
    start: int,
) -> NDArray[np.uint16]:
    """The bf16 master (as bits) after one round, rounded stochastically by 16 random bits per element."""
    values = (master.astype(np.uint32) << np.uint32(16)).view(np.float32)
    bits = (values + _change(a, shift)).view(np.uint32)
    random = words(rounding_seed, tensor_key, TAG_ROUNDING, start, len(master))
    return ((bits + (random >> np.uint32(16))) >> np.uint32(16)).astype(np.uint16)


def digest(values: NDArray[np.float32], tensor_key: int, start: int = 0) -> int:
    """u64 sum over elements of fmix64(((key << 32) | bits) + golden * (i + 1)); bf16 enters as its float32.

    Sums of disjoint runs add (mod 2^64) to the tensor's digest, those of all tensors to the state digest D.
    """
    i = np.arange(start, start + len(values), dtype=np.uint64)
    x = values.view(np.uint32).astype(np.uint64) | np.uint64(tensor_key << 32)
    x += np.uint64(0x9E3779B97F4A7C15) * (i + np.uint64(1))
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return int(x.sum(dtype=np.uint64))
