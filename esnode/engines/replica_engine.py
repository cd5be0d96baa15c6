"""What every engine with one replica in its process does alike: moving the weights. Decoding differs.

Called by `transformers_engine.py` and `vllm_engine.py`, which inherit from it. May import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from esnode.engines.interface import Sampling, StopCheck, never
from esnode.engines.shortage import Room
from esnode.kernels.interface import Kernels, Region
from esnode.manifest import WrongBase
from esnode.replica import Replica
from esnode.state import DTYPES, Pieces
from protocol import seeds
from protocol.bodies import Entry
from protocol.lock import Lock
from protocol.pieces import Piece

if TYPE_CHECKING:
    from esnode.engines.vllm_ranks import RankedReplica
    from protocol.chain import Chain


def require_base(lock: Lock, replica: Replica | RankedReplica, folder: Path) -> None:
    """WrongBase unless the replica is the state the lock starts from; a fork's is made by its parents."""
    if lock.parent is None and replica.leads and replica.digest() != lock.digest:
        raise WrongBase(
            f"{folder} is not the base model {lock.model!r} of this run: its digest is "
            f"{replica.digest():016x}, the run starts from {lock.digest:016x}. Name the folder, GGUF file or "
            "hub id the run was started from."
        )


class ReplicaEngine(ABC):
    """An `interface.Engine` with one replica. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        lock: Lock,
        replica: Replica | RankedReplica,
        kernels: Kernels,
        fingerprint: bytes,
    ) -> None:
        self.lock = lock
        self._replica = replica
        self._kernels = kernels
        self._fingerprint = fingerprint
        self.room = Room()

    @property
    @abstractmethod
    def broken(self) -> tuple[int, ...]:
        """Rows of the last `generate` or `loglik` whose logits were NaN or infinite: their answers are worth
        the task's floor. `generate` gave them [], `loglik` -inf.
        """

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        stop: StopCheck = never,
    ) -> list[list[int]]:
        """New token ids per prompt, stop id excluded. `streams[k]` (u64) keys row k's random stream when
        sampling. Raises OutOfMemory when a batch does not fit; the next call makes smaller ones.
        """

    @abstractmethod
    def loglik(
        self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], stop: StopCheck = never
    ) -> list[float]:
        """Sum of log p(target tokens | prompt) per row, teacher-forced, in nats."""

    def forget(self) -> None:  # noqa: B027  an engine that keeps nothing has nothing to drop
        """Drop whatever was computed from the live weights: they are about to change."""

    def close(self) -> None:  # noqa: B027  nor one without processes anything to end
        """End the processes of the engine."""

    @property
    def fingerprint(self) -> bytes:
        """8 bytes over everything that may change an answer; thread counts do not, a bound on rows does."""
        return self.room.fingerprint(self._fingerprint)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence this engine takes, answer included; 0 where only the model bounds
        it.
        """
        return 0

    @property
    def backend(self) -> str:
        """Name of the kernel implementation in use."""
        return self._kernels.name

    def perturb(self, seed: int, sigma: float, sign: int) -> None:
        """Live weights become master + sign * sigma * eps(seed)."""
        self.forget()
        self._replica.perturb(seed, sigma, sign)

    def restore(self) -> None:
        """Live weights become the rounded master."""
        self.forget()
        self._replica.restore()

    def apply(self, entries: Sequence[Entry]) -> list[int]:
        """Fold ledger entries into the master in one pass; D after each. Live weights become the rounded
        master.
        """
        self.forget()
        return self._replica.apply(entries)

    @property
    def leads(self) -> bool:
        """Whether the master is this engine's to write: else `apply` and all that move it raise NotLeader."""
        return self._replica.leads

    @property
    def host_path(self) -> str | None:
        """What other engines attach to, of a master in host memory."""
        return self._replica.host_path

    def refresh(self) -> int:
        """Live weights of what the leader of a shared master wrote meanwhile; D."""
        self.forget()
        return self._replica.refresh()

    def reset(self) -> int:
        """Read the base checkpoint again; its D. For a fork, `replay` the parents' chains next."""
        self.forget()
        return self._replica.reset()

    def chunk(self, array: int, first: int, end: int) -> NDArray[np.uint8]:
        """Bytes of one master, for `esnode.checkpoint`. May be called from another thread between applies."""
        return self._replica.chunk(array, first, end)

    def digest_of(self, name: str, first: int, data: NDArray[np.uint8]) -> int:
        """What bytes of a tensor's master, from element `first` on, add to D. From any thread."""
        values = torch.from_numpy(data).view(DTYPES[self.lock.master]).to(self.device)
        return self._kernels.digest(values, seeds.tensor_key(name), Region.whole(len(values), first))

    def refill(self, pieces: Pieces) -> int:
        """Overwrite masters and live weights with those of a snapshot; D."""
        self.forget()
        return self._replica.refill(pieces)

    @property
    def kernels(self) -> Kernels:
        """The kernels that move this engine's master."""
        return self._kernels

    @property
    def device(self) -> str:
        """Where the master lies."""
        return self._replica.device

    def damaged(self) -> tuple[str, ...]:
        """Tensors whose master has changed by itself since it was written; reads all of it."""
        return self._replica.damaged()

    def piece_digests(self, pieces: Sequence[Piece]) -> list[int]:
        """Digest of a run of elements of the master, read from memory."""
        return self._replica.piece_digests(pieces)

    def overwrite(self, piece: Piece, values: torch.Tensor) -> None:
        """Write a run of the master, for what replay has derived."""
        self.forget()
        self._replica.overwrite(piece, values)

    def replay(self, chain: Chain, upto: int) -> int:
        """Fold the first `upto` rounds of an ancestor's chain (a fork's parent); D after them."""
        self.forget()
        return self._replica.replay(chain, upto)

    def digest(self) -> int:
        """D of the master."""
        return self._replica.digest()

    def live(self, name: str) -> torch.Tensor:
        """The live weights of one stored tensor, in its stored shape: memory of a model in this process."""
        assert isinstance(self._replica, Replica), "the model is in the ranks' processes"
        return self._replica.live(name)

    def read(self, name: str) -> np.ndarray:
        """float32 copy of one stored tensor's master (or frozen value), full shape, for export."""
        return self._replica.read(name)
