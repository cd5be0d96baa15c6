"""The documents against the code: a file that either names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted(
    path
    for folder in ("protocol", "coordinator", "esnode", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
MODULE = re.compile(r"`((?:protocol|coordinator|esnode|tests|benchmarks)/[\w/]+\.py)`")
DOCUMENT = re.compile(r"\bdocs/[\w/-]+\.md\b")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_that_a_document_names_is_there(path: Path) -> None:
    named = set(MODULE.findall(path.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_document_that_the_code_names_is_there() -> None:
    named = {name for path in SOURCES for name in DOCUMENT.findall(path.read_text(encoding="utf-8"))}
    assert named, "the pattern finds none"
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
