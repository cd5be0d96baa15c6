"""How many ranks a model can be cut into, and how many it is: told in a sentence before anything is loaded.

Decided from the model's configuration, its tensors' names and the memory of each device; touches no device.
Called by `engines/vllm_engine.py` and whoever deals out GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esnode.engines.interface import MemoryPlan
from protocol.errors import UserError
from protocol.lock import Lock


class RanksError(UserError):
    """A model that cannot be cut as asked, or not be run by vLLM at all."""


def read_config(folder: Path) -> dict[str, Any]:
    """The language model's part of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {**config, **(config.get("text_config") or {})}


def require_dense(lock: Lock, config: Mapping[str, Any]) -> None:
    """RanksError for what the vLLM engine does not run: mixtures of experts, quantised weights."""
    experts = next((spec.name for spec in lock.manifest if ".experts." in spec.name), None)
    if experts is not None:
        raise RanksError(
            f"{lock.model} is a mixture of experts ({experts}): vLLM stacks and rearranges experts for its "
            "kernels, and writing them in place has not been shown to be right. Use --engine transformers."
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
    return MemoryPlan(plan.master // ranks, plan.live // ranks, plan.other, plan.available)
