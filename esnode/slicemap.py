"""Which part of which model parameter holds a stored tensor: found and proved with a probe.

Libraries rename, fuse and stack tensors on load (transformers 5 does it to mixtures of experts), differently
in each version. So nothing is assumed: the model is first loaded, through the library's own path, with
tensors of hashed values, and every stored tensor is then looked up in the parameters by its values. A
transposed, permuted or swapped tensor is found where it really went, or refused by name; equal names and
shapes prove nothing. The real weights are written afterwards, by `replica.py`, through the map. Called by
the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esnode import manifest
from esnode.gguf_conversion import quiet
from protocol import seeds
from protocol.errors import UserError, first_line
from protocol.lock import TensorSpec

KEY = 8  # elements of a row that are compared first; the whole tensor is compared after
SMALL = 1 << 24  # one-dimensional tensors are searched at every offset only in parameters up to this size

Views = dict[str, torch.Tensor]
Modules = tuple[type[nn.Module], ...]


class SliceError(UserError):
    """A parameter or stored tensor that cannot be mapped; it is named."""


def build(
    folder: Path, specs: Sequence[TensorSpec], dtype: torch.dtype, device: str = "cpu"
) -> tuple[nn.Module, Views]:
    """A causal language model whose weights are still the probe, and for each stored tensor its place in it.

    A view has the stored shape and shares memory with the parameter; it may be strided. Frozen tensors that
    the model does not use have none. SliceError when a trained tensor is not found whole, or a parameter is
    not stored.
    """
    probes = Probes(specs)
    # Parameters keep requires_grad though nothing is differentiated: without it torch multiplies a strided
    # input (the last positions of each row, before the output head) row by row with a copy of the weight: 8 s
    # against 0.04 s.
    model = _load(folder, specs, probes, dtype).to(device).requires_grad_(True).eval()
    return model, _map(model, folder, specs, probes, frozenset())


def probe(
    model: nn.Module,
    folder: Path,
    specs: Sequence[TensorSpec],
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    dtype: torch.dtype,
    padded: Modules = (),
) -> Views:
    """For each stored tensor its place in a model that another library made, `load` being its own loader.

    The parameters hold the probe afterwards. Only those of `padded` modules may end in rows of zeros that no
    stored tensor fills. SliceError as of `build`.
    """
    probes = Probes(specs)
    probes.fill(model, load, dtype)
    return _map(model, folder, specs, probes, parameters_of(model, padded))


def parameters_of(model: nn.Module, kinds: Modules) -> frozenset[str]:
    """Parameters that modules of these kinds have themselves, a tied one under all its names."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, kinds)
        for name, _ in module.named_parameters(recurse=False)
    )


def _map(
    model: nn.Module, folder: Path, specs: Sequence[TensorSpec], probes: Probes, padded: frozenset[str]
) -> Views:
    """Every stored tensor's place in a model that holds the probe."""
    targets = places(model)
    views = {}
    for spec in probes.specs:
        target = targets.get(spec.name)
        if target is not None and tuple(target.shape) == spec.shape and probes.hold(spec, target):
            views[spec.name] = target
    taken = {view.data_ptr() for view in views.values()}
    rest = [spec for spec in probes.specs if spec.name not in views]
    if rest:
        free = {name: target for name, target in targets.items() if target.data_ptr() not in taken}
        views |= _search(rest, free, probes)
    _complete(folder, specs, views, dict(model.named_parameters()), padded)
    return views


