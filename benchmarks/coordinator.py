"""One real coordinator on one core against many nodes: how fast it connects, accepts and commits.

    python benchmarks/coordinator.py [--nodes 1000] [--members 4096] [--rounds 3] [--json PATH]

The server is the real process (CURVE, journal with synchronous = FULL, units.jsonl), pinned to the first of
`--cores`. The nodes are one socket in this process with a connection and a CURVE key for each, pinned to the
second. A third is for the server's libzmq thread, which is on the first otherwise: on a machine with cores to
spare it has one of its own. Once all are connected and hold their first units, each answers every Assign at
once, with a reward out of thin air, so that the coordinator is what is measured: every result is journaled
and flushed, acknowledged, and answered with the next Assign. A member is one unit of one chunk. A round's
results begin when all have the commit before it, for real units take longer than a commit. Nothing else
should run on these cores.

Keys of the JSON: `connect_seconds`, first connect to last Welcome; `results_per_second`, `best` and `median`
of the rounds, first Result to the Ack of the last of nine tenths of them, all in the journal by then (the
others share their turn of the loop with the commit); `us_per_result`, processor time of that by the server's
threads, Python's and libzmq's, and of this process, `nodes`, medians; `one_core_carries`, results a second of
a core that does nothing else, by the server's time of the best round: other programs disturb it less than the
clock, and while `nodes` is the larger the clock shows this process; `commit_seconds`, last Ack of a round to
the last node's Commit, and `latency_seconds`, the same from its last Result, medians; `commit_bytes` on the
wire, for one node; `seconds_of_commit`, processor time from nine tenths on; `resting_mb` of the server when
all are connected, and its `peak_mb`; `dropped` messages; the machine's `load_average`.
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
from statistics import median
from typing import Any

import click
import msgpack
import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

from esnode import admin, nodeoptions
from protocol import keys, wire, zmtp
from protocol.entries import EntryKind, parse
from protocol.lock import Lock
from protocol.messages import Ack, Applied, Assign, Bundle, Commit, Hello, Welcome
from protocol.seeds import member_seed
from protocol.wire import RULE_BY_TYPE
from tests.runs import make_folder, wait_for

ROOT = Path(__file__).resolve().parent.parent
TAG = {kind: RULE_BY_TYPE[kind].tag for kind in (Ack, Applied, Assign, Bundle, Commit, Hello, Welcome)}
RESULT_TAG = 8
REWARD = -1.0
PATIENCE = 120.0
NOW, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
PACK = msgpack.Packer(use_bin_type=True).pack

Spent = dict[str, float]  # processor seconds by kind of thread


@dataclass
class Round:
    """What one round showed, in seconds of this process's clock."""

    first: float = 0.0  # the first Result left
    last: float = 0.0  # the last Result left
    acked: float = 0.0  # the last Ack came
    heard: float = 0.0  # the last node heard the Commit
    acks: int = 0
    most: float = 0.0  # nine tenths of the Acks have come
    spent: list[Spent] = field(default_factory=list)  # processor seconds: at first, at most, at heard
    commits: int = 0
    commit_bytes: int = 0


