"""Letting the model answer prompts and having the answers scored: episodes of one or several turns.

Shared by `worker.py` (one sample per prompt, inside a unit) and `evaluate.py` (many). All episodes of a call
go through the engine together, turn by turn; who wants smaller batches makes several calls.
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
    tokens: int = 0


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
    """Generate and score one episode per index, in order. `streams[k]` keys the sampling of episode k.

    An episode that outgrows the model's context or the task's `max_turns` gets the floor. Raises Cancelled.
    """
    task = prepared.task
    items = task.items_of(split)
    running = {
        slot: _Open(slot, index, stream, prepared.ids_of(split, index), task.start(items[index]))
        for slot, (index, stream) in enumerate(zip(indices, streams, strict=True))
    }
    done: dict[int, Episode] = {}
    for turn in range(max(1, task.max_turns)):
        batch = list(running.values())
        for episode in _speak(engine, prepared, batch, turn, sampling, spent, stop):
            done[episode.slot] = _floored(task, episode, OVERFLOW)
            del running[episode.slot]
        batch = list(running.values())
        for episode, verdict in zip(batch, _judge(scorer, split, batch, spent, stop), strict=True):
            if verdict.score is not None:
                ended = Episode(verdict.score, episode.tokens, tuple(episode.texts), verdict.failure)
            elif _continued(prepared, episode, verdict.more, sampling.max_new_tokens):
                continue
            else:
                ended = _floored(task, episode, "the conversation outgrew the model's context")
            done[episode.slot] = ended
            del running[episode.slot]
        if not running:
            break
    for slot, episode in running.items():
        done[slot] = _floored(task, episode, f"no end after {task.max_turns} turns")
    return [done[slot] for slot in range(len(indices))]


def _speak(
    engine: Engine,
    prepared: Prepared,
    batch: Sequence[_Open],
    turn: int,
    sampling: Sampling,
    spent: Spent,
    stop: StopCheck,
) -> list[_Open]:
    """One turn of the model in every episode of the batch; returns those with unusable logits."""
    streams = [(episode.stream + turn * TURN_STREAMS) % (1 << 64) for episode in batch]
    began = time.perf_counter()
    answers = engine.generate([episode.ids for episode in batch], sampling, streams, stop)
    spent.engine += time.perf_counter() - began
    for episode, ids in zip(batch, answers, strict=True):
        episode.texts.append(prepared.decode(ids))
        episode.tokens += len(ids)
    return [batch[row] for row in engine.broken]


def _judge(
    scorer: Scorer, split: str, batch: Sequence[_Open], spent: Spent, stop: StopCheck
) -> list[Verdict]:
    """What follows the last text of every episode of the batch."""
    began = time.perf_counter()
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


def _floored(task: Task, episode: _Open, reason: str) -> Episode:
    return Episode(Score(task.floor, False), episode.tokens, tuple(episode.texts), reason)
