"""How many ranks a model can be cut into, and how many it is: told in a sentence before anything is loaded.

Decided from the model's configuration, its tensors' names and the memory of each device; touches no device.
Called by `engines/vllm_engine.py`; `gpugroups.py` deals out a machine's GPUs so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from esnode.engines.interface import MemoryPlan
from esnode.memory import gb
from protocol.errors import UserError
from protocol.lock import Lock

MOST_ENGINES = 1 << 10  # nobody has as many GPUs


class RanksError(UserError):
    """A model that cannot be cut as asked, or not be run by vLLM at all."""


def read_config(folder: Path) -> dict[str, Any]:
    """The language model's part of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {**config, **(config.get("text_config") or {})}


def require_dense(lock: Lock, config: Mapping[str, Any]) -> None:
    """RanksError for what the vLLM engine does not run: mixtures of experts, latent attention, quantised
    weights.
    """
    experts = next((spec.name for spec in lock.manifest if ".experts." in spec.name), None)
    if experts is not None:
        raise RanksError(
            f"{lock.model} is a mixture of experts ({experts}): vLLM stacks and rearranges experts for its "
            "kernels, and writing them in place has not been shown to be right. Use --engine transformers."
        )
    if config.get("kv_lora_rank"):
        raise RanksError(
            f"{lock.model} compresses its keys and values (kv_lora_rank): vLLM multiplies some of its "
            "weights once, at load, and would not see what is written later. Use --engine transformers."
        )
    if config.get("quantization_config"):
        raise RanksError(
            f"{lock.model} is quantised: only full weights can be trained. Use the original model."
        )


def require(config: Mapping[str, Any], ranks: int, devices: int, kind: str) -> None:
    """RanksError unless the model can be cut so and each rank has a device: a GPU, or a core of a CPU."""
    what = "GPUs" if kind == "cuda" else "cores"
    if ranks > devices:
        raise RanksError(f"--tp {ranks} needs {ranks} {what}; this process has {devices}.")
    obstacle = _obstacle(config, ranks)
    if obstacle:
        possible = [str(n) for n in range(1, devices + 1) if not _obstacle(config, n)]
        raise RanksError(f"--tp {ranks} cannot be: {obstacle}. Possible here: {', '.join(possible)}.")


def _obstacle(config: Mapping[str, Any], ranks: int) -> str:
    """What cannot be divided by so many ranks; "" when everything can."""
    heads = int(config.get("num_attention_heads") or 1)
    pairs = int(config.get("num_key_value_heads") or heads)
    wide = int(config.get("intermediate_size") or ranks)
    if heads % ranks:
        return f"the model's {heads} attention heads are not divisible by {ranks}"
    if pairs % ranks and ranks % pairs:
        return f"the model's {pairs} heads of keys and values cannot be dealt out or repeated over {ranks}"
    return f"the model's intermediate size {wide} is not divisible by {ranks}" if wide % ranks else ""


def default(config: Mapping[str, Any], plan: MemoryPlan, free: Sequence[int]) -> int:
    """The fewest ranks of which each fits a GPU, masters included; 1 where no number would.

    `free`: bytes of each GPU. On a CPU (no GPUs) it is 1: ranks would only share the same memory.
    """
    for ranks in range(1, len(free) + 1):
        if not _obstacle(config, ranks) and share(plan, ranks).on_device <= min(free[:ranks]):
            return ranks
    return 1


