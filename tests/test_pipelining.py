"""Scoring beside generation: the engine is free as soon as the last answer is there; the rest is as before.

The task's scorer waits for a file, so that the order of things does not depend on how fast this machine is.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from esnode.engines.interface import Cancelled
from esnode.engines.shortage import OutOfMemory
from esnode.enginethread import EngineThread, Folded, Generated, Measured
from esnode.prompts import Prepared
from esnode.scoring import Scorer, ScorerError
from esnode.worker import Outcome, Worker
from protocol.messages import Kind, Unit
from tests.fake_engine import FakeEngine
from tests.runs import Processes, make_folder
from tests.test_worker import lock_for, opened

GATED = """
import os, time
def items(): return [{"prompt": str(n), "gate": GATE} for n in range(6)], [{"prompt": "h", "gate": GATE}]
def score(item, text):
    while not os.path.exists(item["gate"]):
        time.sleep(0.005)
    return int(item["prompt"]) / 8 + len(text) / 64
"""
SECONDS = 20.0  # nothing here takes so long


@dataclass
class Bench:
    """A worker on a fake engine whose scorer waits for `gate`."""

    worker: Worker
    engine: FakeEngine
    scorer: Scorer
    gate: Path

    def open(self) -> None:
        self.gate.touch()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = make(tmp_path)
    yield made
    made.open()
    made.worker.close()
    made.scorer.close()


def make(place: Path, code: str = GATED, **changes: Any) -> Bench:
    (place / "gated.py").write_text(code.replace("GATE", repr(str(place / "gate")), 2))
    prepared, scorer = opened("python:gated.py", code=place, time_limit=SECONDS)
    engine = FakeEngine(lambda prompt, stream: [65] * (1 + stream % 7))
    lock = lock_for(prepared, "python:gated.py", **changes)
    return Bench(Worker(lock, engine, prepared, scorer), engine, scorer, place / "gate")


def member(number: int) -> Unit:
    return Unit(round=number, kind=Kind.MEMBER, member=number, first=0, last=1)


def test_the_next_member_is_perturbed_and_answered_while_scores_are_awaited(bench: Bench) -> None:
    first = bench.worker.generate(member(0))
    second = bench.worker.generate(member(1))
    assert bench.engine.calls == ["perturb", "generate"] * 2 and not first.done() and not second.done()
    bench.open()
    together = first.result(SECONDS), second.result(SECONDS)
    serial = bench.worker.evaluate(member(0)), bench.worker.evaluate(member(1))
    assert [told(outcome) for outcome in together] == [told(outcome) for outcome in serial]
    assert together[0].sums != together[1].sums


def told(outcome: Outcome) -> Outcome:
    """All of it but the clock's part."""
    return replace(outcome, times=(0, 0, 0))


def test_scores_come_in_the_order_of_the_units(bench: Bench) -> None:
    order: list[int] = []
    futures = []
    for number in range(3):
        futures.append(bench.worker.generate(member(number)))
        futures[-1].add_done_callback(lambda _, number=number: order.append(number))
    bench.open()
    futures[2].result(SECONDS)
    assert [future.done() for future in futures] == [True] * 3 and order[:2] == [0, 1]


def test_a_chunk_is_scored_beside_the_next_one(tmp_path: Path) -> None:
    """With repeatable batches the first chunk's scores are there before the second has been answered."""
    bench = make(tmp_path, repeatable=True)
    bench.open()
    seen: list[int] = []
    plain, judged = bench.engine.generate, threading.Event()
    judge = bench.scorer.judge

    def watched(*arguments: Any, **options: Any) -> Any:
        found = judge(*arguments, **options)
        judged.set()
        return found

    def slow(*arguments: Any, **options: Any) -> Any:
        if bench.engine.batches:
            assert judged.wait(SECONDS)
            seen.append(len(bench.engine.batches))
        return plain(*arguments, **options)

    bench.scorer.judge, bench.engine.generate = watched, slow  # type: ignore[method-assign]
    bench.worker.evaluate(member(0))
    assert seen == [1]
    bench.worker.close()
    bench.scorer.close()


