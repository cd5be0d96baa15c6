"""How much a core may remember: every collection in its state has a limit that no history can exceed.

A field without an entry in `GROWS` is held to a limit in the size of the pool and the round. Called by
`checkers.py` after every step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from coordinator.state import State
from esnode.nodestate import State as NodeState
from protocol.lock import Lock
from protocol.messages import Kind

SPARE = 128  # kinds of counters, kept refusals, units told
EVIDENCE = 256  # units whose scores a node keeps, or all of three rounds if they are more
GROWS = {"history", "scores", "chain"}  # one element per round or entry: the run itself
SIZED = {tuple, list, dict, set, frozenset}
SCALAR = {"int", "float", "bool", "str", "bytes", "None"}
WHOLE = {"lock", "ops", "about", "key"}


@lru_cache(maxsize=64)
def _sized(kind: type) -> tuple[str, ...]:
    """The fields that may hold collections."""
    kinds = {name: set(str(what).split(" | ")) for name, what in kind.__annotations__.items()}
    return tuple(name for name, what in kinds.items() if name not in GROWS | WHOLE and not what <= SCALAR)


def _over(what: Any, limit: int, **special: int) -> str:
    for name in _sized(type(what)):
        value, most = getattr(what, name), special.get(name, limit)
        if type(value) in SIZED and len(value) > most:
            return f"{name} holds {len(value)} things, the limit is {most}"
    return ""


def coordinator(state: State) -> str:
    """What exceeds its limit in a coordinator; "" for nothing."""
    cells = sum(len(member.sums) for member in state.round.members) if state.round else 0
    return _over(state, SPARE + 4 * len(state.allowed) + cells)


def node(state: NodeState, lock: Lock) -> str:
    """What exceeds its limit in a node; "" for nothing."""
    members = lock.members * lock.chunk_count(Kind.MEMBER)
    rounds = 3 * (members + lock.chunk_count(Kind.PROBE))
    return _over(state, SPARE + members, kept=max(EVIDENCE, rounds))
