"""The per-prompt scores behind what this node has measured: kept for a while, told when the audit asks.

Pure: protocol and the node's pure modules only. A result commits to them by their hash. Called by `node.py`
and `inbox.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from esnode.nodestate import Kept, Turn
from protocol.messages import Evidence, EvidenceAsk, Message, Unit

MOST = 256  # units kept at least of the open round and the two before it
PART = 2048  # scores in one message


def keep(turn: Turn, unit: Unit, scores: tuple[float, ...]) -> None:
    """Remember a unit's scores; those of rounds gone by make room, and those of a branch that was left."""
    kept = (*(old for old in turn.state.kept if old.unit != unit), Kept(unit, scores))
    if len(kept) > MOST:
        kept = tuple(old for old in kept if unit.round - 2 <= old.unit.round <= unit.round)
    turn.set(kept=kept)


def _on_ask(turn: Turn, message: EvidenceAsk) -> None:
    found = next((kept for kept in turn.state.kept if kept.unit == message.unit), None)
    scores = found.scores if found else ()
    part = scores[message.first : message.first + PART]
    turn.send(Evidence(message.unit, message.first, len(scores), part))


HANDLERS: dict[type[Message], Callable[[Turn, Any], None]] = {EvidenceAsk: _on_ask}
