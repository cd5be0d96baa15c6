"""Named cases of the simulator told in plain lines, kept in tests/transcripts and compared with each run.

`python -m tests.transcripts` writes them anew; read the difference before you commit it. Called by
`test_transcripts.py`.
"""

from __future__ import annotations

from pathlib import Path

from tests.cases import CASES

FOLDER = Path(__file__).parent / "transcripts"


def tell(name: str) -> str:
    """A case's title and its story, one line per event."""
    case = CASES[name]
    world = case()
    lines = [f"{name}: {case.__doc__}", ""]
    lines += [f"{moment:7.2f} s  {who:12} {words}" for moment, who, words, loud in world.story if loud]
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write every transcript, remove those of no case."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        if old.stem not in CASES:
            old.unlink()
    for name in CASES:
        (FOLDER / f"{name}.txt").write_text(tell(name))


if __name__ == "__main__":
    write()
