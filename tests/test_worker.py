"""One unit of work on a fake engine: which prompts, which weights, which sums."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esnode import tasks
from esnode.engines.interface import Cancelled
from esnode.prompts import Prepared
from esnode.scoring import Scorer
from esnode.tasks import Score
from esnode.worker import Worker
from protocol import seeds
from protocol.lock import Lock
from protocol.messages import Kind, Unit
from tests import tiny
from tests.fake_engine import FakeEngine


def lock_for(prepared: Prepared, spec: str, **changes: Any) -> Lock:
    fields: dict[str, Any] = {
        "model": "fake", "base": "00" * 32, "digest": 0, "manifest": (), "task": spec, "data": "00" * 32,
        "scorer": "00" * 32,
        "train_prompts": prepared.count("train"), "heldout_prompts": prepared.count("heldout"),
        "train_tokens": prepared.digest("train"), "heldout_tokens": prepared.digest("heldout"),
        "stop_ids": prepared.stop_ids, "reward_low": prepared.task.low, "reward_high": prepared.task.high,
        "members": 4, "mirrored": True, "sigma": (0.5, 0.25), "alpha": (0.1,), "per_round": 6, "chunk": 4,
        "max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9, "trusted": ("00" * 32,),
    }  # fmt: skip
    return Lock(**(fields | changes))


def opened(spec: str, code: Path | None = None, **options: Any) -> tuple[Prepared, Scorer]:
    data = tasks.materialise(spec, options, code=code)
    scorer = Scorer(spec, tasks.header(data)[1], data, code=code)
    return Prepared(tiny.tokenizer(), scorer.task, "2026-01-01"), scorer


@pytest.fixture(scope="module")
def short() -> Prepared:
    return opened("short-answers")[0]


MEMBER = Unit(round=1, kind=Kind.MEMBER, member=3, first=0, last=1)
PROBE = Unit(round=1, kind=Kind.PROBE, member=0, first=0, last=7)


# ---------------------------------------------------------------- likelihood tasks


def test_a_member_sees_the_rounds_prompts_on_perturbed_weights(short: Prepared) -> None:
    lock, engine = lock_for(short, "short-answers"), FakeEngine()
    seen: list[Any] = []
    engine.loglik, plain = lambda *a: (seen.append(engine.perturbed), plain(*a))[1], engine.loglik  # type: ignore
    outcome = Worker(lock, engine, short).evaluate(MEMBER)
    order = seeds.prompts_of_round(lock.run_id, 1, 6, lock.train_prompts)
    assert engine.batches == [[short.ids_of("train", index) for index in order]]
    assert seen == [(seeds.member_seed(lock.run_id, 1, 3, True), 0.25, -1)]
    assert engine.calls == ["perturb", "loglik"]
    rewards = [
        -(len(short.target_ids("train", k)) * 0.75 + sum(short.ids_of("train", k)) % 7)
        / len(short.target_ids("train", k))
        for k in order
    ]
    assert outcome.sums == (math.fsum(rewards[:4]), math.fsum(rewards[4:]))
    assert outcome.evidence == hashlib.blake2b(struct.pack("<6d", *rewards)).digest()[:8]
    assert outcome.tokens == sum(len(short.target_ids("train", k)) for k in order)
    assert outcome.floored == 0 and len(outcome.times) == 3


def test_chunks_of_a_unit_are_its_own_and_add_up(short: Prepared) -> None:
    worker = Worker(lock_for(short, "short-answers"), FakeEngine(), short)
    whole = worker.evaluate(MEMBER)
    parts = [worker.evaluate(replace_unit(MEMBER, first=chunk, last=chunk)) for chunk in (0, 1)]
    assert whole.sums == (*parts[0].sums, *parts[1].sums)


def replace_unit(unit: Unit, **changes: int) -> Unit:
    fields = {name: getattr(unit, name) for name in ("round", "kind", "member", "first", "last")}
    return Unit(**(fields | changes))


def test_a_probe_runs_on_the_master_and_the_heldout_prompts(short: Prepared) -> None:
    engine = FakeEngine()
    outcome = Worker(lock_for(short, "short-answers"), engine, short).evaluate(PROBE)
    assert engine.calls == ["restore", "loglik"] and len(outcome.sums) == 8
    assert engine.batches == [[short.ids_of("heldout", index) for index in range(32)]]


def test_batches(short: Prepared) -> None:
    lock = lock_for(short, "short-answers")

    def sizes(run: Lock) -> list[int]:
        engine = FakeEngine()
        sums = Worker(run, engine, short).evaluate(MEMBER).sums
        assert len(sums) == 2
        return [len(rows) for rows in engine.batches]

    assert sizes(lock) == [6]
    assert sizes(replace(lock, repeatable=True)) == [4, 2]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({0}, ["round 2 member 3: 1 answer got the floor", "held-out after 1 round: 1 answer got the floor"]),
        ({0, 1}, ["round 2 member 3: 2 answers got", "held-out after 1 round: 2 answers got the floor"]),
    ],
)
def test_the_log_names_what_was_measured(
    short: Prepared,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rows: set[int],
    words: list[str],
) -> None:
    engine = FakeEngine()
    engine.break_rows = tuple(rows)
    worker = Worker(lock_for(short, "short-answers"), engine, short)
    monkeypatch.setattr(logging.getLogger("esnode"), "propagate", True)  # a test before may have
    with caplog.at_level(logging.WARNING):
        for unit in (MEMBER, PROBE):
            worker.evaluate(unit)
    assert [said in line for said, line in zip(words, caplog.messages, strict=True)] == [True, True]


def test_unusable_logits_get_the_floor(short: Prepared) -> None:
    engine = FakeEngine()
    engine.break_rows = (1, 4)
    outcome = Worker(lock_for(short, "short-answers"), engine, short).evaluate(MEMBER)
    assert outcome.floored == 2 and outcome.sums[0] < -30 and outcome.sums[1] < -30


def test_no_unit_sees_what_another_left_behind(short: Prepared) -> None:
    """A cancelled or failed member leaves its weights; the next unit writes its own before it measures."""
    engine = FakeEngine()
    worker = Worker(lock_for(short, "short-answers"), engine, short)
    clean, probe = worker.evaluate(MEMBER), worker.evaluate(PROBE)
    other = replace_unit(MEMBER, member=MEMBER.member + 2)
    with pytest.raises(Cancelled):
        worker.evaluate(other, stop=lambda: True)
    assert engine.perturbed is not None
    assert worker.evaluate(PROBE).sums == probe.sums and engine.perturbed is None
    engine.loglik, usual = lambda *a: 1 / 0, engine.loglik  # type: ignore
    with pytest.raises(ZeroDivisionError):
        worker.evaluate(other)
    engine.loglik = usual  # type: ignore
    assert worker.evaluate(MEMBER).sums == clean.sums
    assert engine.perturbed == (seeds.member_seed(worker._lock.run_id, 1, 3, True), 0.25, -1)


def test_progress_moves_with_every_decode_step(short: Prepared) -> None:
    told: list[int] = []
    lock = replace(lock_for(short, "short-answers"), repeatable=True)
    Worker(lock, FakeEngine(), short).evaluate(MEMBER, progress=told.append)
    assert told == sorted(set(told)) and told[-1] == 1000 and 500 in told and len(told) >= 7


# ---------------------------------------------------------------- tasks that generate


def test_generated_answers_are_scored(short: Prepared) -> None:
    prepared, scorer = opened("conciseness")
    engine = FakeEngine(lambda prompt, stream: [65] * (stream % 5))
    lock = lock_for(prepared, "conciseness", mirrored=False)
    with scorer:
        outcome = Worker(lock, engine, prepared, scorer).evaluate(MEMBER)
    order = seeds.prompts_of_round(lock.run_id, 1, 6, lock.train_prompts)
    streams = [seeds.sample_stream(lock.run_id, 1, index, 0) for index in order]
    assert engine.streams == [streams]
    (sampling,) = engine.samplings
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.7, 0.9, 8)
    assert sampling.stop_ids == prepared.stop_ids
    scores = [
        scorer.task.score(scorer.task.train[index], "b" * (stream % 5))
        for index, stream in zip(order, streams, strict=True)
    ]
    assert outcome.sums == (
        math.fsum(score.reward for score in scores[:4]),
        math.fsum(score.reward for score in scores[4:]),
    )
    assert outcome.correct == sum(score.correct for score in scores)
    assert outcome.tokens == sum(stream % 5 for stream in streams)


def test_probes_are_greedy() -> None:
    prepared, scorer = opened("conciseness")
    engine = FakeEngine()
    with scorer:
        Worker(lock_for(prepared, "conciseness"), engine, prepared, scorer).evaluate(
            replace_unit(PROBE, last=3)
        )
    assert [sampling.temperature for sampling in engine.samplings] == [0.0]


def test_broken_rows_and_failing_scorers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "def items(): return [{'prompt': c} for c in 'abcdef'], [{'prompt': 'h'}]\n"
        "def score(item, text): return 1.0 if item['prompt'] != 'c' else float('nan')\n"
    )
    prepared, scorer = opened("python:picky.py", code=tmp_path)
    engine = FakeEngine()
    engine.break_rows = (0,)
    lock = lock_for(prepared, "python:picky.py")
    with scorer:
        outcome = Worker(lock, engine, prepared, scorer).evaluate(MEMBER)
    first = seeds.prompts_of_round(lock.run_id, 1, 6, 6)[0]
    lost = {first, 2}
    assert (
        outcome.floored == len(lost)
        and outcome.correct == 6 - len(lost)
        and sum(outcome.sums) == 6 - len(lost)
    )


def test_a_generating_task_needs_a_scorer() -> None:
    prepared, _ = opened("conciseness")
    with pytest.raises(ValueError, match="needs a scorer"):
        Worker(lock_for(prepared, "conciseness"), FakeEngine(), prepared)


# ---------------------------------------------------------------- several turns

COUNTING = """
MAX_TURNS = 3
def items(): return [{"prompt": str(n), "turns": n} for n in range(5)], [{"prompt": "h", "turns": 0}]
def reply(item, messages, text):
    spoken = [m["content"] for m in messages if m["role"] == "assistant"]
    if len(spoken) < item["turns"]:
        return [{"role": "user", "content": f"{len(spoken)}:{text}"}]
    return 1.0 if messages[-1]["content"].endswith(spoken[-1] if spoken else item["prompt"]) else 0.0
