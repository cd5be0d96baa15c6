"""The inner loops of the `cpu` backend, compiled by numba: no threads, no interpreter lock.

May import numba and `protocol` only; called by `cpu.py`. What makes them fast: noise comes in blocks of 128
elements (32 Philox counters times 4 words), so that a block needs no addresses and LLVM vectorises every
inner loop; the first two Philox rounds are folded into per-seed constants; the table is a global, hence a
constant of the code. Products of 32 by 32 bits are written `multiplier * (x & LOW32)`: that form becomes one
vector multiply.
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
import numpy as np  # noqa: E402
from llvmlite import ir  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

from protocol import noise  # noqa: E402

U16, U32, I32, F32, U64 = np.uint16, np.uint32, np.int32, np.float32, np.uint64
BLOCK = 128
GROUP = 4  # blocks whose noise is made together, to load a seed's constants less often
KEYS = 16  # u64 per seed, see _fold
BF16, FP16, FP32 = 0, 1, 2  # live dtypes
_TABLE = np.concatenate([np.zeros(6592, np.uint32), noise.TABLE])  # indexed by b >> 17 as it is
_BELOW_ONE = np.array([0x3F7FFFFF], np.uint32).view(np.float32)[0]
_M0, _M1 = U64(0xD2511F53), U64(0xCD9E8D57)
_LOW32, _32 = U64(0xFFFFFFFF), U64(32)
_GOLDEN = U64(0x9E3779B97F4A7C15)
_FMIX1, _FMIX2 = U64(0xFF51AFD7ED558CCD), U64(0xC4CEB9FE1A85EC53)


def _compiled(function: Callable[..., Any]) -> Any:
    """njit, cached on disk where there is a place for it: beside this file, else the user's cache folder."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba's "no locator available": compile anew in each process
        return numba.njit(**options)(function)


def _inline(function: Callable[..., Any]) -> Any:
    return numba.njit(inline="always", error_model="numpy")(function)


@intrinsic
def _float_of(typing, bits):  # type: ignore[no-untyped-def]
    """float32 with the given u32 bits."""
    return numba.float32(numba.uint32), lambda c, b, s, args: b.bitcast(args[0], ir.FloatType())


@intrinsic
def _bits_of(typing, value):  # type: ignore[no-untyped-def]
    """u32 bits of a float32."""
    return numba.uint32(numba.float32), lambda c, b, s, args: b.bitcast(args[0], ir.IntType(32))


# --- noise ---


@_inline
def _fold(seed, tid, tag, high, key):
    """Constants of one (seed, tensor, tag, high counter word): rounds 0 and 1 as far as they need no more.

    key[0] and key[1] enter round 1, key[2] and key[3] round 2; then (k0, k1) of rounds 2 to 6 in key[4:14].
    """
    k0 = seed & _LOW32
    k1 = seed >> _32
    p1 = _M1 * tid
    x0 = (
        (p1 >> _32) ^ high ^ k0
    )  # x0 and x1 after round 0; x2 and x3 are hi(M0 * low) ^ tag ^ k1 and lo(M0 * low)
    x1 = p1 & _LOW32
    key[0] = tag ^ k1
    k0 = (k0 + U64(0x9E3779B9)) & _LOW32
    k1 = (k1 + U64(0xBB67AE85)) & _LOW32
    p0 = _M0 * x0
    key[1] = x1 ^ k0
    key[2] = (p0 >> _32) ^ k1
    key[3] = p0 & _LOW32
    for r in range(5):
        k0 = (k0 + U64(0x9E3779B9)) & _LOW32
        k1 = (k1 + U64(0xBB67AE85)) & _LOW32
        key[4 + 2 * r] = k0
        key[5 + 2 * r] = k1


@_inline
def _round(x0, x1, x2, x3, k0, k1):
    """One Philox round. Only the low 32 bits of each word count; the rest is left dirty."""
    p0 = _M0 * (x0 & _LOW32)
    p1 = _M1 * (x2 & _LOW32)
    return (p1 >> _32) ^ x1 ^ k0, p1, (p0 >> _32) ^ x3 ^ k1, p0


@_inline
def _philox(p0, key):
    """The four words of a counter whose first product M0 * low is p0."""
    p1 = _M1 * (((p0 >> _32) ^ key[0]) & _LOW32)
    x0, x1, x2, x3 = (p1 >> _32) ^ key[1], p1, p0 ^ key[2], key[3]
    x0, x1, x2, x3 = _round(x0, x1, x2, x3, key[4], key[5])
    x0, x1, x2, x3 = _round(x0, x1, x2, x3, key[6], key[7])
    x0, x1, x2, x3 = _round(x0, x1, x2, x3, key[8], key[9])
    x0, x1, x2, x3 = _round(x0, x1, x2, x3, key[10], key[11])
    return _round(x0, x1, x2, x3, key[12], key[13])


@_inline
def _products(block, count, p0):
    """First products of all counters of `count` blocks from `block`, shared by all seeds."""
    low = (U64(block) << U64(5)) & _LOW32
    for lane in range(32 * count):
        p0[lane] = _M0 * (low + U64(lane))


