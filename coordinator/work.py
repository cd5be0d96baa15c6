"""What becomes of work: results and failures coming in, rounds closing, units going out.

Pure. Each function takes the `Turn` of the step it is part of. The decisions themselves are in `rounds.py`
and `leases.py`; here they are carried out. Called by `machine.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from msgspec.structs import replace

from coordinator import auditing, disputes, donors, leases, membership, rounds
from coordinator.events import ResultAccepted, UnitFailed
from coordinator.leases import Pool, Rescue
from coordinator.membership import Lease, Node
from coordinator.state import State, measure
from coordinator.turn import Turn
from protocol.counting import nth
from protocol.counting import rounds as counted
from protocol.entries import QUORUM, EndBody
from protocol.messages import Ack, Assign, Cancel, Failed, Kind, Result, Unit

FEW = 3  # ready nodes from which on the plan's share of a round is a limit
RESCUES = 16  # idle nodes that take something over per look: bounds the work of one step
LOOK_SECONDS = 2e-4  # per node of the pool, from one look at everybody's work to the next
SMALL_POOL = 16  # nodes up to which every event may look
MAX_NOTE = 200  # characters of a node's words that are kept

# ---------------------------------------------------------------- results


def on_result(turn: Turn, peer: bytes, result: Result) -> None:
    """Judge a result, journal what counts, and answer it: every result gets an Ack."""
    node = turn.nodes[peer]
    verdict = rounds.judge(turn.lock, turn.round, result)
    if verdict.kind == "ok" and node.number is None:
        verdict = rounds.Verdict("refused", "this node is not on the roster yet")
    if node.quarantined and verdict.kind in ("ok", "duplicate"):
        return _not_wanted(turn, peer, result, f"this node is in quarantine: {node.quarantined}")
    if verdict.kind in ("ok", "duplicate"):
        disputes.observe(turn, peer, turn.round.number, result.digest)
        known = turn.digest
        if turn.stopped:
            return
        if known is not None and result.digest != known:
            reason = f"measured on digest {result.digest:016x}, the state has {known:016x}"
            return _not_wanted(turn, peer, result, reason)
    if verdict.kind == "duplicate" and auditing.on_second(turn, peer, result):
        close(turn)
        return assign(turn, None if turn.chain.round > result.unit.round else [peer])
    if verdict.conflict:
        turn.count("conflicts")
        turn.note("conflict", node=node.name, member=result.unit.member, reason=verdict.reason)
    if verdict.kind == "ok":
        return _accept(turn, peer, result)
    held = turn.take(peer, result.unit)
    turn.send(peer, Ack(result.unit, verdict.kind + f": {verdict.reason}" * (verdict.kind == "refused")))
    if verdict.kind == "refused":
        _tally(turn, peer, "refused")
        turn.count("refused results", f"{node.name}: {verdict.reason}")
        turn.note(
            "refused",
            node=node.name,
            round=result.unit.round,
            member=result.unit.member,
            reason=verdict.reason,
        )
        if held is not None:
            _count_failure(turn, peer, result.unit, verdict.reason)
            close(turn)
    elif verdict.kind == "late":
        _tally(turn, peer, "late")
        turn.count("late")
    assign(turn, [peer])


def _not_wanted(turn: Turn, peer: bytes, result: Result, reason: str) -> None:
    """Something is wrong with the node: nothing of that is held against the member."""
    turn.take(peer, result.unit)
    turn.send(peer, Ack(result.unit, f"refused: {reason}"))
    _tally(turn, peer, "refused")
    turn.count("refused results", f"{turn.nodes[peer].name}: {reason}")
    close(turn)
    assign(turn)


def _accept(turn: Turn, peer: bytes, result: Result) -> None:
    """Journal a result, acknowledge it, and see what it completes."""
    unit, node = result.unit, turn.own(peer)
    assert node.number is not None
    turn.persist(ResultAccepted(node.number, result))
    before = turn.proof.measured.get(node.number)
    if before is None:
        turn.told().measured[node.number] = result.digest
    elif before != result.digest:
        turn.state = measure(turn.state, node.number, result.digest)
    held, kept = membership.without(node.leases, unit)
    turn.round = rounds.fill(turn.draft(), node.number, result, int(held is not None))
    number = turn.round.number
    node.pace, node.overdue = membership.pace_after(node, unit, held, turn.now), None
    if held is not None:
        node.leases = membership.placed(node.hello.lanes, kept, turn.now)
    node.applied, node.stalled = number, None
    node.accepted += 1
    turn.send(peer, Ack(unit, "ok"))
    auditing.on_result(turn, peer, result)
    cells = turn.round.cells(unit)
    freed = _drop_useless(turn, unit.member) if cells and any(cells.leases) else ()
    close(turn)
    assign(turn, None if turn.round.number > number else (peer, *freed))


def _drop_useless(turn: Turn, *members: int) -> list[bytes]:
    """Take back every leased unit of these members whose result would change nothing any more."""
    freed = []
    for key, node in turn.nodes.items():
        for lease in node.leases:
            if lease.unit.member in members and not _useful(turn, key, lease.unit):
                turn.take(key, lease.unit, tell=True)
                freed.append(key)
    return freed


def _useful(turn: Turn, key: bytes, unit: Unit) -> bool:
    return turn.round.needs(unit) or auditing.wanted(turn, key, unit)


def on_failed(turn: Turn, peer: bytes, message: Failed) -> None:
    """A node gives a unit back: it goes to another node, or its member is void."""
    if turn.take(peer, message.unit) is None:
        return  # said twice, or about a unit that was taken back
    _tally(turn, peer, "failed")
    _count_failure(turn, peer, message.unit, message.reason)
    close(turn)
    assign(turn)


def _count_failure(turn: Turn, peer: bytes, unit: Unit, reason: str) -> None:
    node = turn.nodes[peer]
    reason = reason[:MAX_NOTE]
    if node.number is None or not turn.round.needs(unit):
        return
    turn.persist(UnitFailed(node.number, unit, reason))
    turn.round = rounds.fail(turn.round, node.number, unit, reason)
    turn.note("failed", node=node.name, round=unit.round, member=unit.member, reason=reason)
    give_up(turn, unit)


# ---------------------------------------------------------------- giving up, closing


def give_up(turn: Turn, only: Unit | None = None) -> None:
    """Declare members void that failed often enough: all of them, or the one of a unit."""
    for unit in [only] if only else rounds.failing(turn.round):
        cells = turn.round.cells(unit)
        assert cells is not None
        void, reason = hopeless(turn, cells)
        if void:
            turn.round = rounds.void(turn.round, unit, reason, turn.lock.mirrored)
            turn.count("void")
            turn.note("void", round=unit.round, kind=unit.kind, member=unit.member, reason=reason)
            _drop_useless(turn, unit.member, unit.member ^ 1)


def hopeless(pool: Turn | State, cells: rounds.Cells) -> tuple[bool, str]:
    """Whether a member of the open round is given up, by the nodes that are there, and why (not)."""
    number, now = pool.chain.round, pool.now
    able = [node for node in pool.nodes.values() if not membership.hindrance(node, number, now)]
    others = sum(node.number not in cells.failures for node in able)  # could get it, have not failed at it
    return rounds.void_verdict(cells, len(pool.alive), others)


def close(turn: Turn) -> None:
    """Append every entry that is due: the score of a complete probe, a complete round's commit, the END."""
    while not turn.over:
        round = turn.round
        if round.probe is not None and round.probe.void:
            turn.note("score", round=round.number, void=round.probe.void)
            turn.round = replace(round, probe=None)
        elif round.probe is not None:
            if not round.probe.complete or turn.signable is None:
                return
            turn.append(rounds.score_body(turn.lock, round))
        elif round.unsettled and turn.ops.quorum >= 1:
            return
        elif round.final:
            if turn.signable is None:
                return
            turn.append(EndBody(f"{counted(round.number)} done"))
            turn.set(ending=turn.now)
        elif not round.unsettled and (turn.signable is None or auditing.holds(turn)):
            return  # complete: nothing of it is looked through before its time
        else:
            closing, reason = _closing(turn)
            if closing is None or turn.stopped or turn.signable is None or auditing.holds(turn):
                return
            if closing.code == QUORUM:
                turn.note("quorum", round=round.number, reason=reason)
            body = rounds.commit_body(turn.chain, round, closing)
            turn.append(dataclasses.replace(body, snapshot=donors.due(turn.state)))


