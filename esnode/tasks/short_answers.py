"""The demo: factual questions with answers of one to four words, rewarded by the likelihood of the right
answer.

The reward is smooth, needs one forward pass and no decoding, and a small model knows half of the answers
already: what it learns first is to give the bare answer. The questions are our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esnode.tasks.interface import ChatMessage, Item, Splits, Task

QUESTIONS = Path(__file__).with_name("short_answers.jsonl")
# Of seven texts tried this one gives the shortest prompts (24 tokens) with a start as low as no text at all.
SYSTEM = "Short answers."


class ShortAnswers(Task):
    """Reward: mean log-likelihood (nats) per token of the answer and the end of the turn."""

    name = "short-answers"
    mode = "likelihood"
    low, high = -30.0, 0.0
    max_new_tokens = 16

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        items = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
        train = [item for item in items if item["split"] == "train"]
        return train, [item for item in items if item["split"] == "heldout"]

    def start(self, item: Item) -> list[ChatMessage]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item["prompt"]}]
