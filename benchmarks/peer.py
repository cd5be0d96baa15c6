"""The way other implementations make their noise, for `noise.py` and `gpu_kernels.py` to run beside ours.

Live weights alone, perturbed in place: for every tensor `Generator.manual_seed`, `torch.randn` in the live
dtype, one in-place `add_`; for the update once per member. Its bits differ by GPU model, but only its time
counts here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Peer:
    """Perturbs and updates these tensors, all of one dtype and device, where they lie."""

    def __init__(self, weights: Sequence[torch.Tensor], members: int, sigma: float) -> None:
        self.weights, self.members, self.sigma = weights, members, sigma
        self.generator = torch.Generator(weights[0].device)

    def perturb(self) -> None:
        for weight in self.weights:
            self._add(weight, 7, self.sigma)

    def update(self) -> None:
        for weight in self.weights:
            for seed in range(self.members):
                self._add(weight, seed, (-1) ** seed * 1e-5)

    def _add(self, weight: torch.Tensor, seed: int, factor: float) -> None:
        self.generator.manual_seed(seed)
        noise = torch.randn(weight.shape, dtype=weight.dtype, device=weight.device, generator=self.generator)
        weight.add_(noise, alpha=factor)
