"""Processes of a local run and the folder they share: nothing outlives its parent, nothing runs twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from esnode import folder
from esnode.children import MAX_CRASHES, Child, ChildFailed, Children
from esnode.folder import FolderError, RunFolder
from protocol.terms import EXIT_YIELDED
from tests.runs import ROOT, alive, wait_for

PATIENCE = 20.0


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Path]:
    """A folder of one-file programs that a child can be told to run."""
    place = tmp_path / "modules"
    place.mkdir()
    yield place


def write(place: Path, name: str, text: str) -> None:
    (place / f"{name}.py").write_text(text)


def child(place: Path, module: str, *arguments: str) -> Child:
    path = os.pathsep.join([str(place), str(ROOT)])
    return Child("worker", module, arguments, place / "worker.log", {"PYTHONPATH": path})


SLEEPER = (
    "import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(600)\n"
)
PARENT = """
import pathlib, subprocess, sys, time
from esnode.children import Child
place = pathlib.Path(sys.argv[1])
child = Child("worker", "nested", (str(place),), place / "worker.log", {"PYTHONPATH": sys.argv[2]})
child.start()
time.sleep(600)
"""
NESTED = """
import os, pathlib, subprocess, sys, time
place = pathlib.Path(sys.argv[1])
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(place / "inner.new").write_text(str(inner.pid))
(place / "inner.new").rename(place / "inner")
(place / "outer.new").write_text(str(os.getpid()))
(place / "outer.new").rename(place / "outer")
time.sleep(600)
"""


def test_children_and_grandchildren_die_with_a_killed_parent(modules: Path) -> None:
    write(modules, "nested", NESTED)
    path = os.pathsep.join([str(modules), str(ROOT)])
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(modules), path], cwd=ROOT)
    try:
        wait_for((modules / "outer").exists)
        processes = [int((modules / name).read_text()) for name in ("outer", "inner")]
        assert all(map(alive, processes))
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(map(alive, processes)))


def test_a_child_stops_when_asked(modules: Path, tmp_path: Path) -> None:
    write(modules, "sleeper", SLEEPER)
    mark = tmp_path / "pid"
    children = Children()
    children.add(child(modules, "sleeper", str(mark)))
    wait_for(mark.exists)
    children.stop(grace=PATIENCE)
    assert children.all["worker"].code == -signal.SIGTERM


def test_a_deaf_child_is_killed(modules: Path, tmp_path: Path) -> None:
    write(modules, "deaf", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER)
    mark = tmp_path / "pid"
    children = Children()
    children.add(child(modules, "deaf", str(mark)))
    wait_for(mark.exists)
    children.stop(grace=0.2)
    assert children.all["worker"].code == -signal.SIGKILL


def test_a_crash_is_restarted_with_growing_pauses_and_then_given_up(modules: Path) -> None:
    write(modules, "crash", "raise ValueError('the disk of the model is on fire')\n")
    children = Children()
    children.add(child(modules, "crash"))
    worker = children.all["worker"]
    now, pauses = 100.0, []
    for _ in range(MAX_CRASHES):
        assert worker.process
        worker.process.wait()
        children.look(now)
        assert worker.retry_at is not None and worker.code is None
        pauses.append(worker.retry_at - now)
        children.look(now + 0.5 * pauses[-1])
        assert worker.retry_at is not None, "not before its time"
        now = worker.retry_at
        children.look(now)
    assert pauses == [1.0, 2.0, 4.0]
    assert worker.process
    worker.process.wait()
    with pytest.raises(ChildFailed, match="the disk of the model is on fire"):
        children.look(now)


def test_old_crashes_are_forgotten(modules: Path) -> None:
    write(modules, "crash", "raise ValueError('again')\n")
    children = Children()
    children.add(child(modules, "crash"))
    worker = children.all["worker"]
    for hour in range(MAX_CRASHES + 2):
        assert worker.process
        worker.process.wait()
        children.look(3600.0 * hour)
        children.look(3600.0 * hour + 1.0)
    assert children.restarts == MAX_CRASHES + 2
    assert worker.process
    worker.process.wait()


@pytest.mark.parametrize("code", [1, EXIT_YIELDED])
def test_a_refusal_is_not_retried_and_its_sentence_is_shown(modules: Path, code: int) -> None:
    said = "esnode: the moon is too far away"
    write(modules, "refuse", f"import sys\nprint('noise\\n{said}', flush=True)\nsys.exit({code})\n")
    children = Children()
    children.add(child(modules, "refuse"))
    worker = children.all["worker"]
    assert worker.process
    worker.process.wait()
    with pytest.raises(ChildFailed, match=r"^worker stopped: the moon is too far away$"):
        children.look(0.0)


# ---------------------------------------------------------------- the folder


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    place = RunFolder(tmp_path)
    held = folder.occupy(place)
    script = (
        "import sys, pathlib; from esnode import folder\n"
        "folder.occupy(folder.RunFolder(pathlib.Path(sys.argv[1])))"
    )
    second = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"in use by process {os.getpid()}" in second.stderr
    os.close(held)
    os.close(folder.occupy(place))


def test_a_folder_is_taken_only_when_the_children_of_a_killed_run_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RunFolder(tmp_path)
    descriptor = folder.occupy(place)
    inherits = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(descriptor,)
    )
    os.close(descriptor)
    assert folder.busy(place)
    monkeypatch.setattr(folder, "STALE_WAIT", 0.3)
    with pytest.raises(FolderError, match="processes of an earlier run"):
        folder.occupy(place)
    inherits.kill()
    inherits.communicate()
    os.close(folder.occupy(place))
    assert not folder.busy(place)


def test_where_a_run_may_begin(tmp_path: Path) -> None:
    assert folder.create(tmp_path / "new" / "run").path.is_dir()
    assert folder.create(tmp_path / "new" / "run").path.is_dir(), "an empty folder will do"
    (tmp_path / "new" / "run" / "plan.toml.new").write_text("[run]")
    assert folder.create(tmp_path / "new" / "run").path.is_dir(), "what a kill in the first moment leaves"
    (tmp_path / "file").write_text("x")
    with pytest.raises(FolderError, match="is a file"):
        folder.create(tmp_path / "file")
    with pytest.raises(FolderError, match="cannot be created"):
        folder.create(tmp_path / "file" / "below")
    with pytest.raises(FolderError, match="no run folder"):
        folder.create(tmp_path)
    (tmp_path / "plan.toml").write_text("")
    with pytest.raises(FolderError, match=r"already holds a run.*--resume"):
        folder.create(tmp_path)
    assert folder.open_run(tmp_path).path == tmp_path
    with pytest.raises(FolderError, match="holds no run"):
        folder.open_run(tmp_path / "new")
    with pytest.raises(FolderError, match="there is no folder"):
        folder.open_run(tmp_path / "nowhere")


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    folder.write_file(path, b"old")
    folder.write_file(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_full_disk_is_noticed_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="is full"):
        folder.require_space(RunFolder(tmp_path), needed=1 << 60)
