"""The coordinator's pure core: a sequencer that never holds a model. Lives here: state, new, recall, step, status.

Pure: protocol and coordinator's pure modules only. Called by `server.py` and the simulator (order of effects: see
`events.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.events import Effect, Event, Record
from protocol.plan import Lock, Ops


@dataclass(frozen=True, slots=True)
class State:
    """All the coordinator knows; a value, never changed in place."""

    lock: Lock
    ops: Ops


def new(lock: Lock, ops: Ops, key: bytes, allowed: Mapping[bytes, str]) -> State:
    """An empty coordinator. `key`: 32-byte Ed25519 seed that signs entries; `allowed`: CURVE key -> name."""
    raise NotImplementedError


def recall(state: State, record: Record) -> State:
    """Fold one journal record; after the last one, `step` with `Started` (term = last + 1) goes on where it was."""
    raise NotImplementedError


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The coordinator's answer to one event."""
    raise NotImplementedError


def status(state: State) -> dict[str, Any]:
    """A JSON-able picture of the run, with the reasons of the decisions behind it."""
    raise NotImplementedError
