"""Evaluation: estimators against brute force, settings, a fake engine, a tiny model and its ledger."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from esnode import estimates, evaluate, locking, manifest, tasks
from esnode.cli.evaluate import evaluate as command
from esnode.cli.evaluate import parse_option
from esnode.engines import transformers_engine
from esnode.evaluate import EvaluateError, Settings
from esnode.prompts import Prepared
from esnode.scoring import Scorer
from esnode.worker import Worker
from protocol import seeds
from protocol.errors import UserError
from protocol.ledger import LedgerFile
from protocol.messages import Kind, Unit
from tests import tiny
from tests.fake_engine import FakeEngine

# ---------------------------------------------------------------- estimators


@pytest.mark.parametrize("samples", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(samples: int) -> None:
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        answers = [True] * correct + [False] * (samples - correct)
        subsets = list(itertools.combinations(answers, k))
        brute = sum(any(subset) for subset in subsets) / len(subsets)
        assert estimates.pass_at(samples, correct, k) == pytest.approx(brute, abs=1e-15)


def test_pass_at_k_of_many_samples_and_nonsense() -> None:
    assert estimates.pass_at(1000, 1, 500) == 0.5
    for samples, correct, k in [(4, 1, 5), (4, 1, 0), (4, 5, 1), (0, 0, 1)]:
        with pytest.raises(ValueError, match="needs 1 <= k"):
            estimates.pass_at(samples, correct, k)


def test_powers_of_two() -> None:
    assert [estimates.powers_of_two(n) for n in (0, 1, 2, 7, 8)] == [[], [1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_wilson() -> None:
    half = estimates.share(5, 10)
    assert (half.value, round(half.low, 4), round(half.high, 4)) == (0.5, 0.2366, 0.7634)
    none, every = estimates.share(0, 10), estimates.share(10, 10)
    assert none.low == 0 and 0.2 < none.high < 0.4 and every.high == 1.0 and 0.6 < every.low < 0.8


def test_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        estimate = estimates.mean([float(value) for value in draw.normal(3.0, 2.0, 40)])
        hits += estimate.low <= 3.0 <= estimate.high
    assert 0.88 <= hits / 200 <= 0.99
    assert estimates.mean([1.0, 2.0, 4.0]) == estimates.mean([1.0, 2.0, 4.0])
    assert estimates.mean([0.5] * 9).low == 0.5


def test_one_prompt_has_no_interval() -> None:
    assert estimates.mean([0.5]).interval == "-" and "one prompt" in estimates.mean([0.5]).method
    assert estimates.mean([0.5, 1.0]).interval == "0.5000 to 1.0000"


# ---------------------------------------------------------------- a fake engine


def opened(spec: str, folder: Path | None = None) -> tuple[Prepared, Scorer]:
    data = tasks.materialise(spec, {}, code=folder)
    scorer = Scorer(spec, tasks.header(data)[1], data, code=folder)
    return Prepared(tiny.tokenizer(), scorer.task, "2026-01-01"), scorer


GUESS = """
def items(): return [{"prompt": "t"}], [{"prompt": str(n)} for n in range(40)]
def score(item, text): return text == item["prompt"][-1]
"""


def test_a_model_is_not_hashed_to_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise AssertionError("gigabytes would be read for a digest that nobody looks at")

    monkeypatch.setattr(manifest, "base_digest", never)
    monkeypatch.setattr(manifest, "state_digest", never)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "target": "b"}\n{"prompt": "c", "target": "d"}\n')
    model = tiny.write(tmp_path / "model")
    subject = evaluate.open_model(str(model), f"likelihood:{tmp_path / 'pairs.jsonl'}")
    assert subject.measure().prompts == 1
    subject.close()


def test_samples_are_counted_per_prompt(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(GUESS)
    prepared, scorer = opened("python:guess.py", tmp_path)

    def answer(prompt: Sequence[int], stream: int) -> list[int]:
        right = prompt[-3]  # the prompt's last digit stands before the end of the turn
        return [right] if stream % 3 == 0 else []

    told: list[tuple[str, int, int]] = []
    engine = FakeEngine(answer)
    with scorer:
        report = evaluate.run(
            engine, prepared, scorer, Settings(samples=5, temperature=0.5),
            tell=lambda *step: told.append(step),
        )  # fmt: skip
    assert told[-1] == ("answering", 240, 240)
    counts = [sum(result.corrects) for result in report.results]
    assert report.mean_correct is not None and report.mean_reward is not None
    assert report.mean_correct.value == pytest.approx(sum(counts) / 200)
    assert list(report.pass_at) == [1, 2, 4]
    brute = [1 - math.comb(5 - c, 2) / math.comb(5, 2) for c in counts]
    assert report.pass_at[2].value == pytest.approx(sum(brute) / 40)
    assert report.pass_at[1].value == pytest.approx(report.mean_correct.value)
    streams = [stream for batch in engine.streams for stream in batch]
    assert len(set(streams)) == 240 == len(streams)
    assert {sampling.temperature for sampling in engine.samplings} == {0.0, 0.5}
    assert [result.correct for result in report.results] == [streams[index] % 3 == 0 for index in range(40)]
    json.dumps(report.as_json())
    assert [label for label, _ in report.rows()] == [
        "greedy reward", "greedy correct", "mean reward of 5", "mean@5", "pass@1", "pass@2", "pass@4",
    ]  # fmt: skip


def test_other_seeds_draw_other_samples(tmp_path: Path) -> None:
    prepared, scorer = opened("conciseness")
    engine = FakeEngine()
    with scorer:
        for seed in (0, 0, 1):
            evaluate.run(engine, prepared, scorer, Settings(samples=1, seed=seed))
    sampled = [
        batch
        for batch, sampling in zip(engine.streams, engine.samplings, strict=True)
        if sampling.temperature
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_likelihood_tasks() -> None:
    prepared, _ = opened("short-answers")
    report = evaluate.run(FakeEngine(), prepared)
    assert report.mode == "likelihood" and report.prompts == 32 and report.greedy_reward.value < -1
    assert [label for label, _ in report.rows()] == ["mean log-likelihood", "greedy correct"]
    with pytest.raises(EvaluateError, match="nothing is sampled"):
        evaluate.run(FakeEngine(), prepared, settings=Settings(samples=2))


def judged(folder: Path, code: str, **options: Any) -> evaluate.Report:
    """The report on a user's own task."""
    (folder / "bad.py").write_text(code)
    prepared, scorer = opened("python:bad.py", folder)
    with scorer:
        return evaluate.run(FakeEngine(), prepared, scorer, **options)


