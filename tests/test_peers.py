"""Snapshots between real processes: donors, relay, receiver; kills, cuts, poison, strangers."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from coordinator import relay
from coordinator.relayrules import SMALL_AT_ONCE, Accounts
from esnode import duty, joined, lines, snapshot
from esnode import peers as own_peers
from esnode.folder import write_file
from esnode.peers import AGAIN_SECONDS, MOVE_SECONDS, Peers
from esnode.room import Room
from esnode.salvage import PEER_FILE
from esnode.snapshotevents import Moved
from protocol import envelope, keys, wire, zmtp
from protocol.entries import RosterBody, parse, seal
from protocol.keys import curve_public
from protocol.ledger import LedgerFile
from protocol.messages import Entries, Fetch
from protocol.peers import HeadAsk, PartAsk, Sorry
from protocol.rolls import Rolls
from tests.donors import Exchange
from tests.runs import SIGNING_SEED, wait_for


def test_three_donors_one_poisoned_and_one_killed(tmp_path: Path) -> None:
    with Exchange(tmp_path) as exchange:
        exchange.keep("a", "b", "c")
        exchange.spoil("b")
        for name in "abc":
            exchange.donor(name, rate=400_000)
        child = exchange.receive("abc")
        wait_for(lambda: exchange.draft().exists(), what=exchange.words("receiver"))
        time.sleep(1.0)
        exchange.children["c"].process.kill()
        assert exchange.wait(child) == ""
        assert exchange.equal() and not exchange.draft().exists()
        (spoiled,) = child.said("poisoned")
        assert spoiled[0] == exchange.keys["b"].hex() and "hash" in spoiled[2]
        assert {way for _, way, _ in child.said("reached")} == {"direct"}
        assert child.said("fetching"), "the rate was told"


def test_a_cut_transfer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with Exchange(tmp_path) as exchange:
        exchange.keep("a")
        exchange.donor("a", rate=1_000_000)
        child = exchange.receive("a")
        wait_for(lambda: child.said("fetching") and child.said("fetching")[-1][0] > 500_000)
        child.process.kill()
        child.process.wait()
        again = exchange.receive("a")
        assert exchange.wait(again) == "" and exchange.equal()
        words = again.said("fetched")[0][2]
        assert "were here already" in words, words


def test_two_that_cannot_dial_each_other_use_the_relay(tmp_path: Path) -> None:
    with Exchange(tmp_path, size=1_000_000) as exchange:
        exchange.keep("a", "b")
        exchange.start_relay()
        for name, rate in (("a", 0.0), ("b", 2e5)):  # b cannot be done before a was tried
            exchange.donor(name, rate)
            exchange.children[name].tell(dict(zip(("relay", "key"), exchange.relay.values(), strict=True)))
        exchange.addresses = {"a": ("tcp://127.0.0.1:9",)}  # nothing listens there; b has no address at all
        child = exchange.receive("ab")
        assert exchange.wait(child) == "" and exchange.equal()
        ways = {key: (way, why) for key, way, why in child.said("reached")}
        assert ways[exchange.keys["a"].hex()] == ("relay", "nothing answers at tcp://127.0.0.1:9")
        assert ways[exchange.keys["b"].hex()] == ("relay", "it has no address")
        shown = wait_for(lambda: relay.read_status(tmp_path))
        time.sleep(1.2)
        shown = relay.read_status(tmp_path)
        assert shown is not None
        meters = shown["peers"]
        assert sum(meters[exchange.keys[name].hex()]["sent"] for name in "ab") > 1_000_000
        assert meters[exchange.keys["j"].hex()]["got"] > 1_000_000
        assert not any(meter["dropped"].get("more than its reader granted") for meter in meters.values())


def test_several_take_from_one_donor_that_may_send_little(tmp_path: Path) -> None:
    """Each has its turn before it gives the donor up: a slice of a limited donor is small."""
    with Exchange(tmp_path, "adefg", size=1 << 26) as exchange:  # in parts of a slice
        exchange.keep("a")
        exchange.donor("a", rate=100_000)
        joiners = [exchange.receive("a", who) for who in "defg"]
        for child in joiners:
            wait_for(lambda child=child: child.said("fetching"), 30, exchange.words("receiver"))
        time.sleep(10)
        for child in joiners:
            told = child.said("fetching")
            assert len(child.said("reached")) == 1 and told[-1][2] > 5000, (child.said("reached"), told)


def test_a_pause_is_not_told_as_the_rate(tmp_path: Path) -> None:
    """By the told rate a node thinks its choice over: it would leave a snapshot that is nearly here."""
    with Exchange(tmp_path, size=12_000_000) as exchange:
        exchange.keep("a")
        exchange.donor("a", rate=1_000_000)
        child = exchange.receive("a")
        wait_for(lambda: len(child.said("fetching")) > 6)
        exchange.children["a"].process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        exchange.children["a"].process.send_signal(signal.SIGCONT)
        assert exchange.wait(child) == "" and exchange.equal()
        rates = [rate for _, _, rate in child.said("fetching")]
        assert min(rates) > 0.3e6 and max(rates) < 1.7e6, rates


def test_nobody_there_is_said_in_words(tmp_path: Path) -> None:
    with Exchange(tmp_path, size=50_000) as exchange:
        exchange.keep("a")
        exchange.addresses = {"a": ("tcp://127.0.0.1:9",)}
        child = exchange.receive("a", hasty=True)
        reached = wait_for(lambda: child.said("reached"))
        assert reached[0][1:] == ["none", "nothing answers at tcp://127.0.0.1:9; there is no relay"]
        why = exchange.wait(child, 60)
        assert why.startswith("no donor can be reached")


def test_a_donor_that_has_let_the_file_go_says_so_once(tmp_path: Path) -> None:
    with Exchange(tmp_path, size=50_000) as exchange:
        exchange.keep("a")
        exchange.donor("a")
        exchange.file.unlink()
        child = exchange.receive("a", hasty=True)
        assert "this snapshot is not kept here any more" in exchange.wait(child)
        assert len(child.said("reached")) == 1, "lost, it is not reached again at every look"


def test_without_room_nothing_is_fetched(tmp_path: Path) -> None:
    with Exchange(tmp_path, size=50_000) as exchange:
        exchange.keep("a")
        exchange.donor("a")
        child = exchange.receive("a", spare=1 << 60)
        assert "MB are needed" in exchange.wait(child)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="no prlimit to limit file sizes with")
def test_a_disk_that_fills_up_under_a_snapshot_part(tmp_path: Path) -> None:
    """Nothing that could be loaded stays behind, and with room again the transfer goes on to its end."""
    with Exchange(tmp_path) as exchange:  # 3 MB
        exchange.keep("a")
        exchange.donor("a")
        exchange.prefix = ("prlimit", "--fsize=1000000")
        told = exchange.wait(exchange.receive("a"))
        assert "File too large" in told and "Traceback" not in exchange.words("receiver")
        assert not list((exchange.node("j") / "checkpoint").glob("round-*"))
        exchange.prefix = ()
        assert exchange.wait(exchange.receive("a")) == "" and exchange.equal()


def test_a_transfer_keeps_to_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier attempt has left of this snapshot is counted once."""
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    write_file(duty.policy_file(), b"disk_gb = 0.004")
    run = tmp_path / "data" / "run"
    with Exchange(run) as exchange:  # 3 MB
        joined.write(run, joined.Joined(exchange.lock.run_id, ("tcp://127.0.0.1:1",), {}))
        exchange.keep("a")
        exchange.donor("a")
        told = exchange.wait(exchange.receive("a", home=str(run.parent)))
        assert "3 MB more are needed, and this machine's policy allows 0.004 GB (disk_gb)" in told
        write_file(duty.policy_file(), b"disk_gb = 0.007")
        assert exchange.wait(exchange.receive("a", home=str(run.parent))) == ""


