"""Letting the model answer prompts and having the answers scored: episodes of one or several turns.

Shared by `worker.py` (one sample per prompt, inside a unit) and `evaluate.py` (many). All episodes of a call
go through the engine together, turn by turn; who wants smaller batches makes several calls. `speak` ends when
the engine is not needed any more, `finish` does the rest and may run in another thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from esnode.engines.interface import Engine, Sampling, StopCheck, never
from esnode.prompts import Ids, Prepared
from esnode.scoring import Scorer, Verdict
from esnode.tasks import ChatMessage, Score, Task

OVERFLOW = "the perturbed model's logits are NaN or infinite"
TURN_STREAMS = 0x9E3779B97F4A7C15  # odd, so that turns of one episode draw from different streams


@dataclass(frozen=True, slots=True)
class Episode:
    """One prompt's outcome. `texts`: what the model said, turn by turn (none for a likelihood).

    `tokens`: generated ones, or those of the target. `failure`: why the score is the floor although nothing
    was scored (a scorer that raised, hung or crashed, a conversation without an end); empty otherwise.
    """

    score: Score
    tokens: int
    texts: tuple[str, ...] = ()
    failure: str = ""


@dataclass(slots=True)
class Spent:
    """Seconds inside the engine and inside the scorer, added up over calls."""

    engine: float = 0.0
    scorer: float = 0.0


@dataclass(slots=True)
class _Open:
    """An episode under way."""

    slot: int  # place among the episodes of the call
    index: int
    stream: int
    ids: Ids
    messages: list[ChatMessage]
    texts: list[str] = field(default_factory=list)
    answer: Sequence[int] = ()  # the last one, not among the texts yet
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Spoken:
    """Episodes in which the model says nothing more: those that ended, and those whose last answer is to be
    scored.
    """

    split: str
    ended: dict[int, Episode]  # by their place in the call
    last: list[_Open]


def likelihoods(
    engine: Engine,
    prepared: Prepared,
    split: str,
    indices: Sequence[int],
    spent: Spent,
    stop: StopCheck = never,
) -> list[Episode]:
    """The score of each prompt's target under the model, in order; one batch, nothing is decoded."""
    prompts = [prepared.ids_of(split, index) for index in indices]
    targets = [prepared.target_ids(split, index) for index in indices]
    began = time.perf_counter()
    logliks = engine.loglik(prompts, targets, stop)
    spent.engine += time.perf_counter() - began
    task = prepared.task
    broken = set(engine.broken)
    measured = []
    for row, (index, loglik, target) in enumerate(zip(indices, logliks, targets, strict=True)):
        if row in broken or math.isnan(loglik):  # NaN passes for a best score in careless comparisons
            measured.append(Episode(Score(task.floor, False), len(target), failure=OVERFLOW))
        else:
            item = task.items_of(split)[index]
            measured.append(Episode(task.likelihood_score(item, loglik, len(target)), len(target)))
    return measured


def play(
    engine: Engine,
    prepared: Prepared,
    scorer: Scorer,
    split: str,
    indices: Sequence[int],
    streams: Sequence[int],
    sampling: Sampling,
    spent: Spent,
    stop: StopCheck = never,
) -> list[Episode]:
    """Generate and score one episode per index, in order; as `speak` and `finish`."""
    spoken = speak(engine, prepared, scorer, split, indices, streams, sampling, spent, stop)
    return finish(prepared, scorer, spoken, spent, stop)


