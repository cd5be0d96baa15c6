"""From a plan to a lock, and what a node refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esnode import locking, manifest, tasks
from esnode.locking import LockingError, Mismatch
from esnode.template import template
from protocol import plan
from protocol.errors import UserError
from protocol.lock import Lock, LockError, Parent, lock_from_bytes
from protocol.plan import Plan
from tests import tiny

KEYS = ["ab" * 32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


def planned(model: Path, **changes: Any) -> Plan:
    written = plan.parse(template("conciseness", str(model)))
    return plan.changed(written, **({"task": "conciseness", "per_round": 16, "chunk": 4} | changes))


@pytest.fixture(scope="module")
def locked(model: Path) -> tuple[Lock, bytes]:
    lock, data, folder = locking.resolve(planned(model), trusted=KEYS)
    assert folder.path == model
    return lock, data


def test_a_lock_holds_what_replicas_must_agree_on(model: Path, locked: tuple[Lock, bytes]) -> None:
    lock, data = locked
    specs = manifest.read(model)
    assert lock.manifest == tuple(specs) and lock.base == manifest.base_digest(model, specs)
    assert lock.digest == tiny.digest(tiny.masters(model, specs))
    assert (lock.train_prompts, lock.heldout_prompts, lock.per_round, lock.chunk) == (16, 16, 16, 4)
    assert (lock.reward_low, lock.reward_high, lock.max_new_tokens) == (-1.0, 0.0, 24)
    assert lock.task_options == {"scale": 150.0, "time_limit": 5.0}
    assert lock.stop_ids == (tiny.END,) and lock.trusted == tuple(KEYS) and lock.parent is None
    assert lock_from_bytes(lock.to_bytes()) == lock
    assert data.startswith(b'{"options":')


def test_the_same_plan_gives_the_same_run(model: Path, locked: tuple[Lock, bytes]) -> None:
    told: list[tuple[str, int, int]] = []
    again, data, _ = locking.resolve(planned(model), trusted=KEYS, progress=lambda *step: told.append(step))
    assert again.run_id == locked[0].run_id and data == locked[1]
    assert {done for _, done, _ in told} == {0, 1} and len({what for what, _, _ in told}) == 4
    other, _, _ = locking.resolve(planned(model), trusted=["cd" * 32])
    assert other.run_id != again.run_id


def test_a_fork_starts_from_its_parents_state(model: Path) -> None:
    parent = Parent("11" * 32, 7, "22" * 32, 12345)
    lock, _, _ = locking.resolve(planned(model), trusted=KEYS, parent=parent)
    assert lock.digest == 12345 and lock.parent == parent


def test_a_plans_own_keys_come_first(model: Path) -> None:
    lock, _, _ = locking.resolve(planned(model, trusted=("ef" * 32,)), trusted=KEYS)
    assert lock.trusted == ("ef" * 32,)


def test_more_prompts_than_there_are(model: Path) -> None:
    with pytest.raises(LockError, match="per_round = 17: the task has only 16 training prompts"):
        locking.resolve(planned(model, per_round=17), trusted=KEYS)


def test_a_prompt_longer_than_the_context_is_refused_with_its_index(model: Path) -> None:
    with pytest.raises(UserError, match=r"train prompt 0 of task .* exceeds the model's context"):
        locking.resolve(planned(model, task="arithmetic", max_new_tokens=100_000), trusted=KEYS)


def test_an_empty_dataset_is_one_sentence(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n\n")
    with pytest.raises(tasks.TaskError, match="is empty: a task needs") as caught:
        locking.resolve(planned(model, task=f"file:{path}"), trusted=KEYS)
    assert "\n" not in str(caught.value)


def test_packages_that_scoring_needs_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": "1"}) + "\n" for n in range(5)))
    data = tasks.materialise(f"file:{path}", {"scoring": "math"})
    task = tasks.open_task(f"file:{path}", tasks.header(data)[1], data)
    assert set(locking.versions(task)) == {"math-verify", "sympy"}
    task.packages = ("no-such-package-here",)
    with pytest.raises(LockingError, match="pip install no-such-package-here"):
        locking.versions(task)


# ---------------------------------------------------------------- on a node


def test_a_node_gets_prompts_and_scorer_of_its_lock(model: Path, locked: tuple[Lock, bytes]) -> None:
    lock, data = locked
    prepared = locking.prepare(lock, model, data)
    assert prepared.count("heldout") == 16
    made = locking.scorer(lock, data)
    assert made is not None and made.seconds == 5.0
    likely = tasks.materialise("short-answers", {})
    other = replace(lock, task="short-answers", task_options=tasks.header(likely)[1])
    assert locking.scorer(other, likely) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "00" * 32}, "the data of task 'conciseness' is not the run's"),
        ({"scorer": "00" * 32}, "scores task 'conciseness' with other code"),
        ({"train_tokens": "00" * 32}, "the train prompts give other token ids here"),
        ({"heldout_tokens": "00" * 32}, r"the heldout prompts give other .* \(here transformers \d"),
        ({"packages": {"numpy": "0.0.1"}}, "pip install 'numpy==0.0.1'"),
    ],
)
def test_what_a_node_refuses(
    model: Path, locked: tuple[Lock, bytes], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(Mismatch, match=words) as caught:
        locking.prepare(replace(locked[0], **changes), model, locked[1])
    assert "\n" not in str(caught.value)