@_inline
def _words(p0, count, key, words):
    """Random words of `count` blocks, in the order of their elements."""
    for g in range(count):
        p = p0[32 * g : 32 * g + 32]
        out = words[BLOCK * g : BLOCK * g + BLOCK]
        for lane in range(32):
            x0, x1, x2, x3 = _philox(p[lane], key)
            out[lane] = U32(x0)
            out[lane + 32] = U32(x1)
            out[lane + 64] = U32(x2)
            out[lane + 96] = U32(x3)


@_inline
def _gaussian(word):
    """zs of a random word: its high half is q, m = 2q + 1."""
    b = _bits_of(F32(_float_of((word & U32(0x7FFFFF)) | U32(0x3F800000)) - _BELOW_ONE))
    entry = _TABLE[b >> U32(17)]
    z = U32(entry - U32(U32((entry & U32(0xFFF)) * (b & U32(0x1FFFF))) >> U32(7)))
    return I32(I32(z) ^ (I32(word) >> I32(31)))


@_inline
def _odd(word):
    return I32(_gaussian(word) >> I32(15)) | I32(1)


@_inline
def _group(first, last):
    """How many blocks from `first` to make at once: groups never straddle a multiple of GROUP: no carry."""
    return min(GROUP - (first & (GROUP - 1)), last - first)


# --- weights ---


@_inline
def _load(m32, m16, wide, at, count, bits):
    """float32 bits of `count` master elements from position `at`; a bf16 master (not wide) widens exactly."""
    if wide:
        source = m32[at : at + count]
        for j in range(count):
            bits[j] = source[j]
    else:
        narrow = m16[at : at + count]
        for j in range(count):
            bits[j] = U32(narrow[j]) << U32(16)


@_inline
def _bf16(bits):
    return U16((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))


@_inline
def _fp16(bits):
    """IEEE half of float32 bits, nearest even, subnormals and overflow included."""
    size = U32(bits & U32(0x7FFFFFFF))
    exponent = I32(size >> U32(23))
    shift = U32(
        min(max(I32(I32(126) - exponent), I32(14)), I32(25))
    )  # below 2^-14 the unit of a half is 2^-24
    significand = U32((size & U32(0x7FFFFF)) | U32(0x800000))
    below_half = U32(U32(U32(1) << U32(shift - U32(1))) - U32(1))
    odd = U32(U32(significand >> shift) & U32(1))
    small = U32(U32(U32(significand + below_half) + odd) >> shift)
    odd = U32(U32(size >> U32(13)) & U32(1))
    normal = U32(U32(U32(size - U32(0x38000000 - 0xFFF)) + odd) >> U32(13))
    rounded = small if exponent < I32(113) else normal
    rounded = rounded if size < U32(0x47800000) else U32(0x7C00)
    return U16(U32(U32(bits >> U32(16)) & U32(0x8000)) | rounded)


@_inline
def _store_live(bits, count, kind, l32, l16, at):
    """Round float32 bits into the live weights from position `at`."""
    if kind == FP32:
        whole = l32[at : at + count]
        for j in range(count):
            whole[j] = bits[j]
    elif kind == BF16:
        half = l16[at : at + count]
        for j in range(count):
            half[j] = _bf16(bits[j])
    else:
        half = l16[at : at + count]
        for j in range(count):
            half[j] = _fp16(bits[j])


@_inline
def _mixed(bits, tid, index):
    """What one element adds to the digest."""
    x = ((tid << _32) | U64(bits)) + _GOLDEN * (index + U64(1))
    x = (x ^ (x >> U64(33))) * _FMIX1
    x = (x ^ (x >> U64(33))) * _FMIX2
    return x ^ (x >> U64(33))


# --- entry points; rows are those of a Region, positions count from the first element of the arrays ---


@_compiled
def fill(seed, tid, start, rows, width, stride, out):
    """m of every element into int32 `out`."""
    key = np.empty(KEYS, U64)
    p0 = np.empty(32 * GROUP, U64)
    words = np.empty(BLOCK * GROUP, U32)
    for row in range(rows):
        begin = start + row * stride
        end = begin + width
        block, last = begin >> 7, (end + 127) >> 7
        while block < last:
            count = _group(block, last)
            _fold(seed, tid, U64(noise.TAG_EPS), U64(block >> 27), key)
            _products(block, count, p0)
            _words(p0, count, key, words)
            lo = max(begin, block * BLOCK)
            n = min(end, (block + count) * BLOCK) - lo
            at = row * width + lo - begin
            target = out[at : at + n]
            w = words[lo - block * BLOCK : lo - block * BLOCK + n]
            for j in range(n):
                target[j] = _odd(w[j])
            block += count


