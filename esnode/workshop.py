"""The node's real workshop: model, prompts and scorer of a run's lock, for the engine thread.

The loader that `nodeoptions.py` names by default. Everything that could differ from the run's lock is
compared here, so that a node with another model, tokenizer, task file or scorer never says Hello.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import IO

import numpy as np
import torch

from esnode import __version__, accelerators, ancestry, devices, duty, joined, locking, models, room
from esnode.checkpoint import Checkpoints, Saved
from esnode.engines import transformers_engine
from esnode.engines.interface import MemoryPlan
from esnode.engines.replica_engine import ReplicaEngine
from esnode.engines.shortage import alive
from esnode.events import About
from esnode.kernels import pick, selftest_digest
from esnode.memory import in_host, words
from esnode.nodeoptions import Options
from esnode.rederive import Rederiver
from esnode.replay import DamagedMaster
from esnode.scoring import Scorer
from esnode.snapshot import SnapshotError
from esnode.worker import Outcome, Worker
from protocol.chain import Chain
from protocol.entries import Entry
from protocol.errors import UserError
from protocol.lock import Lock
from protocol.messages import Unit


class TaskFileMissing(UserError):
    """The run's task data are not in its folder."""


class Workshop:
    """Engine, worker and scorer of one run. Not thread-safe."""

    def __init__(
        self,
        engine: ReplicaEngine,
        worker: Worker,
        scorer: Scorer | None,
        about: About,
        checkpoints: Checkpoints,
        rederiver: Rederiver,
        ancestors: Sequence[tuple[Chain, int]] = (),
        held: Sequence[IO[str]] = (),
    ) -> None:
        """`held`: what keeps other nodes from the engine's devices as long as it is open."""
        self.about = about
        self._held = held
        self._rederiver = rederiver
        self._checkpoints = checkpoints
        self._ancestors = ancestors
        self._engine = engine
        self._worker = worker
        self._scorer = scorer

    @property
    def host_path(self) -> str | None:
        """What the workshops of other engines attach to (`placement.Wish`), of a master in host memory."""
        return self._engine.host_path

    def digest(self) -> int:
        """D of the master."""
        return self._engine.digest()

    def refresh(self) -> int:
        """Take over what the leader of a shared master has written; D. Nothing may write meanwhile."""
        return self._engine.refresh()

    def apply(self, entries: Sequence[Entry]) -> list[int]:
        """Fold entries into the master; D after each."""
        self._checkpoints.settle()
        return self._engine.apply(entries)

    def save(self, round: int, entry: bytes, digest: int, done: Callable[[Saved], None]) -> None:
        """Begin to write the master, which stands after `round` commits, as a snapshot; returns at once."""
        self._checkpoints.begin(round, entry, digest, done)

    def rewind(self, entries: Sequence[Entry]) -> tuple[int, int]:
        """Bring the master to a state of this beginning of the ledger: (entries it reflects, D).

        The newest snapshot in this node's folder that fits; else the base checkpoint, or a fork's parent,
        which reflect none of them.
        """
        found = self._checkpoints.load(entries)
        if found is not None:
            return found
        self._engine.reset()
        for chain, upto in self._ancestors:
            self._engine.replay(chain, upto)
        return 0, self._engine.digest()

    def evaluate(
        self, unit: Unit, sigma: float, stop: Callable[[], bool], progress: Callable[[int], None]
    ) -> Future[Outcome]:
        """Measure a unit; its scores follow. Cancelled once `stop()` is true, DamagedMaster when a weight
        changed by itself, EngineEnded when the GPU failed.
        """
        with alive():
            damaged = self._engine.damaged()
            if damaged:
                raise DamagedMaster(damaged)
            return self._worker.generate(unit, stop, progress, sigma=sigma)

    def damaged(self) -> tuple[str, ...]:
        """Tensors whose master has changed by itself since it was written."""
        return self._engine.damaged()

    def all_held(self) -> tuple[int, ...]:
        """Digests of all pieces of the master, read from memory."""
        return self._rederiver.all_held()

    def held(self, pieces: Sequence[int]) -> tuple[int, ...]:
        """Digests of these pieces of the master, read from memory."""
        return self._rederiver.held(pieces)

    def derive(
        self, entries: Sequence[Entry], pieces: Sequence[int], base: bool
    ) -> tuple[tuple[int, ...], int]:
        """Digests of these pieces by replay with the reference kernel, and from which round on.

        May run beside an evaluation.
        """
        found = None if base else self._checkpoints.stated(entries)
        if found is not None:
            try:
                return self._rederiver.derive_from(*found, entries, pieces)
            except (SnapshotError, OSError) as error:
                words = "replay goes from the base, not from %s: %s"
                logging.getLogger(self.about.name).warning(words, found[0].name, error)
        return self._rederiver.derive(entries, pieces), 0

    def mend(self, pieces: Sequence[int]) -> int:
        """Overwrite pieces with what was derived; D."""
        self._checkpoints.settle()
        return self._rederiver.mend(pieces)

    def heal(self, entries: Sequence[Entry], tensors: Sequence[str]) -> int:
        """Replay damaged tensors into the master; D."""
        self._checkpoints.settle()
        return self._rederiver.heal(entries, tensors)

    def close(self) -> None:
        """End the scoring process and the writing of a snapshot."""
        self._checkpoints.close()
        self._worker.close()
        if self._scorer is not None:
            self._scorer.close()
        self._engine.close()
        for file in self._held:
            file.close()


