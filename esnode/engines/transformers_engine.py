"""The engine on Hugging Face transformers: one replica and its decoder in this process.

Called by `workshop.py`, `rebuild.py` and `evaluate.py`, which need to know `load` alone: the rest is
`engines/interface.py`.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
import transformers
from torch import nn

from esnode import accelerators, memory, placement, reservations, slicemap
from esnode.engines.decode import Decoder, limits
from esnode.engines.interface import MemoryPlan, Sampling, StopCheck, never
from esnode.engines.replica_engine import ReplicaEngine, require_base
from esnode.engines.shortage import loading
from esnode.engines.wish import DEFAULT, Wish
from esnode.kernels.interface import Kernels
from esnode.manifest import check
from esnode.ranks import RanksError
from esnode.replica import Replica, memory_plan
from esnode.state import DTYPES
from protocol.lock import Lock

BATCH_BYTES = {"cpu": 2 << 30, "cuda": 8 << 30}  # what one batch may need; part of the fingerprint
# Flags of /proc/cpuinfo that stand for matrix products faster in the live dtype than in float32.
FAST = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "svebf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
    "float32": (),
}

Report = Callable[[MemoryPlan], None]


def silent(plan: MemoryPlan) -> None:
    """The taker of memory plans of somebody who does not want them."""


class TransformersEngine(ReplicaEngine):
    """One replica, its model and its decoder. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        lock: Lock,
        replica: Replica,
        decoder: Decoder,
        kernels: Kernels,
        fingerprint: bytes,
        reserved: IO[str] | None = None,
    ) -> None:
        """`reserved`: what keeps others from planning with our memory as long as it is open."""
        super().__init__(lock, replica, kernels, fingerprint)
        self._reserved = reserved
        self._decoder = decoder
        self.room = decoder.room

    def forget(self) -> None:
        """Packed copies of the weights are those of other weights from now on."""
        self._decoder.packing.drop()

    @property
    def model(self) -> nn.Module:
        """The model whose parameters are the live weights; its output is transformers' own."""
        return self._decoder.model

    @property
    def broken(self) -> tuple[int, ...]:
        """Rows of the last `generate` or `loglik` whose logits were NaN or infinite: their answers are worth
        the task's floor. `generate` gave them [], `loglik` -inf."""
        return self._decoder.broken

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        stop: StopCheck = never,
    ) -> list[list[int]]:
        """New token ids per prompt, stop id excluded. `streams[k]` (u64) keys row k's random stream when
        sampling.
        """
        return self._decoder.generate(prompts, sampling, streams, stop)

    def loglik(
        self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], stop: StopCheck = never
    ) -> list[float]:
        """Sum of log p(target tokens | prompt) per row, teacher-forced, in nats."""
        return self._decoder.loglik(prompts, targets, stop)


@loading
def load(
    lock: Lock,
    folder: str | Path,
    *,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    compute: str | None = None,
    report: Report = silent,
    checked: bool = True,
    wish: Wish = DEFAULT,
) -> TransformersEngine:
    """The lock's base model in a ready engine. For a fork, `replay` the parents' chains next.

    `threads` None leaves torch's setting; `backend` names a kernel implementation; `device` None takes a GPU
    where there is one; `compute` overrides the dtype of the model's arithmetic, by default the live dtype
    where the CPU is fast in it and float32 (on the same rounded weights) where it is not. `report` is told
    the memory plan before anything is allocated. Not `checked`: whatever values the folder holds are the
    right ones, as for a lock that no run has. `wish` is about the place of the master. Raises
    manifest.WrongBase, memory.MemoryShort, wish.HostMasterUnavailable, slicemap.SliceError,
    state.StateError, ranks.RanksError.
    """
    if wish.tp > 1:
        raise RanksError(f"--tp {wish.tp} needs --engine vllm: transformers runs a model on one device.")
    folder = Path(folder)
    device = device or accelerators.device()
    if threads:
        torch.set_num_threads(threads)
    arithmetic = DTYPES[compute or compute_dtype(lock.live_dtype, device)]
    specs = check(folder, lock)
    work = BATCH_BYTES[_kind(device)] // 4  # usual batches stay far below the bound of one
    free = memory.available(device, wish.sharing)
    plan = memory_plan(lock, arithmetic, work, free)
    wish = placement.agree(plan, device, wish)
    plan = placement.settle(plan, device, wish)
    report(plan)
    memory.require(plan, lock.model)
    reserved = reservations.take(memory.in_host(plan, device))
    if device == "cpu":  # another one may have planned in the same moment
        memory.require(replace(plan, available=memory.available()), lock.model)

    host = placement.open_master(lock, plan, device, wish)
    kernels = placement.pick(device, backend, host)
    model, views = slicemap.build(folder, specs, arithmetic, device)
    replica = Replica(model, views, lock, folder, kernels, device=device, host=host)
    if checked:
        require_base(lock, replica, folder)
    bound = BATCH_BYTES[_kind(device)]
    room = plan.available // (wish.sharing if device == "cpu" else 1)  # of a GPU it is our part already
    pack = plan.on_device + plan.live <= room  # faster, with the same bits, where there is room
    decoder = Decoder(model, limits(model, bound), device, pack)
    fingerprint = _fingerprint(lock, device, arithmetic)
    return TransformersEngine(lock, replica, decoder, kernels, fingerprint, reserved)


def compute_dtype(live_dtype: str, device: str = "cpu") -> str:
    """The dtype to compute in: the live one on GPUs and on CPUs with instructions for it, else float32."""
    if _kind(device) != "cpu" or live_dtype == "float32":
        return live_dtype
    return live_dtype if _cpu_flags() & set(FAST[live_dtype]) else "float32"


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        # Apple: M1 has fp16, bf16 is emulated
        return {"bf16", "asimdhp"} if platform.machine() == "arm64" else set()
    found: set[str] = set()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found.update(value.split())
    return found


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _fingerprint(lock: Lock, device: str, compute: torch.dtype) -> bytes:
    name = (
        torch.cuda.get_device_name(device)
        if _kind(device) == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    parts = (
        "transformers engine 1", torch.__version__, transformers.__version__, lock.live_dtype, str(compute),
        _kind(device), name, "chunk" if lock.repeatable else "unit", str(BATCH_BYTES[_kind(device)]),
    )  # fmt: skip
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).digest()
