"""Two digests of one state: who is right is settled by replay, never by vote.

Pure. Every word of a node on D comes through `observe`. While all agree, D may be signed once a second node
(or the only one there is) has said it. When they differ, one node of each side tells the digests of its
pieces, and re-derives those that differ from its checkpoint: who changes was at fault and is repaired, who is
confirmed never yields. Where that confirms two sides both re-derive from the base, and two sides confirmed
then stop the run. Nothing is signed meanwhile. Called by `machine.py` and `work.py`; the values are in
`claims.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from coordinator import answers, claims, standoff
from coordinator.claims import FAULTS_TO_LEAVE, Dispute, sides, there
from coordinator.events import FaultFound
from coordinator.state import blame, learn
from coordinator.turn import Turn
from protocol.counting import rounds
from protocol.messages import Bye, DigestAsk, Message, Rederive, Rederived, TensorDigests
from protocol.pieces import pieces_of
from protocol.seeds import U64

RUNNING_PIECES = 8  # re-derived at once; when more differ these tell who is at fault, a rebuild repairs
ASK_AGAIN = 5.0  # seconds until an unanswered question is repeated
SPOT_EVERY = 4  # rounds between random checks of a node that is alone

# ---------------------------------------------------------------- words


def observe(turn: Turn, key: bytes, commits: int, digest: int) -> None:
    """A node's word on D after `commits` commits."""
    if commits != turn.chain.round or turn.over:
        known = turn.chain.digest_at(commits)
        if known is not None and known != digest:
            name = turn.nodes[key].name
            turn.count("digests that differ from the ledger")
            turn.note(
                "dispute",
                round=commits,
                node=name,
                what="differs",
                digest=f"{digest:016x}",
                known=f"{known:016x}",
            )
        return
    before = turn.proof.words.get(key)
    if before != digest:
        if before is not None:  # one of the two was wrong
            _blame(turn, key, commits, f"it said digest {before:016x} of one state and then another")
        if not turn.proof.words:
            turn.set(proof=replace(turn.proof, since=turn.now))
        turn.told().words[key] = digest
    if turn.digest == digest and turn.proof.dispute is None:
        return  # one more who says what is settled: nothing to look through a thousand words for
    settle(turn)


def fits(turn: Turn, key: bytes) -> bool:
    """Whether a node may get units: its replica is not known to differ from the settled state."""
    word = turn.proof.words.get(key)
    return word is None or turn.digest in (None, word)


def settle(turn: Turn) -> None:
    """See where the words stand: D is learned, a dispute opens, goes on or ends."""
    state = turn.state
    proof = state.proof
    found = sides(proof.words, state.chain.digest)
    if len(found) > 1 and proof.dispute is None:
        _open(turn, found)
    dispute = turn.proof.dispute
    if dispute is not None:
        won = [digest for digest in found if digest in dispute.confirmed]
        if len(won) > 1 and not _deepen(turn, dispute):
            return standoff.stop_both(turn, dispute, won)
        if len(found) > 1 or (dispute.forced and not won):
            return _pursue(turn)
        _close(turn, dispute)
    if turn.stopped or turn.digest is not None or len(found) != 1:
        return
    verdict = answers.witnessed(turn.state)
    if verdict.ok:
        _learn(turn, next(iter(found)), verdict.reason)


def _learn(turn: Turn, digest: int, reason: str) -> None:
    """D is known. Whoever measured on another state measured for nothing."""
    turn.state = learn(turn.state, digest, reason)
    numbers = {number: key for key, number in turn.state.numbers.items()}
    for number, other in turn.proof.measured.items():
        if other != digest and number in numbers:
            reason = f"its rewards were measured on digest {other:016x}, the state has {digest:016x}"
            _blame(turn, numbers[number], turn.chain.round, reason)


def on_tick(turn: Turn) -> None:
    """Time passes: questions are repeated, vanished nodes let go, a lone node is checked at random."""
    if turn.over or turn.state.round is None:
        return
    if turn.proof.words or turn.proof.dispute:
        settle(turn)
    if not turn.over:
        _spot_check(turn)


