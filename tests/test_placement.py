"""Where a master goes: from the memory there is, or as asked; both places give an engine the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esnode import memory, placement
from esnode.engines import transformers_engine
from esnode.engines.interface import MemoryPlan
from esnode.engines.wish import Wish
from esnode.hostmaster import SPARE, NotLeader
from esnode.manifest import WrongBase
from esnode.state import State
from tests import tiny

GB = 10**9
PLAN = MemoryPlan(master=30 * GB, live=15 * GB, other=8 * GB, available=80 * GB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("placement") / "llama")


@pytest.mark.parametrize(
    ("gpu", "host", "wish", "in_host"),
    [
        (80, 500, "auto", False),
        (48, 500, "auto", True),  # the master does not fit beside the rest
        (48, 20, "auto", False),  # nor into the host: refused as it is
        (16, 500, "auto", False),  # not even the rest fits
        (80, 500, "host", True),
        (48, 500, "device", False),
    ],
)
def test_the_master_is_on_the_gpu_if_it_fits(
    gpu: int, host: int, wish: str, in_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device="cpu", sharing=1: host * GB)
    plan = placement.settle(replace(PLAN, available=gpu * GB), "cuda", Wish(wish))
    assert (plan.host == 30 * GB) == in_host
    assert plan.on_device + plan.host == plan.total
    if in_host:
        memory.require(plan, "a model")
        assert "master 30.0 GB in host memory of 500.0 GB free" in memory.words(plan)
    elif gpu < 80:
        with pytest.raises(memory.MemoryShort, match=r"needs 53\.0 GB .* --master host"):
            memory.require(plan, "a model")


def test_ranks_need_a_host_master_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device="cpu", sharing=1: 70 * GB)
    plan = replace(PLAN, available=48 * GB)
    assert placement.settle(replace(plan, ranks=2), "cuda", Wish()).host == 30 * GB
    assert placement.settle(replace(plan, ranks=3), "cuda", Wish()).host == 0
    assert memory.in_host(replace(plan, host=30 * GB, ranks=2), "cuda") == 60 * GB
    assert memory.in_host(plan, "cpu") == plan.total


def test_a_cpu_keeps_its_master_in_the_process_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device="cpu", sharing=1: 54 * GB)
    assert placement.settle(replace(PLAN, available=10 * GB), "cpu", Wish()).host == 0
    asked = placement.settle(PLAN, "cpu", Wish("host"))
    assert asked.total == PLAN.total and asked.host_available == 31 * GB >= asked.host


def test_engines_that_share_a_gpu_plan_with_their_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GB, 80 * GB))
    assert memory.available("cuda") == 70 * GB
    assert memory.available("cuda", sharing=2) == 40 * GB
    assert memory.words(replace(PLAN, available=40 * GB), 2) == (
        "53.0 GB needed, 40.0 GB free for each of 2 engines on one GPU, 106.0 GB in all "
        "(master 30.0 GB, live weights 15.0 GB, work 8.0 GB)"
    )


def test_whoever_attaches_needs_no_memory_for_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device="cpu", sharing=1: SPARE)
    plan = placement.settle(PLAN, "cuda", Wish(attach="/proc/1/fd/3"))
    assert (plan.master, plan.host) == (0, 0)
    assert "shared master" in memory.words(plan)


@pytest.mark.parametrize(
    ("gpu", "master", "asks"),
    [(80, "auto", False), (48, "auto", True), (80, "host", True), (48, "device", False)],
)
def test_a_lane_asks_who_leads_only_when_its_master_belongs_in_the_host(
    gpu: int, master: str, asks: bool
) -> None:
    answers = ["/proc/1/fd/3", ""]
    plan = replace(PLAN, available=gpu * GB)
    found = [placement.agree(plan, "cuda", Wish(master, ask=lambda: answers.pop(0))) for _ in range(2)]
    assert [wish.attach for wish in found] == (["/proc/1/fd/3", None] if asks else [None, None])
    assert bool(answers) != asks


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_engines_over_one_master_answer_like_one_with_its_own(folder: Path, master: str) -> None:
    run = tiny.lock(folder, master=master, live_dtype="float32")
    chain, _ = tiny.chain(run, folder, 4)
    alone = transformers_engine.load(run, folder)
    leader = transformers_engine.load(run, folder, wish=Wish("host"))
    assert leader.host_path is not None and leader.digest() == run.digest
    follower = transformers_engine.load(run, folder, wish=Wish(attach=leader.host_path))
    assert alone.apply(chain.entries) == leader.apply(chain.entries)
    assert follower.refresh() == leader.digest() == alone.digest()
    with pytest.raises(NotLeader):
        follower.apply(chain.entries)
    late = transformers_engine.load(run, folder, wish=Wish(attach=leader.host_path))
    prompts, targets = [[3, 4, 5], [9, 8, 7, 6]], [[5, 6], [1, 2, 3]]
    for engine in (alone, leader, follower, late):
        engine.perturb(7, 0.0078125, -1)
    wanted = alone.loglik(prompts, targets)
    assert all(engine.loglik(prompts, targets) == wanted for engine in (leader, follower, late))
    for engine in (alone, leader, follower, late):
        engine.restore()
    assert all(engine.damaged() == () for engine in (alone, leader, follower, late))


def test_another_model_is_refused_before_it_is_shared(folder: Path, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other", seed=1)
    with pytest.raises(WrongBase, match="its digest is"):
        transformers_engine.load(tiny.lock(folder), other, wish=Wish("host"))


def test_a_state_says_whom_it_belongs_to(folder: Path) -> None:
    state = State.load(tiny.lock(folder), folder, placement.pick("cpu", None, None))
    assert state.leads and state.host_path is None
