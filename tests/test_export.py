"""Exported folders: load as they are, hold what was evaluated, and are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from esnode import export, manifest, models, slicemap
from esnode.kernels.cpu import CpuKernels
from esnode.replica import Replica
from esnode.state import DTYPES, State
from tests import tiny

KINDS = ("llama", "qwen2", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("export")
    return {kind: tiny.write(root / kind, kind) for kind in KINDS}


def left_behind(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("live_dtype", ["bfloat16", "float16", "float32"])
def test_an_exported_folder_loads_with_the_live_weights(
    folders: dict[str, Path], tmp_path: Path, kind: str, live_dtype: str
) -> None:
    folder = folders[kind]
    run = tiny.lock(folder, live_dtype=live_dtype, exclude=("*norm*",))
    chain, _ = tiny.chain(run, folder, 2)
    model, views = slicemap.build(folder, run.manifest, DTYPES[live_dtype])
    replica = Replica(model, views, run, folder, CpuKernels())
    replica.apply(chain.entries)
    to = export.write(replica, run, folder, tmp_path / "deep" / "model")
    assert left_behind(to.parent) == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(to, dtype="auto")
    assert loaded.dtype == DTYPES[live_dtype]
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    names = set(manifest.stored(to))
    assert names == {spec.name for spec in run.manifest}
    assert models.resolve(str(to)).path == to
    text = AutoTokenizer.from_pretrained(to).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|user|>hi<|end|><|assistant|>"


def test_an_untrained_export_is_the_base(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen2"]
    run = tiny.lock(folder)
    to = export.write(State.load(run, folder, CpuKernels()), run, folder, tmp_path / "copy")
    assert manifest.base_digest(to, manifest.read(to)) == run.base
    for name, tensor in manifest.stored(folder).items():
        assert (tensor.raw() == manifest.stored(to)[name].raw()).all()


def test_a_large_model_is_written_in_several_files(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["mixtral"]
    run = tiny.lock(folder)
    monkeypatch.setattr(export, "SHARD", 20_000)
    to = export.write(State.load(run, folder, CpuKernels()), run, folder, tmp_path / "shards")
    files = sorted(to.glob("*.safetensors"))
    assert len(files) > 3 and all(path.stat().st_size < 40_000 for path in files)
    assert manifest.base_digest(to, manifest.read(to)) == run.base
    loaded = AutoModelForCausalLM.from_pretrained(to, dtype="auto").state_dict()
    original = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], original[name]) for name in original)


def test_nothing_but_text_and_weights_is_copied(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "base")
    (folder / "modeling_own.py").write_text("")
    (folder / "training.bin").write_bytes(b"x")
    tiny.edit_config(folder, torch_dtype="float32")
    run = tiny.lock(folder)
    to = export.write(State.load(run, folder, CpuKernels()), run, folder, tmp_path / "out")
    suffixes = {path.suffix for path in to.iterdir()}
    assert suffixes == {".json", ".jinja", ".safetensors"}
    config = json.loads((to / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config


# ---------------------------------------------------------------- refusals


@pytest.fixture
def small(folders: dict[str, Path]) -> Any:
    run = tiny.lock(folders["llama"])
    return State.load(run, folders["llama"], CpuKernels()), run, folders["llama"]


def test_an_existing_folder_is_left_alone(small: Any, tmp_path: Path) -> None:
    for name in ("folder", "file"):
        path = tmp_path / name
        if name == "file":
            path.write_text("mine")
        else:
            path.mkdir()
        with pytest.raises(export.ExportError, match="exists already"):
            export.write(*small, path)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(export.ExportError, match="something else"):
        export.write(*small, tmp_path / "file" / "under")


def test_a_disk_that_is_full_beforehand(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = export.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(export.ExportError, match="disk is full"):
        export.write(*small, tmp_path / "out")
    assert left_behind(tmp_path) == []


def test_a_disk_that_fills_up_half_way(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, []

    def fsync(handle: int) -> None:
        calls.append(1)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(export.os, "fsync", fsync)
    with pytest.raises(export.ExportError, match="disk is full"):
        export.write(*small, tmp_path / "out")
    assert left_behind(tmp_path) == []


def test_a_read_only_place(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> str:  # root, who runs tests in containers, may write anywhere
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(export.tempfile, "mkdtemp", refuse)
    with pytest.raises(export.ExportError, match="read-only"):
        export.write(*small, tmp_path / "out")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
@pytest.mark.parametrize("place", ["/proc/model", "/sys/model"])
def test_a_file_system_without_room_that_takes_no_folder_is_not_full(small: Any, place: str) -> None:
    with pytest.raises(export.ExportError, match=r"nothing can be made|read-only"):
        export.write(*small, place)


def test_an_interrupt_leaves_nothing(small: Any, tmp_path: Path) -> None:
    state, run, folder = small

    class Interrupted:
        def read(self, name: str) -> np.ndarray:
            if name == "model.norm.weight":
                raise KeyboardInterrupt
            return state.read(name)

    with pytest.raises(KeyboardInterrupt):
        export.write(Interrupted(), run, folder, tmp_path / "out")
    assert left_behind(tmp_path) == []
