"""One rank of a tensor-parallel vLLM engine: the replica of its slices, in vLLM's own worker process.

vLLM mixes `RankWorker` into its worker class (`worker_extension_cls`), and importing this module changes how
vLLM's CPU layers read weights: only workers import it, by name, before they load a model. The engine's
process calls in through `vllm_ranks.py`; both ends are processes of one node, no peer's bytes come here.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from esnode import kernels as kernel_registry
from esnode import leash, manifest, placement, shardmap
from esnode.engines import vllm_cpu
from esnode.engines.shortage import is_shortage
from esnode.engines.vllm_start import EXIT_FAULT, EXIT_MEMORY, padded, through_loader
from esnode.hostmaster import HostMaster, Layout
from esnode.kernels.interface import Region
from esnode.parts import master_of
from esnode.replay import DamagedMaster
from esnode.replica import Replica
from esnode.shards import Shard, by_tensor
from esnode.state import DTYPES, Put
from protocol import seeds
from protocol.bodies import Entry
from protocol.errors import UserError
from protocol.lock import Lock, lock_from_bytes
from protocol.pieces import Piece

if current_platform.is_cpu():
    vllm_cpu.prepare()


class RankWorker:
    """What vLLM's worker class inherits: one method, whose name no version of vLLM has."""

    def esnode_rank(self, method: str, *arguments: Any) -> tuple[str, Any]:
        """A method of this rank's `Rank`: ("done", result), ("damaged", tensors), ("refused", sentence) or
        ("failed", words).
        """
        rank = self.__dict__.setdefault("_esnode_rank", None) or Rank(self)
        self.__dict__["_esnode_rank"] = rank
        try:
            return "done", getattr(rank, method)(*arguments)
        except DamagedMaster as error:
            return "damaged", error.tensors
        except UserError as error:
            return "refused", str(error)
        except Exception as error:  # answered like the rest: else answers of other ranks stay in their queues
            return "failed", f"{type(error).__name__}: {error}"


def _deadly(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, but a failure ends this process: others wait for it in a collective, for good."""

    def guarded(*arguments: Any, **options: Any) -> Any:
        try:
            return step(*arguments, **options)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(EXIT_MEMORY if is_shortage(error) else EXIT_FAULT)

    return guarded


class Rank:
    """The slices of one rank, from their map to their masters."""

    _lock: Lock
    _folder: Path
    _found: shardmap.Map
    _replica: Replica
    _filling: AbstractContextManager[Put]
    _put: Put

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.model_runner.model
        self._device = str(worker.device)
        for step in ("execute_model", "sample_tokens"):
            setattr(worker, step, _deadly(getattr(worker, step)))

    # ------------------------------------------------------------ loading

    def map(self, lock: bytes, folder: str) -> tuple[tuple[Shard, ...], dict[str, int]]:
        """The rank's slices, and what they fill of each parameter."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which ends its ranks itself
        leash.die_with_thread()  # the node's main one, which loads the engine
        self._lock, self._folder = lock_from_bytes(lock), Path(folder)
        live = DTYPES[self._lock.live_dtype]
        self._found = shardmap.find(self._model, self._lock.manifest, self._load, live, padded())
        return self._found.shards, self._found.covered

    def fill(self, ranks: Sequence[Sequence[Shard]], backend: str | None, in_host: bool) -> str:
        """Make the replica, its master on the device or in host memory; the name of the kernels.

        `ranks`: the slices of every rank, as `shards.settle` gives them.
        """
        cut, host = by_tensor(ranks[self._worker.rank]), None
        if in_host:
            trained = [spec.name for spec in self._lock.manifest if spec.trained]
            counts = {s.label: s.region.count for name in trained for s in cut.get(name, ())}
            host = HostMaster.create(Layout.of(self._lock, counts), self._device)
        kernels = placement.pick(self._device, backend, host)
        self._replica = Replica(
            self._model, self._found.views, self._lock, self._folder, kernels,
            device=self._device, host=host, shards=cut,
        )  # fmt: skip
        return kernels.name

    def _load(self, items: Iterator[tuple[str, torch.Tensor]]) -> None:
        through_loader(self._worker.vllm_config, self._model, items)

    def reloaded(self, seed: int, sigma: float, sign: int) -> list[str]:
        """Send this member through vLLM's loader, made of the base's whole tensors: parameters that change.

        The live weights must be that member's already. For the canary, before any round.
        """
        before = self._hashes()
        self._load(self._whole(partial(self._member, seed, sigma, sign)))
        return [name for name, digest in self._hashes().items() if digest != before[name]]

    def _hashes(self) -> dict[str, bytes]:
        return {
            name: hashlib.blake2b(parameter.detach().view(torch.uint8).cpu().numpy()).digest()
            for name, parameter in self._model.named_parameters()
        }

    def _whole(self, member: Callable[..., torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        live = DTYPES[self._lock.live_dtype]
        for spec, values in manifest.tensors(self._folder, self._lock.manifest):
            if spec.trained:
                yield spec.name, member(spec.name, values).view(spec.shape)
            elif spec.dtype in manifest.FLOATS.values():
                yield spec.name, torch.from_numpy(values).view(spec.shape).to(live)

    def _member(self, seed: int, sigma: float, sign: int, name: str, values: Any) -> torch.Tensor:
        master = master_of(values, self._lock.master)
        live = torch.empty(master.numel(), dtype=DTYPES[self._lock.live_dtype])
        key, region = seeds.tensor_key(name), Region.whole(master.numel())
        kernel_registry.pick("cpu").perturb(master, live, seed, key, region, sigma, sign)
        return live

    # ------------------------------------------------------------ working

    def state(self) -> tuple[int, dict[int, int]]:
        """(this rank's part of D, sums of what it shares with others)."""
        return self._replica.digest(), self._replica.state.shared()

    def shared_tensors(self) -> dict[tuple[str, int], int]:
        """Digests of the slices that it shares with others, by stored tensor and first index."""
        return {
            (part.shard.tensor, part.region.start): part.digest
            for part in self._replica.state.parts
            if part.shard.holders.bit_count() > 1
        }

    def perturb(self, seed: int, sigma: float, sign: int) -> None:
        self._replica.perturb(seed, sigma, sign)

    def restore(self) -> None:
        self._replica.restore()

    def apply(self, entries: Sequence[Entry], lock: bytes | None) -> list[int]:
        """`State.apply`, of this run's entries or those of the chain with this lock."""
        return self._replica.apply(entries, None if lock is None else lock_from_bytes(lock))

    def reset(self) -> None:
        self._replica.reset()

    def damaged(self) -> tuple[str, ...]:
        return self._replica.damaged()

    def held_bytes(self, array: int, first: int, end: int) -> list[tuple[Region, bytes]]:
        return self._replica.state.held_bytes(array, first, end)

    def refill_begin(self) -> None:
        """A snapshot follows in parts; until `refill_end` the masters are of no round."""
        self._filling = self._replica.refilling()
        self._put = self._filling.__enter__()

    def refill_more(self, array: int, first: int, data: bytes) -> None:
        self._put(array, first, data)

    def refill_end(self) -> None:
        self._filling.__exit__(None, None, None)

    def piece_digests(self, pieces: Sequence[Piece]) -> list[int]:
        return self._replica.piece_digests(pieces)

    def overwrite(self, piece: Piece, values: torch.Tensor) -> None:
        self._replica.overwrite(piece, values)
