"""A real full disk: small tmpfs mounts in a mount namespace of their own, filled and freed at random moments.

`unshare --mount --propagation private python -m tests.full_disk coordinator|n1 FOLDER SEED` runs a toy run
whose victim has such a disk. Each time it is full the victim must end with code 1 and one sentence that names
it; after space is freed and the victim started again, as a service manager would, the run goes on, and ends
as if nothing had been. The mounts end with the namespace, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol import ledger
from tests import chaos, toy_engine
from tests.runs import ROOT, Processes, make_folder, wait_for

DISK = "16m"  # the journal keeps up to 4 MB of its write-ahead log
TIMES = 5
ROUNDS = 10**6
SENTENCE = re.compile(r"^esnode: .*(space|disk|write|full|journal)", re.IGNORECASE)
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--propagation", "private")


@contextlib.contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A file system of its own at `place`; the test is skipped where mounting one needs more rights."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def why_not() -> str:
    """Why this cannot be done here, in words; empty when it can."""
    if shutil.which("unshare") is None:
        return "no unshare on this machine"
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(probe, check=False, capture_output=True, text=True)
    return f"mount namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


def perform(victim: str, folder: Path, seed: int) -> str:
    """The scenario in a namespace of its own; its story. AssertionError with it when it fails."""
    command = [*UNSHARE, sys.executable, "-m", "tests.full_disk", victim, str(folder), str(seed)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def filled(disk: Path, spare: int) -> Iterator[None]:
    """Leave `spare` bytes free on the disk for a while."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with ballast.open("r+b") as file:
        file.truncate(max(0, ballast.stat().st_size - spare))
    yield
    ballast.unlink()


def _lay_out(victim: str, folder: Path) -> Path:
    """Mount the victim's disk, and keep what is written to stderr off it; returns the disk."""
    (folder / "words").mkdir(parents=True)
    run = folder / "run"
    run.mkdir()
    disk = run if victim == "coordinator" else run / "nodes" / victim
    disk.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True)
    if victim == "coordinator":  # the nodes keep disks of their own
        (folder / "nodes").mkdir()
        (run / "nodes").symlink_to(folder / "nodes")
        (folder / "logs").mkdir()
    for name in ("coordinator", "n1", "n2"):
        (run / f"{name}.stderr").symlink_to(folder / "words" / name)
    return disk


def act(victim: str, folder: Path, seed: int) -> None:
    """The scenario itself, inside the namespace."""
    chance = random.Random(seed)
    disk = _lay_out(victim, folder)
    run = folder / "run"
    make_folder(run, ("n1", "n2"), ROUNDS, members=4, task_options={"seconds": 0.03})
    with Processes(run) as processes:
        start: dict[str, Callable[[], object]] = {n: lambda n=n: processes.node(n) for n in ("n1", "n2")}
        start["coordinator"] = processes.coordinator
        with filled(disk, 0):
            for begin in start.values():
                begin()
            _ends_with_a_sentence(processes, victim)
        start[victim]()
        for _ in range(TIMES):
            _goes_on(processes, victim)
            time.sleep(chance.uniform(0, 0.5))
            spare = chance.choice((0, 2_000, 9_000, 20_000))
            with filled(disk, spare):
                print(f"{spare} bytes left at round {processes.status().get('round')}")
                _ends_with_a_sentence(processes, victim)
            start[victim]()
        _goes_on(processes, victim)
        plan = run / "plan.toml"
        plan.write_text(plan.read_text().replace(str(ROUNDS), str(processes.status()["round"] + 2)))
        processes.wait_end()
    path = run / "run.ledger"
    lock = ledger.read(path).chain.lock
    found = chaos.differences(path, toy_engine.ToyWorkshop(lock, "truth", 0.0))
    assert not found, found
    print(f"ended after {ledger.read(path).chain.round} rounds, equal to the fault-free run")


def _goes_on(processes: Processes, victim: str) -> None:
    """Rounds close, and the victim has its part in it."""
    reached = wait_for(processes.status)["round"]
    wait_for(lambda: processes.status().get("round", 0) > reached + 2)
    if victim != "coordinator":
        wait_for(
            lambda: any(n["name"] == victim and n["state"] == "ready" for n in processes.status()["nodes"])
        )


def _ends_with_a_sentence(processes: Processes, victim: str) -> None:
    code = processes.running[victim].wait(20)
    words = processes.words(victim)
    line = words.strip().splitlines()[-1] if words.strip() else ""
    print(f"{victim} ends with code {code}: {line}", flush=True)
    assert code == 1 and SENTENCE.search(line) and "Traceback" not in words, words


if __name__ == "__main__":
    act(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