def test_a_unit_cancelled_while_it_is_scored_ends_at_once(bench: Bench) -> None:
    stop = threading.Event()
    cancelled = bench.worker.generate(member(0), stop.is_set)
    following = bench.worker.generate(member(1))
    stop.set()
    with pytest.raises(Cancelled):
        cancelled.result(SECONDS)
    bench.open()
    assert told(following.result(SECONDS)) == told(bench.worker.evaluate(member(1)))


def test_a_unit_cancelled_while_it_is_answered_drops_the_scores_it_waits_for(tmp_path: Path) -> None:
    bench = make(tmp_path, repeatable=True)
    asked = iter(range(100))

    with pytest.raises(Cancelled):
        bench.worker.generate(member(0), lambda: next(asked) > 4)  # in its second chunk
    bench.open()
    assert bench.worker.evaluate(member(1)).floored == 0
    bench.worker.close()
    bench.scorer.close()


def test_a_scorer_that_fails_costs_the_floor_in_a_later_thread_too(tmp_path: Path) -> None:
    bench = make(tmp_path, GATED.replace("return int", "assert item['prompt'] != '3'\n    return int"))
    waiting = bench.worker.generate(member(0))
    bench.worker.generate(member(1))
    bench.open()
    assert waiting.result(SECONDS).floored == 1
    bench.worker.close()
    bench.scorer.close()


def test_a_scorer_that_cannot_start_fails_the_unit_and_not_the_engine(tmp_path: Path) -> None:
    bench = make(tmp_path)
    bench.scorer._opening["spec"] = "python:gone.py"
    bench.scorer.close()
    with pytest.raises(Exception, match="gone"):
        bench.worker.generate(member(0)).result(SECONDS)
    assert bench.engine.calls == ["perturb", "generate"]
    bench.worker.close()


def test_progress_goes_on_while_scores_are_awaited(bench: Bench) -> None:
    heard: list[int] = []
    moved = threading.Event()

    def progress(thousandths: int) -> None:
        heard.append(thousandths)
        if thousandths > 901:
            moved.set()

    waiting = bench.worker.generate(member(0), progress=progress)
    assert moved.wait(SECONDS)
    assert heard == sorted(set(heard)) and 900 in heard and heard[-1] < 1000
    bench.open()
    waiting.result(SECONDS)


# ---------------------------------------------------------------- several turns

TALK = """
MAX_TURNS = 2
def items(): return [{"prompt": str(n), "turns": n % 2} for n in range(6)], [{"prompt": "h", "turns": 0}]
def reply(item, messages, text):
    if len(messages) == 1 and item["turns"]:
        return [{"role": "user", "content": "go on"}]
    return len(messages) / 8
"""


def test_an_answer_that_another_turn_may_follow_is_scored_before_it(tmp_path: Path) -> None:
    bench = make(tmp_path, TALK)
    futures = [bench.worker.generate(member(number)) for number in range(2)]
    assert [len(batch) for batch in bench.engine.batches] == [6, 3, 6, 3]
    assert [future.result(SECONDS).sums for future in futures] == [
        bench.worker.evaluate(member(number)).sums for number in range(2)
    ]
    bench.worker.close()
    bench.scorer.close()


# ---------------------------------------------------------------- memory, tokens


class Cramped(FakeEngine):
    """The second batch does not fit the first time."""

    def generate(self, *arguments: Any, **options: Any) -> list[list[int]]:
        found = super().generate(*arguments, **options)
        if len(self.batches) == 2:
            self.fingerprint = b"smaller!"
            raise OutOfMemory("4 prompts at once do not fit into memory", 2)
        return found


def test_a_unit_that_did_not_fit_is_measured_again_as_a_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(tmp_path, repeatable=True)
    bench.open()
    usual = bench.worker.evaluate(member(0))
    cramped = Cramped(bench.engine.answer)
    worker = Worker(bench.worker._lock, cramped, bench.worker._prepared, bench.scorer)
    outcome = worker.evaluate(member(0))
    assert cramped.calls == ["perturb", *["generate"] * 4]
    assert outcome.sums == usual.sums and outcome.tokens == usual.tokens
    assert [record.getMessage() for record in caplog.records if "at most 2" in record.getMessage()]
    for opened_worker in (worker, bench.worker):
        opened_worker.close()
    bench.scorer.close()


