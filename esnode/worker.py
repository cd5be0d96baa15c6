"""Measuring one unit of work. Lives here: `Worker`, between the node's shell and an engine.

A member's unit: perturb, let the model answer the round's prompts, score. A probe's unit: the same on the
restored master and the held-out prompts, greedily. Every unit writes its weights from the master before it
starts and none cleans up after itself: one pass over the weights a unit. Answers are scored in a thread
beside the next batch, and beside the next unit: the engine waits only for scores that an episode needs to go
on. Called on the engine's thread; not thread-safe.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from esnode import episodes
from esnode.engines.interface import Engine, Sampling, StopCheck, never
from esnode.engines.shortage import patiently
from esnode.episodes import Episode, Spent
from esnode.prompts import Prepared
from esnode.scoring import Scorer
from protocol import seeds
from protocol.counting import answers, milliseconds, nth, rounds
from protocol.lock import Lock
from protocol.messages import Kind, Unit

Progress = Callable[[int], None]  # thousandths of the unit
Given = TypeVar("Given")
FORWARD_LOOKS = 8  # stop checks expected in a likelihood batch
SCORING_LOOKS = 100  # stop checks of half the scoring, at 20 a second
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measured unit, as it goes into a Result message."""

    sums: tuple[float, ...]  # one exactly rounded float64 sum of rewards per chunk
    correct: int
    floored: int  # answers given the task's floor because their scoring failed
    tokens: int  # generated, or scored for likelihood tasks
    times: tuple[int, int, int]  # milliseconds: perturb or restore, generate, score
    evidence: bytes  # first 8 bytes of BLAKE2b over the per-prompt rewards, float64 little-endian, in order
    scores: tuple[float, ...]  # the per-prompt rewards
    fingerprint: bytes  # of the engine, when it measured this


@dataclass(frozen=True, slots=True)
class _Piece:
    """Prompts that go through the engine together."""

    indices: tuple[int, ...]
    streams: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece with its scores, and what its scoring took."""

    episodes: list[Episode]
    spent: Spent


class Worker:
    """Evaluates units of one run. Tasks that generate need a `scorer`, started here and closed by its owner.

    A unit's prompts go to the engine at once, or chunk by chunk where the lock asks for repeatable batches.
    """

    def __init__(self, lock: Lock, engine: Engine, prepared: Prepared, scorer: Scorer | None = None) -> None:
        self._lock = lock
        self._engine = engine
        self._prepared = prepared
        self._scorer = scorer
        self._desk = ThreadPoolExecutor(1, "scoring")  # one: scores come in the order of the answers
        if scorer is not None:
            scorer.start()
        elif prepared.task.mode == "generate":
            raise ValueError(f"task {prepared.task.name!r} generates answers: it needs a scorer")

    def evaluate(
        self,
        unit: Unit,
        stop: StopCheck = never,
        progress: Progress | None = None,
        *,
        sigma: float | None = None,
    ) -> Outcome:
        """Measure a unit and wait for its scores; as `generate`."""
        return self.generate(unit, stop, progress, sigma=sigma).result()

    def generate(
        self,
        unit: Unit,
        stop: StopCheck = never,
        progress: Progress | None = None,
        *,
        sigma: float | None = None,
    ) -> Future[Outcome]:
        """Let the model answer a unit's prompts, on weights with noise of scale `sigma` for a member.

        Returns when the engine is free; the scores follow in the future, and those of an earlier unit before
        them. None is the lock's schedule, which a ledger may have amended. Raises, here or in the future,
        Cancelled once `stop()` is true, OutOfMemory, ScorerError. Live weights stay as written.
        """
        began = time.perf_counter()
        if unit.kind == Kind.MEMBER:
            run, member, mirrored = self._lock.run_id, unit.member, self._lock.mirrored
            seed = seeds.member_seed(run, unit.round, member, mirrored)
            scale = self._lock.sigma_at(unit.round) if sigma is None else sigma
            self._engine.perturb(seed, scale, seeds.member_sign(member, mirrored))
        else:
            self._engine.restore()
        weights = time.perf_counter() - began
        # With less memory the whole unit once more, so that its batches are alike.
        return patiently(partial(self._attempt, unit, weights, stop, progress or _unheard))

    def close(self) -> None:
        """Wait for the scoring under way; what waits behind it is dropped."""
        self._desk.shutdown(cancel_futures=True)

    def prompts_of(self, unit: Unit) -> list[tuple[int, ...]]:
        """The unit's prompts, as indices into its split, chunk by chunk."""
        lock = self._lock
        if unit.kind == Kind.PROBE:
            order: Sequence[int] = range(lock.heldout_prompts)
        else:
            order = seeds.prompts_of_round(lock.run_id, unit.round, lock.per_round, lock.train_prompts)
        chunks = lock.chunks_of(unit.kind)[unit.first : unit.last + 1]
        return [tuple(order[start : start + count]) for start, count in chunks]

    def _attempt(self, unit: Unit, weights: float, stop: StopCheck, progress: Progress) -> Future[Outcome]:
        pieces = list(self._pieces(unit))
        generates = self._prepared.task.mode == "generate"
        watch = _Watch(stop, progress, len(pieces), self._lock.max_new_tokens if generates else 0)
        spent = Spent()
        parts: list[Future[_Part]] = []
        try:
            for piece in pieces:
                parts.append(self._measure(unit, piece, spent, watch))
                watch.piece_done()
        except BaseException:
            watch.give_up()
            raise
        finish = partial(self._outcome, unit, parts, weights, spent, self._engine.fingerprint)
        return self._desk.submit(finish) if generates else _done(finish())

    def _measure(self, unit: Unit, piece: _Piece, spent: Spent, watch: _Watch) -> Future[_Part]:
        engine, prepared, scorer = self._engine, self._prepared, self._scorer
        split = "heldout" if unit.kind == Kind.PROBE else "train"
        if scorer is None:
            measured = episodes.likelihoods(engine, prepared, split, piece.indices, spent, watch)
            return _done(_Part(measured, Spent()))
        spoken = episodes.speak(
            engine, prepared, scorer, split, piece.indices, piece.streams, self._sampling(unit), spent, watch
        )

        def score() -> _Part:
            taken = Spent()
            return _Part(episodes.finish(prepared, scorer, spoken, taken, watch.scoring), taken)

        return self._desk.submit(score)

    def _pieces(self, unit: Unit) -> Iterator[_Piece]:
        chunks = self.prompts_of(unit)
        if not self._lock.repeatable:
            chunks = [tuple(index for chunk in chunks for index in chunk)]
        for chunk in chunks:
            streams = (seeds.sample_stream(self._lock.run_id, unit.round, index, 0) for index in chunk)
            yield _Piece(chunk, tuple(streams))

    def _sampling(self, unit: Unit) -> Sampling:
        """A probe is greedy, so that held-out scores of different rounds differ by the weights alone."""
        lock = self._lock
        temperature = lock.temperature if unit.kind == Kind.MEMBER else 0.0
        return Sampling(lock.max_new_tokens, lock.stop_ids, temperature, lock.top_p)

    def _outcome(
        self, unit: Unit, parts: Sequence[Future[_Part]], weights: float, spent: Spent, fingerprint: bytes
    ) -> Outcome:
        """Of a unit whose parts are scored, or being scored by this very thread before this."""
        scored = [part.result() for part in parts]
        measured = [episode for part in scored for episode in part.episodes]
        scoring = spent.scorer + math.fsum(part.spent.scorer for part in scored)
        rewards = [episode.score.reward for episode in measured]
        sums, start = [], 0
        for chunk in self.prompts_of(unit):
            sums.append(math.fsum(rewards[start : start + len(chunk)]))
            start += len(chunk)
        failures = Counter(episode.failure for episode in measured if episode.failure)
        for reason, count in failures.items():
            log.warning("%s: %s got the floor: %s", _name(unit), answers(count), reason)
        return Outcome(
            sums=tuple(sums),
            correct=sum(episode.score.correct for episode in measured),
            floored=failures.total(),
            tokens=sum(episode.tokens for episode in measured),
            times=(milliseconds(weights), milliseconds(spent.engine), milliseconds(scoring)),
            evidence=hashlib.blake2b(struct.pack(f"<{len(rewards)}d", *rewards)).digest()[:8],
            scores=tuple(rewards),
            fingerprint=fingerprint,
        )


