"""Audits as they run: which units are measured twice, by whom, and what becomes of the evidence.

Pure. A member's unit is chosen by secret entropy when its first result comes in; a second node is given it
like any other unit, within the round. Both results carry the hash of their per-prompt scores; then the scores
are asked for, with those of other members on the same prompts, and whoever cannot produce what fits its hash
has failed. A second result never counts as a reward. Called by `machine.py` and `work.py`; the tests are in
`audit.py`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from coordinator import audit, membership
from coordinator.cases import Case, Half
from coordinator.cells import MEMBER
from coordinator.claims import there
from coordinator.events import Audited
from coordinator.state import State, admit_evidence
from coordinator.turn import Turn
from protocol.lock import Lock
from protocol.messages import Ack, Evidence, EvidenceAsk, Message, Result, Unit

COMING = (membership.NEW, membership.BEHIND)  # standings that end by themselves, and soon
SMALL_POOL = 16  # nodes up to which every result may look at all of them for a second node
LONGEST_WAIT = 60.0  # seconds a complete round waits at most for a second result
ASK_AGAIN = 3.0  # seconds between requests for scores that have not come
FORGED = "does not fit"  # in a fault: the evidence is there, and it is not what was measured
PATIENCE = 30.0  # seconds without an answer, after which an audit is judged without it

# ---------------------------------------------------------------- choosing


def on_result(turn: Turn, peer: bytes, result: Result) -> None:
    """A first result was taken in: it may be audited, or serve as a reference of those that are."""
    share = turn.ops.audit_share
    if not share or not turn.secret or result.unit.kind != MEMBER:
        return
    audits, half = turn.own_audits(), _half(turn, peer, result)
    audits.remember(half)
    if _chosen(turn, result.unit, share) and len(turn.alive) > 1:
        audits.begin(Case(result.unit.round, half))
        turn.count("audits begun")
    give_out(turn, None if len(turn.nodes) <= SMALL_POOL else [peer])


def _half(turn: Turn, peer: bytes, result: Result) -> Half:
    known = turn.nodes[peer].hello.fingerprints
    engine = known[result.engine] if result.engine < len(known) else b""
    return Half(peer, result.unit, result.evidence, result.sums, engine)


def _chosen(turn: Turn, unit: Unit, share: float) -> bool:
    words = struct.pack("<QQQ", unit.round, unit.member, unit.first)
    drawn = hashlib.blake2b(words, key=turn.secret, digest_size=8).digest()
    return int.from_bytes(drawn, "little") < share * 2**64


def give_out(turn: Turn, keys: Sequence[bytes] | None = None) -> None:
    """Find a second node, among these or all, for every audit without: the least loaded that may work."""
    if turn.over or not turn.audits.idle:
        return
    for case in [turn.audits.by_number[number] for number in turn.audits.idle]:
        if case.round != turn.round.number:
            continue
        unit = case.first.unit
        nodes = turn.nodes if keys is None else {key: turn.nodes[key] for key in keys}
        room = [
            (len(node.leases), node.number or 0, key)
            for key, node in nodes.items()
            if key != case.first.key
            and len(node.leases) < membership.depth(node)
            and all(lease.unit != unit for lease in node.leases)
            and not membership.hindrance(node, case.round, turn.now)
        ]
        if room and not turn.round.needs(unit):
            key = min(room)[2]
            _put(turn, replace(case, auditor=key))
            turn.give(key, unit, f"an audit of {_name(turn, case.first.key)}")


def wanted(turn: Turn, key: bytes, unit: Unit) -> bool:
    """Whether a node holds a unit for an audit."""
    return any(
        case.auditor == key and case.first.unit == unit and not case.second for case in turn.audits.about(key)
    )


def holds(turn: Turn) -> bool:
    """Whether a round that could be committed waits for a second result. Never for ever, nor for nobody."""
    open_cases = turn.audits.unanswered(turn.round.number)
    hopeless = [case for case in open_cases if not _answerable(turn, case)]
    if hopeless:
        turn.count("audits that nobody else could do", times=len(hopeless))
        turn.own_audits().end(hopeless)
        open_cases = turn.audits.unanswered(turn.round.number)
    audits = turn.audits
    if not open_cases:
        return False
    if audits.until is None:
        pace = membership.median_pace(list(turn.nodes.values())) or 0.0
        longest = max(case.first.unit.last - case.first.unit.first + 1 for case in open_cases)
        turn.own_audits().until = turn.now + min(5.0 + 2 * pace * longest, LONGEST_WAIT)
        return True
    if turn.now < audits.until:
        return True
    turn.count("audits that ran out of time", times=len(open_cases))
    turn.own_audits().end(open_cases)
    return False


def _answerable(turn: Turn, case: Case) -> bool:
    """Whether anybody but the first is there who may measure the unit, now or soon."""
    hurdles = (
        membership.hindrance(node, case.round, turn.now)
        for key, node in turn.nodes.items()
        if key != case.first.key
    )
    return any(hurdle is None or hurdle[0] in COMING for hurdle in hurdles)


def _free_again(turn: Turn) -> None:
    """Audits whose second node is silent, or holds the unit no more, are without one again."""
    for case in turn.audits.unanswered(turn.round.number):
        key, unit = case.auditor, case.first.unit
        node = turn.nodes.get(key)
        if node is not None and any(lease.unit == unit for lease in node.leases):
            if turn.now - node.heard <= membership.SUSPECT_AFTER:
                continue
            turn.take(key, unit, tell=True)
        if key:
            _put(turn, replace(case, auditor=b""))


def _put(turn: Turn, new: Case) -> Case:
    turn.own_audits().put(new)
    return new


# ---------------------------------------------------------------- the second result, the evidence


def on_second(turn: Turn, peer: bytes, result: Result) -> bool:
    """Take in the result of an audit's second node; whether it was one."""
    for case in turn.audits.about(peer):
        if case.auditor == peer and case.first.unit == result.unit and not case.second:
            break
    else:
        return False
    held = turn.take(peer, result.unit)
    if held is not None:
        node = turn.nodes[peer]
        pace = membership.pace_after(node, held.unit, held, turn.now)
        turn.set_node(replace(node, pace=pace, stalled=None, accepted=node.accepted + 1))
    turn.send(peer, Ack(result.unit, "ok"))  # nobody is told that it was an audit
    second = _half(turn, peer, result)
    mine, theirs = turn.audits.references(case.first)
    _ask(turn, _put(turn, replace(case, second=second, mine=mine, theirs=theirs, since=turn.now)))
    return True


