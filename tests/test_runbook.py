"""deploy/RUNBOOK.md does what it says: its `sh` blocks in one shell on a tiny run, the rest word by word."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import commands, test_deploy, tiny

ROOT = Path(__file__).resolve().parent.parent
RUNBOOK = (ROOT / "deploy" / "RUNBOOK.md").read_text()
PATIENCE = 500.0
PLAN = """
[run]
model = "{model}"
task = "likelihood:{pairs}"
[run.es]
members = 4
sigma = 0.0078125
alpha = 0.02
[ops]
rounds = 1
eval_every = 0
"""
# What a reader's machine has and this one does not: the model under the name the lock gives it.
SHIM = """#!/bin/sh
if [ "$1" = join ]; then set -- "$@" --model {model}; fi
exec {python} -m esnode.cli.main "$@"
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", RUNBOOK, re.DOTALL | re.MULTILINE)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def lay_out(place: Path) -> dict[str, str]:
    """A reader's working directory and environment."""
    model = tiny.write(place / "model")
    pairs = place / "pairs.jsonl"
    pairs.write_text(
        "".join(json.dumps({"prompt": f"say {k}", "target": f"{k}{k}"}) + "\n" for k in range(10))
    )
    (place / "plan.toml").write_text(PLAN.format(model=model, pairs=pairs))
    (place / "bin").mkdir()
    shim = place / "bin" / "esnode"
    shim.write_text(SHIM.format(python=shlex.quote(sys.executable), model=shlex.quote(str(model))))
    shim.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ESNODE_CONFIG": str(place / "config"),
    }


@pytest.mark.slow  # four starts of a real model: a minute on two idle cores
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("bash", "curl", "sqlite3")), reason="no bash, curl or sqlite3"
)
def test_every_command_does_what_it_says(tmp_path: Path) -> None:
    script = "set -euxo pipefail\n" + "\n".join(blocks("sh"))
    for port in ("5555", "9477"):
        script = script.replace(port, str(free_port()))
    log = tmp_path / "log"
    with log.open("wb") as file:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=lay_out(tmp_path),
            stdout=file,
            stderr=file,
            start_new_session=True,  # so that nothing it starts outlives the test
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = shell.wait(PATIENCE)
        finally:
            with_all = [path.read_text() for path in sorted(tmp_path.glob("*.txt"))]
            with contextlib.suppress(ProcessLookupError):  # all gone, as it should be
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    said = log.read_text()
    assert code == 0, "\n".join([said[-6000:], *with_all])
    assert "esnode_round " in said and "rounds compared" in said
    assert with_all and not any("Traceback" in words for words in with_all), with_all


def test_console_blocks_name_what_is_here() -> None:
    lines = "".join(blocks("console")).splitlines()
    assert lines
    for line in lines:
        words = shlex.split(line)
        if words[0] in ("systemctl", "journalctl"):
            services = [word for word in words if word.startswith("esnode-")]
            assert services and all((ROOT / "deploy" / f"{name}.service").is_file() for name in services), (
                line
            )
        elif words[0] == "docker":
            check_compose(words)
        else:  # the units' program, installed
            assert words[0] in ("apt", "python3", "export") or words[0].startswith("/opt/esnode/bin/"), line
    for file in re.findall(r"deploy/([\w.-]+)", RUNBOOK):
        assert (ROOT / "deploy" / file).is_file()


def check_compose(words: list[str]) -> None:
    """`docker compose -f deploy/compose.yaml ...`: its services exist, and so does what `exec` calls."""
    assert words[:4] == ["docker", "compose", "-f", "deploy/compose.yaml"], words
    verb, *rest = words[4:]
    names = [word for word in rest if not word.startswith("-")]
    assert verb in ("up", "exec", "logs", "stop", "start"), words
    assert set(names[:1]) <= test_deploy.compose()["services"].keys(), words
    if verb == "exec":
        assert names[1] == "esnode"
        commands.check(names[2:])


def test_commands_in_the_text_exist() -> None:
    text = re.sub(r"^```.*?^```$", "", RUNBOOK, flags=re.DOTALL | re.MULTILINE)
    for line in re.findall(r"`esnode ([a-z ]+)`", text):
        commands.named(line.split())