def load(options: Options, lock: Lock) -> Workshop:
    """Build it all from the run's folder. UserError for a model, task or memory that does not fit."""
    log = logging.getLogger(options.name)
    model = models.of_run(options.model, options.run, lock, log.info)
    try:
        data = (options.run / "task.jsonl").read_bytes()
    except OSError as error:
        raise TaskFileMissing(
            f"cannot read {options.run / 'task.jsonl'} ({error.strerror}): start this node again once the "
            "coordinator can be reached, or copy the file from the run's folder"
        ) from error
    prepared = locking.prepare(lock, model.path, data, code=options.code)

    held: list[IO[str]] = []

    def tell(memory: MemoryPlan) -> None:
        log.info("memory: %s", words(memory, options.wish.sharing if device != devices.CPU else 1))
        total = memory.ranks * memory.total
        if options.planned is not None:  # a lane, whose devices its node has claimed
            return options.planned(in_host(memory, device), total)
        if device != devices.CPU:  # nobody named GPUs: torch takes the first
            used = [f"{device}:{index}" for index in range(memory.ranks)]
            held.extend(devices.claim(used, devices.who(options.name, options.run)))
        if joined.read(options.run):
            duty.read_policy().admit_memory(total)

    device = _device(options, log)
    kernels = pick(device, options.backend, options.threads)  # the self-test comes before the big allocation
    selftest = selftest_digest(kernels, device)
    engine = engine_loader(options.engine)(
        lock,
        model.path,
        threads=options.threads,
        backend=options.backend,
        device=device,
        report=tell,
        wish=replace(options.wish, chatter=str(options.folder / f"{options.engine}.log")),
    )
    try:
        prepared.require_room(lock.max_new_tokens, engine.context)
    except UserError:
        engine.close()
        raise
    ancestors = ancestry.ancestors(lock, options.run / "parents")
    for chain, upto in ancestors if engine.leads else ():
        engine.replay(chain, upto)
    scorer = locking.scorer(lock, data, code=options.code)
    versions = f"esnode {__version__}, torch {torch.__version__}, numpy {np.__version__}"
    about = About(options.name, engine.backend, device, selftest, engine.fingerprint, versions)
    worker = Worker(lock, engine, prepared, scorer)
    checkpoints = Checkpoints(options.folder, lock, engine, room.of_run(options.run))
    rederiver = Rederiver(lock, model.path, engine, ancestors)
    return Workshop(engine, worker, scorer, about, checkpoints, rederiver, ancestors, held)


def _device(options: Options, log: logging.Logger) -> str:
    """Where the engine works: on a GPU, else on the CPU, but for a lane whose GPU is gone: a DeviceError."""
    device, obstacle = accelerators.device(), accelerators.obstacle()
    if device == devices.CPU and options.planned is not None and os.environ.get("CUDA_VISIBLE_DEVICES"):
        raise devices.DeviceError(
            f"the GPU of this engine cannot be used any more: {obstacle or 'torch does not find it'}. Start "
            "the node again once `nvidia-smi` shows it"
        )
    if obstacle is not None:
        log.warning("%s. This node works on the CPU", obstacle)
    return device


def engine_loader(name: str) -> Callable[..., ReplicaEngine]:
    """The `load` of an engine; vLLM's is imported only when asked for."""
    if name == "vllm":
        from esnode.engines import vllm_engine

        return vllm_engine.load
    return transformers_engine.load
