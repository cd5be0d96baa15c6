"""Numbers with error bars. Lives here: pass@k, its confidence interval, intervals of means and shares.

Pure apart from numpy. Called by `evaluate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
NO_INTERVAL = "none: one prompt"
_Z = 1.959963984540054  # two-sided 95% quantile of the normal distribution


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95% interval over prompts; `method` names how the interval was made."""

    value: float
    low: float
    high: float
    method: str

    @property
    def interval(self) -> str:
        """The interval in words."""
        return "-" if self.method == NO_INTERVAL else f"{self.low:.4f} to {self.high:.4f}"


def pass_at(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k answers is right, from `correct` of `samples` (Chen et al. 2021).

    1 - C(samples - correct, k) / C(samples, k), in exact arithmetic. Needs 1 <= k <= samples.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= {samples} samples and 0 <= {correct} correct of them")
    return float(1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k)))


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, ... up to `samples`."""
    return [1 << bit for bit in range(samples.bit_length())] if samples > 0 else []


def share(right: int, total: int) -> Estimate:
    """A share of independent prompts, with Wilson's interval: never empty, also for 0 and for all."""
    if total < 1:
        raise ValueError("a share of nothing")
    p, square = right / total, _Z * _Z
    centre = (p + square / (2 * total)) / (1 + square / total)
    half = _Z * math.sqrt(p * (1 - p) / total + square / (4 * total * total)) / (1 + square / total)
    low = 0.0 if right == 0 else centre - half  # exactly, where rounding would leave 1e-17
    high = 1.0 if right == total else centre + half
    return Estimate(p, low, high, "Wilson")


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt, with a percentile bootstrap interval over prompts.

    The resampling is seeded, so that equal values give an equal interval. One value has none.
    """
    if not values:
        raise ValueError("the mean of nothing")
    if len(values) == 1:
        return Estimate(values[0], values[0], values[0], NO_INTERVAL)
    data = np.asarray(values, np.float64)
    picks = np.random.default_rng(0).integers(0, data.size, (RESAMPLES, data.size))
    low, high = np.quantile(data[picks].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(math.fsum(values) / data.size, float(low), float(high), "bootstrap")
