"""One round: what is measured, what is missing, which results count, when it closes and with which commit.

Pure. Lives here: the decisions about a `Round` and its `Cells` (`cells.py`), each a function that also says
why, and every change of them. Who works on what is `leases.py`'s business. Called by `machine.py`.
"""

from __future__ import annotations

import itertools
import math

import msgspec
from msgspec.structs import replace

from coordinator.cells import MEMBER, Cells, Round, free_of
from protocol.chain import Chain
from protocol.counting import nth
from protocol.entries import COMPLETE, QUORUM, CommitBody, EntryKind, MemberReward, ScoreBody
from protocol.lock import Lock
from protocol.messages import Kind, Result, Unit
from protocol.plan import Ops
from protocol.seeds import member_seed

__all__ = ["Cells", "Round", "free_of"]

NOBODY = -1
FAILURES_TO_VOID = 3
NODES_TO_VOID = 3  # where so many could try
MIN_MEMBERS = 2
GRACE = 0.25  # of the time the quorum took: how long the rest of a round is waited for


class Verdict(msgspec.Struct, frozen=True):
    """What became of a result: "ok", "duplicate", "late" or "refused", and why.

    `conflict`: it carries another value for a chunk that is in already; the first one stays.
    """

    kind: str
    reason: str
    conflict: bool = False


COUNTS = Verdict("ok", "")  # what nearly every result hears


class Closing(msgspec.Struct, frozen=True):
    """How a round may close: the members counted, those left out with the reason, and the closing code."""

    members: tuple[int, ...]
    voids: tuple[tuple[int, str], ...]
    code: int


# ---------------------------------------------------------------- opening


def open_round(chain: Chain, ops: Ops, now: float) -> Round:
    """The round that follows the chain's last commit. Its probe is left out when it was scored already."""
    lock, number = chain.lock, chain.round
    final = number >= ops.rounds
    count = 0 if final else chain.members_at(number)
    width = lock.chunk_count(Kind.MEMBER)
    start = chain.commits[-1] if chain.commits else chain.entries[0]
    since = itertools.takewhile(lambda entry: entry is not start, reversed(chain.entries))
    scored = any(entry.kind is EntryKind.SCORE for entry in since)
    due = probe_due(lock, ops, number)[0] and not scored
    probe = _empty(lock.chunk_count(Kind.PROBE)) if due else None
    parent = start.hash
    return Round(number, parent, [_empty(width)] * count, probe, now, count, count * width)


def probe_due(lock: Lock, ops: Ops, number: int) -> tuple[bool, str]:
    """Whether the state after `number` commits is measured on the held-out prompts."""
    if not ops.eval_every:
        return False, "held-out probes are off"
    if not lock.heldout_prompts:
        return False, "the task has no held-out prompts"
    if number >= ops.rounds:
        return True, "the last state is always measured"
    due = number % ops.eval_every == 0
    return due, f"every {ops.eval_every} rounds"


def _empty(chunks: int) -> Cells:
    return Cells((None,) * chunks, (NOBODY,) * chunks, (0,) * chunks, chunks)


# ---------------------------------------------------------------- changing one member's cells


def put(round: Round, unit: Unit, cells: Cells) -> Round:
    """The round with new cells for the unit's member or probe; the counters follow."""
    if not round.draft:
        changed = put(round.drafted(), unit, cells)
        changed.draft = False
        return changed
    if unit.kind != MEMBER:
        round.probe = cells
        return round
    k, members = unit.member, round.members
    old, members[k] = members[k], cells
    if cells.sums is not old.sums or cells.void != old.void:
        round.unsettled += old.settled - cells.settled
    round.free += cells.free - old.free
    if cells.free:
        if k < round.cursor:
            round.cursor = k
    else:
        while round.cursor < len(members) and not members[round.cursor].free:
            round.cursor += 1
    return round


