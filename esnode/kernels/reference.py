"""The law in torch eager, on any device: each element hashes its own address, a slice is a set of indices.

Slow and plain on purpose: disputes are settled with it. May import torch and `protocol` only. All integer
work is done in int64, where torch wraps as two's complement everywhere; memory is bounded by working `CHUNK`
elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from esnode.kernels.interface import (
    OneByOne,
    Region,
    check_address,
    check_live,
    check_master,
    check_out,
    noise_scale,
)
from protocol import noise
from protocol.seeds import U64
from protocol.shaping import Step

CHUNK = 1 << 16
_LOW32 = 0xFFFFFFFF


def _signed(value: int) -> int:
    """The int64 with the bits of a u64."""
    return value - U64 if value >= U64 // 2 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FMIX = (_signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53))


def _chunks(region: Region, device: torch.device, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Local slices with the canonical index (int64) of each of their elements."""
    for first in range(0, region.count, size):
        last = min(first + size, region.count)
        local = torch.arange(first, last, dtype=torch.int64, device=device)
        row = local // region.width
        yield slice(first, last), region.start + row * (region.stride - region.width) + local


def _product(x: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of u32 times u32. The multiplier is taken as negative, so that nothing wraps: a
    C++ compiler may take a signed product that wraps for impossible.
    """
    below = x * (multiplier - (1 << 32))
    return (below >> 32) + x, below & _LOW32


def _address(seed: int, tid: int, tag: int, device: torch.device) -> torch.Tensor:
    """What all elements of a tensor share, as one tensor: a compiled function is the same for all of them."""
    return torch.tensor([seed & _LOW32, seed >> 32, tid, tag], dtype=torch.int64, device=device)


def words(address: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Philox4x32-7, the word of each element, as int64 below 2^32."""
    counter = ((index >> 7) << 5) | (index & 31)
    x0, x1 = counter & _LOW32, counter >> 32
    k0, k1, x2, x3 = address.unbind()
    for _ in range(7):
        (high0, low0), (high1, low1) = _product(x0, 0xD2511F53), _product(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    word = (index >> 5) & 3
    return torch.where(word < 2, torch.where(word == 0, x0, x1), torch.where(word == 2, x2, x3))


def integers(address: torch.Tensor, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """m of each element, as int64."""
    drawn = words(address, index)
    uniform = (2 * (drawn & 0x7FFFFF) + 1).to(torch.float32) * 2.0**-24
    b = uniform.view(torch.int32).to(torch.int64)
    entry = table[(b >> 17) - 6592]
    z = entry - (((entry & 0xFFF) * (b & 0x1FFFF)) >> 7)
    z = torch.where(drawn >= 1 << 31, ~z, z)
    return (z >> 15) | 1


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of float32 values, as int64 below 2^32."""
    return values.view(torch.int32).to(torch.int64) & _LOW32


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _load(master: torch.Tensor) -> torch.Tensor:
    """A master's values as float32; bf16 widens exactly, by its bits."""
    if master.dtype == torch.float32:
        return master
    return _floats((master.view(torch.int16).to(torch.int64) & 0xFFFF) << 16)


def _bf16_bits(values: torch.Tensor) -> torch.Tensor:
    bits = _bits(values)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _fp16_bits(values: torch.Tensor) -> torch.Tensor:
    bits = _bits(values)
    size = bits & 0x7FFFFFFF
    exponent = size >> 23
    shift = (126 - exponent).clamp(14, 25)  # below 2^-14 the unit of a half is 2^-24
    significand = (size & 0x7FFFFF) | 0x800000
    small = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    normal = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13
    rounded = torch.where(exponent < 113, small, normal)
    rounded = torch.where(size >= 0x47800000, 0x7C00, rounded)
    return ((bits >> 16) & 0x8000) | rounded


def _store(values: torch.Tensor, live: torch.Tensor) -> None:
    """Round float32 values to the live dtype, in integers."""
    if live.dtype == torch.float32:
        live.copy_(values)
    elif live.dtype == torch.bfloat16:
        live.view(torch.int16).copy_(_bf16_bits(values))
    else:
        live.view(torch.int16).copy_(_fp16_bits(values))


def digest(values: torch.Tensor, address: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The sum of the digest's terms, as the int64 with the bits of a u64."""
    x = _bits(values) + (address[2] << 32) + (index + 1) * _GOLDEN
    for multiplier in _FMIX:
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * multiplier
    x = x ^ ((x >> 33) & 0x7FFFFFFF)
    return x.sum()


class ReferenceKernels(OneByOne):
    """See `interface.Kernels`. Threads are torch's own; `threads` is accepted and changes nothing."""

    name = "reference"
    chunk = CHUNK  # elements at a time

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads
        self._words, self._integers, self._digest = words, integers, digest
        self._tables: dict[torch.device, torch.Tensor] = {}

    def _table(self, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            self._tables[device] = torch.tensor(noise.TABLE.astype("int64"), device=device)
        return self._tables[device]

    def _noise(
        self, seed: int, tid: int, region: Region, device: torch.device
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Per chunk: where it is in the slice, and m of its elements."""
        address, table = _address(seed, tid, noise.TAG_EPS, device), self._table(device)
        for part, index in _chunks(region, device, self.chunk):
            yield part, self._integers(address, index, table)

    def fill(self, seed: int, tid: int, region: Region, out: torch.Tensor) -> None:
        check_address(seed, tid)
        check_out(out, region)
        flat = out.view(-1)
        for part, m in self._noise(seed, tid, region, out.device):
            flat[part] = m.to(torch.int32)

    def perturb(
        self,
        master: torch.Tensor,
        live: torch.Tensor,
        seed: int,
        tid: int,
        region: Region,
        sigma: float,
        sign: int,
    ) -> None:
        check_address(seed, tid)
        check_master(master, region)
        check_live(master, live)
        scale = noise_scale(sigma, sign)
        source, target = master.detach().view(-1), live.detach().view(-1)
        for part, m in self._noise(seed, tid, region, master.device):
            _store(_load(source[part]) + m.to(torch.float32) * scale, target[part])

    def restore(self, master: torch.Tensor, live: torch.Tensor) -> None:
        check_master(master)
        check_live(master, live)
        source, target = master.detach().view(-1), live.detach().view(-1)
        for first in range(0, master.numel(), self.chunk):
            part = slice(first, first + self.chunk)
            _store(_load(source[part]), target[part])

    def update(self, master: torch.Tensor, steps: Sequence[Step], tid: int, region: Region) -> list[int]:
        check_address(0, tid)
        check_master(master, region)
        digests = [0] * len(steps)
        flat = master.detach().view(-1)
        place = _address(0, tid, 0, master.device)
        for part, index in _chunks(region, master.device, self.chunk):
            for k, step in enumerate(steps):
                self._apply(flat[part], step, tid, index)
                digests[k] = (digests[k] + int(self._digest(_load(flat[part]), place, index))) % U64
        return digests

    def _apply(self, master: torch.Tensor, step: Step, tid: int, index: torch.Tensor) -> None:
        device, total = index.device, torch.zeros_like(index)
        for seed, c in zip(step.seeds, step.c, strict=True):
            address = _address(seed, tid, noise.TAG_EPS, device)
            total += c * self._integers(address, index, self._table(device))
        moved = _load(master) + total.to(torch.int32).to(torch.float32) * 2.0**-step.shift
        if master.dtype == torch.float32:
            master.copy_(moved)
            return
        random = self._words(_address(step.rounding_seed, tid, noise.TAG_ROUNDING, device), index)
        master.view(torch.int16).copy_((_bits(moved) + (random >> 16)) >> 16)

    def digest(self, master: torch.Tensor, tid: int, region: Region) -> int:
        check_address(0, tid)
        check_master(master, region)
        flat, place = master.detach().view(-1), _address(0, tid, 0, master.device)
        parts = _chunks(region, master.device, self.chunk)
        return sum(int(self._digest(_load(flat[part]), place, index)) for part, index in parts) % U64
