"""The commands of the machine that serves a run to others: coordinator serve, key."""

from __future__ import annotations

from pathlib import Path

import click

from esnode.cli import options


@click.group()
def coordinator() -> None:
    """Serve a run to nodes on other machines. `esnode run` does all of this by itself on one machine.

    \b
    Example:
      esnode coordinator serve plan.toml --bind tcp://0.0.0.0:5555 --data runs/mine
    """


@coordinator.command(short_help="Print this user's public signing key.")
def key() -> None:
    """Print the public half of the key that this user's coordinators sign ledgers with; made at first use.

    A plan names it in `trusted` when the lock is made on one machine and served on another.

    \b
    Example:
      esnode coordinator key
    """
    from esnode import begin

    click.echo(begin.own_key())


@coordinator.command(short_help="Serve a run until its last round.")
@click.argument("plan", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), required=True, help="The run's folder."
)
@click.option(
    "--bind", default="tcp://127.0.0.1:0", show_default=True, metavar="ADDRESS", help="Where to listen."
)
@click.option(
    "--advertise",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Address for invites; may be repeated [default: this machine's].",
)
@click.option(
    "--invites",
    type=click.IntRange(0, 100),
    metavar="N",
    help="Invites to print [default: 1 at the first start].",
)
@click.option("--rounds", type=click.IntRange(min=1), metavar="R", help="Rounds, instead of the plan's.")
@click.option(
    "--task-data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The task's data, when PLAN is a lock [default: task.jsonl beside it].",
)
@options.code
@click.option(
    "--allow",
    multiple=True,
    metavar="NAME",
    help="Let a node of this machine in, with a key under DATA/nodes; may be repeated.",
)
@click.option(
    "--recover-from",
    multiple=True,
    metavar="LEDGER|tcp://PEER",
    help="Be the successor of a lost coordinator, from a ledger file that survived or from a node that did, "
    "tcp://HOST:PORT/KEY as its folder's file `peer` says; may be repeated, the strongest ledger counts.",
)
@click.option(
    "--force",
    is_flag=True,
    help="With --recover-from: begin after 10 s, whoever is missing of those who did the recent work.",
)
@click.option("--metrics", metavar="[HOST:]PORT", help="Numbers for Prometheus there; loopback if no HOST.")
@click.option(
    "--relay",
    metavar="tcp://HOST:PORT|off",
    help="Where nodes that cannot dial each other exchange snapshots [default: any port of --bind's host].",
)
@click.option(
    "--relay-mbit",
    type=options.Number(min=0),
    metavar="MBIT",
    help="Most that the relay may carry, Mbit/s [default: no limit].",
)
@click.option("--plain", is_flag=True, help="No encryption; for tests, on loopback only.")
def serve(
    plan: Path | None,
    data: Path,
    bind: str,
    advertise: tuple[str, ...],
    invites: int | None,
    rounds: int | None,
    task_data: Path | None,
    code: Path | None,
    allow: tuple[str, ...],
    recover_from: tuple[str, ...],
    force: bool,
    metrics: str | None,
    relay: str | None,
    relay_mbit: float | None,
    plain: bool,
) -> None:
    """Coordinate a run until its last round, then exit. Once it listens it prints an invite for one machine.

    PLAN is a plan, which takes the node extra to resolve, or a lock made elsewhere (`esnode plan lock`): then
    neither torch nor a model is needed here, just the signing key that the lock trusts. Ctrl-C keeps
    everything; the same command, also without PLAN, goes on where it was. The coordinator needs no GPU and
    little memory.

    \b
    Examples:
      esnode coordinator serve plan.toml --bind tcp://0.0.0.0:5555 --data runs/mine
      esnode coordinator serve --bind tcp://[::]:5555 --advertise train.example.org --data runs/mine
      esnode coordinator serve lock.json --task-data task.jsonl --rounds 300 --data runs/mine
      esnode coordinator serve --recover-from node.ledger --rounds 300 --data runs/heir
      esnode coordinator serve --recover-from tcp://10.0.0.7:40123/9f86d0... --rounds 300 --data runs/heir
    """
    from rich.console import Console

    from esnode import progress
    from esnode import serve as serving

    _require_address("--bind", bind)  # before the model is read for minutes
    if relay is not None and relay != "off":
        _require_address("--relay", relay)
    order = serving.Order(
        data=data,
        source=plan,
        task_data=task_data,
        rounds=rounds,
        code=code,
        allow=allow,
        recover=recover_from,
    )
    place, descriptor = serving.take(order)
    serving.require_free(bind)
    with progress.bars(Console(stderr=True)) as tell:
        order = serving.recover(place, order, tell)
        serving.settle(place, order, tell)
    first = not (place.coordinator / "journal.sqlite").exists()
    words = options.typed(
        {
            "bind": bind,
            "invites": int(first and not plain) if invites is None else invites,
            "metrics": metrics,
            "relay": relay,
            "relay_mbit": relay_mbit,
            "recover_from": order.survivor,
        }
    )
    words += [word for address in advertise for word in ("--advertise", address)]
    words += [flag for flag, given in (("--force", force), ("--plain", plain)) if given]
    serving.become(place, descriptor, words)


def _require_address(option: str, address: str) -> None:
    from protocol import zmtp

    try:
        zmtp.host_and_port(address)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}", click.get_current_context()) from None
