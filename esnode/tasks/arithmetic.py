"""Arithmetic: small sums, differences and products, answered with a number.

An exact match alone gives a small model nothing to climb: most members of a population score the same. So a
wrong number still earns up to a half, the more the closer it is; `correct` counts exact answers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from esnode.tasks.answers import last_number
from esnode.tasks.draws import Draws
from esnode.tasks.interface import Item, Score, Splits, Task, TaskError


class Arithmetic(Task):
    """Reward 1 for the exact number, else 0.5 / (1 + |error|) for a number, 0 for none."""

    name = "arithmetic"
    low, high = 0.0, 1.0
    max_new_tokens = 16
    defaults: Mapping[str, Any] = {"train": 200, "heldout": 100, "seed": 0, "largest": 50}

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        if not 1 <= options["largest"] <= 10**6 or min(options["train"], options["heldout"]) < 1:
            raise TaskError("arithmetic: choose largest from 1 to 1000000, train and heldout at least 1")
        draws = Draws(options["seed"])
        wanted = options["train"] + options["heldout"]
        found: dict[str, Item] = {}
        for _ in range(100 * wanted):
            if len(found) == wanted:
                break
            a, b, sign = (
                draws.between(0, options["largest"]),
                draws.between(0, options["largest"]),
                draws.one_of("+-*"),
            )
            answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
            prompt = f"What is {a} {sign} {b}? Reply with the number only."
            found.setdefault(prompt, {"prompt": prompt, "answer": answer})
        if len(found) < wanted:
            raise TaskError(
                f"arithmetic: only {len(found)} different items up to {options['largest']}, {wanted} wanted"
            )
        items = list(found.values())
        return items[: options["train"]], items[options["train"] :]

    def score(self, item: Item, text: str) -> Score:
        given = last_number(text)
        if given is None:
            return Score(0.0, False)
        error = abs(given - item["answer"])
        return Score(1.0 if error == 0 else float(Fraction(1, 2) / (1 + error)), error == 0)
