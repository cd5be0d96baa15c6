"""The coordinator's door, with real ZeroMQ: who gets in, what is refused and counted, who never notices."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from coordinator.gate import BindError
from esnode import admin
from esnode.link import Link, LinkError, State
from protocol import keys, wire, zmtp
from protocol.messages import Ack, Bye, Fetch, Refuse, Rehello, Unit
from tests.door import BEAT, HELLO, N1, N2, SERVER, STRANGER, Door
from tests.doorman import Doorman
from tests.runs import Processes, make_folder, wait_for


@pytest.fixture
def door() -> Iterator[Door]:
    opened = Door()
    yield opened
    opened.close()


# ---------------------------------------------------------------- who gets in


def test_identity_is_the_curve_key(door: Door) -> None:
    link = door.link(N1)
    assert door.say(link, HELLO) == [(keys.curve_public(N1), HELLO)]
    assert door.gate.send(keys.curve_public(N1), Rehello())
    door.gate.flush()
    assert wait_for(link.receive) == [Rehello()]
    assert door.gate.counts.bytes_in["Hello"] == link.bytes_out["Hello"] > 100
    assert door.gate.counts.bytes_out["Rehello"] == link.bytes_in["Rehello"] == 37  # 2 + 33 + 2


def test_key_not_on_the_list(door: Door) -> None:
    link = door.link(STRANGER)
    sentence = door.state_of(link, State.REFUSED)
    assert keys.curve_public(STRANGER).hex() in sentence and "does not admit" in sentence
    assert door.refused() == {"not on the list": 1}
    assert list(door.gate.counts.strangers) == [keys.curve_public(STRANGER).hex()]
    assert not link.send(HELLO), "nothing is queued for a connection that never was"


def test_wrong_coordinator_key(door: Door) -> None:
    sentence = door.state_of(door.link(N1, server=keys.curve_public(N2)), State.WRONG_KEY)
    assert "key is not the one this node expects" in sentence
    assert door.refused()["wrong coordinator key"] >= 2


def test_unencrypted_client(door: Door) -> None:
    dealer = door.clients.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(door.address)
    dealer.send(wire.encode(HELLO))
    assert door.pump(0.5) == []
    counted = door.refused()  # which of the two depends on who hangs up first
    assert sum(counted.values()) >= 1 and set(counted) <= {"not encrypted", "handshake cut short"}


def test_something_else_knocks(door: Door) -> None:
    """Random bytes, an HTTP request, half a greeting: closed, counted, nobody else disturbed."""
    host, port = door.address.removeprefix("tcp://").split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 20, random.Random(3).randbytes(5000), b"\xff\x00"):
        with socket.create_connection((host, int(port)), timeout=1) as knock:
            knock.sendall(noise)
            door.pump(0.1)
    assert door.say(door.link(N1), HELLO) == [(keys.curve_public(N1), HELLO)]


def test_silence_and_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        link = Link([f"tcp://127.0.0.1:{port}"], keys.curve_public(SERVER), N1)
        later = time.monotonic() + 6
        wait_for(lambda: link.receive() or link.health(later).state == State.SILENT)
        link.close(False)
    link = Link([f"tcp://127.0.0.1:{port}"], keys.curve_public(SERVER), N1)
    wait_for(lambda: link.receive() or link.health(time.monotonic()).state == State.UNREACHABLE)
    assert "nothing answers at" in link.health(time.monotonic()).sentence
    link.close(False)


def test_next_address_is_tried(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esnode.link.ROTATE_FAILED_SECONDS", 0.2)
    link = Link(["tcp://127.0.0.1:9", door.address], keys.curve_public(SERVER), N1)
    door.links.append(link)
    wait_for(lambda: door.pump(0.02) or link.receive() or link.refresh(time.monotonic()))
    assert door.say(link, HELLO)


def test_addresses_that_fail_in_turn_are_told_once(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esnode.link.ROTATE_FAILED_SECONDS", 0.05)
    link = Link(["tcp://127.0.0.1:9", "tcp://127.0.0.2:9"], keys.curve_public(SERVER), N1)
    door.links.append(link)
    told: list[str] = []
    turns = 0
    while turns < 20:
        link.receive()
        health = link.health(time.monotonic())
        told += [health.sentence] if link.is_news(health) else []
        turns += link.refresh(time.monotonic())
    assert sum("nothing answers" in line for line in told) == 2 and len(told) == len(set(told))
    link.redirect([door.address])
    assert door.say(link, HELLO)
    assert [link.is_news(link.health(time.monotonic())) for _ in range(2)] == [True, False]


def test_a_name_is_dialled_in_both_families() -> None:
    assert zmtp.families("tcp://coordinator.test:1") == (True, False)
    assert zmtp.families("tcp://10.0.0.1:1") == (False,) and zmtp.families("tcp://[::1]:1") == (True,)


def test_a_key_is_shut_out_when_every_address_refuses_it(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esnode.link.ROTATE_FAILED_SECONDS", 0.1)
    with Doorman(lambda key: False, lambda key, message: None, secret=SERVER) as other:
        for secret, shut_out in ((STRANGER, True), (N2, False)):
            link = Link([other.address, door.address], keys.curve_public(SERVER), secret)
            door.links.append(link)

            def settled(link: Link = link) -> bool:
                door.pump(0.02)
                link.receive()
                link.refresh(time.monotonic())
                return link.shut_out or link.connections > 0

            wait_for(settled)
            assert link.shut_out is shut_out


@pytest.mark.parametrize("address", ["", "127.0.0.1:5", "tcp://host", "tcp://h:99999", "tcp://:5", "ipc://x"])
def test_no_address(address: str) -> None:
    with pytest.raises(LinkError, match="should look like"):
        Link([address], keys.curve_public(SERVER), N1)


# ---------------------------------------------------------------- what passes


def mutations() -> list[bytes]:
    """Frames that are no messages of a node, one of each sort and many random ones."""
    good = wire.encode(HELLO)
    chance = random.Random(7)
    frames = [wire.encode(Fetch(0, 1)) + bytes(64)]  # longer than a Fetch can be
    frames += [b"", b"\xc1", b"\x93", good[:-1], good + b"\x00", wire.encode(Rehello())]
    frames += [msgpack.packb([8, [0, 0, 0, 0, 0], 0, [float("nan")], b"", 0, 0, 0, 0, [0, 0, 0], b""])]
    frames += [
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        msgpack.packb([15, -1, b"", []]),
        msgpack.packb({1: 2}),
    ]
    frames += [wire.encode(HELLO).replace(b"cpu", b"\xff\xfe\xfd", 1), bytes(4096)]
    for _ in range(300):
        changed = bytearray(good)
        changed[chance.randrange(2)] = chance.randrange(256)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        frames.append(bytes(changed))
    return frames


def test_malformed_frames_are_counted_and_harmless(door: Door) -> None:
    bad = [frame for frame in mutations() if _malformed(frame)]
    assert len(bad) > 50
    attacker = door.raw(N2)
    sent = 0
    for start in range(0, len(bad), 30):  # below the high-water mark, so that none is dropped on the way
        for frame in bad[start : start + 30]:
            attacker.send(frame)
            sent += 1
        deadline = time.monotonic() + 3
        while sum(door.refused("n2").values()) < sent and time.monotonic() < deadline:
            assert door.pump(0.02) == []
    assert set(door.refused("n2")) <= {"malformed", "oversized"} and sum(door.refused("n2").values()) == sent
    assert door.say(door.link(N1), HELLO) == [(keys.curve_public(N1), HELLO)]
    attacker.send(wire.encode(HELLO))
    assert door.pump(1.0) == [(keys.curve_public(N2), HELLO)], (
        "a malformed frame does not ban: it may be a version"
    )


def _malformed(frame: bytes) -> bool:
    try:
        wire.decode(frame, "node")
    except wire.MalformedMessage:
        return True
    return False


def test_oversized_frame_closes_that_connection_only(door: Door) -> None:
    assert door.say(door.link(N1), HELLO)
    attacker = door.raw(N2)
    attacker.send(bytes(20_000_000))
    assert door.pump(0.5) == []
    attacker.send(wire.encode(HELLO))  # the DEALER has reconnected by itself
    assert door.pump(3.0) == [(keys.curve_public(N2), HELLO)]
    door.links[0].send(BEAT)
    assert door.pump(1.0) == [(keys.curve_public(N1), BEAT)]


@pytest.mark.parametrize("parts", [2, 3000])
def test_many_parts_shut_the_key_out(door: Door, parts: int) -> None:
    assert door.say(door.link(N1), HELLO)
    attacker = door.raw(N2)
    attacker.send(wire.encode(HELLO))
    assert door.pump(3.0)
    attacker.send_multipart([wire.encode(HELLO)] * parts)
    assert door.pump(0.3) == []
    assert isinstance(wire.decode(attacker.recv(), "coordinator"), Refuse)
    attacker.send(wire.encode(BEAT))
    assert door.pump(0.3) == []
    assert door.refused("n2") == {"more than one part": 1, "shut out": 1}
    assert "does not admit" in door.state_of(door.link(N2), State.REFUSED)
    door.links[0].send(BEAT)
    assert door.pump(1.0) == [(keys.curve_public(N1), BEAT)]


def test_nothing_counts_before_hello(door: Door) -> None:
    """After a reconnect frames come from a connection that has not said Hello: answered, not believed."""
    link = door.link(N1)
    assert door.say(link, BEAT) == []
    assert wait_for(link.receive) == [Rehello()]
    assert door.refused("n1") == {"before Hello": 1}


def test_newest_hello_owns_the_key(door: Door) -> None:
    old = door.link(N1)
    assert door.say(old, HELLO)
    new = door.link(N1)  # of two that dial at once either may be the newer one
    assert door.say(new, HELLO)
    assert isinstance(wait_for(old.receive)[0], Bye)
    assert door.gate.send(keys.curve_public(N1), Rehello())
    door.gate.flush()
    assert wait_for(new.receive) == [Rehello()] and old.receive() == []
    old.send(BEAT)
    assert door.pump(0.3) == []
    assert wait_for(old.receive) == [Rehello()]


def test_recorded_traffic_cannot_be_replayed(door: Door) -> None:
    """Bytes of a recorded CURVE session, sent again: the handshake's keys are new, so nothing opens."""
    recorded, _, found = door.tapped(N1, HELLO)
    assert found == [(keys.curve_public(N1), HELLO)] and len(recorded) > 500
    host, port = door.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as replay:
        replay.sendall(recorded)
        assert door.pump(0.5) == []
    assert sum(door.refused().values()) >= 1


