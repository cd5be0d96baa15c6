"""Finding the answer in a model's text. Lives here: tags and numbers, shared by the tasks. Standard library
only.
"""

from __future__ import annotations

import re
from fractions import Fraction

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9][0-9,]{0,30}(?:\.[0-9]{1,30})?(?:/[0-9]{1,30})?")


def tagged(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`, stripped; None without a complete pair."""
    found = _TAGGED.findall(text)
    return found[-1].strip() if found else None


def last_number(text: str) -> Fraction | None:
    """The last number in the text, exactly: `12`, `-3.5`, `1,250` or `3/4`. None without one.

    A minus counts as a sign only where no digit or letter stands before it, so that `8-3` ends in 3.
    """
    for match in reversed(list(_NUMBER.finditer(text))):
        token = match.group().replace(",", "")
        before = text[match.start() - 1 : match.start()]
        if token.startswith("-") and before.isalnum():
            token = token[1:]
        numerator, _, denominator = token.partition("/")
        if denominator and int(denominator) == 0:
            continue
        return Fraction(numerator) / (int(denominator) if denominator else 1)
    return None


def squeezed(text: str) -> str:
    """The text with every run of whitespace as one blank and none at the ends."""
    return " ".join(text.split())