def _spot_check(turn: Turn) -> None:
    state, number = turn.state, turn.round.number
    if turn.signable is None or state.proof.spotted or not number or number % SPOT_EVERY:
        return
    present = [key for key, node in turn.nodes.items() if there(node, turn.now)]
    if len(present) != 1 or present[0] not in state.proof.words:
        return
    turn.set(proof=replace(state.proof, spotted=True))
    count = len(pieces_of(state.lock))
    entropy = hashlib.blake2b(number.to_bytes(8, "little"), key=state.secret or state.nonce).digest()
    piece = int.from_bytes(entropy[:8], "little") % count
    turn.send(present[0], Rederive(number, (piece,), "a random check: nobody else can contradict you", 1))


# ---------------------------------------------------------------- a dispute


def _open(turn: Turn, found: dict[int, list[bytes]]) -> None:
    state = turn.state
    dispute = Dispute(state.chain.round, state.now)
    turn.set(proof=replace(state.proof, dispute=dispute), digest=state.chain.digest)
    turn.count("disputes")
    for digest, keys in found.items():
        who = ", ".join(standoff.names(turn, keys)) or "the ledger"
        turn.note("dispute", round=dispute.commits, what="opened", node=who, digest=f"{digest:016x}")


def _pursue(turn: Turn) -> None:
    """Ask whoever must answer next; end what cannot be answered any more."""
    _let_go(turn)
    state = turn.state
    dispute = state.proof.dispute
    assert dispute is not None
    found = sides(state.proof.words, state.chain.digest)
    open_sides = {digest: keys for digest, keys in found.items() if digest not in dispute.confirmed}
    won = [digest for digest in found if digest in dispute.confirmed]
    if won and not any(open_sides.values()) and state.chain.digest in open_sides:
        if _deepen(turn, dispute):
            return _pursue(turn)
        return standoff.stop_ledger(turn, dispute, won[0], state.chain.digest)
    alive = sum(bool(keys) for keys in found.values())
    for keys in open_sides.values():
        # one speaks for its side until one of them is found at fault
        asked = keys if dispute.repaired.keys() & set(keys) else keys[:1]
        for key in asked:
            _ask(turn, key, alone=alive < 2)


def _deepen(turn: Turn, dispute: Dispute) -> bool:
    """Whether a side rests on replay from a checkpoint alone, which may hold what is wrong: the base now."""
    whole = {answer.digest for answer in dispute.answers.values() if not answer.since}
    near = set(dispute.confirmed) - whole
    if not near or dispute.base:
        return False
    _update(
        turn,
        base=1,
        confirmed={digest: name for digest, name in dispute.confirmed.items() if digest in whole},
        answers={key: answer for key, answer in dispute.answers.items() if not answer.since},
        asked={},
        took=0.0,
    )
    turn.note("dispute", round=dispute.commits, what="checkpoints confirm more than one side: from the base")
    return True


def _let_go(turn: Turn) -> None:
    """Forget the words of nodes that are gone or never answer; then agreement alone proves nothing."""
    for key in turn.proof.words:
        proof = turn.proof
        dispute = proof.dispute
        assert dispute is not None
        if proof.words[key] in dispute.confirmed:
            continue  # it answers no question any more that was put before
        node = turn.nodes.get(key)
        first, _ = dispute.asked.get(key, (turn.now, 0.0))
        limit = claims.patience(turn.state, dispute, key)
        if there(node, turn.now) and turn.now - first > limit:
            _strike(turn, key, f"it has not answered in a dispute for {limit:.0f} s")
            node = turn.nodes[key]
        if not there(node, turn.now):
            words = {other: digest for other, digest in proof.words.items() if other != key}
            turn.set(proof=replace(proof, words=words, dispute=replace(dispute, forced=True)))


def _ask(turn: Turn, key: bytes, *, alone: bool) -> None:
    """Put the next question to a node, at most every few seconds."""
    dispute = turn.proof.dispute
    assert dispute is not None
    first, last = dispute.asked.get(key, (turn.now, -ASK_AGAIN))
    if turn.now - last < ASK_AGAIN:
        return
    question: Message
    reason = _reason(turn, key)
    held = dispute.digests.get(key, ())
    if alone or key in dispute.repaired or dispute.forced:
        question = Rederive(dispute.commits, (), reason, 1 + dispute.repaired.get(key, 0))
    elif dispute.pieces:
        question = Rederive(dispute.commits, dispute.pieces, reason, dispute.base)
    elif len(held) < len(pieces_of(turn.lock)):
        question = DigestAsk(dispute.commits, len(held), reason)
    else:
        return
    turn.send(key, question)
    _update(turn, asked={**dispute.asked, key: (first, turn.now)})


