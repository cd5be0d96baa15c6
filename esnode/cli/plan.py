"""`esnode plan`: write, show and resolve plan files."""

from __future__ import annotations

from pathlib import Path

import click

from esnode.cli import options
from esnode.template import DEFAULT_TASK
from protocol.counting import nth
from protocol.counting import rounds as counted
from protocol.logfile import printable

FILE = click.argument("file", type=click.Path(path_type=Path))


@click.group()
def plan() -> None:
    """Write, check and resolve plan files.

    \b
    Example:
      esnode plan new --task countdown --model Qwen/Qwen2.5-1.5B-Instruct > plan.toml
      esnode plan show plan.toml
      esnode run --plan plan.toml
    """


@plan.command(short_help="Write a commented plan to stdout.")
@click.option(
    "--task",
    default=DEFAULT_TASK,
    show_default=True,
    metavar="T",
    help="What to train on: countdown, gym:NAME, ...",
)
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="M",
    help="What to train: a folder, a .gguf file or a hub id.",
)
def new(task: str, model: str) -> None:
    """Write a commented plan to stdout; it runs as it is.

    \b
    Example:
      esnode plan new --task conciseness > plan.toml
    """
    from esnode.template import template

    click.echo(template(task, model), nl=False)


@plan.command(short_help="Check a plan or a lock and print it.")
@FILE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """Check FILE, a plan or a lock, and print what it says, defaults and rounded sigma included.

    \b
    Example:
      esnode plan show runs/mine/lock.json
    """
    from esnode import planfile

    found = planfile.read(file)
    click.echo(planfile.as_json(found) if as_json else printable(planfile.describe(found)))


@plan.command(short_help="Resolve a plan into a lock.")
@FILE
@click.option(
    "--out",
    type=options.NewFile(),
    default=Path("lock.json"),
    show_default=True,
    metavar="PATH",
    help="Where the lock goes.",
)
@click.option(
    "--data",
    type=options.NewFile(),
    metavar="PATH",
    help="Where the task's data goes [default: nowhere].",
)
@options.code
def lock(file: Path, out: Path, data: Path | None, code: Path | None) -> None:
    """Resolve the plan FILE into the lock that defines a run, and print the run id.

    Reads the model and the task, so it needs the node extra. `esnode run` does this by itself; a coordinator
    on a machine without torch is given the two files.

    \b
    Example:
      esnode plan lock plan.toml --out lock.json --data task.jsonl
    """
    from esnode import planfile
    from esnode.cli.ledger import told

    with told() as tell:
        resolved = planfile.resolve(file, out, data, tell, code=code)
    click.echo(resolved.run_id.hex())


@plan.command(short_help="Change a running run's settings from a later round on.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.option(
    "--from-round",
    "first",
    type=click.IntRange(min=1),
    required=True,
    metavar="R",
    help="First round it is for, counted from 1: R - 1 rounds keep what they had.",
)
@click.option("--alpha", type=options.Number(), metavar="X", help="Step size.")
@click.option("--sigma", type=options.Number(), metavar="X", help="Noise scale; rounded to bf16.")
@click.option("--members", type=int, metavar="N", help="Population size.")
@click.option(
    "--trust",
    multiple=True,
    metavar="HEX",
    help="A signing key; all that are named replace the list, the coordinator's own must be there.",
)
def amend(
    folder: Path,
    first: int,
    alpha: float | None,
    sigma: float | None,
    members: int | None,
    trust: tuple[str, ...],
) -> None:
    """Change settings of the run in DIR, whose coordinator runs on this machine, from round R on.

    The change is signed into the ledger, so that every node and every replay follows it. The open round and
    those before it keep what they had.

    --trust names who may sign the ledger: the coordinator itself and those who may take its place. It must be
    in force before the coordinator is lost. Each prints its own key with `esnode coordinator key`.

    \b
    Examples:
      esnode plan amend runs/mine --alpha 0.0005 --from-round 40
      esnode plan amend runs/mine --trust $MINE --trust $COLLEAGUES --from-round 40
    """
    from esnode import admin

    wanted = {"alpha": alpha, "sigma": sigma, "members": members}
    if not trust and all(value is None for value in wanted.values()):
        raise click.UsageError(
            "name what changes: --alpha, --sigma, --members or --trust", click.get_current_context()
        )
    answer = admin.order(folder, "amend", from_round=first - 1, trusted=list(trust), **wanted)
    told = [f"{name} {answer[name]:g}" for name in wanted if answer[name] is not None]
    told += [f"trusted keys {', '.join(key[:16] for key in answer['trusted'])}"] if answer["trusted"] else []
    click.echo(f"{', '.join(told)} from {nth(answer['from_round'])} on")
    if first > answer["rounds"]:
        last = counted(answer["rounds"])
        click.echo(f"The run ends after {last}: this changes nothing unless `rounds` grows.", err=True)
