"""Several engine processes in one node, for real: killed, flipped, restarted; the run does not notice."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from esnode import joined, memory, nodeoptions, standing
from esnode.fleet import Fleet, LanesFailed
from esnode.lanewire import Refused
from protocol import ledger
from tests.chaos import lane_pids
from tests.runs import Processes, alive, make_folder, toy_lock, wait_for

LANES = ("--lane", "cpu", "--lane", "cpu", "--loader", "tests.odd_lane:toy")


def single_lane(folder: Path, **changes: object) -> int:
    """D of the same run by one engine in one process."""
    folder.mkdir()
    make_folder(folder, ("n1",), **changes)  # type: ignore[arg-type]
    with Processes(folder) as processes:
        processes.coordinator()
        processes.node("n1")
        processes.wait_end()
    return Processes(folder).final_digest()


def units_of(processes: Processes) -> list[str]:
    return [label for node in processes.status().get("nodes", ()) for label, _ in node["units"]]


def test_two_lanes_a_kill_and_a_wrong_update_leave_the_run_unharmed(tmp_path: Path) -> None:
    truth = single_lane(tmp_path / "one", rounds=5)
    folder = tmp_path / "two"
    folder.mkdir()
    make_folder(folder, ("n1",), rounds=5)
    (folder / "hold").touch()
    with Processes(folder) as processes:
        processes.coordinator()
        node = processes.node("n1", *LANES)
        wait_for(lambda: len(units_of(processes)) == 3)
        assert processes.status()["nodes"][0]["lanes"] == 2
        os.kill(lane_pids(node)[0], signal.SIGKILL)
        wait_for(lambda: "has ended: killed by SIGKILL" in processes.words("n1"))
        wait_for(lambda: processes.words("n1").count("is ready: toy") == 3)
        (folder / "wrong").touch()
        (folder / "hold").unlink()
        processes.wait_end()
        assert node.wait(20) == 0, processes.words("n1")
        words = processes.words("n1")
    assert "lanes differ after one update" in words
    assert processes.final_digest() == truth
    assert not ledger.read(folder / "run.ledger").problem


def test_a_node_of_two_lanes_beside_one_of_one(tmp_path: Path) -> None:
    """One lane is killed: status says which and why, the run goes on to the bits of a single engine."""
    truth = single_lane(tmp_path / "one", rounds=5)
    folder = tmp_path / "two"
    folder.mkdir()
    make_folder(folder, ("n1", "n2"), rounds=5)
    (folder / "hold").touch()
    with Processes(folder) as processes:
        processes.coordinator()
        nodes = [processes.node("n1", *LANES), processes.node("n2", *LANES[4:])]
        wait_for(lambda: len(units_of(processes)) == 5, what="for two units and one in reserve, and 1 + 1")
        os.kill(lane_pids(nodes[0])[1], signal.SIGKILL)
        first = wait_for(lambda: [n for n in processes.status()["nodes"] if n["lost"]])[0]
        assert (first["name"], first["lanes"]) == ("n1", 1)
        assert first["lost"].startswith("lane 1 (cpu) has ended: killed by SIGKILL")
        assert first["lost"] in standing._why(first)
        wait_for(
            lambda: not any(n["lost"] for n in processes.status()["nodes"]), what="for the lane's return"
        )
        (folder / "hold").unlink()
        processes.wait_end()
        assert [node.wait(20) for node in nodes] == [0, 0]
        assert "dispute" not in processes.words("coordinator"), "D of both nodes is the same in every round"
    assert processes.final_digest() == truth


@pytest.mark.slow  # pauses of half a minute in all
def test_an_engine_that_never_comes_up_ends_the_node_with_a_sentence(tmp_path: Path) -> None:
    make_folder(tmp_path, ("n1",))
    (tmp_path / "die").touch()
    with Processes(tmp_path) as processes:
        processes.coordinator()
        node = processes.node("n1", "--lane", "cpu", *LANES[4:])
        assert node.wait(60) == 1
        last = processes.words("n1").splitlines()[-1]
    assert last.startswith("esnode: no engine of this node is left. lane 0 (cpu) is given up: it has ended 5")
    assert "SIGABRT" in last


def test_lanes_end_with_their_node(tmp_path: Path) -> None:
    """With what they have started, such as the ranks of their engines."""
    make_folder(tmp_path, ("n1",))
    (tmp_path / "hold").touch()
    (tmp_path / "child").touch()
    with Processes(tmp_path) as processes:
        processes.coordinator()
        node = processes.node("n1", *LANES)
        wait_for(lambda: units_of(processes))
        pids = lane_pids(node)
        assert len(pids) == 2
        pids += [int(path.suffix[1:]) for path in tmp_path.glob("child.*")]
        assert len(pids) == 4 and all(map(alive, pids))
        processes.kill("n1")
        wait_for(lambda: not any(alive(pid) for pid in pids), 20)
        node = processes.node("n1", *LANES)
        wait_for(lambda: len(lane_pids(node)) == 2 and "returned" in processes.words("coordinator"))
        pids, began = lane_pids(node), time.monotonic()
        node.terminate()
        assert node.wait(20) == 0 and time.monotonic() - began < 10
        wait_for(lambda: not any(alive(pid) for pid in pids), 20)


def test_an_engine_that_ended_for_want_of_memory_begins_again_with_fewer_rows(tmp_path: Path) -> None:
    make_folder(tmp_path, ("n1",), rounds=2)
    (tmp_path / "short").touch()
    with Processes(tmp_path) as processes:
        processes.coordinator()
        node = processes.node("n1", "--lane", "cpu", *LANES[4:])
        processes.wait_end()
        assert node.wait(20) == 0
        assert "takes at most 5 prompts at once from now on" in processes.words("n1")
    assert (tmp_path / "rows.5").exists()


def test_a_lane_that_starts_again_with_another_lock_is_given_up(tmp_path: Path) -> None:
    """Its updates would be of other bits than its siblings', and they all would go back for it."""
    make_folder(tmp_path, ("n1",))
    (tmp_path / "hold").touch()
    with Processes(tmp_path) as processes:
        processes.coordinator()
        node = processes.node("n1", *LANES)
        wait_for(lambda: len(units_of(processes)) == 3)
        (tmp_path / "lock.json").write_bytes(toy_lock(alpha=(0.125,)).to_bytes())
        os.kill(lane_pids(node)[0], signal.SIGKILL)
        wait_for(lambda: "is given up: " in processes.words("n1"))
        assert "lock.json has been altered since this node started" in processes.words("n1")
        (tmp_path / "hold").unlink()
        processes.wait_end()
        assert node.wait(20) == 0, processes.words("n1")


