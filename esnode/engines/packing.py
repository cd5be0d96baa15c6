"""Faster decoding in bf16 on CPUs: linear layers keep a copy of their weight in the processor's own layout.

oneDNN otherwise rearranges the weight at every call, which a decode step of a few rows does not pay back:
SmolLM2 generates 1.2 to 1.4 times faster for 0.12 s per change of weights and another copy of the weights.
The products have the same bits (checked before first use, else nothing is packed), so a node may pack or not.
Called by `decode.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WORTH = 8  # new tokens from which packing pays
_CHECKED_ROWS = (1, 5, 32, 130)


class Packing:
    """The packed copies of one model's linear layers: made by `use`, gone after `drop`."""

    def __init__(self, model: nn.Module, allowed: bool = True) -> None:
        layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
        self._linears = [layer for layer in layers if allowed and _suits(layer)]
        self._packed = False
        self._equal: bool | None = None

    @property
    def size(self) -> int:
        """Bytes of the packed copies."""
        return sum(layer.weight.numel() * layer.weight.element_size() for layer in self._linears)

    @torch.inference_mode()
    def use(self, rows: int) -> None:
        """Pack, for batches of about `rows` rows, unless it is done already or gives other bits on this
        machine.
        """
        if self._packed or not self._linears:
            return
        if self._equal is None:
            self._equal = self._gives_equal_bits(rows)
        if not self._equal:
            return
        self._packed = True  # first: `drop` must clean up after an interrupt
        for layer in self._linears:
            layer.__dict__["forward"] = _packed_product(layer, rows)

    def drop(self) -> None:
        """Must follow every change of the weights: a packed copy does not see it."""
        if self._packed:
            for layer in self._linears:
                layer.__dict__.pop("forward", None)
            self._packed = False

    def give_up(self) -> None:
        """Never pack again: there is no room for copies."""
        self.drop()
        self._linears = []

    def _gives_equal_bits(self, rows: int) -> bool:
        """One layer of each shape on made-up input, for few and many rows, against the plain product."""
        shapes = {tuple(layer.weight.shape): layer for layer in self._linears}
        generator = torch.Generator().manual_seed(1)
        for layer in shapes.values():
            packed = _packed_product(layer, rows)
            for count in _CHECKED_ROWS:
                made = torch.randn(count, 1, layer.in_features, generator=generator).to(layer.weight.dtype)
                if not torch.equal(packed(made), functional.linear(made, layer.weight, layer.bias)):
                    return False
        return True


def _suits(layer: nn.Linear) -> bool:
    weight = layer.weight
    if type(layer) is not nn.Linear or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return False
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _packed_product(layer: nn.Linear, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
    bias = layer.bias

    def forward(values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
        return result

    return forward
