"""The commands that let machines in and put them out: invite, nodes."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from protocol.logfile import printable

FOLDER = click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(context: click.Context, option: click.Parameter, text: str) -> int:
    """90s, 30m, 24h, 7d: seconds."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration; write 90s, 30m, 24h or 7d", context, option)
    return int(found[1]) * _UNITS[found[2]]


@click.command()
@FOLDER
@click.option(
    "--expires",
    callback=_seconds,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="How long it lasts: 90s, 30m, 24h, 7d.",
)
@click.option(
    "--uses",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Machines it lets in.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def invite(folder: Path, expires: int, uses: int, as_json: bool) -> None:
    """Make an invite to the run in FOLDER, whose coordinator is running on this machine.

    Prints the invite alone; what it is good for goes to stderr. Whoever holds it can use it, so send it as
    you would send a password. `esnode nodes revoke FOLDER invite-N` withdraws it.

    \b
    Examples:
      esnode invite runs/mine
      ssh gpu-7 esnode join $(esnode invite runs/mine --expires 10m)
    """
    made = _order(folder, "invite", seconds=expires, uses=uses)
    if as_json:
        click.echo(json.dumps(made))
        return
    until = time.strftime("%a %d %b %Y %H:%M:%S", time.localtime(made["expires"]))
    machines = "one machine" if made["uses"] == 1 else f"{made['uses']} machines"
    click.echo(
        f"Invite {made['number']} lets {machines} in, until {until}; it dials "
        f"{', '.join(made['addresses'])}.\nOn that machine: esnode join INVITE",
        err=True,
    )
    click.echo(made["invite"])


@click.group()
def nodes() -> None:
    """Show who may work for a run, let a key in, put a node out.

    \b
    Example:
      esnode nodes list runs/mine
      esnode nodes revoke runs/mine gpu-7 --reason "sold"
    """


@nodes.command("list", short_help="List nodes, invites and revoked keys.")
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(folder: Path, as_json: bool) -> None:
    """List every key the coordinator of FOLDER knows: nodes, invites, revoked keys.

    \b
    Example:
      esnode nodes list runs/mine
    """
    from rich.console import Console

    found = _order(folder, "nodes")
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        Console().print(_listing(found))


@nodes.command(short_help="Let a key in, or a revoked node back in.")
@FOLDER
@click.argument("key")
@click.option("--name", default="", metavar="NAME", help="What to call it [default: node-DIGITS].")
def allow(folder: Path, key: str, name: str) -> None:
    """Let the node with public key KEY (64 hex digits) into the run in FOLDER, or a revoked one back in.

    A node that is refused prints its key. A revoked node comes back under a new roster number; the first 8
    digits of its key are enough.

    \b
    Example:
      esnode nodes allow runs/mine 4f1c... --name gpu-7
    """
    done = _order(folder, "allow", key=key, name=name)
    click.echo(printable(f"{done['name']} may join, with key {done['key'][:16]}..."))


@nodes.command(short_help="Put a node out, or withdraw an invite.")
@FOLDER
@click.argument("node")
@click.option(
    "--reason",
    default="",
    metavar="TEXT",
    help="Told to the node and kept in the journal [default: by the operator of HOST].",
)
def revoke(folder: Path, node: str, reason: str) -> None:
    """Put NODE (its name, or 8 or more digits of its key) out of the run in FOLDER; or withdraw invite-N.

    At once: its work goes to others, its connection is not heard any more, and the next roster entry of the
    ledger says so. Results that counted before go on counting. An invite it came by is withdrawn with it.

    \b
    Example:
      esnode nodes revoke runs/mine gpu-7 --reason "sold"
    """
    done = _order(folder, "revoke", who=node, reason=reason or f"by the operator of {platform.node()}")
    click.echo(printable(f"{done['name']} is revoked: {done['reason']}"))


def _order(folder: Path, op: str, **fields: Any) -> dict[str, Any]:
    """What the coordinator of the run in `folder` answers; FolderError when there is no run."""
    from esnode import admin
    from esnode import folder as folders

    folders.open_run(folder, served=True)
    return admin.order(folder, op, **fields)


def _listing(found: Mapping[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from esnode.standing import plain

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("node", "number", "key", "came by", "state", "reason"):
        table.add_column(column, overflow="fold")
    for row in found["nodes"]:
        number = "-" if row["number"] is None else str(row["number"])
        origin = f"invite-{row['invite']}" if row["invite"] else "the operator"
        cells = (row["name"], number, row["key"][:16], origin, row["state"], row["reason"])
        table.add_row(*(Text(plain(cell)) for cell in cells))
    for key, reason in found["revoked"].items():
        name = found.get("former", {}).get(key) or "-"
        number = str(found["numbers"].get(key, "-"))
        table.add_row(
            Text(plain(name)), number, key[:16], "-", Text("revoked", style="red"), Text(plain(reason))
        )
    lines = [Text("")] if found["invites"] else []
    for row in found["invites"]:
        until = time.strftime("%d %b %H:%M", time.localtime(row["expires"]))
        words = (
            f"invite-{row['number']}: {row['state']}, let in {row['used']} of {row['uses']}, until {until}"
        )
        lines.append(Text(plain(words)))
    return Group(table, *lines)
