"""Deterministic choices for tasks that invent their items. Standard library only.

Only `random.Random.random` keeps its sequence across Python versions; `randint`, `choice` and `shuffle` do
not, and the same plan must give the same items everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of choices that depends on the seed only."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self._random() * (high - low + 1))

    def one_of(self, choices: Sequence[T]) -> T:
        """One element."""
        return choices[self.between(0, len(choices) - 1)]

    def take(self, pool: list[T]) -> T:
        """One element, removed from the pool."""
        return pool.pop(self.between(0, len(pool) - 1))
