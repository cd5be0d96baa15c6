"""A run while it lasts, as a picture in the terminal or a line per round; and bars for the steps around it.

`view` and `line` are pure: from what the files and the coordinator say (`Snapshot`) to rich renderables.
Called by `run.py`, `finish.py` and the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esnode.history import Costs, HeldOut, History, Round, answered
from esnode.sketch import sparkline
from esnode.standing import node_words
from esnode.tell import Tell
from protocol.counting import nth, rounds

LINE_SECONDS = 4.0  # between lines about a step, where there is no terminal
STAGES = ("generate", "perturb", "update", "score")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one frame shows. `status` is the coordinator's own, {} while it does not answer."""

    history: History
    costs: Costs
    status: Mapping[str, Any]
    rounds: int
    elapsed: float  # seconds since this process started
    restarts: int = 0

    @property
    def eta(self) -> float | None:
        """Seconds left, from the usual length of the last rounds; None before the first commit."""
        recent = list(self.costs.round_seconds.values())[-5:]
        left = self.rounds - len(self.history.rounds)
        return left * sum(recent) / len(recent) if recent else None


def view(now: Snapshot) -> Panel:
    """One frame."""
    history = now.history
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_row("round", _bar(len(history.rounds), now.rounds, _left(now)))
    done, total = _members(now)
    grid.add_row("members", _bar(done, total, f"{done} of {total}"))
    grid.add_row("reward", _reward(history))
    grid.add_row("held-out", _heldout(history))
    grid.add_row("speed", _speed(now))
    grid.add_row("traffic", _traffic(now))
    grid.add_row("time", _shares(now.costs))
    for name, doing in _nodes(now):
        grid.add_row(Text(name), Text(doing))  # names and reasons come from elsewhere: no markup
    if now.costs.failed_scoring:
        grid.add_row("scorer", Text(now.costs.failed_scoring, style="yellow"))
    if now.restarts:
        grid.add_row("restarts", f"{now.restarts} crashed processes were started again")
    hint = Text("Ctrl-C stops cleanly and keeps everything", style="dim")
    title = Text(f"{history.title}, run {history.lock.run_id.hex()[:12]}", style="bold")
    return Panel(Group(grid, hint), title=title, title_align="left", border_style="cyan")


def line(row: Round, costs: Costs, total: int) -> str:
    """One closed round in words, for logs and pipes."""
    parts = [f"{nth(row.round)}/{total}", f"reward {row.mean:.4f} (best {row.best:.4f})"]
    if row.best == row.worst:
        parts.append("all members alike")
    if row.void:
        parts.append(f"{row.void} members void")
    if row.round in costs.round_seconds:
        parts.append(f"{costs.round_seconds[row.round]:.1f} s")
    if costs.failed_scoring:
        parts.append(f"so far {costs.failed_scoring}")
    return "  ".join(parts)


def score_line(score: HeldOut) -> str:
    """One held-out score in words."""
    return f"held-out {score.mean:.4f} after {rounds(score.round)}"


def say(console: Console, words: str) -> None:
    """Print plain words: paths and names are no markup, and a long line is the terminal's to wrap."""
    console.print(words, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def bars(console: Console, lines: bool = True, clock: Callable[[], float] = time.monotonic) -> Iterator[Tell]:
    """A progress bar per step in a terminal; elsewhere a line every few seconds that a step lasts.

    `lines`: elsewhere every step has a line as it begins, too. `clock`: monotonic seconds.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    terminal = console.is_terminal
    with Progress(*columns, *times, console=console, disable=not terminal) as shown:
        steps: dict[str, TaskID] = {}
        began: dict[str, float] = {}
        spoken = clock()

        def tell(what: str, done: int, total: int) -> None:
            nonlocal spoken
            fresh = what not in steps
            if fresh:
                steps[what] = shown.add_task(what, total=total)
                began[what] = clock()
            if not terminal and lines and fresh:
                say(console, what)
                spoken = clock()
            elif not terminal and done < total and clock() - spoken >= LINE_SECONDS:
                words = f"{what}: {done / total:.0%}" if total > 1 else what
                say(console, words + _to_go(clock() - began[what], done, total))
                spoken = clock()
            shown.update(steps[what], completed=done, total=total)

        yield tell


def _to_go(elapsed: float, done: int, total: int) -> str:
    left = elapsed * (total - done) / done if done else 0.0
    return f", about {clock(left)} to go" if left >= LINE_SECONDS else ""


def clock(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Bytes for people: "812 B", "1.2 KB", "3.4 MB"."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _bar(done: int, total: int, words: str) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=32), words)
    return row


def _left(now: Snapshot) -> str:
    done = f"{len(now.history.rounds)} of {now.rounds}, {clock(now.elapsed)} gone"
    return done if now.eta is None else f"{done}, {clock(now.eta)} to go"


def _members(now: Snapshot) -> tuple[int, int]:
    members = now.status.get("members", {})
    return int(members.get("done", 0)), int(members.get("total", now.history.lock.members))


def _reward(history: History) -> str:
    if not history.rounds:
        return "the first round is being measured"
    means = [row.mean for row in history.rounds]
    last = history.rounds[-1]
    return f"mean {last.mean:.4f}, best {last.best:.4f}   {sparkline(means, 40)}"


def _heldout(history: History) -> str:
    if not history.heldout:
        return "not measured yet"
    first, last = history.heldout[0], history.heldout[-1]
    words = f"{last.mean:.4f} after {rounds(last.round)}"
    words += answered(history.lock.task, f"{last.correct} of {last.prompts}")
    if last is not first:
        words += f"   ({last.mean - first.mean:+.4f} in {rounds(last.round - first.round)})"
    return words


def _speed(now: Snapshot) -> str:
    costs = now.costs
    if not costs.units:
        return "-"
    spent = max((costs.last_time or 0) - (costs.first_time or 0), 1e-9)
    words = [f"{costs.tokens / max(costs.busy / 1000, 1e-9):.0f} tokens/s per node"]
    if spent > 1:
        words.append(f"{costs.tokens / spent:.0f} tokens/s in all")
    if costs.round_seconds:
        words.append(f"{list(costs.round_seconds.values())[-1]:.1f} s per round")
    return ", ".join(words)


def _traffic(now: Snapshot) -> str:
    total = sum(now.costs.bytes_by_type.values())
    done = len(now.history.rounds)
    if not done:
        return "-"
    return f"{size(total / done)} per round, {size(total)} in all: seeds, rewards and housekeeping"


def _shares(costs: Costs) -> str:
    shares = costs.shares
    return ", ".join(f"{name} {shares[name]:.0%}" for name in STAGES) if shares else "-"


def _nodes(now: Snapshot) -> list[tuple[str, str]]:
    status = now.status
    if not status:
        return [("", "training has ended" if now.history.ended else "the coordinator does not answer yet")]
    rows = [(str(node["name"]), node_words(node)) for node in status["nodes"]]
    if status["state"] != "running":
        rows.insert(0, ("state", f"{status['state']}: {status['reason']}"))
    return rows
