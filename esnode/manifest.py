"""The stored tensors of a model folder: names, shapes and which of them are trained, values and digests.

Read straight from the safetensors files, one tensor at a time and without loading a model: names are those in
the files, never a library's (law L2). Importing needs numpy only. Called by `locking.py`, `state.py` and
`export.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocol import seeds
from protocol.errors import UserError
from protocol.lock import TensorSpec

if TYPE_CHECKING:
    from esnode.kernels.interface import Kernels
    from protocol.lock import Lock

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
EXACT = {  # stored as they are: no arithmetic of the law touches them
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64",
}  # fmt: skip
BYTES = {"BF16": 2, "F16": 2, "F32": 4} | {code: np.dtype(name).itemsize for code, name in EXACT.items()}
# Buffers that older checkpoints store as if they were weights; a buffer is never trained (law L2).
BUFFERS = (
    "*.rotary_emb.inv_freq",
    "*.masked_bias",
    "*.attn.bias",
    "*.attention.bias",
    "*.e_score_correction_bias",
)
OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight")
INPUTS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 18  # elements read at a time: stays in cache
_HASHERS = 4  # threads; more would only wait for the memory or the disk


class ManifestError(UserError):
    """A checkpoint that cannot be trained as it is; the file or tensor is named."""


class WrongBase(UserError):
    """A model folder that is not the base model of a lock."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor lies: `dtype` is the file's ("BF16"), `start` its first byte, `size` its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    size: int

    def raw(self) -> NDArray[Any]:
        """The stored bytes as a read-only memory map: bf16 and fp16 as uint16, fp32 as uint32, others as
        uint8.
        """
        kind = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}.get(self.dtype, "u1")
        count = self.size // np.dtype(kind).itemsize
        if count == 0:
            return np.empty(0, kind)
        return np.memmap(self.path, dtype=kind, mode="r", offset=self.start, shape=(count,))


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's safetensors files, by name. ManifestError when absent or damaged."""
    found: dict[str, Stored] = {}
    weight_map = _weight_map(folder)
    for file in sorted(set(weight_map.values())) if weight_map else [_single(folder).name]:
        for tensor in _header(folder / file):
            if not weight_map or weight_map.get(tensor.name) == file:
                found[tensor.name] = tensor
    missing = sorted(set(weight_map) - set(found))
    if missing:
        raise ManifestError(
            f"{folder / INDEX} names {missing[0]} in {weight_map[missing[0]]}, which does not hold it "
            f"({len(missing)} tensors missing). The folder is incomplete: copy or download it again."
        )
    return dict(sorted(found.items()))


def read(
    folder: str | Path, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()
) -> list[TensorSpec]:
    """The manifest in name order: name, shape, stored dtype, trained or frozen.

    Trained are the floating-point tensors that a glob of `include` and none of `exclude` matches; integers
    and buffers are frozen. A tied output head that is stored besides its input embedding is left out.
    ManifestError on quantised or float64 weights, two names with one key, globs that match nothing, nothing
    left to train.
    """
    folder = Path(folder)
    tensors = stored(folder)
    for name in tied_copies(folder, tensors):
        del tensors[name]
    specs = [
        TensorSpec(name, tensor.shape, _dtype(tensor), _trained(tensor, include, exclude))
        for name, tensor in tensors.items()
    ]
    try:
        seeds.tensor_keys(spec.name for spec in specs)
    except ValueError as error:
        raise ManifestError(
            f"{folder}: {error}. Such a model cannot be trained: rename one of the two."
        ) from None
    for field, globs in (("include", include), ("exclude", exclude)):
        for glob in globs:
            if not any(fnmatchcase(spec.name, glob) for spec in specs):
                raise ManifestError(
                    f"[run.train] {field}: {glob!r} matches no tensor of {folder} (its first is "
                    f"{specs[0].name})."
                )
    if not any(spec.trained for spec in specs):
        raise ManifestError(
            f"{folder}: nothing is left to train. Widen [run.train] include or narrow exclude."
        )
    return specs


