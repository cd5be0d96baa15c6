"""The slow law in the shape kernel tests want, and weights and steps to try it on."""

from __future__ import annotations

import importlib.util
import os
import random

import numpy as np
import torch

from protocol import noise
from protocol.shaping import MAX_SUM, Step

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels' module is imported
BACKENDS = ["reference", "cpu", *(["triton"] if importlib.util.find_spec("triton") else [])]
LIVE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOP = 2**62
STARTS = [0, 1, 31, 2**31 - 200, 2**32 - 200, 2**34 - 200, 2**34 + 77, 10**15, TOP - 5000]
SIGMA = 0.0019989013671875


def bits(tensor: torch.Tensor) -> np.ndarray:
    size = tensor.dtype.itemsize
    flat = tensor.reshape(-1).view(torch.int16 if size == 2 else torch.int32)
    return flat.numpy().view(np.uint16 if size == 2 else np.uint32)


def law_bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def weights(count: int, seed: int = 0) -> np.ndarray:
    """float32 weights of many sizes, with zeros of both signs and exact bf16 ties among them."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count) * 2.0 ** rng.integers(-26, 6, count)).astype(np.float32)
    ties = values.view(np.uint32)[::7]
    ties &= np.uint32(0xFFFF0000)
    ties |= np.uint32(0x8000)
    values[3::11] = 0.0
    values[4::11] = -0.0
    return values


def steps_for(count: int, seed: int = 0) -> list[Step]:
    draw = random.Random(seed)
    steps = []
    for _ in range(count):
        n = draw.randint(1, 9)
        share = MAX_SUM // n
        c = tuple(draw.choice([draw.randint(-share, share), share, -share]) for _ in range(n))
        seeds = tuple(draw.getrandbits(64) for _ in range(n))
        steps.append(Step(seeds, c, draw.choice([8, 38, 43, 64, 96]), draw.getrandbits(64)))
    return steps


def law_update(values, steps, tid, start, narrow=False):
    """Slow rounds on a contiguous run: final bits and the digest after each."""
    state, digests = values, []
    for step in steps:
        a = noise.weighted_sum(step.seeds, step.c, tid, start, len(values))
        if narrow:
            state = noise.update_bf16(state, a, step.shift, step.rounding_seed, tid, start)
            seen = (state.astype(np.uint32) << 16).view(np.float32)
        else:
            state = noise.update(state, a, step.shift)
            seen = state
        digests.append(noise.digest(seen, tid, start))
    return law_bits(state), digests
