"""Three nodes on a tiny language model; a fourth joins late, by replay or by a snapshot from the others."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from esnode import begin, snapshot
from esnode.folder import RunFolder
from esnode.tell import silent
from protocol import ledger
from tests import tiny
from tests.runs import Processes, wait_for

PLAN = """
[run]
model = "{model}"
task = "likelihood:{pairs}"
repeatable = true
[run.es]
members = 40
mirrored = true
sigma = 0.0078125
alpha = 0.0078125
[ops]
rounds = 100000
eval_every = 0
snapshot_every = 3
"""
DONORS = ("a", "b", "c")
LATE = "late"


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder with lock and task data for a tiny model, all nodes admitted."""
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    model = tiny.write(tmp_path / "model", hidden_size=64, intermediate_size=128)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "say {k}", "target": "{k}{k}"}}\n' for k in range(10)))
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(model=model, pairs=pairs))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    begin.settle(folder, begin.Request(out=folder.path, plan=plan), silent)
    begin.admit(folder, (*DONORS, LATE))
    return folder


def stop_at(processes: Processes, count: int) -> None:
    """Let the run end after so many rounds."""
    plan = processes.folder / "plan.toml"
    lines = plan.read_text().splitlines()
    lines = [f"rounds = {count}" if line.startswith("rounds = ") else line for line in lines]
    plan.write_text("\n".join(lines) + "\n")


def peers(processes: Processes) -> dict[str, Any]:
    found: dict[str, Any] = processes.status().get("snapshots", {})
    return found


class Spoiler(threading.Thread):
    """Turns one bit of every part of every snapshot over as soon as it lies in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.quit = threading.Event()
        self.seen: set[int] = set()

    def run(self) -> None:
        while not self.quit.wait(0.02):
            for path in snapshot.files(self.folder):
                with contextlib.suppress(OSError):
                    self.spoil(path)

    def spoil(self, path: Path) -> None:
        if path.stat().st_ino in self.seen:
            return
        with snapshot.Reader(path) as reader:
            start, header = reader.manifest.data_start, reader.header
        with path.open("r+b") as file:
            self.seen.add(path.stat().st_ino)
            for place in range(start, start + header.total, header.part_size):
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))


@pytest.mark.timeout(400)
def test_a_fourth_node_joins_by_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow donors, one of them with poisoned files, one killed in the middle; the same weights at the end."""
    folder = made(tmp_path, monkeypatch)
    spoiler = Spoiler(folder.node("a") / "checkpoint")
    with Processes(folder.path) as processes:
        processes.coordinator()
        for name in DONORS:
            # the poisoned one is the quickest: its first part comes before the others have sent all
            processes.node(name, "--peer-port", "0", "--peer-mbit", "2" if name == "a" else "0.4", loader="")
        wait_for(lambda: peers(processes).get("announced"), 150, processes.words("a"))
        spoiler.start()
        processes.node(LATE, "--peer-port", "0", "--catch-up", "snapshot", loader="")
        there = folder.node(LATE) / "checkpoint"
        wait_for(lambda: list(there.glob("incoming-*")), 100, processes.words(LATE))
        time.sleep(0.5)
        processes.kill("b")
        wait_for(lambda: "snapshot loaded" in processes.words(LATE), 100, processes.words(LATE))
        shown = peers(processes)["peers"]
        assert set(shown["a"]["faults"]) == {LATE}, shown
        assert "direct by 1" in shown["c"]["reached"] and shown["c"]["addresses"]
        wait_for(lambda: "snapshot loaded" in peers(processes)["peers"][LATE]["catching_up"], 20)
        at = processes.status()["round"]
        stop_at(processes, at + 6 - at % 3)
        processes.wait_end()
        assert processes.running[LATE].wait(20) == 0, processes.words(LATE)
    spoiler.quit.set()
    chain = ledger.read(folder.ledger).chain
    assert chain.ended
    assert ledger.read(folder.node(LATE) / "node.ledger").chain.tip == chain.tip
    mine, theirs = (snapshot.files(folder.node(name) / "checkpoint")[0] for name in (LATE, "c"))
    assert mine.name == theirs.name == snapshot.file_name(chain.round)
    assert mine.read_bytes() == theirs.read_bytes()
    with snapshot.Reader(mine) as reader:
        assert reader.header.digest == chain.entries[-1].digest
