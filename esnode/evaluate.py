"""How good a model, or any round of a ledger, is at a task: greedy score, mean@n and pass@k, with intervals.

Lives here: opening what is to be evaluated, the measurement, the report. Called by `cli/evaluate.py`, and as
a library: `evaluate.run(engine, prepared, scorer)`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from esnode import episodes, estimates, locking, prompts, tasks
from esnode.engines.interface import Engine, Sampling
from esnode.engines.shortage import patiently
from esnode.episodes import Episode, Spent
from esnode.estimates import Estimate
from esnode.models import ModelFolder
from esnode.prompts import Prepared
from esnode.scoring import Scorer
from esnode.tell import Tell, silent, step
from esnode.template import template
from protocol import plan, seeds
from protocol.counting import answers, rounds
from protocol.errors import UserError
from protocol.lock import Lock

ROWS = 32  # answers given to the engine at once: the grain of the progress bar


class EvaluateError(UserError):
    """An evaluation that makes no sense; the sentence says what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. `samples` answers per prompt are drawn besides the greedy one, at `temperature` and
    `top_p`; 0 leaves it at that. `max_new_tokens` 0 means the task's own limit; `seed` chooses the random
    streams.
    """

    split: str = "heldout"
    samples: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 0
    seed: int = 0

    def checked(self, mode: str) -> Settings:
        """The settings themselves. Raises EvaluateError."""
        if self.split not in ("train", "heldout"):
            raise EvaluateError(f"split = {self.split!r}: choose train or heldout")
        if self.samples and mode == "likelihood":
            raise EvaluateError(
                "this task is scored by a likelihood, nothing is sampled: leave --samples out"
            )
        if self.samples and self.temperature <= 0:
            raise EvaluateError("sampling at temperature 0 gives the greedy answer again: choose one above 0")
        if self.samples < 0 or not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise EvaluateError(
                "samples and temperature are at least 0 and finite, top_p is above 0 and at most 1"
            )
        return self


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt: the greedy score, and what the samples were worth."""

    index: int
    reward: float
    correct: bool
    text: str  # the greedy answer; "" for likelihood tasks
    rewards: tuple[float, ...] = ()
    corrects: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The result. Estimates are over prompts, with 95% intervals (`esnode.estimates`)."""

    model: str
    task: str
    round: int | None  # of a ledger
    settings: Settings
    prompts: int
    mode: str  # the task's: "generate" or "likelihood"
    greedy_reward: Estimate
    greedy_correct: Estimate
    mean_reward: Estimate | None  # of the samples; None where nothing was sampled
    mean_correct: Estimate | None  # mean@n: the mean share of right samples
    pass_at: Mapping[int, Estimate]  # by k = 1, 2, 4, ... samples; unbiased (Chen et al. 2021)
    floored: Mapping[str, int]  # answers that got the floor because scoring failed, by reason
    tokens: int
    seconds: float
    results: tuple[PromptResult, ...] = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """Plain data, per-prompt results last."""
        return asdict(self)

    def rows(self) -> list[tuple[str, Estimate]]:
        """(label, estimate) in the order they are shown."""
        n = self.settings.samples
        first = "mean log-likelihood" if self.mode == "likelihood" else "greedy reward"
        found = [(first, self.greedy_reward), ("greedy correct", self.greedy_correct)]
        if self.mean_reward and self.mean_correct:
            found += [(f"mean reward of {n}", self.mean_reward), (f"mean@{n}", self.mean_correct)]
        return found + [(f"pass@{k}", estimate) for k, estimate in self.pass_at.items()]

    def table(self) -> Table:
        """For a terminal."""
        state = "" if self.round is None else f" after {rounds(self.round)}"
        table = Table(
            title=Text(f"{self.model}{state}, {self.task}, {self.prompts} {self.settings.split} prompts"),
            caption=Text(self._caption()),
            title_justify="left",
            caption_justify="left",
        )
        for name in ("", "value", "95% interval", "method"):
            table.add_column(name, justify="left" if name in ("", "method") else "right")
        for label, estimate in self.rows():
            table.add_row(label, f"{estimate.value:.4f}", estimate.interval, estimate.method)
        return table

    def _caption(self) -> str:
        words = ["intervals over prompts"]
        if self.settings.samples:
            words.append(f"{self.settings.samples} samples at temperature {self.settings.temperature:g}")
        words.append(f"{self.tokens} tokens in {self.seconds:.1f} s")
        for reason, count in self.floored.items():
            words.append(f"{answers(count)} got the floor: {reason}")
        return "; ".join(words)


# ---------------------------------------------------------------- measuring


def run(
    engine: Engine,
    prepared: Prepared,
    scorer: Scorer | None = None,
    settings: Settings | None = None,
    *,
    model: str = "",
    round: int | None = None,
    lock: Lock | None = None,
    tell: Tell = silent,
) -> Report:
    """Measure the engine's live weights on one split of the task. Raises EvaluateError on senseless settings.

    `scorer` is needed by tasks that generate. `model` and `round` are labels for the report. `lock`: of the
    run whose own task this is. Its batches and its longest answer are taken then, so that the greedy score
    of the held-out prompts is the one a node with this engine reports, to the last bit.
    """
    chosen = (settings or Settings()).checked(prepared.task.mode)
    began = time.perf_counter()
    batches = _batches(prepared.count(chosen.split), lock)
    drawn: list[list[Episode]] = []
    if prepared.task.mode == "likelihood":
        greedy = _likely(engine, prepared, chosen.split, batches, tell)
    else:
        limit = chosen.max_new_tokens or (lock or prepared.task).max_new_tokens
        greedy, drawn = _played(
            engine, prepared, scorer, replace(chosen, max_new_tokens=limit), batches, tell
        )
    results = [_result(index, greedy[index], drawn[index] if drawn else []) for index in range(len(greedy))]
    every = [*greedy, *(episode for samples in drawn for episode in samples)]
    return Report(
        model=model,
        task=prepared.task.name,
        round=round,
        settings=chosen,
        prompts=len(results),
        mode=prepared.task.mode,
        greedy_reward=_summed(estimates.mean([result.reward for result in results]), results, lock),
        greedy_correct=estimates.share(sum(result.correct for result in results), len(results)),
        mean_reward=estimates.mean([fmean(result.rewards) for result in results]) if drawn else None,
        mean_correct=estimates.mean([fmean(result.corrects) for result in results]) if drawn else None,
        pass_at={
            k: estimates.mean([estimates.pass_at(chosen.samples, sum(r.corrects), k) for r in results])
            for k in estimates.powers_of_two(chosen.samples)
        },
        floored=Counter(episode.failure for episode in every if episode.failure),
        tokens=sum(episode.tokens for episode in every),
        seconds=time.perf_counter() - began,
        results=tuple(results),
    )


def _batches(total: int, lock: Lock | None) -> list[range]:
    """The prompts that go through the engine together, as in a node's unit of the whole split."""
    size = ROWS if lock is None else lock.chunk if lock.repeatable else max(total, 1)
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def _summed(greedy: Estimate, results: Sequence[PromptResult], lock: Lock | None) -> Estimate:
    """The mean as the run's ledger has it: of the chunks' rounded sums."""
    if lock is None:
        return greedy
    starts = range(0, len(results), lock.chunk)
    sums = [math.fsum(one.reward for one in results[start : start + lock.chunk]) for start in starts]
    return replace(greedy, value=math.fsum(sums) / len(results))


