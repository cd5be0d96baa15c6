"""The command that runs: run."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.option(
    "--plan", type=click.Path(path_type=Path, dir_okay=False), help="Plan file [default: the demo's]."
)
@click.option("--task", metavar="TASK", help="Task, instead of the plan's [default: short-answers].")
@click.option(
    "--model", metavar="MODEL", help="Hub id, folder or .gguf file, instead of the plan's [default: demo]."
)
@click.option("--nodes", type=click.IntRange(1, 64), default=2, show_default=True, help="Node processes.")
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads per node."
)
@click.option("--rounds", type=click.IntRange(min=1), metavar="R", help="Rounds, instead of the plan's.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Run folder [default: runs/TASK-TIME]."
)
@click.option(
    "--code", type=click.Path(path_type=Path, file_okay=False), help="Folder of a python: task's file."
)
@click.option("--resume", is_flag=True, help="Continue the run in --out, or the newest one under runs/.")
def run(
    plan: Path | None,
    task: str | None,
    model: str | None,
    nodes: int,
    threads: int,
    rounds: int | None,
    out: Path | None,
    code: Path | None,
    resume: bool,
) -> None:
    """Train on this machine: a coordinator and some nodes as separate processes on loopback.

    Without flags it trains the demo model on short questions, which takes a few minutes on two cores.
    Several nodes of one thread are faster than one node of several. Ctrl-C keeps everything; --resume
    continues, to the same bits as a run that was never stopped if the plan says `repeatable = true`.

    \b
    Examples:
      esnode run
      esnode run --task conciseness --rounds 8
      esnode run --plan plan.toml --nodes 4 --out runs/mine
      esnode run --resume --out runs/mine
    """
    from rich.console import Console

    from esnode.begin import Request
    from esnode.run import run as start

    request = Request(
        out=out,
        resume=resume,
        plan=plan,
        task=task,
        model=model,
        rounds=rounds,
        nodes=nodes,
        threads=threads,
        code=code,
    )
    sys.exit(start(request, Console()))