def test_the_daemon_opens_the_socket_for_both_families_and_starts_a_killed_donor_again(
    tmp_path: Path,
) -> None:
    exchange = Exchange(tmp_path)
    peers = Peers(exchange.node("a"), logging.getLogger("a"), curve_public(exchange.server), 0.0, Room())
    try:
        (near,) = peers.serve("tcp://127.0.0.1:5555", 0)
        assert near.startswith("tcp://127.0.0.1:") and answers(near)
        for address in peers.serve("tcp://192.0.2.1:5555", 0):
            assert "127.0.0.1" not in address and "[::1]" not in address
        port = peers.port
        assert answers(f"tcp://127.0.0.1:{port}")
        assert peers._donor is not None
        peers._donor.process.kill()
        wait_for(lambda: not peers.events(time.monotonic()) and peers._donor is None)
        assert peers.events(time.monotonic() + AGAIN_SECONDS + 1) == [] and peers.port == port
        wait_for(lambda: answers(f"tcp://127.0.0.1:{port}"))
    finally:
        peers.close()
    assert not answers(f"tcp://127.0.0.1:{port}")


def test_a_machine_that_moves_tells_its_new_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network for a while is no news; another address is, once."""
    exchange = Exchange(tmp_path)
    hosts = ["10.0.0.7"]
    monkeypatch.setattr(own_peers, "local_hosts", lambda _places: hosts)
    peers = Peers(exchange.node("a"), logging.getLogger("a"), curve_public(exchange.server), 0.0, Room())
    now = time.monotonic()
    try:
        assert peers.serve("tcp://192.0.2.1:5555", 0) == (f"tcp://10.0.0.7:{peers.port}",)
        for found in (["10.0.0.7"], []):
            hosts[:] = found
            now += MOVE_SECONDS + 1
            assert peers.events(now) == []
        hosts[:] = ["10.0.9.9", "[fd00::9]"]
        (moved,) = peers.events(now + MOVE_SECONDS + 1)
        assert isinstance(moved, Moved)
        assert moved.addresses == (f"tcp://10.0.9.9:{peers.port}", f"tcp://[fd00::9]:{peers.port}")
        assert peers.events(now + 2 * MOVE_SECONDS + 2) == []
        lines = (exchange.node("a") / PEER_FILE).read_text().split()
        assert lines == [f"{address}/{exchange.keys['a'].hex()}" for address in moved.addresses]
    finally:
        peers.close()


def answers(address: str) -> bool:
    host, port = zmtp.host_and_port(address)
    try:
        with socket.create_connection((host, port), 2.0):
            return True
    except OSError:
        return False


# ---------------------------------------------------------------- who gets an answer


def dealer(context: zmq.Context, address: str, server: bytes, secret: bytes) -> zmq.Socket:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.setsockopt(zmq.CURVE_SERVERKEY, server)
    made.setsockopt(zmq.CURVE_SECRETKEY, secret)
    made.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(secret))
    made.connect(address)
    return made


def ask(made: zmq.Socket, body: bytes, wait: int = 1500) -> bytes | None:
    made.send(body)
    return made.recv() if made.poll(wait) else None


def test_only_the_roster_is_served_and_the_ledger_comes_from_any_peer(tmp_path: Path) -> None:
    context = zmq.Context()
    with Exchange(tmp_path, size=50_000) as exchange:
        exchange.keep("a")
        exchange.donor("a")
        address, server = exchange.addresses["a"][0], exchange.keys["a"]
        friend = dealer(context, address, server, exchange.secrets["j"])
        answer = ask(friend, wire.encode(Fetch(0, 10)), 5000)
        assert answer is not None
        entries = wire.decode(answer, "peer")
        assert isinstance(entries, Entries) and list(entries.entries) == exchange.entries
        sorry = ask(friend, wire.encode(HeadAsk(b"?" * 32, 0)))
        assert sorry is not None and isinstance(wire.decode(sorry, "peer"), Sorry)
        for nonsense in (PartAsk(exchange.root, 99, 0, 10), PartAsk(exchange.root, 0, 10**6, 10)):
            sorry = ask(friend, wire.encode(nonsense))
            assert sorry is not None and isinstance(wire.decode(sorry, "peer"), Sorry)
        assert ask(friend, b"\x93nonsense", 300) is None
        stranger = dealer(context, address, server, bytes(range(32)))
        assert ask(stranger, wire.encode(Fetch(0, 10)), 1000) is None
        last = parse(exchange.entries[-1])
        out = seal(
            RosterBody(revoked=(exchange.names.index("j"),)), parent=last.hash, term=1, nonce=bytes(8),
            round=0, digest=exchange.lock.digest, key=SIGNING_SEED,
        )  # fmt: skip
        with LedgerFile(exchange.node("a") / "node.ledger") as ledger:
            ledger.append(out.raw)
        time.sleep(0.8)
        assert ask(friend, wire.encode(Fetch(0, 10)), 1000) is None, "revoked, on its open connection too"
        friend.close(0)
        stranger.close(0)
    context.destroy(0)


def test_the_relay_holds_to_credit_and_roster(tmp_path: Path) -> None:
    context = zmq.Context()
    with Exchange(tmp_path) as exchange:
        exchange.start_relay()
        assert exchange.relay is not None
        server = bytes.fromhex(exchange.relay["key"])
        a, j = (dealer(context, exchange.relay["address"], server, exchange.secrets[name]) for name in "aj")
        for one, name in ((a, "a"), (j, "j")):
            one.send(envelope.close(exchange.keys[name], 0, b""))
        time.sleep(0.5)
        big = bytes(envelope.FREE + 1)
        refused = ask(a, envelope.close(exchange.keys["j"], 0, big), 3000)
        assert refused is not None
        assert envelope.open_frame(refused)[1:] == (envelope.NO_WAY, b"more than its reader granted")
        j.send(envelope.close(exchange.keys["a"], len(big), b"please"))
        assert a.poll(3000) and envelope.open_frame(a.recv())[2] == b"please"
        a.send(envelope.close(exchange.keys["j"], 0, big))
        assert j.poll(3000) and envelope.open_frame(j.recv()) == (exchange.keys["a"], 0, big)
        assert ask(a, envelope.close(exchange.keys["j"], 0, big)) is not None, "the credit is spent"
        away = ask(a, envelope.close(exchange.keys["b"], 0, b"hello"))
        assert away is not None and b"not connected" in away
        stranger = dealer(context, exchange.relay["address"], server, bytes(range(32)))
        assert ask(stranger, envelope.close(exchange.keys["j"], 0, b"x"), 1000) is None
        assert not j.poll(200)
        a.send_multipart([b"two", b"parts"])
        a.send(bytes(10))
        time.sleep(1.5)
        shown = relay.read_status(tmp_path)
        assert shown is not None and shown["strangers"] >= 1
        assert shown["peers"][exchange.keys["a"].hex()]["dropped"]["malformed"] == 2
        for one in (a, j, stranger):
            one.close(0)
    context.destroy(0)


def test_small_frames_are_bounded_too() -> None:
    accounts = Accounts()
    sent = [accounts.admit(b"a", b"b", 0, 10, 5.0) for _ in range(int(SMALL_AT_ONCE) + 50)]
    assert sent.count("") == SMALL_AT_ONCE and sent[-1] == "too many small frames"
    assert accounts.admit(b"a", b"b", 0, 10, 6.0) == ""
    assert json.loads(json.dumps(accounts.meter(b"a").as_dict()))["dropped"] == {"too many small frames": 50}


def test_a_ledger_that_changes_under_its_reader(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    path = exchange.node("a") / "node.ledger"
    rolls = Rolls(path, always=[b"!" * 32])
    assert rolls.keys == {*exchange.keys.values(), b"!" * 32}
    assert rolls.entries(0, 9, 1) == tuple(exchange.entries[:1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])  # a dead branch was left, or an entry is half written
    rolls._looked = 0.0
    assert rolls.keys == {b"!" * 32}
    path.write_bytes(whole)
    rolls._looked = 0.0
    assert len(rolls.keys) == 5 and rolls.entries(1, 9, 10**6) == tuple(exchange.entries[1:])
    path.unlink()
    rolls._looked = 0.0
    assert rolls.keys == {b"!" * 32} and rolls.entries(0, 9, 99) == ()
    assert keys.KEY_BYTES == snapshot.HASH


def test_who_is_refused_dials_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer may know its donors before these have its roster entry; libzmq would stay refused."""
    monkeypatch.setattr(lines, "REDIAL_SECONDS", 0.2)
    own, secret = (z85.decode(zmq.curve_keypair()[1]) for _ in range(2))
    public = curve_public(secret)
    asked = 0
    with zmq.Context() as context, zmq.Context() as there:
        zap, router = there.socket(zmq.REP), there.socket(zmq.ROUTER)
        zap.bind("inproc://zeromq.zap.01")
        router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        router.setsockopt(zmq.CURVE_PUBLICKEY, public)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, b"roster")
        router.bind("tcp://127.0.0.1:0")
        line = lines.Direct(context, own, public, [router.getsockopt_string(zmq.LAST_ENDPOINT)])

        def up() -> bool:
            nonlocal asked
            while zap.poll(0):
                version, request, *_ = zap.recv_multipart()
                asked += 1
                verdict = (b"200", b"", b"newcomer") if asked > 2 else (b"400", b"", b"")
                zap.send_multipart([version, request, *verdict, b""])
            line.watch(time.monotonic())
            return line.up

        try:
            wait_for(up)
        finally:
            line.close()
            zap.close(0)
            router.close(0)
    assert asked == 3
