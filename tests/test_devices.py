"""GPUs and lanes that a user asks for, and the lock that keeps two nodes off one GPU."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from esnode import devices, workshop
from esnode.devices import DeviceError, Lane, lanes_of, of_nodes
from esnode.nodeoptions import Options


def gpus_here(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(count))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_an_engine_for_every_gpu_or_group_and_the_cpu_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 4)
    monkeypatch.setattr(devices.accelerators, "plausible", lambda: False)
    assert lanes_of("all", None) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert lanes_of("3,1", 1) == ("cuda:3", "cuda:1", "cpu")
    assert lanes_of("all", None, group=2) == ("cuda:0+cuda:1", "cuda:2+cuda:3")
    assert lanes_of(None, 2) == ("cpu", "cpu")
    assert lanes_of(None, None) == lanes_of(None, 1) == (), "one engine in the node's own process"


def test_ranks_are_a_lane_also_where_nobody_named_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 4)
    monkeypatch.setattr(devices.accelerators, "plausible", lambda: True)
    assert devices.group_of(1) == ()
    assert devices.group_of(2) == ("cuda:0+cuda:1",)
    assert devices.group_of(8) == ("cuda:0+cuda:1+cuda:2+cuda:3",), "too few, which the engine says"
    monkeypatch.setattr(devices.accelerators, "plausible", lambda: False)
    assert devices.group_of(2) == ("cpu",)


def test_nodes_of_one_machine_share_its_gpus_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 4)
    monkeypatch.setattr(devices.accelerators, "plausible", lambda: True)
    four = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert of_nodes(None, None, 1, 1, None) == of_nodes("all", None, 1, 1, 1) == (four,), "one node, all GPUs"
    assert of_nodes("0,2", None, 1, 1, None) == (("cuda:0", "cuda:2"),)
    assert of_nodes("all", 1, 2, 1, 2) == (("cuda:0+cuda:1", "cpu"), ("cuda:2+cuda:3", "cpu"))
    assert of_nodes(None, None, 1, 1, 3) == (four[:1], four[1:2], four[2:])
    assert of_nodes(None, 2, 1, 1, 2) == (("cpu", "cpu"),) * 2, "lanes leave the GPUs alone"
    assert of_nodes(None, 1, 1, 1, None) == (("cpu",),), "a process that sees no GPU"
    with pytest.raises(DeviceError, match=r"--nodes 5: 4 engines on GPUs cannot be shared out among 5 nodes"):
        of_nodes("all", None, 1, 1, 5)


def test_nodes_of_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 0)
    monkeypatch.setattr(devices.accelerators, "plausible", lambda: False)
    assert of_nodes(None, None, 1, 1, None) == of_nodes(None, 1, 1, 1, 2) == ((), ())
    assert of_nodes(None, 2, 1, 1, None) == (("cpu", "cpu"),)
    assert of_nodes(None, None, 2, 1, None) == (("cpu",),), "--tp 2 on cores: ranks are a lane, as for join"
    assert of_nodes(None, None, 2, 1, 3) == (("cpu",),) * 3


def test_several_engines_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 2)
    assert lanes_of("all", None, per_gpu=2) == ("cuda:0", "cuda:0", "cuda:1", "cuda:1")
    with pytest.raises(DeviceError, match="say which with --gpus"):
        lanes_of(None, 2, per_gpu=2)
    with pytest.raises(DeviceError, match="leave --tp out"):
        lanes_of("all", None, group=2, per_gpu=2)


@pytest.mark.parametrize(
    ("here", "asked", "words"),
    [
        (0, "all", "torch finds no CUDA device on this machine; leave --gpus out"),
        (2, "7", "there is no GPU 7, the GPUs of this machine are 0 to 1"),
        (1, "0,1", "there is no GPU 1, this machine has GPU 0 only"),
        (2, "first", "write `all` or indices such as 0,1"),
        (2, "1,1", "names a GPU twice"),
    ],
)
def test_gpus_that_are_not_there(here: int, asked: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, here)
    monkeypatch.setattr(devices.accelerators, "obstacle", lambda: None)
    with pytest.raises(DeviceError, match=words):
        lanes_of(asked, None)


def test_no_driver_is_said_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 0)
    monkeypatch.setattr(
        devices.accelerators, "obstacle", lambda: "an NVIDIA GPU is here, but no driver for it"
    )
    with pytest.raises(DeviceError, match="--gpus all: an NVIDIA GPU is here, but no driver"):
        lanes_of("all", None)


def test_groups_must_come_out_even(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 3)
    with pytest.raises(DeviceError, match="3 GPUs cannot be shared out in groups of 2"):
        lanes_of("all", None, group=2)


def test_a_lane_in_words() -> None:
    assert devices.lane("cuda:0+cuda:1") == Lane(("cuda:0", "cuda:1"))
    assert devices.lane("cpu/reference/2") == Lane(("cpu",), "reference", 2)
    for wrong in ("", "cpu/reference/two", "cpu/a/1/b"):
        with pytest.raises(DeviceError, match="write DEVICE"):
            devices.lane(wrong)


def test_a_lane_sees_its_own_gpus_only_of_those_its_node_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,7")
    around = devices.surroundings(devices.lane("cuda:2+cuda:1"), 3)
    assert around["CUDA_VISIBLE_DEVICES"] == "7,6" and around["OMP_NUM_THREADS"] == "3"
    assert devices.surroundings(devices.lane("cpu"), 1)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_lane_whose_gpu_is_gone_does_not_take_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again after its GPU fell off the bus, it would load the model into the host's memory."""
    monkeypatch.setattr("esnode.accelerators.device", lambda: "cpu")
    monkeypatch.setattr("esnode.accelerators.obstacle", lambda: None)
    log, lane = logging.getLogger("n"), Options(Path("run"), "n", 1, planned=lambda *sizes: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(DeviceError, match="GPU of this engine cannot be used any more: torch does not find"):
        workshop._device(lane, log)
    assert workshop._device(replace(lane, planned=None), log) == "cpu", "a node that was given none"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert workshop._device(lane, log) == "cpu", "a lane on the CPU"


def test_rocm_has_a_variable_of_its_own_which_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses two that differ, and HIP follows its own: every lane would see the same GPUs."""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "HIP_VISIBLE_DEVICES" not in devices.surroundings(devices.lane("cuda:1"), 1), "a stray one"
    monkeypatch.setattr("torch.version.hip", "6.3")
    around = devices.surroundings(devices.lane("cuda:1"), 1)
    assert around["HIP_VISIBLE_DEVICES"] == around["CUDA_VISIBLE_DEVICES"] == "3"


def test_two_nodes_never_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESNODE_DATA", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    held = devices.claim(["fake:0", "cpu"], "node a of the run in /runs/one (process 12)")
    with pytest.raises(DeviceError, match="fake:0 is used by node a of the run in /runs/one"):
        devices.claim(["fake:1", "fake:0"], "node b")
    assert devices.claim(["fake:1", "cpu"], "node b"), "what was taken before the refusal is free again"
    for file in held:
        file.close()
    assert devices.claim(["fake:0"], "node b")


def test_a_gpu_by_another_name_is_the_same_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes that see one card, one as index 0 and one as its UUID, and a third that sees another card."""
    cards = {"0": "aaaa", "GPU-aaaa": "aaaa", "1": "bbbb"}

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=cards[os.environ["CUDA_VISIBLE_DEVICES"].split(",")[index]])

    monkeypatch.setenv("ESNODE_DATA", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    held = devices.claim(["cuda:0"], "node a of the run in /runs/one (process 12)")
    for names in ("GPU-aaaa", "1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        with pytest.raises(DeviceError, match=r"is used by node a of the run in /runs/one"):
            devices.claim([f"cuda:{names.count(',')}"], "node b")
    assert devices.claim(["cuda:0"], "node b"), "the other card"
    assert held
