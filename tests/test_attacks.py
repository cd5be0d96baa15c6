"""A run under attack, with real processes: all that docs/security.md lists knocks while two nodes work.

Everything is refused, counted by reason and shown by status, and the run ends in the bits of a quiet one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from esnode import admin
from protocol import invite, keys, wire
from protocol.messages import NodeBeat
from tests.door import HELLO
from tests.runs import Processes, make_folder, wait_for
from tests.test_loopback import ROUNDS, run_to_end

SLOW = {"task_options": {"seconds": 0.2}}  # six rounds take a few seconds
STRANGER = b"\x33" * 32
ATTACKERS = ("other-run", "malformed", "oversized", "parts", "put-out")


class Attacker:
    """Raw sockets against one coordinator."""

    def __init__(self, run: Path, address: str) -> None:
        self.run, self.address = run, address
        self.server = bytes.fromhex((run / "coordinator" / "curve.pub").read_text())
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[Any]] = []  # one that nobody holds would be closed

    def dealer(self, secret: bytes | None, server: bytes | None = None) -> zmq.Socket[Any]:
        socket_ = self.context.socket(zmq.DEALER)
        socket_.linger = 0
        if secret is not None:
            socket_.curve_serverkey = server or self.server
            socket_.curve_secretkey, socket_.curve_publickey = secret, keys.curve_public(secret)
        socket_.connect(self.address)
        self.sockets.append(socket_)
        return socket_

    def of(self, name: str) -> zmq.Socket[Any]:
        """A connection with the key of an admitted node."""
        return self.dealer(keys.read_curve(self.run / "nodes" / name / "curve.key"))

    def noise(self) -> None:
        host, port = self.address.removeprefix("tcp://").split(":")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(3000), b"\xff\x00\x00"):
            with socket.create_connection((host, int(port)), timeout=2) as knock:
                knock.sendall(garbage)

    def close(self) -> None:
        self.context.destroy(0)


def attack(attacker: Attacker, text: str) -> Iterator[str]:
    """Every sort of it, one after the other; yields its name."""
    hello = wire.encode(HELLO)  # of a run that nobody knows
    attacker.dealer(None).send(hello)
    yield "NULL mechanism"
    attacker.dealer(STRANGER).send(hello)
    yield "a key that is not on the list"
    attacker.dealer(STRANGER, server=keys.curve_public(STRANGER)).send(hello)
    yield "another coordinator's key"
    attacker.of("other-run").send(hello)
    yield "an unknown run id"
    malformed = attacker.of("malformed")
    for frame in (b"", b"\xc1", hello[:-1], hello + b"x", os.urandom(200), bytes(4096)):
        malformed.send(frame)
    yield "malformed frames"
    attacker.of("oversized").send(hello + bytes(1_000_000))
    yield "an oversized frame"
    attacker.of("parts").send_multipart([hello] * 3000)
    yield "three thousand parts"
    attacker.of("put-out").send(hello)
    yield "a revoked key"
    newcomer = attacker.dealer(invite.decode(text).secret)
    newcomer.send(hello)
    newcomer.send(wire.encode(NodeBeat(0, bytes(8), ())))
    yield "an invite's key that wants to work"
    attacker.noise()
    yield "no ZeroMQ at all"


def test_the_run_never_notices(tmp_path: Path) -> None:
    quiet = run_to_end(tmp_path / "quiet", **SLOW)
    run = tmp_path / "run"
    make_folder(run, ("n1", "n2", *ATTACKERS), ROUNDS, **SLOW)
    with Processes(run) as processes:
        processes.coordinator()
        address = wait_for(processes.status)["address"]
        admin.order(run, "revoke", who="put-out", reason="sold")
        attacker = Attacker(run, address)
        attacks = attack(attacker, admin.order(run, "invite")["invite"])
        for name in ("n1", "n2"):
            processes.node(name)
        wait_for(lambda: processes.status().get("members", {}).get("done"))
        done = [next(attacks)]
        for name in attacks:
            done.append(name)
            time.sleep(0.05)
        deadline = time.monotonic() + 10
        while missing_traces(status := processes.status()):
            assert time.monotonic() < deadline, (missing_traces(status), status["wire"])
            time.sleep(0.05)
        assert len(done) == 10
        attacker.close()
        processes.wait_end()
        assert processes.final_digest() == quiet
        for name in ("n1", "n2"):
            assert processes.running[name].wait(10) == 0, processes.words(name)
    assert {node["name"] for node in status["nodes"]} == {"n1", "n2"}
    assert any("this node works for run 0000" in words for words in status["refusals"])


def missing_traces(status: dict[str, Any]) -> list[str]:
    """The attacks that status does not show yet."""
    assert status["state"] != "ended", f"the run was over too soon: {status['wire']}"
    refused = status["wire"]["refused"]
    unknown = refused.get("unknown", {})
    traces = {
        "NULL": "not encrypted" in unknown or "handshake cut short" in unknown,
        "stranger": "not on the list" in unknown,
        "wrong key": "wrong coordinator key" in unknown,
        "revoked": "revoked key" in unknown,
        "noise": "broken handshake" in unknown or "handshake cut short" in unknown,
        "malformed": refused.get("malformed", {}).get("malformed") == 6,
        "oversized": refused.get("oversized", {}).get("oversized") == 1,
        "parts": refused.get("parts", {}).get("more than one part") == 1,
        "invite": refused.get("newcomers", {}).get("not an Enrol") == 2,
        "run id": status["counters"].get("refused nodes", 0) >= 1,
    }
    return [name for name, seen in traces.items() if not seen]


def test_a_frame_beyond_every_limit_ends_its_connection(tmp_path: Path) -> None:
    """libzmq hangs up before it is read, so nobody's name can be put to it: the connection is counted."""
    make_folder(tmp_path, ("n1",))
    with Processes(tmp_path) as processes:
        processes.coordinator()
        attacker = Attacker(tmp_path, wait_for(processes.status)["address"])
        attacker.of("n1").send(bytes(50_000_000))
        wait_for(lambda: processes.status()["wire"]["connections"].get("ended"))
        assert memory_of(processes.running["coordinator"].pid) < 150e6
        attacker.close()


