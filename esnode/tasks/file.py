"""file:<jsonl>: questions of the user's own, scored by one of four rules.

Every rule looks at what stands in the last `<answer>...</answer>`, or at the whole text when there is none:
`exact` compares texts, runs of blanks as one; `numeric` compares the last number, exactly or within
`tolerance`; `math` lets math-verify decide whether two expressions are equal; `regex` searches the text for
the answer's pattern. A pattern that backtracks for ever costs its answer the floor (see `esnode.scoring`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from esnode.tasks import records
from esnode.tasks.answers import last_number, squeezed, tagged
from esnode.tasks.interface import Item, Score, Splits, Task, TaskError


def exact(answer: str, text: str, tolerance: float) -> bool:
    """Equal texts, apart from the amount of whitespace."""
    return squeezed(text) == squeezed(answer)


def numeric(answer: str, text: str, tolerance: float) -> bool:
    """Equal last numbers, or apart by at most `tolerance` times the answer's size."""
    given, wanted = last_number(text), last_number(answer)
    if given is None or wanted is None:
        return False
    return abs(given - wanted) <= Fraction(tolerance) * abs(wanted)


def math(answer: str, text: str, tolerance: float) -> bool:
    """Equal expressions by math-verify; its own timeouts are off, the scoring process has one."""
    from math_verify import parse, verify

    gold = parse(answer, parsing_timeout=None)
    return bool(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


def regex(answer: str, text: str, tolerance: float) -> bool:
    """The pattern occurs in the text."""
    return re.search(answer, text) is not None


RULES: dict[str, Callable[[str, str, float], bool]] = {
    "exact": exact,
    "numeric": numeric,
    "math": math,
    "regex": regex,
}


class FileTask(Task):
    """Fields: `prompt` (or `messages`, optional `system`), `answer` (a text or a list of texts), optional
    `split`.
    """

    name = "file"
    low, high = 0.0, 1.0
    max_new_tokens = 128
    defaults: Mapping[str, Any] = {
        "scoring": "exact",
        "tolerance": 0.0,  # relative, numeric only
        "heldout": 0.2,  # share of the lines when they carry no split
    }

    def __init__(
        self,
        train: Sequence[Item],
        heldout: Sequence[Item],
        options: Mapping[str, Any] | None = None,
        argument: str = "",
    ) -> None:
        super().__init__(train, heldout, options, argument)
        if self.options["scoring"] == "math":
            self.packages = ("math-verify", "sympy")

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        path = Path(argument).expanduser()
        if options["scoring"] not in RULES:
            raise TaskError(f"file: scoring is {options['scoring']!r}, choose one of {', '.join(RULES)}")
        if not 0 <= options["tolerance"] < 1:
            raise TaskError(f"file: tolerance is {options['tolerance']}, choose 0 to 1 (relative)")
        lines = records.read(path)
        items = []
        for line in lines:
            records.require(line, path, "answer")
            answers = line["answer"] if isinstance(line["answer"], list) else [line["answer"]]
            texts = [str(answer) for answer in answers]
            _check(options["scoring"], texts, f"{path}, line {line['line']}")
            items.append({**records.prompt_of(line, path), "answer": texts})
        return records.split(lines, items, options["heldout"], path)

    def warm_up(self) -> None:
        if self.options["scoring"] == "math":
            math("1", "1", 0.0)

    def score(self, item: Item, text: str) -> Score:
        inside = tagged(text)
        given = text if inside is None else inside
        rule = RULES[self.options["scoring"]]
        right = any(rule(answer, given, self.options["tolerance"]) for answer in item["answer"])
        return Score(float(right), right)


def _check(scoring: str, answers: Sequence[str], where: str) -> None:
    for answer in answers:
        if scoring == "numeric" and last_number(answer) is None:
            raise TaskError(
                f"{where}: the answer {answer!r} has no number in it, so scoring = 'numeric' cannot work"
            )
        if scoring == "regex":
            try:
                re.compile(answer)
            except re.error as error:
                raise TaskError(
                    f"{where}: the answer {answer!r} is no regular expression ({error})"
                ) from error
