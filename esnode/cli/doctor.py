"""`esnode doctor`: is this machine fit to take part, and what does its noise look like."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--kernel", metavar="NAME", help="Examine this kernel only, or probe with it.")
@click.option("--probe", "request", metavar="SEED:TENSOR:START:COUNT", help="Print noise values instead.")
def doctor(as_json: bool, kernel: str | None, request: str | None) -> None:
    """Check hardware, versions and kernels: the golden self-test of each, and how fast it is here.
    That takes most of a minute.

    With --probe, print the integers m of noise law 1, one per line (eps = m / 8192), as the kernel makes
    them: of the member seed SEED, the tensor with key TENSOR, elements START to START + COUNT - 1. Numbers
    are decimal or 0x hexadecimal. Exit code 0: ready to train. 1: not. 2: a malformed probe.

    \b
    Examples:
      esnode doctor
      esnode doctor --kernel reference --probe 0x123456789abcdef:7:1000:8
    """
    from esnode import doctor as examination

    if request is not None:
        parts = examination.probe(examination.parse_probe(request), kernel)
        if as_json:
            click.echo(json.dumps({"kernel": kernel, "m": [int(m) for part in parts for m in part]}))
            return
        for part in parts:
            click.echo("\n".join(map(str, part.tolist())))
        return
    report = examination.examine(kernel)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        from rich.console import Console

        examination.show(report, Console())
    if not report["ready"]:
        sys.exit(1)
