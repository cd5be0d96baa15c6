"""Donor, relay and receiver processes around one made-up snapshot: real keys and sockets, no engine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esnode import snapshot
from esnode.peers import MALLOC
from esnode.snapshot import Array, Header
from protocol import keys
from protocol.entries import Admission, LockBody, RosterBody, seal
from protocol.ledger import LedgerFile
from tests.runs import ROOT, SIGNING_SEED, toy_lock, wait_for

ROUND = 20
HASTY = """
import sys
from esnode import receiver, transfer
transfer.PATIENCE = 3.0
sys.exit(receiver.main())
"""  # a receiver that gives up sooner


@dataclass
class Child:
    """A process that speaks JSON lines."""

    process: subprocess.Popen[bytes]
    lines: list[dict[str, Any]] = field(default_factory=list)
    rest: bytes = b""

    def tell(self, words: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        """All lines so far."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        while True:
            try:
                data = os.read(self.process.stdout.fileno(), 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self.rest += data
        *whole, self.rest = self.rest.split(b"\n")
        self.lines += [json.loads(line) for line in whole]
        return self.lines

    def said(self, word: str) -> list[Any]:
        return [line[word] for line in self.hear() if word in line]


class Exchange:
    """A run's roster on disk, donors, a relay and a receiver. A context manager that ends them all."""

    def __init__(self, path: Path, names: str = "abcj", size: int = 3_000_000) -> None:
        self.path = path
        self.names = names
        self.lock = toy_lock()
        self.secrets = {n: keys.new_curve_file(self.node(n) / "curve.key") for n in names}
        self.keys = {name: keys.curve_public(secret) for name, secret in self.secrets.items()}
        self.server = keys.new_curve_file(path / "coordinator" / "curve.key")
        self.entries = self._ledger()
        for file in (path / "run.ledger", *(self.node(name) / "node.ledger" for name in names)):
            with LedgerFile(file) as ledger:
                ledger.append(*self.entries)
        self.header = Header(
            1, self.lock.run_id, ROUND, b"e" * 32, 7, (Array("w", "master", "float32", (size // 4,)),)
        )
        self.data = hashlib.shake_128(b"weights").digest(size // 4 * 4)
        self.root = b""
        self.children: dict[str, Child] = {}
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.relay: dict[str, str] | None = None
        self.prefix: tuple[str, ...] = ()  # of the next command: into a network namespace

    def node(self, name: str) -> Path:
        return self.path / "nodes" / name

    def _ledger(self) -> list[bytes]:
        fields = {"term": 1, "nonce": bytes(8), "round": 0, "digest": self.lock.digest, "key": SIGNING_SEED}
        first = seal(LockBody(self.lock.to_bytes()), parent=bytes(32), **fields)
        rows = tuple(Admission(k, key, name) for k, (name, key) in enumerate(self.keys.items()))
        return [first.raw, seal(RosterBody(rows), parent=first.hash, **fields).raw]

    def keep(self, *names: str) -> None:
        """These nodes have the snapshot."""
        for name in names:
            path, self.root = snapshot.write(
                self.node(name) / "checkpoint", self.header, lambda _, first, end: self.data[first:end]
            )
        self.file = path

    def spoil(self, name: str) -> None:
        """One bit of every part of a node's file turns over."""
        path = self.node(name) / "checkpoint" / snapshot.file_name(ROUND)
        data = bytearray(path.read_bytes())
        for place in range(len(data) - self.header.total, len(data), self.header.part_size):
            data[place] ^= 1
        path.write_bytes(data)

    def start(self, name: str, module: str, *words: str) -> Child:
        return self.run(name, "-m", module, *words)

    def run(self, name: str, *words: str) -> Child:
        """Start Python with these words."""
        command = [*self.prefix, sys.executable, *words]
        environment = {**os.environ, **MALLOC, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        with (self.path / f"{name}.stderr").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, env=environment, cwd=ROOT
            )
        self.children[name] = Child(process)
        return self.children[name]

    def donor(self, name: str, rate: float = 0.0, bind: str = "tcp://127.0.0.1:0") -> Child:
        words = ("--folder", str(self.node(name)), "--bind", bind, "--rate", str(rate))
        child = self.start(name, "esnode.donor", *words)
        self.addresses[name] = tuple(wait_for(lambda: child.said("address"), what=self.words(name)))
        return child

    def start_relay(self, *words: str) -> Child:
        command = ("--data", str(self.path), "--bind", "tcp://127.0.0.1:0", *words)
        child = self.start("relay", "coordinator.relay", *command)
        address = wait_for(lambda: child.said("address"), what=self.words("relay"))[0]
        self.relay = {"address": address, "key": keys.curve_public(self.server).hex()}
        return child

    def receive(
        self, donors: str, who: str = "j", spare: int = 0, home: str = "", hasty: bool = False
    ) -> Child:
        """Start the receiver of a node."""
        program = ("-c", HASTY) if hasty else ("-m", "esnode.receiver")
        child = self.run("receiver", *program, "--folder", str(self.node(who)))
        rows = [
            {"key": self.keys[n].hex(), "name": n, "addresses": self.addresses.get(n, ())} for n in donors
        ]
        child.tell(
            {
                "round": ROUND,
                "root": self.root.hex(),
                "size": len(self.data),
                "donors": rows,
                "relay": self.relay,
                "spare": spare,
                "home": home,
            }
        )
        return child

    def wait(self, child: Child, seconds: float = 60.0) -> str:
        """Until a transfer is over: "" or why it failed."""
        wait_for(lambda: child.said("fetched") or child.said("failed"), seconds, self.words("receiver"))
        return str((child.said("failed") or [""])[0])

    def draft(self, who: str = "j") -> Path:
        return self.node(who) / "checkpoint" / f"incoming-{self.root.hex()[:16]}.part"

    def equal(self, who: str = "j") -> bool:
        """Whether a node has the very file."""
        path = self.node(who) / "checkpoint" / snapshot.file_name(ROUND)
        return hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(self.file.read_bytes()).digest()

    def words(self, name: str) -> str:
        path = self.path / f"{name}.stderr"
        return path.read_text() if path.exists() else ""

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
        time.sleep(0)