def lease(round: Round, unit: Unit, change: int) -> Round:
    """Count a node more (+1) or less (-1) on the unit's chunks."""
    cells = round.cells(unit)
    if cells is None:
        return round
    free, leases = cells.free, cells.leases
    if change == 1 and free == unit.last - unit.first + 1 == len(leases):  # a whole fresh member, as usual
        return put(round, unit, replace(cells, leases=(1,) * free, free=0))
    counts = list(leases)
    for k in range(unit.first, unit.last + 1):
        held = counts[k] = counts[k] + change
        if held == max(change, 0) and cells.sums[k] is None and not cells.void:
            free -= change
    return put(round, unit, replace(cells, leases=tuple(counts), free=free))


def fill(round: Round, evaluator: int, result: Result, released: int = 0) -> Round:
    """Take a result's missing chunks in; those already in keep their value. Also the journal's fold.

    `released`: leases on exactly these chunks that end with it.
    """
    unit = result.unit
    cells = round.cells(unit) if unit.round == round.number else None
    if cells is None or len(result.sums) != unit.last - unit.first + 1:
        return round
    sums: tuple[float | None, ...] = result.sums
    if cells.sums.count(None) == len(sums) == len(cells.sums):  # a whole member at once, as usual
        by, free, new = (evaluator,) * len(sums), 0, True
        leases = tuple([count - released for count in cells.leases]) if released else cells.leases
    else:
        sums, by, leases, free, new = _mixed(cells, evaluator, result, released)
    correct = cells.correct + result.correct if new else cells.correct
    filled = Cells(sums, by, leases, free, correct, cells.failures, cells.reason, cells.void)
    return put(round, unit, filled)


def _mixed(
    cells: Cells, evaluator: int, result: Result, released: int
) -> tuple[tuple[float | None, ...], tuple[int, ...], tuple[int, ...], int, bool]:
    """Sums, evaluators, leases, free chunks after a result of some chunks, and whether any was missing."""
    sums, by, leases, free = list(cells.sums), list(cells.evaluators), list(cells.leases), cells.free
    new = False
    for k, value in enumerate(result.sums, result.unit.first):
        if sums[k] is None:
            sums[k], by[k], new = value, evaluator, True
            free -= not leases[k] and not cells.void
        leases[k] -= released
    return tuple(sums), tuple(by), tuple(leases), free, new


def drop(round: Round, evaluator: int) -> Round:
    """The round without what this evaluator measured. A probe it took part in begins anew."""
    for k, cells in enumerate(round.members):
        if evaluator in cells.evaluators:
            gone = [number == evaluator for number in cells.evaluators]
            sums = tuple(None if out else s for out, s in zip(gone, cells.sums, strict=True))
            by = tuple(NOBODY if out else n for out, n in zip(gone, cells.evaluators, strict=True))
            unit = Unit(round.number, Kind.MEMBER, k, 0, 0)
            left = replace(cells, sums=sums, evaluators=by)
            round = put(round, unit, replace(left, free=free_of(left)))
    probe = round.probe
    if probe is not None and evaluator in probe.evaluators:
        empty = _empty(len(probe.sums))
        again = replace(empty, leases=probe.leases, failures=probe.failures)
        return replace(round, probe=replace(again, free=free_of(again)))
    return round


def fail(round: Round, evaluator: int, unit: Unit, reason: str) -> Round:
    """Note one failure of the unit's member. Also the journal's fold."""
    cells = round.cells(unit) if unit.round == round.number else None
    if cells is None or cells.settled:
        return round
    return put(round, unit, replace(cells, failures=(*cells.failures, evaluator), reason=reason))


def forgive(round: Round) -> Round:
    """Forget all failures: a coordinator that starts gives every member a new chance, whatever was wrong."""
    members = [replace(cells, failures=(), reason="") for cells in round.members]
    probe = replace(round.probe, failures=(), reason="") if round.probe else None
    return replace(round, members=members, probe=probe)