class _Watch:
    """A stop check that tells progress as well: engines ask it between decode steps, scorers while they wait.

    Without this a long unit in one batch would look like one that stands still. Within a piece the first
    `looks` questions count for nine tenths, the following ones for ever less of the rest. `looks` is 0 where
    nothing is scored afterwards; else scoring has the last tenth, when all answers are there.
    """

    def __init__(self, stop: StopCheck, progress: Progress, pieces: int, looks: int) -> None:
        self._stop, self._progress = stop, progress
        self._pieces, self._looks = pieces, looks or FORWARD_LOOKS
        self._whole = 900 if looks else 1000  # thousandths that the engine's work is
        self._done = self._asked = self._waited = 0
        self._told = -1
        self._given_up = False

    def __call__(self) -> bool:
        self._asked += 1
        share = self._asked / self._looks
        self._tell(0.9 * share if share <= 1 else 1 - 0.1 / share)
        return self._stop()

    def scoring(self) -> bool:
        """The stop check of scoring, in its own thread."""
        if self._done == self._pieces and not self._given_up:
            self._waited += 1
            self._hear(
                self._whole + int((1000 - self._whole) * self._waited / (SCORING_LOOKS + self._waited))
            )
        return self._given_up or self._stop()

    def piece_done(self) -> None:
        """The next piece begins."""
        self._asked = 0
        self._done += 1
        self._tell(0.0)

    def give_up(self) -> None:
        """Nobody needs the scores of this attempt."""
        self._given_up = True

    def _tell(self, share: float) -> None:
        self._hear(int(self._whole * (self._done + share) / self._pieces))

    def _hear(self, thousandths: int) -> None:
        if thousandths > self._told:
            self._told = thousandths
            self._progress(thousandths)


def _name(unit: Unit) -> str:
    """What was measured, as people count: a probe is of the state that so many rounds have made."""
    if unit.kind == Kind.PROBE:
        return f"held-out after {rounds(unit.round)}"
    return f"{nth(unit.round)} member {unit.member}"


def _done(value: Given) -> Future[Given]:
    """A future that has come."""
    future: Future[Given] = Future()
    future.set_result(value)
    return future


def _unheard(thousandths: int) -> None:
    """The progress report of work that nobody watches."""