@dataclass
class Pool:
    """All nodes, on one core: one ROUTER with a connection and a CURVE key for each of them.

    A thousand sockets would have to be asked in turn whether something came; this process must not be what is
    measured.
    """

    lock: Lock
    socket: zmq.Socket[Any]
    size: int
    rounds: list[Round]
    digest: int
    server: int  # its process id
    height: int = 0
    tip: bytes = b""
    open: int = 0  # rounds whose Assigns are answered; those of later ones are kept
    kept: list[tuple[bytes, list[int], bytes]] = field(default_factory=list)
    welcome: set[bytes] = field(default_factory=set)
    raw: bytes = b""  # the newest commit's frame: the same for all
    applied: bytes = b""  # and what all say to it

    def processor_seconds(self) -> Spent:
        """Of the server and of this process, so far."""
        mine, server = processor_seconds(os.getpid()), processor_seconds(self.server)
        return {**server, "nodes": sum(mine.values())}

    def pump(self) -> None:
        """Read what waits and answer it."""
        if not self.socket.poll(1000):
            return
        while True:
            try:
                node, frame = self.socket.recv(NOW), self.socket.recv(NOW)
            except zmq.Again:
                return
            self.hear(node, frame)

    def send(self, node: bytes, frame: bytes) -> None:
        """One message of a node."""
        self.socket.send(node, MORE)
        self.socket.send(frame, NOW)

    def hear(self, node: bytes, frame: bytes) -> None:
        """One message: results go out for Assigns, Applied for commits."""
        tag = frame[1]
        if tag == TAG[Bundle]:
            for inner in msgpack.unpackb(frame)[1]:
                self.hear(node, inner)
        elif tag == TAG[Assign]:
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
                round.spent.append(self.processor_seconds())
        elif tag == TAG[Commit]:
            self.learn(node, frame)
        elif tag == TAG[Welcome]:
            self.welcome.add(node)

    def answer(self, node: bytes, unit: list[int], parent: bytes) -> None:
        """A Result, packed by hand: this core must not be slower than the other."""
        if unit[0] >= self.open:
            return self.kept.append((node, unit, parent))
        round = self.rounds[unit[0]]
        seed = member_seed(self.lock.run_id, unit[0], unit[2], self.lock.mirrored)
        sums = [REWARD - unit[2] / 1e4] * (unit[4] - unit[3] + 1)
        fields = [RESULT_TAG, unit, seed, sums, parent, self.digest, 0, 0, 9, [1, 2, 3], b"evidence", 0]
        if not round.first:
            round.first = time.perf_counter()
            round.spent.append(self.processor_seconds())
        round.last = time.perf_counter()
        self.send(node, PACK(fields))

    def begin(self) -> None:
        """Answer what has been kept of one more round."""
        self.open += 1
        kept, self.kept = self.kept, []
        for one in kept:
            self.answer(*one)

    def learn(self, node: bytes, frame: bytes) -> None:
        """An entry of the ledger; after a commit every node says the same D."""
        if frame != self.raw:
            commit = wire.decode(frame, "coordinator")
            assert isinstance(commit, Commit)
            entry = parse(commit.entry)
            self.raw, self.height, self.tip = frame, commit.height + 1, entry.hash
            self.kind, self.closed = entry.kind, entry.round
            if entry.kind is EntryKind.COMMIT:
                self.digest += 1
                self.applied = wire.encode(Applied(self.height, self.tip[:8], self.digest, 1))
        if self.kind is EntryKind.COMMIT:
            round = self.rounds[self.closed]
            round.commits += 1
            round.heard = time.perf_counter()
            if round.commits == self.size:
                round.spent.append(self.processor_seconds())
            round.commit_bytes = zmtp.wire_size(len(frame), True)
            self.send(node, self.applied)


def connect(socket: zmq.Socket[Any], address: str, server: bytes, name: bytes, secret: bytes) -> None:
    """A node's connection: libzmq takes the options as they are at that moment."""
    socket.curve_serverkey = server
    socket.curve_secretkey, socket.curve_publickey = secret, keys.curve_public(secret)
    socket.setsockopt(zmq.CONNECT_ROUTING_ID, name)
    socket.connect(address)


def hello(lock: Lock, name: str) -> Hello:
    """A newcomer that holds the base model."""
    kernel = ("none", "none", b"selftest", (b"engine-1",))
    return Hello(1, 1, lock.law, lock.run_id, name, *kernel, 0, b"", lock.digest, 0, ())