def test_failures_are_shown(tmp_path: Path) -> None:
    report = judged(
        tmp_path,
        "def items(): return [{'prompt': 't'}], [{'prompt': str(n)} for n in range(3)]\n"
        "def score(item, text): return {'0': 0.5, '1': 'no'}[item['prompt']]\n",
    )
    assert sum(report.floored.values()) == 2 and report.greedy_reward.value == pytest.approx(0.5 / 3)
    assert "; 1 answer got the floor: raised KeyError: '2'" in report._caption()


def test_foreign_words_are_no_markup(tmp_path: Path) -> None:
    report = judged(
        tmp_path,
        "def items(): return [{'prompt': 't'}], [{'prompt': 'u'}]\n"
        "def score(item, text): raise ValueError('[/x]')\n",
        model="[/y]",
    )
    console = Console(width=200, record=True)
    console.print(report.table())
    assert "[/y], python, 1" in (shown := console.export_text()) and "raised ValueError: [/x]" in shown


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(split="test"), "choose train or heldout"),
        (Settings(samples=3, temperature=0.0), "gives the greedy answer again"),
        (Settings(samples=-1), "at least 0"),
        (Settings(top_p=0.0), "top_p is above 0"),
    ],
)
def test_senseless_settings(settings: Settings, words: str) -> None:
    with pytest.raises(EvaluateError, match=words):
        settings.checked("generate")


# ---------------------------------------------------------------- a tiny model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


def called(*arguments: str) -> dict[str, object]:
    outcome = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    found: dict[str, object] = json.loads(outcome.stdout)
    return found


def test_a_model_by_command(model: Path) -> None:
    report = called(
        str(model), "--task", "arithmetic", "--samples", "2", "-o", "heldout=5", "-o", "train=5", "--json",
        "--max-new-tokens", "4", "--threads", "1",
    )  # fmt: skip
    assert (report["prompts"], report["round"], report["task"]) == (5, None, "arithmetic")
    assert set(report["pass_at"]) == {"1", "2"}  # type: ignore[call-overload]
    shown = CliRunner().invoke(command, [str(model), "--task", "short-answers", "--threads", "1"])
    assert "mean log-likelihood" in shown.stdout and "Wilson" in shown.stdout


def ledger_of(model: Path, spec: str, data: bytes, folder: Path, low: float = -30.0) -> Path:
    """A ledger of two rounds on the tiny model, of a run of this task on these data."""
    digest = hashlib.sha256(data).hexdigest()
    lock = tiny.lock(model, task=spec, task_options=tasks.header(data)[1], reward_low=low, data=digest)
    file = LedgerFile(folder / "run.ledger")
    for entry in tiny.chain(lock, model, 2)[0].entries:
        file.append(entry.raw)
    file.close()
    return folder / "run.ledger"


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    return str(caught.value)


