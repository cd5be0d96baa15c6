"""The commands that measure this machine: bench node."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from esnode.cli import options

if TYPE_CHECKING:
    from esnode.engines.interface import MemoryPlan


@click.group()
def bench() -> None:
    """Measure this machine at a run's work.

    \b
    Example:
      esnode bench node --plan plan.toml
    """


@bench.command(short_help="Show where this node's time would go.")
@click.option("--plan", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="A plan file.")
@click.option("--task", default="short-answers", show_default=True, help="Without a plan: the task.")
@click.option("--model", default="demo", show_default=True, help="Without a plan: the model.")
@click.option(
    "--members",
    type=click.IntRange(min=1),
    default=4,
    metavar="N",
    show_default=True,
    help="Members of the first round to measure.",
)
@options.threads
@options.engine
@options.tp
@options.master
@options.code
@click.option(
    "--trace",
    type=options.NewFile(),
    help="Write a timeline to open at https://ui.perfetto.dev.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def node(
    plan: Path | None,
    task: str,
    model: str,
    members: int,
    threads: int | None,
    engine: str | None,
    tp: int | None,
    master: str | None,
    code: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Show where this node's time would go: generating, perturbing, scoring, updating.

    Some members of the plan's first round are measured, then its update, and worked out for the whole round
    on this node alone. What is not `engine` is overhead of the algorithm; `score` counts only what the
    engine waits for scores, and `check` is the look for weights that changed by themselves.

    \b
    Examples:
      esnode bench node
      esnode bench node --plan plan.toml --trace trace.json
    """
    from esnode import bench as measuring
    from esnode.daemon import limit_threads
    from esnode.engines.wish import Wish
    from esnode.nodeoptions import cores

    limit_threads(threads or cores())
    from esnode.workshop import engine_loader

    chosen = measuring.read_plan(plan, task, model)
    load = partial(
        engine_loader(engine or "transformers"),
        wish=Wish(master or "auto", tp=tp or 0),
        report=_ignore if as_json else _say,
    )
    found = measuring.measure(chosen, load, members, threads=threads, code=code)
    if trace is not None:
        measuring.write_trace(found, trace)
    if as_json:
        click.echo(json.dumps({"task": found.lock.task, "model": found.lock.model, "round": found.shares}))
        return
    for line in measuring.words(found):
        click.echo(line)
    if trace is not None:
        click.echo(f"  timeline: {trace}, open it at https://ui.perfetto.dev")


def _say(plan: MemoryPlan) -> None:
    from esnode import memory

    click.echo(f"memory: {memory.words(plan)}")


def _ignore(plan: MemoryPlan) -> None:
    """Whoever reads JSON wants nothing else."""
