"""A GPU that torch cannot use is told in one sentence: at node start and by doctor."""

from __future__ import annotations

from pathlib import Path

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