class Probes:
    """Hashed int8 values for every floating-point tensor: exact in each live dtype, no two tensors alike."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = [spec for spec in specs if spec.dtype in manifest.FLOATS.values()]
        self._ordinal: dict[str, int] = {}
        counts: dict[int, int] = {}
        for spec in self.specs:  # tensors too small for chance get their place in line as first elements
            size = int(np.prod(spec.shape, dtype=np.int64))
            if size < KEY:
                self._ordinal[spec.name] = counts.get(size, 0)
                counts[size] = counts.get(size, 0) + 1
                if size and counts[size] > 255**size:
                    raise SliceError(
                        f"{spec.name}: too many tensors of {size} elements to tell them apart by a probe."
                    )

    def values(self, spec: TensorSpec) -> NDArray[np.int8]:
        """Flat int8, the same at every call. Raw words of the generator: a large model has many values."""
        size = int(np.prod(spec.shape, dtype=np.int64))
        words = np.random.SFC64(seeds.tensor_key(spec.name)).random_raw(-(-size // 8))
        flat = words.view(np.int8)[:size]
        ordinal = self._ordinal.get(spec.name, 0)
        if spec.name in self._ordinal:
            for place in range(flat.size):
                ordinal, digit = divmod(ordinal, 255)
                flat[place] = digit - 127
        return flat

    def fill(
        self,
        model: nn.Module,
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
        dtype: torch.dtype,
    ) -> None:
        """Send the probe through a library's loader into a model of zeros: no tensor fills what stays so."""
        for parameter in model.parameters():
            parameter.data.zero_()
        load(
            (spec.name, torch.from_numpy(self.values(spec)).view(spec.shape).to(dtype)) for spec in self.specs
        )

    def hold(self, spec: TensorSpec, view: torch.Tensor) -> bool:
        """Whether a view has exactly the probe's values, element by element."""
        wanted = torch.from_numpy(self.values(spec)).view(spec.shape).to(view.device, view.dtype)
        return tuple(view.shape) == spec.shape and torch.equal(view, wanted)


def _load(folder: Path, specs: Sequence[TensorSpec], probes: Probes, dtype: torch.dtype) -> nn.Module:
    """The model of a folder's configuration, loaded by transformers from the probe instead of the files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    state = {spec.name: torch.from_numpy(probes.values(spec)).view(spec.shape) for spec in probes.specs}
    state |= _integers(folder, specs)
    with quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            sketch = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        # Releases of transformers before 5.24 take "sdpa" for such a model and leave the cap out.
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        try:
            return _from_state(type(sketch), sketch.config, state, dtype, "eager" if capped else "sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error):
                raise
            return _from_state(type(sketch), sketch.config, state, dtype, "eager")
        except RuntimeError as error:
            raise SliceError(
                f"transformers cannot load {folder}: {_difference(sketch, state) or first_line(error)} Its "
                "config.json and its tensors do not belong together."
            ) from None


def _difference(sketch: nn.Module, state: Views) -> str:
    """The first tensor that the configuration gives another shape: transformers lists them where nobody
    looks."""
    made = sketch.state_dict()
    for name, values in state.items():
        if name in made and made[name].shape != values.shape:
            shapes = f"{tuple(values.shape)} in the file and {tuple(made[name].shape)} by config.json"
            return f"{name} has shape {shapes}."
    return ""


def _from_state(kind: type, config: object, state: Views, dtype: torch.dtype, attention: str) -> nn.Module:
    model: nn.Module = kind.from_pretrained(  # type: ignore[attr-defined]
        None, config=config, state_dict=dict(state), dtype=dtype, attn_implementation=attention
    )
    return model


def _integers(folder: Path, specs: Sequence[TensorSpec]) -> Views:
    """Integer tensors keep their values: they are no weights, and a probe in them could break the model."""
    exact = [spec for spec in specs if spec.dtype not in manifest.FLOATS.values()]
    return {
        spec.name: torch.from_numpy(values.view(np.dtype(spec.dtype)).reshape(spec.shape))
        for spec, values in manifest.tensors(folder, exact)
    }


def places(model: nn.Module) -> Views:
    """Parameters and persistent buffers of floating-point type, a tied one once, under its first name."""
    kept = model.state_dict(keep_vars=True)
    found, seen = {}, set()
    for name, tensor in kept.items():
        if tensor.is_floating_point() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor.detach()
    for name, tensor in kept.items():  # the other names of a tied one
        found.setdefault(name, tensor.detach())
    return found


def _search(rest: Sequence[TensorSpec], free: Views, probes: Probes) -> Views:
    """Stored tensors found as a run of consecutive elements of a parameter, or transposed in one."""
    found: Views = {}
    wanted = _keys(rest, probes)
    for target in {tensor.data_ptr(): tensor for tensor in free.values()}.values():
        if target.numel() == 0 or not target.is_contiguous():
            continue
        values = target.cpu().to(torch.int8).numpy()
        for spec, view in _candidates(wanted, values, target):
            if spec.name not in found and probes.hold(spec, view):
                found[spec.name] = view
    return found


def _keys(rest: Sequence[TensorSpec], probes: Probes) -> dict[tuple[bool, int], dict[int, list[TensorSpec]]]:
    """(is one-dimensional, width of a row) to the first elements, as one integer, to the tensors that begin
    so.
    """
    wanted: dict[tuple[bool, int], dict[int, list[TensorSpec]]] = {}
    for spec in rest:
        if spec.shape and all(spec.shape):
            width = spec.shape[-1]
            key = int(pack(probes.values(spec)[None, :width])[0])
            group = wanted.setdefault((len(spec.shape) == 1, width), {})
            group.setdefault(key, []).append(spec)
    return wanted


def pack(rows: NDArray[np.int8]) -> NDArray[np.uint64]:
    """The first KEY elements of each row as one integer."""
    packed = np.zeros((rows.shape[0], KEY), np.int8)
    packed[:, : min(KEY, rows.shape[1])] = rows[:, :KEY]
    return packed.view(np.uint64)[:, 0]


def _candidates(
    wanted: Mapping[tuple[bool, int], Mapping[int, Sequence[TensorSpec]]],
    values: NDArray[np.int8],
    target: torch.Tensor,
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Stored tensors whose first elements occur in a parameter where such a tensor could begin."""
    flat = target.view(-1)
    rows = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    for spec, row in _hits(wanted.get((False, rows.shape[1]), {}), rows):
        start, size = row * rows.shape[1], int(np.prod(spec.shape))
        if start + size <= flat.numel():
            yield spec, flat[start : start + size].view(spec.shape)
    if values.ndim >= 2:
        stack = target.view(-1, *target.shape[-2:])
        columns = np.ascontiguousarray(values.swapaxes(-1, -2)).reshape(-1, values.shape[-2])
        for spec, row in _hits(wanted.get((False, columns.shape[1]), {}), columns):
            which, start = divmod(row, values.shape[-1])
            if len(spec.shape) == 2 and start + spec.shape[0] <= values.shape[-1]:
                yield spec, stack[which].T[start : start + spec.shape[0]]
    if values.size <= SMALL:
        for (single, width), group in wanted.items():
            if single and width <= values.size:
                windows = np.lib.stride_tricks.sliding_window_view(values.reshape(-1), min(KEY, width))
                for spec, start in _hits(group, windows):
                    if start + width <= flat.numel():
                        yield spec, flat[start : start + width]


