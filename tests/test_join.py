"""Joining, up to the daemon: every way it can fail is one sentence in time, and what was done is kept."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.blobs import Shelf
from esnode import fetch, join, joined, notebook, policy, reach
from esnode.contact import Contact
from protocol import keys
from protocol.errors import UserError
from protocol.ledger import LedgerFile
from protocol.messages import BLOB_PART, BlobAsk, Enrol, Enrolled, Message, Refuse
from tests import bench
from tests.doorman import ONE_TIME, SERVER, Doorman
from tests.relay import Relay
from tests.rude import Manners, Port, answer_as_web_server, end_in_the_handshake, hang_up, hear_and_hang_up
from tests.runs import toy_lock

DATA = b'{"task":"toy","options":{}}\n' + b"x" * 2 * BLOB_PART
LOCK = toy_lock(data=hashlib.sha256(DATA).hexdigest())
PUBLIC_ONE_TIME = keys.curve_public(ONE_TIME)
IN_TIME = 10.0


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESNODE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(join, "_model", lambda named, lock, say: Path("model"))


class Coordinator(Doorman):
    """Lets one key in per invite, and serves lock and task."""

    def __init__(self, folder: Path, data: bytes = DATA, host: str = "127.0.0.1") -> None:
        (folder / "served.jsonl").write_bytes(data)
        shelf = Shelf(LOCK, folder / "served.jsonl")
        self.members: set[bytes] = set()
        self.part_limit = 10**9

        def answer(key: bytes, message: Message) -> Message | None:
            if isinstance(message, Enrol):
                if self.members - {message.key}:
                    return Refuse("invite 1 works once and was used by another machine: ask for a new one")
                self.members.add(message.key)
                return Enrolled(LOCK.run_id, 1)
            if isinstance(message, BlobAsk) and message.offset < self.part_limit:
                return shelf.answer(key, message)
            return None

        super().__init__(lambda key: key == PUBLIC_ONE_TIME or key in self.members, answer, host)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path) as made:
        yield made


def told(*words: object, **fields: object) -> str:
    """The sentence with which joining fails, in time."""
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        join.prepare(join.Request(*words, **fields), lambda line: None)  # type: ignore[arg-type]
    assert time.monotonic() - began < IN_TIME
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 500
    return sentence


def silent_address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield f"tcp://127.0.0.1:{mute.getsockname()[1]}"


# ---------------------------------------------------------------- the good case


def test_a_join_makes_a_folder_and_the_next_needs_no_invite(coordinator: Coordinator, tmp_path: Path) -> None:
    lines: list[str] = []
    invite = coordinator.invite(LOCK.run_id)
    broken = "\n  ".join(invite[k : k + 40] for k in range(0, len(invite), 40))
    ready = join.prepare(join.Request(invite=broken, name="a"), lines.append)
    folder = tmp_path / "data" / LOCK.run_id.hex()[:16]
    assert ready.folder == folder and ready.words[:4] == ["--run", str(folder), "--name", "a"]
    assert (folder / "lock.json").read_bytes() == LOCK.to_bytes()
    assert (folder / "task.jsonl").read_bytes() == DATA
    key = folder / "nodes" / "a" / "curve.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert coordinator.members == {keys.curve_public(keys.read_curve(key))}
    assert LOCK.run_id.hex()[:16] in lines[0] and "memory" in lines[2]
    (folder / "task.jsonl").write_bytes(DATA[:-1])  # altered: fetched again
    heard = len(coordinator.heard)
    for again in (join.Request(), join.Request(run=LOCK.run_id.hex()[:4]), join.Request(invite=invite)):
        assert join.prepare(again, lines.append).name == "a"
    assert (folder / "task.jsonl").read_bytes() == DATA
    later = [message for _, message in coordinator.heard[heard:]]
    assert not any(isinstance(message, Enrol) for message in later)
    assert BlobAsk(1, 1, LOCK.run_id, 0) not in later, "the lock is here already"
    assert "used by another machine" in told(invite=invite, name="b")
    assert "never" not in told(run="ffff") and "no joined run has an id" in told(run="ffff")


def test_a_join_after_the_end_asks_nobody(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as served:
        invite = served.invite(LOCK.run_id)
        folder = join.prepare(join.Request(invite=invite, name="a"), lambda line: None).folder
    assert f"(for the run in {folder}, which may have ended meanwhile)" in told()
    entries = bench.ledger(*[bench.LOCK.digest] * 2, end=True)
    with LedgerFile(folder / "nodes" / "a" / "node.ledger") as file:
        file.append(*(entry.raw for entry in entries))
    for given in (None, invite):
        with pytest.raises(
            notebook.RunOver, match=r"after 2 rounds with entry [0-9a-f]{16} of term 1"
        ) as over:
            join.prepare(join.Request(invite=given), lambda line: None)
        assert over.value.exit_code == 0
        told_what_to_do = f"give the plan another `seed`; to train the same again move {folder} away"
        assert (told_what_to_do in str(over.value)) == (given is not None)


def test_the_answer_to_enrol_may_be_lost_and_the_same_key_asks_again(coordinator: Coordinator) -> None:
    invite = coordinator.invite(LOCK.run_id)
    name = join.prepare(join.Request(invite=invite, name="a"), lambda line: None).name
    folder = joined.find(None)
    joined.write(folder, replace(joined.read(folder), nodes={}))  # type: ignore[type-var]
    assert join.prepare(join.Request(invite=invite, name=name), lambda line: None).name == name
    assert len(coordinator.members) == 1


def test_task_data_go_on_where_they_stopped(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.members.add(keys.curve_public(ONE_TIME))
    path = tmp_path / "task.jsonl"
    partial = tmp_path / f"task.jsonl.{LOCK.data[:16]}.part"
    partial.write_bytes(DATA[:BLOB_PART])
    with Contact([coordinator.address], keys.curve_public(SERVER), ONE_TIME) as contact:
        fetch.task(contact, LOCK, path, policy.Pace(0))
        asked = [message.offset for _, message in coordinator.heard if isinstance(message, BlobAsk)]
        assert asked == [BLOB_PART, 2 * BLOB_PART] and path.read_bytes() == DATA and not partial.exists()
        for rubbish in (b"?" * BLOB_PART, b"?" * (len(DATA) + 5)):  # the digest tells, or the length
            path.unlink()
            partial.write_bytes(rubbish)
            fetch.task(contact, LOCK, path, policy.Pace(0))
            assert path.read_bytes() == DATA
        path.unlink()
        began = time.monotonic()
        fetch.task(contact, LOCK, path, policy.Pace(len(DATA)))
        assert time.monotonic() - began > 0.9, "the bandwidth cap holds"


def test_the_next_address_is_used_when_one_is_dead(coordinator: Coordinator) -> None:
    closed = "tcp://127.0.0.1:9"
    invite = coordinator.invite(LOCK.run_id, "tcp://no.such.host.invalid:5", closed, coordinator.address)
    began = time.monotonic()
    ready = join.prepare(join.Request(invite=invite, name="a"), lambda line: None)
    assert time.monotonic() - began < IN_TIME
    note = joined.read(ready.folder)
    assert note is not None and note.addresses[0] == coordinator.address and closed in note.addresses


def test_ipv6(tmp_path: Path) -> None:
    try:
        with Coordinator(tmp_path, host="[::1]") as six:
            assert join.prepare(join.Request(invite=six.invite(LOCK.run_id)), lambda line: None)
    except OSError:
        pytest.skip("this machine has no IPv6")


# ---------------------------------------------------------------- the bad ones


def test_nobody_there(coordinator: Coordinator) -> None:
    def at(*addresses: str) -> str:
        return told(invite=coordinator.invite(LOCK.run_id, *addresses))

    assert "nothing listens on port 9 there: it is not running" in at("tcp://127.0.0.1:9")
    assert "no.such.host.invalid" in at("tcp://no.such.host.invalid:5000")
    assert "port 9" in at("tcp://[::1]:9") or "no IPv6" in at("tcp://[::1]:9")
    for address in silent_address():
        assert "stays silent" in at(address)


@pytest.mark.parametrize(
    ("manners", "words"),
    [
        (hang_up, "accepts connections and hangs up"),
        (hear_and_hang_up, "accepts connections and hangs up"),
        (answer_as_web_server, "what listens there is something else than esnode"),
        (end_in_the_handshake, "nothing listens on port"),
    ],
)
def test_what_else_may_listen_is_not_called_a_wrong_key(
    coordinator: Coordinator, manners: Manners, words: str
) -> None:
    with Port(manners) as port:
        assert words in told(invite=coordinator.invite(LOCK.run_id, f"tcp://127.0.0.1:{port.number}"))


def test_a_coordinator_that_begins_to_listen_while_the_reason_is_looked_for(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is closed while connections are tried, and open when it is asked why: it is tried again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    look = reach.obstacles

    def late(addresses: Sequence[str], patience: float) -> dict[str, str]:
        Relay(coordinator.address, listen=address)
        return look(addresses, patience)

    monkeypatch.setattr(reach, "obstacles", late)
    began = time.monotonic()
    ready = join.prepare(
        join.Request(invite=coordinator.invite(LOCK.run_id, address), name="a"), lambda line: None
    )
    assert time.monotonic() - began < IN_TIME
    note = joined.read(ready.folder)
    assert note is not None and note.addresses == (address,)


def test_a_port_that_greets_and_says_no_more(coordinator: Coordinator) -> None:
    """What is tried twice is told in time, too."""
    lines = []

    def greet(_: socket.socket, line: socket.socket) -> None:
        lines.append(line)
        line.sendall(b"\xff" + bytes(8) + b"\x7f")

    with Port(greet) as port:
        sentence = told(invite=coordinator.invite(LOCK.run_id, f"tcp://127.0.0.1:{port.number}"))
    assert "the handshake does not come to its end" in sentence and len(lines) > 2
    for line in lines:
        line.close()


def test_a_firewall_that_drops_packets(coordinator: Coordinator) -> None:
    """A listener whose backlog is full answers no further connection: its packets are dropped, too."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = []
        for _ in range(3):
            knock = socket.socket()
            knock.setblocking(False)
            knock.connect_ex(address)
            waiting.append(knock)
        sentence = told(invite=coordinator.invite(LOCK.run_id, f"tcp://127.0.0.1:{address[1]}"))
        assert "no answer at all" in sentence and "firewall" in sentence
        for knock in waiting:
            knock.close()


