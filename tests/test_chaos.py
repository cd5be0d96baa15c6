"""The chaos test itself (see `chaos.py`): a short one by default, half an hour among the slow ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol import ledger
from tests import chaos, joined_chaos, netns, toy_engine
from tests.runs import Processes, make_folder


def story(act: Callable[..., chaos.Play], path: Path, seed: int, seconds: float, gap: float = 2.0) -> None:
    """Chaos of a seed; the story is the message of a failure."""
    lines: list[str] = []
    cuts, lanes = act is chaos.across_namespaces, act is chaos.toy
    deeds = chaos.schedule(seed, seconds, gap, cuts=cuts, lanes=lanes)
    play = act(path, deeds, seconds, lines.append)
    assert not play.violations, "\n".join([*lines, *play.violations])


def test_a_schedule_is_its_seeds() -> None:
    deeds = chaos.schedule(3, 600)
    assert deeds == chaos.schedule(3, 600) != chaos.schedule(4, 600)
    assert {deed.victim for deed in deeds} == set(chaos.EVERYBODY)
    assert {deed.what for deed in deeds} == {"kill", "pause", "terminate"}
    more = chaos.schedule(3, 600, lanes=True)
    assert {deed.victim for deed in more if deed.what in chaos.LANE_DEEDS} == set(chaos.LANED)
    for one in chaos.EVERYBODY:
        mine = [deed for deed in deeds if deed.victim == one]
        assert all(a.at + a.down < b.at for a, b in itertools.pairwise(mine)), "nobody is hit twice"
    assert sum(len({d.victim for d in deeds if d.at == at}) == 5 for at in {d.at for d in deeds}) > 2


def test_the_computed_truth_is_that_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, ("n1",), rounds=3)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        processes.wait_end()
    path = tmp_path / "run.ledger"
    lock = ledger.read(path).chain.lock
    assert chaos.differences(path, toy_engine.ToyWorkshop(lock, "truth")) == []
    monkeypatch.setattr(toy_engine, "_reward", lambda live, prompt: -prompt / 8)
    found = chaos.differences(path, toy_engine.ToyWorkshop(lock, "truth"))
    assert "the rewards of round 0 are others" in found


def test_random_kills_pauses_and_restarts(tmp_path: Path) -> None:
    story(chaos.toy, tmp_path, seed=3, seconds=25, gap=1.5)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_half_an_hour(tmp_path: Path) -> None:
    story(chaos.toy, tmp_path, seed=int(time.time()) % 10**6, seconds=1800)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "-")
def test_ten_minutes_across_namespaces(tmp_path: Path) -> None:
    story(chaos.across_namespaces, tmp_path, seed=int(time.time()) % 10**6, seconds=600)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_minutes_with_a_language_model(tmp_path: Path) -> None:
    story(chaos.tiny_model, tmp_path, seed=int(time.time()) % 10**6, seconds=300, gap=10.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_minutes_of_machines_that_joined(tmp_path: Path) -> None:
    """Half way a successor takes over from a node's ledger, at the lost coordinator's address."""
    story(joined_chaos.perform, tmp_path, seed=int(time.time()) % 10**6, seconds=120, gap=4.0)
