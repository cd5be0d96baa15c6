"""What a task is. Lives here: the types every task shares and the episode protocol. Standard library only.

A task is an episode: `start(item)` gives the chat so far, `reply(item, messages, text)` answers the model's text with
either more messages or a `Score`. A single-turn task writes only `score(item, text)`. Called by `worker.py`,
`scoring.py`, `prompts.py`, `locking.py` and `evaluate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]  # one JSON object of the task's data
ChatMessage = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


@dataclass(frozen=True, slots=True)
class Score:
    """reward within the task's declared range; correct is what pass@k counts."""

    reward: float
    correct: bool


class Task:
    """Base of all tasks. Subclasses set the class attributes and write `score` (or `reply` for many turns)."""

    name: str = ""
    mode: str = "generate"  # or "likelihood": reward from log p(target | prompt), nothing is decoded
    low: float = 0.0  # declared reward range
    high: float = 1.0
    max_new_tokens: int = 64
    packages: tuple[str, ...] = ()  # PyPI names whose versions scoring depends on; the lock pins them

    def __init__(self, train: Sequence[Item], heldout: Sequence[Item]) -> None:
        self.train = tuple(train)
        self.heldout = tuple(heldout)

    @property
    def floor(self) -> float:
        """What an answer gets whose scorer raised, hung or returned nonsense."""
        return self.low

    def start(self, item: Item) -> list[ChatMessage]:
        return [{"role": "user", "content": str(item["prompt"])}]

    def reply(self, item: Item, messages: Sequence[ChatMessage], text: str) -> list[ChatMessage] | Score:
        return self.score(item, text)

    def score(self, item: Item, text: str) -> Score:
        raise NotImplementedError(f"task {self.name!r} defines neither score nor reply")

    def score_batch(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        return [self.score(item, text) for item, text in zip(items, texts, strict=True)]

    def target(self, item: Item) -> str:
        """The text whose likelihood is the reward (likelihood mode only)."""
        return str(item["target"])

    def likelihood_score(self, item: Item, loglik: float, tokens: int) -> Score:
        """Score of a target of `tokens` tokens with summed log-likelihood `loglik` (likelihood mode only)."""
        mean = max(self.low, min(self.high, loglik / max(tokens, 1)))
        return Score(mean, loglik > -0.6931471805599453 * max(tokens, 1))