def _reason(turn: Turn, key: bytes) -> str:
    """Why a node is asked, told to it in words."""
    state = turn.state
    mine = state.proof.words[key]
    others = [other for other, digest in state.proof.words.items() if digest != mine]
    who = ", ".join(standoff.names(turn, others)) or "the ledger"
    here = f"after {rounds(state.chain.round)} this node has digest {mine:016x}"
    return f"{here}, {who} another: replay decides"


def _update(turn: Turn, **changes: Any) -> None:
    proof = turn.proof
    assert proof.dispute is not None
    turn.set(proof=replace(proof, dispute=replace(proof.dispute, **changes)))


def _ask_at_once(turn: Turn, key: bytes, *, more: bool) -> None:
    """The next question to this node need not wait. `more`: it is for the rest of the same answer."""
    dispute = turn.proof.dispute
    assert dispute is not None
    asked = {other: when for other, when in dispute.asked.items() if other != key}
    if more and key in dispute.asked:
        asked[key] = (dispute.asked[key][0], turn.now - ASK_AGAIN)
    _update(turn, asked=asked)


# ---------------------------------------------------------------- answers


def on_digests(turn: Turn, peer: bytes, message: TensorDigests) -> None:
    """Digests of a node's pieces: with those of another side they locate the difference."""
    dispute = turn.proof.dispute
    total = len(pieces_of(turn.lock))
    if dispute is None or message.commits != dispute.commits or message.total != total:
        return
    held = dispute.digests.get(peer, ())
    if message.first != len(held) or not message.digests or len(held) + len(message.digests) > total:
        return
    held += message.digests
    _update(turn, digests={**dispute.digests, peer: held})
    _ask_at_once(turn, peer, more=len(held) < total)
    if len(held) == total:
        proof = turn.proof
        turn.set(proof=replace(proof, words={**proof.words, peer: sum(held) % U64}))  # read afresh
        _locate(turn, total)
    settle(turn)