def void_verdict(cells: Cells, nodes: int, others: int) -> tuple[bool, str]:
    """Whether a member is given up: 3 failures, on 3 nodes where there are 3, on 2 where there are 2.

    `nodes` are alive now; `others` of them could get the member and have not failed at it. Two that collude
    so void nothing that a third can evaluate.
    """
    count, distinct = len(cells.failures), len(set(cells.failures))
    if cells.settled or count < FAILURES_TO_VOID:
        return False, f"{count} failure{'s' * (count > 1)}, {FAILURES_TO_VOID} make it void"
    if distinct < min(nodes, 2):
        return False, f"{count} failures, all on one node: another one tries"
    if distinct < NODES_TO_VOID and others:
        return False, f"{count} failures on {distinct} node{'s' * (distinct > 1)}: another one tries"
    return True, f"failed {count} times on {distinct} node{'s' * (distinct > 1)}: {cells.reason}"


def void(round: Round, unit: Unit, reason: str, mirrored: bool) -> Round:
    """Give the unit's member up, with its partner when the population is mirrored."""
    cells = round.cells(unit)
    assert cells is not None
    round = put(round, unit, replace(cells, void=reason[:200], free=0))
    if unit.kind == Kind.PROBE or not mirrored:
        return round
    partner = Unit(round.number, unit.kind, unit.member ^ 1, unit.first, unit.last)
    other = round.members[partner.member]
    if other.void:
        return round
    why = f"its mirrored partner {unit.member} is void"
    return put(round, partner, replace(other, void=why, free=0))


# ---------------------------------------------------------------- judging a result


def judge(lock: Lock, round: Round, result: Result) -> Verdict:
    """Whether a result counts, and why not.

    Its digest is compared by the machine: two replicas may be in dispute.
    """
    unit = result.unit
    if unit.round != round.number:
        if unit.round < round.number:
            return Verdict("late", "the round is closed")
        return Verdict("refused", f"{nth(unit.round)} is not open")
    if unit.kind != MEMBER and not round.probe:
        return Verdict("late", "the probe is closed")
    cells = round.cells(unit)
    if cells is None:
        return Verdict("refused", "this round has no such member or chunks")
    problem = _problem(lock, round, result)
    if problem:
        return Verdict("refused", problem)
    if cells.void:
        return Verdict("late", "the member is void")
    held = cells.sums[unit.first : unit.last + 1]
    if held.count(None) == len(held):
        return COUNTS
    conflict = any(old is not None and old != new for old, new in zip(held, result.sums, strict=True))
    # `correct` is told per unit: a probe's result counts only when none of its chunks is in.
    if None in held and unit.kind == Kind.MEMBER:
        return Verdict("ok", "", conflict)
    return Verdict("duplicate", "these chunks are in" + " with another value" * conflict, conflict)


def _problem(lock: Lock, round: Round, result: Result) -> str:
    """What is wrong with a result for chunks this round has; "" for nothing."""
    unit = result.unit
    seed = 0
    if unit.kind == MEMBER:
        seed = member_seed(lock.run_id, unit.round, unit.member, lock.mirrored)
    if result.parent != round.parent[:8]:
        return f"measured on state {result.parent.hex()}, the round's is {round.parent[:8].hex()}"
    if result.seed != seed:
        return f"seed {result.seed:016x} is not the rule's {seed:016x}"
    if len(result.sums) != unit.last - unit.first + 1:
        return f"{len(result.sums)} sums for {unit.last - unit.first + 1} chunks"
    ranges = lock.sum_ranges[unit.kind]
    for k, value in enumerate(result.sums, unit.first):
        low, high = ranges[k]
        if not low <= value <= high or not math.isfinite(value):
            size, low, high = lock.chunk_size(unit.kind, k), lock.reward_low, lock.reward_high
            return f"chunk {k}: sum {value} of {size} rewards, the task's range is {low} .. {high}"
    return ""


