"""One real coordinator on one core against many nodes: how fast it connects, accepts and commits.

    python benchmarks/coordinator.py [--nodes 1000] [--members 4096] [--rounds 3] [--json PATH]

The server is the real process (CURVE, journal with synchronous = FULL, units.jsonl), pinned to the first of
`--cores`. All nodes are DEALER sockets with keys of their own in this process, pinned to the second. When all
are connected and hold their first two units, each answers every Assign at once, with a reward out of thin
air, so that the coordinator is what is measured: every result is journaled and flushed, acknowledged, and
answered with the next Assign. A member is one unit of one chunk. Nothing else should run on the two cores.

Keys of the JSON: `connect_seconds`, first connect to last Welcome; `ready_seconds`, from there until all hold
work; `results_per_second`, of the best round, first Result to the Ack of the last of nine tenths of them, all
in the journal by then (the others share their turn of the loop with the commit), and
`results_per_second_rounds` of every round; `commit_seconds`, last Ack of a round to the last node's Commit,
per round, and `commit_bytes` of one of them; `round_seconds`; `server_us_per_result` and
`server_seconds_of_commit`, processor time of all the server's threads, which other programs disturb less than
the clock; `resident_mb` and `peak_mb` of the server; besides `nodes`, `members`, `chunks`, `dropped`
messages and the `load_average` of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgpack
import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

from esnode import admin, nodeoptions
from protocol import keys, wire, zmtp
from protocol.entries import EntryKind, parse
from protocol.lock import Lock
from protocol.messages import Ack, Applied, Assign, Commit, Hello, Welcome
from protocol.seeds import member_seed
from protocol.wire import RULE_BY_TYPE
from tests.runs import make_folder, wait_for

ROOT = Path(__file__).resolve().parent.parent
TAG = {kind: RULE_BY_TYPE[kind].tag for kind in (Ack, Applied, Assign, Commit, Hello, Welcome)}
RESULT_TAG = 8
REWARD = -1.0
PATIENCE = 120.0


@dataclass
class Node:
    """One simulated node: a socket and its number in the list."""

    socket: zmq.Socket[Any]
    welcome: bool = False
    commits: int = 0


@dataclass
class Round:
    """What one round showed, in seconds of this process's clock."""

    first: float = 0.0  # the first Result left
    acked: float = 0.0  # the last Ack came
    heard: float = 0.0  # the last node heard the Commit
    results: int = 0
    acks: int = 0
    most: float = 0.0  # nine tenths of the Acks have come
    spent: list[float] = field(default_factory=list)  # the server's processor seconds: then, and at `heard`
    commits: int = 0
    commit_bytes: int = 0


