"""Counts as people say them: the first round is round 1, and a state is what so many rounds have made.

Pure. Spans of time as messages carry them, too. Entries, messages, notes and files of figures hold the index
of a round, from 0; whatever puts one into a sentence asks here. `esnode export --round 3` means the state
after 3 rounds.
"""

from __future__ import annotations

SHOWN = 100  # the last rounds and scores that a status holds, whose ledger has them all
# Notes of the cores whose `round` is a state: so many commits lie before it.
STATES = frozenset({"score", "dispute", "snapshot"})


def rounds(count: int) -> str:
    """1 -> "1 round", 3 -> "3 rounds"."""
    return f"{count} round" + "s" * (count != 1)


def milliseconds(seconds: float) -> int:
    """Of a span between two looks at a clock; none where the clock has jumped back."""
    return max(0, round(1000 * seconds))


def answers(count: int) -> str:
    """1 -> "1 answer", 3 -> "3 answers"."""
    return f"{count} answer" + "s" * (count != 1)


def nth(index: int) -> str:
    """A round by its index: 0 -> "round 1"."""
    return f"round {index + 1}"


def of_note(topic: str, index: int) -> str:
    """The `round` of a note: "round 4", or "after 3 rounds" where it is a state."""
    return f"after {rounds(index)}" if topic in STATES else nth(index)