def _ask(turn: Turn, case: Case) -> None:
    for half in case.halves:
        if half.missing and there(turn.nodes.get(half.key), turn.now):
            turn.send(half.key, EvidenceAsk(half.unit, len(half.scores)))
    _put(turn, replace(case, asked=turn.now))


def on_evidence(turn: Turn, peer: bytes, message: Evidence) -> None:
    """Scores of a unit, in parts; whole and fitting their hash they enter every case that asked for them."""
    for listed in turn.audits.about(peer):
        case = turn.audits.by_number.get(listed.number)  # one judged before it may have put a node out
        if case is None or not case.second:
            continue
        halves = tuple(_fed(turn.lock, half, message) if half.key == peer else half for half in case.halves)
        if halves == case.halves:
            continue
        new = _put(turn, case.with_halves(halves))
        if not any(half.missing for half in new.halves):
            _finish(turn, new)
        elif any(half.missing and half.key == peer and half.scores for half in new.halves):
            _ask(turn, new)


def _fed(lock: Lock, half: Half, message: Evidence) -> Half:
    """One side's scores after a message: longer, whole, or proved not to be what was measured."""
    if half.unit != message.unit or not half.missing or message.first != len(half.scores):
        return half
    sizes = [lock.chunk_size(half.unit.kind, k) for k in range(half.unit.first, half.unit.last + 1)]
    if not message.total:
        return replace(half, fault="it has no evidence for a unit it measured")
    scores = half.scores + message.scores
    if message.total != sum(sizes) or len(scores) > message.total or not message.scores:
        return replace(half, fault="its evidence has another number of prompts than the unit")
    if len(scores) < message.total:
        return replace(half, scores=scores)
    start, fits = 0, hash_of(scores) == half.evidence
    for size, stated in zip(sizes, half.sums, strict=True):
        part = scores[start : start + size]
        # the range first: numbers out of it may be too large to be added
        fits = fits and all(lock.reward_ok(value, 1) for value in part) and math.fsum(part) == stated
        start += size
    return (
        replace(half, scores=scores, done=True)
        if fits
        else replace(half, fault=f"its evidence {FORGED} its hash")
    )