def tied_copies(folder: Path, tensors: Mapping[str, Stored]) -> list[str]:
    """Names of stored output heads that are the second copy of a tied input embedding.

    ManifestError when the configuration ties the two but the stored values differ.
    """
    outputs = [name for name in tensors if name.endswith(OUTPUTS)]
    inputs = [name for name in tensors if name.endswith(INPUTS)]
    if not outputs or not inputs or not ties(folder):
        return []
    copies = []
    for name in outputs:
        twin = next((other for other in inputs if tensors[other].shape == tensors[name].shape), None)
        if twin is None:
            continue
        if not np.array_equal(image(tensors[name]), image(tensors[twin])):
            raise ManifestError(
                f"{folder} ties {name} to {twin} (tie_word_embeddings) but stores two different tensors. "
                'Set "tie_word_embeddings": false in config.json, or remove the wrong copy.'
            )
        copies.append(name)
    return copies


def ties(folder: Path) -> bool:
    """Whether the model's input embedding and output head are one tensor, by its configuration."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or {}
    if "tie_word_embeddings" in config or "tie_word_embeddings" in text:
        return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings")))
    from transformers import AutoConfig  # the default differs between architectures

    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return bool(getattr(loaded.get_text_config(), "tie_word_embeddings", False))


def image(tensor: Stored) -> NDArray[np.float32]:
    """The flat float32 image of a stored floating-point tensor, as the law imports it: exact, denormals +0.

    ManifestError, naming the tensor, when a value is NaN or infinite.
    """
    raw = tensor.raw()
    whole = np.empty(raw.size, np.float32)
    for start, chunk in _images(tensor, raw):
        whole[start : start + chunk.size] = chunk
    return whole


def _images(tensor: Stored, raw: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first element, float32 image) of consecutive pieces that stay in cache. Errors as of `image`."""
    for start in range(0, raw.size, _CHUNK):
        bits = _bits(tensor, raw[start : start + _CHUNK])
        exponent = bits & np.uint32(0x7F800000)
        if exponent.max() == 0x7F800000:
            raise ManifestError(
                f"{tensor.name} in {tensor.path} holds NaN or infinite values. The checkpoint is damaged or "
                "diverged: use another one."
            )
        if exponent.min() == 0:
            bits[(exponent == 0) & ((bits & np.uint32(0x7FFFFF)) != 0)] = 0
        yield start, bits.view(np.float32)


def _bits(tensor: Stored, raw: NDArray[Any]) -> NDArray[np.uint32]:
    """A copy of stored values as float32, in their bits."""
    if tensor.dtype == "BF16":
        bits = raw.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits
    if tensor.dtype == "F16":
        return raw.view(np.float16).astype(np.float32).view(np.uint32)
    if tensor.dtype == "F32":
        return np.array(raw, np.uint32)
    raise ValueError(f"{tensor.name} is {tensor.dtype}: it has no float32 image")


def tensors(folder: str | Path, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, NDArray[Any]]]:
    """(spec, values) in the order given, one tensor at a time: flat float32, raw bytes for integers."""
    files = stored(Path(folder))
    for spec in specs:
        tensor = files[spec.name]
        yield spec, image(tensor) if tensor.dtype in FLOATS else np.array(tensor.raw())


def base_digest(folder: str | Path, specs: Sequence[TensorSpec]) -> str:
    """BLAKE2b-256, in hex, over the names, shapes and float32 images of a model, in name order.

    Neither sharding nor the stored floating-point dtype enters: a re-sharded or re-saved copy has the same
    digest.
    """
    whole = hashlib.blake2b(b"esnode base 1", digest_size=32)
    files, ordered = stored(Path(folder)), sorted(specs, key=lambda spec: spec.name)
    pool = ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1))
    try:
        for spec, digest in zip(
            ordered, pool.map(lambda spec: _hash(files[spec.name]), ordered), strict=True
        ):
            kind = "float" if spec.dtype in FLOATS.values() else spec.dtype
            for text in (spec.name.encode(), kind.encode()):
                whole.update(struct.pack("<I", len(text)) + text)
            whole.update(struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape))
            whole.update(digest)
    finally:  # an interrupt does not wait for the rest
        pool.shutdown(cancel_futures=True)
    return whole.hexdigest()


def _hash(tensor: Stored) -> bytes:
    """BLAKE2b-256 of a tensor's float32 image, or of its bytes where it holds integers."""
    found, raw = hashlib.blake2b(digest_size=32), tensor.raw()
    if tensor.dtype not in FLOATS:
        found.update(raw.data)
        return found.digest()
    for _, chunk in _images(tensor, raw):
        found.update(chunk.data)
    return found.digest()


