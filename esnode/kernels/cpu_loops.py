"""The inner loops of the `cpu` backend, compiled by numba: no threads, no interpreter lock.

May import numba and `protocol` only; called by `cpu.py`. What makes them fast: noise comes in blocks of 128
elements (32 Philox counters times 4 words), so that a block needs no addresses and LLVM vectorises every
inner loop; the first two Philox rounds are folded into per-seed constants; the table is a global, hence a
constant of the code. Products of 32 by 32 bits are written `multiplier * (x & LOW32)`: that form becomes one
vector multiply. Vector gathers are slow (microcode on AMD, and on Intel since 2023), so the table is read by
plain loads, one block behind Philox, whose multiplications hide them.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from esnode.kernels.cpu_compile import bits_of, compiled, float_of, inline, shared
from protocol import noise

U16, U32, I32, F32, U64 = np.uint16, np.uint32, np.int32, np.float32, np.uint64
BLOCK = 128
GROUP = 8  # blocks whose noise is made together, to load a seed's constants less often
ROOM = BLOCK * GROUP
KEYS = 16  # u64 per seed, see _fold
BF16, FP16, FP32 = 0, 1, 2  # live dtypes
_TABLE = np.concatenate([np.zeros(6592, np.uint32), noise.TABLE])  # indexed by b >> 17 as it is
_BELOW_ONE = np.array([0x3F7FFFFF], np.uint32).view(np.float32)[0]
_M0, _M1 = U64(0xD2511F53), U64(0xCD9E8D57)
_LOW32, _32 = U64(0xFFFFFFFF), U64(32)
_GOLDEN = U64(0x9E3779B97F4A7C15)
_FMIX1, _FMIX2 = U64(0xFF51AFD7ED558CCD), U64(0xC4CEB9FE1A85EC53)


# --- noise ---


@inline
def _fold(seed, tid, tag, high, key):
    """Constants of one (seed, tensor, tag, high counter word): rounds 0 and 1 as far as they need no more.

    key[0] and key[1] enter round 1, key[2] and key[3] round 2; then (k0, k1) of rounds 2 to 6 in key[4:14].
    """
    k0 = seed & _LOW32
    k1 = seed >> _32
    p1 = _M1 * tid
    # x0 and x1 after round 0; x2 and x3 are hi(M0 * low) ^ tag ^ k1 and lo(M0 * low).
    x0, x1 = (p1 >> _32) ^ high ^ k0, p1 & _LOW32
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


@inline
def _round(x0, x1, x2, x3, k0, k1):
    """One Philox round. Only the low 32 bits of each word count; the rest is left dirty."""
    p0 = _M0 * (x0 & _LOW32)
    p1 = _M1 * (x2 & _LOW32)
    return (p1 >> _32) ^ x1 ^ k0, p1, (p0 >> _32) ^ x3 ^ k1, p0


@inline
def _philox(p0, key):
    """The four words of a counter whose first product M0 * low is p0."""
    p1 = _M1 * (((p0 >> _32) ^ key[0]) & _LOW32)
    x0, x1, x2, x3 = (p1 >> _32) ^ key[1], p1, p0 ^ key[2], key[3]
    x0, x1, x2, x3 = _round(x0, x1, x2, x3, key[4], key[5])
    x0, x1, x2, x3 = _round(x0, x1, x2, x3, key[6], key[7])
    x0, x1, x2, x3 = _round(x0, x1, x2, x3, key[8], key[9])
    x0, x1, x2, x3 = _round(x0, x1, x2, x3, key[10], key[11])
    return _round(x0, x1, x2, x3, key[12], key[13])


@intrinsic
def _look_up(typing, entries, pair, table):  # type: ignore[no-untyped-def]
    """Two u32 of `entries` from 2 * pair, indices before, become the table's entries.

    Atomic accesses are plain ones on every processor, but LLVM does not make gathers of them.
    """

    def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
        u64 = ir.IntType(64)
        memory, base = (
            cgutils.create_struct_proxy(signature.args[k])(context, b, args[k]).data for k in (0, 2)
        )
        place = b.gep(b.bitcast(memory, u64.as_pointer()), [args[1]])
        both = b.load_atomic(place, "monotonic", 8)
        low, high = (
            b.zext(b.load_atomic(b.gep(base, [index]), "monotonic", 4), u64)
            for index in (b.and_(both, u64(0xFFFFFFFF)), b.lshr(both, u64(32)))
        )
        b.store_atomic(b.or_(low, b.shl(high, u64(32))), place, "monotonic", 8)
        return context.get_dummy_value()

    return numba.void(entries, numba.uint64, table), generate


@inline
def _uniform(word):
    """b, the bits of the uniform float32, of a random word."""
    return bits_of(F32(float_of((word & U32(0x7FFFFF)) | U32(0x3F800000)) - _BELOW_ONE))


@shared
def _noise(block, count, k, words, entries):
    """Random words of `count` blocks in the order of their elements, and the table's entry for each.

    Eight counters at a time; with them goes a quarter of the look-ups of the block before.
    """
    key = (k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8], k[9], k[10], k[11], k[12], k[13])
    p0 = _M0 * ((U64(block) << U64(5)) & _LOW32)
    for chunk in range(U64(4 * count)):
        at = (chunk >> U64(2)) * U64(BLOCK) + (chunk & U64(3)) * U64(8)
        for lane in range(U64(8)):
            x0, x1, x2, x3 = _philox(p0 + _M0 * lane, key)
            words[at + lane] = U32(x0)
            words[at + lane + U64(32)] = U32(x1)
            words[at + lane + U64(64)] = U32(x2)
            words[at + lane + U64(96)] = U32(x3)
        p0 += _M0 * U64(8)
        if chunk >= U64(4):
            for pair in range(U64(16)):
                _look_up(entries, (chunk - U64(4)) * U64(16) + pair, _TABLE)
        if chunk & U64(3) == U64(3):
            first = (chunk >> U64(2)) * U64(BLOCK)
            for j in range(U64(BLOCK)):
                entries[first + j] = _uniform(words[first + j]) >> U32(17)
    for pair in range(U64(64 * count - 64), U64(64 * count)):
        _look_up(entries, pair, _TABLE)


@inline
def _gaussian(word, entry):
    """zs of a random word: its high half is q, m = 2q + 1."""
    z = U32(entry - U32(U32((entry & U32(0xFFF)) * (_uniform(word) & U32(0x1FFFF))) >> U32(7)))
    return I32(I32(z) ^ (I32(word) >> I32(31)))


@inline
def _odd(word, entry):
    return I32(_gaussian(word, entry) >> I32(15)) | I32(1)


@inline
def _group(first, last):
    """How many blocks from `first` to make at once: groups never straddle a multiple of GROUP: no carry."""
    return min(GROUP - (first & (GROUP - 1)), last - first)


# --- weights ---


@inline
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


@inline
def _plus(bits, step):
    """Bits of a float32 plus a float32: the one rounding of every change of a weight."""
    return bits_of(F32(float_of(bits) + F32(step)))


@inline
def _bf16(bits):
    return U16((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))


@inline
def _fp16(bits):
    """IEEE half of float32 bits, nearest even, subnormals and overflow included."""
    size = U32(bits & U32(0x7FFFFFFF))
    exponent = I32(size >> U32(23))
    # Below 2^-14 the unit of a half is 2^-24.
    shift = U32(min(max(I32(I32(126) - exponent), I32(14)), I32(25)))
    significand = U32((size & U32(0x7FFFFF)) | U32(0x800000))
    below_half = U32(U32(U32(1) << U32(shift - U32(1))) - U32(1))
    odd = U32(U32(significand >> shift) & U32(1))
    small = U32(U32(U32(significand + below_half) + odd) >> shift)
    odd = U32(U32(size >> U32(13)) & U32(1))
    normal = U32(U32(U32(size - U32(0x38000000 - 0xFFF)) + odd) >> U32(13))
    rounded = small if exponent < I32(113) else normal
    rounded = rounded if size < U32(0x47800000) else U32(0x7C00)
    return U16(U32(U32(bits >> U32(16)) & U32(0x8000)) | rounded)


@inline
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


@inline
def _mixed(bits, tid, index):
    """What one element adds to the digest."""
    x = ((tid << _32) | U64(bits)) + _GOLDEN * (index + U64(1))
    x = (x ^ (x >> U64(33))) * _FMIX1
    x = (x ^ (x >> U64(33))) * _FMIX2
    return x ^ (x >> U64(33))


# --- entry points; rows are those of a Region, positions count from the first element of the arrays ---


@compiled
def fill(seed, tid, start, rows, width, stride, out):
    """m of every element into int32 `out`."""
    key = np.empty(KEYS, U64)
    words = np.empty(ROOM, U32)
    entries = np.empty(ROOM, U32)
    for row in range(rows):
        begin = start + row * stride
        end = begin + width
        block, last = begin >> 7, (end + 127) >> 7
        while block < last:
            count = _group(block, last)
            _fold(seed, tid, U64(noise.TAG_EPS), U64(block >> 27), key)
            _noise(block, count, key, words, entries)
            lo = max(begin, block * BLOCK)
            n = min(end, (block + count) * BLOCK) - lo
            at = row * width + lo - begin
            target = out[at : at + n]
            w, e = words[lo - block * BLOCK :], entries[lo - block * BLOCK :]
            for j in range(n):
                target[j] = _odd(w[j], e[j])
            block += count


@compiled
def perturb(seed, tid, start, rows, width, stride, scale, m32, m16, wide, kind, l32, l16):
    """live = round(master + m * scale); `wide` and `kind` say which of the arrays of bits are meant."""
    key = np.empty(KEYS, U64)
    words = np.empty(ROOM, U32)
    entries = np.empty(ROOM, U32)
    bits = np.empty(ROOM, U32)
    for row in range(rows):
        begin = start + row * stride
        end = begin + width
        block, last = begin >> 7, (end + 127) >> 7
        while block < last:
            count = _group(block, last)
            _fold(seed, tid, U64(noise.TAG_EPS), U64(block >> 27), key)
            _noise(block, count, key, words, entries)
            lo = max(begin, block * BLOCK)
            n = min(end, (block + count) * BLOCK) - lo
            at = row * width + lo - begin
            w, e = words[lo - block * BLOCK :], entries[lo - block * BLOCK :]
            if wide:
                source = m32[at : at + n]
                for j in range(n):
                    bits[j] = _plus(source[j], F32(_odd(w[j], e[j])) * scale)
            else:
                narrow = m16[at : at + n]
                for j in range(n):
                    bits[j] = _plus(U32(narrow[j]) << U32(16), F32(_odd(w[j], e[j])) * scale)
            _store_live(bits, n, kind, l32, l16, at)
            block += count


@compiled
def restore(first, last, m32, m16, wide, kind, l32, l16):
    """live = round(master) for positions first .. last."""
    bits = np.empty(ROOM, U32)
    for at in range(first, last, ROOM):
        n = min(ROOM, last - at)
        _load(m32, m16, wide, at, n, bits)
        _store_live(bits, n, kind, l32, l16, at)


@compiled
def digest(tid, start, rows, width, stride, m32, m16, wide):
    """u64 sum of the elements' shares."""
    bits = np.empty(ROOM, U32)
    total = U64(0)
    for row in range(rows):
        for column in range(0, width, ROOM):
            n = min(ROOM, width - column)
            _load(m32, m16, wide, row * width + column, n, bits)
            index = U64(start + row * stride + column)
            for j in range(n):
                total += _mixed(bits[j], tid, index + U64(j))
    return total


