"""What a user may get wrong in any command: places that will not do, numbers that are none."""

from __future__ import annotations

import errno
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from esnode import memory, rebuild
from esnode.cli import main as front
from esnode.cli import options
from esnode.template import template
from tests import commands
from tests.test_cli import ROOT, every_command
from tests.test_rebuild import Case

SHAPES = ("none/x", "folder", "file/x", "/proc/x")  # below nothing, a folder, below a file, no place for any
# Every path that a command takes, as a command line: @ is the place, PLAN, RUN, MODEL what is sound.
PLACES = {
    "run plan": "run --plan @ --out new",
    "run out": "run --plan PLAN --model /nowhere --out @",
    "run code": "run --plan PLAN --model /nowhere --out new --code @",
    "status folder": "status @",
    "plan show file": "plan show @",
    "plan lock file": "plan lock @",
    "plan lock out": "plan lock PLAN --out @",
    "plan lock data": "plan lock PLAN --out new --data @",
    "plan lock code": "plan lock PLAN --out new --code @",
    "plan amend folder": "plan amend @ --alpha 0.1 --from-round 2",
    "verify ledger": "verify @",
    "show ledger": "show @",
    "show to": "show RUN --plot @",
    "export ledger": "export @ --to new",
    "export to": "export RUN --base MODEL --to @",
    "evaluate code": "evaluate MODEL --task python:task.py --code @",
    "fork ledger": "fork @ --plan PLAN --out new",
    "fork plan": "fork RUN --base MODEL --plan @ --out new",
    "fork out": "fork RUN --base MODEL --plan PLAN --out @",
    "fork code": "fork RUN --base MODEL --plan PLAN --out new --code @",
    "bench node plan": "bench node --plan @",
    "bench node trace": "bench node --plan PLAN --members 1 --trace @ --json",
    "bench node code": "bench node --plan PLAN --members 1 --code @ --json",
    "coordinator serve plan": "coordinator serve @ --data new",
    "coordinator serve data": "coordinator serve /nowhere --data @",
    "coordinator serve task_data": "coordinator serve /nowhere --data new --task-data @",
    "coordinator serve code": "coordinator serve /nowhere --data new --code @",
    "invite folder": "invite @",
    "nodes list folder": "nodes list @",
    "nodes allow folder": "nodes allow @ 00",
    "nodes revoke folder": "nodes revoke @ a",
    "join task_code": "join esnode1-AAAA --task-code @",
    "join data": "join --data @ --run aa",
    "pause data": "pause --data @",
    "resume data": "resume --data @",
    "node run_": "node --run @ --wait 0",
    "node code": "node --run /nowhere --wait 0 --code @",
    # and those that are no paths to click
    "join invite": "join @",
    "verify base": "verify RUN --base @",
    "evaluate what": "evaluate @ --task short-answers",
    "evaluate file": "evaluate MODEL --task file:@",
    "evaluate python": "evaluate MODEL --task python:@ --code .",
    "coordinator serve recover": "coordinator serve --rounds 2 --data new --recover-from @",
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    made = Case(tmp_path_factory.mktemp("case"))
    plan = made.path.parent.parent / "plan.toml"
    plan.write_text(template("short-answers", str(made.model)))
    return made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working directory, where nothing that a command does to its process outlives the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(front, "keep_interrupts", lambda: None)
    monkeypatch.setattr("esnode.departure.at_once", lambda: None)
    for name in front.PLACES:
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("precious")
    (tmp_path / "file").write_text("precious")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and stderr of a command, in this process."""
    with pytest.raises(SystemExit) as exit:
        front.main(words)
    return int(exit.value.code or 0), capsys.readouterr().err


def filled(words: str, case: Case) -> list[str]:
    """The words of a command with what is sound put in."""
    sound = {"PLAN": case.path.parent.parent / "plan.toml", "RUN": case.path.parent, "MODEL": case.model}
    return [str(sound.get(word, word)) for word in words.split()]


def is_path(option: click.Parameter) -> bool:
    return isinstance(option.type, click.Path)


def test_every_path_of_every_command_is_tried() -> None:
    every = {(*words, o.name) for words in every_command() for o in commands.find(words).params if is_path(o)}
    assert {" ".join(map(str, words)) for words in every} <= set(PLACES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in PLACES if not name.startswith("node ")])
def test_a_place_that_will_not_do_is_refused_in_words(
    name: str, shape: str, case: Case, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = said(capsys, *filled(PLACES[name].replace("@", shape), case))
    assert code in (0, 1, 2) and "Traceback" not in err, err  # 0: nothing hinders a folder in a new one
    assert code == 0 or err.splitlines()[-1 - (code == 2)].startswith("esnode: "), err
    assert (here / "file").read_text() == (here / "folder" / "mine").read_text() == "precious"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["node run_", "node code"])
def test_a_node_is_refused_in_words_too(name: str, shape: str, here: Path) -> None:
    words = PLACES[name].replace("@", shape).split()
    command = [sys.executable, "-m", "esnode", *words]  # a process of its own: a node sets up its logging
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2) and done.stderr.startswith("esnode: "), done.stderr


@pytest.mark.parametrize("words", ["plan lock PLAN --out", "show RUN --plot", "bench node --trace"])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_where_a_file_goes_is_looked_at_before_the_work(
    words: str, shape: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that PLAN and RUN name is there, and nobody has looked."""
    code, err = said(capsys, *words.split(), shape)
    assert code == 2 and ("is no folder" in err or "is a directory" in err), err


def test_only_places_that_were_named_are_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(number: int, path: str, *words: str) -> str | None:
        return front.explain(OSError(number, "", path), words)

    for number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        assert of(number, "/our/own/file", "show", "/a/b") is None
        assert "/a/b/c" in (of(number, "/a/b/c", "show", "/a/b") or "")
    for word in ("--out=/a/b", "file:/a/b", "/a/b/c/d"):
        assert of(errno.ENOENT, "/a/b/c", word), word
    assert front.explain(OSError(errno.ENOENT, ""), ("/a",)) is None
    assert of(errno.ENOENT, "/a", "/") and of(errno.ENOENT, "/a", "/a")
    monkeypatch.setenv("ESNODE_CONFIG", "/conf")
    assert of(errno.ENOTDIR, "/conf/signing.key") and not of(errno.ENOTDIR, "/config/signing.key")


@pytest.mark.parametrize(
    ("path", "words", "named"),
    [
        ("runs/mine/journal.sqlite", "run", False),
        ("4711/x", "show 4", False),
        ("run/x", "run --rounds 4", False),
        ("plan/x", "plan new", False),
        ("new/x", "plan new", False),
        ("runs.new", "run --out run", False),
        ("run/x", "status run", True),
        ("run.new", "show 4 --plot run", True),
        ("run.new/x", "run --out run.new", True),
        ("run/x", "run --out run", True),
        ("new/x", "plan show new", True),
        ("4/x", "show 4", True),
    ],
)
def test_a_place_is_named_as_a_whole_and_by_no_name_of_a_command(
    path: str, words: str, named: bool, here: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A file of ours that is missing beside such a place is a bug of ours, with its trace."""

    def fails(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "", str(here / path))

    monkeypatch.setattr(front.cli, "main", fails)
    code, err = said(capsys, *words.split())
    assert (code, "Traceback" in err) == ((1, False) if named else (70, True)), err


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "words",
    [
        "verify RUN --base MODEL",
        "export RUN --base MODEL --to new",
        "fork RUN --round 1 --base MODEL --plan PLAN --out new",
        "evaluate RUN --base MODEL --task short-answers",
        "evaluate MODEL --task short-answers",
        "bench node --plan PLAN",
    ],
)
def test_what_holds_a_whole_model_asks_for_memory_first(
    words: str, case: Case, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a tensor was read into the master")

    monkeypatch.setattr("esnode.memory.available", lambda *_: 1000)
    monkeypatch.setattr("esnode.state.master_of", loaded)
    code, err = said(capsys, *filled(words, case))
    assert code == 1 and re.search(r"needs 0\.\d GB of memory", err.splitlines()[-1]), err
    assert not (here / "new").exists()


def test_memory_is_told_before_it_is_taken(case: Case) -> None:
    heard: list[str] = []
    rebuild.at(
        case.path, base=str(case.model), runnable=False, tell=lambda what, done, total: heard.append(what)
    )
    place = next(place for place, what in enumerate(heard) if what.startswith("memory: 0.0 GB needed"))
    assert heard[:place] == ["loading the base model"]


def test_a_bare_state_needs_its_master_and_one_tensor(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded where just that is free, refused where it is a byte less."""
    sizes = [(math.prod(spec.shape), spec.trained) for spec in case.lock.manifest]
    needed = 4 * sum(size for size, trained in sizes if trained) + 4 * max(sizes)[0]
    monkeypatch.setattr("esnode.memory.available", lambda *_: needed)
    assert rebuild.at(case.path, 0, str(case.model), runnable=False).round == 0
    monkeypatch.setattr("esnode.memory.available", lambda *_: needed - 1)
    with pytest.raises(memory.MemoryShort, match="on a machine with more"):
        rebuild.at(case.path, 0, str(case.model), runnable=False)


# ---------------------------------------------------------------- numbers


def numbers() -> list[tuple[str, ...]]:
    """("plan", "amend", "--alpha"), ...: every option that takes a number with a point."""
    found: list[tuple[str, ...]] = []
    for words in every_command():
        for option in commands.find(words).params:
            if isinstance(option.type, click.types.FloatParamType):
                found.append((*words, option.opts[0]))
    return found


@pytest.mark.parametrize("words", numbers(), ids=" ".join)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_is_finite(words: tuple[str, ...], number: str) -> None:
    option = next(one for one in commands.find(words[:-1]).params if words[-1] in one.opts)
    with pytest.raises(click.BadParameter):
        option.type.convert(number, option, None)
    assert isinstance(option.type, options.Number) and option.type.convert("0.5", option, None) == 0.5


def test_the_command_is_a_module_too(here: Path) -> None:
    command = [sys.executable, "-m", "esnode", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("esnode, version ")


# ---------------------------------------------------------------- a run that does not begin


DAMAGED = {
    "config.json": "{",
    "generation_config.json": "{",
    "tokenizer_config.json": "{",
    "tokenizer.json": "{",
}


def damaged(case: Case, to: Path, file: str, content: str) -> Path:
    folder = shutil.copytree(case.model, to / "damaged")
    (folder / file).write_text(content)
    return folder


@pytest.mark.parametrize("file", DAMAGED)
@pytest.mark.parametrize("command", ["run --model DAMAGED --out new", "plan lock PLAN --out new"])
def test_a_damaged_file_of_the_model_is_one_sentence_and_leaves_nothing(
    command: str, file: str, case: Case, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(case, here, file, DAMAGED[file])
    (here / "PLAN").write_text(template("short-answers", str(folder)))
    code, err = said(capsys, *command.replace("DAMAGED", str(folder)).split())
    assert code == 1 and err.splitlines()[-1].startswith("esnode: ") and str(folder) in err, err
    assert not (here / "new").exists()
    if command.startswith("run"):  # and the folder can be had for another model
        code, err = said(capsys, "run", "--model", "/nowhere", "--out", "new")
        assert "there is no folder /nowhere" in err


@pytest.mark.parametrize("value", ['"x"', "[1, null]", "2.5", "true"])
def test_an_end_of_text_that_is_no_whole_number_is_named(
    value: str, case: Case, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(case, here, "generation_config.json", f'{{"eos_token_id": {value}}}')
    code, err = said(capsys, "run", "--model", str(folder), "--out", "new")
    assert code == 1 and "eos_token_id is" in err and "which is no whole number" in err, err


@pytest.mark.parametrize("error", [RuntimeError("a bug of ours"), OSError(errno.ENOSPC, "full")])
def test_whatever_stops_a_run_before_its_lock_leaves_no_folder(
    error: Exception, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise error

    for place in ("esnode.locking.resolve", "esnode.folder.require_space"):
        with monkeypatch.context() as patch:
            patch.setattr(place, stop)
            code, _ = said(capsys, "run", "--out", "new")
        assert code in (1, 70) and not (here / "new").exists()
