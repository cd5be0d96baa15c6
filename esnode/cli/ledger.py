"""The commands that take a ledger: verify, show, export, fork."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from esnode.cli import options
from protocol.counting import rounds
from protocol.logfile import printable

if TYPE_CHECKING:
    from esnode.tell import Tell

LEDGER = click.argument("ledger", type=click.Path(path_type=Path))
BASE = click.option(
    "--base",
    metavar="MODEL",
    help="The base model: folder, .gguf file or hub id. Left out, the ledger's model is looked for.",
)
ROUND = click.option(
    "--round",
    "round_",
    type=click.IntRange(min=0),
    metavar="N",
    help="Weights after N rounds, 0: those it started from [default: all].",
)


def told() -> AbstractContextManager[Tell]:
    """Progress on stderr, so that stdout stays the result: bars in a terminal, else a line now and then."""
    from rich.console import Console

    from esnode import progress

    return progress.bars(Console(stderr=True), lines=False)


@click.command()
@LEDGER
@BASE
@options.threads
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(ledger: Path, base: str | None, threads: int | None, as_json: bool) -> None:
    """Rebuild the weights from the base model and LEDGER and compare every recorded digest.

    LEDGER is a run.ledger file or a run's folder. Exit code 0: every signature, link and digest is right.
    1: not, and the first fault is located.

    \b
    Examples:
      esnode verify runs/mine
      esnode verify friend.ledger --base Qwen/Qwen2.5-1.5B-Instruct
    """
    from esnode import rebuild

    with told() as tell:
        report = rebuild.verify(ledger, base, threads=threads, tell=tell)
    click.echo(json.dumps(report.as_json(), indent=1) if as_json else report.words())
    if report.fault:
        click.echo(f"esnode: {printable(report.fault)}", err=True)
        sys.exit(1)


@click.command()
@LEDGER
@click.option("--json", "as_json", is_flag=True, help="Print rounds and scores as JSON.")
@click.option(
    "--plot",
    "to",
    type=options.NewFile(".png", ".svg", ".pdf"),
    help="Also draw it, as the ending says: .png, .svg or .pdf.",
)
def show(ledger: Path, as_json: bool, to: Path | None) -> None:
    """List the rounds of LEDGER: rewards, members, held-out scores. Needs no model.

    \b
    Example:
      esnode show runs/mine --plot reward.png
    """
    from rich.console import Console

    from esnode import history, report
    from esnode.progress import say
    from esnode.rebuild import damage_of, open_ledger

    opened = open_ledger(ledger)
    past = history.of_chain(opened.chain)
    if to:
        report.picture(past, to)
    if as_json:
        click.echo(json.dumps(report.as_json(past), indent=1))
    else:
        console = Console()
        say(console, f"{past.title}, run {opened.lock.run_id.hex()[:16]}, {opened.state}")
        console.print(report.rounds_table(past))
        for words in past.amended:
            say(console, f"amended: {words}")
        if len(past.rounds) > 1:
            console.print(report.sketch(past))
        if to:
            say(console, f"plot: {to}")
    damage = damage_of(opened)
    if damage:
        click.echo(f"esnode: {damage}", err=True)
        sys.exit(1)


@click.command()
@LEDGER
@BASE
@ROUND
@options.threads
@click.option(
    "--to", required=True, type=click.Path(path_type=Path), help="Folder to write; must not exist yet."
)
def export(ledger: Path, base: str | None, round_: int | None, threads: int | None, to: Path) -> None:
    """Write the weights of any round of LEDGER as a Hugging Face folder for transformers and vLLM.

    \b
    Examples:
      esnode export runs/mine --to model
      esnode export runs/mine --round 10 --to model-10
    """
    from esnode import export as writing
    from esnode import rebuild

    if to.exists():  # before minutes of work, not after
        raise writing.ExportError(f"{to} exists already: remove it or name another folder.")
    with told() as tell:
        rebuilt = rebuild.at(ledger, round_, base, runnable=False, threads=threads, tell=tell)
    writing.write(rebuilt.weights, rebuilt.lock, rebuilt.model.path, to)
    click.echo(f"{to}: {rebuilt.lock.model} after {rounds(rebuilt.round)}, digest {rebuilt.digest:016x}")


@click.command()
@LEDGER
@ROUND
@click.option(
    "--plan", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Plan of the new run."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the new run [default: runs/NAME-fork-N]."
)
@options.code
@BASE
def fork(
    ledger: Path, round_: int | None, plan: Path, out: Path | None, code: Path | None, base: str | None
) -> None:
    """Prepare a new run that starts from the weights of a round of LEDGER instead of a checkpoint.

    The new lock names the parent run, round, entry and digest; the parent's ledger is copied along, so the
    new run's ledger can be verified from the base model too.

    \b
    Example:
      esnode plan new --task conciseness > next.toml
      esnode fork runs/mine --round 10 --plan next.toml --out runs/next
      esnode run --resume --out runs/next
    """
    from esnode import fork as forking

    with told() as tell:
        folder = forking.fork(ledger, round_, plan, out, base, code=code, tell=tell)
    click.echo(f"{folder.path} is ready. Start it with: esnode run --resume --out {folder.path}")
