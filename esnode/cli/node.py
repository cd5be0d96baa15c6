"""The command that works for a run: node."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import click

from esnode.cli import options


@click.command()
@click.option(
    "--run", "run_", type=click.Path(path_type=Path, file_okay=False), required=True, help="The run's folder."
)
@click.option(
    "--name", default=platform.node(), show_default="host name", help="This node's name in the folder."
)
@options.threads
@options.engine
@options.tp
@options.master
@options.backend
@click.option(
    "--model", metavar="MODEL", help="Base model: folder, .gguf file or hub id [default: the plan's]."
)
@options.code
@click.option(
    "--coordinator", multiple=True, metavar="ADDRESS", help="Where it listens [default: as the folder says]."
)
@click.option(
    "--wait",
    type=options.Number(min=0),
    metavar="SECONDS",
    help="For the run's lock to be made, then for the coordinator to appear [default: 60].",
)
@click.option(
    "--peer-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port that serves snapshots to other nodes; 0: any free one [default: it serves none].",
)
@click.option(
    "--catch-up",
    type=click.Choice(["auto", "replay", "snapshot"]),
    help="How to get to the run's round [default: what is quicker].",
)
@options.gpus
@options.engines_per_gpu
@options.lanes
@click.option("--loader", hidden=True, help="MODULE:FUNCTION that builds the engine.")
def node(
    run_: Path,
    coordinator: tuple[str, ...],
    gpus: str | None,
    engines_per_gpu: int,
    lanes: int | None,
    tp: int | None,
    **passed: object,
) -> None:
    """Evaluate members for the run in the folder --run, until it ends.

    Ctrl-C or SIGTERM hands the work back and exits within seconds; the same command joins again. The node's
    key has to be on the coordinator's list (`esnode coordinator serve --allow NAME`).

    \b
    Example:
      esnode node --run runs/mine --name a --threads 4
    """
    from esnode import departure

    departure.at_once()
    from esnode import daemon

    words = ["--run", str(run_), *options.words(gpus, lanes, tp, engines_per_gpu, passed)]
    for address in coordinator:
        words += ["--coordinator", address]
    sys.exit(daemon.main(words))
