"""A batch of events is its single steps: `machine.fold` on the histories of random worlds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import asdict

import coordinator.events as ce
from coordinator import machine
from tests.actors import SimCoordinator
from tests.sweep import of_seed


class Lives:
    """Every process's first state and the events it saw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[tuple[machine.State, list[ce.Event]]] = []
        original = SimCoordinator._process

        def process(actor: SimCoordinator, events: Sequence[ce.Event]) -> Any:
            if events and isinstance(events[0], ce.Started):
                self.all.append((actor.state, []))
            self.all[-1][1].extend(events)
            return original(actor, events)

        monkeypatch.setattr(SimCoordinator, "_process", process)


def picture(state: machine.State) -> dict[str, Any]:
    """A state as comparable values: a chain is what its entries are."""
    return {**asdict(state), "chain": [entry.raw for entry in state.chain.entries]}


@pytest.mark.parametrize("seed", range(300, 310))
def test_a_batch_gives_what_single_steps_give(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(monkeypatch)
    of_seed(seed).run()
    rng = random.Random(seed)
    assert lives.all
    for first, events in lives.all:
        single, singly = first, []
        for event in events:
            single, effects = machine.step(single, event)
            singly.append(effects)
        batched, together, done = first, list[tuple[ce.Effect, ...]](), 0
        while done < len(events):
            size = rng.choice((1, 2, 7, 100))
            batched, caused = machine.fold(batched, events[done : done + size])
            together += caused
            done += size
        assert together == singly
        assert picture(batched) == picture(single)


def test_a_batch_leaves_its_input_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(monkeypatch)
    of_seed(301).run()
    first, events = lives.all[0]
    half, _ = machine.fold(first, events[: len(events) // 2])
    before = repr(picture(half))
    machine.fold(half, events[len(events) // 2 :])
    assert repr(picture(half)) == before
