"""An engine without a model: answers and likelihoods are functions of prompt and perturbation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from esnode.engines.interface import Cancelled, Sampling, StopCheck, never
from protocol.entries import Entry


class FakeEngine:
    """`answer(prompt ids, stream)` gives the new ids; what is done is noted in `calls` and `batches`."""

    def __init__(self, answer: Callable[[Sequence[int], int], list[int]] | None = None) -> None:
        self.fingerprint, self.backend = b"fakefake", "none"
        self.broken: tuple[int, ...] = ()
        self.break_rows: tuple[int, ...] = ()  # rows of every batch that become unusable
        self.perturbed: tuple[int, float, int] | None = None
        self.calls: list[str] = []
        self.batches: list[list[tuple[int, ...]]] = []
        self.samplings: list[Sampling] = []
        self.streams: list[list[int]] = []
        self.answer = answer or (lambda prompt, stream: list(prompt[-3:]))

    def perturb(self, seed: int, sigma: float, sign: int) -> None:
        self.perturbed = (seed, sigma, sign)
        self.calls.append("perturb")

    def restore(self) -> None:
        self.perturbed = None
        self.calls.append("restore")

    def apply(self, entries: Sequence[Entry]) -> list[int]:
        return [0] * len(entries)

    def digest(self) -> int:
        return 0

    def read(self, name: str) -> np.ndarray:
        raise KeyError(name)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        stop: StopCheck = never,
    ) -> list[list[int]]:
        self._begin("generate", prompts, stop)
        self.samplings.append(sampling)
        self.streams.append(list(streams))
        answers = [
            self.answer(prompt, stream)[: sampling.max_new_tokens]
            for prompt, stream in zip(prompts, streams, strict=False)
        ]
        return [[] if row in self.broken else answer for row, answer in enumerate(answers)]

    def loglik(
        self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], stop: StopCheck = never
    ) -> list[float]:
        self._begin("loglik", prompts, stop)
        shift = 0.25 * self.perturbed[2] if self.perturbed else 0.0
        values = [
            -len(target) * (1.0 + shift) - sum(prompt) % 7
            for prompt, target in zip(prompts, targets, strict=True)
        ]
        return [float("-inf") if row in self.broken else value for row, value in enumerate(values)]

    def _begin(self, call: str, prompts: Sequence[Sequence[int]], stop: StopCheck) -> None:
        self.calls.append(call)
        self.batches.append([tuple(prompt) for prompt in prompts])
        self.broken = tuple(row for row in self.break_rows if row < len(prompts))
        for _ in range(3):  # decode steps
            if stop():
                raise Cancelled