@dataclass
class Pool:
    """All nodes, on one core."""

    lock: Lock
    nodes: list[Node]
    rounds: list[Round]
    digest: int
    server: int  # its process id
    poller: zmq.Poller = field(default_factory=zmq.Poller)
    height: int = 0
    tip: bytes = b""
    go: bool = False  # until then Assigns are kept
    kept: list[tuple[Node, list[int], bytes]] = field(default_factory=list)
    raw: bytes = b""  # the newest commit's frame: the same for all

    def __post_init__(self) -> None:
        self.by_socket = {node.socket: node for node in self.nodes}
        for node in self.nodes:
            self.poller.register(node.socket, zmq.POLLIN)

    def pump(self) -> None:
        """Read what waits and answer it."""
        for socket, _ in self.poller.poll(1000):
            node = self.by_socket[socket]
            while True:
                try:
                    frame = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self.hear(node, frame)

    def hear(self, node: Node, frame: bytes) -> None:
        """One message: results go out for Assigns, Applied for commits."""
        tag = frame[1]
        if tag == TAG[Assign]:
            self.answer(node, *msgpack.unpackb(frame)[1:3])
        elif tag == TAG[Ack]:
            _, unit, verdict = msgpack.unpackb(frame)
            if verdict != "ok":  # a duplicate of the tail, or late
                return
            round = self.rounds[unit[0]]
            round.acks += 1
            round.acked = time.perf_counter()
            if round.acks == self.lock.members * 9 // 10:
                round.most = round.acked
                round.spent.append(processor_seconds(self.server))
        elif tag == TAG[Commit]:
            self.learn(node, frame)
        elif tag == TAG[Welcome]:
            node.welcome = True

    def answer(self, node: Node, unit: list[int], parent: bytes) -> None:
        """A Result, packed by hand: this core must not be slower than the other."""
        if not self.go:
            return self.kept.append((node, unit, parent))
        if unit[0] == len(self.rounds):
            return None  # the measurement is over
        round = self.rounds[unit[0]]
        seed = member_seed(self.lock.run_id, unit[0], unit[2], self.lock.mirrored)
        sums = [REWARD - unit[2] / 1e4] * (unit[4] - unit[3] + 1)
        fields = [RESULT_TAG, unit, seed, sums, parent, self.digest, 0, 0, 9, [1, 2, 3], b"evidence", 0]
        if not round.first:
            round.first = time.perf_counter()
            round.spent.append(processor_seconds(self.server))
        round.results += 1
        node.socket.send(msgpack.packb(fields, use_bin_type=True))

    def begin(self) -> None:
        """Answer what has been kept."""
        self.go = True
        for kept in self.kept:
            self.answer(*kept)

    def learn(self, node: Node, frame: bytes) -> None:
        """An entry of the ledger; after a commit every node says the same D."""
        if frame != self.raw:
            commit = wire.decode(frame, "coordinator")
            assert isinstance(commit, Commit)
            entry = parse(commit.entry)
            self.raw, self.height, self.tip = frame, commit.height + 1, entry.hash
            self.kind, self.closed = entry.kind, entry.round
            if entry.kind is EntryKind.COMMIT:
                self.digest += 1
        if self.kind is EntryKind.COMMIT:
            round = self.rounds[self.closed]
            round.commits += 1
            round.heard = time.perf_counter()
            if round.commits == len(self.nodes):
                round.spent.append(processor_seconds(self.server))
            round.commit_bytes = zmtp.wire_size(len(frame), True)
            node.socket.send(wire.encode(Applied(self.height, self.tip[:8], self.digest, 1)))


def connect(context: zmq.Context[Any], address: str, server: bytes, secret: bytes) -> zmq.Socket[Any]:
    """A node's socket."""
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.curve_serverkey = server
    dealer.curve_secretkey, dealer.curve_publickey = secret, keys.curve_public(secret)
    dealer.connect(address)
    return dealer


def hello(lock: Lock, name: str) -> Hello:
    """A newcomer that holds the base model."""
    kernel = ("none", "none", b"selftest", (b"engine-1",))
    return Hello(1, 1, lock.law, lock.run_id, name, *kernel, 0, b"", lock.digest, 0, ())


