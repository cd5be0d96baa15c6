"""The command that works for a run: node."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import click


@click.command()
@click.option(
    "--run", "run_", type=click.Path(path_type=Path, file_okay=False), required=True, help="The run's folder."
)
@click.option(
    "--name", default=platform.node(), show_default="host name", help="This node's name in the folder."
)
@click.option("--threads", type=click.IntRange(min=1), metavar="T", help="CPU threads [default: all].")
@click.option(
    "--engine", type=click.Choice(["transformers", "vllm"]), help="What decodes [default: transformers]."
)
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs (or cores) that share one model, with vllm [default: as few as it fits].",
)
@click.option(
    "--master",
    type=click.Choice(["auto", "device", "host"]),
    help="Where the master lies [default: on the GPU if it fits, else in host memory].",
)
@click.option(
    "--backend",
    type=click.Choice(["cpu", "triton", "compiled", "reference"]),
    help="Kernels [default: the fastest].",
)
@click.option(
    "--model", metavar="MODEL", help="Base model: folder, .gguf file or hub id [default: the plan's]."
)
@click.option(
    "--code",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder a python: task's code may come from.",
)
@click.option(
    "--coordinator", multiple=True, metavar="ADDRESS", help="Where it listens [default: as the folder says]."
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="For the coordinator to appear [default: 60].",
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
@click.option("--gpus", metavar="all|INDEX,...", help="Work on these GPUs, an engine on each.")
@click.option(
    "--engines-per-gpu",
    type=click.IntRange(1, 8),
    default=1,
    metavar="N",
    help="Engines on each GPU, for small models [default: 1].",
)
@click.option(
    "--lanes",
    type=click.IntRange(1, 32),
    metavar="N",
    help="Engines on the CPU, each a process [default: 1, in this one].",
)
@click.option("--loader", hidden=True, help="MODULE:FUNCTION that builds the engine.")
def node(
    run_: Path,
    coordinator: tuple[str, ...],
    gpus: str | None,
    engines_per_gpu: int,
    lanes: int | None,
    tp: int | None,
    **options: object,
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
    from esnode import daemon, devices

    words = ["--run", str(run_)]
    chosen = devices.lanes_of(gpus, lanes, tp or 1, engines_per_gpu)
    words += [word for lane in chosen for word in ("--lane", lane)]
    words += ["--tp", str(tp)] if tp else []
    for address in coordinator:
        words += ["--coordinator", address]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    sys.exit(daemon.main(words))
