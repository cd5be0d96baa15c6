"""A GPU that torch cannot use is told in one sentence: at node start and by doctor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from esnode import accelerators, doctor

OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by"
NONE = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a network card and an NVIDIA GPU, and a torch that finds no GPU."""
    for name, kind, vendor in (
        ("0000:00:1f.6", "0x020000", "0x8086"),
        ("0000:01:00.0", "0x030200", "0x10de"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "class").write_text(f"{kind}\n")
        (folder / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(accelerators, "_PCI", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def fail(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def init() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OLD, "the NVIDIA driver is too old for this torch: it knows CUDA 11.4, torch needs 12.8; update"),
        (NONE, "an NVIDIA GPU is here, but no driver for it: install the NVIDIA driver"),
        ("CUDA unknown error.\nand more", "torch cannot use it: CUDA unknown error"),
    ],
)
def test_what_torch_says_becomes_a_sentence(
    card: None, monkeypatch: pytest.MonkeyPatch, error: str, sentence: str
) -> None:
    fail(monkeypatch, error)
    found = accelerators.obstacle()
    assert found is not None and sentence in found and "\n" not in found
    assert accelerators.device() == "cpu"


def test_a_hidden_gpu_and_a_torch_for_cpus(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "CUDA_VISIBLE_DEVICES" in str(accelerators.obstacle())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built for CPUs only" in str(accelerators.obstacle())


def test_a_machine_without_a_gpu_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "_PCI", tmp_path)
    assert accelerators.obstacle() is None


def test_doctor_tells_it_and_is_ready_for_the_cpu(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, OLD)
    monkeypatch.setattr(doctor, "_USUAL_SIZE", 1 << 12)
    report = doctor.examine("cpu")
    assert "knows CUDA 11.4" in report["hardware"]["obstacle"]
    assert report["ready"] and "on the CPU, for the NVIDIA driver is too old" in report["verdict"]


# ---------------------------------------------------------------- which GPU it is

SMI = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA A100 (UUID: GPU-bbbb2222-0000)
  MIG 3g.20gb     Device  0: (UUID: MIG-cccc3333-0000)
  MIG 3g.20gb     Device  1: (UUID: MIG-dddd4444-0000)
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """nvidia-smi of a machine with a whole GPU and one in two slices."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && cat <<'END'\n{SMI}END\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    accelerators._listed.cache_clear()
    yield
    accelerators._listed.cache_clear()


def torch_says(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """A torch that sees GPUs of these UUIDs, in its own order."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))


def test_libraries_that_ask_nvidia_find_the_gpu_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unlike cards, of which CUDA counts the second on the bus first."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(accelerators, "_listed", lambda: [["GPU-slow"], ["GPU-fast"], ["GPU-other"]])
    torch_says(monkeypatch, "fast", "slow")
    told = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"}
    assert accelerators.numbered() == told
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a lane's process
    assert accelerators.numbered() == {**told, "CUDA_VISIBLE_DEVICES": "1"}
    for cards in ([["GPU-fast"]], [["GPU-slow"], ["GPU-fast", "MIG-a"]], [["GPU-slow"], ["GPU-else"]], []):
        monkeypatch.setattr(accelerators, "_listed", lambda cards=cards: cards)
        assert accelerators.numbered() == {}


@pytest.mark.parametrize("named", ["0", "1", "GPU-aaaa", "GPU-aaaa1111-0000"])
def test_a_gpu_is_known_by_its_uuid_however_it_is_named(
    named: str, smi: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_says(monkeypatch, "aaaa1111-0000")  # CUDA counts as it likes: its 1 may be nvidia-smi's 0
    assert accelerators.identity(0, named) == "GPU-aaaa1111-0000"


@pytest.mark.parametrize(
    ("named", "uuid"),
    [
        ("0", "GPU-aaaa1111-0000"),
        ("GPU-aa", "GPU-aaaa1111-0000"),
        ("1", "MIG-cccc3333-0000"),
        ("GPU-bbbb", "MIG-cccc3333-0000"),
        ("MIG-dddd", "MIG-dddd4444-0000"),
        ("MIG-cccc3333-0000", "MIG-cccc3333-0000"),
        ("7", "7"),
        ("GPU-", "GPU-"),
    ],
)
def test_without_a_uuid_from_torch_nvidia_smi_tells(named: str, uuid: str, smi: None) -> None:
    """Torch is built for CPUs here; of a GPU in slices CUDA takes the first; two that fit are no answer."""
    assert accelerators.identity(0, named) == uuid


def test_a_slice_by_what_torch_says_of_it(smi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers give the UUID of the slice, older ones that of its GPU: the same slice."""
    torch_says(monkeypatch, "cccc3333-0000", "bbbb2222-0000")
    assert accelerators.identity(0, "1") == accelerators.identity(1, "1") == "MIG-cccc3333-0000"
    assert accelerators.identity(1, "MIG-dddd4444-0000") == "MIG-dddd4444-0000", "its second slice"


def test_without_nvidia_smi_the_uuid_of_torch_or_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "_listed", list)
    assert accelerators.identity(0, "3") == "3"
    torch_says(monkeypatch, "GPU-eeee")
    assert accelerators.identity(0, "3") == "GPU-eeee"
