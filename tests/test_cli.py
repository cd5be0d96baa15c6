"""The command line: what it teaches, how fast it answers, and what every kind of wrong input gets."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import esnode
from esnode import joined
from esnode.cli import main as front
from protocol import ledger, logfile
from protocol.errors import UserError
from tests import commands, ledgers
from tests.runs import toy_lock

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "numba", "matplotlib", "safetensors")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "esnode.cli.main", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(*words: str, code: int = 1, **environment: str) -> str:
    """The sentence a refused command gives: at most two lines on stderr, nothing else, no traceback."""
    done = run(*words, **environment)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("esnode: ") and len(lines) <= 2, done.stderr
    return done.stderr


# ---------------------------------------------------------------- what reaches the processes


def test_node_takes_what_join_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from esnode import daemon, nodeoptions

    taken: list[nodeoptions.Options] = []
    monkeypatch.setattr(daemon, "main", lambda words: taken.append(nodeoptions.parse(words)) or 0)
    monkeypatch.setattr("esnode.departure.at_once", lambda: None)
    words = ["node", "--run", "runs/x", "--name", "a", "--peer-port", "0", "--catch-up", "snapshot"]
    assert CliRunner().invoke(front.cli, words).exit_code == 0
    assert CliRunner().invoke(front.cli, words[:5]).exit_code == 0
    assert [(one.peer_port, one.catch_up) for one in taken] == [(0, "snapshot"), (None, "auto")]


def test_ranks_without_vllm_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    for command in (("run", "--out", "x"), ("join", "--data", "x"), ("node", "--run", "x")):
        said = refused(*(word.replace("x", str(tmp_path / "x")) for word in command), "--tp", "2")
        assert "--tp 2 needs --engine vllm" in said and not (tmp_path / "x").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_a_missing_vllm_is_said_before_anything_is_made(tmp_path: Path) -> None:
    for command in (("run", "--out", "x"), ("join", "--data", "x"), ("node", "--run", "x")):
        said = refused(*(word.replace("x", str(tmp_path / "x")) for word in command), "--engine", "vllm")
        assert "vLLM is not installed here" in said and not (tmp_path / "x").exists()


def test_run_takes_the_engine_options_of_join(monkeypatch: pytest.MonkeyPatch) -> None:
    from esnode import accelerators, begin

    taken: list[begin.Request] = []
    monkeypatch.setattr("esnode.run.run", lambda request, console: taken.append(request) or 0)
    monkeypatch.setattr(accelerators, "plausible", lambda: False)
    monkeypatch.setattr("esnode.engines.vllm_start.require_supported", lambda: "0.32.0")
    words = ["run", "--engine", "vllm", "--tp", "2", "--lanes", "3", "--master", "host", "--backend", "cpu"]
    for given in (words, ["run"], ["run", "--nodes", "3", "--threads", "2"]):
        done = CliRunner().invoke(front.cli, given)
        assert done.exit_code == 0, done.output
    lanes, plain, three = taken
    assert (lanes.nodes, lanes.lanes) == (1, (("cpu",) * 3,))
    assert set(zip(lanes.node_words[::2], lanes.node_words[1::2], strict=True)) == {
        ("--tp", "2"), ("--engine", "vllm"), ("--master", "host"), ("--backend", "cpu")
    }  # fmt: skip
    assert sorted(lanes.typed) == sorted((*lanes.node_words, "--lanes", "3"))
    assert (plain.nodes, plain.threads, plain.lanes, plain.node_words, plain.typed) == (
        2,
        1,
        ((), ()),
        (),
        (),
    )
    assert (three.nodes, three.threads) == (3, 2)


def test_serve_limits_the_relay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import logging

    from coordinator import options, relaychild
    from esnode import serve as serving

    taken: list[float] = []
    place = serving.RunFolder(tmp_path)
    monkeypatch.setattr(serving, "take", lambda order: (place, -1))
    monkeypatch.setattr(serving, "settle", lambda place, order, tell: None)

    def become(place: serving.RunFolder, _descriptor: int, words: list[str]) -> None:
        taken.append(options.parse(["--data", str(place.path), *words]).relay_mbit)

    monkeypatch.setattr(serving, "become", become)
    words = ["coordinator", "serve", "--data", str(tmp_path)]
    for more in ((), ("--relay-mbit", "2.5")):
        assert CliRunner().invoke(front.cli, [*words, *more]).exit_code == 0
    assert taken == [0.0, 2.5]
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> None:
        started.append(command)
        raise OSError

    monkeypatch.setattr("subprocess.Popen", start)
    child = relaychild.RelayChild(tmp_path, "tcp://127.0.0.1:0", logging.getLogger("relay"), 2.5)
    with pytest.raises(OSError):
        child.look(0.0)
    assert started[0][-2:] == ["--mbit", "2.5"]


# ---------------------------------------------------------------- help


def test_help_teaches_the_first_commands() -> None:
    shown = CliRunner().invoke(front.cli, ["--help"]).output
    for words in ("esnode run --resume", "esnode verify", "esnode plan new", "First commands", "seeds"):
        assert words in shown
    assert "\b" not in shown
    for name, verb in front.VERBS.items():
        assert f"  {name} " in shown and verb.summary in shown


def every_command() -> list[tuple[str, ...]]:
    """("run",), ("plan", "new"), ...: whatever can be called."""
    found: list[tuple[str, ...]] = []
    for name in front.VERBS:
        command = front.cli.get_command(click.Context(front.cli), name)
        inner = command.commands if isinstance(command, click.Group) else {"": command}
        found += [(name, *filter(None, [below])) for below in inner]
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_every_command_has_help_with_an_example(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(front.cli, [*words, "--help"])
    assert shown.exit_code == 0, shown.output
    assert "\b" not in shown.output, "click's mark stands at the beginning of a paragraph only"
    assert "None" not in shown.output
    assert "Example" in shown.output and f"esnode {' '.join(words)}" in shown.output
    for line in re.findall(r"^ +(esnode .*)$", shown.output, re.MULTILINE):
        commands.named(shlex.split(line.partition(" > ")[0])[1:])


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_every_option_is_explained_with_its_default(words: tuple[str, ...]) -> None:
    for option in commands.find(words).params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, option.name
            given = option.default not in (None, (), False) and isinstance(option.default, str | int | float)
            assert not given or option.show_default or "default" in option.help, option.name


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom esnode.cli.main import VERBS, cli\n"
        "for words in (['--help'], ['--version'], *([name, '--help'] for name in VERBS)):\n"
        "    assert CliRunner().invoke(cli, words).exit_code == 0, words\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
    times = []
    for _ in range(3):  # the best of three: other work on this machine is not the command's fault
        began = time.perf_counter()
        assert run("--help").returncode == 0
        times.append(time.perf_counter() - began)
    assert min(times) < 0.5


def test_version() -> None:
    assert run("--version").stdout == f"esnode, version {esnode.__version__}\n"


# ---------------------------------------------------------------- errors and exit codes


def test_an_unknown_command_names_the_nearest() -> None:
    assert refused("rnu", code=2) == (
        "esnode: there is no command 'rnu'; did you mean 'run'?\nTry: esnode --help\n"
    )


@pytest.mark.parametrize("group", [(), ("nodes",), ("plan",)])
def test_a_command_that_lacks_its_verb_is_answered_with_help(group: tuple[str, ...]) -> None:
    """And with nothing else: it is no error that needs a hint."""
    done = run(*group)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == run(*group, "--help").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--nodes", "0"),
        ("run", "--rounds", "many"),
        ("run", "--seed", "-1"),
        ("run", "--speed", "11"),
        ("export", "some.ledger"),
        ("verify",),
    ],
)
def test_wrong_usage_is_exit_code_2(words: tuple[str, ...]) -> None:
    assert f"Try: esnode {words[0]} --help" in refused(*words, code=2)


def test_an_address_is_looked_at_before_anything_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for option in ("--bind", "--relay"):
        shown = refused("coordinator", "serve", "plan.toml", "--data", str(folder), option, "5555", code=2)
        assert f"{option}: '5555' is no address; it should look like tcp://HOST:PORT" in shown
    assert not folder.exists()


def test_an_amendment_of_nothing_is_wrong_usage(tmp_path: Path) -> None:
    shown = refused("plan", "amend", str(tmp_path), "--from-round", "3", code=2)
    assert "name what changes: --alpha, --sigma" in shown


def test_an_amendments_first_round_is_counted_as_people_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def order(folder: Path, what: str, **given: object) -> dict[str, object]:
        asked.update(given)
        return {**given, "rounds": 40}

    monkeypatch.setattr("esnode.admin.order", order)
    done = CliRunner().invoke(front.cli, ["plan", "amend", "x", "--alpha", "0.5", "--from-round", "40"])
    assert done.output == "alpha 0.5 from round 40 on\n" and asked["from_round"] == 39, "its index"
    done = CliRunner().invoke(front.cli, ["plan", "amend", "x", "--alpha", "0.5", "--from-round", "41"])
    assert "The run ends after 40 rounds: this changes nothing unless" in done.output, (
        "it is said, not refused"
    )
    assert CliRunner().invoke(front.cli, ["plan", "amend", "x", "--from-round", "0"]).exit_code == 2


@pytest.mark.parametrize("group", ["bench", "coordinator", "nodes", "plan"])
def test_lists_of_commands_are_whole_sentences(group: str) -> None:
    shown = CliRunner().invoke(front.cli, [group, "--help"], prog_name="esnode").output
    listed = shown.partition("Commands:\n")[2].splitlines()
    assert listed and all(line.endswith(".") and not line.endswith("...") for line in listed), listed


def test_status_without_a_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run under runs/; name the run's folder"):
        CliRunner().invoke(front.cli, ["status"], catch_exceptions=False)


def test_pauses_end_where_they_are_said_to_end(tmp_path: Path) -> None:
    one = joined.folder_of(b"\x5f" * 32, tmp_path)
    one.mkdir()
    joined.write(one, joined.Joined(b"\x5f" * 32, ("tcp://127.0.0.1:5",), {"a": True}))

    def said(*words: str) -> str:
        done = CliRunner().invoke(front.cli, [*words, "--data", str(tmp_path)], catch_exceptions=False)
        return done.output.strip()

    said("pause", "--run", "5f")
    assert said("resume").endswith(": working") and not (one / joined.PAUSED).exists()
    assert said("resume").endswith(": working already")
    said("pause")
    with pytest.raises(UserError, match="are paused: `esnode resume` without --run"):
        said("resume", "--run", "5f")
    said("resume")
    assert said("resume", "--run", "5f").endswith(": working already")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"node": "gpu-1", "what": "left", "reason": "paused"}, "x: gpu-1 left (paused)"),
        ({"reason": "paused by its owner"}, "x: paused by its owner"),
        (
            {"round": 3, "mean": -4.62491, "key": b"\xaa" * 32},
            "x: round 4, mean -4.62491, key aaaaaaaaaaaaaaaa",
        ),
        ({"what": "waits", "members": [1, 2], "reason": ""}, "x: waits"),
    ],
)
def test_a_log_line_reads_like_a_sentence(fields: dict[str, object], line: str) -> None:
    assert logfile.sentence("x", fields) == line


def test_foreign_words_cannot_forge_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.log"
    log = logfile.start(path, "esnode.forging")
    try:
        for breaks in ("\n", "\r", "\r\n", "\v", "\x85", "\u2028"):
            log.warning("it says: %s", f"oh{breaks}2026-01-01 00:00:00,000 INFO    all is well")
        logfile.last_words(log, "it says: oh\nesnode: all is well")
    finally:
        for name in ("esnode.forging", *logfile.PACKAGES):
            logging.getLogger(name).handlers.clear()
    lines = path.read_text().splitlines()
    assert len([line for line in lines if not line.startswith(" ")]) == 7, lines
    shown = capsys.readouterr().err.splitlines()
    assert not any(line.startswith(("2026", "esnode: all")) for line in shown), shown


def test_rounds_in_the_log_are_counted_as_people_count() -> None:
    """Notes hold indices and numbers of commits; which one is told by what they are about."""
    assert logfile.sentence("commit", {"round": 0}) == "commit: round 1"
    assert logfile.sentence("score", {"round": 0, "mean": 1.5}) == "score: after 0 rounds, mean 1.5"
    assert logfile.sentence("snapshot", {"round": 1}) == "snapshot: after 1 round"


class _Teapot(UserError):
    exit_code = 3


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("no cup. Fetch one."), 1, "esnode: no cup. Fetch one.\n"),
        (_Teapot("short and stout"), 3, "esnode: short and stout\n"),
        (click.ClickException("no"), 1, "esnode: no\n"),
        (KeyboardInterrupt(), 130, "esnode: interrupted\n"),
        (click.Abort(), 130, "esnode: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left", "/x/y"), 1, "the disk is full (/x/y)"),
        (OSError(errno.EROFS, "Read-only", "/x"), 1, "read-only (/x)"),
        (PermissionError(errno.EACCES, "denied", "/x"), 1, "no permission"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, "pip install '.[node]'"),
        (ModuleNotFoundError("No module named 'toast'", name="toast"), 70, "Traceback"),
        (MemoryError(), 1, "esnode: memory ran out. Free some"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "esnode: memory ran out. Free some"),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory"), 1, "memory ran out"),
        (OSError(errno.EIO, "bad sector"), 70, "Traceback"),
        (ValueError("a bug of ours"), 70, "ValueError: a bug of ours"),
    ],
)
def test_what_an_error_becomes(
    error: BaseException,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(**_: object) -> None:
        raise error

    pytest.importorskip("torch")  # as in a command that loads a model: its allocator raises RuntimeError
    monkeypatch.setattr(front.cli, "main", fails)
    with pytest.raises(SystemExit) as exit:
        front.main([])
    assert exit.value.code == code
    shown = capsys.readouterr().err
    assert words in shown
    assert ("Traceback" in shown) == (code == 70)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m esnode.cli.main plan new | head -1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "" and done.stdout.count("\n") == 1


# ---------------------------------------------------------------- folders and files that will not do


def test_devices_are_no_plans_and_no_ledgers() -> None:
    assert "longer than" in refused("plan", "show", "/dev/zero")
    assert "there is no ledger /dev/zero" in refused("verify", "/dev/zero")


def test_run_refuses_folders_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert "is no run folder" in refused("run", "--out", str(tmp_path))
    assert "there is no folder" in refused("run", "--resume", "--out", str(tmp_path / "nowhere"))
    assert "holds no run" in refused("run", "--resume", "--out", str(tmp_path))
    (tmp_path / "lock.json").write_bytes(toy_lock(task="gym:chain_sum").to_bytes())
    for words in (["--resume", "--out"], ["--out"]):
        sentence = refused("run", *words, str(tmp_path))
        assert "plan.toml is missing" in sentence and "esnode plan new --task 'gym:chain_sum'" in sentence
    (tmp_path / "lock.json").write_bytes(b'{"law":1')
    assert f"{tmp_path / 'lock.json'} is damaged" in refused("run", "--resume", "--out", str(tmp_path))
    (tmp_path / "lock.json").unlink()
    (tmp_path / "plan.toml").write_text("")
    assert "already holds a run" in refused("run", "--out", str(tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_run_refuses_a_read_only_place() -> None:
    place = "/sys/esnode" if os.geteuid() == 0 else "/esnode-run"  # /sys refuses root too
    assert "permission" in refused("run", "--out", place)


def test_run_refuses_a_plan_before_it_creates_anything(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[run]\nmodel = "demo"\ntask = "short-answers"\nspeed = 11\n[ops]\nrounds = 1\n')
    out = tmp_path / "out"
    assert "run.speed" in refused("run", "--plan", str(plan), "--out", str(out))
    assert not out.exists()
    assert "cannot read" in refused("run", "--plan", str(tmp_path / "none.toml"), "--out", str(out))
    assert "is a folder: name its plan.toml" in refused("plan", "show", str(tmp_path))
    plan.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused("run", "--plan", str(plan), "--out", str(out))


def test_an_unknown_model_without_network_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("run", "--model", "nobody/nothing", "--out", str(out), HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert done.stderr.startswith("esnode: nobody/nothing") and done.stderr.count("\n") == 1
    assert not out.exists()


def test_a_running_plan_cannot_be_changed(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("")
    for flag, value in (("--task", "countdown"), ("--model", "x"), ("--plan", "y"), ("--seed", "1")):
        shown = refused("run", "--resume", "--out", str(tmp_path), flag, value, code=2)
        assert f"{flag} cannot change a run that exists" in shown


# ---------------------------------------------------------------- ledgers


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A sound ledger of three rounds over a model that does not exist."""
    path = tmp_path / "run.ledger"
    path.write_bytes(ledgers.small_ledger(3).data)
    return path


