"""The pieces a replica is compared in: every trained tensor cut into runs of equal length.

Pure. Coordinator and nodes derive the same list from the lock, so a piece travels as its number. Small enough
that the slow reference kernel re-derives one in seconds, few enough that their digests fit a message or two.
Called by `coordinator.disputes`, `esnode.proof` and `esnode.rederive`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.lock import Lock

SMALLEST = 1 << 15  # elements of a piece
MOST = 4096  # pieces aimed at; a tensor has at least one


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` consecutive elements of a tensor, row-major, from index `first`."""

    tensor: str
    first: int
    count: int

    def __str__(self) -> str:
        return f"{self.tensor} [{self.first} .. {self.first + self.count - 1}]"


def pieces_of(lock: Lock) -> list[Piece]:
    """All pieces of the run's state, tensors in manifest order."""
    sizes = [(spec.name, math.prod(spec.shape)) for spec in lock.manifest if spec.trained]
    sizes = [(name, size) for name, size in sizes if size]
    length = SMALLEST
    while sum(-(-size // length) for _, size in sizes) > max(MOST, len(sizes)):
        length *= 2
    return [
        Piece(name, first, min(length, size - first))
        for name, size in sizes
        for first in range(0, size, length)
    ]
