"""Faster decoding in bf16 on CPUs: linear layers keep a copy of their weight in the processor's own layout.

oneDNN otherwise rearranges the weight at every call, which a decode step of a few rows does not pay back:
SmolLM2 generates 1.2 to 1.4 times faster for 0.12 s per change of weights and another copy of the weights.
The products have the same bits (checked before first use, else nothing is packed), so a node may pack or not.
Called by `decode.py`, and for vLLM's layers by `vllm_cpu.py` and `vllm_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from esnode import memory, reservations

WORTH = 8  # new tokens from which packing pays
_CHECKED_ROWS = (1, 5, 32, 130)


class Packing:
    """The packed copies of linear layers: made by `use`, gone after `drop`."""

    def __init__(self, layers: Iterable[Any], place: str = "forward") -> None:
        """`place`: the attribute of a layer that multiplies, called with values or (values, weight, bias)."""
        self._linears = [layer for layer in layers if _suits(layer)]
        self._place = place
        self._plain = [layer.__dict__.get(place) for layer in self._linears]
        self._packed = False
        self._equal: bool | None = None

    @property
    def size(self) -> int:
        """Bytes of the packed copies."""
        return sum(layer.weight.numel() * layer.weight.element_size() for layer in self._linears)

    @torch.inference_mode()
    def use(self, rows: int) -> None:
        """Pack, for batches of about `rows` rows, unless it is done already, gives other bits on this
        machine, or not every engine that runs here could do so now.
        """
        if self._packed or not self._linears:
            return
        if self.size * max(1, reservations.engines()) > memory.available():
            return
        if self._equal is None:
            self._equal = self._gives_equal_bits(rows)
        if not self._equal:
            return
        self._packed = True  # first: `drop` must clean up after an interrupt
        for layer in self._linears:
            layer.__dict__[self._place] = _packed_product(layer, rows)

    def drop(self) -> None:
        """Must follow every change of the weights: a packed copy does not see it."""
        if self._packed:
            for layer, plain in zip(self._linears, self._plain, strict=True):
                layer.__dict__.pop(self._place, None)
                if plain is not None:
                    layer.__dict__[self._place] = plain
            self._packed = False

    def give_up(self) -> None:
        """Never pack again: there is no room for copies."""
        self.drop()
        self._linears, self._plain = [], []

    def _gives_equal_bits(self, rows: int) -> bool:
        """One layer of each shape on made-up input, for few and many rows, against the plain product."""
        shapes = {tuple(layer.weight.shape): layer for layer in self._linears}
        generator = torch.Generator().manual_seed(1)
        for layer in shapes.values():
            packed, bias = _packed_product(layer, rows), getattr(layer, "bias", None)
            for count in _CHECKED_ROWS:
                made = torch.randn(count, 1, layer.weight.shape[1], generator=generator).to(
                    layer.weight.dtype
                )
                if not torch.equal(packed(made), functional.linear(made, layer.weight, bias)):
                    return False
        return True


def linears(model: nn.Module) -> list[nn.Module]:
    """The linear layers of a model of transformers."""
    return [layer for layer in model.modules() if type(layer) is nn.Linear]


def _suits(layer: Any) -> bool:
    if layer.weight.dtype != torch.bfloat16 or layer.weight.device.type != "cpu":
        return False
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _packed_product(layer: Any, rows: int) -> Callable[..., torch.Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
    own = getattr(layer, "bias", None)

    def product(
        values: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = own
    ) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(values, packed, bias, "none", [], "")
        return result

    return product