def test_show_lists_rounds_without_a_model(written: Path) -> None:
    done = run("show", str(written))
    assert done.returncode == 0, done.stderr
    data = json.loads(run("show", str(written), "--json").stdout)
    assert len(data["rounds"]) == 3


def test_a_foreign_ledgers_words_are_no_markup_and_no_formula(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    path.write_bytes(ledgers.small_ledger(2, model="[/x] $\\frac$").data)
    done = run("show", str(path), "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 0 and "[/x] $\\frac$" in done.stdout, done.stderr
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_ledger_commands_name_what_is_missing(tmp_path: Path) -> None:
    assert "there is no ledger" in refused("verify", str(tmp_path / "none"))
    assert "there is no ledger" in refused("show", str(tmp_path))
    assert "must end in .png, .svg, .pdf" in refused("show", str(tmp_path), "--plot", "reward.jpg", code=2)
    (tmp_path / "run.ledger").write_bytes(b"a picture of a cat")
    assert "no ledger: the file does not start with" in refused("verify", str(tmp_path))


def test_verify_locates_damage(written: Path) -> None:
    data = bytearray(written.read_bytes())
    reading = ledger.read(written)
    third = len(ledger.MAGIC) + sum(len(entry.raw) for entry in reading.chain.entries[:-1])
    data[third + 20] ^= 1
    written.write_bytes(data)
    done = run("verify", str(written))
    assert done.returncode == 1
    assert f"damaged at byte {third}, after {reading.chain.round} round" in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_of_a_ledger_whose_model_is_not_here(written: Path) -> None:
    shown = refused("verify", str(written), HF_HUB_OFFLINE="1")
    assert "--base" in shown


def test_status_of_a_folder_that_is_not_running(tmp_path: Path) -> None:
    assert "holds no run" in refused("status", str(tmp_path))
    (tmp_path / "plan.toml").write_text(run("plan", "new").stdout)
    done = run("status", str(tmp_path), "--json")
    assert json.loads(done.stdout)["state"] == "not locked yet"


@pytest.mark.parametrize("start", [0.0, 0.3], ids=["at-once", "on-a-busy-machine"])
def test_a_ctrl_c_that_hits_inside_a_callback_is_not_forgotten(start: float) -> None:
    """Python prints what a finaliser raises and goes on: the command would end as if nobody had asked.

    `start`: seconds until the thread that is to raise it again has been started.
    """
    program = (
        "import threading, time\n"
        "usual = threading.Thread.start\n"
        f"threading.Thread.start = lambda thread: (usual(thread), time.sleep({start}))\n"
        "from esnode.cli import main as front\n"
        "class Dying:\n"
        "    def __del__(self):\n"
        "        raise KeyboardInterrupt\n"
        "def work(**_):\n"
        "    Dying()\n"
        "    time.sleep(20)\n"
        "front.cli.main = work\n"
        "front.main([])\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (130, "esnode: interrupted\n")


def test_a_ctrl_c_after_the_work_changes_nothing() -> None:
    """While the interpreter goes, which takes a second with torch loaded."""
    program = (
        "import os, signal, sys\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGINT):\n"
        "        kill(me, number)\n"
        "last = Last()\n"
        "from esnode.cli.entry import main\n"
        "sys.argv = ['esnode', '--version']\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("esnode, version")


@pytest.mark.parametrize("imported", ["click", "esnode.cli.main", "esnode.cli.status"])
def test_a_ctrl_c_during_the_first_imports_is_one_line(imported: str) -> None:
    """As pip writes the script: it imports the entry point and calls it."""
    point = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["esnode"]
    module, _, function = point.partition(":")
    program = (
        "import os, signal, sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {imported!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Hook())\n"
        f"from {module} import {function} as main\n"
        "sys.argv = ['esnode', 'status', '--help']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "esnode: interrupted")
