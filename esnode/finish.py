"""Everything after the last round: the trained model as a folder, answers before and after, plots, a summary.

Can be repeated on any run folder, since all it writes depends on the ledger only. Called by `run.py`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esnode import history, rebuild, report
from esnode.begin import Request
from esnode.folder import RunFolder, write_file
from esnode.history import Costs, History
from esnode.progress import clock, say, size
from esnode.rebuild import Ledger, Rebuilt
from esnode.tell import Tell, step
from protocol.counting import rounds

if TYPE_CHECKING:
    from esnode.engines.interface import Engine
    from esnode.prompts import Prepared

SHOWN = 8  # held-out prompts answered before and after
MAX_TOKENS = 32  # enough to see the difference, short enough for two columns


@dataclass(frozen=True, slots=True)
class Comparison:
    """One held-out prompt and the greedy answers of the base and the trained model."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that the end of a run shows."""

    place: RunFolder
    history: History
    costs: Costs
    rebuilt: Rebuilt
    answers: tuple[Comparison, ...]


def finish(place: RunFolder, request: Request, tell: Tell) -> Outcome:
    """Rebuild the trained weights from the ledger, write `final/`, the plot and the answers."""
    ledger = rebuild.open_ledger(place.ledger)
    past = history.of_chain(ledger.chain)
    report.picture(past, place.picture)
    rebuilt, answers = _compare(place, ledger, request, tell)
    tell("writing the model", 0, 1)
    _write_model(place, rebuilt)
    tell("writing the model", 1, 1)
    return Outcome(place, past, history.costs_of(place), rebuilt, tuple(answers))


def _compare(
    place: RunFolder, ledger: Ledger, request: Request, tell: Tell
) -> tuple[Rebuilt, list[Comparison]]:
    """Answer the first held-out prompts with the base model, replay all rounds, answer them again."""
    import torch

    from esnode import prompts, tasks

    lock = ledger.lock
    base = rebuild.start(ledger, threads=request.threads * request.nodes, tell=tell)
    # Replay wants all threads; a few short answers are quicker with a node's few when anything else is
    # running.
    torch.set_num_threads(request.threads)
    task = tasks.open_task(lock.task, lock.task_options, place.task.read_bytes(), code=request.code)
    prepared = prompts.prepare(base.model.path, task, lock.date)
    chosen = _spread(lock.heldout_prompts)
    with step(tell, "answering held-out prompts as before"):
        before = _greedy(base.engine, prepared, chosen)
    rebuilt = rebuild.advance(base, ledger.rounds, tell)
    with step(tell, "answering them again"):
        after = _greedy(rebuilt.engine, prepared, chosen)
    questions = [task.start(task.heldout[index])[-1]["content"] for index in chosen]
    rows = [Comparison(*row) for row in zip(questions, before, after, strict=True)]
    write_file(
        place.answers, json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=1).encode()
    )
    return rebuilt, rows