def _closing(turn: Turn) -> tuple[rounds.Closing | None, str]:
    """How the open round may close now and why (not). One with too few members stops the run."""
    round = turn.round
    if round.unsettled and round.quorum is None and rounds.quorum_is_in(round, turn.lock, turn.ops)[0]:
        turn.round = round = replace(round, quorum=turn.now)
    closing, reason = rounds.closing(round, turn.lock, turn.ops, turn.now)
    if closing is not None and len(closing.members) < rounds.MIN_MEMBERS:
        why = closing.voids[0][1] if closing.voids else reason
        turn.stop(f"{nth(round.number)} has {len(closing.members)} members that could be evaluated: {why}", 1)
    return closing, reason


# ---------------------------------------------------------------- handing out


def assign(turn: Turn, keys: Collection[bytes] | None = None) -> None:
    """Give these nodes (all by default) what they can take: a unit per lane, a waiting one, then the tail."""
    if turn.over:
        return
    if keys is not None and len(keys) == 1:
        return _assign_one(turn, *keys)
    chosen = [key for key in (turn.nodes if keys is None else dict.fromkeys(keys)) if _may_work(turn, key)]
    chosen.sort(key=lambda key: turn.nodes[key].number or 0)
    if keys is None:
        turn.set(pool=_look_at_pool(turn, [turn.nodes[key] for key in chosen]))
    _feed(turn, chosen)
    _help_out(turn, [key for key in chosen if len(turn.nodes[key].leases) < turn.nodes[key].hello.lanes])


