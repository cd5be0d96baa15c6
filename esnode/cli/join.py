"""Commands of a machine that works for other people's runs: join, pause, resume, policy."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from esnode.cli import options

_DATA = click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where joined runs are kept [default: ~/.local/share/esnode].",
)


@click.command()
@click.argument("invite", nargs=-1)
@click.option(
    "--model", metavar="MODEL", help="Base model: folder, .gguf file or hub id [default: the run's]."
)
@click.option("--name", help="This node's name [default: the machine's].")
@options.threads
@options.engine
@options.tp
@options.master
@options.backend
@options.gpus
@options.engines_per_gpu
@options.lanes
@click.option(
    "--task-code",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Code of a python: task.",
)
@_DATA
@click.option("--run", "run_", metavar="RUNID", help="A run joined before, by the beginning of its id.")
@click.option(
    "--peer-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port that serves snapshots to other nodes [default: any free one].",
)
@click.option(
    "--catch-up",
    type=click.Choice(["auto", "replay", "snapshot"]),
    default="auto",
    help="How to get to the run's round [default: what is quicker].",
)
@click.option("--loader", hidden=True, help="MODULE:FUNCTION that builds the engine.")
def join(
    invite: tuple[str, ...],
    model: str | None,
    name: str | None,
    threads: int | None,
    gpus: str | None,
    engines_per_gpu: int,
    lanes: int | None,
    tp: int | None,
    task_code: Path | None,
    data: Path | None,
    run_: str | None,
    **passed: object,
) -> None:
    """Work for the run that INVITE lets this machine into, until it ends.

    INVITE is the text that `esnode invite` printed, a file that holds it, or - for standard input. Without
    one, a run joined before goes on. Keys, ledger and task data are kept in --data (or $ESNODE_DATA, by
    default ~/.local/share/esnode), so the same command always goes on where it stopped. Ctrl-C or SIGTERM
    hands the work back and exits within seconds. Outgoing connections are all it takes; other nodes of the
    run may fetch snapshots here, directly where they can dial this machine and else through the relay.

    \b
    Examples:
      esnode join esnode1-AEAQCAIBAE...
      esnode join --run 5f2c --threads 8
      esnode join --gpus all esnode1-AEAQCAIBAE...
    """
    from esnode import departure

    departure.at_once()
    from esnode import daemon
    from esnode import join as joining
    from esnode.nodeoptions import cores

    daemon.limit_threads(threads or cores())
    words = options.words(gpus, lanes, tp, engines_per_gpu, passed)
    request = joining.Request(
        invite=_text(invite), run=run_, data=data, name=name, model=model, task_code=task_code
    )
    ready = joining.prepare(request, _say)
    words += [*ready.words, *(["--threads", str(threads)] if threads else [])]
    sys.exit(daemon.main(words))


def _say(line: str) -> None:
    click.echo(line)


def _text(words: tuple[str, ...]) -> str | None:
    """The invite: the words of the command line (several when pasted with breaks), a file's, or stdin's."""
    if not words:
        return None
    if words == ("-",):
        return sys.stdin.read()
    # What is longer is no file name anywhere.
    if len(words) == 1 and len(words[0]) < 250 and Path(words[0]).is_file():
        return Path(words[0]).read_text(encoding="utf-8", errors="replace")
    return "".join(words)


_RUN = click.option("--run", "run_", metavar="RUNID", help="Only this run, by the beginning of its id.")


@click.command()
@_RUN
@_DATA
def pause(run_: str | None, data: Path | None) -> None:
    """Let this machine's nodes rest: they hand their work back within a second and stay connected.

    It holds until `esnode resume`, also for nodes that are started meanwhile.

    \b
    Example:
      esnode pause --run 5f2c
    """
    _switch(run_, data, True)


@click.command()
@_RUN
@_DATA
def resume(run_: str | None, data: Path | None) -> None:
    """Let nodes work again that `esnode pause` stopped: those of all runs, or of one.

    \b
    Example:
      esnode resume
    """
    _switch(run_, data, False)


def _switch(run: str | None, data: Path | None, paused: bool) -> None:
    from esnode import duty, joined

    root = data or joined.root()
    place = joined.find(run, data) if run else root
    # resuming all also ends the pauses of single runs
    singles = [] if run or paused else joined.known(data)
    changed = sum(duty.switch(folder, paused) for folder in (place, *singles))
    if not paused and run and (root / joined.PAUSED).exists():
        raise joined.JoinedError(f"all runs in {root} are paused: `esnode resume` without --run ends that")
    what = "paused" if paused else "working"
    whom = f"run {place.name}" if run else f"all runs in {place}"
    click.echo(f"{whom}: {what if changed else f'{what} already'}")


@click.command()
@click.option("--write", is_flag=True, help="Make the file, with comments, unless it exists.")
def policy(write: bool) -> None:
    """Show what this machine does for runs it has joined: models, memory, disk, bandwidth, hours.

    The file is node.toml in ~/.config/esnode (or $ESNODE_CONFIG). Where there is none, everything is allowed.
    A running node follows changes of its hours within a second.

    \b
    Example:
      esnode policy --write
    """
    from esnode import duty
    from esnode.folder import write_file
    from esnode.policy import template

    path = duty.policy_file()
    if write and not path.exists():
        write_file(path, template().encode())
    duty.read_policy()  # a fault in it is told, in words
    if path.exists():
        click.echo(f"# {path}\n{path.read_text(encoding='utf-8')}", nl=False)
    else:
        click.echo(f"# {path} does not exist (`esnode policy --write` makes it)\n{template()}", nl=False)
