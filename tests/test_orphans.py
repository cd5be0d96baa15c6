"""kill -9 of every kind of process that has children: whatever it had started goes with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import keys
from tests import kinship
from tests.runs import ROOT, SIGNING_SEED, Processes, make_folder, wait_for

LANES = ("tests.odd_lane:scored", "--lane", "cpu", "--lane", "cpu", "--peer-port", "0")


def kill_with_all(pid: int) -> None:
    """kill -9, and all that this process had started is gone within seconds."""
    children = kinship.descendants(pid)
    assert children
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not kinship.living(children), 10, f"for {kinship.living(children)}")


def test_nothing_outlives_a_killed_lane_node_or_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a node of two lanes, each with a scorer, and the process that serves snapshots."""
    (tmp_path / "user").mkdir()
    keys.write_signing(tmp_path / "user" / "coordinator.key", SIGNING_SEED)
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "user"))
    make_folder(tmp_path, ("node-1",))
    (tmp_path / "hold").touch()
    words = [sys.executable, "-m", "tests.toy_run", str(tmp_path), "1", *LANES]
    run = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)

    def of(module: str) -> set[int]:
        return kinship.named(kinship.descendants(run.pid), module)

    def whole() -> bool:
        assert run.poll() is None
        return [len(of(m)) for m in ("laneprocess", "scoring_worker", "donor")] == [2, 2, 1]

    try:
        for victim in ("esnode.laneprocess", "esnode.daemon", "tests.toy_run"):
            wait_for(whole, what=f"for everything to be there before the end of {victim}")
            kill_with_all(min(of(victim), default=run.pid))
    finally:
        run.kill()
        run.wait()


def test_the_relay_ends_with_a_killed_coordinator(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator("--relay", "tcp://127.0.0.1:0")
        wait_for(lambda: kinship.named(kinship.descendants(coordinator.pid), "coordinator.relay"))
        kill_with_all(coordinator.pid)


def test_all_of_a_node_without_lanes_end_with_it(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "hold").touch()
    with Processes(tmp_path) as processes:
        processes.coordinator()
        words = ("--loader", "tests.odd_lane:scored", "--peer-port", "0")
        node = processes.node("n1", *words)
        for module in ("scoring_worker", "esnode.donor"):
            wait_for(lambda module=module: kinship.named(kinship.descendants(node.pid), module))
        kill_with_all(node.pid)