def _assign_one(turn: Turn, key: bytes) -> None:
    """`assign` for a node by itself, as after nearly every result."""
    if not _may_work(turn, key):
        return
    node = turn.own(key)
    depth = membership.depth(node)
    while len(node.leases) < depth and _give_next(turn, key):
        pass
    if len(node.leases) < node.hello.lanes:
        _help_out(turn, [key])


def _feed(turn: Turn, hungry: list[bytes]) -> None:
    """Fresh work in turns, first for every lane, so that a unit waits at no node while a lane is idle."""
    lanes = {key: turn.nodes[key].hello.lanes for key in hungry}
    for depth in range(1, max(lanes.values(), default=0) + 1):
        hungry = [
            key
            for key in hungry
            if depth > lanes[key] or len(turn.nodes[key].leases) >= depth or _give_next(turn, key)
        ]
    for key in hungry:
        if len(turn.nodes[key].leases) <= lanes[key]:
            _give_next(turn, key)


def _may_work(turn: Turn, key: bytes) -> bool:
    node = turn.nodes[key]
    return not membership.hindrance(node, turn.round.number, turn.now) and disputes.fits(turn, key)


def _look_at_pool(turn: Turn, ready: list[Node]) -> Pool:
    """Who shares the work; in a round that has just begun and has fewer members than nodes, who takes which
    chunks of every one."""
    round, chunks = turn.round, turn.lock.chunk_count(Kind.MEMBER)
    number, columns = turn.pool.round, turn.pool.columns
    if number != round.number:
        untouched = round.free == chunks * len(round.members)
        split = untouched and chunks > 1 and len(ready) > len(round.members) > 0
        number, columns = round.number, leases.columns(ready, chunks) if split else {}
    lanes = sum(node.hello.lanes for node in ready)
    return Pool(len(ready), lanes, leases.speed_of(ready), number, columns)


def _give_next(turn: Turn, key: bytes) -> bool:
    """Give a node something nobody holds yet; False when there is nothing for it."""
    node = turn.nodes[key]
    unit, why = leases.next_unit(turn.round, turn.lock, node, turn.pool, turn.alive, _room(turn, node))
    if unit is not None:
        turn.give(key, unit, why)
    elif not node.leases and node.why != why:
        turn.own(key).why = why
    return unit is not None


