"""The status of a run as plain JSON-able data, with the reason behind every decision it shows.

Pure. Reached as `machine.status`; shown by `esnode status`, the progress display and the tests.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from coordinator import amend, answers, audit, claims, donors, enrolment, membership, rounds, succession, work
from coordinator.membership import READY, Node
from coordinator.rounds import Round
from coordinator.state import State
from protocol.counting import SHOWN
from protocol.counting import rounds as counted
from protocol.messages import Kind, Unit


def status(state: State) -> dict[str, Any]:
    """A JSON-able picture of the run, with the reasons of the decisions behind it."""
    round = state.round
    last = state.history[-1] if state.history else None
    state_word, reason = _state(state)
    return {
        "run": state.lock.run_id.hex(),
        "task": state.lock.task,
        "term": state.term,
        "state": state_word,
        "reason": reason,
        "round": state.chain.round,
        "rounds": state.ops.rounds,
        "height": state.chain.height,
        "tip": state.chain.tip.hex(),
        "digest": None if state.digest is None else f"{state.digest:016x}",
        "members": {
            "done": len(round.members) - round.unsettled if round else 0,
            "total": len(round.members) if round else 0,
            "void": sum(bool(cells.void) for cells in round.members) if round else 0,
        },
        "probe": _probe(state),
        "failing": _failing(state, round) if round else [],
        "reward": asdict(last) if last else None,
        "rewards": [[s.round, s.mean, s.high, s.low, s.std] for s in state.history[-SHOWN:]],
        "scores": [[s.state_round, s.mean, s.correct, s.prompts] for s in state.scores[-SHOWN:]],
        "amendments": [
            *(body.words() for body in state.chain.amendments),
            *(f"{amend.body(order).words()} (not in the ledger yet)" for order in state.orders),
        ],
        "nodes": [_node(state, node) for node in state.nodes.values()],
        "proof": claims.picture(state, answers.witnessed(state).reason),
        "audit": _audit(state),
        "snapshots": donors.picture(state),
        "counters": dict(sorted(state.counters.items())),
        "refusals": list(state.refusals),
        "decisions": [[_seconds(state.now - at), words] for at, words in state.decisions],
        "succession": succession.picture(state),
        "guests": enrolment.picture(state.guests, state.wall),
    }


def _state(state: State) -> tuple[str, str]:
    """One word for what the run does, and why."""
    if state.stopped:
        return "stopped", state.stopped
    if state.ending is not None or state.chain.ended:
        return "ended", f"complete after {counted(state.chain.round)}"
    if state.lineage.waiting:
        return "recovering", answers.answered(state).reason
    if state.round is None:
        return "starting", "the ledger is empty"
    stands = [membership.standing(node, state.round.number, state.now) for node in state.nodes.values()]
    if not any(word == READY for word, _ in stands):
        if not stands:
            return "paused", "no node has joined yet (a node loads its model first)"
        return "paused", "no node is ready: " + ", ".join(sorted(f"{word} ({why})" for word, why in stands))
    return "running", _waits(state, state.round)


def _waits(state: State, round: Round) -> str:
    """Why the open round is not committed now, the decisions of `work.close` in words."""
    if round.probe is not None and not round.unsettled and not round.probe.complete:
        return "the held-out probe is not in yet"
    closing, reason = rounds.closing(round, state.lock, state.ops, state.now)
    if closing is None:
        return reason
    if round.final:
        reason = "all rounds are committed"
    digest = answers.witnessed(state)
    if not digest.ok:
        return f"{reason}; {digest.reason}"
    second = len(state.audits.unanswered(round.number))
    return f"{reason}; {second} audited unit{'s' * (second > 1)} not measured twice yet" if second else reason


def _seconds(value: float) -> float:
    return round(value, 1)


def _probe(state: State) -> dict[str, Any] | None:
    probe = state.round.probe if state.round else None
    if probe is None:
        return None
    return {"done": sum(s is not None for s in probe.sums), "total": len(probe.sums)}


def _failing(state: State, round: Round) -> list[list[str]]:
    """Members that failed and are not given up, why not, and what was wrong the last time."""
    found = []
    for unit in rounds.failing(round):
        cells = round.cells(unit)
        if cells is not None and not cells.settled:
            name = "probe" if unit.kind == Kind.PROBE else f"member {unit.member}"
            found.append([name, f"{work.hopeless(state, cells)[1]}; the last: {cells.reason}"])
    return found


def _audit(state: State) -> dict[str, Any]:
    """What the audits show of each node: prompts compared, the three tests' numbers, verdicts."""
    nodes = {}
    tables = audit.tables(state.evidence, state.quarantined)
    reference = audit.references(tables)
    for key, node in state.nodes.items():
        rows = tables.get(key, {})
        if key in state.quarantined:
            rows = audit.partners(state.evidence, key, set(state.quarantined) - {key})
        whole = audit.total(rows.values())
        usual = reference(key)
        nodes[node.name] = {
            "prompts": whole.pairs,
            "difference": round(whole.d / whole.pairs, 4) if whole.pairs else None,
            "contradicts": round(max(whole.up, whole.down), 2),
            "follows": round(whole.r, 3) if whole.deep else None,
            "others_follow": round(usual[0], 3) if usual else None,
            "equal": whole.same,
            "unequal": whole.other,
            "failed": list(state.misses.get(key, (0, ""))),
            "quarantine": state.quarantined.get(key, ""),
        }
    return {"share": state.ops.audit_share, "nodes": nodes}


def _node(state: State, node: Node) -> dict[str, Any]:
    word, reason = membership.standing(node, state.chain.round, state.now)
    fault = state.faults.get(node.key)
    return {
        "name": node.name,
        "number": node.number,
        "key": node.key.hex(),
        "state": word,
        "reason": reason,
        "backend": node.hello.backend,
        "device": node.hello.device,
        "lanes": node.hello.lanes,
        "lost": "" if node.left else node.hello.lost,
        "fingerprints": [value.hex() for value in node.hello.fingerprints],
        "height": node.height,
        "tip": node.tip.hex(),
        "round": node.applied,
        "units": [[label(lease.unit), lease.progress] for lease in node.leases],
        "why": "" if node.left else node.why,
        "seconds_per_chunk": node.pace,
        "applied_ms": node.ms,
        "faults": fault.count if fault else 0,
        "fault": fault.reason if fault else "",
        "silent": _seconds(state.now - node.heard),
        **membership.tally(node),
    }


def label(unit: Unit) -> str:
    """A unit in words: "member 3", "member 3 chunks 0-1", "probe chunk 2"."""
    what = "probe" if unit.kind == Kind.PROBE else f"member {unit.member}"
    return f"{what} chunk{'s' * (unit.last > unit.first)} {unit.first}" + f"-{unit.last}" * (
        unit.last > unit.first
    )