def test_a_runs_own_task_is_measured_on_the_runs_data_or_not_at_all(model: Path, tmp_path: Path) -> None:
    """The user's file has grown since, or lies on another machine: another score under the run's name."""
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(f'{{"prompt": "{k}?", "target": "{k}"}}\n' for k in range(10)))
    data = tasks.materialise(f"likelihood:{mine}", {})
    path = ledger_of(model, f"likelihood:{mine}", data, tmp_path)
    asked = (str(path), "--base", str(model), "--round", "2", "--threads", "1", "--json")
    first = called(*asked)
    with mine.open("a") as file:
        file.writelines(f'{{"prompt": "{k}?", "target": "{k}"}}\n' for k in range(10, 20))
    assert "made again they are others" in refused(*asked)
    mine.rename(tmp_path / "elsewhere.jsonl")
    assert "there is no file" in (told := refused(*asked)) and "task.jsonl beside its ledger" in told
    (tmp_path / "task.jsonl").write_bytes(data)
    assert called(*asked)["greedy_reward"] == first["greedy_reward"]
    (tmp_path / "elsewhere.jsonl").rename(mine)
    assert called(*asked, "--task", f"likelihood:{mine}")["prompts"] == 4, (
        "named, it is what the file holds now"
    )


def test_settings_without_sense_cost_no_replay(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ledger_of(model, "short-answers", tasks.materialise("short-answers", {}), tmp_path)
    monkeypatch.setattr("esnode.rebuild.at", lambda *_, **__: pytest.fail("rebuilt first"))
    assert "leave --samples out" in refused(str(path), "--samples", "8")
    monkeypatch.setattr("esnode.locking.resolve", lambda *_, **__: pytest.fail("hashed first"))
    assert "leave --samples out" in refused(str(model), "--task", "short-answers", "--samples", "8")
    assert "choose one above 0" in refused(
        str(model), "--task", "arithmetic", "--samples", "8", "--temperature", "0"
    )


def test_a_ledger_by_command(model: Path, tmp_path: Path) -> None:
    """The run's own task, not named: the score is that of the rebuilt weights, and moves with the round."""
    data = tasks.materialise("short-answers", {})
    path = ledger_of(model, "short-answers", data, tmp_path)
    assert (
        evaluate.is_ledger(str(path))
        and evaluate.is_ledger(str(tmp_path))
        and not evaluate.is_ledger(str(model))
    )
    scores = []
    for round in ("0", "2"):
        report = called(str(path), "--base", str(model), "--round", round, "--threads", "1", "--json")
        assert report["round"] == int(round) and report["task"] == "short-answers"
        scores.append(report["greedy_reward"]["value"])  # type: ignore[index]
    assert scores[0] != scores[1]
    plain = called(str(model), "--task", "short-answers", "--threads", "1", "--json")
    assert plain["greedy_reward"]["value"] == scores[0]  # type: ignore[index]


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("spec", ["short-answers", "arithmetic"])
def test_the_score_of_a_runs_own_task_is_the_runs(
    model: Path, spec: str, repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: the batches of a node's probe, the lock's longest answer, sums chunk by chunk."""
    options = {"train": 4, "heldout": 11} if spec == "arithmetic" else {}
    data = tasks.materialise(spec, options)
    task = tasks.open_task(spec, tasks.header(data)[1], data)
    lock = tiny.lock(
        model, task=spec, task_options=tasks.header(data)[1], reward_low=task.low, reward_high=task.high,
        heldout_prompts=len(task.heldout), train_prompts=len(task.train), chunk=3, max_new_tokens=5,
        repeatable=repeatable,
    )  # fmt: skip
    engine = transformers_engine.load(lock, model, threads=1)
    batches: list[int] = []

    def counted(real: Any, prompts: Sequence[object], *rest: object) -> object:
        batches.append(len(prompts))
        return real(prompts, *rest)

    for name in ("loglik", "generate"):
        monkeypatch.setattr(engine, name, partial(counted, getattr(engine, name)))
    prepared = Prepared(tiny.tokenizer(), task, lock.date)
    scorer = locking.scorer(lock, data)
    worker = Worker(lock, engine, prepared, scorer)
    try:
        outcome = worker.evaluate(Unit(0, Kind.PROBE, 0, 0, lock.chunk_count(Kind.PROBE) - 1))
        by_node = batches.copy()
        report = evaluate.run(engine, prepared, scorer, lock=lock)
    finally:
        worker.close()
        if scorer is not None:
            scorer.close()
    assert [result.reward for result in report.results] == list(outcome.scores)
    assert report.greedy_reward.value == math.fsum(outcome.sums) / len(task.heldout)
    assert report.tokens == outcome.tokens
    assert batches == by_node * 2 and max(by_node) == (3 if repeatable else len(task.heldout))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo"], "needs a task to be measured on"),
        (["demo", "--task", "countdown", "--round", "3"], "are for ledgers"),
        (["demo", "--task", "countdown", "-o", "seed"], "write KEY=VALUE"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str) -> None:
    outcome = CliRunner().invoke(command, arguments)
    assert outcome.exit_code == 2 and words in outcome.output


def test_options_are_toml() -> None:
    assert parse_option("seed=3") == ("seed", 3)
    assert parse_option("scoring=numeric") == ("scoring", "numeric")
    assert parse_option("parameters={min_terms = 2}") == ("parameters", {"min_terms": 2})


def test_streams_are_the_laws() -> None:
    assert seeds.sample_stream(bytes(32), 0, 1, 2) != seeds.sample_stream(bytes(32), 0, 2, 1)
