"""Rules for single values of a plan or a lock: what is expected, and the check that cleans the value.

Pure. One rule serves both files, so that what the plan accepts is exactly what the lock's reader accepts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

LARGEST_U64 = (1 << 64) - 1
SMALLEST_SIGMA = 2.0**-64  # products with the noise stay far above float32's subnormals
LARGEST_SIGMA = 1024.0
LARGEST_ALPHA = 1e6
_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_LONGEST_SCHEDULE = 100_000


def bf16(value: float) -> float:
    """The nearest bf16 value, ties to even: the float64 is rounded once, to 8 significant bits."""
    if value == 0 or not math.isfinite(value):
        return value
    step = max(math.frexp(value)[1], -125) - 8  # below 2^-126 bf16 is subnormal: its step stays 2^-133
    return math.ldexp(round(math.ldexp(value, -step)), step)


@dataclass(frozen=True, slots=True)
class Rule:
    """`expects` completes "must be ..."; `read` returns the value to keep or raises ValueError.

    The ValueError's text, when there is one, says more than `expects` does.
    """

    expects: str
    read: Callable[[Any], Any]

    def accepts(self, value: Any) -> bool:
        """Whether `read` would take the value."""
        try:
            self.read(value)
        except ValueError:
            return False
        return True


def whole(low: int, high: int = LARGEST_U64) -> Rule:
    """An int (never a bool) within the bounds."""

    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError
        return value

    span = f"{low} or more" if high == LARGEST_U64 else f"from {low} to {high}"
    return Rule(f"a whole number{',' if high == LARGEST_U64 else ''} {span}", read)


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Rule:
    """A finite number within the bounds as float; `above` leaves `low` itself out. Ints are accepted."""

    def read(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError
        if not low <= value <= high or (above and value == low):
            raise ValueError
        return float(value) + 0.0  # -0.0 becomes 0.0: one value, one encoding

    span = "a finite number"
    if math.isfinite(high):
        span = f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
    elif math.isfinite(low):
        span = f"a number {'above' if above else 'of at least'} {low:g}"
    return Rule(span, read)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


SEED = replace(whole(0), expects="a whole number from 0 to 2^64 - 1")
FLAG = Rule("true or false", _flag)


def text(longest: int = 500, *, empty: bool = False) -> Rule:
    """A string of printable characters."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > longest or not (value or empty):
            raise ValueError
        if not value.isprintable():
            raise ValueError("must not contain control characters or broken Unicode")
        return value

    return Rule(f"a text of {'at most' if empty else '1 to'} {longest} characters", read)


def choice(*names: str) -> Rule:
    """One of a few words."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Rule("one of " + ", ".join(f'"{name}"' for name in names), read)


def hexes(size: int, what: str) -> Rule:
    """Lower-case hex digits of exactly `size` bytes."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{2 * size}}}", value):
            raise ValueError
        return value

    return Rule(f"{what}: {2 * size} hex digits in lower case", read)


def many(rule: Rule, *, at_least: int = 0, at_most: int = 1 << 20) -> Rule:
    """A list of values of one rule, as a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not at_least <= len(value) <= at_most:
            raise ValueError
        return tuple(rule.read(item) for item in value)

    few = f" with at least {at_least} element" if at_least else ""
    return Rule(f"a list{few}, each {rule.expects}", read)


def distinct(rule: Rule) -> Rule:
    """A list rule whose values must differ."""

    def read(value: Any) -> tuple[Any, ...]:
        values: tuple[Any, ...] = rule.read(value)
        if len(set(values)) < len(values):
            raise ValueError("names something twice: leave each one in once")
        return values

    return Rule(rule.expects, read)


def schedule(rule: Rule) -> Rule:
    """One number or a list of them, one per round, the last one repeating; a tuple either way."""
    several = many(rule, at_least=1, at_most=_LONGEST_SCHEDULE)

    def read(value: Any) -> tuple[Any, ...]:
        values: tuple[Any, ...] = several.read(value if isinstance(value, list | tuple) else [value])
        return values

    return Rule(f"{rule.expects} (or a list of such, one per round, the last one repeats)", read)


def _sigma(value: Any) -> float:
    plain: float = number().read(value)
    if plain <= 0:
        raise ValueError
    if not SMALLEST_SIGMA <= plain <= LARGEST_SIGMA:
        raise ValueError(
            f"cannot be used as a bf16 noise scale: write a number from {SMALLEST_SIGMA:.2g} to "
            f"{LARGEST_SIGMA:g}, 0.001 is usual"
        )
    return bf16(plain)


SIGMA = Rule("a number above 0, 0.001 is usual", _sigma)
ALPHA = number(0.0, LARGEST_ALPHA)


def _exact_sigma(value: Any) -> float:
    if type(value) is not float or _sigma(value) != value:
        raise ValueError
    return value


EXACT_SIGMA = Rule("a positive bf16 number", _exact_sigma)


def _date(value: Any) -> str:
    match = re.fullmatch(r"(\d{4})-(\d{2})-(\d{2})", value, re.ASCII) if isinstance(value, str) else None
    if not match:
        raise ValueError
    month, day = int(match[2]), int(match[3])
    if not (1 <= month <= 12 and 1 <= day <= _MONTH_DAYS[month - 1]):
        raise ValueError("is no day of the calendar")
    return str(value)


DATE = Rule('a quoted date like "2026-01-01"', _date)


def _glob(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > 500 or any(c.isspace() for c in value):
        raise ValueError
    opened = value.replace("[]", "[x").replace("[!]", "[x")
    if opened.count("[") > opened.count("]"):
        raise ValueError('has a "[" without its "]"')
    return value


GLOB = Rule('a pattern of tensor names like "*.mlp.*", without spaces', _glob)


def _json_value(value: Any, depth: int) -> Any:
    if depth > 8:
        raise ValueError("is nested too deeply: 8 levels are allowed")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError
        return {key: _json_value(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_json_value(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) <= LARGEST_U64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError("holds a value that is no text, finite number, true/false, list or table (quote a date)")


def _json_table(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    table: dict[str, Any] = _json_value(value, 0)
    return table


TABLE = Rule("a table of texts, numbers, true/false, lists and tables", _json_table)
