"""What a coordinator has promised by its acknowledgements, followed record by record and message by message.

A result that was answered "ok" counts, unless replay found its evaluator at fault. Called by `checkers.py`,
in the order of the coordinator's effects.
"""

from __future__ import annotations

from coordinator.events import ResultAccepted
from protocol.messages import Kind, Result, Unit

Cell = tuple[int, int, int]  # kind, member, chunk


def cells_of(unit: Unit) -> set[Cell]:
    return {(unit.kind, unit.member, chunk) for chunk in range(unit.first, unit.last + 1)}


class Promises:
    """Chunks acknowledged, by the first 8 bytes of the hash that names the state they were measured on."""

    def __init__(self) -> None:
        self.held: dict[bytes, dict[Cell, int]] = {}  # state -> chunk -> who measured it
        self.digests: dict[tuple[bytes, int], int] = {}  # D that an evaluator's results were measured on
        self.accepted: tuple[int, Result] | None = None  # the last record, until its Ack

    def record(self, record: ResultAccepted) -> None:
        """A result is journaled. What its evaluator measured on another D before counts no more."""
        key = (record.result.parent, record.evaluator)
        if self.digests.setdefault(key, record.result.digest) != record.result.digest:
            self.drop(record.evaluator, record.result.parent)
            self.digests[key] = record.result.digest
        self.accepted = record.evaluator, record.result

    def acknowledge(self, unit: Unit) -> bool:
        """Its Ack says "ok"; False when there was no record for it."""
        if self.accepted is None or self.accepted[1].unit != unit:
            return False
        evaluator, result = self.accepted
        self.accepted = None
        held = self.held.setdefault(result.parent, {})
        for cell in cells_of(unit):
            held.setdefault(cell, evaluator)
        return True

    def drop(self, evaluator: int, state: bytes) -> None:
        """What somebody measured on a state counts no more; a probe it took part in begins anew."""
        held = self.held.get(state, {})
        probe = any(kind == Kind.PROBE and who == evaluator for (kind, _, _), who in held.items())
        self.held[state] = {
            cell: who
            for cell, who in held.items()
            if who != evaluator and not (probe and cell[0] == Kind.PROBE)
        }
        self.digests.pop((state, evaluator), None)

    def of(self, state: bytes) -> set[Cell]:
        """Chunks promised of a state."""
        return set(self.held.get(state[:8], ()))

    def settle(self, state: bytes) -> set[Cell]:
        """The round is committed: what was promised, which is forgotten now."""
        return set(self.held.pop(state[:8], ()))
