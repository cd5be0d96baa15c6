"""Master and live weights of one model in one process: perturb, restore, apply, digest.

The master is `state.State`; the live weights are the model's own parameters, rewritten in place from the
master and never subtracted from (law L3). Called by the engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esnode import manifest
from esnode.engines.interface import MemoryPlan
from esnode.hostmaster import HostMaster
from esnode.kernels.interface import Kernels, Region, Slice
from esnode.parts import Part
from esnode.shards import Shards
from esnode.slicemap import Views
from esnode.state import DTYPES, Pieces, Put, State
from protocol.bodies import Entry
from protocol.lock import Lock, TensorSpec
from protocol.pieces import Piece

if TYPE_CHECKING:
    from protocol.chain import Chain


class Replica:
    """Live weights kept as the rounded master, or as the rounded master plus one member's noise."""

    def __init__(
        self,
        model: nn.Module,
        views: Views,
        lock: Lock,
        folder: str | Path,
        kernels: Kernels,
        *,
        device: str = "cpu",
        host: HostMaster | None = None,
        shards: Shards | None = None,
    ) -> None:
        """Fill a model from its checkpoint. `views` maps stored names to its memory; both come from
        `slicemap.build`. With `shards`, one rank's, `views` maps their labels; both come from `shardmap`.

        A view of another dtype than the lock's live dtype (a model computed in float32 because the CPU is
        slow in bf16) receives the same rounded values. `host` holds the masters if not `device`. Errors as of
        `State.load`.
        """
        self._views = views
        self._live = DTYPES[lock.live_dtype]
        self._kernels = kernels
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        trained = [spec.name for spec in lock.manifest if spec.trained]
        if shards is not None:
            trained = [shard.label for name in trained for shard in shards.get(name, ())]
        sizes = [views[name].numel() for name in trained if not self._direct(name)]
        self._scratch = torch.empty(max(sizes, default=0), dtype=self._live, device=device)
        self.state = State.load(
            lock,
            folder,
            kernels,
            device=device,
            host=host,
            frozen=self._freeze,
            visit=self._restore_part,
            shards=shards,
        )

    def _direct(self, name: str) -> bool:
        """Whether a kernel can write into the parameter itself."""
        view = self._views[name]
        return view.dtype == self._live and view.is_contiguous()

    def _target(self, part: Part) -> torch.Tensor:
        """Flat memory of the live dtype for a kernel to write: the parameter's own or the scratch."""
        name = part.spec.name
        return self._views[name].view(-1) if self._direct(name) else self._scratch[: part.master.numel()]

    def _slices(self) -> list[Slice]:
        """What kernels can write directly, in one call: threads meet once and not once per tensor."""
        return [
            Slice(part.master, self._target(part), part.key, part.region)
            for part in self.state.parts
            if self._direct(part.spec.name)
        ]

    def _settle(self, part: Part, written: torch.Tensor) -> None:
        """Carry what a kernel wrote into the scratch over to the parameter."""
        if not self._direct(part.spec.name):
            self._views[part.spec.name].copy_(written.view(part.spec.shape))

    def _restore_part(self, part: Part) -> None:
        written = self._target(part)
        self._kernels.restore(part.master, written)
        self._settle(part, written)

    def _freeze(self, spec: TensorSpec, values: NDArray[Any]) -> None:
        """A frozen tensor's live weights: its stored value, rounded like a trained one where it is a
        parameter.

        Integers are in the model already (`slicemap`), buffers keep the precision the model gives them.
        """
        view = self._views.get(spec.name)
        if view is None or spec.dtype not in manifest.FLOATS.values():
            return
        array = torch.from_numpy(values).view(spec.shape)
        view.copy_(array.to(self._live) if view.untyped_storage().data_ptr() in self._weights else array)

    def perturb(self, seed: int, sigma: float, sign: int) -> None:
        """Live weights become round(master + sign * sigma * eps(seed)); the master is only read."""
        self.state.require_whole()
        self._kernels.perturb_many(self._slices(), seed, sigma, sign)
        for part in self.state.parts:
            if not self._direct(part.spec.name):
                written = self._target(part)
                self._kernels.perturb(part.master, written, seed, part.key, part.region, sigma, sign)
                self._settle(part, written)

    def restore(self) -> None:
        """Live weights become the rounded master."""
        self.state.require_whole()
        self._kernels.restore_many(self._slices())
        for part in self.state.parts:
            if not self._direct(part.spec.name):
                self._restore_part(part)

    def apply(self, entries: Sequence[Entry], lock: Lock | None = None) -> list[int]:
        """Fold ledger entries into the master in one pass; D after each. Live weights become the rounded
        master. `lock` as of `State.apply`.
        """
        return self.state.apply(entries, self._restore_part, lock)

    def refresh(self) -> int:
        """Live weights of what the leader of a shared master wrote; D. Errors as of `State.refresh`."""
        return self.state.refresh(self._restore_part)

    def reset(self) -> int:
        """Masters and live weights of the base checkpoint again; its D."""
        return self.state.reset(self._restore_part)

    def chunk(self, array: int, first: int, end: int) -> NDArray[np.uint8]:
        """Bytes of one master, as of `State.chunk`."""
        return self.state.chunk(array, first, end)

    def refill(self, pieces: Pieces) -> int:
        """Masters and live weights of a snapshot, as of `State.refill`; D."""
        return self.state.refill(pieces, self._restore_part)

    def refilling(self) -> AbstractContextManager[Put]:
        """`State.refilling`, live weights included."""
        return self.state.refilling(self._restore_part)

    def damaged(self) -> tuple[str, ...]:
        """Tensors whose master has changed by itself, as of `State.damaged`."""
        return self.state.damaged()

    def piece_digests(self, pieces: Sequence[Piece]) -> list[int]:
        """Digests of runs of elements of the master, read from memory."""
        return [self.state.piece_digest(piece) for piece in pieces]

    def overwrite(self, piece: Piece, values: torch.Tensor) -> None:
        """Write a run of the master; its tensor's live weights become the rounded master."""
        self.state.overwrite(piece, values, self._restore_part)

    def replay(self, chain: Chain, upto: int) -> int:
        """Fold the first `upto` rounds of an ancestor's chain; D after them. Errors as of `State.replay`."""
        return self.state.replay(chain, upto, self._restore_part)

    def digest(self) -> int:
        """D of the master."""
        return self.state.digest()

    @property
    def backend(self) -> str:
        """Name of the kernels."""
        return self._kernels.name

    @property
    def leads(self) -> bool:
        """Whether the masters are this process's to write."""
        return self.state.leads

    @property
    def host_path(self) -> str | None:
        """What other processes attach to, for masters in shared memory."""
        return self.state.host_path

    @property
    def device(self) -> str:
        """Where the master lies."""
        return str(self.state.parts[0].master.device)

    def read(self, name: str) -> NDArray[np.float32]:
        """float32 copy of a tensor's master (or frozen value), full shape."""
        return self.state.read(name)

    def holds(self, name: str) -> bool:
        """Whether the model has a place for this stored tensor."""
        return name in self._views

    def live(self, name: str) -> torch.Tensor:
        """The live weights of one stored tensor, in its stored shape: the model's own memory."""
        return self._views[name]

    def live_digest(self, name: str) -> int:
        """u64 over the bits of one stored tensor's live weights."""
        flat = self._views[name].contiguous().view(-1)
        bits = flat if flat.dtype == torch.float32 else flat.view(torch.bfloat16)
        return self._kernels.digest(bits, 0, Region.whole(bits.numel()))


def memory_plan(lock: Lock, compute: torch.dtype, work: int, available: int) -> MemoryPlan:
    """Bytes of a replica of the lock's model computed in `compute`, with `work` bytes for batches.

    The probe (a byte per weight) is gone before the masters come, so only what it needs beyond them counts.
    """
    sizes = {spec.name: math.prod(spec.shape) for spec in lock.manifest}
    trained = [sizes[spec.name] for spec in lock.manifest if spec.trained]
    master = sum(trained) * DTYPES[lock.master].itemsize
    live = sum(sizes.values()) * compute.itemsize
    scratch = 0 if compute == DTYPES[lock.live_dtype] else max(trained) * DTYPES[lock.live_dtype].itemsize
    image = 4 * max(sizes.values())
    probe = max(0, sum(sizes.values()) - master)
    return MemoryPlan(master, live, max(probe, scratch + image) + work, available)
