"""How long work says where it is: the callback's type, and the one that says nothing.

Called by everything that takes seconds; `progress.bars` makes one for a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, int, int], None]  # (what, done, total)


def silent(what: str, done: int, total: int) -> None:
    """The `Tell` of somebody who does not want to know."""


@contextmanager
def step(tell: Tell, what: str) -> Iterator[None]:
    """Tell the start of one step, and its end if it succeeds."""
    tell(what, 0, 1)
    yield
    tell(what, 1, 1)