def test_sends_never_block(door: Door) -> None:
    """A peer that stops reading: its queue fills, further messages are dropped and counted, at once."""
    slow = door.raw(N1)
    slow.send(wire.encode(HELLO))
    assert door.pump(3.0)
    big = Ack(Unit(0, 0, 0, 0, 0), "refused: " + "x" * 400)
    began = time.monotonic()
    for _ in range(60_000):
        assert door.gate.send(keys.curve_public(N1), big)
        door.gate.flush()
        if door.gate.counts.dropped:
            break
    assert door.gate.counts.dropped == {"Ack": 1}
    assert time.monotonic() - began < 10
    assert not door.gate.send(keys.curve_public(N2), big), "nobody is there under this key"


def test_plain_is_for_loopback_only() -> None:
    door = Door(plain=True)
    with pytest.raises(BindError, match="open to other machines"):
        door.gate.bind("tcp://0.0.0.0:0")
    link = Link([door.address], None, N1)
    door.links.append(link)
    assert door.say(link, HELLO) == [(keys.curve_public(N1), HELLO)]
    stranger = Link([door.address], None, STRANGER)
    door.links.append(stranger)
    assert door.say(stranger, HELLO) == []
    assert door.refused() == {"not on the list": 1}
    door.close()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://192.0.2.1:5000", "no address of this machine"),
        ("tcp://127.0.0.1", "should look like"),
        ("nonsense", "should look like"),
    ],
)
def test_bind_errors(door: Door, address: str, why: str) -> None:
    with pytest.raises(BindError, match=why):
        door.gate.bind(address)


