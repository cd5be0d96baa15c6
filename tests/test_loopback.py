"""Whole toy runs with real processes and sockets: to the end, through kills, and out again cleanly."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol import keys, ledger
from protocol.entries import EntryKind
from protocol.ledger import LedgerFile
from tests import toy_engine
from tests.runs import PATIENCE, SIGNING_SEED, Processes, make_folder, wait_for

ROUNDS = 6
SLOW = {"task_options": {"seconds": 0.04}}  # long enough to be interrupted, six rounds take about a second


def run_to_end(folder: Path, names: tuple[str, ...] = ("n1", "n2"), **changes: Any) -> int:
    """An unbroken run; D of its last state."""
    make_folder(folder, names, ROUNDS, **changes)
    with Processes(folder) as processes:
        for name in names:  # they wait for the coordinator, so that both are there from the first round
            processes.node(name)
        wait_for(lambda: all("ready" in processes.words(name) for name in names))
        processes.coordinator()
        processes.wait_end()
        for name in names:
            assert processes.running[name].wait(5) == 0, processes.words(name)
        return processes.final_digest()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> int:
    return run_to_end(tmp_path_factory.mktemp("unbroken"), **SLOW)


def round_of(processes: Processes) -> int:
    return int(processes.status().get("round", -1))


def replayed(path: Path) -> list[int]:
    """D of every state by folding a ledger into the toy base."""
    chain = ledger.read(path).chain
    workshop = toy_engine.ToyWorkshop(chain.lock, "replay")
    return [workshop.digest(), *workshop.apply(chain.commits)]


# ---------------------------------------------------------------- to the end


def test_a_run_to_its_end(tmp_path: Path) -> None:
    digest = run_to_end(tmp_path)
    reading = ledger.read(tmp_path / "run.ledger")
    chain = reading.chain
    assert str(reading) == f"whole, ended after {ROUNDS} rounds"
    assert {name for _, name in chain.roster.values()} == {"n1", "n2"}
    assert [e.body.state_round for e in chain.entries if e.kind == EntryKind.SCORE] == [0, 2, 4, 6]
    states = replayed(tmp_path / "run.ledger")
    assert states[-1] == digest and len(set(states)) == ROUNDS + 1
    for round, commit in enumerate(chain.commits):
        assert commit.digest == states[round]
    for name in ("n1", "n2"):
        assert (tmp_path / "nodes" / name / "node.ledger").read_bytes() == (
            tmp_path / "run.ledger"
        ).read_bytes()
        assert (tmp_path / "nodes" / name / "term").read_text().split()[0] == "1"


def test_files_for_people(tmp_path: Path) -> None:
    run_to_end(tmp_path)
    units = [json.loads(line) for line in (tmp_path / "units.jsonl").read_text().splitlines()]
    assert {row["node"] for row in units} <= {"n1", "n2"}
    counted = {(row["round"], row["kind"], row["member"], row["first"]) for row in units}
    assert len(counted) == len(units) == ROUNDS * 6 + 4 * 2, "each member and each held-out chunk once"
    assert all(set(row["bytes"]) == {"Assign", "Result", "Ack"} for row in units)
    assert all(10 < size < 140 for row in units for size in row["bytes"].values())
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    commits = [row for row in metrics if row["kind"] == "commit"]
    assert [row["round"] for row in commits] == list(range(ROUNDS))
    assert commits[-1]["bytes_in"]["Result"] > 0 and commits[-1]["bytes_out"]["Commit"] > 0
    assert [row["round"] for row in metrics if row["kind"] == "score"] == [0, 2, 4, 6]
    log = (tmp_path / "logs" / "coordinator.log").read_text()
    assert "INFO" in log and "commit: round 6" in log and "commit: round 0" not in log


def test_one_node_gives_the_same_bits_as_two(tmp_path: Path, unbroken: int) -> None:
    assert run_to_end(tmp_path, ("only",), **SLOW) == unbroken


def test_a_member_that_fails_everywhere_is_void(tmp_path: Path) -> None:
    run_to_end(tmp_path, task_options={"fail": [3]})
    body = ledger.read(tmp_path / "run.ledger").chain.commits[0].body
    assert [index for index, _ in body.voids] == [2, 3], "a mirrored pair goes together"
    assert "member 3 never works here" in (tmp_path / "n1.stderr").read_text()


def test_amended_rounds_are_taken_from_the_plan_file(tmp_path: Path) -> None:
    make_folder(tmp_path, rounds=500, **SLOW)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: round_of(processes) >= 1)
        plan = tmp_path / "plan.toml"
        plan.write_text(plan.read_text().replace("rounds = 500", "rounds = -3"))
        wait_for(lambda: "is not used" in processes.words("coordinator"))
        assert processes.running["coordinator"].poll() is None
        plan.write_text(plan.read_text().replace("rounds = -3", "rounds = 3"))
        processes.wait_end()
    assert ledger.read(tmp_path / "run.ledger").chain.round >= 3


# ---------------------------------------------------------------- kills


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 10))])
def test_kill_9_anybody_any_time(tmp_path: Path, unbroken: int, seed: int) -> None:
    chance = random.Random(seed)
    make_folder(tmp_path, rounds=ROUNDS, **SLOW)
    with Processes(tmp_path) as processes:
        start: dict[str, Callable[[], object]] = {
            "coordinator": processes.coordinator,
            "n1": lambda: processes.node("n1"),
            "n2": lambda: processes.node("n2"),
        }
        for begin in start.values():
            begin()
        wait_for(lambda: round_of(processes) >= 0)
        for _ in range(6):
            time.sleep(chance.uniform(0.0, 0.5))
            victim = chance.choice(list(start))
            if processes.running["coordinator"].poll() == 0:
                break
            processes.kill(victim)
            start[victim]()
        processes.wait_end()
        assert processes.final_digest() == unbroken
    assert replayed(tmp_path / "run.ledger")[-1] == unbroken


def test_kill_everything_then_resume(tmp_path: Path, unbroken: int) -> None:
    make_folder(tmp_path, rounds=ROUNDS, **SLOW)
    chance = random.Random(11)
    for _ in range(3):
        with Processes(tmp_path) as processes:
            processes.coordinator()
            processes.node("n1")
            processes.node("n2")
            wait_for(lambda: round_of(processes) >= 0)
            time.sleep(chance.uniform(0.05, 0.25))  # three lives are shorter than the run
            for name in processes.running:
                processes.kill(name)
    with Processes(tmp_path) as processes:
        for name in ("n1", "n2"):
            processes.node(name)
        processes.coordinator()
        processes.wait_end()
        assert processes.final_digest() == unbroken
    assert ledger.read(tmp_path / "run.ledger").chain.term == 4


def test_coordinator_comes_back_quickly(tmp_path: Path) -> None:
    make_folder(tmp_path, rounds=400, **SLOW)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: round_of(processes) >= 2)
        processes.kill("coordinator")
        before = ledger.read(tmp_path / "run.ledger").chain.round
        processes.coordinator()
        began = time.monotonic()
        wait_for(lambda: round_of(processes) > before)
        assert time.monotonic() - began < 5


def test_accepted_rewards_survive_the_coordinator(tmp_path: Path) -> None:
    """What was acknowledged is not evaluated again after a restart: no unit is accepted twice."""
    make_folder(tmp_path, rounds=2, members=8, task_options={"seconds": 0.1})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: processes.status().get("members", {}).get("done", 0) >= 4)
        processes.kill("coordinator")
        processes.coordinator()
        assert wait_for(processes.status)["members"]["done"] >= 4
        processes.wait_end()
    rows = [json.loads(line) for line in (tmp_path / "units.jsonl").read_text().splitlines()]
    units = [(row["round"], row["kind"], row["member"], row["first"]) for row in rows]
    assert len(units) == len(set(units))


# ---------------------------------------------------------------- leaving


def test_sigterm_node_hands_back_and_exits_0(tmp_path: Path) -> None:
    make_folder(tmp_path, rounds=1, task_options={"seconds": 0.3})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        node = processes.node("n1")
        wait_for(lambda: any(n["state"] == "ready" for n in processes.status().get("nodes", [])))
        processes.node("n2")
        wait_for(lambda: len(processes.status()["nodes"]) == 2)
        began = time.monotonic()
        node.send_signal(signal.SIGTERM)
        assert node.wait(5) == 0
        assert time.monotonic() - began < 2
        assert wait_for(lambda: processes.status()["nodes"][0]["state"] == "left")
        processes.wait_end()


def test_sigterm_coordinator_then_resume(tmp_path: Path, unbroken: int) -> None:
    """Its node stays and goes on by itself once the coordinator is back."""
    make_folder(tmp_path, rounds=ROUNDS, **SLOW)
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator()
        node = processes.node("n1")
        wait_for(lambda: round_of(processes) >= 1)
        coordinator.send_signal(signal.SIGINT)
        assert coordinator.wait(5) == 0
        assert not (tmp_path / "coordinator" / "admin.sock").exists()
        assert ledger.read(tmp_path / "run.ledger").problem is None
        processes.coordinator()
        processes.wait_end()
        assert node.wait(5) == 0 and "waits for its return" in processes.words("n1")
        assert processes.final_digest() == unbroken


@pytest.mark.parametrize(("signals", "code", "within"), [(1, 0, 8.0), (2, 130, 2.0)])
def test_an_engine_that_does_not_come_back(tmp_path: Path, signals: int, code: int, within: float) -> None:
    """A unit that cannot be cancelled does not hold up the exit; a second Ctrl-C does not wait at all."""
    make_folder(tmp_path, task_options={"seconds": 60.0, "deaf": True})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        node = processes.node("n1")
        wait_for(lambda: any(n["state"] == "ready" for n in processes.status().get("nodes", [])))
        time.sleep(0.2)
        began = time.monotonic()
        node.send_signal(signal.SIGINT)
        if signals == 2:
            time.sleep(0.3)
            node.send_signal(signal.SIGINT)
        assert node.wait(10) == code, processes.words("n1")
        assert time.monotonic() - began < within


def test_sigterm_before_there_is_a_coordinator(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        node = processes.node("n1")
        wait_for(lambda: "ready" in processes.words("n1"))
        node.send_signal(signal.SIGTERM)
        assert node.wait(5) == 0


# ---------------------------------------------------------------- restarts and refusals of a node


def test_a_restarted_node_uses_its_own_ledger(tmp_path: Path) -> None:
    make_folder(tmp_path, rounds=500, **SLOW)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: round_of(processes) >= 2)
        processes.kill("n1")
        with (tmp_path / "nodes" / "n1" / "node.ledger").open("ab") as file:
            file.write(b"\x99" * 30)  # an append that the kill interrupted
        before = processes.status()
        processes.node("n1")
        wait_for(lambda: round_of(processes) > before["round"])
        out = processes.status()["wire"]["bytes"]["out"]
        assert out["Entries"] - before["wire"]["bytes"]["out"]["Entries"] < 1000, "only what it missed"


def test_a_damaged_node_ledger_is_fetched_again(tmp_path: Path) -> None:
    run_to_end(tmp_path, ("n1",))
    path = tmp_path / "nodes" / "n1" / "node.ledger"
    whole = path.read_bytes()
    path.write_bytes(whole[:1500] + bytes([whole[1500] ^ 1]) + whole[1501:])
    with Processes(tmp_path) as processes:
        processes.coordinator()
        assert processes.node("n1").wait(10) == 0, processes.words("n1")
        assert "the rest is fetched again" in processes.words("n1")
    assert path.read_bytes() == whole


def last_words(processes: Processes, name: str = "n1", seconds: float = PATIENCE) -> str:
    """The sentence of a node that refuses to go on."""
    assert processes.running[name].wait(seconds) == 1, processes.words(name)
    # Another process of that name may write to the same file.
    refusals = [line for line in processes.words(name).splitlines() if line.startswith("esnode: ")]
    assert refusals, processes.words(name)
    return refusals[-1]


def test_node_of_another_base_model(tmp_path: Path) -> None:
    make_folder(tmp_path, digest=1234)
    with Processes(tmp_path) as processes:
        processes.node("n1")
        assert "another model" in last_words(processes)


def test_node_that_is_not_admitted(tmp_path: Path) -> None:
    make_folder(tmp_path, ("n1",))
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("other")
        words = last_words(processes, "other")
        key = keys.curve_public(keys.read_curve(tmp_path / "nodes" / "other" / "curve.key"))
        assert "does not admit" in words and key.hex() in words


def test_node_with_the_wrong_coordinator_key(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        wait_for(processes.status)
        (tmp_path / "coordinator" / "curve.pub").write_text(keys.curve_public(bytes([9]) * 32).hex())
        processes.node("n1")
        assert "its key is not the one this node expects" in last_words(processes)


def test_node_without_coordinator(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "coordinator" / "curve.pub").write_text("00" * 32)
    with Processes(tmp_path) as processes:
        processes.node("n1", "--wait", "0.5")
        assert "no coordinator has started" in last_words(processes)
        processes.node("n1", "--wait", "0.5", "--coordinator", "tcp://127.0.0.1:9")
        assert "tcp://127.0.0.1:9: nothing listens" in last_words(processes)


def test_a_node_that_knows_the_address_before_the_coordinator_first_starts(tmp_path: Path) -> None:
    """It waits for the key that the first start will write, as it waits for an address."""
    make_folder(tmp_path, ("n1",), rounds=2)
    with Processes(tmp_path) as processes:
        with socket.create_server(("127.0.0.1", 0)) as found:
            address = f"tcp://127.0.0.1:{found.getsockname()[1]}"
        node = processes.node("n1", "--coordinator", address)
        wait_for(lambda: "ready" in processes.words("n1"))
        time.sleep(0.5)
        assert node.poll() is None, processes.words("n1")
        processes.coordinator(bind=address)
        processes.wait_end()
        assert node.wait(20) == 0, processes.words("n1")
        (tmp_path / "nodes" / "n1" / "node.ledger").unlink()  # it would know that the run has ended
        processes.node("n1", "--wait", "0.5", "--coordinator", address)
        assert "nothing listens" in last_words(processes)
        (tmp_path / "coordinator" / "curve.pub").unlink()
        processes.node("n1", "--wait", "0.5", "--coordinator", address)
        assert "public key" in last_words(processes)


def test_two_processes_with_one_name(tmp_path: Path) -> None:
    make_folder(tmp_path, rounds=500, **SLOW)
    with Processes(tmp_path) as processes, Processes(tmp_path) as second:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: round_of(processes) >= 1)
        second.node("n1")
        assert "another node process uses" in last_words(second)
        reached = round_of(processes)
        wait_for(lambda: round_of(processes) > reached)


def test_node_ledger_of_another_run(tmp_path: Path) -> None:
    run_to_end(tmp_path / "a", ("n1",))
    make_folder(tmp_path / "b", ("n1",), members=8)
    raws = ledger.read(tmp_path / "a" / "run.ledger").chain.entries
    with LedgerFile(tmp_path / "b" / "nodes" / "n1" / "node.ledger") as file:
        file.append(*(entry.raw for entry in raws))
    with Processes(tmp_path / "b") as processes:
        processes.node("n1")
        assert "belongs to another run" in last_words(processes)


def test_a_coordinator_on_another_port_is_found(tmp_path: Path) -> None:
    make_folder(tmp_path, rounds=500, **SLOW)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: round_of(processes) >= 1)
        processes.kill("coordinator")
        (tmp_path / "coordinator" / "address").unlink()
        processes.coordinator()
        reached = wait_for(processes.status)["round"]
        wait_for(lambda: round_of(processes) > reached)


# ---------------------------------------------------------------- the commands


def test_the_commands_wrap_the_processes(tmp_path: Path, unbroken: int) -> None:
    make_folder(tmp_path, (), ROUNDS, **SLOW)
    with Processes(tmp_path) as processes:
        serve = ("coordinator", "serve", "--data", str(tmp_path), "--allow", "n1")
        processes.start("coordinator", "esnode.cli.main", *serve, ESNODE_CONFIG=str(tmp_path / "config"))
        assert processes.running["coordinator"].wait(10) == 1
        assert "another signing key than yours" in processes.words("coordinator")
        (tmp_path / "config" / "coordinator.key").unlink()
        keys.write_signing(tmp_path / "config" / "coordinator.key", SIGNING_SEED)
        processes.start("coordinator", "esnode.cli.main", *serve, ESNODE_CONFIG=str(tmp_path / "config"))
        words = ("node", "--run", str(tmp_path), "--name", "n1", "--loader", "tests.toy_engine:load")
        processes.start("n1", "esnode.cli.main", *words)
        processes.wait_end()
        assert processes.running["n1"].wait(5) == 0
        assert processes.final_digest() == unbroken


# ---------------------------------------------------------------- full disks


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="no prlimit to limit file sizes with")
@pytest.mark.parametrize(
    "limit", [300, 15_000, *(pytest.param(k, marks=pytest.mark.slow) for k in (5_000, 60_000))]
)
def test_coordinator_with_a_full_disk(tmp_path: Path, unbroken: int, limit: int) -> None:
    """Whichever file hits the wall first: one sentence, code 1; a later start goes on as if nothing was."""
    make_folder(tmp_path, rounds=ROUNDS, **SLOW)
    arguments = ("--data", str(tmp_path), "--bind", "tcp://127.0.0.1:0")
    with Processes(tmp_path) as processes:
        processes.node("n1")
        processes.start("coordinator", "coordinator.server", *arguments, FILE_LIMIT=str(limit))
        assert processes.running["coordinator"].wait(15) == 1, processes.words("coordinator")
        line = processes.words("coordinator").splitlines()[-1]
        assert re.search("^esnode: .*(write|full|journal)", line), line
        processes.coordinator()
        processes.wait_end()
        assert processes.final_digest() == unbroken


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="no prlimit to limit file sizes with")
def test_node_with_a_full_disk(tmp_path: Path) -> None:
    make_folder(tmp_path, rounds=500, **SLOW)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1", FILE_LIMIT="4000")
        assert "cannot write" in last_words(processes)
        reached = round_of(processes)
        processes.node("n1")
        wait_for(lambda: round_of(processes) > reached + 1)


def test_a_mistyped_folder_is_not_made(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("n1", "esnode.daemon", "--run", str(tmp_path / "typo"), "--name", "n1")
        assert "lock.json" in last_words(processes)
        processes.start("n1", "coordinator.server", "--data", str(tmp_path / "typo"))
        assert "lock.json" in last_words(processes)
    assert not (tmp_path / "typo").exists()
