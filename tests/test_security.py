"""docs/security.md: the tests it names exist, and those of its claims that no other file holds."""

from __future__ import annotations

import ast
import re
import shutil
import time
from pathlib import Path

import pytest

from esnode import admin
from esnode.link import Link, State
from protocol import invite, keys, ledger
from protocol.entries import public_key
from protocol.messages import Enrol, Enrolled
from tests.door import HELLO, N1, Door
from tests.runs import FOREVER, PATIENCE, ROOT, SIGNING_SEED, Processes, make_folder, wait_for
from tests.test_serve import talk

PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
SPARE_SEED = bytes(range(100, 132))
SLOW = {"task_options": {"seconds": 0.05}}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=str)
def test_the_tests_that_the_page_names_exist(file: str, name: str) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_claim_names_a_test() -> None:
    table = PAGE.partition("## What is protected")[2].partition("## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 15 and all("::test_" in row for row in rows)


def test_what_crosses_the_network_is_unreadable() -> None:
    """Bytes of a whole conversation: nothing of what was said is in them, nor who said it."""
    door = Door()
    there, back, found = door.tapped(N1, HELLO)
    seen = there + back
    assert found and len(seen) > 500
    for plain in (HELLO.selftest, *HELLO.fingerprints, keys.curve_public(N1)):
        assert plain not in seen
    door.close()


def test_every_socket_encrypts() -> None:
    """A module that opens a socket sets CURVE on it, or talks inside this machine only."""
    inside = {"coordinator/gate.py": "inproc://", "coordinator/admin.py": "ipc", "esnode/admin.py": "ipc"}
    opening = [
        path
        for package in ("coordinator", "esnode", "protocol")
        for path in sorted((ROOT / package).rglob("*.py"))
        if ".socket(zmq." in path.read_text()
    ]
    assert len(opening) >= 5
    for path in opening:
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        assert "CURVE_SECRETKEY" in text or inside.get(name, "no word of it") in text, name


# ---------------------------------------------------------------- changing keys


def test_a_new_coordinator_key(tmp_path: Path) -> None:
    """Who pinned the old one says so; who joins again with a known key gets in and uses nothing up."""
    make_folder(tmp_path, ("n1",))
    secret = keys.read_curve(tmp_path / "nodes" / "n1" / "curve.key")
    with Processes(tmp_path) as processes:
        processes.coordinator()
        wait_for(processes.status)
        old = bytes.fromhex((tmp_path / "coordinator" / "curve.pub").read_text())
        admin.ask(tmp_path, "stop")
        assert processes.running["coordinator"].wait(10) == 0
        (tmp_path / "coordinator" / "curve.key").unlink()
        processes.coordinator()
        address = wait_for(processes.status)["address"]
        link = Link([address], old, secret)
        wait_for(lambda: link.receive() or link.health(time.monotonic()).state == State.WRONG_KEY)
        link.close(False)
        made = invite.decode(admin.order(tmp_path, "invite")["invite"])
        assert made.server_key != old
        link = Link([address], made.server_key, made.secret)
        assert talk(link, Enrol(keys.curve_public(secret), "n1")) == Enrolled(made.run, 1)
        link.close(False)
        assert [row["used"] for row in admin.order(tmp_path, "nodes")["invites"]] == [0]


def test_the_second_trusted_key_goes_on(tmp_path: Path) -> None:
    """Stopped in the middle, started with the other key that the lock names: the same nodes follow."""
    both = tuple(public_key(seed).hex() for seed in (SIGNING_SEED, SPARE_SEED))
    make_folder(tmp_path, ("n1", "n2"), FOREVER, trusted=both, **SLOW)
    signing = tmp_path / "coordinator" / "signing.key"
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        processes.node("n2")
        wait_for(lambda: processes.status().get("round", 0) >= 2)
        processes.kill("coordinator")
        signing.unlink()
        keys.write_signing(signing, SPARE_SEED)
        processes.end_after(3)
        processes.coordinator()
        processes.wait_end()
        for name in ("n1", "n2"):
            assert processes.running[name].wait(PATIENCE) == 0, processes.words(name)
    reading = ledger.read(tmp_path / "run.ledger")
    assert reading.ended and reading.chain.entries[-1].term == 2


def test_an_untrusted_key_does_not_go_on(tmp_path: Path) -> None:
    make_folder(tmp_path, ("n1",))
    shutil.copy(tmp_path / "coordinator" / "signing.key", tmp_path / "kept")
    (tmp_path / "coordinator" / "signing.key").unlink()
    keys.write_signing(tmp_path / "coordinator" / "signing.key", SPARE_SEED)
    with Processes(tmp_path) as processes:
        assert processes.coordinator().wait(10) == 1
        assert "does not trust this coordinator's signing key" in processes.words("coordinator")
