"""The node's pure core: what it answers to every event. Lives here: state, new, step.

Pure: protocol and esnode.events only; no clock, randomness, sockets, files, threads. Called by `daemon.py` and the
simulator, which perform the effects in order (see `events.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from esnode.events import About, Effect, Event
from protocol.plan import Lock


@dataclass(frozen=True, slots=True)
class State:
    """All a node knows; a value, never changed in place."""

    lock: Lock
    about: About


def new(lock: Lock, about: About) -> State:
    """A node of this run before its first event, which must be `Started`."""
    return State(lock, about)


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The node's answer to one event: its next state and the effects to perform in order."""
    raise NotImplementedError
