"""What a run shows when it is over, or whenever somebody asks: a table and a plot.

Works on any run folder, finished or not, and on any ledger alone. Called by `finish.py` and `cli/ledger.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from esnode.history import History
from esnode.sketch import Series, plot

MEAN, SPREAD, HELD = "#2a6f97", "#a9d6e5", "#e76f51"


def picture(history: History, to: Path) -> None:
    """Draw rewards and held-out scores over rounds into the file `to`, replacing it in one step.

    Its ending (.png, .svg, .pdf) says in which format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    try:
        _draw(axes, history)
        axes.set_title(history.title, loc="left", fontsize=12, fontweight="bold", parse_math=False)
        axes.set_xlabel("rounds done")
        axes.set_ylabel(history.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if axes.has_data():
            axes.legend(frameon=False, loc="best", fontsize=9)
        draft = to.with_name(to.name + ".new")
        figure.savefig(draft, format=to.suffix.lower().removeprefix("."))
        os.replace(draft, to)
    finally:
        pyplot.close(figure)


def _draw(axes: Any, history: History) -> None:
    # Members of round r are the weights after r commits, disturbed: x = r, like its own score.
    x = [row.round for row in history.rounds]
    mirrored = ", mirrored" if history.lock.mirrored else ""
    if x:
        worst, best = [row.worst for row in history.rounds], [row.best for row in history.rounds]
        label = f"worst to best of {history.lock.members} members{mirrored}"
        axes.fill_between(x, worst, best, color=SPREAD, alpha=0.5, linewidth=0, label=label)
        axes.plot(
            x, [row.mean for row in history.rounds], color=MEAN, linewidth=2, label="mean of the members"
        )
    if history.heldout:
        axes.plot(
            [score.round for score in history.heldout],
            [score.mean for score in history.heldout],
            color=HELD,
            linewidth=1.5,
            linestyle=(0, (4, 2)),
            marker="o",
            markersize=5,
            label="held-out prompts, the model itself",
        )


def sketch(history: History, width: int = 72, height: int = 14) -> Text:
    """The same plot for a terminal."""
    series = [
        Series("best member", tuple((row.round, row.best) for row in history.rounds), "green"),
        Series("mean of the members", tuple((row.round, row.mean) for row in history.rounds), "cyan"),
        Series("held-out", tuple((score.round, score.mean) for score in history.heldout), "yellow", "●"),
    ]
    return plot([one for one in series if one.points], history.unit, "rounds done", width, height)


def rounds_table(history: History) -> Table:
    """One line per round; beside it the score of the state it led to, above all that of the start."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("round", "members", "mean", "best", "worst", "spread", "held-out", "correct"):
        table.add_column(name, justify="right")
    held = {score.round: score for score in history.heldout}
    if 0 in held:
        table.add_row("0", "", "", "", "", "", *_held(held, 0))
    for row in history.rounds:
        void = f" ({row.void} void)" if row.void else ""
        numbers = (row.mean, row.best, row.worst, row.spread)
        table.add_row(
            str(row.round + 1),
            f"{row.members}{void}",
            *(f"{number:.4f}" for number in numbers),
            *_held(held, row.round + 1),
        )
    return table


def _held(held: dict[int, Any], round: int) -> tuple[str, str]:
    score = held.get(round)
    return (f"{score.mean:.4f}", f"{score.correct}/{score.prompts}") if score else ("", "")


def as_json(history: History) -> dict[str, Any]:
    """The same as plain data: run id, lock fields that matter, rounds and held-out scores."""
    lock = history.lock
    return {
        "run": lock.run_id.hex(),
        "task": lock.task,
        "model": lock.model,
        "seed": lock.seed,
        "ended": history.ended,
        "amended": list(history.amended),
        "rounds": [{name: getattr(row, name) for name in row.__slots__} for row in history.rounds],
        "heldout": [{name: getattr(score, name) for name in score.__slots__} for score in history.heldout],
    }
