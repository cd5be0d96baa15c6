"""The whole path with a real (tiny, random) language model: plan, run, resume, verify, export, fork.

Slower than toy weights, so few runs: one that nothing disturbs, one that is killed, one fork.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from esnode.folder import RunFolder, busy
from protocol import ledger
from protocol.entries import ScoreBody
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 200.0
ALONE = ("--nodes", "1")  # the bits are those of two nodes, which take twice the time to start
PLAN = """
[run]
model = "{model}"
task = "likelihood:{pairs}"
repeatable = true
[run.es]
members = {members}
mirrored = true
sigma = 0.0078125
alpha = {alpha}
[ops]
rounds = 3
eval_every = 2
"""


class Place:
    """A user with a model, a task and a plan."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = tiny.write(path / "model")
        pairs = [{"prompt": f"say {k}", "target": f"{k}{k}"} for k in range(10)]
        (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        self.plan = self.write_plan("plan.toml")
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
            "ESNODE_CONFIG": str(path / "config"),
            "PYTHONPATH": str(ROOT),
        }

    def write_plan(self, name: str, members: int = 4, alpha: float = 0.02) -> Path:
        plan = self.path / name
        pairs = self.path / "pairs.jsonl"
        plan.write_text(PLAN.format(model=self.model, pairs=pairs, members=members, alpha=alpha))
        return plan

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "esnode.cli.main", *words]
        return subprocess.Popen(
            command,
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def esnode(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Run a command to its end; stdout and stderr."""
        process = self.start(*words)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, out + err
        return out, err

    def digest(self, name: str) -> int:
        reading = ledger.read(self.path / name / "run.ledger")
        assert reading.ended, str(reading)
        return reading.chain.entries[-1].digest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def printed(place: Place) -> str:
    """What an undisturbed run in `out` printed."""
    return place.esnode("run", "--plan", str(place.plan), "--out", "out")[0]


def test_a_run_ends_with_everything_a_user_wants(place: Place, printed: str) -> None:
    folder = RunFolder(place.path / "out")
    for path in (
        folder.plan, folder.lock, folder.task, folder.ledger, folder.metrics, folder.units, folder.picture,
        folder.answers, folder.final / "config.json",
    ):  # fmt: skip
        assert path.is_file(), path
    assert list(folder.tensorboard.iterdir())
    for words in (
        "round 3/3",
        "before",
        "after",
        "is not generation",
        "3 of 3 rounds compared",
        "esnode verify",
    ):
        assert words in printed, printed
    assert len(json.loads(folder.answers.read_text())) == 2
    unit = json.loads(folder.units.read_text().splitlines()[0])
    assert {"round", "member", "first", "last", "node", "times", "tokens", "bytes"} <= unit.keys()
    assert sum(unit["bytes"].values()) <= 300


def test_the_final_folder_is_an_ordinary_model(place: Place, printed: str) -> None:
    final = place.path / "out" / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert model.dtype == torch.bfloat16
    made = model.generate(**tokenizer("say 1", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert made.shape[0] == 1
    base = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(model.state_dict()[name], base.state_dict()[name])


def test_verify_and_export_agree_with_the_run(place: Place, printed: str) -> None:
    out, _ = place.esnode("verify", "out")
    assert f"{place.digest('out'):016x}" in out and "all equal" in out
    place.esnode("export", "out", "--to", "model-3")
    weights = "model.safetensors"
    assert (place.path / "model-3" / weights).read_bytes() == (
        place.path / "out" / "final" / weights
    ).read_bytes()
    _, err = place.esnode("export", "out", "--to", "model-3", code=1)
    assert "exists already" in err


def test_verify_refuses_another_base_and_finds_a_flipped_bit(place: Place, printed: str) -> None:
    other = tiny.write(place.path / "other", seed=1)
    _, err = place.esnode("verify", "out", "--base", str(other), code=1)
    assert "is not the base model" in err and "Traceback" not in err
    data = bytearray((place.path / "out" / "run.ledger").read_bytes())
    data[len(data) // 2] ^= 16
    (place.path / "flipped.ledger").write_bytes(data)
    _, err = place.esnode("verify", "flipped.ledger", "--base", str(place.model), code=1)
    assert re.search(r"damaged at byte \d+, after \d rounds?", err)


def test_killed_and_resumed_it_is_the_same_model(place: Place, printed: str) -> None:
    process = place.start("run", "--plan", str(place.plan), "--out", "killed")
    path = place.path / "killed" / "run.ledger"
    deadline = time.monotonic() + PATIENCE
    while not (path.exists() and ledger.read(path).chain.round):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    place.esnode("run", "--resume", "--out", "killed", *ALONE)
    assert place.digest("killed") == place.digest("out")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random_moments(place: Place, printed: str) -> None:
    """Each run is killed once or twice within the seconds that a whole one takes, then left alone."""
    chance = random.Random(1)
    began = time.monotonic()
    place.esnode("run", "--plan", str(place.plan), "--out", "timed")
    whole = time.monotonic() - began
    for number in range(20):
        name = f"killed{number}"
        words = ("run", "--plan", str(place.plan), "--out", name)
        for _ in range(chance.randint(1, 2)):
            process = place.start(*words)
            time.sleep(chance.uniform(0.3, whole))  # whatever phase the moment hits must do
            process.kill()
            process.communicate()
            if (place.path / name / "plan.toml").exists():
                words = ("run", "--resume", "--out", name)
        place.esnode(*words)
        assert place.digest(name) == place.digest("out"), name
        shutil.rmtree(place.path / name)


def interrupt(place: Place, words: tuple[str, ...], moment: Callable[[], bool]) -> None:
    """Ctrl-C at a moment; it must end with the command to continue and nothing else."""
    process = place.start(*words)
    deadline = time.monotonic() + PATIENCE
    while not moment():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, out + err
    assert "esnode run --resume --out stopped" in out
    assert err == ""
    assert not busy(RunFolder(place.path / "stopped"))


def test_ctrl_c_before_the_lock_and_after_the_last_round(place: Place, printed: str) -> None:
    folder = RunFolder(place.path / "stopped")
    interrupt(place, ("run", "--plan", str(place.plan), "--out", "stopped"), folder.plan.exists)
    assert not folder.lock.exists()
    resume = ("run", "--resume", "--out", "stopped", *ALONE)
    interrupt(place, resume, folder.picture.exists)
    assert not folder.final.exists()
    assert place.digest("stopped") == place.digest("out")
    place.esnode(*resume)
    assert (folder.final / "config.json").exists()
    assert not list(folder.path.glob("*.new"))


def test_a_fork_runs_and_is_verified_from_the_base(place: Place, printed: str) -> None:
    plan = place.write_plan("fork.toml", members=6, alpha=0.01)
    out, _ = place.esnode("fork", "out", "--round", "2", "--plan", str(plan), "--out", "forked")
    assert "esnode run --resume --out forked" in out
    place.esnode("run", "--resume", "--out", "forked", *ALONE)
    verdict = json.loads(place.esnode("verify", "forked", "--json")[0])
    assert verdict["fault"] is None and verdict["compared"] == verdict["rounds"] == 3
    moved = place.path / "moved"
    moved.mkdir()
    shutil.copy(place.path / "forked" / "run.ledger", moved)
    _, err = place.esnode("verify", "moved", code=1)
    assert "was forked from run" in err


def test_show_and_status_of_the_finished_run(place: Place, printed: str) -> None:
    data = json.loads(place.esnode("show", "out", "--json")[0])
    assert data["ended"] and [row["round"] for row in data["rounds"]] == [0, 1, 2]
    assert [score["round"] for score in data["heldout"]] == [0, 2, 3]
    status = json.loads(place.esnode("status", "out", "--json")[0])
    assert (status["state"], status["round"], status["rounds"]) == ("ended", 3, 3)


def test_the_library_example_of_the_readme_runs(place: Place, printed: str) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    script = example[1].replace("runs/mine", "out")
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=place.path,
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, shape, estimate = done.stdout.splitlines()
    chain = ledger.read(place.path / "out" / "run.ledger").chain
    assert first == f"whole, ended after 3 rounds {chain.digest_at(2):016x}"
    assert shape.endswith("float32")
    held = [entry.body.mean for entry in chain.entries if isinstance(entry.body, ScoreBody)]
    assert f"value={held[1]}" in estimate, "the library measures what the run measured after 2 rounds"
