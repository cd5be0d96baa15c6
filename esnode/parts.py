"""One master in memory: of a stored tensor, or of the slice of it that a process holds; how it is made.

May import torch. Called by `state.py`, `replica.py`, `rederive.py` and `manifest.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from esnode.kernels.interface import Region
from esnode.shards import Shard
from protocol import noise, seeds
from protocol.errors import UserError
from protocol.lock import TensorSpec

FP16_LIMIT = 32768.0  # a perturbed weight must stay below fp16's 65504


class StateError(UserError):
    """Weights that cannot be trained as asked, or a ledger that does not lead to the state it claims."""


@dataclass(slots=True)
class Part:
    """One trained tensor, or the slice of it that this process holds: `master` is 1-D fp32 or bf16.

    `spec` has the slice's shape under the slice's label. `digest` is what was written last; what is read
    later must have it too.
    """

    spec: TensorSpec
    shard: Shard
    master: torch.Tensor
    digest: int = 0

    @property
    def key(self) -> int:
        """The full tensor's."""
        return seeds.tensor_key(self.shard.tensor)

    @property
    def region(self) -> Region:
        """Its place in the full tensor."""
        return self.shard.region


def master_of(values: NDArray[np.float32], dtype: str) -> torch.Tensor:
    """The master of a float32 image; it takes over the array's memory when it is float32 too."""
    if dtype == "float32":
        return torch.from_numpy(values)
    return torch.from_numpy(noise.round_bf16(values).view(np.int16)).view(torch.bfloat16)


def require_small(spec: TensorSpec, values: NDArray[np.float32]) -> None:
    """StateError when a value is too large for float16 live weights."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest > FP16_LIMIT:
        raise StateError(
            f'{spec.name} holds {largest:.0f}, too large for live_dtype = "float16" (limit '
            f'{FP16_LIMIT:.0f}). Use "bfloat16".'
        )
