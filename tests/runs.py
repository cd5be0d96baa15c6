"""Toy runs with real processes: a folder made in milliseconds; coordinator and nodes started and killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esnode import admin
from protocol import keys, ledger
from protocol.entries import public_key
from protocol.lock import Lock, TensorSpec
from tests import toy_engine

ROOT = Path(__file__).resolve().parent.parent
SIGNING_SEED = bytes(range(32))
FOREVER = 10**6  # rounds
PATIENCE = 120.0  # seconds for anything on a machine that is busy with something else
PLAN = """
[run]
model = "toy"
task = "short-answers"
[run.es]
members = 4
sigma = 0.0625
alpha = 0.0625
[ops]
rounds = {rounds}
eval_every = 2
"""


def toy_lock(**changes: Any) -> Lock:
    """A lock for `toy_engine`: 64 weights, 8 training prompts in chunks of 2, rewards between -9 and 0."""
    plain: dict[str, Any] = {
        "model": "toy",
        "base": "00" * 32,
        "digest": toy_engine.base_digest(),
        "manifest": (TensorSpec(toy_engine.TENSOR, (toy_engine.WIDTH,), "float32", True),),
        "task": "toy",
        "data": "00" * 32,
        "scorer": "00" * 32,
        "train_prompts": 8,
        "heldout_prompts": 4,
        "train_tokens": "00" * 32,
        "heldout_tokens": "00" * 32,
        "reward_low": -9.0,
        "reward_high": 0.0,
        "members": 6,
        "mirrored": True,
        "sigma": (0.0625,),
        "alpha": (0.0625,),
        "live_dtype": "float32",
        "per_round": 8,
        "chunk": 2,
        "max_new_tokens": 0,
        "trusted": (public_key(SIGNING_SEED).hex(),),
    }
    return Lock(**(plain | changes))


def make_folder(folder: Path, names: tuple[str, ...] = ("n1", "n2"), rounds: int = 4, **changes: Any) -> Lock:
    """The files `esnode run` would write before it starts processes."""
    lock = toy_lock(**changes)
    inner = folder / "coordinator"
    inner.mkdir(parents=True, exist_ok=True)
    (folder / "lock.json").write_bytes(lock.to_bytes())
    (folder / "plan.toml").write_text(PLAN.format(rounds=rounds))
    keys.write_signing(inner / "signing.key", SIGNING_SEED)
    roster = {keys.curve_public(keys.new_curve_file(folder / "nodes" / n / "curve.key")): n for n in names}
    keys.write_roster(inner / "roster.json", roster)
    return lock


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE, what: str = "") -> Any:
    """Poll until `condition` is true and return its value; AssertionError after `seconds`.

    How long something may take is for the test to measure: this limit only ends a test that hangs.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s in vain {what}")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Processes:
    """Coordinator and nodes of one toy folder, each a real process. A context manager that ends them all."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def coordinator(self, *extra: str, bind: str = "tcp://127.0.0.1:0") -> subprocess.Popen[bytes]:
        """Start the coordinator."""
        return self.start(
            "coordinator", "coordinator.server", "--data", str(self.folder), "--bind", bind, *extra
        )

    def node(
        self, name: str, *extra: str, loader: str = "tests.toy_engine:load", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a node with a toy engine, or that of real models (`loader` ""); environment as in `start`."""
        words = ("--run", str(self.folder), "--name", name, "--threads", "1")
        engine = ("--loader", loader) if loader else ()
        return self.start(name, "esnode.daemon", *words, *engine, *extra, **environment)

    def start(self, name: str, module: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a module as the process called `name`; FILE_LIMIT in bytes stands in for a full disk,
        OPEN_FILES is how many it may open, NETNS names the network namespace it lives in.
        """
        log = open(self.log_of(name), "ab")  # noqa: SIM115 - the child keeps it
        command = [sys.executable, "-m", module, *arguments]
        if "FILE_LIMIT" in environment:
            command = ["prlimit", f"--fsize={environment['FILE_LIMIT']}", *command]
        if "OPEN_FILES" in environment:
            command = ["prlimit", f"--nofile={environment['OPEN_FILES']}", *command]
        if "NETNS" in environment:
            command = ["ip", "netns", "exec", environment["NETNS"], *command]
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=surroundings)
        log.close()
        return self.running[name]

    def kill(self, name: str) -> None:
        """kill -9."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def status(self) -> dict[str, Any]:
        """The coordinator's answer, or {} when none answers yet."""
        try:
            return admin.ask(self.folder, "status", wait=2.0)
        except admin.NoCoordinator:
            return {}

    def words(self, name: str) -> str:
        """What a process wrote to stderr."""
        return self.log_of(name).read_text()

    def log_of(self, name: str) -> Path:
        """Where that is kept."""
        return self.folder / f"{name}.stderr"

    def end_after(self, more: int) -> int:
        """Let a run end so many rounds after where its ledger stands; that round.

        A run that is to be caught in the middle is made to go on for ever, so that it cannot end before.
        """
        last = ledger.read(self.folder / "run.ledger").chain.round + more
        plan = self.folder / "plan.toml"
        plan.write_text(re.sub(r"(?m)^rounds = \d+", f"rounds = {last}", plan.read_text()))
        return last

    def wait_end(self, seconds: float = PATIENCE) -> None:
        """Wait until the coordinator has ended by itself with code 0."""
        assert self.running["coordinator"].wait(seconds) == 0, self.words("coordinator")

    def final_digest(self) -> int:
        """D of the last state, from the END entry of the run's ledger, which must be whole."""
        reading = ledger.read(self.folder / "run.ledger")
        assert reading.ended and reading.problem is None, str(reading)
        return reading.chain.entries[-1].digest

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
