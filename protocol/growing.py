"""A list that only grows, whose copies cost nothing however long it is.

Pure. A ledger has as many entries as a run has rounds, and the cores copy their chain for every entry: copies
share their rows, and each knows how many of them are its own. Called by `chain.py`, the coordinator's state
and the histories that people read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

Row = TypeVar("Row")


class Growing(Sequence[Row]):
    """A sequence with `append` and a `copy` in constant time. Equal to any sequence of equal rows.

    The first copy that goes on appends to the rows all of them share, any other to rows of its own.
    """

    __slots__ = ("_length", "_rows")
    __hash__ = None  # type: ignore[assignment]  # it changes

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = [*rows]
        self._length = len(self._rows)

    def copy(self) -> Growing[Row]:
        """The same rows; what is appended to one is not in the other."""
        twin: Growing[Row] = Growing()
        twin._rows, twin._length = self._rows, self._length
        return twin

    def plus(self, row: Row) -> Growing[Row]:
        """A copy with one more row."""
        twin = self.copy()
        twin.append(row)
        return twin

    def append(self, row: Row) -> None:
        """One more row at the end."""
        if self._length < len(self._rows):  # another copy has gone on
            self._rows = self._rows[: self._length]
        self._rows.append(row)
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Row]:
        return islice(self._rows, self._length)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        if isinstance(at, int):
            return self._rows[range(self._length)[at]]
        own = range(self._length)[at]
        if own.step == 1:
            return self._rows[own.start : own.stop]
        return [self._rows[place] for place in own]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    def __repr__(self) -> str:
        return repr([*self])
