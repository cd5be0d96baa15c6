"""Slices by canonical index: any way of cutting a model over ranks gives the bits of the whole."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esnode.kernels.cpu import CpuKernels
from esnode.kernels.interface import Region
from esnode.shards import Shard, ShardError, by_tensor, runs, settle, window
from esnode.state import State
from protocol.lock import Lock, TensorSpec
from protocol.pieces import Piece
from tests import tiny

U64 = 1 << 64


def block(spec: TensorSpec, rows: range, columns: range) -> Shard:
    """Some rows and columns of a matrix."""
    width = spec.shape[1]
    region = Region(rows.start * width + columns.start, len(rows), len(columns), width)
    return Shard(spec.name, region.flat(), (len(rows), len(columns)))


def share(size: int, rank: int, ranks: int) -> range:
    return range(size * rank // ranks, size * (rank + 1) // ranks)


def shards_of(lock: Lock, rank: int, ranks: int) -> list[Shard]:
    """As tensor parallelism cuts: outputs by columns, keys replicated in pairs, vectors everywhere."""
    found = []
    for spec in lock.manifest:
        if len(spec.shape) == 1:
            found.append(Shard(spec.name, Region.whole(spec.shape[0]), spec.shape))
        elif "o_proj" in spec.name or "down_proj" in spec.name:
            found.append(block(spec, range(spec.shape[0]), share(spec.shape[1], rank, ranks)))
        elif "k_proj" in spec.name and ranks > 1:
            found.append(block(spec, share(spec.shape[0], rank // 2, ranks // 2), range(spec.shape[1])))
        elif "gate_proj" in spec.name:  # in two runs, as of a fused tensor that is cut
            mine = share(spec.shape[0], rank, ranks)
            for part in (range(mine.start, mine.start + 5), range(mine.start + 5, mine.stop)):
                found.append(block(spec, part, range(spec.shape[1])))
        else:
            found.append(block(spec, share(spec.shape[0], rank, ranks), range(spec.shape[1])))
    return found


def load(lock: Lock, folder: Path, ranks: int) -> list[State]:
    cut = settle(lock.manifest, [shards_of(lock, rank, ranks) for rank in range(ranks)])
    return [State.load(lock, folder, CpuKernels(), shards=by_tensor(shards)) for shards in cut]


def total(digests: Any) -> int:
    return sum(digests) % U64


def test_a_run_of_elements_is_found_in_a_slice() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        height, width = draw.randint(1, 6), draw.randint(1, 9)
        top, left = draw.randrange(height), draw.randrange(width)
        shape = (draw.randint(1, height - top), draw.randint(1, width - left))
        region = Region(top * width + left, *shape, width).flat()
        held = window(torch.arange(height * width), 0, region).reshape(-1).tolist()
        first = draw.randint(0, height * width)
        end = draw.randint(first, height * width)
        found = [
            (place + k, index)
            for place, part in runs(region, first, end)
            for k, index in enumerate(window(torch.arange(height * width), 0, part).reshape(-1).tolist())
        ]
        assert sorted(found) == [(k, index) for k, index in enumerate(held) if first <= index < end]


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_add_up_to_the_whole(ranks: int, master: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "qwen2")
    lock = tiny.lock(folder, master=master)
    chain, _ = tiny.chain(lock, folder, 3)
    whole, states = State.load(lock, folder, CpuKernels()), load(lock, folder, ranks)
    assert total(state.digest() for state in states) == lock.digest
    after = whole.apply(chain.entries)
    assert [
        total(column) for column in zip(*(state.apply(chain.entries) for state in states), strict=True)
    ] == after
    assert total(state.recompute_digest() for state in states) == after[-1]
    piece = Piece("model.layers.1.mlp.down_proj.weight", 37, 500)
    assert total(state.piece_digest(piece) for state in states) == whole.piece_digest(piece)
    held = [state.shared() for state in states]
    for rank, sums in enumerate(held):
        for mask, digest in sums.items():
            assert mask >> rank & 1
            assert all(held[other][mask] == digest for other in range(ranks) if mask >> other & 1)
    assert ranks == 1 or len(set().union(*held)) == (1 if ranks == 2 else 3)
    assert total(state.reset() for state in states) == lock.digest


def test_a_snapshot_passes_between_ways_of_cutting(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m")
    lock = tiny.lock(folder)
    chain, _ = tiny.chain(lock, folder, 2)
    whole, halves, fourths = (load(lock, folder, ranks) for ranks in (1, 2, 4))
    digest = total(state.apply(chain.entries)[-1] for state in halves)
    arrays = sorted(spec.name for spec in lock.manifest)
    pieces = []
    for number, name in enumerate(arrays):
        size = 4 * int(np.prod(next(spec.shape for spec in lock.manifest if spec.name == name)))
        for first in range(0, size, 1000):
            end = min(first + 1000, size)
            out = torch.zeros((end - first) // 4)
            for state in halves:
                for region, data in state.held_bytes(number, first, end):
                    window(out, first // 4, region).copy_(
                        torch.frombuffer(bytearray(data), dtype=torch.float32).view(region.rows, region.width)
                    )
            pieces.append((number, first, memoryview(out.numpy()).cast("B")))
    for states in (whole, fourths):
        assert total(state.refill(pieces) for state in states) == digest
    values = torch.randn(700)
    piece = Piece("model.layers.0.self_attn.o_proj.weight", 15, 700)
    for states in (whole, halves, fourths):
        for state in states:
            state.overwrite(piece, values)
    assert len({total(state.digest() for state in states) for states in (whole, halves, fourths)}) == 1


def test_what_a_rank_lost_is_told_by_its_stored_name(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m")
    _, second = load(tiny.lock(folder), folder, 2)
    part = next(part for part in second.parts if "down_proj" in part.spec.name)
    part.master[3] += 1
    assert second.damaged() == (part.shard.tensor,)


def test_ranks_that_do_not_hold_a_model_once_are_refused(tmp_path: Path) -> None:
    lock = tiny.lock(tiny.write(tmp_path / "m"))
    spec = next(spec for spec in lock.manifest if "q_proj" in spec.name)
    good = [shards_of(lock, rank, 4) for rank in range(4)]

    def without(rank: int) -> list[Shard]:
        return [shard for shard in good[rank] if shard.tensor != spec.name]

    with pytest.raises(ShardError, match=rf"{spec.name}: 768 of its 1024 elements.*--tp 1"):
        settle(lock.manifest, [*good[:3], without(3)])
    moved = block(spec, range(20, 28), range(spec.shape[1]))
    with pytest.raises(ShardError, match="some of them in two slices"):
        settle(lock.manifest, [*good[:3], [*without(3), moved]])
    with pytest.raises(ShardError, match=r"lies on ranks 0, 2 of 4"):
        settle(
            lock.manifest,
            [[*without(rank), block(spec, share(32, rank % 2, 2), range(32))] for rank in range(4)],
        )
    frozen = [replace(other, trained=other.name != spec.name) for other in lock.manifest]
    assert settle(frozen, [without(rank) for rank in range(4)])  # unused, and nobody trains it
