"""What a task is. Lives here: the types every task shares and the episode protocol. Standard library only.

A task is an episode: `start(item)` gives the chat so far, `reply(item, messages, text)` answers the model's
text with either the messages to append after it or a `Score`. A single-turn task writes only `score(item,
text)`. Called by `episodes.py`, `scoring_worker.py`, `prompts.py`, `locking.py` and `evaluate.py`.

Items are made once, by `items(argument, options)` when a plan is locked; afterwards a task is rebuilt from
that data, on any machine, without the files or packages the items came from. `start` and `target` run in the
node itself; `score`, `reply` and `score_batch` run in a process of their own, under limits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import UserError

Item = Mapping[str, Any]  # one JSON object of the task's data
Splits = tuple[Sequence[Item], Sequence[Item]]  # train, held out
ChatMessage = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


class TaskError(UserError):
    """A task that does not exist, has no data, or whose options or files are wrong."""


@dataclass(frozen=True, slots=True)
class Score:
    """reward within the task's declared range; correct is what pass@k counts."""

    reward: float
    correct: bool


class Task:
    """Base of all tasks. Subclasses set class attributes and write `items` and `score` (or `reply`)."""

    name: str = ""
    mode: str = "generate"  # or "likelihood": reward from log p(target | prompt), nothing is decoded
    low: float = 0.0  # declared reward range
    high: float = 1.0
    max_new_tokens: int = 64
    packages: tuple[str, ...] = ()  # PyPI names whose versions scoring depends on; the lock pins them
    max_turns: int = 8  # an episode of several turns that is not over by then gets the floor
    own_code: bool = False  # scoring runs the operator's own file, which no `esnode.fence` holds
    batched: bool = False  # scoring calls `score_batch` for all answers at once (with their limits added up)
    defaults: Mapping[str, Any] = {}  # options of `[run.options]`; the default values also fix their types

    def __init__(
        self,
        train: Sequence[Item],
        heldout: Sequence[Item],
        options: Mapping[str, Any] | None = None,
        argument: str = "",
    ) -> None:
        self.train = tuple(train)
        self.heldout = tuple(heldout)
        self.options = {**self.defaults, **(options or {})}
        self.argument = argument  # what follows `name:` in the spec

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        """The items of both splits, JSON objects, made when a plan is locked."""
        raise NotImplementedError(f"task {cls.name!r} defines no items")

    @classmethod
    def locate(cls, argument: str, folder: Path | None) -> str:
        """The argument with a file of the operator's code folder resolved; only `python:` has one."""
        return argument

    @classmethod
    def settle(cls, argument: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options as they enter the lock, completed from what the task itself declares."""
        return dict(options)

    @classmethod
    def sources(cls, argument: str) -> list[Path]:
        """The files whose bytes decide a score; the lock pins their digest."""
        return [Path(inspect.getfile(cls))]

    def warm_up(self) -> None:
        """Called once in the scoring process before the first answer: import here what scoring needs."""

    def items_of(self, split: str) -> tuple[Item, ...]:
        """The items of "train" or "heldout"."""
        return {"train": self.train, "heldout": self.heldout}[split]

    @property
    def turns(self) -> int:
        """How often the model speaks in an episode at most: the engine waits for no score after the last."""
        return max(1, self.max_turns) if type(self).reply is not Task.reply else 1

    @property
    def floor(self) -> float:
        """What an answer gets whose scorer raised, hung or returned nonsense."""
        return self.low

    def start(self, item: Item) -> list[ChatMessage]:
        """The chat before the model speaks: `item["messages"]`, or `item["prompt"]` after an optional system
        text.
        """
        if "messages" in item:
            return [dict(message) for message in item["messages"]]
        system = [{"role": "system", "content": str(item["system"])}] if "system" in item else []
        return [*system, {"role": "user", "content": str(item["prompt"])}]

    def reply(self, item: Item, messages: Sequence[ChatMessage], text: str) -> list[ChatMessage] | Score:
        """What follows the model's `text` (not yet among `messages`): messages to append, or the end of the
        episode.
        """
        return self.score(item, text)

    def score(self, item: Item, text: str) -> Score:
        """What one answer is worth; what it raises costs the answer the floor."""
        raise NotImplementedError(f"task {self.name!r} defines neither score nor reply")

    def score_batch(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        """What each answer is worth, for scorers that call out or batch; asked only if `batched`."""
        return [self.score(item, text) for item, text in zip(items, texts, strict=True)]

    def target(self, item: Item) -> str:
        """The text whose likelihood is the reward (likelihood mode only)."""
        return str(item["target"])

    def likelihood_score(self, item: Item, loglik: float, tokens: int) -> Score:
        """Score of a target of `tokens` tokens with summed log-likelihood `loglik` (likelihood mode only)."""
        if loglik != loglik:  # NaN would pass through min() as the best score there is
            raise ValueError("the log-likelihood is not a number")
        mean = max(self.low, min(self.high, loglik / max(tokens, 1)))
        return Score(mean, loglik > math.log(0.5) * max(tokens, 1))
