"""README.md and docs against the code: every file has its line, every command exists with the flags shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import commands as commands_of

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LISTED = ("protocol", "coordinator", "esnode", "benchmarks")


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
        for package in LISTED
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert {name for name in listed if name.split("/")[0] in LISTED} == there


DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> list[str]:
    """Every `esnode ...` line of a code block, fenced or indented, comments cut off."""
    whole = "\n".join(path.read_text() for path in DOCS).replace("\\\n", " ")
    lines = re.findall(r"^(?:    )?(esnode .*)$", whole, re.MULTILINE)
    return sorted({line.partition("#")[0].partition(" > ")[0].strip() for line in lines})


def mentions() -> list[str]:
    """Every `esnode ...` within a sentence; `esnode nodes list|revoke` is two."""
    whole = "\n".join(path.read_text() for path in DOCS)
    found = {span.split("[")[0].replace("\n", " ") for span in re.findall(r"`(esnode [^`]+)`", whole)}
    found -= {"esnode ...", "esnode COMMAND --help", "esnode --help"}
    either = [(line, re.search(r"\S+\|\S+", line)) for line in found]
    return sorted(
        line.replace(match[0], word) if match else line
        for line, match in either
        for word in (match[0].split("|") if match else [""])
    )


@pytest.mark.parametrize("line", commands())
def test_every_command_shown_is_understood(line: str) -> None:
    """Parsed by the real command line, not run."""
    commands_of.check(shlex.split(line)[1:])


@pytest.mark.parametrize("line", mentions())
def test_every_command_mentioned_exists(line: str) -> None:
    commands_of.named(shlex.split(line)[1:])


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target