"""


def test_episodes_of_several_turns(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNTING)
    prepared, scorer = opened("python:count.py", code=tmp_path)

    def answer(prompt: Sequence[int], stream: int) -> list[int]:
        return [65 + stream % 20, 65 + stream // 20 % 20]

    engine = FakeEngine(answer)
    lock = lock_for(prepared, "python:count.py", per_round=5, chunk=5)
    unit = replace_unit(MEMBER, last=0)
    with scorer:
        outcome = Worker(lock, engine, prepared, scorer).evaluate(unit)
        again = Worker(lock, engine, prepared, scorer).evaluate(unit)
    # Items 0, 1, 2 end in turn 1, 2, 3; 3 and 4 have no end within MAX_TURNS and get the floor.
    assert (outcome.sums, outcome.floored, outcome.tokens) == ((3.0,), 2, 2 * (1 + 2 + 3 + 3 + 3))
    assert [len(batch) for batch in engine.batches[:3]] == [5, 4, 3]
    assert len({stream for batch in engine.streams[:3] for stream in batch}) == 12
    assert again.sums == outcome.sums and again.evidence == outcome.evidence
    said = prepared.decode(answer([], engine.streams[0][0]))
    order = seeds.prompts_of_round(lock.run_id, 1, 5, 5)
    if order[0] != 0:
        second = prepared._tokenizer.decode(engine.batches[1][0])
        assert f"<|assistant|>{said}<|end|><|user|>0:{said}<|end|><|assistant|>" in second


def test_a_conversation_that_outgrows_the_context_gets_the_floor(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        "def items(): return [{'prompt': 'a'}], [{'prompt': 'h'}]\n"
        "def reply(item, messages, text): return [{'role': 'user', 'content': 'x' * 50}]\n"
    )
    prepared, scorer = opened("python:long.py", code=tmp_path)
    prepared.context = 60
    lock = lock_for(prepared, "python:long.py", per_round=1, chunk=1)
    with scorer:
        outcome = Worker(lock, FakeEngine(), prepared, scorer).evaluate(replace_unit(MEMBER, last=0))
    assert outcome.floored == 1 and outcome.sums == (0.0,) and Score(0.0, False).correct is False


def test_items_reach_the_scorer_by_number(tmp_path: Path) -> None:
    """The scorer reads its own copy of the data: what counts is the index, not the order of the batch."""
    path = tmp_path / "q.jsonl"
    lines = [{"prompt": f"q{n}", "answer": f"{n}", "split": "train" if n < 6 else "test"} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepared, scorer = opened(f"file:{path}", scoring="numeric")
    engine = FakeEngine(lambda prompt, stream: [prompt[-3]])  # the prompt's digit
    lock = lock_for(prepared, f"file:{path}")
    with scorer:
        outcome = Worker(lock, engine, prepared, scorer).evaluate(MEMBER)
    assert outcome.correct == 6 and outcome.sums == (4.0, 2.0)