def test_ipv6(door: Door) -> None:
    try:
        address = door.gate.bind("tcp://[::1]:0")
    except BindError:
        pytest.skip("this machine has no IPv6")
    link = Link([address], keys.curve_public(SERVER), N1)
    door.links.append(link)
    assert door.say(link, HELLO)


# ---------------------------------------------------------------- the process


def started(processes: Processes) -> str:
    """Wait until the coordinator listens; its address."""
    address = processes.folder / "coordinator" / "address"
    wait_for(lambda: address.exists() and processes.status())
    return address.read_text().strip()


def test_process_status_refusals_and_stop(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        process = processes.coordinator()
        address = started(processes)
        assert (tmp_path / "coordinator" / "admin.sock").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "coordinator" / "curve.key").stat().st_mode & 0o777 == 0o600
        server_key = bytes.fromhex((tmp_path / "coordinator" / "curve.pub").read_text())
        link = Link([address], server_key, STRANGER)
        wait_for(lambda: link.receive() or link.health(time.monotonic()).state == State.REFUSED)
        link.close(False)
        status = processes.status()
        assert status["wire"]["refused"] == {"unknown": {"not on the list": 1}}
        assert status["state"] == "paused" and status["pid"] == process.pid and status["address"] == address
        assert "error" in admin.ask(tmp_path, "dance")
        assert admin.ask(tmp_path, "stop") == {"ok": True}
        assert process.wait(5) == 0
        with pytest.raises(admin.NoCoordinator, match="no coordinator is running"):
            admin.ask(tmp_path, "status")


