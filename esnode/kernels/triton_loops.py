"""The device code of the `triton` backend: noise, rounding, digest, and the five kernels made of them.

May import triton only; called by `triton_kernels.py`. A program does `BLOCK` Philox counters of one row of a
region, that is 4 * BLOCK elements. Weights travel as their bits (int32, int16) and are rounded in integers,
so no conversion of a compiler's or the interpreter's choosing takes part; every float product is exact.
Types are not annotated: triton reads annotations as its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of these values no variants are compiled; one that is 1 would be a number of Python's inside a kernel, which
# has no types to convert between.
VARYING = ("k0", "k1", "tid", "first", "stride", "width", "per_row", "count", "steps", "programs")

# ---------------------------------------------------------------- device functions


@triton.jit
def _philox(counter, high, tid, tag, k0, k1):  # type: ignore[no-untyped-def]
    """Philox4x32-7: four words (u32) per counter. All arguments are u32; only `counter` is a block."""
    zero = counter ^ counter
    x0, x1, x2, x3 = counter, zero + high, zero + tid, zero + tag
    for _ in tl.static_range(7):
        p0 = x0.to(tl.uint64) * 0xD2511F53
        p1 = x2.to(tl.uint64) * 0xCD9E8D57
        x0 = (p1 >> 32).to(tl.uint32) ^ x1 ^ k0
        x2 = (p0 >> 32).to(tl.uint32) ^ x3 ^ k1
        x1 = p1.to(tl.uint32)
        x3 = p0.to(tl.uint32)
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return x0, x1, x2, x3


@triton.jit
def _signed_z(words, table):  # type: ignore[no-untyped-def]
    """Law, noise, step 3 and 4: zs (int32) of each word."""
    below_one = ((words ^ words) + 0x3F7FFFFF).to(tl.float32, bitcast=True)
    uniform = ((words & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - below_one
    b = uniform.to(tl.uint32, bitcast=True)
    entry = tl.load(table + ((b >> 17).to(tl.int32) - 6592)).to(tl.uint32, bitcast=True)
    z = entry - (((entry & 0xFFF) * (b & 0x1FFFF)) >> 7)
    return z.to(tl.int32, bitcast=True) ^ (words.to(tl.int32, bitcast=True) >> 31)


@triton.jit
def _load(pointer, mask, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Master values as float32."""
    bits = tl.load(pointer, mask=mask, other=0)
    if NARROW:
        bits = bits.to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _half(bits):  # type: ignore[no-untyped-def]
    """float32 bits to fp16 bits, to nearest even, subnormals and infinity included; in u32."""
    size = bits & 0x7FFFFFFF
    exponent = (size >> 23).to(tl.int32)
    shift = tl.minimum(tl.maximum(126 - exponent, 14), 25).to(tl.uint32)
    significand = (size & 0x7FFFFF) | 0x800000
    one = (size ^ size) + 1
    small = (significand + (one << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    normal = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13
    rounded = tl.where(exponent < 113, small, normal)
    rounded = tl.where(size >= 0x47800000, (size ^ size) + 0x7C00, rounded)
    return ((bits >> 16) & 0x8000) | rounded


@triton.jit
def _store_live(pointer, values, mask, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 values to the live dtype and store their bits."""
    bits = values.to(tl.uint32, bitcast=True)
    if KIND == 2:
        tl.store(pointer, bits.to(tl.int32, bitcast=True), mask=mask)
    else:
        if KIND == 0:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        else:
            bits = _half(bits)
        tl.store(pointer, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)


@triton.jit
def _fmix(values, tid, index):  # type: ignore[no-untyped-def]
    """The digest's term (int64 bits) of each float32 value at its canonical index (int64)."""
    x = values.to(tl.uint32, bitcast=True).to(tl.uint64) | (tid.to(tl.uint64) << 32)
    x += (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return (x ^ (x >> 33)).to(tl.int64, bitcast=True)


@triton.jit
def _place(first, stride, width, per_row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where this program works: its row, counters (low u32, high u32), offset in the row of word 0, base."""
    program = tl.program_id(0)
    row = (program // per_row).to(tl.int64)
    start = first.to(tl.int64) + row * stride.to(tl.int64)
    block = start >> 7
    lane = (program % per_row) * BLOCK + tl.arange(0, BLOCK)
    counter = (block << 5).to(tl.uint32) + lane.to(tl.uint32)
    high = (block >> 27).to(tl.uint32)
    offset = (lane // 32) * 128 + (lane % 32) - (start - (block << 7)).to(tl.int32)
    return start, row * width.to(tl.int64), counter, high, offset


# ---------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=VARYING)
def fill(  # type: ignore[no-untyped-def]
    out, table, k0, k1, tid, first, stride, width, per_row, BLOCK: tl.constexpr
):
    _, base, counter, high, offset = _place(first, stride, width, per_row, BLOCK)
    zero = tl.full((), 0, tl.uint32)
    words = _philox(counter, high, tid.to(tl.uint32), zero, k0.to(tl.uint32), k1.to(tl.uint32))
    for k in tl.static_range(4):
        at = offset + 32 * k
        tl.store(out + base + at, (_signed_z(words[k], table) >> 15) | 1, mask=(at >= 0) & (at < width))


@triton.jit(do_not_specialize=VARYING)
def perturb(  # type: ignore[no-untyped-def]
    master,
    live,
    table,
    scale,
    k0,
    k1,
    tid,
    first,
    stride,
    width,
    per_row,
    NARROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, base, counter, high, offset = _place(first, stride, width, per_row, BLOCK)
    zero = tl.full((), 0, tl.uint32)
    words = _philox(counter, high, tid.to(tl.uint32), zero, k0.to(tl.uint32), k1.to(tl.uint32))
    factor = tl.load(scale)
    for k in tl.static_range(4):
        at = offset + 32 * k
        mask = (at >= 0) & (at < width)
        m = (_signed_z(words[k], table) >> 15) | 1
        values = _load(master + base + at, mask, NARROW) + m.to(tl.float32) * factor
        _store_live(live + base + at, values, mask, KIND)


@triton.jit(do_not_specialize=VARYING)
def restore(  # type: ignore[no-untyped-def]
    master, live, count, NARROW: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    _store_live(live + at, _load(master + at, mask, NARROW), mask, KIND)


@triton.jit
def _weighted_sums(  # type: ignore[no-untyped-def]
    low, high_keys, weights, table, begin, end, counter, high, tid, BLOCK: tl.constexpr
):
    """A / 2 without the odd parts: sum of c * q over the members `begin` to `end`, four words per counter."""
    a0 = tl.zeros((BLOCK,), tl.int32)
    a1, a2, a3 = a0, a0, a0
    zero = tl.full((), 0, tl.uint32)
    for i in range(begin, end):
        k0 = tl.load(low + i).to(tl.uint32, bitcast=True)
        k1 = tl.load(high_keys + i).to(tl.uint32, bitcast=True)
        c = tl.load(weights + i)
        w0, w1, w2, w3 = _philox(counter, high, tid, zero, k0, k1)
        a0 += c * (_signed_z(w0, table) >> 16)
        a1 += c * (_signed_z(w1, table) >> 16)
        a2 += c * (_signed_z(w2, table) >> 16)
        a3 += c * (_signed_z(w3, table) >> 16)
    return a0, a1, a2, a3


@triton.jit
def _moved(values, a, random, odd, factor, mask, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of four words' worth: float32 add, and the stochastic rounding of a bf16 master."""
    values += (2 * a + odd).to(tl.float32) * factor
    if NARROW:
        bits = values.to(tl.uint32, bitcast=True) + (random >> 16)
        values = (bits & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
    return values


@triton.jit(do_not_specialize=VARYING)
def update(  # type: ignore[no-untyped-def]
    master,
    table,
    low,
    high_keys,
    weights,
    begins,
    odds,
    factors,
    rounding_low,
    rounding_high,
    sums,
    steps,
    programs,
    tid,
    first,
    stride,
    width,
    per_row,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, base, counter, high, offset = _place(first, stride, width, per_row, BLOCK)
    tid = tid.to(tl.uint32)
    here = master + base + offset
    m0, m1 = (offset >= 0) & (offset < width), (offset >= -32) & (offset < width - 32)
    m2, m3 = (offset >= -64) & (offset < width - 64), (offset >= -96) & (offset < width - 96)
    x0, x1 = _load(here, m0, NARROW), _load(here + 32, m1, NARROW)
    x2, x3 = _load(here + 64, m2, NARROW), _load(here + 96, m3, NARROW)
    index = start + offset
    for s in range(steps):
        begin, end = tl.load(begins + s), tl.load(begins + s + 1)
        a0, a1, a2, a3 = _weighted_sums(low, high_keys, weights, table, begin, end, counter, high, tid, BLOCK)
        odd, factor = tl.load(odds + s), tl.load(factors + s)
        r0, r1, r2, r3 = counter, counter, counter, counter
        if NARROW:
            k0 = tl.load(rounding_low + s).to(tl.uint32, bitcast=True)
            k1 = tl.load(rounding_high + s).to(tl.uint32, bitcast=True)
            r0, r1, r2, r3 = _philox(counter, high, tid, tl.full((), 1, tl.uint32), k0, k1)
        x0 = _moved(x0, a0, r0, odd, factor, m0, NARROW)
        x1 = _moved(x1, a1, r1, odd, factor, m1, NARROW)
        x2 = _moved(x2, a2, r2, odd, factor, m2, NARROW)
        x3 = _moved(x3, a3, r3, odd, factor, m3, NARROW)
        total = tl.where(m0, _fmix(x0, tid, index), 0) + tl.where(m1, _fmix(x1, tid, index + 32), 0)
        total += tl.where(m2, _fmix(x2, tid, index + 64), 0) + tl.where(m3, _fmix(x3, tid, index + 96), 0)
        tl.store(sums + s * programs + tl.program_id(0), tl.sum(total, 0))
    _store_master(here, x0, m0, NARROW)
    _store_master(here + 32, x1, m1, NARROW)
    _store_master(here + 64, x2, m2, NARROW)
    _store_master(here + 96, x3, m3, NARROW)


@triton.jit
def _store_master(pointer, values, mask, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """A master's bits; those of a bf16 master are rounded already."""
    bits = values.to(tl.int32, bitcast=True)
    if NARROW:
        tl.store(pointer, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(pointer, bits, mask=mask)


@triton.jit(do_not_specialize=VARYING)
def digest(  # type: ignore[no-untyped-def]
    master, sums, tid, first, stride, width, per_row, NARROW: tl.constexpr, BLOCK: tl.constexpr
):
    start, base, _, _, offset = _place(first, stride, width, per_row, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for k in tl.static_range(4):
        at = offset + 32 * k
        mask = (at >= 0) & (at < width)
        values = _load(master + base + at, mask, NARROW)
        total += tl.where(mask, _fmix(values, tid.to(tl.uint32), start + at), 0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
