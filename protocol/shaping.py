"""From the rewards of a round to the integer coefficients every node multiplies its noise with.

Pure (math only). Law version 1, section "Coefficients": float64, correctly rounded sums (`fsum`), squares by
one multiplication, members in index order; the integers are such that sum c_j * m_j fits int32 in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp, fsum, isfinite, ldexp, sqrt
from typing import Literal

Shaping = Literal["zscore", "ranks"]

MAX_MEMBERS = 4096
TARGET = 46000  # what the sum of |c| aims at
MAX_SUM = TARGET + MAX_MEMBERS // 2  # each rounding adds at most one half; times 44401 this is below 2^31
MAX_SHIFT = 96  # 2^-96 and all that is scaled by it stay far above float32's subnormals
MIN_SHIFT = -90  # and 2^31 * 2^90 far below its overflow
_SQRT_12 = 3.4641016151377544


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One integer per member; member i moves the master by c[i] * m_i * 2^-shift."""

    c: tuple[int, ...]
    shift: int


@dataclass(frozen=True, slots=True)
class Step:
    """One round ready for the kernels: noises with their coefficients, mirrored pairs already merged.

    `rounding_seed` is only read where the master is bf16. ValueError when it could overflow a kernel.
    """

    seeds: tuple[int, ...]
    c: tuple[int, ...]
    shift: int
    rounding_seed: int

    def __post_init__(self) -> None:
        if len(self.seeds) != len(self.c):
            raise ValueError(f"{len(self.seeds)} seeds but {len(self.c)} coefficients")
        if sum(map(abs, self.c)) > MAX_SUM:
            raise ValueError(f"the coefficients' magnitudes sum to more than {MAX_SUM}")
        if not MIN_SHIFT <= self.shift <= MAX_SHIFT:
            raise ValueError(f"shift {self.shift} is not within {MIN_SHIFT} .. {MAX_SHIFT}")
        if any(not 0 <= seed < 1 << 64 for seed in (*self.seeds, self.rounding_seed)):
            raise ValueError("a seed is not a u64")


def mean_and_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation by the law: fsum, squares by one multiplication."""
    n = len(rewards)
    try:
        mean = fsum(rewards) / n
    except OverflowError:  # finite numbers whose sum is none
        raise ValueError("the rewards are too large to be added") from None
    distances = [r - mean for r in rewards]
    return mean, sqrt(fsum(d * d for d in distances) / n)


def _zscores(rewards: Sequence[float], std_floor: float) -> list[float]:
    mean, std = mean_and_std(rewards)
    return [(r - mean) / (max(std, std_floor) + 1e-8) for r in rewards]


def _centred_ranks(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    order = sorted(rewards)
    first: dict[float, int] = {}
    last: dict[float, int] = {}
    for rank, reward in enumerate(order):
        first.setdefault(reward, rank)
        last[reward] = rank
    mean_rank = {reward: (first[reward] + last[reward]) / 2 for reward in first}
    return [(mean_rank[r] / (n - 1) - 0.5) * _SQRT_12 for r in rewards]


def _check(rewards: Sequence[float], alpha: float, clip: float, std_floor: float) -> None:
    if not 2 <= len(rewards) <= MAX_MEMBERS:
        raise ValueError(f"{len(rewards)} members: a round needs 2 to {MAX_MEMBERS}")
    if not all(map(isfinite, rewards)):
        raise ValueError("a reward is not a finite number")
    if not isfinite(alpha):
        raise ValueError(f"alpha {alpha} is not a finite number")
    if not (isfinite(clip) and clip >= 0 and isfinite(std_floor) and std_floor >= 0):
        raise ValueError(f"clip {clip} and std_floor {std_floor} must be finite and not negative")


def coefficients(
    rewards: Sequence[float],
    alpha: float,
    shaping: Shaping,
    clip: float = 0.0,
    std_floor: float = 0.0,
) -> Coefficients | None:
    """Integers for the members of a commit, in its order; None when the round moves nothing (no spread).

    clip 0 means none. ValueError on NaN, infinities, an unknown shaping, or a member count outside 2 .. 4096.
    """
    _check(rewards, alpha, clip, std_floor)
    if shaping not in ("zscore", "ranks"):
        raise ValueError(f"shaping {shaping!r} is not zscore or ranks")
    if max(rewards) == min(rewards):  # the mean of equal numbers may differ from them by an ulp: ask first
        return None
    z = _zscores(rewards, std_floor) if shaping == "zscore" else _centred_ranks(rewards)
    if clip > 0:
        z = [min(max(value, -clip), clip) for value in z]
    n = len(rewards)
    weights = [((alpha * value) / n) * 2.0**-13 for value in z]
    size = fsum(abs(w) for w in weights)
    if size < 2.0**-80:
        return None
    if not isfinite(size):
        raise ValueError(f"alpha {alpha} makes a step that is not a finite number")
    shift = frexp(TARGET / size)[1] - 1
    if shift > MAX_SHIFT:
        return None
    c = tuple(round(ldexp(w, shift)) for w in weights)  # Python rounds halves to even
    if sum(map(abs, c)) > MAX_SUM:
        raise AssertionError(f"sum of |c| exceeds {MAX_SUM}")
    return Coefficients(c, shift)


def merge_pairs(c: Sequence[int]) -> tuple[int, ...]:
    """Mirrored members come in pairs (+, -) of one noise: its coefficient is c(+) - c(-)."""
    if len(c) % 2:
        raise ValueError(f"{len(c)} mirrored members do not make whole pairs")
    return tuple(plus - minus for plus, minus in zip(c[::2], c[1::2], strict=True))


def make_step(
    found: Coefficients | None, seeds: Sequence[int], *, mirrored: bool, rounding_seed: int
) -> Step | None:
    """The step of one commit from its members' coefficients and seeds, both in index order.

    Mirrored pairs merge; a noise whose coefficient is 0 is left out. None when the round has no update. A
    step without noises still is one: adding +0 turns a master's -0 into +0, and everybody must do so.
    """
    if found is None:
        return None
    c: Sequence[int] = found.c
    if mirrored:
        if list(seeds[::2]) != list(seeds[1::2]):
            raise ValueError("the two sides of a mirrored pair do not share a seed")
        seeds, c = seeds[::2], merge_pairs(c)
    kept = [(seed, weight) for seed, weight in zip(seeds, c, strict=True) if weight]
    return Step(
        seeds=tuple(seed for seed, _ in kept),
        c=tuple(weight for _, weight in kept),
        shift=found.shift,
        rounding_seed=rounding_seed,
    )