def memory_of(pid: int) -> float:
    """The most bytes a process ever held."""
    words = Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()
    return int(words[0]) * 1024


def test_a_flood_of_an_admitted_node(tmp_path: Path) -> None:
    """More than a node may say is dropped unread, counted, and the coordinator goes on answering."""
    make_folder(tmp_path, ("n1",))
    with Processes(tmp_path) as processes:
        processes.coordinator()
        attacker = Attacker(tmp_path, wait_for(processes.status)["address"])
        flooder = attacker.of("n1")
        frame = wire.encode(HELLO)
        deadline = time.monotonic() + 15
        for sent in itertools.count(1):
            flooder.send(frame)
            if sent % 2000 == 0:
                refused = processes.status()["wire"]["refused"].get("n1", {})
                if refused.get("too many messages", 0) > 500:
                    break
            assert time.monotonic() < deadline, refused
        attacker.close()
        assert refused["too many Hellos"] > 500, "each one that is refused would be a line of the log"
        assert (tmp_path / "logs" / "coordinator.log").stat().st_size < 100_000


def test_strangers_that_take_every_descriptor(tmp_path: Path) -> None:
    """No key is needed to connect. Who is there already works on, and later everybody gets in again."""
    make_folder(tmp_path, ("n1", "n2"), 10**6, **SLOW)
    with Processes(tmp_path) as processes:
        words = ("--data", str(tmp_path), "--bind", "tcp://127.0.0.1:0")
        processes.start("coordinator", "coordinator.server", *words, OPEN_FILES="64")
        processes.node("n1")
        wait_for(lambda: processes.status().get("members", {}).get("done"), 20)
        host, port = processes.status()["address"].removeprefix("tcp://").split(":")
        before = processes.status()["round"]
        with contextlib.ExitStack() as knocks:
            for _ in range(100):
                knock = knocks.enter_context(socket.socket())
                knock.setblocking(False)
                knock.connect_ex((host, int(port)))
            time.sleep(0.5)
            processes.status()  # nobody can be answered now, and that is all
            processes.node("n2")
            time.sleep(2.0)
            assert processes.running["coordinator"].poll() is None, processes.words("coordinator")
        wait_for(lambda: len(processes.status().get("nodes", ())) == 2, 20)
        assert processes.status()["round"] > before
        assert processes.status()["wire"]["refused"]["unknown"]["handshake cut short"] > 20


@pytest.mark.parametrize("files", [8, 12, 24])
def test_a_coordinator_that_may_open_too_few_files_says_so(tmp_path: Path, files: int) -> None:
    make_folder(tmp_path, ("n1",))
    with Processes(tmp_path) as processes:
        words = ("--data", str(tmp_path), "--bind", "tcp://127.0.0.1:0")
        ended = processes.start("coordinator", "coordinator.server", *words, OPEN_FILES=str(files))
        assert ended.wait(20) == 1
        assert processes.words("coordinator").splitlines()[-1].endswith("256 or more) and start again")
