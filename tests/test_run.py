"""`esnode run` with real processes: to the end, through crashes and kills, and with a model.

The first part trains 64 numbers under the real noise law (`toy_engine.py`), the second a tiny language model.
"""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from esnode import run
from esnode.begin import Request, RequestError
from esnode.folder import RunFolder, busy
from protocol import keys, ledger
from tests import full_disk, runs
from tests.runs import wait_for

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60.0
ROUNDS = 8
SECONDS = 0.02  # of a unit: long enough to be interrupted


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user of our own, with a known signing key."""
    place = tmp_path / "config"
    place.mkdir()
    keys.write_signing(place / "coordinator.key", runs.SIGNING_SEED)
    monkeypatch.setenv("ESNODE_CONFIG", str(place))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield place


class Toy:
    """One toy run folder and the `esnode run` working in it."""

    def __init__(self, path: Path, **options: object) -> None:
        self.place = RunFolder(path)
        runs.make_folder(
            path, names=(), rounds=ROUNDS, repeatable=True, task_options={"seconds": SECONDS, **options}
        )

    def start(self, nodes: int = 2, cwd: Path = ROOT) -> subprocess.Popen[str]:
        """As the installed command: nothing is imported from the working directory."""
        command = [sys.executable, "-P", "-m", "tests.toy_run", str(self.place.path), str(nodes)]
        return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, nodes: int = 2) -> str:
        """Run to the end; what was printed."""
        process = self.start(nodes)
        try:
            printed, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            logs = [path.read_text()[-3000:] for path in sorted((self.place.path / "logs").iterdir())]
            pytest.fail("hangs; the logs end with\n" + "\n".join(logs))
        assert process.returncode == 0, printed
        return printed

    def kill_all(self, process: subprocess.Popen[str]) -> None:
        """kill -9 of every process of the run at once."""
        victims = [process.pid, *(self.pid(name) for name in ("coordinator", "node-1", "node-2"))]
        for victim in filter(None, victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        process.communicate()

    def start_and_kill(self, entries: int) -> None:
        """Let the run write more than so many ledger entries, then kill everything."""
        process = self.start()
        wait_for(lambda: self.entries > entries, what="a few entries")
        self.kill_all(process)

    @property
    def entries(self) -> int:
        return ledger.read(self.place.ledger).chain.height if self.place.ledger.exists() else 0

    @property
    def digest(self) -> int:
        reading = ledger.read(self.place.ledger)
        assert reading.ended, str(reading)
        assert reading.chain.round == ROUNDS
        return reading.chain.entries[-1].digest

    def pid(self, name: str) -> int:
        """The process that works as `name`, found by its command line."""
        wanted = str(self.place.path).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            role = b"coordinator.server" in words if name == "coordinator" else name.encode() in words
            if b"esnode.leash" in words and wanted in words and role:
                return int(entry.name)
        return 0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> int:
    """D of the toy run that nothing disturbs."""
    toy = Toy(tmp_path_factory.mktemp("unbroken") / "run")
    with pytest.MonkeyPatch.context() as patch:
        user = tmp_path_factory.mktemp("user")
        keys.write_signing(user / "coordinator.key", runs.SIGNING_SEED)
        patch.setenv("ESNODE_CONFIG", str(user))
        patch.setenv("PYTHONPATH", str(ROOT))
        toy.finish()
    return toy.digest


def test_a_run_to_the_end(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    printed = toy.finish()
    assert f"round {ROUNDS}/{ROUNDS}" in printed and "finished" in printed
    for path in (toy.place.metrics, toy.place.units, toy.place.ledger, toy.place.tensorboard):
        assert path.exists()
    assert not busy(toy.place)
    assert f"round {ROUNDS}/" not in toy.finish(), "nothing is left to train"


def test_files_of_the_users_are_not_taken_for_modules(tmp_path: Path, unbroken: int) -> None:
    for name in ("coordinator", "esnode", "protocol"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not me')")
    (tmp_path / "random.py").write_text("raise RuntimeError('nor me')")
    toy = Toy(tmp_path / "run")
    printed, _ = toy.start(cwd=tmp_path).communicate(timeout=PATIENCE)
    assert toy.digest == unbroken, printed


def test_more_rounds_than_the_run_had_are_refused_once_it_ended(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.finish()
    with pytest.raises(RequestError, match=f"ended after {ROUNDS} rounds.*esnode fork"):
        run.run(Request(out=toy.place.path, resume=True, rounds=ROUNDS + 1), Console())


def test_fewer_or_more_rounds_while_it_lasts(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    process = toy.start()
    wait_for(lambda: toy.entries > 5, what="a few rounds")
    text = toy.place.plan.read_text()
    toy.place.plan.write_text(text.replace(f"rounds = {ROUNDS}", f"rounds = {ROUNDS + 4}"))
    process.communicate(timeout=PATIENCE)
    assert ledger.read(toy.place.ledger).chain.round == ROUNDS + 4


def kill_and_resume(toy: Toy, moments: list[float]) -> None:
    """kill -9 of `esnode run` after each of these seconds, then one undisturbed `--resume`."""
    for moment in moments:
        process = toy.start()
        time.sleep(moment)  # the moment is the point; whatever phase it hits must do
        process.kill()
        process.communicate()
    toy.finish()


@pytest.mark.parametrize("kept", [0, 1, 8, 40])
def test_a_ledger_cut_anywhere_is_repaired_from_the_journal(tmp_path: Path, unbroken: int, kept: int) -> None:
    """Also before its first entry: everything was killed between the file's creation and that."""
    toy = Toy(tmp_path / "run")
    toy.start_and_kill(3)
    toy.place.ledger.write_bytes(toy.place.ledger.read_bytes()[:kept])
    toy.finish()
    assert toy.digest == unbroken


