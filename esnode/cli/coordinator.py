"""The command that serves a run to several nodes: coordinator serve."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click


@click.group()
def coordinator() -> None:
    """Serve a run to nodes that are started one by one. `esnode run` does all of this by itself on one
    machine.
    """


@coordinator.command()
@click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), required=True, help="The run's folder."
)
@click.option(
    "--plan", type=click.Path(path_type=Path, dir_okay=False), help="Plan of a new run; needs the node extra."
)
@click.option(
    "--bind", default="tcp://127.0.0.1:0", show_default=True, metavar="ADDRESS", help="Where to listen."
)
@click.option(
    "--allow",
    multiple=True,
    metavar="NAME",
    help="Make a key for this node under DATA/nodes and let it in; may be repeated.",
)
@click.option("--metrics", metavar="[HOST:]PORT", help="Numbers for Prometheus there; loopback if no HOST.")
def serve(data: Path, plan: Path | None, bind: str, allow: tuple[str, ...], metrics: str | None) -> None:
    """Coordinate the run in the folder --data until its last round, then exit.

    The folder is one of `esnode run`, or a new one made from --plan. Ctrl-C keeps everything; the same
    command goes on where it was. The coordinator needs no model, no GPU and little memory.

    \b
    Example, three terminals:
      esnode coordinator serve --data runs/mine --plan plan.toml --allow a --allow b
      esnode node --run runs/mine --name a
      esnode node --run runs/mine --name b
    """
    from esnode import begin
    from esnode.folder import RunFolder
    from esnode.tell import silent

    folder = RunFolder(data)
    begin.settle(folder, begin.Request(out=data, plan=plan), silent)
    begin.admit(folder, allow)
    # Another package, which must run without this one: a process of its own takes this one's place.
    command = [sys.executable, "-m", "coordinator.server", "--data", str(data), "--bind", bind]
    command += ["--metrics", metrics] if metrics else []
    sys.stdout.flush()
    os.execv(sys.executable, command)
