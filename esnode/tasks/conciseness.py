"""Conciseness: answer as briefly as a reference does, as in Qiu et al. (arXiv 2509.24372, section on
conciseness).

There the reward is minus the difference in characters between the answer and the shortest right answer;
whether the answer is right is not asked. Here the difference is divided by `scale` and cut off at 1, so that
the range is declared. The questions are our own: such that the demo model ends about half of its answers by
itself, since answers cut off at the limit are equally long whatever a member's noise is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esnode.tasks.interface import Item, Score, Splits, Task, TaskError

QUESTIONS = Path(__file__).with_name("conciseness.jsonl")


class Conciseness(Task):
    """Reward in [-1, 0]: -min(1, |characters of answer - characters of reference| / scale)."""

    name = "conciseness"
    low, high = -1.0, 0.0
    max_new_tokens = 24
    # Characters that cost the whole reward; 24 tokens are 90 to 130, and a cut-off makes answers alike.
    defaults: Mapping[str, Any] = {"scale": 150.0}

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        if options["scale"] <= 0:
            raise TaskError(f"conciseness: scale is {options['scale']}, it must be above 0 characters")
        items = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
        train = [item for item in items if item["split"] == "train"]
        return train, [item for item in items if item["split"] == "heldout"]

    def score(self, item: Item, text: str) -> Score:
        reference = len(item["reference"])
        difference = abs(len(text.strip()) - reference)
        return Score(-min(1.0, difference / self.options["scale"]), difference <= max(5, reference // 2))
