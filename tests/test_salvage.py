"""A successor begins from nodes over the network: real sockets and keys, and once whole processes."""

from __future__ import annotations

import hashlib
import socket
import time
from pathlib import Path

import pytest

from coordinator.terms import ERA
from esnode import salvage
from esnode.salvage import PEER_FILE, SalvageError
from esnode.tell import silent
from protocol import keys, ledger
from protocol.entries import AmendBody, parse, public_key, seal
from protocol.ledger import LedgerFile
from protocol.rolls import Rolls
from tests.donors import Exchange
from tests.rude import Port, hang_up
from tests.runs import FOREVER, SIGNING_SEED, Processes, make_folder, wait_for

STRANGER = b"s" * 32
TASK = b'{"prompt": "say 1"}\n' * 20_000  # more than one part


def source(exchange: Exchange, name: str, key: str = "") -> str:
    return f"{exchange.addresses[name][0]}/{exchange.keys[key or name].hex()}"


def longer(exchange: Exchange, name: str, term: int = 2) -> list[bytes]:
    """One more entry in a node's ledger, of a later coordinator's."""
    tip = parse(exchange.entries[-1])
    entry = seal(
        AmendBody(5, alpha=0.5), parent=tip.hash, term=term, nonce=b"n" * 8, round=0,
        digest=exchange.lock.digest, key=SIGNING_SEED,
    )  # fmt: skip
    with LedgerFile(exchange.node(name) / "node.ledger") as file:
        file.append(entry.raw)
    return [*exchange.entries, entry.raw]


def test_the_strongest_of_several_ledgers(tmp_path: Path) -> None:
    with Exchange(tmp_path) as exchange:
        wanted = longer(exchange, "b")
        for name in "ab":
            exchange.donor(name)
        told: list[str] = []
        texts = [source(exchange, "a"), source(exchange, "b"), f"tcp://127.0.0.1:1/{'11' * 32}"]
        path = salvage.bring(texts, SIGNING_SEED, tmp_path / "heir", lambda what, *_: told.append(what))
        assert [entry.raw for entry in ledger.read(path).chain.entries] == wanted
        assert any("127.0.0.1:1: nothing listens on port 1 there" in words for words in told), (
            "what was in vain is told"
        )


def test_the_tasks_data_come_along_unless_they_were_altered(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lock = make_folder(run, data=hashlib.sha256(TASK).hexdigest())
    (run / "task.jsonl").write_bytes(TASK)
    with Exchange(run, "ab") as exchange:
        exchange.lock = lock
        for name in "ab":
            with LedgerFile(exchange.node(name) / "node.ledger") as file:
                pass
            (exchange.node(name) / "node.ledger").unlink()
            with LedgerFile(exchange.node(name) / "node.ledger") as file:
                file.append(*exchange._ledger())
            exchange.donor(name)
        path = salvage.bring([source(exchange, "a")], SIGNING_SEED, tmp_path / "heir", silent)
        assert path.with_name("task.jsonl").read_bytes() == TASK
        (run / "task.jsonl").write_bytes(TASK[:-2] + b"x\n")
        path = salvage.bring([source(exchange, "b")], SIGNING_SEED, tmp_path / "other", silent)
        assert not path.with_name("task.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://127.0.0.1:{closed}/{a}", "listens elsewhere. Name other nodes, or a copy of a node.ledger"),
        ("tcp://127.0.0.1:{silent}/{a}", "it accepts connections but stays silent"),
        ("tcp://127.0.0.1:{rude}/{a}", "it accepts connections and hangs up"),
        ("{address}/{b}", "its key is not the one expected"),
        ("{address}", "name its key too"),
        ("tcp://127.0.0.1:x/{a}", "is no address"),
        ("nowhere.ledger", "no such ledger file"),
    ],
)
def test_what_cannot_be_is_said_within_ten_seconds(tmp_path: Path, text: str, words: str) -> None:
    with (
        Exchange(tmp_path) as exchange,
        socket.create_server(("127.0.0.1", 0)) as mute,
        Port(hang_up) as rude,
    ):
        exchange.donor("a")
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()[1]
        named = text.format(
            closed=closed,
            silent=mute.getsockname()[1],
            rude=rude.number,
            address=exchange.addresses["a"][0],
            a=exchange.keys["a"].hex(),
            b=exchange.keys["b"].hex(),
        )
        began = time.monotonic()
        with pytest.raises(SalvageError, match=words) as refusal:
            salvage.bring([named], SIGNING_SEED, tmp_path / "heir", silent)
        assert time.monotonic() - began < 10 and "\n" not in str(refusal.value)


def test_a_key_that_the_ledger_does_not_trust_reads_nothing(tmp_path: Path) -> None:
    with Exchange(tmp_path) as exchange:
        exchange.donor("a")
        with pytest.raises(SalvageError, match="does not trust this user's signing key"):
            salvage.bring([source(exchange, "a")], STRANGER, tmp_path / "heir", silent)


