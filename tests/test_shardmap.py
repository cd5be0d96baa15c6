"""The maps of one rank and of one model, against a loader that fuses, cuts, replicates and pads as vLLM's
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from esnode import shardmap, slicemap
from esnode.kernels.cpu import CpuKernels
from esnode.replica import Replica
from esnode.shards import by_tensor, settle
from esnode.slicemap import SliceError
from protocol.lock import Lock, TensorSpec
from tests import tiny

FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
TABLES = ("model.embed_tokens.", "lm_head.")
PADDED = 288  # rows of a vocabulary of 260 on all ranks together
PART = "model.layers.1.mlp.up_proj.weight"
LACKING = (  # the second half of a fused parameter, its middle, whole parameters of every kind
    PART,
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.k_proj.bias",
    "model.layers.1.self_attn.o_proj.weight",
    "model.norm.weight",
    *(f"{table}weight" for table in TABLES),
)


class Vocabulary(nn.Module):
    """What is padded."""


class Rank(nn.Module):
    """One rank's parameters, under vLLM's names; few heads of keys and values are replicated."""

    def __init__(self, specs: list[TensorSpec], rank: int, ranks: int, heads: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.heads = rank, ranks, heads
        self.memory: dict[str, torch.Tensor] = {}
        joined: dict[str, list[torch.Tensor]] = {}
        for spec in specs:
            joined.setdefault(self.place(spec.name), []).append(self.part(spec.name, torch.zeros(spec.shape)))
        for name, parts in joined.items():
            self.memory[name] = torch.cat(parts)
            owner: nn.Module = Vocabulary() if name.startswith(TABLES) else nn.Module()
            owner.register_parameter("weight", nn.Parameter(self.memory[name]))
            self.add_module(name.replace(".", "/"), owner)
        self.starts: dict[str, int] = {}
        for spec in specs:
            place = self.place(spec.name)
            self.starts[spec.name] = sum(
                self.part(other.name, torch.zeros(other.shape)).shape[0]
                for other in specs
                if self.place(other.name) == place and self.order(other.name) < self.order(spec.name)
            )

    def place(self, name: str) -> str:
        for fused, parts in FUSED.items():
            for part in parts:
                name = name.replace(f"{fused.split('.')[0]}.{part}.", f"{fused}.")
        return name

    def order(self, name: str) -> int:
        return next((k for parts in FUSED.values() for k, part in enumerate(parts) if part in name), 0)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What of a stored tensor this rank holds."""
        if name.endswith(BY_COLUMNS):
            return tensor.chunk(self.ranks, 1)[self.rank]
        if "k_proj" in name or "v_proj" in name:
            copies = max(1, self.ranks // self.heads)
            return tensor.chunk(self.ranks // copies)[self.rank // copies]
        if name.startswith(TABLES):
            rows = PADDED // self.ranks
            held = tensor[self.rank * rows : (self.rank + 1) * rows]
            return torch.cat([held, torch.zeros(rows - held.shape[0], tensor.shape[1])])
        return tensor if "norm" in name or "o_proj" in name else tensor.chunk(self.ranks)[self.rank]

    def load(self, items: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in items:
            part, start = self.part(name, tensor), self.starts[name]
            self.memory[self.place(name)][start : start + part.shape[0]] = part


def found(model: Rank, specs: Sequence[TensorSpec], dtype: torch.dtype = torch.bfloat16) -> shardmap.Map:
    return shardmap.find(model, specs, model.load, dtype, (Vocabulary,))


def ranks_of(lock: Lock, ranks: int, heads: int) -> list[Rank]:
    return [Rank(list(lock.manifest), rank, ranks, heads) for rank in range(ranks)]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 2), (2, 1), (4, 2), (4, 1)])
