"""Which slice of which stored tensor lies where in the parameters of one rank: found and proved with a probe.

As `slicemap`, for a model that its library cuts: every row of the rank's parameters is looked up, by its
values, in the stored tensors. A run of rows may be whole rows of a tensor (cut or fused by rows) or a column
range of its rows (cut by columns); nothing may be left but zeros at the end of a vocabulary, padding. Every
element of a parameter is accounted for once. Called by the vLLM workers; `shards.settle` compares the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esnode.kernels.interface import Region
from esnode.shards import Shard
from esnode.slicemap import KEY, Modules, Probes, SliceError, Views, pack, parameters_of, places
from protocol.lock import TensorSpec

Keys = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Map:
    """What a rank holds. `views`: its memory by the slices' labels; `covered`: elements that stored tensors
    fill, by parameter; `padding`: elements that none does, at the end of a vocabulary.
    """

    shards: tuple[Shard, ...]
    views: Views
    covered: dict[str, int]
    padding: int


@dataclass(frozen=True, slots=True)
class _Hit:
    """Rows `row` and on of a parameter hold a slice."""

    target: str
    row: int
    shard: Shard


def find(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    dtype: torch.dtype,
    padded: Modules = (),
) -> Map:
    """The rank's map; `load` is the library's own loader. The parameters hold the probe afterwards.

    Only those of `padded` modules may end in rows that no stored tensor fills. SliceError when another has
    such rows, or one holds something that is no slice of a stored tensor.
    """
    probes = Probes(specs)
    probes.fill(model, load, dtype)
    targets = {name: tensor for name, tensor in _once(places(model)).items() if tensor.numel()}
    index = {width: _Index(targets, width) for width in {_width(tensor) for tensor in targets.values()}}
    hits = [hit for spec in probes.specs for hit in _hits(spec, probes, targets, index)]
    views: Views = {}
    for hit in hits:
        if hit.shard.label in views:
            raise SliceError(f"{hit.shard.tensor} lies in two places of one rank, also in {hit.target}.")
        rows = _rows(targets[hit.target])
        views[hit.shard.label] = rows[hit.row : hit.row + _height(hit.shard, rows)].view(hit.shard.shape)
    weights = {parameter.data_ptr() for parameter in model.parameters()}  # buffers may hold what they like
    owned = {name: tensor for name, tensor in targets.items() if tensor.data_ptr() in weights}
    ends = parameters_of(model, padded)
    filled = {name: _covered(name, tensor, hits, name in ends) for name, tensor in owned.items()}
    padding = sum(tensor.numel() - filled[name] for name, tensor in owned.items())
    return Map(tuple(hit.shard for hit in hits), views, filled, padding)


def require_filled(maps: Sequence[Mapping[str, int]]) -> None:
    """SliceError for a vocabulary of which no rank holds anything: the checkpoint lacks it."""
    for name in maps[0]:
        if not any(covered.get(name, 0) for covered in maps):
            raise SliceError(
                f"the model's parameter {name} is none of the stored tensors: the checkpoint is incomplete."
            )


def _once(targets: Views) -> Views:
    """Each memory under its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in targets.items():
        found.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(found.values())


def _width(tensor: torch.Tensor) -> int:
    """Elements of a row; 0 for vectors, which are searched at every offset."""
    return tensor.shape[-1] if tensor.ndim > 1 else 0


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.view(-1)


def _height(shard: Shard, rows: torch.Tensor) -> int:
    return shard.region.count // (rows.shape[1] if rows.ndim > 1 else 1)


