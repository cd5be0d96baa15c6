"""A successor in real processes: the coordinator's journal is lost, a ledger survives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from coordinator import heir
from coordinator.heir import RecoverError
from coordinator.terms import ERA
from esnode import serve
from esnode.folder import RunFolder
from esnode.serve import Order, ServeError
from esnode.tell import silent
from protocol import keys, ledger
from protocol.entries import parse
from protocol.ledger import LedgerFile
from tests.bench import ledger as small_ledger
from tests.runs import FOREVER, PLAN, SIGNING_SEED, Processes, make_folder, wait_for


@pytest.mark.parametrize("older", [0, 2], ids=["whole ledger", "older ledger"])
def test_the_journal_is_lost_and_a_ledger_survives(tmp_path: Path, older: int) -> None:
    folder, kept = tmp_path / "run", tmp_path / "kept.ledger"
    folder.mkdir()
    make_folder(folder, rounds=FOREVER, task_options={"seconds": 0.05})
    with Processes(folder) as processes:
        processes.coordinator()
        for name in ("n1", "n2"):
            processes.node(name)
        wait_for(lambda: processes.status().get("round", 0) >= 4)
        processes.kill("coordinator")
        raws = [entry.raw for entry in ledger.read(folder / "run.ledger").chain.entries]
        with LedgerFile(kept) as file:
            file.append(*(raws[: len(raws) - older]))
        for lost in [*(folder / "coordinator").glob("journal.sqlite*"), folder / "run.ledger"]:
            lost.unlink()
        last = parse(raws[-1]).round + 6
        (folder / "plan.toml").write_text(PLAN.format(rounds=last))
        processes.coordinator("--recover-from", str(kept))
        processes.wait_end()
    chain = ledger.read(folder / "run.ledger").chain
    assert chain.ended and chain.round == last and chain.term == ERA
    assert [entry.raw for entry in chain.entries[: len(raws)]] == raws, "the nodes gave what the file lacked"


def test_a_lost_journal_names_the_ways_out(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with LedgerFile(tmp_path / "run.ledger") as file:
        file.append(small_ledger()[0].raw)
    with Processes(tmp_path) as processes:
        assert processes.coordinator().wait(20) == 1
        words = processes.words("coordinator")
    assert "--recover-from" in words and "esnode fork" in words


def test_what_cannot_be_recovered_from(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    path.write_bytes(b"something else")
    with pytest.raises(RecoverError, match="nothing can be recovered"):
        heir.read(path)
    with LedgerFile(tmp_path / "ended.ledger") as file:
        file.append(*(entry.raw for entry in small_ledger(end=True)))
    assert heir.read(tmp_path / "ended.ledger"), "its successor tells those who have not heard of the end"


def test_the_file_of_a_run_that_dropped_entries_is_set_aside(tmp_path: Path) -> None:
    raws = [entry.raw for entry in small_ledger()]
    path = tmp_path / "run.ledger"
    with LedgerFile(path) as file:
        file.append(*raws)
    file, added = heir.open_file(path, raws[:1], cut=True)
    file.close()
    assert (file.entries, added) == (raws[:1], 0)
    (aside,) = tmp_path.glob("orphans-1-*.ledger")
    assert len(LedgerFile(aside).entries) == 2


def test_a_successors_folder_from_a_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    old = tmp_path / "old"
    old.mkdir()
    lock = make_folder(old)
    with Processes(old) as processes:
        processes.coordinator()
        wait_for(lambda: (old / "run.ledger").exists() and ledger.read(old / "run.ledger").chain.height)
    order = Order(data=tmp_path / "heir", survivor=old / "run.ledger", rounds=5)
    place = RunFolder(order.data)
    place.path.mkdir()
    with pytest.raises(ServeError, match="does not trust this user's signing key"):
        serve.settle(place, order, silent)
    keys.user_signing_file().unlink()
    keys.write_signing(keys.user_signing_file(), SIGNING_SEED)
    with pytest.raises(ServeError, match="task's data"):
        serve.settle(place, order, silent)
    assert not place.is_run and lock.trusted
    shutil.rmtree(place.path)


def test_the_lost_coordinators_key_may_lie_in_the_new_folder(tmp_path: Path) -> None:
    """So its nodes come by themselves; anything else in an unknown folder is still refused."""
    inner = tmp_path / "heir" / "coordinator"
    inner.mkdir(parents=True)
    (inner / "curve.key").write_text("a key")
    order = Order(data=tmp_path / "heir", recover=("kept.ledger",))
    _, descriptor = serve.take(order)
    os.close(descriptor)
    with pytest.raises(ServeError, match="no run folder"):
        serve.take(Order(data=tmp_path / "heir", source=tmp_path / "plan.toml"))
    (inner / "notes.txt").write_text("mine")
    with pytest.raises(ServeError, match="no run folder"):
        serve.take(order)