def share(plan: MemoryPlan, ranks: int) -> MemoryPlan:
    """What one of so many ranks needs: its part of the weights, all of the rest."""
    return MemoryPlan(plan.master // ranks, plan.live // ranks, plan.other, plan.available, ranks=ranks)


# ---------------------------------------------------------------- GPUs of one machine, in groups


@dataclass(frozen=True, slots=True)
class Gpu:
    """One of those this process sees. `free`: bytes."""

    index: int
    kind: str
    free: int


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory for masters, in bytes. `buffers`: what streaming through a GPU needs there; `shared`: the
    master that engines of one rank read is counted already.
    """

    free: int
    buffers: int
    spare: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Deal:
    """`groups`: the GPUs of each engine, by index; `words`: a line about each kind of GPU."""

    groups: tuple[tuple[int, ...], ...]
    words: tuple[str, ...]


def deal(
    model: str,
    config: Mapping[str, Any],
    plans: Sequence[MemoryPlan],
    gpus: Sequence[Gpu],
    host: Host,
    master: str,
) -> Deal:
    """The fewest GPUs per engine, of one kind, that hold live weights, work and the master, or, where no
    number does, all but the master, which goes to host memory. As many such engines as there are GPUs for.

    `plans`: of one GPU alone; a kind of GPU is dealt by the first with which an engine fits. `master`:
    `wish.MASTERS`. RanksError when no engine fits anywhere.
    """
    groups: list[tuple[int, ...]] = []
    words: list[str] = []
    for kind in dict.fromkeys(gpu.kind for gpu in gpus):
        ours = [gpu for gpu in gpus if gpu.kind == kind]
        for plan in plans:
            found, host, line = _deal_kind(config, plan, ours, host, master)
            if found:
                break
        groups += found
        words.append(f"{_named(ours)} ({kind}): {line}")
    if not groups:
        raise RanksError(f"{model} fits no GPU of this machine. {'; '.join(words)}. Use a smaller model.")
    return Deal(tuple(groups), tuple(words))


def _deal_kind(
    config: Mapping[str, Any], plan: MemoryPlan, gpus: Sequence[Gpu], host: Host, master: str
) -> tuple[list[tuple[int, ...]], Host, str]:
    """Groups of equal GPUs, the host memory that is left, and both in words."""
    need = 0
    for in_host in {"auto": (False, True), "device": (False,), "host": (True,)}[master]:
        for ranks in (n for n in range(1, len(gpus) + 1) if not _obstacle(config, n)):
            part = share(plan, ranks)
            need = part.total - part.master + host.buffers if in_host else part.total
            able = [gpu.index for gpu in gpus if gpu.free >= need]
            count = len(able) // ranks
            if in_host:
                count = min(count, _masters(plan, host, ranks))
            if count < 1:
                continue
            if in_host and not (ranks == 1 and host.shared):
                taken = plan.master * (count if ranks > 1 else 1)
                host = replace(host, free=host.free - taken, shared=host.shared or ranks == 1)
            groups = [tuple(able[k * ranks : (k + 1) * ranks]) for k in range(count)]
            return groups, host, _line(gpus, groups, need, in_host)
    free = max(gpu.free for gpu in gpus)
    if need <= free:
        short = f"a master of {gb(plan.master)} does not fit into {gb(host.free)} of free host memory"
        return [], host, f"not used, {short}"
    return [], host, f"not used, at best {gb(need)} are needed on each and {gb(free)} are free"


def _masters(plan: MemoryPlan, host: Host, ranks: int) -> int:
    """How many engines of so many ranks find a master in host memory; those of one rank share it."""
    most = max(0, host.free - host.spare) // max(plan.master, 1)
    return most if ranks > 1 else MOST_ENGINES * (most > 0 or host.shared)


def _line(gpus: Sequence[Gpu], groups: Sequence[tuple[int, ...]], need: int, in_host: bool) -> str:
    """What equal GPUs do, in words."""
    used = {index for group in groups for index in group}
    left = [gpu for gpu in gpus if gpu.index not in used]
    each = f" of {len(groups[0])} GPUs" + " each" * (len(groups) > 1) if len(groups[0]) > 1 else ""
    free = min(gpu.free for gpu in gpus if gpu.index in used)
    return (
        f"{len(groups)} engine{'s' * (len(groups) > 1)}{each}, {gb(need)} of {gb(free)} free needed on each"
        + ", the master in host memory" * in_host
        + (f"; {_named(left)} left over" if left else "")
    )


def _named(gpus: Sequence[Gpu]) -> str:
    numbers = ", ".join(str(gpu.index) for gpu in gpus)
    return f"GPU{'s' * (len(gpus) > 1)} {numbers}"