def _likely(
    engine: Engine, prepared: Prepared, split: str, batches: Sequence[range], tell: Tell
) -> list[Episode]:
    total = prepared.count(split)
    measured: list[Episode] = []
    for rows in batches:
        tell("measuring likelihoods", rows.start, total)
        measured += patiently(partial(episodes.likelihoods, engine, prepared, split, rows, Spent()))
    tell("measuring likelihoods", total, total)
    return measured


def _played(
    engine: Engine,
    prepared: Prepared,
    scorer: Scorer | None,
    settings: Settings,
    batches: Sequence[range],
    tell: Tell,
) -> tuple[list[Episode], list[list[Episode]]]:
    """Greedy episodes by prompt, and sampled ones by prompt and sample."""
    if scorer is None:
        raise ValueError(f"task {prepared.task.name!r} generates answers: it needs a scorer")
    prompts, samples = prepared.count(settings.split), settings.samples
    limit = settings.max_new_tokens
    key = hashlib.blake2b(f"esnode evaluate {settings.seed}".encode(), digest_size=32).digest()
    greedy = Sampling(limit, prepared.stop_ids)
    sampled = Sampling(limit, prepared.stop_ids, settings.temperature, settings.top_p)
    done = 0

    def answered(rows: Sequence[tuple[int, int]], sampling: Sampling) -> list[Episode]:
        streams = [seeds.sample_stream(key, 0, index, sample) for index, sample in rows]
        indices = [index for index, _ in rows]
        call = partial(episodes.play, engine, prepared, scorer, settings.split, indices, streams, sampling)
        return patiently(lambda: call(Spent()))

    def play(batches: Iterable[Sequence[tuple[int, int]]], sampling: Sampling) -> list[Episode]:
        nonlocal done
        measured: list[Episode] = []
        for rows in batches:
            measured += answered(rows, sampling)
            done += len(rows)
            tell("answering", done, prompts * (1 + samples))
        return measured

    tell("answering", 0, prompts * (1 + samples))
    first = play([[(index, 0) for index in batch] for batch in batches], greedy)
    # Samples of one prompt lie side by side, so that an engine can run what they share once.
    every = [(index, sample) for index in range(prompts) for sample in range(1, samples + 1)]
    rest = play([every[start : start + ROWS] for start in range(0, len(every), ROWS)], sampled)
    return first, [rest[start : start + samples] for start in range(0, len(rest), max(1, samples))]