def speak(
    engine: Engine,
    prepared: Prepared,
    scorer: Scorer,
    split: str,
    indices: Sequence[int],
    streams: Sequence[int],
    sampling: Sampling,
    spent: Spent,
    stop: StopCheck = never,
) -> Spoken:
    """All turns of the model in one episode per index. `streams[k]` keys the sampling of episode k.

    Answers that another turn may follow are scored here, as the engine waits for the reply. An episode that
    outgrows the model's context gets the floor. Raises Cancelled, OutOfMemory.
    """
    task = prepared.task
    items = task.items_of(split)
    running = [
        _Open(slot, index, stream, prepared.ids_of(split, index), task.start(items[index]))
        for slot, (index, stream) in enumerate(zip(indices, streams, strict=True))
    ]
    ended: dict[int, Episode] = {}
    for turn in range(task.turns):
        broken = _answer(engine, running, turn, sampling, spent, stop)
        ended |= {episode.slot: _floored(task, episode, OVERFLOW) for episode in broken}
        running = [episode for episode in running if episode.slot not in ended]
        if turn + 1 == task.turns or not running:
            break
        verdicts = _judge(prepared, scorer, split, running, spent, stop)
        for episode, verdict in zip(running, verdicts, strict=True):
            if verdict.score is not None:
                ended[episode.slot] = _scored(episode, verdict.score, verdict.failure)
            elif not _continued(prepared, episode, verdict.more, sampling.max_new_tokens):
                ended[episode.slot] = _floored(task, episode, "the conversation outgrew the model's context")
        running = [episode for episode in running if episode.slot not in ended]
        if not running:
            break
    return Spoken(split, ended, running)


def finish(
    prepared: Prepared, scorer: Scorer, spoken: Spoken, spent: Spent, stop: StopCheck = never
) -> list[Episode]:
    """The scores of all episodes, in order. One that goes on after the last turn gets the floor.

    Needs no engine. Raises Cancelled.
    """
    task, done = prepared.task, dict(spoken.ended)
    verdicts = _judge(prepared, scorer, spoken.split, spoken.last, spent, stop) if spoken.last else []
    for episode, verdict in zip(spoken.last, verdicts, strict=True):
        if verdict.score is not None:
            done[episode.slot] = _scored(episode, verdict.score, verdict.failure)
        else:
            done[episode.slot] = _floored(task, episode, f"no end after {task.turns} turns")
    return [done[slot] for slot in range(len(done))]


def _answer(
    engine: Engine, batch: Sequence[_Open], turn: int, sampling: Sampling, spent: Spent, stop: StopCheck
) -> list[_Open]:
    """One turn of the model in every episode of the batch; returns those with unusable logits."""
    streams = [(episode.stream + turn * TURN_STREAMS) % (1 << 64) for episode in batch]
    began = time.perf_counter()
    answers = engine.generate([episode.ids for episode in batch], sampling, streams, stop)
    spent.engine += time.perf_counter() - began
    for episode, ids in zip(batch, answers, strict=True):
        episode.answer = ids
        episode.tokens += len(ids)
    return [batch[row] for row in engine.broken]


def _judge(
    prepared: Prepared,
    scorer: Scorer,
    split: str,
    batch: Sequence[_Open],
    spent: Spent,
    stop: StopCheck,
) -> list[Verdict]:
    """What follows the answer of every episode of the batch."""
    began = time.perf_counter()
    for episode in batch:
        episode.texts.append(prepared.decode(episode.answer))
    verdicts = scorer.judge(
        split,
        [episode.index for episode in batch],
        [episode.texts[-1] for episode in batch],
        [episode.messages for episode in batch],
        stop,
    )
    spent.scorer += time.perf_counter() - began
    return verdicts


def _continued(prepared: Prepared, episode: _Open, more: Sequence[ChatMessage], room: int) -> bool:
    """Append the model's text and what follows it; False when that leaves no room for another answer."""
    episode.messages += [{"role": "assistant", "content": episode.texts[-1]}, *more]
    episode.ids = prepared.render(episode.messages)
    return not prepared.context or len(episode.ids) + room <= prepared.context


def _scored(episode: _Open, score: Score, failure: str) -> Episode:
    return Episode(score, episode.tokens, tuple(episode.texts), failure)


def _floored(task: Task, episode: _Open, reason: str) -> Episode:
    return _scored(episode, Score(task.floor, False), reason)