def test_wrong_keys_and_what_the_coordinator_says(coordinator: Coordinator, tmp_path: Path) -> None:
    run = LOCK.run_id
    wrong = told(invite=coordinator.invite(run, server=b"\x07" * 32))
    assert "its key is not the one this node expects; if a successor serves" in wrong
    unknown = told(invite=coordinator.invite(run, secret=b"\x08" * 32))
    assert "does not know this invite" in unknown and "ask its operator" in unknown
    other = told(invite=coordinator.invite(b"\x09" * 32), name="a")
    assert f"serves run {run.hex()[:16]}" in other
    coordinator.members.add(b"k" * 32)
    assert "was used by another machine: ask for a new one" in told(invite=coordinator.invite(run), name="a")
    assert "this is no invite" in told(invite="hello")
    assert "no run was joined here yet" in told(data=tmp_path / "nowhere")


def test_a_key_that_was_revoked_since(coordinator: Coordinator) -> None:
    join.prepare(join.Request(invite=coordinator.invite(LOCK.run_id), name="a"), lambda line: None)
    coordinator.members.clear()
    assert "does not admit this node's key" in (sentence := told()) and "With a new invite" in sentence
    assert join.prepare(join.Request(invite=coordinator.invite(LOCK.run_id)), lambda line: None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda key, message: Refuse("the coordinator speaks wire version 2"), "speaks wire version 2"),
        (lambda key, message: None, "runs another release"),
    ],
)
def test_another_release(answer: Callable[[bytes, Message], Message | None], words: str) -> None:
    with Doorman(lambda key: True, answer) as door:
        assert words in told(invite=door.invite(LOCK.run_id))


