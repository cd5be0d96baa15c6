"""Bad days that need real processes: a stopped peer with full queues, another plan on the folder, clocks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol import ledger
from protocol.lock import lock_from_bytes
from tests import chaos, toy_engine
from tests.runs import FOREVER, PATIENCE, ROOT, Processes, make_folder, toy_lock, wait_for

LEDGER = 40_000  # bytes
ASKS = 4000  # for all of it: what they ask for does not fit into MEMORY
MEMORY = 150 << 20  # bytes, of a coordinator whatever its peers do


def most_memory(pid: int) -> int:
    """Peak resident bytes of a process."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) << 10  # type: ignore[index]


def test_a_stopped_peer_with_full_queues(tmp_path: Path) -> None:
    """What it does not read is dropped and counted; nobody waits for it, and memory stays bounded."""
    make_folder(tmp_path, rounds=10**6, members=128)
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator()
        processes.node("n1")
        path = tmp_path / "run.ledger"
        wait_for(lambda: path.exists() and path.stat().st_size > LEDGER)
        stuck = processes.start("n2", "tests.stuck_peer", str(tmp_path), "n2", str(ASKS))
        dropped = wait_for(lambda: processes.status()["wire"]["dropped"].get("Entries"))
        assert dropped > 0
        for _ in range(5):
            began = time.monotonic()
            reached = processes.status()["round"]
            assert time.monotonic() - began < 2
            wait_for(lambda reached=reached: processes.status()["round"] > reached)
        assert most_memory(coordinator.pid) < MEMORY
        stuck.send_signal(signal.SIGCONT)
        stuck.kill()
        processes.node("n2")
        wait_for(lambda: "n2" in {n["name"] for n in processes.status()["nodes"] if n["state"] == "ready"})
        print(f"{dropped} dropped at first sight, memory {most_memory(coordinator.pid) >> 20} MB")


def test_another_plan_on_the_same_folder(tmp_path: Path) -> None:
    """Refused in one sentence that names both runs; with the old lock the run goes on untouched."""
    make_folder(tmp_path, ("n1",), FOREVER, task_options={"seconds": 0.05})
    lock_file = tmp_path / "lock.json"
    right = lock_file.read_bytes()
    other = toy_lock(members=8)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: processes.status().get("round", 0) >= 1)
        processes.kill("coordinator")
        before = (tmp_path / "run.ledger").read_bytes()
        lock_file.write_bytes(other.to_bytes())
        assert processes.coordinator().wait(PATIENCE) == 1
        words = processes.words("coordinator").splitlines()[-1]
        assert words.startswith("esnode: ") and "Traceback" not in processes.words("coordinator")
        runs = [lock_from_bytes(held).run_id.hex()[:12] for held in (right, other.to_bytes())]
        assert f"belongs to run {runs[0]}, not to this plan's run {runs[1]}; give" in words, words
        assert (tmp_path / "run.ledger").read_bytes() == before
        lock_file.write_bytes(right)
        processes.end_after(2)
        processes.coordinator()
        processes.wait_end()
    lock = ledger.read(tmp_path / "run.ledger").chain.lock
    assert chaos.differences(tmp_path / "run.ledger", toy_engine.ToyWorkshop(lock, "truth", 0.0)) == []


BYTES = b"\xff\xfe\x00 no text at all"


@pytest.mark.parametrize(
    ("who", "file", "words"),
    [
        ("coordinator", "coordinator/address", "serving run"),
        ("n1", "coordinator/curve.pub", "is no key"),
        ("n1", "coordinator/address", "no coordinator has started"),
        ("status", "plan.toml", "is not UTF-8"),
    ],
)
def test_small_files_that_hold_anything(tmp_path: Path, who: str, file: str, words: str) -> None:
    """Made again where they can be, else one sentence; never a traceback."""
    make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        wait_for(processes.status)
        processes.kill("coordinator")
        (tmp_path / file).write_bytes(BYTES)
        if who == "coordinator":
            processes.coordinator()
        elif who == "n1":
            processes.node("n1", "--wait", "0.5")
        else:
            processes.start("status", "esnode.cli.main", "status", str(tmp_path))
        wait_for(lambda: words in processes.words(who) or processes.running[who].poll() is not None)
        assert words in processes.words(who) and "Traceback" not in processes.words(who)


