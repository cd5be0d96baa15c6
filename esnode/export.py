"""The weights of a state become a Hugging Face folder that transformers and vLLM load as it is.

Stored names, the lock's live dtype (what was evaluated), configuration and tokenizer of the base model;
complete or not there at all. Called by `finish.py` and `cli/ledger.py`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from esnode import manifest
from protocol import noise
from protocol.errors import UserError
from protocol.ledger import sync_path
from protocol.lock import Lock, TensorSpec

SHARD = 4 << 30  # bytes of weights per file
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Configuration and tokenizer; never code or weights.
COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")


class ExportError(UserError):
    """A folder that cannot be written."""


class Reader(Protocol):
    """An engine, a replica or a state."""

    def read(self, name: str) -> np.ndarray: ...


def write(reader: Reader, lock: Lock, folder: str | Path, to: str | Path) -> Path:
    """Write the reader's weights as a new Hugging Face folder `to`; `folder` is the base model's.

    Trained tensors are stored in the lock's live dtype, frozen ones as they were. ExportError when `to`
    exists or the disk is full or read-only: nothing is left behind then.
    """
    base, to = Path(folder), Path(to)
    if to.exists() or to.is_symlink():
        raise ExportError(f"{to} exists already: remove it or name another folder.")
    files = manifest.stored(base)
    plan = _shards(lock.manifest, lock.live_dtype, files)
    partial: Path | None = None
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
        # After it, as /proc and /sys, which take no folder, have no room either.
        _require_room(partial, sum(size for shard in plan for _, size in shard))
        _copy_texts(base, partial, lock.live_dtype)
        _write_weights(reader, lock, files, plan, partial)
        partial.chmod(0o755)
        sync_path(partial)
        partial.rename(to)
        sync_path(to.parent)
    except OSError as error:
        raise ExportError(_reason(error, to)) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)  # gone already when the rename succeeded
    return to


def _reason(error: OSError, to: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{to} could not be written: the disk is full. Make room or name a folder on another disk."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{to} could not be written: {to.parent} is read-only. Name another folder."
    if error.errno == errno.ENOENT:
        return f"{to} could not be written: nothing can be made in {to.parent}. Name another folder."
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
        return f"{to} could not be written: something else is at {to} or {to.parent}. Name another folder."
    return f"{to} could not be written: {error.strerror or error}."


def _require_room(parent: Path, size: int) -> None:
    if shutil.disk_usage(parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _code(spec: TensorSpec, live_dtype: str, files: dict[str, manifest.Stored]) -> str:
    """The file's name of the dtype a tensor is written in."""
    return CODES[live_dtype] if spec.trained else files[spec.name].dtype


def _shards(
    specs: Sequence[TensorSpec], live_dtype: str, files: dict[str, manifest.Stored]
) -> list[list[tuple[TensorSpec, int]]]:
    """Tensors, with their bytes, per file."""
    shards: list[list[tuple[TensorSpec, int]]] = [[]]
    room = SHARD
    for spec in specs:
        size = math.prod(spec.shape) * manifest.BYTES[_code(spec, live_dtype, files)]
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD
        shards[-1].append((spec, size))
        room -= size
    return shards


def _copy_texts(base: Path, to: Path, live_dtype: str) -> None:
    """Configuration and tokenizer; config.json states the dtype that the weights now have."""
    for path in sorted(base.iterdir()):
        if path.is_file() and path.suffix in COPIED and path.name != manifest.INDEX:
            shutil.copyfile(path, to / path.name)
            sync_path(to / path.name)
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = live_dtype
    with (to / "config.json").open("w", encoding="utf-8") as file:
        file.write(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_weights(
    reader: Reader,
    lock: Lock,
    files: dict[str, manifest.Stored],
    plan: list[list[tuple[TensorSpec, int]]],
    to: Path,
) -> None:
    names = [manifest.SINGLE]
    if len(plan) > 1:
        names = [f"model-{k:05d}-of-{len(plan):05d}.safetensors" for k in range(1, len(plan) + 1)]
    for name, shard in zip(names, plan, strict=True):
        with (to / name).open("wb") as file:
            _write_header(file, shard, lock.live_dtype, files)
            for spec, size in shard:
                data = _bytes(reader, spec, lock.live_dtype, files)
                if len(data) != size:
                    raise ValueError(f"{spec.name} gave {len(data)} bytes, its shape needs {size}")
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    if len(plan) > 1:
        mapping = {spec.name: name for name, shard in zip(names, plan, strict=True) for spec, _ in shard}
        total = sum(size for shard in plan for _, size in shard)
        index = {"metadata": {"total_size": total}, "weight_map": mapping}
        (to / manifest.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync_path(to / manifest.INDEX)


def _write_header(
    file: BinaryIO, shard: list[tuple[TensorSpec, int]], live_dtype: str, files: dict[str, manifest.Stored]
) -> None:
    """The safetensors header: length, then JSON padded with spaces so that the data is aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec, size in shard:
        table[spec.name] = {
            "dtype": _code(spec, live_dtype, files),
            "shape": list(spec.shape),
            "data_offsets": [start, start + size],
        }
        start += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def _bytes(
    reader: Reader, spec: TensorSpec, live_dtype: str, files: dict[str, manifest.Stored]
) -> memoryview:
    """A tensor as it is written: the live image of its master, or the stored bytes where it is frozen."""
    if not spec.trained:
        return np.ascontiguousarray(files[spec.name].raw()).data.cast("B")
    values = np.ascontiguousarray(reader.read(spec.name), np.float32).reshape(-1)
    return noise.round_to(values, live_dtype).data.cast("B")
