"""A checkpoint, its lock and unsigned commits, made with numpy, torch and safetensors alone: for GPU machines
that have nothing else (`make gpu-check`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from esnode import manifest
from esnode.kernels.interface import Kernels
from esnode.state import State
from protocol.bodies import CommitBody, Entry, EntryKind, MemberReward
from protocol.lock import Lock


def checkpoint(folder: Path, sizes: dict[str, tuple[int, ...]]) -> Path:
    """A folder with one file of bf16 tensors."""
    draw = torch.Generator().manual_seed(5)
    tensors = {name: (0.05 * torch.randn(shape, generator=draw)).bfloat16() for name, shape in sizes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def lock(folder: Path, kernels: Kernels, device: str = "cpu", **changes: Any) -> Lock:
    """A lock of four members, whose digest is taken by these kernels, of that device."""
    specs = tuple(manifest.read(folder))
    fields: dict[str, Any] = {
        "model": "bare", "base": "00" * 32, "digest": 0, "manifest": specs, "task": "toy", "data": "00" * 32,
        "scorer": "00" * 32, "train_prompts": 8, "heldout_prompts": 4, "train_tokens": "00" * 32,
        "heldout_tokens": "00" * 32, "stop_ids": (1,), "reward_low": 0.0, "reward_high": 1.0, "members": 4,
        "mirrored": True,
        "sigma": (0.0078125,), "alpha": (0.0078125,), "per_round": 4, "chunk": 2, "max_new_tokens": 8,
        "trusted": ("00" * 32,),
    } | changes  # fmt: skip
    sketch = Lock(**fields)
    return Lock(**(fields | {"digest": State.load(sketch, folder, kernels, device=device).digest()}))


def commits(run: Lock, rounds: int) -> list[Entry]:
    """Rounds with random rewards; nothing that folds them asks for a signature."""
    draw = random.Random(3)
    found = []
    for round in range(rounds):
        members = tuple(MemberReward(k, draw.random(), 1) for k in range(run.members))
        body = CommitBody(run.alpha_at(round), run.sigma_at(round), members)
        name = bytes([round]) * 32
        found.append(Entry(EntryKind.COMMIT, bytes(32), 1, bytes(8), round, 0, body, b"", name))
    return found