def _spread(prompts: int) -> list[int]:
    """Up to `SHOWN` prompts, evenly spaced: neighbours are often alike."""
    count = min(SHOWN, prompts)
    return [number * prompts // count for number in range(count)]


def _greedy(engine: Engine, prepared: Prepared, chosen: Sequence[int]) -> list[str]:
    from esnode.engines.interface import Sampling

    ids = [prepared.ids_of("heldout", index) for index in chosen]
    made = engine.generate(ids, Sampling(MAX_TOKENS, prepared.stop_ids), [0] * len(ids)) if ids else []
    return [_readable(prepared.decode(row)) + " ..." * (len(row) == MAX_TOKENS) for row in made]


def _readable(text: str) -> str:
    """One line without characters that could drive a terminal: a model may say anything."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _write_model(place: RunFolder, rebuilt: Rebuilt) -> None:
    from esnode import export

    draft = place.final.with_name("final.new")
    shutil.rmtree(draft, ignore_errors=True)
    export.write(rebuilt.weights, rebuilt.lock, rebuilt.model.path, draft)
    shutil.rmtree(place.final, ignore_errors=True)  # of an earlier, shorter end of this run
    os.rename(draft, place.final)


def show(outcome: Outcome, console: Console) -> None:
    """Print answers, plot, summary, files and what to do next."""
    console.print()
    console.print(_answers(outcome.answers))
    console.print()
    console.print(report.sketch(outcome.history, width=max(24, min(72, console.width - 12))))
    console.print()
    console.print(_summary(outcome))
    console.print()
    say(console, _next(outcome.place, len(outcome.history.rounds)))


def _answers(rows: Sequence[Comparison]) -> Table:
    table = Table(title="Held-out prompts and greedy answers", title_justify="left", box=SIMPLE, expand=True)
    for name, style in (("prompt", ""), ("before", "dim"), ("after", "green")):
        table.add_column(name, ratio=1, style=style)
    for row in rows:
        # Text, not str: what a model says must not be taken for markup.
        table.add_row(*(Text(_readable(part)) for part in (row.prompt, row.before, row.after)))
    return table


def summary(past: History, costs: Costs) -> list[tuple[str, str]]:
    """The run in a few lines: label and words."""
    rows = [("run", f"{past.lock.run_id.hex()[:16]}, {past.title}")]
    if past.rounds:
        first, last = past.rounds[0], past.rounds[-1]
        rows.append(("rounds", f"{len(past.rounds)}, with {last.members} members each"))
        rows.append(("reward", f"{first.mean:.4f} in the first round, {last.mean:.4f} in the last"))
    if past.heldout:
        first_score, last_score = past.heldout[0], past.heldout[-1]
        counts = f"{first_score.correct} to {last_score.correct} of {last_score.prompts}"
        words = f"{first_score.mean:.4f} to {last_score.mean:.4f} ({past.unit})"
        rows.append(("held-out", words + history.answered(past.lock.task, counts)))
    return rows + _spent(past, costs)


def _spent(past: History, costs: Costs) -> list[tuple[str, str]]:
    if not costs.units or not past.rounds:
        return []
    seconds = sum(costs.round_seconds.values())
    total = sum(costs.bytes_by_type.values())
    shares = costs.shares
    rows = [
        ("time", f"{clock(seconds)} in rounds, {seconds / max(len(costs.round_seconds), 1):.1f} s each"),
        ("speed", f"{costs.tokens / max(seconds, 1e-9):.0f} tokens/s, all nodes together"),
        ("shares", ", ".join(f"{name} {share:.1%}" for name, share in shares.items())),
        ("", f"{1 - shares['generate']:.1%} of the nodes' time is not generation"),
        (
            "traffic",
            f"{size(total)} in all, {size(costs.unit_bytes / costs.units)} for a unit; no weights",
        ),
    ]
    if costs.failed_scoring:
        rows.append(("scorer", costs.failed_scoring))
    return rows


def _summary(outcome: Outcome) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for label, words in summary(outcome.history, outcome.costs):
        table.add_row(label, Text(words))
    rebuilt = outcome.rebuilt
    table.add_row("digest", f"{rebuilt.digest:016x}, {rebuilt.compared} of {rounds(rebuilt.round)} compared")
    kept = size(outcome.place.ledger.stat().st_size)
    table.add_row("replay", f"{rebuilt.replay_seconds:.1f} s from the ledger ({kept})")
    return table


def _next(place: RunFolder, rounds: int) -> str:
    path, middle = place.path, (rounds + 1) // 2
    return "\n".join(
        [
            f"  {place.final}/  the trained model, a Hugging Face folder",
            f"  {place.ledger}  everything needed to rebuild it",
            f"  {place.picture}  the plot; {place.tensorboard}/ for TensorBoard",
            f"  {place.metrics}, {place.units}  one JSON object per round and per unit",
            "next:",
            f"  esnode verify {path}",
            f"  esnode evaluate {path}",
            f"  esnode export {path} --round {middle} --to model-{middle}",
        ]
    )