def _hits(
    group: Mapping[int, Sequence[TensorSpec]], rows: NDArray[np.int8]
) -> Iterator[tuple[TensorSpec, int]]:
    if not group:
        return
    keys = pack(rows)
    for row in np.flatnonzero(np.isin(keys, np.fromiter(group, np.uint64, len(group)))):
        for spec in group[int(keys[row])]:
            yield spec, int(row)


def _complete(
    folder: Path,
    specs: Sequence[TensorSpec],
    views: Views,
    parameters: Mapping[str, torch.Tensor],
    padded: frozenset[str],
) -> None:
    """Refuse what is not mapped. Places of different tensors cannot overlap: their values differ."""
    for spec in specs:
        if spec.trained and spec.name not in views:
            raise SliceError(
                f"{spec.name} of {folder} was not found in the loaded model: it is not used there, or "
                "rearranged in a way that is not supported. Freeze it: [run.train] exclude = "
                f"[{spec.name!r}]."
            )
    covered: dict[int, int] = {}
    for view in views.values():
        storage = view.untyped_storage().data_ptr()
        covered[storage] = covered.get(storage, 0) + view.numel()
    for name, parameter in parameters.items():
        filled = covered.get(parameter.untyped_storage().data_ptr(), 0)
        if filled and name in padded and not bool(parameter.reshape(-1)[filled:].any()):
            continue  # all that was found lies before the zeros, and so fills everything there
        if filled != parameter.numel():
            raise SliceError(
                f"the tensors stored in {folder} do not fill the model's parameter {name}: the checkpoint is "
                "incomplete, or its tensors are rearranged in a way that is not supported."
            )
