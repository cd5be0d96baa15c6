"""Full disks of coordinator and node, in every phase (see `full_disk.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import full_disk

pytestmark = pytest.mark.skipif(bool(full_disk.why_not()), reason=full_disk.why_not() or "-")


@pytest.mark.parametrize("seed", [1, *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 9))])
@pytest.mark.parametrize("victim", ["coordinator", "n1"])
def test_a_full_disk_is_named_and_survived(tmp_path: Path, victim: str, seed: int) -> None:
    story = full_disk.perform(victim, tmp_path, seed)
    assert "equal to the fault-free run" in story