def memory(pid: int) -> tuple[float, float]:
    """Resident and peak megabytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmRSS"]) / 1024, int(found["VmHWM"]) / 1024


def processor_seconds(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, nodes: int, members: int, rounds: int, cores: list[int]) -> dict[str, Any]:
    """Start the server, connect everybody, run the rounds."""
    secrets = {f"n{k}": os.urandom(32) for k in range(nodes)}
    lock = make_folder(
        folder,
        (),
        rounds=rounds + 1,
        members=members,
        mirrored=False,
        per_round=2,
        chunk=2,
        heldout_prompts=0,
    )
    roster = {keys.curve_public(secret): name for name, secret in secrets.items()}
    keys.write_roster(folder / "coordinator" / "roster.json", roster)
    command = [sys.executable, "-m", "coordinator.server", "--data", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "stderr").open("wb") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)
    try:
        os.sched_setaffinity(server.pid, {cores[0]})
        os.sched_setaffinity(0, {cores[-1]})
        address = wait_for(lambda: _address(folder), 20)
        key = nodeoptions.pinned_key(folder)
        with zmq.Context() as context:
            context.set(zmq.MAX_SOCKETS, nodes + 100)
            found = _run(context, folder, address, key, secrets, lock, rounds, server.pid)
            context.destroy(linger=0)
        return found
    except BaseException:
        print(*(folder / "stderr").read_text().splitlines()[-5:], sep="\n", file=sys.stderr)
        raise
    finally:
        server.kill()
        server.wait()


def _address(folder: Path) -> str:
    path = folder / "coordinator" / "address"
    return path.read_text().strip() if path.exists() else ""


def _run(
    context: zmq.Context[Any],
    folder: Path,
    address: str,
    key: bytes,
    secrets: dict[str, bytes],
    lock: Lock,
    rounds: int,
    pid: int,
) -> dict[str, Any]:
    """Connect, train `rounds` rounds, and look."""
    began = time.perf_counter()
    nodes = [Node(connect(context, address, key, secret)) for secret in secrets.values()]
    pool = Pool(lock, nodes, [Round() for _ in range(rounds)], lock.digest, pid)
    for node, name in zip(nodes, secrets, strict=True):
        node.socket.send(wire.encode(hello(lock, name)))
    _until(pool, lambda: all(node.welcome for node in nodes), "every node is welcome")
    connected = time.perf_counter() - began
    units = min(2 * len(nodes), lock.members)
    _until(pool, lambda: len(pool.kept) >= units, "all hold work")
    ready = time.perf_counter() - began - connected
    pool.begin()
    for number, round in enumerate(pool.rounds):
        _until(pool, lambda round=round: round.commits == len(nodes), f"commit {number} is with everybody")  # type: ignore[misc]
    resident, peak = memory(pid)
    wire_counts = admin.ask(folder, "status")["wire"]
    nine_tenths = lock.members * 9 // 10
    rates = [nine_tenths / (round.most - round.first) for round in pool.rounds]
    return {
        "nodes": len(nodes),
        "members": lock.members,
        "chunks": lock.chunk_count(0),
        "connect_seconds": round_to(connected),
        "ready_seconds": round_to(ready),
        "results_per_second": int(max(rates)),
        "results_per_second_rounds": [int(rate) for rate in rates],
        "commit_seconds": [round_to(one.heard - one.acked) for one in pool.rounds],
        "commit_bytes": pool.rounds[-1].commit_bytes,
        "round_seconds": [round_to(one.heard - one.first) for one in pool.rounds],
        "resident_mb": round_to(resident),
        "peak_mb": round_to(peak),
        "server_us_per_result": [
            int(1e6 * (one.spent[1] - one.spent[0]) / nine_tenths) for one in pool.rounds
        ],
        "server_seconds_of_commit": [round_to(one.spent[2] - one.spent[1]) for one in pool.rounds],
        "dropped": wire_counts["dropped"],
        "load_average": os.getloadavg()[0],
    }


def round_to(value: float) -> float:
    """Three digits after the point."""
    return round(value, 3)


def _until(pool: Pool, condition: Any, what: str) -> None:
    deadline = time.perf_counter() + PATIENCE
    while not condition():
        pool.pump()
        if time.perf_counter() > deadline:
            raise SystemExit(f"waited {PATIENCE:.0f} s in vain until {what}")


@click.command()
@click.option("--nodes", default=1000, show_default=True)
@click.option("--members", default=4096, show_default=True, help="Units of a round; 4096 is the most.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--cores", default="0,1", show_default=True, help="Server's core, clients' core.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(nodes: int, members: int, rounds: int, cores: str, path: Path | None) -> None:
    """Measure one coordinator on one core."""
    with tempfile.TemporaryDirectory(prefix="esnode-bench-") as folder:
        found = measure(Path(folder), nodes, members, rounds, [int(core) for core in cores.split(",")])
    for name, value in found.items():
        print(f"{name:28} {value}")
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