def _result(index: int, greedy: Episode, drawn: Sequence[Episode]) -> PromptResult:
    return PromptResult(
        index,
        greedy.score.reward,
        greedy.score.correct,
        greedy.texts[-1] if greedy.texts else "",
        tuple(episode.score.reward for episode in drawn),
        tuple(episode.score.correct for episode in drawn),
    )


# ---------------------------------------------------------------- opening


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated, ready to run: `measure` it, then `close` it."""

    engine: Engine
    prepared: Prepared
    scorer: Scorer | None
    model: str
    round: int | None
    lock: Lock | None = None  # of the run, where the task is the run's own

    def measure(self, settings: Settings | None = None, tell: Tell = silent) -> Report:
        """`run` on this subject: greedy answers to the held-out prompts, unless `settings` say otherwise."""
        return run(
            self.engine,
            self.prepared,
            self.scorer,
            settings,
            model=self.model,
            round=self.round,
            lock=self.lock,
            tell=tell,
        )

    def close(self) -> None:
        """End the scoring process."""
        if self.scorer is not None:
            self.scorer.close()


def is_ledger(name: str) -> bool:
    """Whether this names a ledger file or the folder of a run, rather than a model."""
    path = Path(name).expanduser()
    if path.is_dir():
        return (path / "run.ledger").is_file()
    return path.is_file() and path.suffix.lower() != ".gguf"


def open_model(
    name: str,
    task: str,
    options: Mapping[str, Any] | None = None,
    *,
    live_dtype: str = "bfloat16",
    threads: int | None = None,
    code: Path | None = None,
    settings: Settings | None = None,
    tell: Tell = silent,
) -> Subject:
    """A model (demo, folder, GGUF file, hub id) and a task with its options, ready to run.

    `live_dtype`: what it runs in, "bfloat16", "float16" or "float32"; `code`: the folder of `python:` tasks;
    `settings`: to refuse senseless ones first. Raises UserError of what resolving and loading may raise.
    """
    from esnode.engines import transformers_engine

    (settings or Settings()).checked(tasks.find(task)[0].mode)
    written = plan.parse(template(task, name))
    wanted = plan.changed(
        written, task_options=dict(options or {}), live_dtype=live_dtype, per_round=0, max_new_tokens=0
    )
    nobody = "00" * 32  # nothing is signed with the lock of an evaluation
    lock, data, folder = locking.resolve(wanted, trusted=[nobody], progress=tell, code=code, digests=False)
    with step(tell, "loading the model"):
        engine = transformers_engine.load(lock, folder.path, threads=threads, checked=False)
    return _subject(engine, lock, data, folder, code, name, None)


def open_ledger(
    path: str | Path,
    task: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    round: int | None = None,
    base: str | None = None,
    threads: int | None = None,
    code: Path | None = None,
    settings: Settings | None = None,
    tell: Tell = silent,
) -> Subject:
    """The weights of any round of a ledger, and a task; left out, the task the run was trained on.

    The run's own task keeps the run's data, options, date, batches and longest answer, so that a greedy score
    is the run's held-out score, as `run` says of its lock. Arguments and errors as of `rebuild.at` and
    `locking.own_data`, `settings` as of `open_model`; `options` and `code` are the task's.
    """
    from esnode import rebuild

    ledger = rebuild.open_ledger(path)
    lock = ledger.lock
    spec = lock.task if task is None else task
    chosen = {**(lock.task_options if spec == lock.task else {}), **(options or {})}
    (settings or Settings()).checked(tasks.find(spec)[0].mode)
    with step(tell, f"making the data of task {spec}"):  # before minutes of work, not after
        if task is None and not options:
            data = locking.own_data(lock, ledger.path.parent, code=code)
        else:
            data = tasks.materialise(spec, chosen, code=code)
    rebuilt = rebuild.at(ledger, round, base, threads=threads, tell=tell)
    settled = replace(lock, task=spec, task_options=tasks.header(data)[1])
    label = f"{lock.model} ({ledger.path})"
    subject = _subject(rebuilt.engine, settled, data, rebuilt.model, code, label, rebuilt.round)
    return replace(subject, lock=lock) if settled == lock and locking.fits(lock, data) else subject


def _subject(
    engine: Engine,
    lock: Lock,
    data: bytes,
    folder: ModelFolder,
    code: Path | None,
    label: str,
    round: int | None,
) -> Subject:
    task = tasks.open_task(lock.task, lock.task_options, data, code=code)
    prepared = prompts.prepare(folder.path, task, lock.date)
    return Subject(engine, prepared, locking.scorer(lock, data, code=code), label, round)
