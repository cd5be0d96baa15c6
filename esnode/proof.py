"""The node's part in the replica proof: it tells what its master holds, and lets replay decide.

Pure: protocol and the node's pure modules only. A master that changed by itself (the engine reads it back
before every unit and every update) is mended by replay and reported; in a dispute the node re-derives what
the coordinator names. Whatever comes out of replay is what the master holds from then on. Called by
`node.py` and `inbox.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from esnode.events import Event, LaneRepaired, LanesDiffer
from esnode.nodestate import Turn
from esnode.proofevents import Damaged, Digested, Heal, Mend, Mended, Prove, Proved, TakeDigests
from protocol.messages import DigestAsk, Message, Rederive, Rederived, TensorDigests
from protocol.pieces import pieces_of

PART = 2048  # digests in one message
REFERENCE = "kernel reference"


def _settled(turn: Turn, commits: int) -> bool:
    """Whether the master stands still at the state asked about. If not, the question comes again."""
    state = turn.state
    moving = state.applying or state.rewinding is not None or state.rewind
    wounded = state.proof.mending or state.proof.damaged or state.proof.mend
    return not moving and not wounded and not state.proof.reading and state.rounds == commits


def _set(turn: Turn, **changes: Any) -> None:
    turn.set(proof=replace(turn.state.proof, **changes))


# ---------------------------------------------------------------- questions


def on_digest_ask(turn: Turn, message: DigestAsk) -> None:
    """Have the master read, unless it is moving: then the question comes again."""
    if not _settled(turn, message.commits):
        return
    if not message.first:
        turn.note("proof", reason=message.reason)
    _set(turn, reading=message)
    turn.do(TakeDigests())


def on_digested(turn: Turn, event: Digested) -> None:
    """Answer the question the master was read for, or mend what turned out damaged."""
    ask = turn.state.proof.reading
    assert ask is not None
    _set(turn, reading=None)
    if event.damaged:
        return _wounded(turn, event.damaged)
    total = len(event.digests)
    if ask.first < total:
        part = event.digests[ask.first : ask.first + PART]
        turn.send(TensorDigests(ask.commits, ask.first, total, part))


def _same(one: Rederive, other: Rederive) -> bool:
    """Whether it is the same question, in whatever words."""
    return (one.commits, one.pieces, one.base) == (other.commits, other.pieces, other.base)


def on_rederive(turn: Turn, message: Rederive) -> None:
    """Let replay speak on these pieces, or on the whole master. Asked again, it answers as before."""
    proof = turn.state.proof
    if proof.answer is not None and proof.answered is not None and _same(proof.answered, message):
        return turn.send(proof.answer)
    if proof.question is not None or not _settled(turn, message.commits):
        return
    if any(piece >= len(pieces_of(turn.state.lock)) for piece in message.pieces):
        return
    turn.note("proof", reason=message.reason, pieces=len(message.pieces))
    _set(turn, question=message, held=turn.state.digest)
    if message.pieces:
        base = bool(message.base or proof.contradicted)  # checkpoints prove nothing against the ledger
        turn.do(Prove(tuple(turn.state.chain.entries[: turn.state.applied]), message.pieces, base))
    else:
        turn.rewind(far=True)


def on_proved(turn: Turn, event: Proved) -> None:
    """Replay has spoken. Where it differs from the master the master is overwritten."""
    state, question = turn.state, turn.state.proof.question
    if question is None or question.pieces != event.pieces:
        return
    if event.held == event.derived:
        return _answer(turn, event.held, event.derived, event.since)
    if state.rounds != question.commits:  # what was derived is of a state gone by
        _set(turn, question=None)
        where = ", ".join(str(pieces_of(state.lock)[k]) for k in event.pieces)
        _report(turn, f"replay after {question.commits} rounds gives other bits for {where}")
        return turn.rewind(far=True)
    turn.forget_work()
    _set(turn, mend=event, contradicted=0)


def _answer(turn: Turn, held: tuple[int, ...], derived: tuple[int, ...], since: int = 0) -> None:
    state, question = turn.state, turn.state.proof.question
    assert question is not None
    by = f"{REFERENCE if question.pieces else 'kernel ' + state.about.backend}, {state.about.versions}"
    answer = Rederived(
        commits=question.commits,
        pieces=question.pieces,
        held=held,
        derived=derived,
        digest=state.digest,
        contradicted=state.proof.contradicted,
        by=by,
        reason=question.reason,
        since=since,
    )
    _set(turn, question=None, answered=question, answer=answer)
    if held != derived:
        what = "this replica was at fault and is mended"
        turn.note("dispute", what=what, digest=f"{state.digest:016x}", since=since)
    turn.send(answer)


def after_applied(turn: Turn) -> None:
    """A whole rebuild that was asked for has come back to where it was asked."""
    question, state = turn.state.proof.question, turn.state
    if question is not None and not question.pieces and state.rounds == question.commits:
        _answer(turn, (state.proof.held,), (state.digest,))


# ---------------------------------------------------------------- damage and repair


def on_damaged(turn: Turn, event: Damaged) -> None:
    """The engine found the master changed since it was written, and did nothing else with it."""
    state = turn.state
    if event.unit is None:
        assert state.applying
        turn.set(applying=0)
    else:
        turn.end(event.unit)
    if not state.rewind:
        _wounded(turn, event.tensors)


def _wounded(turn: Turn, tensors: tuple[str, ...]) -> None:
    turn.forget_work()
    _set(turn, damaged=tensors)


def go_on(turn: Turn) -> bool:
    """Mend what is to be mended once the engine is idle; whether the engine is the mender's now."""
    state, proof = turn.state, turn.state.proof
    if proof.mending or proof.reading:
        return True
    if not proof.damaged and proof.mend is None:
        return False
    if not state.busy and not state.leaving:
        _set(turn, mending=True)
        if proof.damaged:
            turn.do(Heal(tuple(state.chain.entries[: state.applied]), proof.damaged))
        else:
            assert proof.mend is not None
            turn.do(Mend(proof.mend.pieces))
    return True