@inline
def _sum(block, count, keys, c, first, last, words, entries, q):
    """q = sum over members of c * q_member (A = 2 * q + sum of c), wrapping in int32; the final A fits."""
    for j in range(count * BLOCK):
        q[j] = I32(0)
    for k in range(first, last):
        _noise(block, count, keys[k], words, entries)
        weight = c[k]
        for j in range(count * BLOCK):
            q[j] = I32(q[j] + I32(weight * I32(_gaussian(words[j], entries[j]) >> I32(16))))


@inline
def _move(bits, n, q, c_sum, scale, wide, words):
    """One round's step on float32 bits; a bf16 master adds 16 random bits and cuts."""
    if wide:
        for j in range(n):
            a = I32(I32(q[j] << I32(1)) + c_sum)
            bits[j] = _plus(bits[j], F32(a) * scale)
    else:
        for j in range(n):
            a = I32(I32(q[j] << I32(1)) + c_sum)
            moved = _plus(bits[j], F32(a) * scale)
            bits[j] = U32(moved + (words[j] >> U32(16))) & U32(0xFFFF0000)


@compiled
def update(tid, start, rows, width, stride, seeds, c, ends, scales, rounding, m32, m16, wide, sums):
    """All steps on the master in place; step t has noises ends[t-1] .. ends[t], sums[t] gets its digest."""
    members, steps = len(seeds), len(ends)
    keys = np.empty((members + steps, KEYS), U64)
    words = np.empty(ROOM, U32)
    entries = np.empty(ROOM, U32)
    bits = np.empty(ROOM, U32)
    q = np.empty(ROOM, I32)
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
            lo = max(begin, block * BLOCK)
            n = min(end, (block + count) * BLOCK) - lo
            skip = lo - block * BLOCK
            at = row * width + lo - begin
            _load(m32, m16, wide, at, n, bits)
            first = 0
            for t in range(steps):
                _sum(block, count, keys, c, first, ends[t], words, entries, q)
                c_sum = I32(0)
                for k in range(first, ends[t]):
                    c_sum = I32(c_sum + c[k])
                first = ends[t]
                if not wide:
                    _noise(block, count, keys[members + t], words, entries)
                _move(bits, n, q[skip:], c_sum, scales[t], wide, words[skip:])
                index = U64(lo)
                share = U64(0)
                for j in range(n):
                    share += _mixed(bits[j], tid, index + U64(j))
                sums[t] += share
            _store_master(bits, n, m32, m16, wide, at)
            block += count


@inline
def _store_master(bits, n, m32, m16, wide, at):
    if wide:
        target = m32[at : at + n]
        for j in range(n):
            target[j] = bits[j]
    else:
        narrow = m16[at : at + n]
        for j in range(n):
            narrow[j] = U16(bits[j] >> U32(16))
