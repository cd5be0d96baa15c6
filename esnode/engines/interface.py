"""What a node asks of an engine: the types every engine shares. May import protocol only.

An engine receives token ids and stop ids, never text: rendering and tokenising happen once, in
`esnode.prompts`. Called by `worker.py`, `episodes.py` and `finish.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protocol.bodies import Entry
from protocol.errors import UserError

if TYPE_CHECKING:
    import numpy as np


class Cancelled(Exception):
    """Raised by an engine when `stop()` turned true between two decode steps."""


class EngineEnded(UserError):
    """A process of the engine is gone: nothing more can be had of it, by no other unit either.

    `rows`: what a new engine should take at once at most, where memory ran out; 0: any number.
    """

    rows = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes an engine will allocate, told before it does. `host`: what of the master is in host memory;
    `ranks`: processes that need as much each.
    """

    master: int
    live: int
    other: int
    available: int
    host: int = 0
    host_available: int = 0
    ranks: int = 1

    @property
    def total(self) -> int:
        return self.master + self.live + self.other

    @property
    def on_device(self) -> int:
        return self.total - self.host


StopCheck = Callable[[], bool]


def never() -> bool:
    """The stop check of work that nobody cancels."""
    return False


class Engine(Protocol):
    """One replica and the machinery to run it. Not thread-safe: one caller at a time."""

    @property
    def fingerprint(self) -> bytes:
        """8 bytes over all that may change an answer: engine, versions, dtype, device kind, batching."""

    @property
    def backend(self) -> str:
        """Name of the kernel implementation in use."""

    @property
    def broken(self) -> tuple[int, ...]:
        """Rows of the last `generate` or `loglik` with NaN or infinite logits; they get the task's floor."""

    def perturb(self, seed: int, sigma: float, sign: int) -> None:
        """Live weights become master + sign * sigma * eps(seed)."""

    def restore(self) -> None:
        """Live weights become the rounded master."""

    def apply(self, entries: Sequence[Entry]) -> list[int]:
        """Fold ledger entries into the master in one pass; D after each. Only commits change anything."""

    def digest(self) -> int:
        """D of the master."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        stop: StopCheck = never,
    ) -> list[list[int]]:
        """New token ids per prompt, stop id excluded. `streams[k]` (u64) keys row k's sampling."""

    def loglik(
        self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], stop: StopCheck = never
    ) -> list[float]:
        """Sum of log p(target tokens | prompt) per row, teacher-forced, in nats."""

    def read(self, name: str) -> np.ndarray:
        """float32 copy of one stored tensor's master (or frozen value), full shape, for export."""
