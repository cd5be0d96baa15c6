"""Serving a run to strangers, with real processes: invites printed and used, orders, other plans."""

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

from coordinator import reach
from esnode import admin
from esnode.link import Link, State
from protocol import invite, keys, ledger, plan
from protocol.messages import Enrol, Enrolled, Message, Refuse
from tests.door import HELLO
from tests.runs import PLAN, ROOT, SIGNING_SEED, Processes, make_folder, toy_lock, wait_for

SECRET = b"\x21" * 32
KEY = keys.curve_public(SECRET)


class Place:
    """A run folder of the toy engine, and the `esnode` command of a user whose key its lock trusts."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.config = root, root / "run", root / "config"
        self.config.mkdir()
        keys.write_signing(self.config / "coordinator.key", SIGNING_SEED)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "ESNODE_CONFIG": str(self.config)}
        process = subprocess.Popen(
            [sys.executable, "-m", "esnode.cli.main", *words],
            cwd=ROOT,
            env={**surroundings, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def esnode(self, *words: str) -> str:
        """Standard output of a command that succeeds."""
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out

    def refused(self, *words: str) -> str:
        """The one sentence of a command that is refused."""
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1 and out == "" and err.startswith("esnode: "), (out, err)
        assert len(err.strip().splitlines()) == 1, err
        return err

    def serve(self, *words: str, bind: str = "tcp://127.0.0.1:0") -> subprocess.Popen[str]:
        """A coordinator that answers."""
        process = self.start("coordinator", "serve", *words, "--data", str(self.run), "--bind", bind)
        wait_for(lambda: process.poll() is not None or answers(self.run), what="for the coordinator")
        return process

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def answers(run: Path) -> bool:
    try:
        return bool(admin.ask(run, "status"))
    except admin.NoCoordinator:
        return False


def printed(process: subprocess.Popen[str]) -> list[str]:
    """What a coordinator has written to standard output so far, with an invite in it."""
    assert process.stdout
    lines: list[str] = []
    while not any("Who is there" in line for line in lines):
        lines.append(process.stdout.readline())
    return lines


def talk(link: Link, message: Message, seconds: float = 5.0) -> Message:
    """The first answer to a message, sent as soon as the connection stands."""
    found: list[Message] = []
    sent = False

    def step() -> list[Message]:
        nonlocal sent
        found.extend(link.receive())
        sent = sent or (link.health(time.monotonic()).state == State.CONNECTED and link.send(message))
        return found

    return wait_for(step, seconds)[0]


def enrol(text: str, key: bytes = KEY, name: str = "new") -> Message:
    """What a coordinator answers to the holder of an invite."""
    made = invite.decode(text)
    link = Link(list(made.addresses), made.server_key, made.secret)
    try:
        return talk(link, Enrol(key, name))
    finally:
        link.close(False)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


@pytest.fixture
def toy(place: Place) -> Place:
    make_folder(place.run)
    return place


# ---------------------------------------------------------------- from invite to Welcome


def test_the_printed_invite_lets_one_machine_in(toy: Place) -> None:
    lines = printed(toy.serve())
    (line,) = [line for line in lines if line.startswith("esnode join ")]
    text = line.removeprefix("esnode join ")
    lock = toy_lock(members=6)
    made = invite.decode(text)
    assert made.run == lock.run_id and made.expires == pytest.approx(time.time() + 86400, abs=30)
    assert made.server_key.hex() == (toy.run / "coordinator" / "curve.pub").read_text().strip()
    assert enrol(text) == Enrolled(lock.run_id, 1) == enrol(text)
    other = enrol(text, b"o" * 32)
    assert isinstance(other, Refuse) and "used by another machine" in other.reason
    link = Link(list(made.addresses), made.server_key, SECRET)
    welcome = talk(link, HELLO)
    assert isinstance(welcome, Refuse) and "this node works for run 0000" in welcome.reason  # an unknown run
    link.close(False)
    assert made.secret not in (toy.run / "coordinator" / "journal.sqlite").read_bytes()
    status = admin.ask(toy.run, "status")
    assert status["counters"] == {"refused enrolments": 1, "refused nodes": 1}


def test_invites_and_keys_outlive_the_coordinator(toy: Place) -> None:
    first = toy.serve("--invites", "2")
    texts = [line.split()[2] for line in printed(first) if line.startswith("esnode join ")]
    assert len(texts) == 2 and isinstance(enrol(texts[0]), Enrolled)
    first.send_signal(signal.SIGKILL)
    first.wait()
    again = toy.serve()  # no plan named, same port, no further invite
    assert enrol(texts[0]) == Enrolled(invite.decode(texts[0]).run, 1)
    assert isinstance(enrol(texts[1], b"o" * 32, "other"), Enrolled)
    assert set(enrolled(toy)) == {"n1", "n2", "new", "other"}
    again.send_signal(signal.SIGTERM)
    out, _ = again.communicate(timeout=10)
    assert again.returncode == 0 and "esnode join" not in out


def enrolled(place: Place) -> list[str]:
    return [
        row["name"] for row in json.loads(place.esnode("nodes", "list", str(place.run), "--json"))["nodes"]
    ]


def test_invite_allow_revoke_and_the_list(toy: Place) -> None:
    run = str(toy.run)
    toy.serve("--advertise", "train.example.org", "--advertise", "tcp://[2001:db8::7]:99")
    made = json.loads(toy.esnode("invite", run, "--expires", "30m", "--uses", "2", "--json"))
    port = admin.ask(toy.run, "status")["address"].rpartition(":")[2]
    assert made["addresses"] == [f"tcp://train.example.org:{port}", "tcp://[2001:db8::7]:99"]
    assert made["number"] == 2 and made["uses"] == 2 and abs(made["expires"] - time.time() - 1800) < 60
    assert invite.decode(made["invite"]).addresses == tuple(made["addresses"])
    assert invite.decode(toy.esnode("invite", run)).run == invite.decode(made["invite"]).run
    assert "there is no node or invite 'nobody'" in toy.refused("nodes", "revoke", run, "nobody")
    toy.esnode("nodes", "revoke", run, "invite-2", "--reason", "sent to the wrong person")
    toy.esnode("nodes", "allow", run, KEY.hex(), "--name", "\x1b[2Jgpu\u202e-7")
    assert enrolled(toy) == ["n1", "n2", "[2Jgpu-7"]
    toy.esnode("nodes", "revoke", run, KEY.hex()[:12])
    shown = toy.esnode("nodes", "list", run)
    assert "\x1b" not in shown and "withdrawn: sent to the wrong person" in shown and "revoked" in shown
    assert "revoked already" in toy.refused("nodes", "revoke", run, KEY.hex()[:12])
    toy.esnode("nodes", "allow", run, KEY.hex()[:12])
    assert len(enrolled(toy)) == 3
    assert "no key" in toy.refused("nodes", "allow", run, "4f1c")
    assert "2 open, 1 withdrawn" in toy.esnode("status", run)


@pytest.mark.parametrize(
    "words",
    [("invite",), ("nodes", "list"), ("nodes", "allow", KEY.hex()), ("nodes", "revoke", "n1")],
    ids=" ".join,
)
def test_without_a_coordinator_orders_say_so(toy: Place, words: tuple[str, ...]) -> None:
    at = 2 if words[0] == "nodes" else 1
    sentence = toy.refused(*words[:at], str(toy.run), *words[at:])
    assert "no coordinator is running" in sentence and "esnode coordinator serve --data" in sentence


@pytest.mark.parametrize(
    ("time", "code", "sentence"),
    [
        ("1x", 2, "'1x' is no duration"),
        ("soon", 2, "'soon' is no duration"),
        ("0s", 1, "1 minute to 366 days"),
        ("400d", 1, "1 minute to 366 days"),
    ],
)
def test_durations_that_make_no_sense(toy: Place, time: str, code: int, sentence: str) -> None:
    toy.serve()
    process = toy.start("invite", str(toy.run), "--expires", time)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code and sentence in err


# ---------------------------------------------------------------- revoked while it works


def test_a_revoked_node_stops_and_the_others_go_on(toy: Place) -> None:
    make_folder(toy.run, rounds=100_000)
    with Processes(toy.run) as processes:
        processes.coordinator()
        wait_for(processes.status)
        node = processes.node("n1")
        processes.node("n2")
        wait_for(lambda: processes.status().get("round", 0) >= 2)
        toy.esnode("nodes", "revoke", str(toy.run), "n1", "--reason", "sold")
        assert node.wait(20) == 1 and "revoked: sold" in processes.words("n1")
        assert processes.node("n1").wait(40) == 1
        assert "does not admit this node's key" in processes.words("n1")
        status = processes.status()
        assert status["wire"]["refused"]["unknown"]["revoked key"] >= 1
        wait_for(lambda: processes.status()["round"] > status["round"])
        assert admin.ask(toy.run, "stop") == {"ok": True}
        assert processes.running["coordinator"].wait(20) == 0
    chain = ledger.read(toy.run / "run.ledger").chain
    assert [name for _, name in chain.roster.values()] == ["n2"]


# ---------------------------------------------------------------- the folder


def test_the_folder_is_taken(toy: Place) -> None:
    toy.serve()
    for words in (("coordinator", "serve", "--data"), ("run", "--resume", "--out")):
        assert "is in use by process" in toy.refused(*words, str(toy.run))


def test_an_address_in_use_is_refused_before_anything_is_made(toy: Place) -> None:
    toy.serve()
    address, fresh = (toy.run / "coordinator" / "address").read_text().strip(), toy.root / "fresh"
    sentence = toy.refused(
        "coordinator", "serve", str(toy.run / "plan.toml"), "--data", str(fresh), "--bind", address
    )
    assert f"{address} is in use by another program" in sentence
    assert [entry.name for entry in fresh.iterdir()] == [".busy"]


def test_another_plan_on_the_same_folder_is_refused_in_one_sentence(toy: Place) -> None:
    other = toy.root / "other.toml"
    other.write_text(PLAN.format(rounds=4).replace("alpha = 0.0625", "alpha = 0.125"))
    sentence = toy.refused("coordinator", "serve", str(other), "--data", str(toy.run))
    assert "holds the run of another plan: alpha is 0.0625 there and 0.125 in" in sentence
    assert "own folder with --data" in sentence
    lock = toy.root / "lock.json"
    lock.write_bytes(toy_lock(members=8).to_bytes())
    assert "is the lock of run" in toy.refused("coordinator", "serve", str(lock), "--data", str(toy.run))


def test_the_same_plan_may_change_how_the_run_is_operated(toy: Place) -> None:
    same = toy.root / "same.toml"
    same.write_text(PLAN.format(rounds=9))
    toy.serve(str(same))
    assert admin.ask(toy.run, "status")["rounds"] == 9
    assert plan.parse((toy.run / "plan.toml").read_text()).ops.eval_every == 2


def test_a_folder_of_something_else(place: Place) -> None:
    place.run.mkdir()
    (place.run / "thesis.tex").touch()
    assert "holds no run yet" in place.refused("coordinator", "serve", "--data", str(place.run))
    source = place.root / "plan.toml"
    source.write_text(PLAN.format(rounds=4))
    sentence = place.refused("coordinator", "serve", str(source), "--data", str(place.run))
    assert "is no run folder" in sentence and list(place.run.iterdir()) == [place.run / "thesis.tex"]


def test_a_lock_is_served_without_torch(place: Place) -> None:
    poison = place.root / "poison"
    poison.mkdir()
    for name in ("torch", "transformers", "numba", "safetensors"):
        (poison / f"{name}.py").write_text("raise ImportError('not installed')")
    lock, data = place.root / "lock.json", place.root / "task.jsonl"
    data.write_bytes(b"{}\n")
    digest = "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
    lock.write_bytes(toy_lock(data=digest).to_bytes())
    words = ("coordinator", "serve", str(lock), "--data", str(place.run))
    assert "add --rounds" in place.refused(*words)
    assert "cannot read the task's data" in place.refused(*words, "--rounds", "5", "--task-data", "nowhere")
    (place.root / "other").write_bytes(b"[]\n")
    assert "SHA-256 differs" in place.refused(
        *words, "--rounds", "5", "--task-data", str(place.root / "other")
    )
    process = place.start(*words, "--rounds", "5", PYTHONPATH=str(poison))
    wait_for(lambda: process.poll() is not None or answers(place.run))
    status = admin.ask(place.run, "status")
    assert (status["rounds"], status["run"]) == (5, toy_lock(data=digest).run_id.hex())


def test_a_lock_of_somebody_else(place: Place) -> None:
    lock = place.root / "lock.json"
    lock.write_bytes(toy_lock(trusted=("ab" * 32,)).to_bytes())
    sentence = place.refused("coordinator", "serve", str(lock), "--data", str(place.run), "--rounds", "5")
    assert "does not trust this user's signing key" in sentence
    assert place.esnode("coordinator", "key").strip() in sentence


def test_plain_text_only_on_loopback(toy: Place) -> None:
    process = toy.serve("--plain", bind="tcp://0.0.0.0:0")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "unencrypted means tcp://127.0.0.1:PORT" in err
    toy.serve("--plain")
    assert "does not encrypt" in toy.refused("invite", str(toy.run))


@pytest.mark.parametrize("name", ["curve.key", "signing.key"])
def test_a_key_that_others_can_read_is_refused(toy: Place, name: str) -> None:
    path = toy.run / "coordinator" / name
    keys.new_curve_file(toy.run / "coordinator" / "curve.key")
    path.chmod(0o640)
    process = toy.serve()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and f"run: chmod 600 {path}" in err


# ---------------------------------------------------------------- status


def test_status_watches_until_interrupted(toy: Place) -> None:
    toy.serve()
    watching = toy.start("status", str(toy.run), "--watch", "--json")
    assert watching.stdout
    assert json.loads(watching.stdout.readline())["state"] == "paused"
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=10)
    assert watching.returncode == 0


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("named", "dialled"),
    [
        ("train.example.org", "tcp://train.example.org:5555"),
        ("train.example.org:443", "tcp://train.example.org:443"),
        ("tcp://192.0.2.1:7", "tcp://192.0.2.1:7"),
        ("2001:db8::1", "tcp://[2001:db8::1]:5555"),
        ("[2001:db8::1]", "tcp://[2001:db8::1]:5555"),
        ("[2001:db8::1]:7", "tcp://[2001:db8::1]:7"),
    ],
)
def test_advertised_addresses_are_completed(named: str, dialled: str) -> None:
    assert reach.advertised("tcp://0.0.0.0:5555", [named]) == (dialled,)


def test_addresses_of_this_machine() -> None:
    assert reach.advertised("tcp://127.0.0.1:7", ()) == ("tcp://127.0.0.1:7",)
    found = reach.advertised("tcp://0.0.0.0:7", ())
    assert found and all(re.fullmatch(r"tcp://[0-9.]+:7", address) for address in found)
    for address in reach.advertised("tcp://[::]:7", ()):
        invite.check_address(address)


@pytest.mark.parametrize("named", ["0.0.0.0", "a b", "host:0", "http://x", "\x1b[31m"])
def test_addresses_nobody_can_dial_are_refused_at_once(named: str) -> None:
    with pytest.raises(invite.InviteError):
        reach.advertised("tcp://0.0.0.0:5555", [named])