@_compiled
def perturb(seed, tid, start, rows, width, stride, scale, m32, m16, wide, kind, l32, l16):
    """live = round(master + m * scale); `wide` and `kind` say which of the arrays of bits are meant."""
    key = np.empty(KEYS, U64)
    p0 = np.empty(32 * GROUP, U64)
    words = np.empty(BLOCK * GROUP, U32)
    bits = np.empty(BLOCK * GROUP, U32)
    for row in range(rows):
        begin = start + row * stride
        end = begin + width
        block, last = begin >> 7, (end + 127) >> 7
        while block < last:
            count = _group(block, last)
            _fold(seed, tid, U64(noise.TAG_EPS), U64(block >> 27), key)
            _products(block, count, p0)
            _words(p0, count, key, words)
            lo = max(begin, block * BLOCK)
            n = min(end, (block + count) * BLOCK) - lo
            at = row * width + lo - begin
            w = words[lo - block * BLOCK : lo - block * BLOCK + n]
            _load(m32, m16, wide, at, n, bits)
            for j in range(n):
                bits[j] = _bits_of(F32(_float_of(bits[j]) + F32(F32(_odd(w[j])) * scale)))
            _store_live(bits, n, kind, l32, l16, at)
            block += count


@_compiled
def restore(first, last, m32, m16, wide, kind, l32, l16):
    """live = round(master) for positions first .. last."""
    bits = np.empty(BLOCK * GROUP, U32)
    for at in range(first, last, BLOCK * GROUP):
        n = min(BLOCK * GROUP, last - at)
        _load(m32, m16, wide, at, n, bits)
        _store_live(bits, n, kind, l32, l16, at)


@_compiled
def digest(tid, start, rows, width, stride, m32, m16, wide):
    """u64 sum of the elements' shares."""
    bits = np.empty(BLOCK * GROUP, U32)
    total = U64(0)
    for row in range(rows):
        for column in range(0, width, BLOCK * GROUP):
            n = min(BLOCK * GROUP, width - column)
            _load(m32, m16, wide, row * width + column, n, bits)
            index = U64(start + row * stride + column)
            for j in range(n):
                total += _mixed(bits[j], tid, index + U64(j))
    return total


@_inline
def _sum(p0, count, keys, c, first, last, words, q):
    """q = sum over members of c * q_member (A = 2 * q + sum of c), wrapping in int32; the final A fits."""
    for j in range(count * BLOCK):
        q[j] = I32(0)
    for k in range(first, last):
        _words(p0, count, keys[k], words)
        weight = c[k]
        for j in range(count * BLOCK):
            q[j] = I32(q[j] + I32(weight * I32(_gaussian(words[j]) >> I32(16))))


@_inline
def _move(bits, n, q, c_sum, scale, wide, words):
    """One round's step on float32 bits; a bf16 master adds 16 random bits and cuts."""
    if wide:
        for j in range(n):
            a = I32(I32(q[j] << I32(1)) + c_sum)
            bits[j] = _bits_of(F32(_float_of(bits[j]) + F32(F32(a) * scale)))
    else:
        for j in range(n):
            a = I32(I32(q[j] << I32(1)) + c_sum)
            moved = _bits_of(F32(_float_of(bits[j]) + F32(F32(a) * scale)))
            bits[j] = U32(moved + (words[j] >> U32(16))) & U32(0xFFFF0000)


@_compiled
def update(tid, start, rows, width, stride, seeds, c, ends, scales, rounding, m32, m16, wide, sums):
    """All steps on the master in place; step t has noises ends[t-1] .. ends[t], sums[t] gets its digest."""
    members, steps = len(seeds), len(ends)
    keys = np.empty((members + steps, KEYS), U64)
    p0 = np.empty(32 * GROUP, U64)
    words = np.empty(BLOCK * GROUP, U32)
    bits = np.empty(BLOCK * GROUP, U32)
    q = np.empty(BLOCK * GROUP, I32)
    folded = -1
    for row in range(rows):
        begin = start + row * stride
        end = begin + width
        block, last = begin >> 7, (end + 127) >> 7
        while block < last:
            count = _group(block, last)
            if block >> 27 != folded:
                folded = block >> 27
                for k in range(members):
                    _fold(seeds[k], tid, U64(noise.TAG_EPS), U64(folded), keys[k])
                for t in range(steps):
                    _fold(rounding[t], tid, U64(noise.TAG_ROUNDING), U64(folded), keys[members + t])
            _products(block, count, p0)
            lo = max(begin, block * BLOCK)
            n = min(end, (block + count) * BLOCK) - lo
            skip = lo - block * BLOCK
            at = row * width + lo - begin
            _load(m32, m16, wide, at, n, bits)
            first = 0
            for t in range(steps):
                _sum(p0, count, keys, c, first, ends[t], words, q)
                c_sum = I32(0)
                for k in range(first, ends[t]):
                    c_sum = I32(c_sum + c[k])
                first = ends[t]
                if not wide:
                    _words(p0, count, keys[members + t], words)
                _move(bits, n, q[skip:], c_sum, scales[t], wide, words[skip:])
                index = U64(lo)
                share = U64(0)
                for j in range(n):
                    share += _mixed(bits[j], tid, index + U64(j))
                sums[t] += share
            _store_master(bits, n, m32, m16, wide, at)
            block += count


@_inline
def _store_master(bits, n, m32, m16, wide, at):
    if wide:
        target = m32[at : at + n]
        for j in range(n):
            target[j] = bits[j]
    else:
        narrow = m16[at : at + n]
        for j in range(n):
            narrow[j] = U16(bits[j] >> U32(16))
