"""From a plan to a trained model over invites: real processes, a real (tiny) model, folders of their own.

The coordinator's machine and the joiners' share nothing but the loopback: every folder is separate.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esnode import duty, joined
from protocol import ledger
from tests import tiny
from tests.runs import ROOT, wait_for

PATIENCE = 120.0
PLAN = """
[run]
model = "{model}"
task = "{task}"
repeatable = true
[run.es]
members = 4
mirrored = true
sigma = 0.0078125
alpha = 0.02
[ops]
rounds = {rounds}
eval_every = 2
"""


class World:
    """One folder per machine, one log per process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = tiny.write(path / "model")
        self.running: list[subprocess.Popen[str]] = []

    def start(self, machine: str, *words: str) -> subprocess.Popen[str]:
        place = self.path / machine
        place.mkdir(exist_ok=True)
        surroundings = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
            "ESNODE_CONFIG": str(place / "config"),
            "ESNODE_DATA": str(place / "data"),
            "PYTHONPATH": str(ROOT),
        }
        log = (place / "log").open("a")
        command = [sys.executable, "-m", "esnode.cli.main", *words]
        process = subprocess.Popen(
            command, cwd=place, env=surroundings, stdout=log, stderr=subprocess.STDOUT, text=True
        )
        log.close()
        self.running.append(process)
        return process

    def done(self, machine: str, *words: str, code: int = 0) -> str:
        process = self.start(machine, *words)
        assert process.wait(PATIENCE) == code, self.log(machine)
        return self.log(machine)

    def log(self, machine: str) -> str:
        return (self.path / machine / "log").read_text()

    def serve(self, name: str, task: str, rounds: int, *words: str) -> subprocess.Popen[str]:
        """Start a coordinator and wait until it listens."""
        plan = self.path / f"{name}.toml"
        plan.write_text(PLAN.format(model=self.model, task=task, rounds=rounds))
        process = self.start(name, "coordinator", "serve", str(plan), "--data", "run", *words)
        address = self.path / name / "run" / "coordinator" / "address"
        wait_for(lambda: address.exists() or process.poll() is not None, PATIENCE)
        assert process.poll() is None, self.log(name)
        return process

    def invite(self, name: str) -> str:
        made = subprocess.run(
            [sys.executable, "-m", "esnode.cli.main", "invite", "run"],
            cwd=self.path / name, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, text=True,
            capture_output=True, timeout=60,
        )  # fmt: skip
        return made.stdout.strip()

    def signing_key(self, machine: str) -> str:
        """What `esnode coordinator key` prints there."""
        return re.findall(r"^[0-9a-f]{64}$", self.done(machine, "coordinator", "key"), re.MULTILINE)[-1]

    def round(self, name: str) -> int:
        path = self.path / name / "run" / "run.ledger"
        return ledger.read(path).chain.round if path.exists() else 0

    def members(self, name: str) -> set[str]:
        """Names on the roster."""
        path = self.path / name / "run" / "run.ledger"
        return {member for _, member in ledger.read(path).chain.roster.values()} if path.exists() else set()

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def pairs(path: Path) -> str:
    lines = [{"prompt": f"say {k}", "target": f"{k}{k}"} for k in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"likelihood:{path}"


def test_two_machines_join_by_invite_and_the_ledger_verifies(world: World) -> None:
    coordinator = world.serve("c", pairs(world.path / "pairs.jsonl"), 40)
    began = time.monotonic()
    a = world.start("a", "join", world.invite("c"), "--name", "a", "--threads", "1")
    # b names the model: on its machine the run's name for it means nothing
    named = ("--name", "b", "--threads", "1", "--model", str(world.model))
    b = world.start("b", "join", world.invite("c"), *named)
    units = world.path / "c" / "run" / "units.jsonl"
    wait_for(lambda: units.exists() and units.read_text(), PATIENCE)
    print(f"first unit {time.monotonic() - began:.1f} s after the first command (contended)")
    wait_for(lambda: "b" in world.members("c"), PATIENCE)
    # b is paused and a leaves: the run stands still until a, its task data altered, comes back uninvited
    assert "paused" in world.done("b", "pause")
    a.send_signal(signal.SIGTERM)
    assert a.wait(10) == 0, world.log("a")
    wait_for(lambda: "pause: paused by its owner" in world.log("b"))
    before = world.round("c")
    folder = joined.find(None, world.path / "a" / "data")
    (folder / "task.jsonl").write_text("{}\n")
    again = world.start("a", "join", "--threads", "1")
    wait_for(lambda: world.round("c") > before, PATIENCE)
    assert duty.switch(world.path / "b" / "data", False)  # as `esnode resume` does
    assert coordinator.wait(PATIENCE) == 0, world.log("c")
    assert again.wait(20) == 0, world.log("a")
    assert b.wait(20) == 0, world.log("b")
    whole = world.path / "c" / "run" / "run.ledger"
    shown = world.done("v", "verify", str(whole), "--base", str(world.model))
    assert "40 of 40 rounds" in shown and "all equal" in shown
    reading = ledger.read(whole)
    assert reading.ended and {name for _, name in reading.chain.roster.values()} == {"a", "b"}
    for machine in ("a", "b"):
        place = joined.find(None, world.path / machine / "data")
        kept = (place / "nodes" / machine / "node.ledger").read_bytes()
        assert kept == whole.read_bytes()


def test_python_task_asks_for_its_code(world: World) -> None:
    code = world.path / "own"
    code.mkdir()
    (code / "mine.py").write_text(
        'def items(): return [{"prompt": str(k)} for k in range(8)], [{"prompt": "9"}]\n'
        "def score(item, text): return len(text) % 7 / 7\nMAX_NEW_TOKENS = 4\n"
    )
    coordinator = world.serve("c", "python:mine.py", 1, "--code", str(code))
    invite = world.invite("c")
    told = world.done("a", "join", invite, "--name", "a", "--threads", "1", code=1)
    assert "which never travels: get mine.py (SHA-256" in told and "--task-code FILE" in told
    words = ("join", "--threads", "1", "--task-code", str(code / "mine.py"))
    assert world.start("a", *words).wait(PATIENCE) == 0, world.log("a")
    assert coordinator.wait(20) == 0, world.log("c")


def test_another_model_or_tokenizer_is_refused(world: World) -> None:
    """The last has the right weights, but other token ids for the same text: it would ask other questions."""
    world.serve("c", pairs(world.path / "pairs.jsonl"), 1)
    others = {
        "other values than": tiny.write(world.path / "x", seed=1),
        "is not the base model": tiny.write(world.path / "y", "qwen2"),
        "token": swapped(tiny.write(world.path / "z")),
    }
    for words, other in others.items():
        told = world.done(f"with-{other.name}", "join", world.invite("c"), "--model", str(other), code=1)
        assert words in told.lower() and "Traceback" not in told, told


def swapped(model: Path) -> Path:
    """The model with a tokenizer whose ids of two letters are exchanged."""
    path = model / "tokenizer.json"
    plain = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = plain["model"]["vocab"]
    vocabulary["s"], vocabulary["a"] = vocabulary["a"], vocabulary["s"]
    path.write_text(json.dumps(plain), encoding="utf-8")
    return model


def test_a_successors_invite_in_an_existing_folder_keeps_identity_and_ledger(world: World) -> None:
    """The successor's key comes into the run by `esnode plan amend --trust`, on a machine of its own."""
    coordinator = world.serve("c", pairs(world.path / "pairs.jsonl"), 400)
    a = world.start("a", "join", world.invite("c"), "--name", "a", "--threads", "1")
    wait_for(lambda: world.round("c") >= 2, PATIENCE, world.log("a"))
    mine, heirs = (world.signing_key(name) for name in ("c", "h"))
    first = world.round("c") + 20
    told = world.done("c", "plan", "amend", "run", "--trust", heirs, "--from-round", str(first), code=1)
    assert "own key" in told and "Traceback" not in told
    trust = ("--trust", mine, "--trust", heirs)
    told = world.done("c", "plan", "amend", "run", *trust, "--from-round", str(first))
    assert f"trusted keys {mine[:16]}, {heirs[:16]} from round {first} on" in told
    wait_for(lambda: world.round("c") > first + 1, PATIENCE)
    coordinator.kill()
    coordinator.wait()
    a.send_signal(signal.SIGTERM)
    assert a.wait(10) == 0, world.log("a")
    folder = joined.find(None, world.path / "a" / "data")
    node = folder / "nodes" / "a"
    key, held = (node / "curve.key").read_bytes(), (node / "node.ledger").read_bytes()
    words = ("--recover-from", str(node / "node.ledger"), "--task-data", str(folder / "task.jsonl"))
    rounds = ledger.read(node / "node.ledger").chain.round + 3
    heir = world.start("h", "coordinator", "serve", *words, "--rounds", str(rounds), "--data", "run")
    address = world.path / "h" / "run" / "coordinator" / "address"
    wait_for(lambda: address.exists() or heir.poll() is not None, PATIENCE)
    again = world.start("a", "join", world.invite("h"), "--threads", "1")
    assert heir.wait(PATIENCE) == 0, world.log("h") + world.log("a")
    assert again.wait(20) == 0, world.log("a")
    assert joined.find(None, world.path / "a" / "data") == folder
    assert (node / "curve.key").read_bytes() == key
    whole = (node / "node.ledger").read_bytes()
    assert whole.startswith(held) and whole == (world.path / "h" / "run" / "run.ledger").read_bytes()
    reading = ledger.read(node / "node.ledger")
    assert reading.ended and reading.chain.round == rounds and len(reading.chain.roster) == 1
    assert reading.chain.term > 1 and reading.chain.signer.hex() == heirs
