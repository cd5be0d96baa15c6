"""GPUs dealt out by a node that was told none of it: when, what becomes of it, and what it says."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from esnode import fleet, gpugroups, memory, nodeoptions
from esnode.gpugroups import GroupsError
from esnode.ranks import Deal
from tests import tiny

LOG = logging.getLogger("gpugroups")
WORDS = ("--run", "r", "--name", "n", "--engine", "vllm")


def options_of(*lanes: str, more: Sequence[str] = ()) -> nodeoptions.Options:
    words = [word for lane in lanes for word in ("--lane", lane)]
    return nodeoptions.parse([*WORDS, *words, *more])


def test_lanes_become_groups_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[list[int]] = []

    def measure(options: object, indices: list[int]) -> Deal:
        asked.append(indices)
        return Deal(((0, 2), (1,)), ("GPUs 0, 2 (one): 1 engine of 2 GPUs", "GPU 1 (another): 1 engine"))

    monkeypatch.setattr(gpugroups, "_measure", measure)
    with caplog.at_level(logging.INFO):
        found = gpugroups.settle(options_of("cuda:0", "cuda:1", "cuda:2", "cpu"), None, LOG)  # type: ignore[arg-type]
    assert found.lanes == ("cuda:0+cuda:2", "cuda:1", "cpu") and asked == [[0, 1, 2]]
    assert caplog.messages[0] == "GPUs 0, 2 (one): 1 engine of 2 GPUs (--tp N overrules)"


@pytest.mark.parametrize(
    "given",
    [
        options_of("cuda:0", "cuda:1", more=("--tp", "1")),
        options_of("cuda:0+cuda:1", "cuda:2+cuda:3", more=("--tp", "2")),
        options_of("cuda:0", "cuda:0", "cuda:1", "cuda:1"),
        options_of("cuda:0", "cuda:1", more=("--engine", "transformers")),
        options_of("cuda:0", "cpu"),
        options_of("cpu", "cpu"),
    ],
)
def test_what_was_said_is_not_measured(given: nodeoptions.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpugroups, "_measure", lambda *_: pytest.fail("measured"))
    assert gpugroups.settle(given, None, LOG) is given  # type: ignore[arg-type]


def test_a_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's needs from its lock, each GPU's memory from torch; 8 GB of cache, or less."""
    import torch

    model = tiny.write(tmp_path / "m")
    lock = tiny.lock(model)
    kinds = {"cuda:0": ("A", 20), "cuda:1": ("B", 4), "cuda:2": ("A", 20), "cuda:3": ("C", 6)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: kinds[device][0])
    monkeypatch.setattr(memory, "available", lambda device="cpu": kinds.get(device, ("", 60))[1] * 10**9)
    given = options_of(*kinds, more=("--model", str(model)))
    found = gpugroups.measured(given, lock, LOG)
    assert found.groups == ((0,), (2,), (3,))
    assert "GPU 1 (B): not used, at best 4.3 GB" in found.words[1]
    assert "GPU 3 (C): 1 engine, 5.4 GB of 6.0 GB" in found.words[2]


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (b'{"refused": "m fits no GPU"}', "^m fits no GPU. --tp N says how many"),
        (b"", "the process that measures the GPUs has ended"),
        (None, "the driver of the GPUs says nothing for 300 s: try `nvidia-smi`"),
    ],
)
def test_a_measurement_that_fails(printed: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        if printed is None:
            raise subprocess.TimeoutExpired(command, 300.0)
        return subprocess.CompletedProcess(command, 0, printed)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(GroupsError, match=words):
        gpugroups.settle(options_of("cuda:0", "cuda:1"), None, LOG)  # type: ignore[arg-type]


def test_a_group_is_the_ranks_of_its_lane() -> None:
    given = options_of("cuda:0+cuda:1", "cuda:2", "cpu")
    assert [fleet.ranks_of(lane, given.wish) for lane in given.lanes] == [2, 0, 0]
    two = options_of("cuda:0+cuda:1", "cpu", more=("--tp", "2"))
    assert [fleet.ranks_of(lane, two.wish) for lane in two.lanes] == [2, 2]


def test_a_lane_is_told_how_many_share_its_gpu() -> None:
    options = nodeoptions.parse(["--run", "r", "--name", "a", "--sharing", "2"])
    assert options.wish.sharing == 2
    assert "--sharing" in nodeoptions.lane_words(options, 1, None, 2)
    assert "--sharing" not in nodeoptions.lane_words(options, 1, None)