def state_digest(
    folder: str | Path, specs: Sequence[TensorSpec], kernels: Kernels, master: str = "float32"
) -> int:
    """D of the master that a run of this base starts from: the trained tensors, in a master of this dtype."""
    from esnode.kernels.interface import Region  # loads torch, as the next
    from esnode.parts import master_of

    trained = [spec for spec in specs if spec.trained]
    digests = (
        kernels.digest(master_of(values, master), seeds.tensor_key(spec.name), Region.whole(values.size))
        for spec, values in tensors(folder, trained)
    )
    return sum(digests) % seeds.U64


def check(folder: str | Path, lock: Lock) -> list[TensorSpec]:
    """The folder's manifest when it is that of the lock's base model; WrongBase naming the first difference.

    Values are not compared here: see `base_digest` and the digest D.
    """
    folder = Path(folder)
    files = stored(folder)
    for name in tied_copies(folder, files):
        del files[name]
    locked = {spec.name: spec for spec in lock.manifest}
    what = f"{folder} is not the base model {lock.model!r} of this run: "
    remedy = " Name the folder, GGUF file or hub id that the run was started from."
    for name in sorted(set(files) ^ set(locked)):
        which = "it lacks" if name in locked else "it also holds"
        raise WrongBase(f"{what}{which} {name}.{remedy}")
    for name, tensor in files.items():
        if tensor.shape != locked[name].shape:
            raise WrongBase(f"{what}{name} has shape {tensor.shape}, the run {locked[name].shape}.{remedy}")
        if (_dtype(tensor) in EXACT.values()) != (locked[name].dtype in EXACT.values()):
            raise WrongBase(f"{what}{name} is {_dtype(tensor)}, the run's {locked[name].dtype}.{remedy}")
    return list(lock.manifest)


def _dtype(tensor: Stored) -> str:
    if tensor.dtype in FLOATS:
        return FLOATS[tensor.dtype]
    if tensor.dtype in EXACT:
        return EXACT[tensor.dtype]
    raise ManifestError(
        f"{tensor.name} in {tensor.path} is stored as {tensor.dtype}: only bfloat16, float16 and float32 "
        "weights can be trained. Use the original, unquantised checkpoint."
    )


def _trained(tensor: Stored, include: Sequence[str], exclude: Sequence[str]) -> bool:
    if tensor.dtype not in FLOATS or any(fnmatchcase(tensor.name, glob) for glob in exclude):
        return False
    if any(fnmatchcase(tensor.name, glob) for glob in BUFFERS) and _is_buffer(tensor):
        return False
    return any(fnmatchcase(tensor.name, glob) for glob in include)


def _is_buffer(tensor: Stored) -> bool:
    """GPT-2's causal masks are called `attn.bias` and have four dimensions; a real bias has one."""
    return not tensor.name.endswith("n.bias") or len(tensor.shape) > 2


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name of a sharded checkpoint; empty when it is in one file."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ManifestError(f"{path} is damaged: it has no readable weight_map.") from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
            raise ManifestError(f"{path} names {file!r}, which is no file of the folder. Download it again.")
    return dict(weight_map)


def _single(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    why = "no" if not files else f"{len(files)} (and no {INDEX})"
    raise ManifestError(
        f"{folder} has {why} .safetensors files: weights are read from safetensors only. Save the model with "
        "`model.save_pretrained(folder)` of transformers."
    )


def _header(path: Path) -> list[Stored]:
    """The tensors of one file. ManifestError when the header is damaged or the file cut."""
    length = path.stat().st_size
    damaged = f"{path} is damaged or cut short: copy or download it again."
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8 or (size := struct.unpack("<Q", head)[0]) > min(_MAX_HEADER, length - 8):
            raise ManifestError(damaged)
        try:
            table = json.loads(file.read(size))
            entries = [(str(name), table[name]) for name in table if name != "__metadata__"]
            found = [_entry(name, row, path, 8 + size) for name, row in entries]
        except (ValueError, KeyError, TypeError):
            raise ManifestError(damaged) from None
    if any(tensor.start + tensor.size > length for tensor in found):
        raise ManifestError(damaged)
    return found


def _entry(name: str, row: Mapping[str, Any], path: Path, data: int) -> Stored:
    """One row of a header; ValueError when its sizes contradict each other."""
    begin, end = row["data_offsets"]
    shape = tuple(int(n) for n in row["shape"])
    dtype = str(row["dtype"])
    if not 0 <= begin <= end or any(n < 0 for n in shape):
        raise ValueError(name)
    if dtype in BYTES and end - begin != math.prod(shape) * BYTES[dtype]:
        raise ValueError(name)
    return Stored(name, dtype, shape, path, data + begin, end - begin)
