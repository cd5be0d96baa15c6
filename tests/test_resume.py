"""A node that was killed goes on from its own snapshot, or from the base when the file is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from esnode import snapshot
from protocol import ledger
from tests.runs import PLAN, Processes, make_folder, wait_for

ROUNDS = 60
SLOW = {"task_options": {"seconds": 0.04}}


def snapshots(folder: Path) -> list[Path]:
    return snapshot.files(folder / "nodes" / "n1" / "checkpoint")


@pytest.mark.parametrize("damaged", [False, True])
def test_killed_and_started_again(tmp_path: Path, damaged: bool) -> None:
    make_folder(tmp_path, ("n1",), ROUNDS, **SLOW)
    (tmp_path / "plan.toml").write_text(PLAN.format(rounds=ROUNDS) + "snapshot_every = 2\n")
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: len(snapshots(tmp_path)) == 2, what=processes.words("n1"))
        processes.kill("n1")
        for path in snapshots(tmp_path) if damaged else ():
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        processes.node("n1")
        word = "is damaged" if damaged else "resumed from a snapshot behind entry"
        wait_for(lambda: word in processes.words("n1"))
        at = processes.status()["round"]
        plan = tmp_path / "plan.toml"
        plan.write_text(plan.read_text().replace(f"rounds = {ROUNDS}", f"rounds = {at + 2}"))
        processes.wait_end()
    chain = ledger.read(tmp_path / "run.ledger").chain
    assert chain.ended
    roots = {entry.body.snapshot for entry in chain.commits} - {b""}
    assert roots, "a lone node's roots enter the chain"
