"""Countdown: reach a target from given numbers, each used once. Prompt, tags and reward as in Qiu et al. and
TinyZero.

Reward = 0.1 * format + answer. Format: 1 for exactly `<think>..</think>` and `<answer>..</answer>` after it,
else 0.1 for a complete think part plus 0.5 for a complete answer part. Answer: 1 when the expression uses
each number exactly once and equals the target. Expressions are read by the small grammar below in exact
fractions; nothing that a model writes is ever executed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from esnode.tasks.answers import tagged
from esnode.tasks.draws import Draws
from esnode.tasks.interface import ChatMessage, Item, Score, Splits, Task, TaskError

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
PATIENCE = 20_000  # draws without a new item before there are taken to be no more
MAX_CHARACTERS = 200
MAX_DEPTH = 20
_WHOLE = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_TOKEN = re.compile(r"\s*([0-9]{1,6}(?![0-9])|[-+*/()])")
PROMPT = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
    "operations (+, -, *, /) and each number must be used exactly once. Show your work in <think> </think> "
    "tags. Then return the expression in <answer> </answer> tags, for example "
    "<answer> (1 + 2) / 3 </answer>."
)


class NotAnExpression(ValueError):
    """Text outside the grammar, or a division by zero."""


class Expression:
    """Recursive descent over `sum := product (+- product)*`, `product := factor (*/ factor)*`,
    `factor := -factor | number | ( sum )`."""

    def __init__(self, text: str) -> None:
        """Parse and evaluate. Raises NotAnExpression."""
        if len(text) > MAX_CHARACTERS:
            raise NotAnExpression(f"longer than {MAX_CHARACTERS} characters")
        self._tokens = self._split(text)
        self._at = 0
        self._depth = 0
        self.numbers = [int(token) for token in self._tokens if token.isdigit()]
        self.value = self._sum()
        if self._at != len(self._tokens):
            raise NotAnExpression(f"unexpected {self._tokens[self._at]!r}")

    @staticmethod
    def _split(text: str) -> list[str]:
        tokens, at, text = [], 0, text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise NotAnExpression(f"unexpected {text[at]!r}")
            tokens.append(match.group(1))
            at = match.end()
        return tokens

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._next() in ("*", "/"):
            times = self._take() == "*"
            factor = self._factor()
            if not times and factor == 0:
                raise NotAnExpression("division by zero")
            value = value * factor if times else value / factor
        return value

    def _factor(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnExpression(f"nested deeper than {MAX_DEPTH}")
        token = self._next()
        if token == "":
            raise NotAnExpression("ends too early")
        self._at += 1
        if token.isdigit():
            value = Fraction(int(token))
        elif token == "-":
            value = -self._factor()
        elif token == "(":
            value = self._sum()
            if self._next() != ")":
                raise NotAnExpression("a parenthesis is not closed")
            self._at += 1
        else:
            raise NotAnExpression(f"unexpected {token!r}")
        self._depth -= 1
        return value


def solves(expression: str, numbers: list[int], target: int) -> bool:
    """Whether the expression uses exactly these numbers and equals the target. Never raises."""
    try:
        parsed = Expression(expression)
    except NotAnExpression:
        return False
    return sorted(parsed.numbers) == sorted(numbers) and parsed.value == target


def format_reward(text: str) -> float:
    """How far the text keeps to the two tags, 0 to 1."""
    if _WHOLE.fullmatch(text):
        return 1.0
    return 0.1 * (_THINK.search(text) is not None) + 0.5 * (tagged(text) is not None)


class Countdown(Task):
    """Numbers and targets are drawn from the option `seed`; every target can be reached."""

    name = "countdown"
    low, high = 0.0, 1.1
    max_new_tokens = 256
    defaults: Mapping[str, Any] = {
        "train": 200,
        "heldout": 100,
        "seed": 0,
        "fewest": 3,  # numbers per item
        "most": 4,
        "largest": 99,  # of a number; targets are 10 to 100
    }

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        _check(options)
        draws = Draws(options["seed"])
        found: dict[object, Item] = {}
        wanted = options["train"] + options["heldout"]
        fruitless = 0
        while len(found) < wanted and fruitless < PATIENCE:
            fruitless += 1
            puzzle = _puzzle(draws, draws.between(options["fewest"], options["most"]), options["largest"])
            key = (tuple(sorted(puzzle["numbers"])), puzzle["target"]) if puzzle else None
            if puzzle and key not in found:
                found[key] = puzzle
                fruitless = 0
        if len(found) < wanted:
            raise TaskError(
                f"countdown: only {len(found)} different items exist with these options, {wanted} wanted"
            )
        items = list(found.values())
        return items[: options["train"]], items[options["train"] :]

    def start(self, item: Item) -> list[ChatMessage]:
        text = PROMPT.format(numbers=item["numbers"], target=item["target"])
        return [{"role": "user", "content": text}]

    def score(self, item: Item, text: str) -> Score:
        right = solves(tagged(text) or "", item["numbers"], item["target"])
        return Score(0.1 * format_reward(text) + right, right)


def _check(options: Mapping[str, Any]) -> None:
    if not 2 <= options["fewest"] <= options["most"] <= 6:
        given = f"fewest = {options['fewest']} and most = {options['most']}"
        raise TaskError(f"countdown: {given}, choose 2 <= fewest <= most <= 6")
    if not 10 <= options["largest"] <= 999:
        raise TaskError(f"countdown: largest = {options['largest']}, choose 10 to 999")
    if min(options["train"], options["heldout"]) < 1:
        raise TaskError("countdown: train and heldout must be at least 1 item each")


def _puzzle(draws: Draws, count: int, largest: int) -> Item | None:
    """Numbers and a target made from them by a random expression; None when that target is not 10 to 100."""
    numbers = [draws.between(1, largest) for _ in range(count)]
    pool = [Fraction(number) for number in numbers]
    while len(pool) > 1:
        left, right, sign = draws.take(pool), draws.take(pool), draws.one_of("+-*/")
        if sign == "/" and right == 0:
            return None
        pool.append(OPERATIONS[sign](left, right))
    target = pool[0]
    if target.denominator != 1 or not 10 <= target <= 100:
        return None
    return {"numbers": numbers, "target": int(target)}
