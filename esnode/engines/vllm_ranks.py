"""The replica of a tensor-parallel vLLM engine, seen from the engine's process: what its ranks hold together.

Does what `Replica` does, by calls into the workers (`vllm_worker.py`): D is the sum over ranks, slices that
several hold counted once and compared; snapshots and tensors are canonical, put together from the ranks in
bounded pieces. Called by `vllm_engine.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from esnode import manifest, shardmap, shards
from esnode.engines.interface import EngineEnded
from esnode.engines.vllm_start import EXIT_FAULT, EXIT_MEMORY
from esnode.replay import DamagedMaster, fold
from esnode.shards import window
from esnode.state import DTYPES, require_parent
from protocol.bodies import Entry
from protocol.errors import UserError
from protocol.lock import Lock
from protocol.pieces import Piece
from protocol.seeds import U64

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from protocol.chain import Chain

Call = Callable[..., list[tuple[str, Any]]]  # a method of every `vllm_worker.Rank`, in rank order
ELEMENTS = 1 << 21  # of a tensor, that pass between processes at once
PIECES = 64  # digests asked for at once: a unit that is running waits no longer than for these


class RanksDiffer(UserError):
    """Ranks that should hold the same weights hold different ones."""


class RankRefused(UserError):
    """A rank could not do what it was asked; its own sentence."""


class Turns:
    """A lock that is handed on in the order of asking: whoever steps all the time lets others in between."""

    def __init__(self) -> None:
        self._door, self._room = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._room.acquire()

    def __exit__(self, *_: object) -> None:
        self._room.release()


class Ranks:
    """The workers of an engine, as callable from any thread; with one rank the worker is in this process."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._turns = Turns()
        self._several = engine.vllm_config.parallel_config.world_size > 1
        self._ended = ""
        self.short = False  # whether they ended for want of memory

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody else calls the engine meanwhile.

        With several ranks any failure is an EngineEnded: one of them has ended itself, or waits for another.
        """
        with self._turns:
            if self._ended:
                raise EngineEnded(self._ended)
            try:
                yield
            except Exception as error:
                if not self._several:
                    raise
                self._ended = self._end()
                raise EngineEnded(self._ended) from error

    def call(self, method: str | Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a method of all workers returns, in rank order."""
        with self.turn():
            found: list[Any] = self._engine.collective_rpc(method, args=arguments)
            return found

    def ask(self, method: str, *arguments: Any) -> list[tuple[str, Any]]:
        """The same of `vllm_worker.Rank`s."""
        return self.call("esnode_rank", method, *arguments)

    def close(self) -> None:
        """End the workers."""
        with self._turns:
            self._engine.engine_core.shutdown()

    def _end(self) -> str:
        """End what is left of the workers, in bounded time; what became of them, as a sentence."""
        core: Any = self._engine.engine_core
        workers = [worker.proc for worker in core.engine_core.model_executor.workers]
        core.shutdown()
        codes = [process.exitcode for process in workers]
        self.short = EXIT_MEMORY in codes
        if self.short:
            what = f"rank {codes.index(EXIT_MEMORY)} of the vLLM engine ran out of memory"
        elif EXIT_FAULT in codes:
            what = f"rank {codes.index(EXIT_FAULT)} of the vLLM engine failed (vllm.log of the node has it)"
        else:
            what = "a process of the vLLM engine ended by itself or did not answer (killed, out of memory)"
        return f"{what}: this engine cannot go on and has to be started again"