def test_every_element_is_found_and_written(kind: str, ranks: int, heads: int, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", kind, hidden_size=64, intermediate_size=96, num_key_value_heads=heads)
    lock = tiny.lock(folder, live_dtype="float32")
    models = ranks_of(lock, ranks, heads)
    maps = [found(model, lock.manifest, torch.float32) for model in models]
    shardmap.require_filled([each.covered for each in maps])
    cut = settle(lock.manifest, [each.shards for each in maps])
    tables = len([spec for spec in lock.manifest if spec.shape[0] == tiny.VOCABULARY])
    assert sum(each.padding for each in maps) == tables * 64 * (PADDED - tiny.VOCABULARY)
    replicas = [
        Replica(model, each.views, lock, folder, CpuKernels(), shards=by_tensor(shards))
        for model, each, shards in zip(models, maps, cut, strict=True)
    ]
    assert sum(replica.digest() for replica in replicas) % (1 << 64) == lock.digest
    whole = ranks_of(lock, ranks, heads)  # the same weights through the loader, made of whole tensors
    perturbed = {}
    for spec in lock.manifest:
        master = torch.from_numpy(next(iter(tiny.masters(folder, [spec]).values())))
        live = torch.empty_like(master)
        region = shardmap.Region.whole(master.numel())
        CpuKernels().perturb(master, live, 7, tiny.seeds.tensor_key(spec.name), region, 0.5, -1)
        perturbed[spec.name] = live.view(spec.shape)
    for replica, model, other in zip(replicas, models, whole, strict=True):
        replica.perturb(7, 0.5, -1)
        other.load(iter(perturbed.items()))
        assert all(torch.equal(model.memory[name], other.memory[name]) for name in model.memory)


def test_what_the_loader_leaves_elsewhere_is_refused(tmp_path: Path) -> None:
    lock = tiny.lock(tiny.write(tmp_path / "m", "qwen2", hidden_size=64))
    (model,) = ranks_of(lock, 1, 2)

    def swapped(items: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Exchanges two rows in the middle of a matrix."""
        model.load(
            (name, tensor[[1, 0, *range(2, 64)]] if "q_proj.w" in name else tensor) for name, tensor in items
        )

    def scaled(items: Iterator[tuple[str, torch.Tensor]]) -> None:
        model.load((name, tensor + 1 if "gate_proj" in name else tensor) for name, tensor in items)

    with pytest.raises(SliceError, match=r"gate_up_proj.* is no slice of a stored tensor.*--tp 1"):
        shardmap.find(model, lock.manifest, scaled, torch.bfloat16, (Vocabulary,))
    (model,) = ranks_of(lock, 1, 2)
    placed = shardmap.find(model, lock.manifest, swapped, torch.bfloat16, (Vocabulary,))
    settle(lock.manifest, [placed.shards])  # no harm: it is found row by row
    assert len(by_tensor(placed.shards)["model.layers.0.self_attn.q_proj.weight"]) == 3
    with pytest.raises(SliceError, match=r"lm_head.weight is none of the stored tensors"):
        shardmap.require_filled([{"lm_head.weight": 0, "a": 1}, {"lm_head.weight": 0, "a": 0}])


# ---------------------------------------------------------------- what no stored tensor fills


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("shardmap") / "qwen2", "qwen2", hidden_size=64)


@pytest.mark.parametrize("lacking", LACKING)
def test_a_parameter_that_the_checkpoint_does_not_fill_is_refused(lacking: str, qwen: Path) -> None:
    """The loader leaves zeros there, as it does in the padding of a vocabulary."""
    lock = tiny.lock(qwen)
    stored = [spec for spec in lock.manifest if spec.name != lacking]
    assert len(stored) == len(lock.manifest) - 1
    (model,) = ranks_of(lock, 1, 2)
    place = model.place(lacking).replace(".", "/")
    with pytest.raises(SliceError, match=f"do not fill the model's parameter {place}.*incomplete"):
        slicemap.probe(model, qwen, stored, model.load, torch.bfloat16, (Vocabulary,))
    for ranks in (1, 2):
        with pytest.raises(SliceError, match=f"{place}.* is none of the stored tensors.*incomplete"):
            maps = [found(model, stored) for model in ranks_of(lock, ranks, 2)]
            shardmap.require_filled([each.covered for each in maps])


def test_only_a_vocabulary_may_end_in_zeros(qwen: Path) -> None:
    lock = tiny.lock(qwen)
    (model,) = ranks_of(lock, 1, 2)
    views = slicemap.probe(model, qwen, lock.manifest, model.load, torch.bfloat16, (Vocabulary,))
    assert set(views) == {spec.name for spec in lock.manifest}
    for kinds in ((), (nn.Linear,)):
        with pytest.raises(SliceError, match=r"do not fill the model's parameter lm_head/weight"):
            slicemap.probe(model, qwen, lock.manifest, model.load, torch.bfloat16, kinds)
        with pytest.raises(SliceError, match=r"lm_head/weight.* from row 260 to 288: the checkpoint"):
            shardmap.find(model, lock.manifest, model.load, torch.bfloat16, kinds)


def test_a_vocabulary_that_begins_with_zeros_is_refused(qwen: Path) -> None:
    lock = tiny.lock(qwen)
    (model,) = ranks_of(lock, 1, 2)
    table = model.memory["lm_head.weight"]

    def late(items: Iterator[tuple[str, torch.Tensor]]) -> None:
        model.load(items)
        table.copy_(table.roll(4, 0))

    with pytest.raises(SliceError, match=r"do not fill the model's parameter lm_head/weight"):
        slicemap.probe(model, qwen, lock.manifest, late, torch.bfloat16, (Vocabulary,))
    with pytest.raises(SliceError, match=r"lm_head/weight.* from row 0 to 4"):
        shardmap.find(model, lock.manifest, late, torch.bfloat16, (Vocabulary,))
