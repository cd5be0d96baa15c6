"""The kept transcripts are what the cases tell today: `python -m tests.transcripts` writes them anew."""

from __future__ import annotations

import pytest

from tests.cases import CASES
from tests.transcripts import FOLDER, tell


@pytest.mark.parametrize("name", CASES)
def test_transcript(name: str) -> None:
    told = tell(name)
    kept = (FOLDER / f"{name}.txt").read_text()
    assert told == kept, "the story changed; if it should: python -m tests.transcripts"


def test_no_transcript_without_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
