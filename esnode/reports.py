"""The core's effects as commands to the engine, and the engine's reports as events of the core.

Shell: lives here for the engine of a single lane, in the node's process (`Solo`) or in one of its own. Called
by `daemon.py` and `laneprocess.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from esnode import events, proofevents, snapshotevents
from esnode.checkpoint import Saved
from esnode.enginethread import (
    Broken,
    Derived,
    EngineThread,
    Folded,
    Generated,
    Measured,
    Read,
    Repaired,
    Report,
    Restored,
    Workshop,
    Wounded,
)
from protocol.entries import Entry
from protocol.errors import UserError


class EngineBroken(UserError):
    """The only engine of this node failed where it must not; who looks after the node starts it again."""

    exit_code = 70


class Solo:
    """The engine in the node's own process; `fleet.Fleet` is the other kind."""

    def __init__(self, workshop: Workshop, wake: Callable[[], None], log: logging.Logger) -> None:
        self._engine = EngineThread(workshop, wake)
        self._log = log

    def ask(self, effect: events.Effect, chain: Sequence[Entry], upto: int) -> None:
        """What the core wants; its ledger is of no use here."""
        ask(self._engine, effect)

    def events(self, now: float) -> list[events.Event]:
        """What the core hears."""
        found: list[events.Event] = [
            events.Progress(now, unit, thousandths)
            for unit, thousandths in list(self._engine.progress.items())
        ]
        for report in self._engine.reports():
            if isinstance(report, Broken):
                self._log.error("%s", report.trace)
                raise EngineBroken(
                    report.sentence
                    or "changing the weights failed; the log has the details. Start the node again"
                )
            found.append(event_of(now, report))
        return found

    def close(self, wait: float) -> bool:
        """End its threads within `wait` seconds; False when one is still inside native code."""
        return self._engine.close(wait)


def ask(engine: EngineThread, effect: events.Effect) -> None:
    """Ask the engine for what the core wants of it."""
    match effect:
        case events.Evaluate(unit, sigma):
            engine.evaluate(unit, sigma)
        case events.CancelUnit(unit):
            engine.cancel(unit)
        case events.Apply(entries):
            engine.apply(entries)
        case events.Rewind(entries):
            engine.rewind(entries)
        case proofevents.Heal(entries, tensors):
            engine.heal(entries, tensors)
        case proofevents.Mend(pieces):
            engine.mend(pieces)
        case proofevents.TakeDigests():
            engine.read()
        case proofevents.Prove(entries, pieces, base):
            engine.prove(entries, pieces, base)
        case snapshotevents.Save(round, entry, digest):
            engine.save(round, entry, digest)
        case _:
            raise TypeError(f"the engine is not asked for {effect}")


def event_of(now: float, report: Report) -> events.Event:
    """What the core hears of a report. (`Broken` and `Taken` are not for the core.)"""
    match report:
        case Generated(unit):
            return events.Generated(now, unit)
        case Folded(digests, ms):
            return events.EntriesApplied(now, digests, ms)
        case Restored(height, digest, ms):
            return events.Rewound(now, height, digest, ms)
        case Wounded(unit, tensors):
            return proofevents.Damaged(now, unit, tensors)
        case Repaired(digest):
            return proofevents.Mended(now, digest)
        case Read(digests, damaged):
            return proofevents.Digested(now, digests, damaged)
        case Derived(pieces, held, derived, since):
            return proofevents.Proved(now, pieces, held, derived, since)
        case Saved(round, entry, root, size, reason, ms):
            return snapshotevents.Saved(now, round, entry, root, size, reason, ms)
    assert isinstance(report, Measured)
    if report.outcome is not None:
        return events.Evaluated(now, report.unit, report.outcome)
    if report.failure:
        return events.EvaluationFailed(now, report.unit, report.failure)
    return events.Cancelled(now, report.unit)