# ---------------------------------------------------------------- closing


def closing(round: Round, lock: Lock, ops: Ops, now: float) -> tuple[Closing | None, str]:
    """Whether the round may be committed now, and why (not). The probe is the caller's business.

    With a quorum of 1 nothing but completeness closes a round. Below 1 the members that are missing when the
    quorum is in have a while, by what the others needed, before they are left out.
    """
    if not round.unsettled:
        counted = tuple(k for k, cells in enumerate(round.members) if not cells.void)
        voids = tuple((k, cells.void) for k, cells in enumerate(round.members) if cells.void)
        return Closing(counted, voids, COMPLETE), "every member is in" + f", {len(voids)} void" * bool(voids)
    ready, reason = quorum_is_in(round, lock, ops)
    if not ready:
        return None, reason
    since = now if round.quorum is None else round.quorum
    left = since + GRACE * (since - round.opened) - now
    if left > 0:
        return None, f"{reason}; the other {round.unsettled} have {left:.0f} s more"
    why = f"left out by the quorum of {ops.quorum:g}"
    out = tuple((k, cells.void or why) for k, cells in enumerate(round.members) if k not in ready)
    return Closing(tuple(sorted(ready)), out, QUORUM), f"{reason}, {len(out)} are left out"


def quorum_is_in(round: Round, lock: Lock, ops: Ops) -> tuple[set[int], str]:
    """The members that may close the round before it is complete, empty while they are too few, and why."""
    total = len(round.members)
    need = max(math.ceil(ops.quorum * total), MIN_MEMBERS)
    waiting = f"{total - round.unsettled} of {total} members are in"
    if ops.quorum >= 1 or total - round.unsettled < need:
        return set(), waiting
    ready = {k for k, cells in enumerate(round.members) if cells.complete and not cells.void}
    if lock.mirrored:
        ready = {k for k in ready if k ^ 1 in ready}
    if len(ready) < need:
        return set(), f"{waiting}, {len(ready)} of them in whole pairs, the quorum is {need}"
    return ready, f"the quorum of {need} is in"


def commit_body(chain: Chain, round: Round, close: Closing) -> CommitBody:
    """The commit of a round that may close: reward = fsum(chunk sums) / prompts, computed only here."""
    lock = chain.lock
    rows = tuple(
        MemberReward(
            k,
            _total(round.members[k]) / lock.per_round,
            _evaluator(lock, round.members[k]),
        )
        for k in close.members
    )
    return CommitBody(
        chain.alpha_at(round.number), chain.sigma_at(round.number), rows, close.voids, close.code
    )


def score_body(lock: Lock, round: Round) -> ScoreBody:
    """The held-out result of a complete probe."""
    assert round.probe is not None
    sums = tuple(s for s in round.probe.sums if s is not None)
    mean = math.fsum(sums) / lock.heldout_prompts
    return ScoreBody(
        round.number, lock.heldout_prompts, mean, min(round.probe.correct, lock.heldout_prompts), sums
    )


def _total(cells: Cells) -> float:
    return math.fsum(s for s in cells.sums if s is not None)


def _evaluator(lock: Lock, cells: Cells) -> int:
    """The node that measured most of the member's prompts; of equals the one with the earlier chunk."""
    prompts: dict[int, int] = {}
    for k, number in enumerate(cells.evaluators):
        prompts[number] = prompts.get(number, 0) + lock.chunk_size(Kind.MEMBER, k)
    return max(prompts, key=lambda number: prompts[number])


def failing(round: Round) -> list[Unit]:
    """The probe and the members with failures, each as one whole unit."""
    failed = [(Kind.MEMBER, k, cells) for k, cells in enumerate(round.members) if cells.failures]
    if round.probe is not None and round.probe.failures:
        failed.append((Kind.PROBE, 0, round.probe))
    return [Unit(round.number, kind, k, 0, len(cells.sums) - 1) for kind, k, cells in failed]
