"""The node process and its owner: asked to leave in any phase, paused, and what damaged files make it say."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from esnode import daemon, duty, joined, mending, nodeoptions
from esnode.folder import RunFolder, occupy, write_file
from esnode.notebook import Notebook
from protocol import keys
from protocol import ledger as ledgers
from protocol.entries import Entry
from protocol.errors import UserError
from protocol.ledger import LedgerFile
from protocol.lock import Lock
from tests.bench import LOCK, ledger
from tests.runs import ROOT, Processes, make_folder, wait_for
from tests.toy_engine import ToyWorkshop


@pytest.mark.parametrize("seconds", [0.15, 0.4, 0.8, 1.6])
def test_sigterm_in_the_first_seconds_is_a_clean_leave(tmp_path: Path, seconds: float) -> None:
    """Before anything is imported there is nothing of ours that could answer: from then on it is code 0."""
    make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        node = processes.node("n1")
        path = Path(f"/proc/{node.pid}/status")
        wait_for(lambda: _handles_term(path) or node.poll() is not None)
        time.sleep(seconds)
        node.send_signal(signal.SIGTERM)
        assert node.wait(6) == 0, processes.words("n1")
        assert "Traceback" not in processes.words("n1")


def _handles_term(status: Path) -> bool:
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


INTERRUPTED = """
import os, runpy, signal, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == imported:
            print("interrupted")
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Hook())
module, imported = sys.argv[1:3]
sys.argv[1:3] = []
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("esnode.daemon", "zmq"),
        ("esnode.laneprocess", "esnode.lanewire"),
        ("esnode.scoring_worker", "msgpack"),
        ("esnode.donor", "zmq"),
        ("esnode.receiver", "zmq"),
        ("coordinator.server", "zmq"),
        ("coordinator.relay", "zmq"),
    ],
)
def test_ctrl_c_during_the_imports_of_a_process_shows_no_traceback(module: str, imported: str) -> None:
    """Who holds nothing yet ends at once; whose parent ends it goes on, and here meets a missing option."""
    words = [sys.executable, "-u", "-c", INTERRUPTED, module, imported, "0"]
    done = subprocess.run(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        start_new_session=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("interrupted") and "KeyboardInterrupt" not in done.stderr
    if module == "esnode.daemon":
        assert done.returncode == 0 and done.stderr.startswith("esnode: left before it had begun")
    if module == "coordinator.server":
        assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("way", ["os.kill(os.getpid(), signal.SIGTERM)", "departure.limit(0.1)"])
def test_nothing_keeps_a_process_that_was_asked_to_leave(way: str) -> None:
    """Neither what torch does at the interpreter's end nor a call that does not come back."""
    code = (
        "import atexit, os, signal, time; from esnode import departure; departure.at_once();"
        f"atexit.register(time.sleep, 60); {way}; time.sleep(60)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=30).returncode == 0


def test_the_handler_comes_before_the_slow_imports() -> None:
    """What is loaded when SIGTERM is first heard: nothing that takes time."""
    told = "import sys, esnode.departure; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", told], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert not any(f"'{slow}'" in loaded for slow in ("zmq", "numpy", "torch", "msgspec", "nacl"))
    source = Path(daemon.__file__).read_text()
    assert source.index("departure.at_once(signal.SIGINT)") < source.index("import zmq")


@pytest.mark.parametrize(
    "process", ["daemon", "laneprocess", "donor", "receiver", "gleaner", "scoring_worker"]
)
def test_processes_begin_without_the_heavy_packages(process: str) -> None:
    """The number of threads must be set before torch and numpy are loaded; many processes never need them."""
    heavy = {"torch", "transformers", "numba", "numpy"}
    told = f"import sys, esnode.{process}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_an_owner_pauses_and_resumes_a_joined_node(tmp_path: Path) -> None:
    lock = make_folder(tmp_path, names=("n1",), rounds=100_000)
    joined.write(tmp_path, joined.Joined(lock.run_id, ("tcp://127.0.0.1:1",), {"n1": True}))
    with Processes(tmp_path) as processes:
        processes.coordinator()
        address = tmp_path / "coordinator" / "address"
        wait_for(address.exists)
        node = processes.node("n1", "--coordinator", address.read_text().strip())

        def line() -> str:
            nodes = processes.status().get("nodes", [])
            return json.dumps(nodes)

        wait_for(lambda: processes.status().get("round", 0) > 0)
        assert duty.switch(tmp_path, True) and not duty.switch(tmp_path, True)
        wait_for(lambda: '"state": "paused"' in line() and "paused by its owner" in line())
        stands = processes.status()["round"]
        time.sleep(1.5)
        assert processes.status()["round"] == stands and node.poll() is None
        assert duty.switch(tmp_path, False)
        wait_for(lambda: processes.status().get("round", 0) > stands)
        duty.switch(tmp_path, True)
        wait_for(lambda: "paused by its owner" in line())
        node.send_signal(signal.SIGTERM)
        assert node.wait(6) == 0
        wait_for(lambda: '"state": "left"' in line())


def test_a_paused_node_ends_with_the_run_and_says_so_when_it_is_started_again(tmp_path: Path) -> None:
    lock = make_folder(tmp_path, rounds=3)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        address = tmp_path / "coordinator" / "address"
        wait_for(address.exists)
        paused = make_folder(tmp_path / "joined", names=("n1",))  # another machine, with the same key
        assert paused == lock
        for part in ("nodes/n1/curve.key", "coordinator/curve.pub"):
            write_file(tmp_path / "joined" / part, (tmp_path / part).read_bytes(), 0o600)
        joined.write(
            tmp_path / "joined", joined.Joined(lock.run_id, (address.read_text().strip(),), {"n1": True})
        )
        duty.switch(tmp_path / "joined", True)
        rests = processes.node("n1", "--run", str(tmp_path / "joined"))
        wait_for(lambda: "paused by its owner" in json.dumps(processes.status().get("nodes", [])))
        works = processes.node("n2")
        processes.wait_end()
        assert works.wait(20) == 0 and rests.wait(20) == 0, processes.words("n1")
        assert "the run has ended" in (tmp_path / "joined" / "logs" / "n1.log").read_text()
        assert ledgers.read(tmp_path / "joined" / "nodes" / "n1" / "node.ledger").chain.ended, "the rest came"
        # nobody is left: those that hold END know
        for name, run in (("n1", tmp_path / "joined"), ("n2", tmp_path)):
            words = ("--run", str(run), "--coordinator", "tcp://127.0.0.1:1", "--wait", "0.5")
            again = processes.node(name, *words)
            assert again.wait(30) == 0, processes.words(name)
            assert "esnode: the run has ended after 3 rounds" in processes.words(name)
            assert "the whole ledger is" in processes.words(name)
        # one that lacks it says what it could not reach
        lost = make_folder(tmp_path / "lost", names=("n1",))
        write_file(
            tmp_path / "lost" / "coordinator" / "curve.pub", (tmp_path / "coordinator/curve.pub").read_bytes()
        )
        late = processes.node(
            "n1", "--run", str(tmp_path / "lost"), "--coordinator", "tcp://127.0.0.1:1", "--wait", "0.5"
        )
        assert lost == lock and late.wait(30) == 1
        told = processes.words("n1")
        assert "tcp://127.0.0.1:1: nothing listens" in told and f"(for the run in {tmp_path}" in told


class Endless(ToyWorkshop):
    """A workshop that answers a question on its replica for ever, in native code."""

    def derive(self, entries: Sequence[Entry], pieces: Sequence[int], base: bool) -> NoReturn:
        """No answer."""
        import torch

        weights = torch.zeros(1 << 16)
        while True:
            weights += 1


def endless(options: nodeoptions.Options, lock: Lock) -> Endless:
    """The loader of `python -m esnode.daemon --loader tests.test_daemon:endless`."""
    return Endless(lock, options.name, folder=options.folder)


def test_a_node_that_ends_inside_native_code_leaves_with_its_own_code(tmp_path: Path) -> None:
    """The interpreter's end would take the thread out of C++, which aborts the process."""
    make_folder(tmp_path, names=("n1",), rounds=9, task_options={"seconds": 0.1})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        node = processes.node("n1", loader="tests.test_daemon:endless")
        processes.wait_end()
        assert node.wait(20) == 0, processes.words("n1")
    assert "a random check" in (tmp_path / "logs" / "n1.log").read_text(), "it was asked and is at it"


def test_duty_follows_policy_file_and_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    warnings: list[str] = []
    watch = duty.Duty(tmp_path / "data" / "run", warnings.append)
    assert not watch.look(0.0) and watch.reason == ""
    write_file(duty.policy_file(), b'hours = ["mon 00:00-00:01"]')
    monkeypatch.setattr(time, "localtime", lambda: time.struct_time((2026, 1, 6, 12, 0, 0, 1, 6, 0)))
    assert not watch.look(0.5), "it looks once a second"
    assert watch.look(1.5) and watch.reason == "outside the hours of its policy (mon 00:00-00:01)"
    write_file(duty.policy_file(), b"hours = 7 # broken")
    assert not watch.look(3.0) and "stays in force" in warnings[0]
    write_file(duty.policy_file(), b"hours = []")
    assert watch.look(5.0) and watch.reason == ""
    duty.switch(tmp_path / "data", True)
    assert watch.look(7.0) and watch.reason == "paused by its owner"


# ---------------------------------------------------------------- damaged files


@pytest.mark.parametrize("content", [b"", b"seven\n", b"\xff\xfe\x00", b"-3", b"99999999999999"])
def test_a_damaged_term_is_made_again_from_the_ledger(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "nodes" / "a"
    folder.mkdir(parents=True)
    entries = ledger(LOCK.digest)
    with LedgerFile(folder / "node.ledger") as file:
        file.append(*(entry.raw for entry in entries))
    (folder / "term").write_bytes(content)
    book = Notebook(folder, LOCK.run_id)
    assert book.term == entries[-1].term and "made again from the ledger" in book.warning
    book.close()
    again = Notebook(folder, LOCK.run_id)
    assert again.term == entries[-1].term and not again.warning
    again.close()


@pytest.mark.parametrize("content", ["", "curve", "curve xyz\n", "sign " + "00" * 32, "curve " + "00" * 31])
def test_a_damaged_key_says_how_to_enrol_anew(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "nodes" / "a"
    folder.mkdir(parents=True)
    (folder / "curve.key").write_text(content)
    (folder / "curve.key").chmod(0o600)
    with pytest.raises(nodeoptions.FolderMissing) as caught:
        nodeoptions.own_key(folder)
    for words in ("curve.key is damaged", "esnode join INVITE", "--allow a"):
        assert words in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[1]", '{"zz": "a"}', '{"00": 5}'])
def test_a_damaged_roster_says_how_to_make_it_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "roster.json").write_text(content)
    with pytest.raises(keys.KeyFileError, match="start with --allow NAME"):
        keys.read_roster(tmp_path / "roster.json")


def test_a_node_waits_for_the_lock_that_its_coordinator_is_making(tmp_path: Path) -> None:
    """The coordinator reads the model first: started beside it, a node is there long before the lock is."""
    lock = make_folder(tmp_path, names=("n1",), rounds=2)
    (tmp_path / "lock.json").unlink()
    with Processes(tmp_path) as processes:
        node = processes.node("n1")
        wait_for(lambda: f"has not made {tmp_path}/lock.json yet" in processes.words("n1"))
        assert not (tmp_path / "logs").exists() and node.poll() is None
        write_file(tmp_path / "lock.json", lock.to_bytes())
        processes.coordinator()
        processes.wait_end()
        assert node.wait(20) == 0, processes.words("n1")


def test_a_lock_that_nobody_makes_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    def asked() -> str:
        with pytest.raises(nodeoptions.FolderMissing) as caught:
            mending.lock_of(nodeoptions.parse(["--run", str(tmp_path), "--name", "n1", "--wait", "0"]))
        return str(caught.value)

    assert "--run names the run's folder" in asked(), "nothing was begun here: there is nothing to wait for"
    lock = make_folder(tmp_path)
    (tmp_path / "lock.json").unlink()
    assert f"esnode coordinator serve --data {tmp_path}" in asked()
    held = occupy(RunFolder(tmp_path))  # whoever has the folder is making it
    late = threading.Timer(0.5, write_file, (tmp_path / "lock.json", lock.to_bytes()))
    late.start()
    options = nodeoptions.parse(["--run", str(tmp_path), "--name", "n1", "--wait", "0"])
    assert mending.lock_of(options) == lock
    late.join()
    os.close(held)


def test_a_damaged_lock_names_its_file_and_the_remedy(tmp_path: Path) -> None:
    lock = make_folder(tmp_path)
    good = lock.to_bytes()
    for content in (good[: len(good) // 2], b"", good.replace(b":", b": ", 1), b"\xff"):
        (tmp_path / "lock.json").write_bytes(content)
        with pytest.raises(UserError) as caught:
            nodeoptions.read_lock(tmp_path)
        assert str(tmp_path / "lock.json") in str(caught.value) and "esnode join" in str(caught.value)


TASK = b'{"prompt": "say 1"}\n'


def joined_beside(path: Path, processes: Processes, lock: Lock) -> Path:
    """The folder of another machine that has joined the run in `path` as n1."""
    address = path / "coordinator" / "address"
    wait_for(address.exists)
    place = path / "joined"
    for part in ("nodes/n1/curve.key", "coordinator/curve.pub"):
        write_file(place / part, (path / part).read_bytes(), 0o600)
    joined.write(place, joined.Joined(lock.run_id, (address.read_text().strip(),), {"n1": True}))
    return place


def test_a_lost_lock_and_altered_task_data_are_fetched_again_by_the_node_itself(tmp_path: Path) -> None:
    lock = make_folder(tmp_path, rounds=3, data=hashlib.sha256(TASK).hexdigest())
    (tmp_path / "task.jsonl").write_bytes(TASK)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        place = joined_beside(tmp_path, processes, lock)
        (place / "lock.json").write_bytes(lock.to_bytes().replace(b'"members":', b'"members" :', 1))
        (place / "task.jsonl").write_bytes(TASK + TASK)
        node = processes.node("n1", "--run", str(place))
        processes.wait_end()
        assert node.wait(20) == 0, processes.words("n1")
    assert (place / "lock.json").read_bytes() == lock.to_bytes()
    assert (place / "task.jsonl").read_bytes() == TASK
    assert "lock.json is lost or altered" in processes.words("n1")


def test_a_lost_lock_names_the_remedy_where_the_coordinator_is_gone(tmp_path: Path) -> None:
    lock = make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        place = joined_beside(tmp_path, processes, lock)
        processes.kill("coordinator")
        assert processes.node("n1", "--run", str(place)).wait(30) == 1
    told = processes.words("n1").strip().splitlines()[-1]
    assert "lock.json is lost or altered and cannot be fetched again" in told and "copy the file" in told


def test_a_lost_note_of_the_run_names_the_remedy(tmp_path: Path) -> None:
    write_file(tmp_path / "coordinator" / "curve.pub", b"ab" * 32)
    assert "joined.json is missing" in nodeoptions.no_coordinator(tmp_path)
    assert "esnode join INVITE" in nodeoptions.no_coordinator(tmp_path)
    (tmp_path / "plan.toml").touch()
    assert "no coordinator has started" in nodeoptions.no_coordinator(tmp_path)
