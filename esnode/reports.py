"""What the node's core hears of the engine thread's reports.

Called by `daemon.py`. Says nothing of a broken engine: that is for the shell, which stops.
"""

from __future__ import annotations

from esnode import events, snapshotevents
from esnode.checkpoint import Saved
from esnode.enginethread import (
    Derived,
    Folded,
    Measured,
    Read,
    Repaired,
    Report,
    Restored,
    Wounded,
)


def event_of(now: float, report: Report) -> events.Event:
    """What the core hears of a report. (A broken engine is not for the core.)"""
    match report:
        case Folded(digests, ms):
            return events.EntriesApplied(now, digests, ms)
        case Restored(height, digest, ms):
            return events.Rewound(now, height, digest, ms)
        case Wounded(unit, tensors):
            return events.Damaged(now, unit, tensors)
        case Repaired(digest):
            return events.Mended(now, digest)
        case Read(digests, damaged):
            return events.Digested(now, digests, damaged)
        case Derived(pieces, held, derived):
            return events.Proved(now, pieces, held, derived)
        case Saved(round, entry, root, size, reason, ms):
            return snapshotevents.Saved(now, round, entry, root, size, reason, ms)
    assert isinstance(report, Measured)
    if report.outcome is not None:
        return events.Evaluated(now, report.unit, report.outcome)
    if report.failure:
        return events.EvaluationFailed(now, report.unit, report.failure)
    return events.Cancelled(now, report.unit)
