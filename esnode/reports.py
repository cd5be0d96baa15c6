"""The core's effects as commands to the engine, and the engine's reports as events of the core.

Called by `daemon.py`. Says nothing of a broken engine: that is for the shell, which stops.
"""

from __future__ import annotations

from esnode import events, proofevents, snapshotevents
from esnode.checkpoint import Saved
from esnode.enginethread import (
    Derived,
    EngineThread,
    Folded,
    Generated,
    Measured,
    Read,
    Repaired,
    Report,
    Restored,
    Wounded,
)


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
        case proofevents.Prove(entries, pieces):
            engine.prove(entries, pieces)
        case snapshotevents.Save(round, entry, digest):
            engine.save(round, entry, digest)
        case _:
            raise TypeError(f"the engine is not asked for {effect}")


def event_of(now: float, report: Report) -> events.Event:
    """What the core hears of a report. (A broken engine is not for the core.)"""
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
        case Derived(pieces, held, derived):
            return proofevents.Proved(now, pieces, held, derived)
        case Saved(round, entry, root, size, reason, ms):
            return snapshotevents.Saved(now, round, entry, root, size, reason, ms)
    assert isinstance(report, Measured)
    if report.outcome is not None:
        return events.Evaluated(now, report.unit, report.outcome)
    if report.failure:
        return events.EvaluationFailed(now, report.unit, report.failure)
    return events.Cancelled(now, report.unit)