def test_a_lost_lock_is_the_ledgers_first_entry(tmp_path: Path, unbroken: int) -> None:
    toy = Toy(tmp_path / "run")
    toy.start_and_kill(3)
    written = toy.place.lock.read_bytes()
    toy.place.lock.unlink()
    toy.finish()
    assert toy.place.lock.read_bytes() == written and toy.place.plan.exists()
    assert toy.digest == unbroken


def test_the_ledger_of_another_run_does_not_end_this_one(tmp_path: Path, unbroken: int) -> None:
    other = Toy(tmp_path / "other", noise="another task")
    other.finish()
    toy = Toy(tmp_path / "run")
    toy.start_and_kill(3)
    mine = toy.place.ledger.read_bytes()
    toy.place.ledger.write_bytes(other.place.ledger.read_bytes())
    printed, _ = toy.start().communicate(timeout=PATIENCE)
    assert "another run" in printed and "finished" not in printed
    toy.place.ledger.write_bytes(mine)
    toy.finish()
    assert toy.digest == unbroken


def test_the_command_that_continues_is_complete(tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "a folder")
    plain = run.resume_command(place, Request())
    assert plain == f"esnode run --resume --out '{place.path}'"
    whole = run.resume_command(place, Request(code=Path("my tasks"), nodes=3, threads=2))
    assert whole == plain + " --code 'my tasks' --nodes 3 --threads 2"
    engines = run.resume_command(place, Request(nodes=1, typed=("--engine", "vllm", "--gpus", "all")))
    assert engines == plain + " --nodes 1 --engine vllm --gpus all"


def test_killed_at_random_moments_it_resumes_to_the_same_bits(tmp_path: Path, unbroken: int) -> None:
    toy = Toy(tmp_path / "run")
    process = toy.start()
    wait_for(lambda: toy.entries > 6, what="a few rounds")
    process.kill()
    process.communicate()
    assert not ledger.read(toy.place.ledger).ended
    kill_and_resume(toy, [0.9, 1.3])
    assert toy.digest == unbroken


@pytest.mark.slow
def test_twenty_random_kills(tmp_path: Path, unbroken: int) -> None:
    chance = random.Random(20)
    for number in range(20):
        toy = Toy(tmp_path / f"run{number}")
        kill_and_resume(toy, [chance.uniform(0.1, 3.0) for _ in range(chance.randint(1, 3))])
        assert toy.digest == unbroken, f"run {number}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_everything(tmp_path: Path, unbroken: int, number: signal.Signals) -> None:
    toy = Toy(tmp_path / "run")
    process = toy.start()
    wait_for(lambda: toy.entries > 5, what="a few rounds")
    process.send_signal(number)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"esnode run --resume --out {toy.place.path}" in printed
    assert "Traceback" not in printed
    assert not busy(toy.place)
    assert not any(toy.pid(name) for name in ("coordinator", "node-1", "node-2"))
    toy.finish()
    assert toy.digest == unbroken