class RankedReplica:
    """Masters and live weights that lie in several processes. Calls may come from several threads."""

    device = "cpu"  # where a replay of single tensors is done for it
    leads = True
    host_path = None  # a rank's masters are those of its slices: no other engine can use them

    def __init__(self, call: Call, lock: Lock, folder: Path, backend: str | None, in_host: bool) -> None:
        """Map, compare and fill the ranks. Errors as of `shardmap.find`, `shards.settle`, `State.load`."""
        self.lock = lock
        self._folder = folder
        self._call = call
        self._arrays = sorted(spec.name for spec in lock.manifest if spec.trained)
        found = self._ask("map", lock.to_bytes(), str(folder))
        shardmap.require_filled([covered for _, covered in found])
        cut = shards.settle(lock.manifest, [held for held, _ in found])
        kernels = self._ask("fill", cut, backend, in_host)
        self.backend: str = kernels[0]
        self._compare()
        if self._odd:
            raise RanksDiffer(
                f"{self._odd[0]} is not the same on all ranks that hold it, right after loading. Check this "
                "machine's memory, or use --tp 1."
            )

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """The ranks' answers. DamagedMaster, RankRefused or RuntimeError when one of them says so."""
        answers = self._call(method, *arguments)
        damaged = [name for kind, value in answers if kind == "damaged" for name in value]
        if damaged:
            raise DamagedMaster(tuple(dict.fromkeys(damaged)))
        for kind, value in answers:
            if kind == "refused":
                raise RankRefused(value)
            if kind == "failed":
                raise RuntimeError(value)
        return [value for _, value in answers]

    # ------------------------------------------------------------ D

    def _compare(self) -> int:
        """D; notes what ranks hold differently, for `damaged`."""
        states: list[tuple[int, dict[int, int]]] = self._ask("state")
        self._digest = sum(digest for digest, _ in states) % U64
        sums: dict[int, set[int]] = {}
        for _, shared in states:
            for holders, digest in shared.items():
                sums.setdefault(holders, set()).add(digest)
        self._odd: tuple[str, ...] = ()
        if any(len(found) > 1 for found in sums.values()):
            self._odd = self._differing()
        return self._digest

    def _differing(self) -> tuple[str, ...]:
        """Stored tensors of which two ranks hold different copies."""
        seen: dict[tuple[str, int], int] = {}
        odd: dict[str, None] = {}
        for held in self._ask("shared_tensors"):
            for slice_, digest in held.items():
                if seen.setdefault(slice_, digest) != digest:
                    odd[slice_[0]] = None
        return tuple(odd)

    def digest(self) -> int:
        """D of the master."""
        return self._digest

    def damaged(self) -> tuple[str, ...]:
        """Tensors that changed by themselves on a rank, or that ranks hold differently."""
        found = [name for names in self._ask("damaged") for name in names]
        return tuple(dict.fromkeys([*found, *self._odd]))

    def piece_digests(self, pieces: Sequence[Piece]) -> list[int]:
        """Digests of runs of elements, read from memory."""
        found: list[int] = []
        for start in range(0, len(pieces), PIECES):
            columns = zip(*self._ask("piece_digests", pieces[start : start + PIECES]), strict=True)
            found += [sum(column) % U64 for column in columns]
        return found

    def refresh(self) -> int:
        """D: nobody else writes these masters."""
        return self._digest

    # ------------------------------------------------------------ moving

    def perturb(self, seed: int, sigma: float, sign: int) -> None:
        """Live weights become round(master + sign * sigma * eps(seed))."""
        self._ask("perturb", seed, sigma, sign)

    def restore(self) -> None:
        """Live weights become the rounded master."""
        self._ask("restore")

    def apply(self, entries: Sequence[Entry], lock: Lock | None = None) -> list[int]:
        """Fold entries into the masters; D after each. DamagedMaster before any rank has moved."""
        damaged = self.damaged()
        if damaged:
            raise DamagedMaster(damaged)
        columns = zip(*self._ask("apply", entries, lock and lock.to_bytes()), strict=True)
        digests = [sum(column) % U64 for column in columns]
        self._compare()
        return digests

    def replay(self, chain: Chain, upto: int) -> int:
        """Fold the first `upto` rounds of an ancestor's chain; D after them. Errors as of `State.replay`."""
        require_parent(chain.lock, self.lock, self._digest)
        fold(lambda batch: self.apply(batch, chain.lock), chain, 0, upto)
        return self._digest

    def reset(self) -> int:
        """Masters and live weights of the base checkpoint again; its D."""
        self._ask("reset")
        return self._compare()

    def overwrite(self, piece: Piece, values: torch.Tensor) -> None:
        """Write a run of the master on every rank that holds some of it."""
        for start in range(0, piece.count, ELEMENTS):
            part = values[start : start + ELEMENTS].clone()
            self._ask("overwrite", Piece(piece.tensor, piece.first + start, part.numel()), part)
        self._compare()

    def reloaded(self, seed: int, sigma: float, sign: int) -> list[str]:
        """Parameters that change when this member comes through vLLM's loader; for the canary."""
        return [name for names in self._ask("reloaded", seed, sigma, sign) for name in names]

    # ------------------------------------------------------------ whole tensors

    def chunk(self, array: int, first: int, end: int) -> NDArray[np.uint8]:
        """Bytes of one canonical master, arrays in name order."""
        dtype = DTYPES[self.lock.master]
        out = torch.empty((end - first) // dtype.itemsize, dtype=dtype)
        for held in self._ask("held_bytes", array, first, end):
            for region, data in held:
                values = torch.frombuffer(bytearray(data), dtype=dtype).view(region.rows, region.width)
                window(out, first // dtype.itemsize, region).copy_(values)
        return out.view(torch.uint8).numpy()

    def refill(self, pieces: Iterable[tuple[int, int, memoryview]]) -> int:
        """Masters and live weights of a snapshot; D."""
        self._ask("refill_begin")
        for array, first, data in pieces:
            self._ask("refill_more", array, first, bytes(data))
        self._ask("refill_end")
        return self._compare()

    def read(self, name: str) -> NDArray[np.float32]:
        """float32 copy of a tensor's master (or frozen value), full shape."""
        stored = manifest.stored(self._folder)[name]
        if name not in self._arrays:
            return manifest.image(stored).reshape(stored.shape)
        dtype, array = DTYPES[self.lock.master], self._arrays.index(name)
        out = np.empty(int(np.prod(stored.shape)), np.float32)
        for first in range(0, out.size, ELEMENTS):
            end = min(first + ELEMENTS, out.size)
            part = self.chunk(array, first * dtype.itemsize, end * dtype.itemsize)
            out[first:end] = torch.from_numpy(part).view(dtype).float().numpy()
        return out.reshape(stored.shape)
