"""deploy/compose.yaml without a container engine: its services as processes, its volumes as folders.

Also the images' pip commands, in a virtual environment, as far as they are cheap: the coordinator's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol import keys, ledger
from tests import test_deploy, test_runbook
from tests.runs import ROOT, SIGNING_SEED, Processes, make_folder, wait_for

pytestmark = pytest.mark.slow

PATIENCE = 120.0


class Engine:
    """Starts services in the order of `depends_on`. Names of services resolve to loopback."""

    def __init__(self, place: Path, program: list[str]) -> None:
        self.place, self._program = place, program
        self.services: dict[str, Any] = test_deploy.compose()["services"]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {port: str(test_runbook.free_port()) for port in ("5555", "5556")}

    def up(self) -> None:
        """What `compose up` does."""
        for name in sorted(self.services, key=self._depth):
            for other, how in self.services[name].get("depends_on", {}).items():
                self._await(other, how["condition"])
            self._start(name)

    def words(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text()

    def _depth(self, name: str) -> int:
        return 1 + max(map(self._depth, self.services[name].get("depends_on", {})), default=0)

    def _await(self, name: str, condition: str) -> None:
        if condition == "service_completed_successfully":
            assert self.running[name].wait(PATIENCE) == 0, self.words(name)
            return
        assert condition == "service_healthy"
        health = test_deploy.health(self.services[name])[1:]
        command = [*self._program, *(self._inside(word, name) for word in health)]
        wait_for(lambda: _quiet(command, self._home(name)).returncode == 0)

    def _home(self, name: str) -> Path:
        """The folder behind /var/lib/esnode, the image's working directory."""
        return Path(self._inside("/var/lib/esnode", name))

    def _inside(self, text: str, name: str) -> str:
        """A text of the service with its mounts' real places, and ports and names as they are here."""
        for mount in self.services[name]["volumes"]:
            source, target = test_deploy.spelled(mount).split(":")[:2]
            folder = self.place / source.strip("./")
            folder.mkdir(exist_ok=True)
            text = text.replace(target, str(folder))
        text = re.sub(r"\b555[56]\b", lambda found: self._ports[found[0]], test_deploy.spelled(text))
        return "127.0.0.1" if text == "coordinator" else text

    def _start(self, name: str) -> None:
        service = self.services[name]
        first, *rest = service["command"]
        words = [first, *(self._inside(word, name) for word in rest)]  # the first is a command, never a host
        if service.get("entrypoint") == ["sh", "-c"]:
            words = ["sh", "-c", self._inside(first, name).replace("esnode", shlex.join(self._program), 1)]
        else:
            words = [*self._program, *words]
        home = self._home(name) if "/var/lib/esnode" in str(service["volumes"]) else self.place
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ESNODE_CONFIG": str(home / "config")}
        environment |= {"ESNODE_DATA": str(home / "joined")}
        environment |= {key: self._inside(v, name) for key, v in service.get("environment", {}).items()}
        with (self.place / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(words, stdout=log, stderr=log, cwd=home, env=environment)

    def down(self) -> None:
        """SIGTERM to everybody, and no patience."""
        for process in self.running.values():
            process.kill()
            process.wait()


def _quiet(command: list[str], home: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, check=False, cwd=home, capture_output=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """What ESNODE_INPUT holds, as the compose file's first lines say."""
    environment = test_runbook.lay_out(tmp_path)
    inputs = tmp_path / "input"
    inputs.mkdir()
    words = [
        "plan",
        "lock",
        "plan.toml",
        "--out",
        str(inputs / "lock.json"),
        "--data",
        str(inputs / "task.jsonl"),
    ]
    subprocess.run(
        [sys.executable, "-m", "esnode.cli.main", *words], cwd=tmp_path, env=environment, check=True
    )
    shutil.copy(tmp_path / "config" / "coordinator.key", inputs)
    return tmp_path


def test_compose_up_from_nothing_to_rounds(place: Path) -> None:
    engine = Engine(place, [str(place / "bin" / "esnode")])
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        engine.up()
        path = place / "coordinator" / "run" / "run.ledger"
        wait_for(lambda: path.exists() and ledger.read(path).chain.round >= 2, PATIENCE)
        assert {name for _, name in ledger.read(path).chain.roster.values()} == {"node-1", "node-2"}
        node = engine.running["node-1"]
        node.terminate()
        assert node.wait(30) == 0
    except BaseException:
        print(*(engine.words(name) for name in engine.running), sep="\n")
        raise
    finally:
        engine.down()


def test_the_coordinator_image_has_no_torch_and_serves(tmp_path: Path) -> None:
    """The container file's COPY and RUN lines, in a folder instead of an image; a toy node works for it."""
    source, prefix = tmp_path / "src", tmp_path / "esnode"
    source.mkdir()
    stages = test_deploy.stages()
    for _, rest in stages["source"][1:]:  # after FROM, nothing but COPY
        for name in rest.split()[:-1]:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
    for instruction, rest in stages["build-coordinator"][len(stages["common"]) :]:
        if instruction == "RUN":
            command = rest.replace("/opt/esnode", str(prefix)).replace("python ", f"{sys.executable} ")
            command = command.replace("/src", str(source))
            done = subprocess.run(
                command, shell=True, cwd=source, capture_output=True, text=True, check=False
            )
            if "No matching distribution" in done.stderr or "Temporary failure" in done.stderr:
                pytest.skip(f"packages cannot be fetched here: {done.stderr.strip().splitlines()[-1]}")
            assert done.returncode == 0, done.stderr
    installed = _quiet([str(prefix / "bin" / "pip"), "list"], tmp_path).stdout.decode()
    assert "pyzmq" in installed and "torch" not in installed and "transformers" not in installed
    run, config = tmp_path / "run", tmp_path / "config"
    make_folder(run, ("n1",), rounds=3)
    config.mkdir()
    keys.write_signing(config / "coordinator.key", SIGNING_SEED)
    words = ["coordinator", "serve", "--data", str(run), "--metrics", "0"]
    environment = {"PATH": os.environ["PATH"], "ESNODE_CONFIG": str(config)}
    with Processes(run) as processes, (run / "coordinator.stderr").open("wb") as log:
        processes.running["coordinator"] = subprocess.Popen(
            [str(prefix / "bin" / "esnode"), *words], stdout=log, stderr=log, cwd=tmp_path, env=environment
        )
        processes.node("n1")
        processes.wait_end()
