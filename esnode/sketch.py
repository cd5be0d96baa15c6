"""A small line plot in text: braille dots, axis numbers, a legend. Pure. Used by `report.py`, `progress.py`.

Written here because the plotting packages for terminals change their interface between releases, and so much
is one page of code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # braille bit of (column, row) within a cell
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) joined by lines, or single marks when `mark` is set. `style` is a rich style."""

    label: str
    points: tuple[tuple[float, float], ...]
    style: str
    mark: str = ""


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars of eight heights, from the lowest to the highest of those shown."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def plot(series: Sequence[Series], title: str, x_label: str, width: int = 72, height: int = 14) -> Text:
    """All series on one pair of axes; `width` and `height` are characters of the plot itself."""
    points = [point for one in series for point in one.points]
    if not points:
        return Text("nothing to plot yet")
    box = _Box(points, width, height)
    cells: dict[tuple[int, int], tuple[str, str]] = {}
    for one in series:
        if one.mark:
            for x, y in one.points:
                cells[box.cell(x, y)] = (one.mark, one.style)
        else:
            _trace(one, box, cells)
    return _compose(series, cells, box, title, x_label)


class _Box:
    """Maps data to braille dots (two by four in a character), y upwards."""

    def __init__(self, points: Sequence[tuple[float, float]], width: int, height: int) -> None:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self.left, self.right = min(xs), max(xs)
        self.bottom, self.top = min(ys), max(ys)
        if self.top == self.bottom:
            self.top, self.bottom = self.top + 0.5, self.bottom - 0.5
        if self.right == self.left:
            self.right += 1
        self.width, self.height = width, height

    def dot(self, x: float, y: float) -> tuple[int, int]:
        column = (x - self.left) / (self.right - self.left) * (self.width * 2 - 1)
        row = (self.top - y) / (self.top - self.bottom) * (self.height * 4 - 1)
        return round(column), round(row)

    def cell(self, x: float, y: float) -> tuple[int, int]:
        column, row = self.dot(x, y)
        return row // 4, column // 2


def _trace(one: Series, box: _Box, cells: dict[tuple[int, int], tuple[str, str]]) -> None:
    """Draw straight lines between neighbours, dot by dot."""
    bits: dict[tuple[int, int], int] = {}
    dots = [box.dot(x, y) for x, y in one.points]
    for (x0, y0), (x1, y1) in zip(dots, [*dots[1:], dots[-1]], strict=True):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            x, y = round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
            cell = (y // 4, x // 2)
            bits[cell] = bits.get(cell, 0) | _DOTS[x % 2][y % 4]
    for cell, value in bits.items():
        cells[cell] = (chr(0x2800 + value), one.style)


def _compose(
    series: Sequence[Series],
    cells: dict[tuple[int, int], tuple[str, str]],
    box: _Box,
    title: str,
    x_label: str,
) -> Text:
    labels = {0: box.top, box.height // 2: (box.top + box.bottom) / 2, box.height - 1: box.bottom}
    digits = max(0, 2 - math.floor(math.log10(box.top - box.bottom)))
    numbers = {row: f"{value:.{digits}f}" for row, value in labels.items()}
    margin = max(map(len, numbers.values()))
    text = Text(f"{title}\n", style="bold")
    for row in range(box.height):
        text.append(
            f"{numbers.get(row, ''):>{margin}} {'┤' if row in numbers else '│'}", style="dim not bold"
        )
        for column in range(box.width):
            mark, style = cells.get((row, column), (" ", ""))
            text.append(mark, style=f"not bold {style}")
        text.append("\n")
    text.append(f"{'':>{margin}} └{'─' * box.width}\n", style="dim not bold")
    left, right = f"{box.left:g}", f"{box.right:g}"
    gap = max(len(x_label) + 2, box.width - len(left) - len(right))
    text.append(f"{'':>{margin}}  {left}{x_label:^{gap}}{right}\n", style="dim not bold")
    text.append(f"{'':>{margin}}  ")
    for one in series:
        text.append(f"{one.mark or '──'} {one.label}   ", style=f"not bold {one.style}")
    return text
