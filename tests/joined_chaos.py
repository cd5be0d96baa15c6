"""Chaos among machines that joined by an invite, with the toy engine. Called by `test_chaos.py`.

Each node is an `esnode join` with folders of its own; started again it goes on without an invite. Half way
the coordinator's machine is lost for good: a successor starts from the ledger of some node, on a folder that
is empty but for the old CURVE key, at the same address. Rewards and digests are judged as in `chaos.py`.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from esnode import joined, manifest
from protocol import keys
from protocol.lock import Lock, TensorSpec
from tests import chaos, tiny, toy_engine
from tests.runs import ROOT, SIGNING_SEED, Processes, make_folder, wait_for

SOME_ROUNDS = 3000  # bytes of a ledger
LOADER = ("--loader", "tests.toy_engine:load")


def write_model(place: Path) -> str:
    """The toy's weights in the folder of some model; the digest a lock gives them."""
    for weights in tiny.write(place).glob("*.safetensors"):
        weights.unlink()
    save_file({toy_engine.TENSOR: toy_engine.base_weights()}, place / "model.safetensors")
    specs = [TensorSpec(toy_engine.TENSOR, (toy_engine.WIDTH,), "float32", True)]
    return manifest.base_digest(place, specs)


class Machines(Processes):
    """A coordinator's folder and one data folder per joined machine."""

    def __init__(self, root: Path, rounds: int, **lock: Any) -> None:
        super().__init__(root / "run")
        self.root = root
        self.model = root / "model"
        base = write_model(self.model)
        data = b"{}\n"
        digest = hashlib.sha256(data).hexdigest()
        self.lock: Lock = make_folder(self.folder, (), rounds, base=base, data=digest, **lock)
        (self.folder / "task.jsonl").write_bytes(data)
        (root / "config").mkdir()
        keys.write_signing(root / "config" / "coordinator.key", SIGNING_SEED)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.invites: dict[str, str] = {}
        self.recovery: tuple[str, ...] = ()  # words of the successor's command

    def log_of(self, name: str) -> Path:
        """Beside the folders, which are the product's own."""
        return self.root / f"{name}.stderr"

    def serve(self) -> Any:
        """The coordinator, or its successor once there is one: by the same command at every start."""
        bind = f"tcp://127.0.0.1:{self.port}"
        words = ("coordinator", "serve", *self.recovery, "--data", str(self.folder), "--bind", bind)
        return self.start("coordinator", "esnode.cli.main", *words, ESNODE_CONFIG=str(self.root / "config"))

    def invite(self, name: str) -> None:
        """Make an invite for a machine."""
        command = [sys.executable, "-m", "esnode.cli.main", "invite", str(self.folder)]
        made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
        self.invites[name] = made.stdout.strip()

    def place(self, name: str) -> Path:
        """A machine's own folder."""
        return self.root / name

    def join(self, name: str) -> Any:
        """`esnode join`, with the invite as long as the machine has not been let in."""
        place = self.place(name)
        known = joined.known(place)
        note = joined.read(known[0]) if known else None
        words = [] if note is not None and note.nodes.get(name) else [self.invites[name]]
        words += ["--name", name, "--data", str(place), "--model", str(self.model), "--threads", "1"]
        return self.start(name, "esnode.cli.main", "join", *words, *LOADER)

    def ledgers(self) -> dict[str, int]:
        """Nodes that hold a ledger, and how long it is."""
        there = [name for name in chaos.NODES if joined.known(self.place(name))]
        held = {name: self.ledger_of(name) for name in there}
        sizes = {name: path.stat().st_size for name, path in held.items() if path.exists()}
        return {name: size for name, size in sizes.items() if size > SOME_ROUNDS}

    def ledger_of(self, name: str) -> Path:
        """A joined node's ledger."""
        return joined.known(self.place(name))[0] / "nodes" / name / "node.ledger"

    def recover(self, source: str) -> Any:
        """The coordinator's machine is gone; a successor starts from a node's ledger."""
        self.kill("coordinator")
        kept = self.root / "kept.ledger"
        shutil.copy(self.ledger_of(source), kept)
        old, self.folder = self.folder, self.root / "heir"
        (self.folder / "coordinator").mkdir(parents=True)
        shutil.copy(old / "coordinator" / "curve.key", self.folder / "coordinator" / "curve.key")
        (self.folder / "coordinator" / "curve.key").chmod(0o600)
        words = ("--recover-from", str(kept), "--task-data", str(old / "task.jsonl"))
        self.recovery = (*words, "--rounds", str(chaos.FOREVER))
        return self.serve()


class Joined(chaos.Play):
    """The play of joined machines. A join that finds no coordinator says so and is started again."""

    machines: Machines
    recover_at: float

    def _supervise(self) -> None:
        kept = self.machines.ledgers()
        down = self._back.keys() | self._leaving.keys()
        due = self._now >= self.recover_at and chaos.COORDINATOR not in down
        if due and kept and not self.machines.recovery:
            source = max(kept, key=lambda name: kept[name])
            self._tell(f"the coordinator's machine is lost; a successor starts from the ledger of {source}")
            self.machines.recover(source)
        super()._supervise()

    def _ended(self, name: str, code: int) -> None:
        said = self.processes.words(name).strip().splitlines()[-1:]
        if name == chaos.COORDINATOR or code != 1 or not said or "cannot be reached" not in said[0]:
            return super()._ended(name, code)
        self._back[name] = self._now + 1.0


def perform(folder: Path, deeds: Sequence[chaos.Deed], seconds: float, say: Callable[[str], None]) -> Joined:
    """A whole run of joined machines; its violations are complete."""
    with Machines(folder, chaos.FOREVER, members=8, task_options={"seconds": 0.1}) as machines:
        machines.serve()
        wait_for(machines.status, what=machines.words("coordinator"))
        for name in chaos.NODES:
            machines.invite(name)
        machines.kill("coordinator")
        start: dict[str, Callable[[], Any]] = {name: lambda n=name: machines.join(n) for name in chaos.NODES}
        start[chaos.COORDINATOR] = machines.serve
        play = Joined(machines, start, list(deeds), seconds, say)
        play.machines, play.recover_at = machines, seconds / 2
        play.perform()
        if not machines.recovery:
            play.violations.append("no successor was started")
    chaos.judged(play, chaos.toy_truth)
    return play