def test_the_live_view_and_ctrl_c_in_a_terminal(tmp_path: Path, unbroken: int) -> None:
    """As a person sees it: frames in a terminal, Ctrl-C typed, the command to continue."""
    toy = Toy(tmp_path / "run")
    command = [sys.executable, "-m", "tests.toy_run", str(toy.place.path), "2"]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color", "COLUMNS": "110"})
    seen = b""
    deadline = time.monotonic() + PATIENCE
    while toy.entries < 8 or b"held-out" not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.05)[0]:
            seen += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # how a terminal says that its last user is gone
        while more := os.read(terminal, 65536):
            seen += more
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 130, seen.decode()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    for words in ("members", "reward", "node-2", "Ctrl-C stops cleanly", "esnode run --resume --out"):
        assert words in shown, shown
    toy.finish()
    assert toy.digest == unbroken


@pytest.mark.parametrize("moment", [0.15, 0.35, 0.6, 0.8])
def test_ctrl_c_while_it_starts(tmp_path: Path, moment: float) -> None:
    toy = Toy(tmp_path / "run")
    process = toy.start()
    wait_for(toy.place.busy.exists, what="the folder is taken")
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert not busy(toy.place)
    toy.finish()


def test_a_second_ctrl_c_after_the_goodbye_changes_nothing(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    process = toy.start()
    assert process.stdout is not None
    wait_for(lambda: toy.entries > 1, what="training")
    process.send_signal(signal.SIGINT)
    for line in process.stdout:
        if "--resume" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130


def test_nodes_that_were_told_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(tmp_path / "run", seconds=0.5)
    process = toy.start(nodes=1)
    wait_for(lambda: toy.entries > 2, what="a node at work")
    os.kill(toy.pid("node-1"), signal.SIGTERM)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "all nodes have left" in printed and "esnode run --resume --out" in printed


@pytest.mark.parametrize("victim", ["node-1", "coordinator"])
def test_a_killed_process_is_started_again(tmp_path: Path, unbroken: int, victim: str) -> None:
    toy = Toy(tmp_path / "run")
    process = toy.start()
    wait_for(lambda: toy.entries > 5, what="a few rounds")
    os.kill(toy.pid(victim), signal.SIGKILL)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, printed
    assert toy.place.log(victim).read_text().count(f"{victim} starts") == 2
    assert toy.digest == unbroken


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    first = toy.start()
    wait_for(lambda: toy.entries > 3, what="the first rounds")
    second = toy.start()
    printed, _ = second.communicate(timeout=PATIENCE)
    assert second.returncode == 1
    assert (
        printed
        == f"esnode: {toy.place.path} is in use by process {first.pid}. Wait for it, stop it with "
        + ("Ctrl-C, or choose another folder with --out.\n")
    )
    first.communicate(timeout=PATIENCE)
    assert first.returncode == 0


def test_a_coordinator_that_refuses_is_quoted_and_not_retried(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.place.plan.write_text(toy.place.plan.read_text() + "quorum = 7\n")
    process = toy.start()
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "ops.quorum = 7" in printed and "Traceback" not in printed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    with full_disk.mounted(tmp_path / "disk", "size=24m") as place:
        yield place


def test_a_disk_that_fills_up_ends_the_run_in_one_sentence(small_disk: Path, unbroken: int) -> None:
    toy = Toy(small_disk / "run")
    process = toy.start()
    wait_for(lambda: toy.entries > 5, what="a few rounds")
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, printed
    assert "Traceback" not in printed, printed
    assert re.search(r"esnode: .*(disk is full|No space left)", printed), printed
    again = toy.start()
    printed, _ = again.communicate(timeout=PATIENCE)
    assert again.returncode == 1 and "the disk of" in printed and "is full" in printed
    ballast.unlink()
    toy.finish()
    assert toy.digest == unbroken


def test_nodes_that_always_crash_end_the_run_with_their_last_words(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    crash = "import os\ndef load(*_):\n    print('out of paper', flush=True)\n    os._exit(9)\n"
    (tmp_path / "broken.py").write_text(crash)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "tests.toy_run", str(toy.place.path), "1", "broken:load"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert "node-1 crashed 4 times (exit code 9)" in done.stderr
    assert "out of paper" in done.stderr and str(toy.place.log("node-1")) in done.stderr
