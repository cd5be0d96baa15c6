"""The one kind of error a user is meant to read, and how foreign words are shortened for one of its lines.

Pure. Modules derive errors of their own, the command line prints them.
"""

from __future__ import annotations


class UserError(Exception):
    """What happened, why, and what to do about it, in one or two lines. Shown without a traceback."""

    exit_code = 1


def cut(words: str, longest: int = 60) -> str:
    """The words, or as many as fit into `longest` characters with "..." behind them."""
    return words if len(words) <= longest else words[: longest - 3] + "..."


def first_line(error: BaseException) -> str:
    """The first line of what a library raised; its type's name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
