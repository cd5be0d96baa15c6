"""A long tuple whose changes cost little: the members of a round.

Pure. A change copies one page and the list of pages, not the whole; every earlier value stays as it was. Used
by `rounds.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar, overload

T = TypeVar("T")
PAGE = 64


class Row(Sequence[T]):
    """An immutable sequence; `put` gives one that differs in one place."""

    __slots__ = ("_pages", "_size")

    def __init__(self, values: Iterable[T] = ()) -> None:
        whole = tuple(values)
        self._size = len(whole)
        self._pages = tuple(whole[k : k + PAGE] for k in range(0, len(whole), PAGE))

    def put(self, index: int, value: T) -> Row[T]:
        """The row with another value at `index`, which is one of 0 .. len - 1."""
        number, place = divmod(index, PAGE)
        page = self._pages[number]
        changed: Row[T] = Row.__new__(Row)
        changed._size = self._size
        changed._pages = (
            *self._pages[:number],
            (*page[:place], value, *page[place + 1 :]),
            *self._pages[number + 1 :],
        )
        return changed

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return tuple(self)[index]
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is not in a row of {self._size}")
        return self._pages[index // PAGE][index % PAGE]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._pages)

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and self._pages == other._pages

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Row({list(self)!r})"