def test_a_ledger_without_end_is_not_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes a lock that trusts this user and itself can sign entries for ever."""
    with Exchange(tmp_path) as exchange:
        exchange.donor("a")
        monkeypatch.setattr(salvage, "MOST_LEDGER", sum(map(len, exchange.entries)) - 1)
        with pytest.raises(SalvageError, match="does not end within"):
            salvage.bring([source(exchange, "a")], SIGNING_SEED, tmp_path / "heir", silent)


def test_a_donor_that_trickles_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry every few seconds, or a byte of the task's data: the pace of the whole is what counts."""
    assert not salvage._too_slow(0, 59.0) and not salvage._too_slow(10**6, 100.0)
    assert salvage._too_slow(61, 61.0) == "it gave 61 bytes in 61 s, which would not come to an end"
    with Exchange(tmp_path) as exchange:
        exchange.donor("a")
        monkeypatch.setattr(salvage, "ASK_COUNT", 1)
        monkeypatch.setattr(salvage, "SLOW_SECONDS", 0.0)
        monkeypatch.setattr(salvage, "LEAST_PACE", 10**12)
        with pytest.raises(
            SalvageError, match=r"it gave [\d,]+ bytes in 0 s, which would not come to an end"
        ):
            salvage.bring([source(exchange, "a")], SIGNING_SEED, tmp_path / "heir", silent)


def test_an_altered_entry_is_found(tmp_path: Path) -> None:
    with Exchange(tmp_path) as exchange:
        tip = parse(exchange.entries[-1])
        forged = seal(
            AmendBody(5, alpha=0.5), parent=tip.hash, term=2, nonce=b"n" * 8, round=0,
            digest=exchange.lock.digest, key=STRANGER,
        )  # fmt: skip
        with LedgerFile(exchange.node("a") / "node.ledger") as file:
            file.append(forged.raw)
        exchange.donor("a")
        with pytest.raises(SalvageError, match="may not follow"):
            salvage.bring([source(exchange, "a")], SIGNING_SEED, tmp_path / "heir", silent)


def test_who_counts_as_an_heir_follows_the_amendments(tmp_path: Path) -> None:
    with Exchange(tmp_path) as exchange:
        path = exchange.node("a") / "node.ledger"
        first = keys.heir_public(public_key(SIGNING_SEED))
        assert Rolls(path).heirs == {first} == {keys.curve_public(keys.heir_secret(SIGNING_SEED))}
        tip = parse(exchange.entries[-1])
        trusted = (public_key(SIGNING_SEED), public_key(STRANGER))
        for from_round, heirs in ((5, 1), (0, 2)):
            entry = seal(
                AmendBody(from_round, trusted=trusted), parent=tip.hash, term=1, nonce=bytes(8), round=0,
                digest=exchange.lock.digest, key=SIGNING_SEED,
            )  # fmt: skip
            with LedgerFile(path) as file:
                file.append(entry.raw)
            tip = entry
            assert len(Rolls(path).heirs) == heirs, "an amendment counts from its round on"


def test_no_point_of_the_curve_is_nobodys_key() -> None:
    assert keys.heir_public(b"\x02" + bytes(31)) == b""


def test_nothing_survives_but_the_nodes(tmp_path: Path) -> None:
    """The coordinator's machine is gone with all it had; another one begins from a node's peer socket."""
    run, heir, config = tmp_path / "run", tmp_path / "heir", tmp_path / "config"
    run.mkdir()
    make_folder(run, rounds=FOREVER, data=hashlib.sha256(TASK).hexdigest(), task_options={"seconds": 0.05})
    (run / "task.jsonl").write_bytes(TASK)
    config.mkdir()
    keys.write_signing(config / "coordinator.key", SIGNING_SEED)
    with Processes(run) as processes:
        processes.coordinator()
        for name in ("n1", "n2"):
            processes.node(name, "--peer-port", "0")
        wait_for(lambda: processes.status().get("round", 0) >= 3)
        processes.kill("coordinator")
        raws = [entry.raw for entry in ledger.read(run / "run.ledger").chain.entries]
        for lost in (*(run / "coordinator").glob("journal.sqlite*"), run / "run.ledger"):
            lost.unlink()
        lines = [(run / "nodes" / name / PEER_FILE).read_text().split()[0] for name in ("n1", "n2")]
        last = parse(raws[-1]).round + 4
        words = ["coordinator", "serve", "--rounds", str(last), "--data", str(heir), "--invites", "0"]
        for line in lines:
            words += ["--recover-from", line]
        process = processes.start("heir", "esnode.cli.main", *words, ESNODE_CONFIG=str(config))
        wait_for(lambda: (heir / "coordinator" / "address").exists() or process.poll() is not None)
        assert process.poll() is None, processes.words("heir")
        assert (heir / "task.jsonl").read_bytes() == TASK
        for name in ("n1", "n2"):
            processes.kill(name)
        for file in ("address", "curve.pub"):  # what a new invite tells a node
            (run / "coordinator" / file).write_bytes((heir / "coordinator" / file).read_bytes())
        for name in ("n1", "n2"):
            processes.node(name, "--peer-port", "0")
        assert process.wait(120) == 0, processes.words("heir")
    chain = ledger.read(heir / "run.ledger").chain
    assert chain.ended and chain.round == last and chain.term == ERA
    assert [entry.raw for entry in chain.entries[: len(raws)]] == raws