def test_second_coordinator_and_port_in_use(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "b", rounds=5, members=8)
    with Processes(tmp_path / "a") as first, Processes(tmp_path / "b") as other:
        first.coordinator()
        address = started(first)
        assert other.coordinator(bind=address).wait(10) == 1
        assert other.words("coordinator").splitlines()[-1].startswith(f"esnode: {address} is in use")
        again = Processes(tmp_path / "a")
        assert again.coordinator().wait(10) == 1
        assert "another coordinator runs on this folder" in again.words("coordinator")
        assert first.status()["term"] == 1


def test_same_port_after_a_restart(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        address = started(processes)
        processes.kill("coordinator")
        processes.coordinator()
        wait_for(lambda: processes.status().get("term") == 2)
        assert processes.status()["address"] == address


def test_folder_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20) / ("path" * 20)
    make_folder(folder)
    with Processes(folder) as processes:
        processes.coordinator()
        started(processes)
        assert admin.ask(folder, "stop") == {"ok": True}
        assert processes.running["coordinator"].wait(5) == 0


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("lock.json", "lock.json"),
        ("plan.toml", "plan.toml"),
        ("coordinator/signing.key", "there is no key file"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, missing: str, sentence: str) -> None:
    make_folder(tmp_path)
    (tmp_path / missing).unlink()
    with Processes(tmp_path) as processes:
        assert processes.coordinator().wait(10) == 1
        last = processes.words("coordinator").splitlines()[-1]
        assert last.startswith("esnode: ") and sentence in last


def test_foreign_signing_key(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "coordinator" / "signing.key").unlink()
    keys.new_signing_file(tmp_path / "coordinator" / "signing.key")
    with Processes(tmp_path) as processes:
        assert processes.coordinator().wait(10) == 1
        assert "does not trust this coordinator's signing key" in processes.words("coordinator")


def test_ledger_the_journal_does_not_know(tmp_path: Path) -> None:
    """An old journal next to a newer ledger: going on would sign a second history."""
    make_folder(tmp_path)
    with Processes(tmp_path) as processes:
        processes.coordinator()
        started(processes)
        processes.kill("coordinator")
        for file in (tmp_path / "coordinator").glob("journal.sqlite*"):
            file.unlink()
        assert processes.coordinator().wait(10) == 1
        assert "journal is older or of another run" in processes.words("coordinator")


def test_import_is_light() -> None:
    """The coordinator runs without the node's packages, in little memory."""
    script = (
        "import sys; import coordinator.server;"
        "print(sorted({'torch', 'transformers', 'numba', 'numpy'} & set(sys.modules)));"
        "print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    heavy, _, status = done.stdout.partition("\n")
    assert heavy == "[]"
    assert int(status.partition("VmHWM:")[2].split()[0]) <= 80_000  # kB
