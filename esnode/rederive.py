"""Replay of single tensors and pieces, apart from the master: what the replica proof compares it with.

A weight depends on nothing but itself and the ledger, so any run of elements can be replayed alone: one
tensor of the base is read, one piece of it moved, memory stays small. With the `reference` kernel it is the
slow truth of a dispute; with the node's own kernel it mends a tensor that memory has damaged. Called by
`workshop.py`, the former beside a running evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from esnode import manifest
from esnode.engines.replica_engine import ReplicaEngine
from esnode.kernels.interface import Kernels, Region
from esnode.kernels.reference import ReferenceKernels
from esnode.parts import master_of
from esnode.snapshot import Reader
from esnode.state import DTYPES
from protocol import seeds
from protocol.bodies import step_of
from protocol.chain import Chain
from protocol.entries import Entry
from protocol.lock import Lock
from protocol.pieces import Piece, pieces_of
from protocol.shaping import Step

FUSED = 64  # rounds per pass over a piece


class Rederiver:
    """The pieces of one node's master, held against replay. `derive` may run beside anything else."""

    def __init__(
        self, lock: Lock, folder: Path, engine: ReplicaEngine, ancestors: Sequence[tuple[Chain, int]]
    ) -> None:
        """`folder` is the base model's, `ancestors` those of a fork (see `ancestry.py`)."""
        self._lock = lock
        self._folder = folder
        self._engine = engine
        self._ancestors = ancestors
        self._pieces = pieces_of(lock)
        self._reference = ReferenceKernels()
        self._derived: dict[int, torch.Tensor] = {}

    def held(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Digests of these pieces as the master holds them now."""
        return tuple(self._engine.piece_digests([self._pieces[k] for k in numbers]))

    def all_held(self) -> tuple[int, ...]:
        """Digests of all pieces; their sum is D, read afresh."""
        return self.held(range(len(self._pieces)))

    def derive(self, entries: Sequence[Entry], numbers: Sequence[int]) -> tuple[int, ...]:
        """Replay these pieces from the base with the reference kernel; their digests.

        The values wait for `mend`.
        """
        return self._derive({k: self._base(self._pieces[k]) for k in numbers}, self._steps(entries))

    def derive_from(
        self, path: Path, height: int, entries: Sequence[Entry], numbers: Sequence[int]
    ) -> tuple[tuple[int, ...], int]:
        """As `derive`, from a snapshot that reflects the first `height` entries; and its round.

        SnapshotError or OSError when it cannot be read or is damaged.
        """
        dtype = DTYPES[self._lock.master]
        with Reader(path) as reader:
            names = [array.name for array in reader.header.arrays]
            start = {}
            for k in numbers:
                piece = self._pieces[k]
                ends = piece.first * dtype.itemsize, (piece.first + piece.count) * dtype.itemsize
                data = bytearray(reader.span(names.index(piece.tensor), *ends))
                start[k] = torch.frombuffer(data, dtype=dtype)
            steps = [step_of(self._lock, entry) for entry in entries[height:]]
            return self._derive(start, [step for step in steps if step is not None]), reader.header.round

    def _derive(self, start: dict[int, torch.Tensor], steps: Sequence[Step]) -> tuple[int, ...]:
        self._derived = {
            k: self._replay(self._pieces[k], values, steps, self._reference) for k, values in start.items()
        }
        return tuple(
            self._reference.digest(values, *self._address(self._pieces[k]))
            for k, values in self._derived.items()
        )

    def mend(self, numbers: Sequence[int]) -> int:
        """Overwrite these pieces of the master with what was derived; D."""
        for k in numbers:
            self._engine.overwrite(self._pieces[k], self._derived.pop(k))
        return self._engine.digest()

    def heal(self, entries: Sequence[Entry], tensors: Sequence[str]) -> int:
        """Replay whole tensors with the engine's own kernel into the master; D."""
        steps = self._steps(entries)
        sizes = {piece.tensor: piece.first + piece.count for piece in self._pieces}
        for name in tensors:
            piece = Piece(name, 0, sizes[name])
            kernels, device = self._engine.kernels, self._engine.device
            self._engine.overwrite(piece, self._replay(piece, self._base(piece).to(device), steps, kernels))
        return self._engine.digest()

    def _steps(self, entries: Sequence[Entry]) -> list[Step]:
        rows = [(chain.lock, entry) for chain, upto in self._ancestors for entry in chain.commits[:upto]]
        rows += [(self._lock, entry) for entry in entries]
        steps = [step_of(lock, entry) for lock, entry in rows]
        return [step for step in steps if step is not None]

    def _base(self, piece: Piece) -> torch.Tensor:
        values = manifest.image(manifest.stored(self._folder)[piece.tensor]).reshape(-1)
        return master_of(values[piece.first : piece.first + piece.count].copy(), self._lock.master)

    def _replay(
        self, piece: Piece, master: torch.Tensor, steps: Sequence[Step], kernels: Kernels
    ) -> torch.Tensor:
        key, region = self._address(piece)
        for start in range(0, len(steps), FUSED):
            kernels.update(master, steps[start : start + FUSED], key, region)
        return master

    @staticmethod
    def _address(piece: Piece) -> tuple[int, Region]:
        return seeds.tensor_key(piece.tensor), Region.whole(piece.count, piece.first)
