"""Real nodes on a tiny language model: the default loader, two kernels, one ledger with their bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esnode import begin, devices, nodeoptions, rebuild, workshop
from esnode.engines.interface import MemoryPlan
from esnode.folder import RunFolder
from esnode.tell import silent
from protocol import ledger
from tests import tiny
from tests.runs import Processes, wait_for

PLAN = """
[run]
model = "{model}"
task = "short-answers"
[run.es]
members = 4
mirrored = true
sigma = 0.0078125
alpha = 0.0078125
[run.prompts]
per_round = 8
[ops]
rounds = 2
eval_every = 2
"""


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder with lock and task data for a tiny model, two nodes admitted."""
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    model = tiny.write(tmp_path / "model")
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(model=model))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    begin.settle(folder, begin.Request(out=folder.path, plan=plan), silent)
    begin.admit(folder, ("cpu", "reference"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return made(tmp_path_factory.mktemp("real"), monkeypatch)


def test_two_kernels_one_ledger(folder: RunFolder) -> None:
    with Processes(folder.path) as processes:
        for name in ("cpu", "reference"):
            processes.node(name, "--backend", name, loader="")
        wait_for(lambda: all("ready" in processes.words(n) for n in ("cpu", "reference")))
        processes.coordinator()
        processes.wait_end()
        for name in ("cpu", "reference"):
            assert processes.running[name].wait(10) == 0, processes.words(name)
            assert f"{name} on cpu" in processes.words(name)
    reading = ledger.read(folder.ledger)
    assert reading.ended
    assert {name for _, name in reading.chain.roster.values()} == {"cpu", "reference"}
    rebuilt = rebuild.at(folder.ledger, runnable=False)
    assert rebuilt.digest == reading.chain.entries[-1].digest


def test_a_node_with_other_task_data_never_joins(folder: RunFolder) -> None:
    text = folder.task.read_bytes()
    (folder.node("cpu") / "node.ledger").unlink(missing_ok=True)  # it holds the END of the run before
    folder.task.write_bytes(text.replace(b"Paris", b"Lyons"))
    assert folder.task.read_bytes() != text
    try:
        with Processes(folder.path) as processes:
            assert processes.node("cpu", loader="").wait(60) == 1
            line = processes.words("cpu").splitlines()[-1]
            assert line.startswith("esnode: ") and "is not the run's" in line
    finally:
        folder.task.write_bytes(text)


def test_two_nodes_without_gpus_option_do_not_meet_on_one(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine takes the first GPUs, as many as it has ranks; of a lane, the node has claimed them."""
    monkeypatch.setenv("ESNODE_DATA", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(workshop.accelerators, "device", lambda: "cuda")
    monkeypatch.setattr(workshop.accelerators, "obstacle", lambda: None)
    monkeypatch.setattr(workshop, "pick", lambda *_: None)
    monkeypatch.setattr(workshop, "selftest_digest", lambda *_: b"")
    monkeypatch.setattr(workshop, "engine_loader", lambda _: planning)
    told: list[int] = []

    def planning(*_: Any, report: Any, **__: Any) -> None:
        report(MemoryPlan(1, 1, 1, 10, ranks=2))
        raise NotImplementedError("far enough")

    options = nodeoptions.parse(["--run", str(folder.path), "--name", "cpu"])
    lock = nodeoptions.read_lock(folder.path)
    with pytest.raises(NotImplementedError):
        workshop.load(options, lock)
    other = devices.claim(["cuda:1"], "node other of the run in /runs/b (process 12)")
    with pytest.raises(devices.DeviceError, match="cuda:1 is used by node other of the run in /runs/b"):
        workshop.load(options, lock)
    with pytest.raises(NotImplementedError):
        workshop.load(replace(options, planned=lambda host, total: told.append(total)), lock)
    assert told == [6]
    for file in other:
        file.close()