def _locate(turn: Turn, total: int) -> None:
    """Find the pieces in which two sides differ, once both have told all of theirs."""
    proof = turn.proof
    dispute = proof.dispute
    assert dispute is not None
    whole = {proof.words[key]: row for key, row in dispute.digests.items() if len(row) == total}
    if len(whole) < 2 or dispute.pieces:
        return
    differing = [k for k, column in enumerate(zip(*whole.values(), strict=True)) if len(set(column)) > 1]
    every = -(-len(differing) // RUNNING_PIECES)
    _update(turn, pieces=tuple(differing[::every]), asked={})
    names = {str(pieces_of(turn.lock)[k]) for k in differing[:3]}
    turn.note("dispute", round=dispute.commits, what="located", pieces=len(differing), where=sorted(names))


def on_rederived(turn: Turn, peer: bytes, message: Rederived) -> None:
    """What replay gave a node: whoever changes was at fault."""
    state = turn.state
    name = turn.nodes[peer].name
    problem = claims.misfit(state, message)
    if problem:
        return turn.count("misfit answers to a dispute", f"{name}: {problem}")
    if not message.held:
        if _blame(turn, peer, message.commits, f"{message.reason}; it has mended them"):
            observe(turn, peer, message.commits, message.digest)
        return
    late = state.proof.dispute is not None and state.proof.dispute.base and message.since
    if message.commits != state.chain.round or late:
        return
    _took(turn, peer)
    if message.held == message.derived:
        return _confirmed(turn, peer, message)
    where = [str(pieces_of(state.lock)[k]) for k in message.pieces if k < len(pieces_of(state.lock))]
    rows = zip(where or ["its whole master"], message.held, message.derived, strict=False)
    wrong = [f"{what} held {a:016x}, replay gives {b:016x}" for what, a, b in rows if a != b]
    _blame(turn, peer, message.commits, "; ".join(wrong[:2]) + f" ({message.by})")
    proof = turn.proof
    dispute = proof.dispute or Dispute(message.commits, turn.now, forced=True)
    others = sides({key: word for key, word in proof.words.items() if key != peer}, state.chain.digest)
    confirmed = dict(dispute.confirmed)
    if message.digest in others or not (message.pieces or others):  # else it may err in its replay, too
        confirmed[message.digest] = name
    dispute = replace(
        dispute,
        confirmed=confirmed,
        repaired={**dispute.repaired, peer: dispute.repaired.get(peer, 0) + 1},
        answers={**dispute.answers, peer: message},
        digests={key: row for key, row in dispute.digests.items() if key != peer},
        asked={key: when for key, when in dispute.asked.items() if key != peer},
    )
    words = {**proof.words, peer: message.digest}
    turn.set(proof=replace(proof, words=words, dispute=dispute))
    if turn.chain.digest is None:
        turn.set(digest=None)
    settle(turn)


def _took(turn: Turn, peer: bytes) -> None:
    """How long a node took to replay tells how long another may take."""
    dispute = turn.proof.dispute
    if dispute is not None and peer in dispute.asked:
        _update(turn, took=max(dispute.took, turn.now - dispute.asked[peer][0]))


def _confirmed(turn: Turn, peer: bytes, message: Rederived) -> None:
    proof, name = turn.proof, turn.nodes[peer].name
    turn.count("pieces confirmed by replay", times=max(len(message.pieces), 1))
    if proof.dispute is None:
        return
    turn.note("dispute", round=message.commits, what="confirmed", node=name, digest=f"{message.digest:016x}")
    turn.set(proof=replace(proof, words={**proof.words, peer: message.digest}))
    _update(
        turn,
        confirmed={**proof.dispute.confirmed, message.digest: name},
        answers={**proof.dispute.answers, peer: message},
        asked={key: when for key, when in proof.dispute.asked.items() if key != peer},
    )
    settle(turn)


def _blame(turn: Turn, peer: bytes, commits: int, reason: str) -> bool:
    """Count a fault of a node, drop what it measured in the open round, take its units back; not twice."""
    old = turn.state.faults.get(peer)
    if old is not None and old.commits == commits and reason in old.told:
        return False
    turn.persist(record := FaultFound(peer, commits, reason))
    turn.state = blame(turn.state, record)
    turn.count("faults")
    (name,) = standoff.names(turn, [peer])
    turn.note("dispute", round=commits, what="at fault", node=name, reason=reason)
    if peer in turn.nodes:
        turn.take_all(peer)
        if (count := turn.state.faults[peer].count) >= FAULTS_TO_LEAVE:
            _send_away(turn, peer, f"its replica was at fault {count} times, the last time: {reason}")
    return True


def _strike(turn: Turn, key: bytes, reason: str) -> None:
    """A fault each time, also for the same state and reason; and away."""
    old = turn.state.faults.get(key)
    _blame(turn, key, turn.state.chain.round, f"{reason} (fault {old.count + 1 if old else 1})")
    if not turn.nodes[key].left:
        _send_away(turn, key, reason)


def _send_away(turn: Turn, key: bytes, reason: str) -> None:
    turn.take_all(key)
    turn.send(key, Bye(f"{reason}. Run `esnode doctor` on this machine"))
    turn.set_node(replace(turn.nodes[key], left=reason))
    turn.note("membership", node=turn.nodes[key].name, what="sent away", reason=reason)


# ---------------------------------------------------------------- the end of a dispute


def _close(turn: Turn, dispute: Dispute) -> None:
    """All agree again."""
    turn.set(proof=replace(turn.proof, dispute=None))
    turn.note("dispute", round=dispute.commits, what="settled", seconds=turn.now - dispute.opened)
    for key, answer in dispute.answers.items():
        if answer.contradicted and answer.held == answer.derived:
            said = turn.chain.digest_at(answer.contradicted - 1)
            return standoff.stop_with(
                turn,
                f"the ledger states digest {said or 0:016x} after {rounds(answer.contradicted - 1)}, the "
                f"replay of {standoff.names(turn, [key])[0]} ({answer.by}) contradicts it and is confirmed "
                "since. ",
            )


HANDLERS: dict[type[Message], Callable[[Turn, bytes, Any], None]] = {
    TensorDigests: on_digests,
    Rederived: on_rederived,
}
