"""Slices of stored tensors: what one rank of a tensor-parallel engine holds, and who answers for which.

A rank's library fuses, cuts, pads and replicates tensors; noise, update and digest know only the canonical
index of an element (law L2), so a slice is a `Region` of its stored tensor. Lives here: cutting and joining
by index, and the proof that all ranks together hold every element once, replicas apart. May import numpy,
torch and the kernels' `Region`. Called by `state.py`, `shardmap.py` and the vLLM engine and its workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray

from esnode.kernels.interface import Region
from protocol.errors import UserError
from protocol.lock import TensorSpec


class ShardError(UserError):
    """Ranks that do not hold a model exactly once between them; the tensor is named."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One slice on one rank: where it lies in its stored tensor, and its shape in the rank's memory.

    `holders` has a bit for every rank that holds this slice, and exactly one of them counts it in D.
    """

    tensor: str
    region: Region
    shape: tuple[int, ...]
    counted: bool = True
    holders: int = 0

    @property
    def label(self) -> str:
        """A name that no other slice of the rank has."""
        return f"{self.tensor}[{self.region.start}:{self.region.rows}x{self.region.width}]"


Shards = Mapping[str, Sequence[Shard]]  # by stored tensor


def by_tensor(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    """A rank's slices, grouped by stored tensor."""
    found: dict[str, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.tensor, []).append(shard)
    return found


# ---------------------------------------------------------------- by index


def runs(region: Region, first: int, end: int) -> list[tuple[int, Region]]:
    """The elements of a slice with index `first` to `end`: (place in the slice, region), at most three."""
    if region.count == 0:
        return []
    stride = max(region.stride, region.width)
    top = max(0, (first - region.start) // stride)
    bottom = min(region.rows - 1, (end - 1 - region.start) // stride)
    found: list[tuple[int, Region]] = []
    body = range(top, bottom + 1)
    for row in {top, bottom} if body else ():
        start = region.start + row * stride
        low, high = max(first, start), min(end, start + region.width)
        if high - low < region.width:
            body = range(body.start + (row == top), body.stop - (row == bottom and row != top))
            if low < high:
                found.append((row * region.width + low - start, Region.whole(high - low, low)))
    if body:
        part = Region(region.start + body.start * stride, len(body), region.width, stride)
        found.append((body.start * region.width, part.flat()))
    return sorted(found, key=lambda item: item[0])


def window(values: torch.Tensor, first: int, region: Region) -> torch.Tensor:
    """The region's elements within flat `values`, whose first has index `first`: rows x width, no copy."""
    shape, steps = (region.rows, region.width), (max(region.stride, 1), 1)
    return torch.as_strided(values, shape, steps, values.storage_offset() + region.start - first)


def slices(spec: TensorSpec, shards: Shards | None) -> list[tuple[Shard, TensorSpec]]:
    """(slice, its specification under its label) of one stored tensor; the tensor itself without `shards`."""
    if shards is None:
        size = math.prod(spec.shape)
        return [(Shard(spec.name, Region.whole(size), spec.shape), spec)]
    return [
        (shard, TensorSpec(shard.label, shard.shape, spec.dtype, spec.trained))
        for shard in shards.get(spec.name, ())
    ]


def cut(
    spec: TensorSpec, values: NDArray[Any], shards: Shards | None
) -> Iterator[tuple[Shard, TensorSpec, NDArray[Any]]]:
    """`slices` with their flat values: copies, so that the tensor need not stay; or all of it as it came."""
    for shard, local in slices(spec, shards):
        if shards is None:
            yield shard, local, values
        else:
            part = window(torch.from_numpy(values), 0, shard.region)
            yield shard, local, part.clone(memory_format=torch.contiguous_format).view(-1).numpy()


# ---------------------------------------------------------------- over ranks


def settle(specs: Sequence[TensorSpec], ranks: Sequence[Sequence[Shard]]) -> list[list[Shard]]:
    """The ranks' slices with `holders` and `counted` filled in: each slice counts on its first holder.

    ShardError, naming the tensor, unless every element of every tensor that is used lies on exactly one rank,
    or on each rank of a replica group; such groups are equal runs of neighbouring ranks.
    """
    holders: dict[str, dict[Region, list[int]]] = {}
    for rank, shards in enumerate(ranks):
        for shard in shards:
            holders.setdefault(shard.tensor, {}).setdefault(shard.region, []).append(rank)
    for spec in specs:
        found = holders.get(spec.name, {})
        if found or spec.trained:
            _require_once(spec, found, len(ranks))
    return [
        [
            replace(
                shard,
                holders=sum(1 << other for other in holders[shard.tensor][shard.region]),
                counted=holders[shard.tensor][shard.region][0] == rank,
            )
            for shard in shards
        ]
        for rank, shards in enumerate(ranks)
    ]


def _require_once(spec: TensorSpec, found: Mapping[Region, Sequence[int]], ranks: int) -> None:
    """ShardError unless the regions tile the tensor and each lies on the ranks it should."""
    regions = list(found)
    twice = any(_overlap(one, other) for k, one in enumerate(regions) for other in regions[:k])
    held = sum(region.count for region in regions)
    if twice or held != math.prod(spec.shape):
        raise ShardError(
            f"{spec.name}: {held} of its {math.prod(spec.shape)} elements were found on the {ranks} ranks"
            f"{', some of them in two slices' if twice else ''}. This model cannot be cut so: use --tp 1."
        )
    for region, owners in found.items():
        count, first = len(owners), owners[0]
        if list(owners) != list(range(first, first + count)) or ranks % count or first % count:
            raise ShardError(
                f"{spec.name}: the slice at {region.start} lies on ranks {', '.join(map(str, owners))} of "
                f"{ranks}, which is no way of replicating known here. Use --tp 1."
            )


def _overlap(one: Region, other: Region) -> bool:
    """Whether two regions of one tensor share an element."""
    if one.rows == 1:
        return bool(runs(other, one.start, one.start + one.width))
    if other.rows == 1:
        return _overlap(other, one)
    rows = [range(r.start // r.stride, r.start // r.stride + r.rows) for r in (one, other)]
    columns = [range(r.start % r.stride, r.start % r.stride + r.width) for r in (one, other)]
    return _meet(*rows) and _meet(*columns)


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