def test_prompts_are_tokenised_once_a_run(tmp_path: Path) -> None:
    bench = make(tmp_path)
    bench.open()
    counted: list[Any] = []
    prepared: Prepared = bench.worker._prepared
    tokenizer = prepared._tokenizer

    class Counting:
        def __call__(self, texts: Sequence[str], **options: Any) -> Any:
            counted.append(texts)
            return tokenizer(texts, **options)

        def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
            counted.append(arguments)
            return tokenizer.apply_chat_template(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    prepared._tokenizer = Counting()
    futures: list[Future[Outcome]] = [bench.worker.generate(member(number)) for number in range(3)]
    assert all(future.result(SECONDS).tokens for future in futures) and counted == []
    assert prepared.render([{"role": "user", "content": "?"}]) and counted  # the counter counts
    bench.worker.close()
    bench.scorer.close()


# ---------------------------------------------------------------- the engine's thread, and a whole node


class Gated:
    """As much of a workshop as an engine thread asks for: scores come when `gate` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.done: list[str] = []
        self._desk = ThreadPoolExecutor(1)

    def evaluate(
        self, unit: Unit, sigma: float, stop: Callable[[], bool], progress: Callable[[int], None]
    ) -> Future[Any]:
        self.done.append(f"answers of {unit.member}")

        def score() -> int:
            while not self.gate.wait(0.01):
                if stop():
                    raise Cancelled
            if unit.member == 2:
                raise ScorerError("it does not start")
            self.done.append(f"scores of {unit.member}")
            return unit.member

        return self._desk.submit(score)

    def apply(self, entries: Sequence[Any]) -> list[int]:
        self.done.append("update")
        return [7]


@dataclass
class Listener:
    """An engine thread, and its reports as they come."""

    workshop: Gated
    thread: EngineThread
    told: queue.SimpleQueue[None]

    def next(self, count: int) -> list[Any]:
        """The next `count` reports."""
        found: list[Any] = []
        while len(found) < count:
            self.told.get(timeout=SECONDS)
            found += self.thread.reports()
        return found


@pytest.fixture
def listener() -> Iterator[Listener]:
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    workshop = Gated()
    yield (made := Listener(workshop, EngineThread(cast(Any, workshop), lambda: told.put(None)), told))
    workshop.gate.set()
    assert made.thread.close(SECONDS)


def test_an_update_starts_the_moment_the_engine_is_free(listener: Listener) -> None:
    listener.thread.evaluate(member(0), 0.1)
    listener.thread.evaluate(member(1), 0.1)
    listener.thread.apply(())
    reports = listener.next(3)
    assert reports[:2] == [Generated(member(0)), Generated(member(1))] and isinstance(reports[2], Folded)
    assert listener.workshop.done == ["answers of 0", "answers of 1", "update"]
    assert set(listener.thread.progress) == {member(0), member(1)}
    listener.workshop.gate.set()
    assert listener.next(2) == [Measured(member(number), cast(Any, number), "") for number in range(2)]
    assert not listener.thread.progress


def test_only_the_cancelled_unit_ends_early(listener: Listener) -> None:
    listener.thread.evaluate(member(0), 0.1)
    listener.thread.evaluate(member(1), 0.1)
    listener.next(2)
    listener.thread.cancel(member(0))
    assert listener.next(1) == [Measured(member(0), None, "")]
    listener.workshop.gate.set()
    assert listener.next(1) == [Measured(member(1), cast(Any, 1), "")]


def test_a_failure_of_scoring_is_the_units(listener: Listener) -> None:
    listener.thread.evaluate(member(2), 0.1)
    listener.next(1)
    listener.workshop.gate.set()
    assert listener.next(1)[0] == Measured(member(2), None, "it does not start")


def test_a_round_takes_less_than_its_answers_and_scores_one_after_the_other(tmp_path: Path) -> None:
    """Real processes. A unit sleeps a quarter of a second in the engine and as long in its scorer: one after
    the other, four members could not take less than two seconds.
    """
    make_folder(tmp_path, rounds=2, members=4, task_options={"seconds": 0.25, "scoring": 0.25})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        processes.wait_end()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if row["kind"] == "commit"]
    assert seconds[1] < 4 * (0.25 + 0.25), "round 0 has the first probe, round 1 none"
