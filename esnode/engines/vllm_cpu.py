"""What vLLM's CPU backend does otherwise for us: read weights that may change, and normalise in one call.

vLLM packs linear weights at load and does not see later writes: its layers are told to read the plain ones,
and `packing` makes packed copies of a member's when they pay.

`prepare` changes vLLM for this process, before it builds a model. Imports vLLM only inside functions. Called
by `vllm_start.py` and, in a rank's process, by `vllm_worker.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from esnode.engines.packing import Packing

PROVIDER = "esnode"
NORMS = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}  # for vLLM's `ir_op_priority`
_LANES = 8  # a row of vLLM's own kernels is a multiple of it


def prepare() -> None:
    """Change vLLM in this process; NORMS may be asked for from then on."""
    read_plain_weights()
    fuse_norms()


def read_plain_weights() -> None:
    """Let linear layers read `weight` at every call instead of a packed copy made at load."""
    from vllm.model_executor.layers import utils

    packed = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        else:
            packed(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def fuse_norms() -> None:
    """Offer vLLM's own kernels for root mean square norms as PROVIDER.

    On x86 it takes eight calls of torch for one norm, and at each of them all threads wait for each other.
    """
    from vllm import ir

    if PROVIDER in ir.ops.rms_norm.impls:
        return

    def plain(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
        return out

    def adding(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    def suits(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        whole = variance_size is None and x.shape[-1] % _LANES == 0
        return whole and weight is not None and weight.dtype == x.dtype

    def suits_adding(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> bool:
        dense = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
        return dense and suits(x, weight, epsilon, variance_size)

    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=suits)(plain)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=suits_adding, inplace=True)(adding)


def packing(model: nn.Module) -> Packing:
    """Packed copies of the layers that `read_plain_weights` is about; an embedding multiplies nothing."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    found = [
        layer
        for layer in model.modules()
        if layer.__dict__.get("cpu_linear") is nn.functional.linear
        and (isinstance(layer, ParallelLMHead) or not isinstance(layer, VocabParallelEmbedding))
    ]
    return Packing(found, "cpu_linear")
