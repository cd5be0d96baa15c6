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
    """AssertionError unless the words name a command or group, and the options among them are its own."""
    command, rest = _find(words)
    assert not (rest and isinstance(command, click.Group)), f"{command.name} has no command {rest[0]!r}"
    options = {name for option in command.params for name in option.opts} | {"--help"}
    unknown = {word for word in rest if word.startswith("--")} - options
    assert not unknown, f"{' '.join(words)}: unknown {', '.join(sorted(unknown))}"


def find(words: Sequence[str]) -> click.Command:
    """The command or group these words name."""
    return _find(words)[0]


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
