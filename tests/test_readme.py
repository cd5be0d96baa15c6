"""README.md against the code: every file has its line, every command exists with the flags shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import commands as commands_of

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PACKAGES = ("protocol", "coordinator", "esnode")


def blocks() -> list[str]:
    return [text for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)]


def test_the_layout_tree_has_one_line_for_every_file() -> None:
    tree = next(block for block in blocks() if block.startswith("protocol/"))
    listed: set[str] = set()
    folder = ""
    for line in tree.splitlines():
        if not line.startswith(" "):
            folder = line.split()[0]
        else:
            name, _, purpose = line.strip().partition(" ")
            assert purpose.strip(), f"{folder}{name} has no purpose"
            listed.add(folder + name)
    there = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert {name for name in listed if name.split("/")[0] in PACKAGES} == there


def commands() -> list[str]:
    """Every `esnode ...` line of the code blocks, comments cut off."""
    lines = (
        line.partition("#")[0].partition(" > ")[0].strip()
        for block in blocks()
        for line in block.splitlines()
    )
    return sorted({line for line in lines if line.startswith("esnode ")})


@pytest.mark.parametrize("line", commands())
def test_every_command_shown_is_understood(line: str) -> None:
    """Parsed by the real command line, not run."""
    commands_of.check(shlex.split(line)[1:])


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
