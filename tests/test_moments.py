"""Real processes at chosen moments: killed inside a checkpoint or a rewind, clocks that jump, two at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esnode import snapshot
from protocol import keys, ledger
from protocol.counting import milliseconds
from tests import chaos, full_disk, toy_engine
from tests.runs import PLAN, ROOT, SIGNING_SEED, Processes, make_folder, wait_for

FOREVER = 10**6
DAY = 86_400.0
FIRST_LIFE = ("write", "synced", "renamed", "apply", "applied")
SECOND_LIFE = ("load", "rewind", "rewound")  # they need a checkpoint


def end_soon(processes: Processes, more: int = 3) -> None:
    """Let the run end after some more rounds."""
    plan = processes.folder / "plan.toml"
    now = wait_for(lambda: processes.status().get("round"))
    plan.write_text(plan.read_text().replace(f"rounds = {FOREVER}", f"rounds = {now + more}"))


def equal_to_the_fault_free_run(folder: Path) -> None:
    path = folder / "run.ledger"
    lock = ledger.read(path).chain.lock
    assert chaos.differences(path, toy_engine.ToyWorkshop(lock, "truth", 0.0)) == []


@pytest.mark.parametrize("moment", [*FIRST_LIFE, *SECOND_LIFE])
def test_a_node_killed_at_a_chosen_moment_goes_on(tmp_path: Path, moment: str) -> None:
    """The next start finds nothing half done, or what it finds is refused; the run's bits are the same."""
    make_folder(tmp_path, ("n1", "n2"), FOREVER, task_options={"seconds": 0.02})
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(rounds=FOREVER) + "snapshot_every = 2\n")
    place = tmp_path / "nodes" / "n1"

    def node(name: str, at: str) -> subprocess.Popen[bytes]:
        return processes.node(name, loader="tests.dying_engine:load", DIE_AT=at, DIE_NODE="n1")

    with Processes(tmp_path) as processes:
        processes.coordinator()
        node("n2", "")
        first = node("n1", moment if moment in FIRST_LIFE else "")
        if moment in SECOND_LIFE:
            wait_for(lambda: snapshot.files(place / "checkpoint"), what=processes.words("n1"))
            processes.kill("n1")
            first = node("n1", moment)
        assert first.wait(60) == -signal.SIGKILL, processes.words("n1")
        assert (place / "died").read_text() == moment
        again = node("n1", moment)
        at = processes.status()["round"]
        ready = lambda: [n["name"] for n in processes.status()["nodes"] if n["state"] == "ready"]  # noqa: E731
        wait_for(lambda: len(ready()) == 2 and processes.status()["round"] > at + 2)
        end_soon(processes)
        processes.wait_end()
        assert again.wait(20) == 0, processes.words("n1")
        assert not list((place / "checkpoint").glob("*.new"))
        assert "Traceback" not in processes.words("n1")
    equal_to_the_fault_free_run(tmp_path)


def test_a_span_in_which_the_clock_jumped_back_is_none() -> None:
    assert milliseconds(1.2345678) == 1235 and milliseconds(-59.998) == 0


@pytest.mark.parametrize("who", ["coordinator", "n1"])
def test_clocks_that_jump_cost_seconds(tmp_path: Path, who: str) -> None:
    """Forward and back, by seconds and by a day, while rounds go on; rewards and digests are the same."""
    make_folder(tmp_path, ("n1", "n2"), FOREVER, task_options={"seconds": 0.02})
    offset = tmp_path / "offset"
    offset.write_text("0")
    clock = ("tests.jumping_clock", str(offset))
    with Processes(tmp_path) as processes:
        server = ("--data", str(tmp_path), "--bind", "tcp://127.0.0.1:0")
        if who == "coordinator":
            processes.start("coordinator", *clock, "coordinator.server", *server)
        else:
            processes.coordinator()
        for name in ("n1", "n2"):
            node = ("--run", str(tmp_path), "--name", name, "--threads", "1")
            node += ("--loader", "tests.toy_engine:load")
            start = (*clock, "esnode.daemon") if name == who else ("esnode.daemon",)
            processes.start(name, *start, *node)
        wait_for(lambda: processes.status().get("round", 0) >= 1)
        for jump in (30.0, -30.0, DAY, -DAY, 2 * DAY):
            offset.write_text(str(jump))
            at = processes.status()["round"]
            began = time.monotonic()
            wait_for(lambda at=at: processes.status()["round"] > at + 1)
            assert time.monotonic() - began < 30, jump
        end_soon(processes)
        processes.wait_end()
        for name in ("n1", "n2"):
            assert processes.running[name].wait(20) == 0, processes.words(name)
    equal_to_the_fault_free_run(tmp_path)


def test_two_runs_started_in_one_folder_in_the_same_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them runs to the end; the other says in a sentence that the folder is in use."""
    config = tmp_path / "config"
    config.mkdir()
    keys.write_signing(config / "coordinator.key", SIGNING_SEED)
    monkeypatch.setenv("ESNODE_CONFIG", str(config))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for attempt in range(3):
        run = tmp_path / f"run-{attempt}"
        make_folder(run, (), 3, repeatable=True, task_options={"seconds": 0.1})
        command = [sys.executable, "-P", "-m", "tests.toy_run", str(run), "1"]
        pair = [
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(2)
        ]
        said = [process.communicate(timeout=120)[0] for process in pair]
        codes = sorted(process.returncode for process in pair)
        assert codes == [0, 1], said
        refused = said[[process.returncode for process in pair].index(1)]
        assert "Traceback" not in refused and "is in use by process" in refused, refused
        reading = ledger.read(run / "run.ledger")
        assert reading.ended and reading.problem is None


# ---------------------------------------------------------------- machines that cannot join


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A home folder on a file system that takes nothing."""
    with full_disk.mounted(tmp_path / "home", "ro") as home:
        yield home


def test_join_on_a_machine_whose_home_folder_is_read_only(tmp_path: Path, read_only: Path) -> None:
    make_folder(tmp_path / "run", (), FOREVER)
    with Processes(tmp_path / "run") as processes:
        processes.coordinator()
        wait_for(processes.status)
        command = [sys.executable, "-m", "esnode.cli.main"]
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(read_only)}
        surroundings = {k: v for k, v in surroundings.items() if k not in ("ESNODE_DATA", "ESNODE_CONFIG")}
        made = subprocess.run(
            [*command, "invite", str(tmp_path / "run")], env={**surroundings, "HOME": str(tmp_path)},
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout.strip()  # fmt: skip
        for words in (("join", made), ("join",)):
            done = subprocess.run(
                [*command, *words], env=surroundings, check=False, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 1 and done.stderr.startswith("esnode: "), done
            assert len(done.stderr.strip().splitlines()) <= 2 and "Traceback" not in done.stderr