def on_mended(turn: Turn, event: Mended) -> None:
    """Report what memory had damaged, or answer the question that replay was asked for."""
    proof, before = turn.state.proof, turn.state.digest
    _set(turn, mending=False, damaged=(), mend=None, answered=None)
    turn.set(digest=event.digest)
    if proof.damaged:
        more = len(proof.damaged) - 3
        what = ", ".join(proof.damaged[:3]) + (f" and {more} more" if more > 0 else "")
        words = f"{what} changed in memory between two reads"
        if event.digest != before:
            words += f"; replay gives digest {event.digest:016x}, not {before:016x}"
        _report(turn, words)
    elif proof.mend is not None and proof.question is not None:
        _answer(turn, proof.mend.held, proof.mend.derived, proof.mend.since)


def on_lane_repaired(turn: Turn, event: LaneRepaired) -> None:
    """Another engine of this node did the work meanwhile."""
    _report(turn, event.reason)


def on_lanes_differ(turn: Turn, event: LanesDiffer) -> None:
    """Replay decides, by all of them."""
    turn.set(applying=0)
    _report(turn, event.reason)
    _set(turn, question=None, reading=None, answered=None)
    turn.rewind(far=event.far)


def _report(turn: Turn, reason: str) -> None:
    """Tell the coordinator what was found here; with every word on D again while the state lasts."""
    state = turn.state
    turn.note("replica", what="mended", reason=reason)
    report = Rederived(state.rounds, (), (), (), state.digest, 0, state.about.versions, reason, 0)
    _set(turn, report=report)
    turn.send(report)


HANDLERS: dict[type[Message], Callable[[Turn, Any], None]] = {
    DigestAsk: on_digest_ask,
    Rederive: on_rederive,
}
ON_EVENT: dict[type[Event], Callable[[Turn, Any], None]] = {
    Damaged: on_damaged,
    LaneRepaired: on_lane_repaired,
    LanesDiffer: on_lanes_differ,
    Digested: on_digested,
    Mended: on_mended,
    Proved: on_proved,
}