def hash_of(scores: Sequence[float]) -> bytes:
    """What a result's `evidence` holds: see `esnode.worker`."""
    return hashlib.blake2b(struct.pack(f"<{len(scores)}d", *scores)).digest()[:8]


def on_tick(turn: Turn) -> None:
    """Ask again, and judge without those who do not answer."""
    for case in turn.audits.cases:
        gone = turn.audits.by_number.get(case.number) is not case  # with a node that another case put out
        if gone or not case.second or turn.now - case.asked < ASK_AGAIN:
            continue
        if turn.now - case.since < PATIENCE and case.round >= turn.round.number - 1:
            _ask(turn, case)
        else:
            _finish(turn, case)
    _free_again(turn)
    give_out(turn)


def forget(turn: Turn, key: bytes) -> None:
    """A node says Hello anew: what it measured before may have gone with its process."""
    turn.own_audits().forget(key)


# ---------------------------------------------------------------- the judgement


def _compared(turn: Turn, first: Half, second: Half, case: Case) -> audit.Sums:
    """What the scores of an audit's two nodes say; nothing where those of one are not whole."""
    if not (first.done and second.done):
        return audit.Sums()
    seconds = [half for half in case.theirs if half.key == second.key]
    thirds = [half for half in case.theirs if half.key != second.key]
    mine, theirs, others = (
        [half.scores for half in halves if half.done] for halves in (case.mine, seconds, thirds)
    )
    evidence, out = turn.state.evidence, turn.state.quarantined
    return audit.compare(
        first.scores, second.scores, mine, theirs, others, turn.lock.reward_low, turn.lock.reward_high,
        first_rates=audit.rates(evidence, first.key, out),
        second_rates=audit.rates(evidence, second.key, out),
        alike=bool(first.engine) and first.engine == second.engine,
    )  # fmt: skip


def _finish(turn: Turn, case: Case) -> None:
    """Judge an audit by the evidence there is, journal the outcome and put out whoever fails."""
    assert case.second is not None
    turn.own_audits().end([case])
    faults = _faults(case)
    first, second = case.first, case.second
    sums = _compared(turn, first, second, case)
    record = Audited(first.key, second.key, msgspec.structs.astuple(sums), tuple(faults.items()), ())
    state = admit_evidence(turn.state, record)
    verdicts: list[tuple[bytes, str]] = []
    while (found := _verdict(state, None if verdicts else (first.key, second.key))) is not None:
        verdicts.append(found)
        state = admit_evidence(turn.state, replace(record, quarantine=tuple(verdicts)))
    record = replace(record, quarantine=tuple(verdicts))
    turn.persist(record)
    turn.state = admit_evidence(turn.state, record)
    turn.count("audits")
    if sums.other:
        names = " and ".join(turn.nodes[half.key].name for half in (first, second))
        turn.count("equal engines that differ", f"{names} have equal engines and measured other scores")
    for key, fault in faults.items():
        turn.count("failed audits", f"{_name(turn, key)}: {fault}")
    for key, reason in verdicts:
        turn.count("quarantines", f"{_name(turn, key)}: {reason}")
        turn.note("audit", what="quarantine", node=_name(turn, key), reason=reason)
        if key in turn.nodes:
            turn.take_all(key)


def _faults(case: Case) -> dict[bytes, str]:
    """Who failed this audit, and how: once each, whatever had a part in it; forgery outweighs loss."""
    found: dict[bytes, str] = {}
    for half in case.halves:
        if half.fault and FORGED not in found.get(half.key, ""):
            found[half.key] = half.fault
    return found


def _verdict(state: State, about: Sequence[bytes] | None) -> tuple[bytes, str] | None:
    """Who goes into quarantine next, of these or of all."""
    for key, (count, fault) in state.misses.items():
        if key not in state.quarantined and (count >= audit.MISSES or FORGED in fault):
            return key, f"{fault} ({count} failed audit{'s' * (count > 1)})"
    return audit.judge(state.evidence, state.quarantined, about)


def _name(turn: Turn, key: bytes) -> str:
    return turn.nodes[key].name if key in turn.nodes else key.hex()[:8]


HANDLERS: dict[type[Message], Callable[[Turn, bytes, Any], None]] = {Evidence: on_evidence}