def _room(turn: Turn, node: Node) -> int | None:
    """Chunks a node may still take of this round; None where the plan sets no limit that holds now.

    An even share is always allowed, and a round is never kept waiting for the limit's sake.
    """
    share, ready = turn.ops.max_share, turn.pool.ready
    if share >= 1 or ready < FEW or not any(other.leases for other in turn.nodes.values()):
        return None
    total = turn.lock.chunk_count(Kind.MEMBER) * len(turn.round.members)
    return max(math.ceil(share * total), -(-total // ready)) - leases.held(turn.round, node)


def _help_out(turn: Turn, idle: list[bytes]) -> None:
    """Let idle nodes take over at the tail of the round. In a large pool a look at everybody is rationed."""
    pause = LOOK_SECONDS * len(turn.nodes) if len(turn.nodes) > SMALL_POOL else 0.0
    if not idle or turn.now - turn.looked < pause:
        return
    turn.set(looked=turn.now)
    tail = leases.tail(turn.nodes.values(), turn.now)
    for key in idle[:RESCUES]:
        room = _room(turn, turn.nodes[key])
        found, reason = leases.rescue(turn.round, turn.lock, tail, turn.nodes[key])
        if found is not None and (room is None or room > 0):
            _take_over(turn, key, found, reason)
            if found.victim is not None and found.old is not None:
                tail = tail.without(found.victim, found.old)
            tail = tail.along(found.unit, turn.nodes[key])


def _take_over(turn: Turn, key: bytes, found: Rescue, reason: str) -> None:
    if found.victim is not None and found.old is not None:
        turn.take(found.victim, found.old, tell=True)
        if found.keep is not None:
            turn.give(found.victim, found.keep, "an idle node took the rest over")
    what = "repeats" if found.victim is None else "takes over"
    turn.give(key, found.unit, f"{what}: {reason}")
    turn.note("lease", node=turn.nodes[key].name, what=what, member=found.unit.member, reason=reason)


# ---------------------------------------------------------------- repair


def reconcile(turn: Turn, peer: bytes, listed: dict[Unit, int]) -> None:
    """Make what a node says it holds (unit to progress, running ones first) and what is believed of it one.

    What was assigned and is missing there is sent again; what it holds without a lease becomes one if it is
    of use (a coordinator that restarted finds its nodes at work), and is cancelled if not.
    """
    now, node = turn.now, turn.nodes[peer]
    if node.stalled and listed.get(node.stalled[0]) != node.stalled[1]:
        node = replace(node, stalled=None)
    kept = {}
    for lease in node.leases:
        still = _confirmed(turn, peer, lease, listed.get(lease.unit))
        if still is not None:
            kept[lease.unit] = still
    for unit, progress in listed.items():
        if unit in kept:
            continue
        twice = any(_overlap(unit, other) for other in kept)  # two coordinators gave it, cut otherwise
        if len(kept) < membership.depth(node) and not twice and _useful(turn, peer, unit):
            if node.stalled:
                continue  # its units are anybody's until it moves
            kept[unit] = Lease(unit, now, now, now, progress, sent=False)
            turn.round = rounds.lease(turn.draft(), unit, 1)
        elif progress < 1000:  # a finished one only waits for its Ack
            turn.send(peer, Cancel(unit))
    order = {unit: k for k, unit in enumerate(listed)}
    ordered = sorted(kept.values(), key=lambda lease: order.get(lease.unit, len(order)))
    turn.set_node(replace(node, leases=membership.placed(node.hello.lanes, tuple(ordered), now)))


def _overlap(one: Unit, other: Unit) -> bool:
    same = (one.kind, one.member) == (other.kind, other.member)
    return same and one.first <= other.last and other.first <= one.last


def _confirmed(turn: Turn, peer: bytes, lease: Lease, progress: int | None) -> Lease | None:
    """A lease after the node's word on it: None from `progress` when it did not mention it."""
    now = turn.now
    if progress is not None:
        return replace(lease, progress=progress, moved=now if progress != lease.progress else lease.moved)
    if not lease.sent:
        turn.round = rounds.lease(turn.draft(), lease.unit, -1)
        return None
    if now - lease.asked <= membership.RESEND_AFTER:
        return lease
    turn.send(peer, Assign(lease.unit, turn.round.parent[:8], int(membership.LOST_AFTER)))
    return replace(lease, asked=now)


def _tally(turn: Turn, peer: bytes, what: str) -> None:
    node = turn.own(peer)
    setattr(node, what, getattr(node, what) + 1)