def test_stopped_lanes_go_with_their_node(tmp_path: Path) -> None:
    """A process that is stopped, or hangs in native code, does not see that its node is gone."""
    make_folder(tmp_path, ("n1",))
    (tmp_path / "hold").touch()
    with Processes(tmp_path) as processes:
        processes.coordinator()
        node = processes.node("n1", *LANES)
        wait_for(lambda: units_of(processes))
        pids = lane_pids(node)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        processes.kill("n1")
        wait_for(lambda: not any(alive(pid) for pid in pids), 20)


def test_a_lane_that_takes_nothing_or_sends_anything_or_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = make_folder(tmp_path, ("n1",))
    options = nodeoptions.parse(["--run", str(tmp_path), "--name", "n1", "--threads", "1", *LANES])
    with contextlib.closing(Fleet(options, lock, logging.getLogger("n1"))) as fleet:
        fleet.wait_loaded()
        first, second = (fleet._processes[number] for number in (0, 1))
        os.kill(first.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(100):
            fleet._tell(0, Refused("x" * 100_000))  # any frame: ten megabytes are more than a socket holds
        assert time.monotonic() - began < 5
        second.pipe._stream = io.BytesIO(b"\x05\0\0\0\xff\xc1\xc1\xc1\xc1")
        while second in fleet._processes.values():
            fleet.events(time.monotonic())
        assert fleet._state.lanes[1].crashes == 1 and second.process.poll() is not None

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            while fleet._state.lanes[1].crashes == 1:
                fleet.events(time.monotonic())
        assert "its process cannot be started: Cannot allocate memory" in caplog.text
        while 1 not in fleet._processes:
            fleet.events(time.monotonic())


@pytest.mark.parametrize(
    ("free", "allowed", "words"),
    [
        (
            7,
            0,
            r"2 engines of this node need 8\.0 GB of host memory together \(4\.0 GB, 4\.0 GB\) and 7\.0 GB",
        ),
        (9, 11, r"needs at least 12\.00 GB of memory and this machine's policy allows 11 \(memory_gb\)"),
        (9, 13, ""),
    ],
)
def test_lanes_plan_together(
    free: int, allowed: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would fit alone; by what the machine has, and by what its owner allows joined runs."""
    lock = make_folder(tmp_path, ("n1",))
    joined.write(tmp_path, joined.Joined(lock.run_id, ("tcp://127.0.0.1:1",), {}))
    (tmp_path / "node.toml").write_text(f"memory_gb = {allowed}")
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path))
    monkeypatch.setattr(memory, "available", lambda: free * 10**9)
    words_ = ["--run", str(tmp_path), "--name", "n1", *LANES[:4], "--loader", "tests.odd_lane:hungry"]
    with contextlib.closing(Fleet(nodeoptions.parse(words_), lock, logging.getLogger("n1"))) as fleet:
        if not words:
            fleet.wait_loaded()
            assert fleet.about.lanes == 2
        else:
            with pytest.raises(LanesFailed, match=words):
                fleet.wait_loaded()


def test_two_nodes_told_to_use_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESNODE_DATA", str(tmp_path / "data"))
    make_folder(tmp_path, ("n1", "n2"))
    (tmp_path / "hold").touch()
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1", "--lane", "fake:0", *LANES[4:])
        wait_for(lambda: "is ready" in processes.words("n1"))
        assert processes.node("n2", "--lane", "fake:1+fake:0", *LANES[4:]).wait(60) == 1
        line = processes.words("n2").splitlines()[-1]
    assert line.startswith("esnode: fake:0 is used by node n1 of the run in ")


TINY = """
[run]
model = "{model}"
task = "short-answers"
repeatable = true
[run.es]
members = 6
mirrored = true
sigma = 0.0078125
alpha = 0.0078125
[run.prompts]
per_round = 8
[ops]
rounds = 3
eval_every = 3
"""


def tiny_run(folder: Path, model: Path, rounds: int = 3) -> Processes:
    """A run of a language model with random weights, one node admitted."""
    from esnode import begin
    from esnode.folder import RunFolder
    from esnode.tell import silent

    folder.mkdir()
    plan = folder / "given.toml"
    plan.write_text(TINY.format(model=model).replace("rounds = 3", f"rounds = {rounds}"))
    place = RunFolder(folder / "run")
    place.path.mkdir()
    begin.settle(place, begin.Request(out=place.path, plan=plan), silent)
    begin.admit(place, ("n1",))
    return Processes(place.path)


@pytest.mark.slow  # four loads of torch and a model
def test_two_transformers_of_unlike_kernels_are_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lane is killed within a unit, in the other a bit flips: the bits are those of a single lane."""
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    from tests import tiny

    model = tiny.write(tmp_path / "model")
    words = ("--run", "{}", "--name", "n1", "--threads", "1")
    with tiny_run(tmp_path / "one", model) as single:
        single.coordinator()
        single.start("n1", "esnode.daemon", *[w.format(single.folder) for w in words])
        single.wait_end()
    with tiny_run(tmp_path / "two", model) as double:
        double.coordinator()
        lanes = ("--lane", "cpu/cpu", "--lane", "cpu/reference", "--loader", "tests.odd_lane:tiny")
        (double.folder / "hold").touch()
        node = double.start("n1", "esnode.daemon", *[w.format(double.folder) for w in words], *lanes)
        wait_for(lambda: len(units_of(double)) == 3)
        assert double.status()["nodes"][0]["backend"] == "cpu+reference"
        os.kill(lane_pids(node)[0], signal.SIGKILL)
        wait_for(lambda: "has ended: killed by SIGKILL" in double.words("n1"))
        (double.folder / "flip").touch()
        (double.folder / "hold").unlink()
        wait_for(lambda: "changed in memory" in double.words("n1"))
        double.wait_end()
        assert node.wait(20) == 0, double.words("n1")
        assert any(
            "changed in memory" in line
            for line in (double.folder / "coordinator.stderr").read_text().splitlines()
        )
    one, two = (ledger.read(run.folder / "run.ledger").chain for run in (single, double))
    assert one.lock.run_id == two.lock.run_id
    assert [entry.digest for entry in one.commits] == [entry.digest for entry in two.commits]
    assert single.final_digest() == double.final_digest()


@pytest.mark.slow  # five loads of torch and a model
def test_two_transformers_over_one_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reader and leader are killed, each within a unit: the bits are those of one engine without lanes."""
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    from tests import tiny

    model = tiny.write(tmp_path / "model")
    words = ("--run", "{}", "--name", "n1", "--threads", "1")
    with tiny_run(tmp_path / "one", model, 6) as single:
        single.coordinator()
        single.start("n1", "esnode.daemon", *[w.format(single.folder) for w in words])
        single.wait_end()
    with tiny_run(tmp_path / "two", model, 6) as double:
        double.coordinator()
        lanes = ("--lane", "cpu", "--lane", "cpu", "--master", "host", "--loader", "tests.odd_lane:tiny")
        hold = double.folder / "hold"
        hold.touch()
        node = double.start("n1", "esnode.daemon", *[w.format(double.folder) for w in words], *lanes)
        wait_for(lambda: len(units_of(double)) == 3)
        said, pids = double.words("n1"), lane_pids(node)
        leader = 0 if "lane 0 (cpu) leads the master" in said else 1
        assert f"lane {1 - leader} (cpu) reads the master that lane {leader} (cpu) leads" in said
        assert not shares_memory(pids[leader], writes=False) and not shares_memory(
            pids[1 - leader], writes=True
        )
        os.kill(pids[1 - leader], signal.SIGKILL)
        wait_for(lambda: double.words("n1").count(" is ready: ") == 3)
        assert double.words("n1").count(" leads the master") == 1 and pids[leader] in lane_pids(node)
        hold.unlink()
        wait_for(lambda: len(ledger.read(double.folder / "run.ledger").chain.commits) >= 2)
        hold.touch()
        wait_for(lambda: units_of(double))
        os.kill(pids[leader], signal.SIGKILL)
        wait_for(lambda: double.words("n1").count(" leads the master") == 2)
        hold.unlink()
        double.wait_end()
        assert node.wait(20) == 0, double.words("n1")
        assert "lanes that read it start again" in double.words("n1")
    one, two = (ledger.read(run.folder / "run.ledger").chain for run in (single, double))
    assert len(two.commits) == 6
    assert [entry.digest for entry in one.commits] == [entry.digest for entry in two.commits]
    assert single.final_digest() == double.final_digest()


def shares_memory(pid: int, writes: bool) -> bool:
    """Whether a process has mapped the shared master so that it may write it, or so that it may not."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any("esnode-master" in line and ("w" in line.split()[1]) == writes for line in maps)
