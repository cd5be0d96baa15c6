"""Where the time of a node goes: one round's shares, and a timeline of them. Behind `esnode bench node`.

Some members of the first round are measured as a node does it, scores beside the next member's answers, then
a commit of the plan's whole population is applied, and the shares of a round of that population are worked
out. Needs the node extra. Called by `cli/bench.py` and `benchmarks/round.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from esnode import locking
from esnode.engines.interface import Engine
from esnode.folder import write_file
from esnode.prompts import Prepared
from esnode.scoring import Scorer
from esnode.worker import Outcome, Worker
from protocol import plan as planning
from protocol.bodies import CommitBody, Entry, MemberReward
from protocol.entries import public_key, seal
from protocol.lock import Kind, Lock
from protocol.messages import Unit
from protocol.plan import Plan

KEY = bytes(range(32))  # signs a commit that no ledger will hold
ENGINE, SCORER = "engine", "scoring process"
AHEAD = 2  # units a node has at once: one in the engine, one whose scores are awaited


@dataclass(slots=True)
class Timeline:
    """What was done when: (lane, name, begin, end) in seconds of one clock."""

    spans: list[tuple[str, str, float, float]] = field(default_factory=list)

    def timed(self, lane: str, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with a line in the timeline for each call."""

        def measured(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                self.spans.append((lane, name, began, time.perf_counter()))

        return measured

    def as_trace(self) -> str:
        """Trace Event Format, as https://ui.perfetto.dev and chrome://tracing open it; microseconds."""
        start = min((begin for _, _, begin, _ in self.spans), default=0.0)
        lanes = list(dict.fromkeys(lane for lane, *_ in self.spans))
        names: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "esnode"}}
        ]
        names += [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": k, "args": {"name": lane}}
            for k, lane in enumerate(lanes)
        ]
        whole = [
            (lane, name, round(1e6 * (a - start)), round(1e6 * (b - start)))
            for lane, name, a, b in self.spans
        ]
        events = [
            {"ph": "X", "name": name, "cat": lane, "pid": 1, "tid": lanes.index(lane), "ts": a, "dur": b - a}
            for lane, name, a, b in whole  # both ends rounded: spans that touch must not overlap
        ]
        return json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"})


