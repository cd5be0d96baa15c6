"""Memory that another process has planned and not taken is not free."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from esnode import memory, reservations, slicemap
from esnode.engines import transformers_engine
from esnode.engines.packing import Packing
from tests import tiny
from tests.runs import wait_for

SIZE = 10**15  # more than any machine has
OTHER = f"""
from esnode import reservations
held = reservations.take({SIZE})
assert held is not None
print("taken", flush=True)
input()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of our own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"esnode-memory-{os.getuid()}"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another engine's process, which has planned and allocates later."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.wait()


def test_what_another_has_reserved_and_does_not_hold_yet(place: Path, other: subprocess.Popen[str]) -> None:
    assert SIZE - 10**9 < reservations.outstanding() < SIZE
    assert reservations.engines() == 1 and memory.available() == 0
    other.kill()
    other.wait()
    wait_for(lambda: reservations.outstanding() == 0)
    assert list(place.iterdir()) == [] and memory.available() > 0


def test_a_folder_that_another_user_has_made_says_nothing(
    place: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "_place", lambda: place)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert reservations.outstanding() == 0 and reservations.engines() == 0


def test_whoever_planned_first_goes_first(other: subprocess.Popen[str]) -> None:
    """Both have looked before either had reserved: one must be able to go on."""
    mine = reservations.take(5)
    assert reservations.outstanding() > 0, "the other came first"
    other.kill()
    other.wait()
    late = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert late.stdout is not None and late.stdout.readline() == "taken\n"
        assert reservations.outstanding() == 0 and reservations.engines() == 2
        assert mine is not None
        mine.close()
        assert reservations.outstanding() > 0
    finally:
        late.kill()
        late.wait()


def test_an_engine_is_refused_what_another_is_about_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look in the same moment, each finds enough, and together they would be killed by the system."""
    folder = tiny.write(tmp_path / "model")
    started: list[subprocess.Popen[str]] = []

    def in_between(plan: object) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "taken\n"

    monkeypatch.setattr(slicemap, "build", lambda *arguments: pytest.fail("allocated all the same"))
    try:
        with pytest.raises(memory.MemoryShort, match=r"needs .* of memory .* 0\.0 GB are free"):
            transformers_engine.load(tiny.lock(folder), folder, report=in_between, device="cpu")
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_an_engine_holds_its_reservation_as_long_as_it_lives(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    engine = transformers_engine.load(tiny.lock(folder), folder, device="cpu")
    assert reservations.engines() == 1
    del engine
    wait_for(lambda: reservations.engines() == 0)


def test_nobody_packs_unless_everybody_could(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    packing = Packing([layer])
    held = [reservations.take(0) for _ in range(2)]
    monkeypatch.setattr(memory, "available", lambda: 2 * packing.size - 1)
    packing.use(1)
    assert "forward" not in layer.__dict__
    del held[0]
    packing.use(1)
    assert "forward" in layer.__dict__ or not packing.size


def test_a_place_that_cannot_be_written_reserves_nothing(place: Path) -> None:
    place.write_text("a file")
    assert reservations.take(1) is None and reservations.outstanding() == 0
