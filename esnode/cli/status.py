"""The command that shows where a run stands: status."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

WATCH_SECONDS = 1.0


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the coordinator's status as JSON.")
@click.option("--watch", is_flag=True, help="Keep showing it until Ctrl-C; with --json a line a second.")
def status(folder: Path | None, as_json: bool, watch: bool) -> None:
    """Show where the run in FOLDER stands: rounds, members, scores, every node and what is refused, and why.

    Asks the running coordinator; of a run that is not running it shows what its files say. Without FOLDER it
    takes the newest run under runs/.

    \b
    Examples:
      esnode status runs/mine
      esnode status runs/mine --watch
    """
    from rich.console import Console

    from esnode import standing
    from esnode.run import RUNS, newest

    place = folder or newest(RUNS)
    console = Console()
    if watch:
        _watch(place, as_json, console)
    elif as_json:
        click.echo(json.dumps(standing.of(place), indent=1))
    else:
        console.print(standing.words(standing.of(place)))


def _watch(place: Path, as_json: bool, console: Console) -> None:
    from rich.live import Live

    from esnode import standing

    try:
        if as_json:
            while True:
                click.echo(json.dumps(standing.of(place)))
                time.sleep(WATCH_SECONDS)
        with Live(standing.words(standing.of(place)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_SECONDS)
                live.update(standing.words(standing.of(place)), refresh=True)
    except KeyboardInterrupt:
        return  # how one leaves a display; nothing was interrupted