class Timed:
    """An object whose named methods are in a timeline; everything else is the object's own."""

    def __init__(self, inner: Any, timeline: Timeline, lane: str, methods: Sequence[str]) -> None:
        self._inner = inner
        for name in methods:
            setattr(self, name, timeline.timed(lane, name, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True, slots=True)
class Member:
    """One member's unit: its outcome, and seconds that its outcome does not tell."""

    outcome: Outcome
    check: float  # reading the master for damage
    busy: float  # the engine was not free for another unit, from the check to the last answer
    scored: float  # the scorer worked on it after that


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured, and everything needed to measure more on the same engine."""

    lock: Lock
    engine: Engine
    prepared: Prepared
    measured: tuple[Member, ...]
    update: float  # seconds
    timeline: Timeline

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Of the members, in order."""
        return tuple(member.outcome for member in self.measured)

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of one round of the lock's population on one node, worked out from the median member.

        They add up to `total`: `score` is only what the engine waits for scores, `scoring` is what all of it
        takes, mostly beside the engine. `other_share` is what is not `engine`.
        """
        count = self.lock.members
        perturb, engine, scoring = (
            count * median(outcome.times[k] for outcome in self.outcomes) / 1000 for k in range(3)
        )
        check = count * median(member.check for member in self.measured)
        busy, scored = (
            median(getattr(member, name) for member in self.measured) for name in ("busy", "scored")
        )
        waits = max(0.0, round_seconds([(busy, scored)] * count) - check - perturb - engine)
        total = check + perturb + engine + waits + self.update
        found = {
            "check": check, "perturb": perturb, "engine": engine, "score": waits, "update": self.update,
            "total": total, "scoring": scoring,
        }  # fmt: skip
        return {name: round(value, 4) for name, value in found.items()} | {
            "other_share": round(1 - engine / total, 4)
        }


def round_seconds(units: Sequence[tuple[float, float]]) -> float:
    """How long a node takes for units of (seconds in the engine, seconds of scoring after that), in order.

    The engine goes on while earlier units are scored one after the other, but no further than `AHEAD`: the
    coordinator gives a unit when a result comes.
    """
    engine, scored = 0.0, [0.0] * AHEAD
    for busy, scoring in units:
        engine = max(engine, scored[-AHEAD]) + busy
        scored.append(max(engine, scored[-1]) + scoring)
    return scored[-1]


def measure(
    plan: Plan, load: Callable[..., Engine], members: int, *, threads: int | None, code: Path | None = None
) -> Bench:
    """Load the plan's model with an engine's `load`, measure `members` members, apply one whole round."""
    lock, data, folder = locking.resolve(plan, trusted=[public_key(KEY).hex()], code=code)
    prepared = locking.prepare(lock, folder.path, data, code=code)
    scorer = locking.scorer(lock, data, code=code)
    timeline = Timeline()
    engine = load(lock, folder.path, threads=threads)
    timed = Timed(engine, timeline, ENGINE, ("damaged", "perturb", "restore", "apply", "generate", "loglik"))
    try:
        measured = _units(lock, timed, prepared, scorer, timeline, min(members, lock.members))
    finally:
        if scorer is not None:
            scorer.close()
    began = time.perf_counter()
    timed.apply([commit(lock)])
    return Bench(lock, engine, prepared, measured, time.perf_counter() - began, timeline)


def _units(
    lock: Lock, engine: Any, prepared: Prepared, scorer: Scorer | None, timeline: Timeline, members: int
) -> tuple[Member, ...]:
    judge: Any = None if scorer is None else Timed(scorer, timeline, SCORER, ("judge",))
    worker = Worker(lock, engine, prepared, judge)
    last = lock.chunk_count(Kind.MEMBER) - 1
    futures: list[Future[Outcome]] = []
    began, checked, free, ended = ([0.0] * members for _ in range(4))

    def note(member: int, outcome: Future[Outcome]) -> None:
        ended[member] = time.perf_counter()

    for member in range(members):
        began[member] = time.perf_counter()
        engine.damaged()
        checked[member] = time.perf_counter()
        futures.append(worker.generate(Unit(0, Kind.MEMBER, member, 0, last)))
        free[member] = time.perf_counter()
        futures[-1].add_done_callback(partial(note, member))
    outcomes = [future.result() for future in futures]
    worker.close()  # and with it the last note is taken
    turns = [max(pair) for pair in zip(free, [0.0, *ended], strict=False)]  # when the scorer was free for it
    return tuple(
        Member(outcome, checked[k] - began[k], free[k] - began[k], max(0.0, ended[k] - turns[k]))
        for k, outcome in enumerate(outcomes)
    )


def commit(lock: Lock) -> Entry:
    """Round 0 of a whole population with rewards spread over the range."""
    span = lock.reward_high - lock.reward_low
    members = tuple(
        MemberReward(
            index,
            lock.reward_low + span * (index + 1) / (lock.members + 1),
            1,
        )
        for index in range(lock.members)
    )
    body = CommitBody(lock.alpha_at(0), lock.sigma_at(0), members)
    return seal(body, parent=bytes(32), term=1, nonce=bytes(8), round=0, digest=lock.digest, key=KEY)


def read_plan(path: Path | None, task: str, model: str) -> Plan:
    """A plan file's plan, or the template of a task and a model."""
    from esnode.template import template

    text = template(task, model) if path is None else path.read_text(encoding="utf-8")
    return planning.parse(text)


def write_trace(bench: Bench, path: Path) -> None:
    """The timeline as a file for Perfetto."""
    write_file(path, bench.timeline.as_trace().encode())


def words(bench: Bench) -> list[str]:
    """The shares for a terminal, with a bar for each."""
    shares, lock = bench.shares, bench.lock
    lines = [
        f"{lock.task} on {lock.model}: a round of {lock.members} members, {lock.per_round} prompts, takes "
        f"this node {shares['total']:.1f} s",
    ]
    for name in ("engine", "check", "perturb", "score", "update"):
        part = shares[name] / shares["total"]
        lines.append(f"  {name:8} {shares[name]:8.2f} s  {part:6.1%}  {'█' * round(40 * part)}")
    if shares["scoring"]:
        beside = max(0.0, shares["scoring"] - shares["score"])
        lines.append(
            f"  scoring takes {shares['scoring']:.2f} s, {beside:.2f} s of it beside the engine's work"
        )
    tokens = sum(outcome.tokens for outcome in bench.outcomes)
    busy = sum(outcome.times[1] for outcome in bench.outcomes) / 1000
    lines.append(f"  {tokens / busy:.0f} tokens/s while the engine works" if busy else "")
    return lines
