"""Who started whom, from /proc: what a killed process may leave behind. Called by tests that kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def _processes() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, process group) of all that have not ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:  # it ended while we looked
                continue
            if state != "Z":
                yield int(entry.name), int(parent), int(group)


def living(pids: set[int]) -> set[int]:
    """Those of them that have not ended."""
    return pids & {pid for pid, *_ in _processes()}


def group(pid: int) -> set[int]:
    """A process's group."""
    return {found for found, _, its in _processes() if its == pid}


def descendants(pid: int) -> set[int]:
    """All it started, and what those started."""
    parents = {found: parent for found, parent, _ in _processes()}
    found: set[int] = set()
    more = {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def named(pids: set[int], word: str) -> set[int]:
    """Those of them with this word in their command line."""
    return {pid for pid in living(pids) if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()}