@pytest.mark.parametrize("name", ["units.jsonl", "metrics.jsonl"])
def test_a_disk_that_takes_no_notes(tmp_path: Path, name: str) -> None:
    """One sentence that names the file, code 1; with room again the run goes on to the same state."""
    make_folder(tmp_path, ("n1",), rounds=3)
    (tmp_path / name).symlink_to("/dev/full")
    with Processes(tmp_path) as processes:
        processes.node("n1")
        assert processes.coordinator().wait(PATIENCE) == 1
        words = processes.words("coordinator")
        assert f"{name}: No space left on device. Free some space" in words.splitlines()[-1], words
        assert "Traceback" not in words
        (tmp_path / name).unlink()
        processes.coordinator()
        processes.wait_end()
    path = tmp_path / "run.ledger"
    lock = ledger.read(path).chain.lock
    assert chaos.differences(path, toy_engine.ToyWorkshop(lock, "truth", 0.0)) == []


def test_units_of_a_killed_node_run_elsewhere(tmp_path: Path) -> None:
    """Within the 15 s of a lease at the latest, also while the other node is busy with long work."""
    make_folder(tmp_path, rounds=10**6, members=2, chunk=8, task_options={"seconds": 3.0})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        for name in ("n1", "n2"):
            processes.node(name)
        lost = wait_for(lambda: units_of(processes, "n1"))
        processes.kill("n1")
        killed = time.monotonic()
        wait_for(lambda: set(lost) <= set(units_of(processes, "n2")))
        print(f"run elsewhere after {time.monotonic() - killed:.1f} s")
        assert time.monotonic() - killed <= 15


def units_of(processes: Processes, name: str) -> list[str]:
    """Labels of the units a node holds; [] while no round is under way or other units than members'."""
    nodes = [node for node in processes.status().get("nodes", []) if node["name"] == name]
    return [label for node in nodes for label, _ in node["units"] if label.startswith("member")]


def test_a_relay_whose_server_is_killed_while_it_starts(tmp_path: Path) -> None:
    """Nobody reads its address any more: it ends without a word. A full disk does not end it."""
    make_folder(tmp_path, rounds=10**6)
    (tmp_path / "coordinator" / "relay.json.new").mkdir()  # stands in for a disk that takes nothing
    words = [
        sys.executable,
        "-m",
        "coordinator.relay",
        "--data",
        str(tmp_path),
        "--bind",
        "tcp://127.0.0.1:0",
    ]
    with Processes(tmp_path) as processes:
        processes.coordinator()
        wait_for(processes.status)
        for reader_gone in (True, False):
            relay = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert relay.stdin and relay.stdout and relay.stderr
            if reader_gone:
                relay.stdout.close()
            else:
                assert b"tcp://127.0.0.1" in relay.stdout.readline()
                time.sleep(2.5)
                assert relay.poll() is None
                relay.stdin.close()
            assert relay.wait(20) == 0
            said = relay.stderr.read().decode()
            assert "Traceback" not in said and said.count("cannot write") == (not reader_gone)


def test_nodes_whose_clocks_are_a_day_off(tmp_path: Path) -> None:
    """What decides is the monotonic clock; the time of day is for logs (and invites, see enrolment)."""
    make_folder(tmp_path, rounds=4)
    with Processes(tmp_path) as processes:
        for name, days in (("n1", 1), ("n2", -1)):
            shifted = tmp_path / f"clock-{name}"
            shifted.mkdir()
            (shifted / "sitecustomize.py").write_text(
                f"import time\nright = time.time\ntime.time = lambda: right() + {days * 86400}\n"
            )
            processes.node(name, PYTHONPATH=f"{shifted}:{ROOT}")
        wait_for(lambda: all("ready" in processes.words(name) for name in ("n1", "n2")))
        processes.coordinator()
        processes.wait_end()
        assert processes.running["n1"].wait(10) == processes.running["n2"].wait(10) == 0
    path = tmp_path / "run.ledger"
    lock = ledger.read(path).chain.lock
    assert chaos.differences(path, toy_engine.ToyWorkshop(lock, "truth")) == []
    assert len(ledger.read(path).chain.roster) == 2
    today = time.strftime("%Y-%m-%d", time.localtime())
    assert not (tmp_path / "logs" / "n1.log").read_text().startswith(today), "its clock was off indeed"
