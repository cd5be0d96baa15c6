"""What a run costs on the TCP stream, against what the counters say and what is promised."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from esnode import duty, joined
from protocol import ledger
from protocol.messages import Kind
from tests.relay import Relay
from tests.runs import Processes, make_folder, wait_for

UNIT_PLAIN, UNIT_CURVE = 220, 256  # Assign + Result + Ack of one unit
COMMIT_PER_MEMBER = 32  # bytes per member and node
IDLE_PER_SECOND = 100  # bytes per node, both directions
HANDSHAKE = 1000  # bytes of one connection's greeting and key exchange
PING_PER_SECOND = 30
IDLE_SECONDS = 10.0


def relayed(folder: Path, plain: bool) -> tuple[Processes, Relay]:
    """A coordinator, one node and the relay between them."""
    extra = ("--plain",) if plain else ()
    processes = Processes(folder)
    processes.coordinator(*extra)
    status = wait_for(processes.status)
    relay = Relay(status["address"])
    processes.node("n1", *extra, "--coordinator", relay.address)
    return processes, relay


def counted(status: dict[str, Any]) -> int:
    """All bytes the coordinator says have passed."""
    return sum(status["wire"]["bytes"]["in"].values()) + sum(status["wire"]["bytes"]["out"].values())


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "curve"])
def test_a_unit_and_a_commit(tmp_path: Path, plain: bool) -> None:
    """N = 30, four chunks a member: the promised sizes, and counters that agree with the stream."""
    make_folder(tmp_path, ("n1",), rounds=5, members=30)
    processes, relay = relayed(tmp_path, plain)
    with processes, relay:
        processes.wait_end()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    units = [json.loads(line) for line in (tmp_path / "units.jsonl").read_text().splitlines()]
    whole = [sum(row["bytes"].values()) for row in units if row["kind"] == Kind.MEMBER]
    assert len(whole) == 5 * 30
    assert 100 < max(whole) <= (UNIT_PLAIN if plain else UNIT_CURVE)
    commits = [row for row in metrics if row["kind"] == "commit"]
    raws = ledger.read(tmp_path / "run.ledger").chain.commits
    total = sum(len(commit.raw) for commit in raws)
    sent = sum(row["bytes_out"].get("Commit", 0) for row in commits)
    assert sent <= COMMIT_PER_MEMBER * 30 * len(raws) + 2000  # roster and score entries travel as Commit too
    assert total / len(raws) / 30 <= COMMIT_PER_MEMBER - 1
    known = sum(sum(row["bytes_in"].values()) + sum(row["bytes_out"].values()) for row in commits)
    assert 0 < relay.total - known <= HANDSHAKE + 2500, (
        "uncounted: the handshake, the last probe, END and Bye"
    )
    print(f"unit {max(whole)} B, commit {total / len(raws) / 30:.1f} B per member, stream {relay.total} B")


@pytest.mark.parametrize("paused", [False, True], ids=["working", "paused"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "curve"])
def test_an_idle_node(tmp_path: Path, plain: bool, paused: bool) -> None:
    """A node busy with one long unit, or paused, says that it is there; the counters know all but pings."""
    lock = make_folder(tmp_path, ("n1",), task_options={"seconds": 600.0})
    if paused:
        joined.write(tmp_path, joined.Joined(lock.run_id, ("tcp://127.0.0.1:1",), {"n1": True}))
        duty.switch(tmp_path, True)
    processes, relay = relayed(tmp_path, plain)
    with processes, relay:
        state = "paused" if paused else "ready"
        wait_for(lambda: any(n["state"] == state for n in processes.status()["nodes"]))
        time.sleep(0.5)
        before, began, known = relay.total, time.monotonic(), counted(processes.status())
        time.sleep(IDLE_SECONDS)
        after, rate = relay.total, (relay.total - before) / (time.monotonic() - began)
        pings = after - before - (counted(processes.status()) - known)
    print(f"{rate:.0f} B/s, of which {pings / IDLE_SECONDS:.0f} pings; {before - known} B for the handshake")
    assert 5 < rate <= IDLE_PER_SECOND
    assert 0 <= pings <= PING_PER_SECOND * IDLE_SECONDS
    assert 0 < before - known <= HANDSHAKE
