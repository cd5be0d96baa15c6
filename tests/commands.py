"""Command lines of documents and deploy files, held against the real command line without running them."""

from __future__ import annotations

from collections.abc import Sequence

import click

from esnode.cli.main import cli


def check(words: Sequence[str]) -> None:
    """Parse the words after `esnode`; AssertionError or click's own error when they make no sense."""
    command, rest = _find(words)
    command.make_context("esnode", rest)


def named(words: Sequence[str]) -> None:
    """AssertionError unless the words name a command or group, whatever arguments it wants."""
    command, rest = _find(words)
    assert not rest, f"{command.name} takes no command {rest[0]!r}"


def _find(words: Sequence[str]) -> tuple[click.Command, list[str]]:
    """The command that the first words name, and the rest of them."""
    rest = list(words)
    command: click.Command = cli
    context = click.Context(cli, info_name="esnode")
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest.pop(0))
        assert found is not None, f"there is no such command: {' '.join(words)}"
        command = found
    return command, rest