def memory(pid: int) -> tuple[float, float]:
    """Resident and peak megabytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmRSS"]) / 1024, int(found["VmHWM"]) / 1024


def processor_seconds(pid: int) -> dict[str, float]:
    """Processor seconds of a process so far: of libzmq's threads and of all others, which are Python's."""
    spent = {"python": 0.0, "libzmq": 0.0}
    for thread in _threads(pid):
        kind = "libzmq" if _is_libzmq(thread) else "python"
        spent[kind] += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return spent


def _threads(pid: int) -> list[Path]:
    return [*Path(f"/proc/{pid}/task").iterdir()]


def _is_libzmq(thread: Path) -> bool:
    return (thread / "comm").read_text().startswith("ZMQ")


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
        os.sched_setaffinity(0, {cores[:2][-1]})
        address = wait_for(lambda: _address(folder), 20)
        for thread in _threads(server.pid):
            if len(cores) > 2 and _is_libzmq(thread):
                os.sched_setaffinity(int(thread.name), {cores[2]})
        key = nodeoptions.pinned_key(folder)
        with zmq.Context() as context:
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
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.linger = socket.sndhwm = socket.rcvhwm = 0
    began = time.perf_counter()
    pool = Pool(lock, socket, len(secrets), [Round() for _ in range(rounds)], lock.digest, pid)
    for name, secret in secrets.items():
        connect(socket, address, key, name.encode(), secret)
        pool.send(name.encode(), wire.encode(hello(lock, name)))
    _until(pool, lambda: len(pool.welcome) == pool.size, "every node is welcome")
    connected = time.perf_counter() - began
    units = min(2 * pool.size, lock.members)
    resting, _ = memory(pid)
    for number, round in enumerate(pool.rounds):
        _until(pool, lambda: len(pool.kept) >= units, "all hold work")
        pool.begin()
        _until(pool, lambda round=round: round.commits == pool.size, f"commit {number} is with everybody")  # type: ignore[misc]
    dropped = admin.ask(folder, "status")["wire"]["dropped"]
    size = {"nodes": pool.size, "members": lock.members, "rounds": rounds, "connect_seconds": connected}
    rest = {"resting_mb": resting, "peak_mb": memory(pid)[1], "dropped": dropped}
    return size | figures(pool.rounds, lock.members * 9 // 10) | rest | {"load_average": os.getloadavg()[0]}


def figures(rounds: list[Round], most: int) -> dict[str, Any]:
    """What the rounds showed. `most`: the results of one that are timed."""
    rates = [most / (one.most - one.first) for one in rounds]
    spent = [_between(one.spent[0], one.spent[1], 1e6 / most) for one in rounds]
    least = min(one["python"] + one["libzmq"] for one in spent)
    return {
        "results_per_second": {"best": max(rates), "median": median(rates)},
        "us_per_result": _medians(spent),
        "one_core_carries": 1e6 / least,
        "commit_seconds": median(one.heard - one.acked for one in rounds),
        "latency_seconds": median(one.heard - one.last for one in rounds),
        "commit_bytes": rounds[-1].commit_bytes,
        "seconds_of_commit": _medians([_between(one.spent[1], one.spent[2]) for one in rounds]),
    }


def _between(before: Spent, after: Spent, factor: float = 1.0) -> Spent:
    return {kind: factor * (after[kind] - before[kind]) for kind in before}


def _medians(rows: list[Spent]) -> Spent:
    return {kind: median(row[kind] for row in rows) for kind in rows[0]}


def rounded(value: Any) -> Any:
    """Four digits for people."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


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
@click.option("--cores", default="0,1", show_default=True, help="Server's core, clients' core[, libzmq's].")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(nodes: int, members: int, rounds: int, cores: str, path: Path | None) -> None:
    """Measure one coordinator on one core."""
    with tempfile.TemporaryDirectory(prefix="esnode-bench-") as folder:
        found = measure(Path(folder), nodes, members, rounds, [int(core) for core in cores.split(",")])
    found = rounded(found)
    for name, value in found.items():
        print(f"{name:20} {value}")
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