class _Index:
    """Where each row of the parameters of one width begins, by its first elements."""

    def __init__(self, targets: Views, width: int) -> None:
        self.names = [name for name, tensor in targets.items() if _width(tensor) == width]
        keys, places = [], []
        for number, name in enumerate(self.names):
            found = _keys(_rows(targets[name])[..., : KEY if width else None].to("cpu", torch.int8).numpy())
            keys.append(found)
            places.append(np.stack([np.full(found.size, number), np.arange(found.size)], 1))
        joined = np.concatenate(keys)
        order = np.argsort(joined, kind="stable")
        self._keys, self._places = joined[order], np.concatenate(places)[order]

    def lookup(self, wanted: Keys) -> Iterator[tuple[str, int, int, int]]:
        """Runs (parameter, its row, row of what is wanted, rows) of equal keys."""
        low, high = (np.searchsorted(self._keys, wanted, side) for side in ("left", "right"))
        rows = np.repeat(np.arange(wanted.size), high - low)
        offsets = np.arange(rows.size) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
        found = self._places[low[rows] + offsets]
        order = np.lexsort((rows, found[:, 1] - rows, found[:, 0]))
        rows, found = rows[order], found[order]
        steps = np.diff(np.stack([found[:, 0], found[:, 1] - rows, rows - np.arange(rows.size)], 1), axis=0)
        ends = [*(np.flatnonzero(steps.any(1)) + 1), rows.size] if rows.size else []
        start = 0
        for end in ends:
            yield self.names[found[start, 0]], int(found[start, 1]), int(rows[start]), int(end - start)
            start = end


def _keys(values: NDArray[np.int8]) -> Keys:
    """Of a matrix the key of each row; of a vector the key at each offset."""
    if values.ndim == 1:
        if values.size < KEY:
            return np.empty(0, np.uint64)
        values = np.lib.stride_tricks.sliding_window_view(values, KEY)
    return pack(values)


def _hits(spec: TensorSpec, probes: Probes, targets: Views, index: Mapping[int, _Index]) -> Iterator[_Hit]:
    """Every place of a stored tensor's slices in the parameters."""
    whole = targets.get(spec.name)
    values = probes.values(spec)
    if whole is not None and probes.hold(spec, whole):
        yield _Hit(spec.name, 0, Shard(spec.name, Region.whole(values.size), spec.shape))
    elif len(spec.shape) == 1 and 0 in index:
        for name, row, first, windows in index[0].lookup(_keys(values)):
            count = windows + KEY - 1
            if _same(targets[name].view(-1)[row : row + count], values[first : first + count]):
                yield _Hit(name, row, Shard(spec.name, Region.whole(count, first), (count,)))
    elif len(spec.shape) > 1:
        matrix = values.reshape(-1, spec.shape[-1])
        for width in index:
            if width >= KEY and matrix.shape[1] % width == 0:
                for column in range(0, matrix.shape[1], width):
                    yield from _in_rows(spec, matrix, column, width, targets, index[width])


def _in_rows(
    spec: TensorSpec, matrix: NDArray[np.int8], column: int, width: int, targets: Views, index: _Index
) -> Iterator[_Hit]:
    """Runs of rows of a stored matrix, or of a column range of it, in parameters of this width."""
    part = matrix[:, column : column + width]
    for name, row, first, count in index.lookup(_keys(part)):
        if _same(_rows(targets[name])[row : row + count], part[first : first + count]):
            start = first * matrix.shape[1] + column
            region = Region(start, count, width, matrix.shape[1]).flat()
            yield _Hit(name, row, Shard(spec.name, region, (count, width)))


def _same(view: torch.Tensor, values: NDArray[np.int8]) -> bool:
    wanted = torch.from_numpy(np.ascontiguousarray(values)).to(view.device, view.dtype)
    return torch.equal(view, wanted)


def _covered(name: str, tensor: torch.Tensor, hits: Sequence[_Hit], padded: bool) -> int:
    """Elements of a parameter that slices fill; SliceError when two meet, or some are left that are not the
    zeros at the end of a `padded` one.
    """
    rows = _rows(tensor)
    spans = sorted((hit.row, hit.row + _height(hit.shard, rows)) for hit in hits if hit.target == name)
    end = filled = 0
    for low, high in [*spans, (rows.shape[0], rows.shape[0])]:
        if low < end:
            raise SliceError(f"two stored tensors lie in the same rows of the model's parameter {name}.")
        if bool(rows[end:low].any()):
            raise SliceError(
                f"the model's parameter {name} holds something, from row {end} on, that is no slice of a "
                "stored tensor: vLLM rearranges this model in a way that is not supported. Use --tp 1 or "
                "--engine transformers."
            )
        if low > end and not (padded and low == rows.shape[0]):
            raise SliceError(
                f"the model's parameter {name} is none of the stored tensors from row {end} to {low}: the "
                "checkpoint is incomplete."
            )
        filled += (high - low) * (rows.shape[1] if rows.ndim > 1 else 1)
        end = high
    return filled
