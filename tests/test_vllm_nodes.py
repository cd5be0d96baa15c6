"""Nodes with vLLM in a run beside a transformers node: real processes, a tiny model, one engine killed.

The machines share nothing but the loopback, and wait for each other paused: each takes part in every round.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esnode import joined
from protocol import ledger
from tests import tiny
from tests.runs import wait_for
from tests.test_join_run import World, pairs
from tests.vllm_check import WIDE

PATIENCE = 280.0
ROUNDS = 60  # about a second each

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


class Mixed(World):
    """A run of a transformers node "a" and a node "b" on vLLM."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.model = tiny.write(path / "wide", **WIDE)

    def begin(self, *words: str) -> None:
        """Both machines are ready, and paused."""
        self.coordinator = self.serve("c", pairs(self.path / "pairs.jsonl"), ROUNDS)
        self.nodes = {}
        for name, engine in (("a", ()), ("b", ("--engine", "vllm", *words))):
            self.done(name, "pause")
            named = ("--name", name, "--threads", "2", "--model", str(self.model))
            self.nodes[name] = self.start(name, "join", self.invite("c"), *named, *engine)
        for name in self.nodes:
            self.until(lambda name=name: "ready in" in self.log(name))  # type: ignore[misc]

    def until(self, condition: Callable[[], object]) -> None:
        """Wait while every process of the run goes on."""

        def found() -> object:
            for name, process in self.nodes.items():
                assert process.poll() in (None, 0), self.log(name)
            return condition()

        wait_for(found, PATIENCE)

    def lanes(self) -> list[int]:
        """The processes of b's lanes."""
        return [k for k in _children(self.nodes["b"].pid) if "laneprocess" in _command(k)]

    def quiet(self) -> None:
        """What vLLM and its processes say is in a file, not between the node's lines."""
        said = self.log("b")
        assert not re.search(r"Triton is|Warning|resource_tracker|INFO|WARNING", said), said
        place = joined.find(None, self.path / "b" / "data") / "nodes" / "b" / "vllm.log"
        assert "Warning" in place.read_text()

    def busy(self, node: str) -> bool:
        """Whether a node has measured something."""
        units = self.path / "c" / "run" / "units.jsonl"
        rows = units.read_text() if units.exists() else ""
        return any(json.loads(row)["node"] == node for row in rows.rpartition("\n")[0].splitlines())

    def finish(self) -> None:
        """The run ends, every node's ledger is the run's, and replay finds every D."""
        self.until(lambda: self.coordinator.poll() is not None)
        assert self.coordinator.wait() == 0, self.log("c")
        assert all(process.wait(30) == 0 for process in self.nodes.values()), self.log("b")
        whole = self.path / "c" / "run" / "run.ledger"
        shown = self.done("v", "verify", str(whole), "--base", str(self.model))
        assert f"{ROUNDS} of {ROUNDS} rounds" in shown and "all equal" in shown
        assert ledger.read(whole).ended and not re.search("differ|dispute|repaired", self.log("c"))
        for name in self.nodes:
            place = joined.find(None, self.path / name / "data")
            assert (place / "nodes" / name / "node.ledger").read_bytes() == whole.read_bytes()


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    made = Mixed(tmp_path)
    yield made
    made.close()


def _children(process: int) -> list[int]:
    """Processes below this one, theirs included."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_children(child)]
    return found


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def test_two_ranks_beside_transformers_and_one_rank_is_killed(mixed: Mixed) -> None:
    mixed.begin("--tp", "2")
    mixed.done("a", "resume")
    mixed.done("b", "resume")
    mixed.until(lambda: mixed.busy("a") and mixed.busy("b"))
    mixed.done("a", "pause")  # b alone is left
    lane = mixed.lanes()[0]
    ranks = [k for k in _children(lane) if "Worker_TP" in _command(k)]
    assert len(ranks) == 2, [_command(k) for k in _children(lane)]
    os.kill(ranks[1], signal.SIGKILL)
    mixed.until(lambda: "ended by itself" in mixed.log("b"))
    before = mixed.round("c")
    mixed.until(lambda: mixed.round("c") > before)  # its unit was run again by the engine that came back
    mixed.done("a", "resume")
    mixed.finish()
    mixed.quiet()


def test_two_engines_over_one_master_beside_transformers_and_one_is_killed(mixed: Mixed) -> None:
    mixed.begin("--lanes", "2", "--master", "host")
    reader = re.search(r"lane (\d) \(cpu\) reads the master that lane \d \(cpu\) leads", mixed.log("b"))
    assert reader is not None
    mixed.done("b", "resume")
    mixed.until(lambda: mixed.busy("b"))
    os.kill(mixed.lanes()[int(reader[1])], signal.SIGKILL)
    mixed.until(lambda: "has ended: killed by SIGKILL" in mixed.log("b"))
    before = mixed.round("c")
    mixed.until(lambda: mixed.round("c") > before)
    mixed.done("a", "resume")
    mixed.finish()
    mixed.quiet()