def test_the_policy_is_asked_before_anything_is_fetched(coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "node.toml"
    file.write_text('models = ["llama*"]')
    sentence = told(invite=coordinator.invite(LOCK.run_id), name="a")
    assert "does not allow the model 'toy'" in sentence
    folder = joined.find(None)
    assert not (folder / "task.jsonl").exists() and not (folder / "lock.json").exists()
    file.write_text("modles = 3")
    assert "'modles' is unknown" in told() and "node.toml" in told()


def test_damaged_notes_and_keys_say_what_to_do(coordinator: Coordinator) -> None:
    join.prepare(join.Request(invite=coordinator.invite(LOCK.run_id), name="a"), lambda line: None)
    folder = joined.find(None)
    (folder / joined.FILE).write_text("{")
    assert "Remove that one file and join again" in told()
    (folder / joined.FILE).unlink()
    (folder / "nodes" / "a" / "curve.key").write_text("rubbish\n")
    sentence = told(invite=coordinator.invite(LOCK.run_id), name="a")
    assert "curve.key is damaged" in sentence and "new invite" in sentence


# ---------------------------------------------------------------- code and devices


def test_task_code_never_travels(coordinator: Coordinator, tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def score(item, text): return 1.0\n")
    digest = hashlib.sha256(code.read_bytes()).hexdigest()
    lock = replace(LOCK, task="python:tasks/mine.py", task_options={"code": digest})
    with pytest.raises(join.JoinError, match=f"SHA-256 {digest}.*--task-code FILE"):
        join._code(lock, tmp_path / "run", None)
    other = tmp_path / "other.py"
    other.write_text("import os\n")
    with pytest.raises(join.JoinError, match="is not the code of this run"):
        join._code(lock, tmp_path / "run", other)
    place = join._code(lock, tmp_path / "run", code)
    assert place is not None and (place / "tasks" / "mine.py").read_bytes() == code.read_bytes()
    assert join._code(lock, tmp_path / "run", None) == place, "it is kept"
    with pytest.raises(join.JoinError, match="outside any folder"):
        join._code(replace(lock, task="python:../../mine.py"), tmp_path / "run", code)
    with pytest.raises(join.JoinError, match="leave out --task-code"):
        join._code(LOCK, tmp_path / "run", code)


def test_words_of_a_coordinator_cannot_drive_the_terminal() -> None:
    escape = "\x1b]0;owned\x07\x1b[2J"
    with Doorman(lambda key: True, lambda key, message: Refuse(escape)) as door:
        command = [sys.executable, "-m", "esnode.cli.main", "join", door.invite(LOCK.run_id)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "refuses: ?]0;owned??[2J" in done.stderr


def test_the_command_fails_in_one_line(coordinator: Coordinator) -> None:
    invite = coordinator.invite(LOCK.run_id, "tcp://127.0.0.1:9")
    for words in ([invite], [invite[:50], invite[50:]], ["-"]):
        command = [sys.executable, "-m", "esnode.cli.main", "join", *words]
        done = subprocess.run(command, check=False, input=invite, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("esnode: the coordinator cannot be reached. tcp://127.0.0.1:9: nothing")
        assert done.stderr.count("\n") == 1
