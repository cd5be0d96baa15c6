"""The command that runs: run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from esnode.cli import options
from protocol.fields import LARGEST_U64


@click.command()
@click.option(
    "--plan", type=click.Path(path_type=Path, dir_okay=False), help="Plan file [default: the demo's]."
)
@click.option("--task", metavar="TASK", help="Task, instead of the plan's [default: short-answers].")
@click.option(
    "--model", metavar="MODEL", help="Hub id, folder or .gguf file, instead of the plan's [default: demo]."
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Node processes [default: 2; 1 with GPUs or --lanes].",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="T",
    help="CPU threads per node [default: 1; all cores with GPUs].",
)
@options.engine
@options.gpus
@options.tp
@options.engines_per_gpu
@options.lanes
@options.master
@options.backend
@click.option("--rounds", type=click.IntRange(min=1), metavar="R", help="Rounds, instead of the plan's.")
@click.option(
    "--seed",
    type=click.IntRange(0, LARGEST_U64),
    metavar="N",
    help="Seed, instead of the plan's: other noise, other order of prompts.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Run folder [default: runs/TASK-TIME]."
)
@options.code
@click.option("--resume", is_flag=True, help="Continue the run in --out, or the newest one under runs/.")
def run(
    plan: Path | None,
    task: str | None,
    model: str | None,
    nodes: int | None,
    threads: int | None,
    gpus: str | None,
    tp: int | None,
    engines_per_gpu: int,
    lanes: int | None,
    rounds: int | None,
    seed: int | None,
    out: Path | None,
    code: Path | None,
    resume: bool,
    **passed: object,
) -> None:
    """Train on this machine: a coordinator and some nodes as separate processes on loopback.

    Without flags it trains the demo model on short questions, which takes a few minutes on two cores.
    On a CPU, several nodes of one thread are faster than one node of several. Where torch finds GPUs, one
    node works on all of them, an engine on each; --gpus says on which, several --nodes share them out, and
    --lanes alone leaves them alone. Ctrl-C keeps everything; --resume continues, to the same bits as a run
    that was never stopped if the plan says `repeatable = true`.

    \b
    Examples:
      esnode run
      esnode run --task conciseness --rounds 8
      esnode run --plan plan.toml --nodes 4 --out runs/mine
      esnode run --plan plan.toml --seed 1
      esnode run --plan plan.toml --engine vllm --gpus 0,1
      esnode run --resume --out runs/mine
    """
    from rich.console import Console

    from esnode import devices
    from esnode.begin import Request
    from esnode.nodeoptions import cores
    from esnode.run import run as start

    options.require(passed["engine"], tp)
    shares = devices.of_nodes(gpus, lanes, tp or 1, engines_per_gpu, nodes)
    on_gpus = any(lane != devices.CPU for lane in shares[0])
    several = engines_per_gpu if engines_per_gpu > 1 else None
    typed = {"gpus": gpus, "tp": tp, "engines_per_gpu": several, "lanes": lanes}
    request = Request(
        out=out,
        resume=resume,
        plan=plan,
        task=task,
        model=model,
        rounds=rounds,
        seed=seed,
        nodes=len(shares),
        threads=threads or (max(1, cores() // len(shares)) if on_gpus else 1),
        code=code,
        lanes=shares,
        node_words=tuple(options.typed({"tp": tp, **passed})),
        typed=tuple(options.typed({**typed, **passed})),
    )
    sys.exit(start(request, Console()))
