"""What the nodes say of the open round's state: values, and the questions asked of them.

Pure. `disputes.py` acts on them. Part of `state.State`; imports protocol and `membership` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coordinator.membership import LOST_AFTER, READY, Node, Verdict, standing
from protocol.counting import rounds
from protocol.messages import Rederived
from protocol.pieces import pieces_of

FAULTS_TO_LEAVE = 5  # after which a machine is not trusted any more, until its operator says so
LEAST_PATIENCE = 60.0  # seconds a node has at least for an answer in a dispute, without any replay,
MOST_PATIENCE = 1800.0  # and at most: nothing waits for ever
SLOWER = 5.0  # than another node, or than usual, a replay may be
PIECE_SECONDS = 0.005  # of one piece, round and member with the reference kernel on one core
READ_SECONDS = 60.0  # to read a base model
WITNESS_WAIT = 15.0  # seconds a round waits for a second node's word on D


class Dispute(msgspec.Struct, frozen=True):
    """Two digests of one state, until replay has settled them."""

    commits: int
    opened: float
    digests: Mapping[bytes, tuple[int, ...]] = {}  # CURVE key -> digests of its pieces, as they come in
    pieces: tuple[int, ...] = ()  # that differ and are re-derived; () while not located
    confirmed: Mapping[int, str] = {}  # D that replay gave -> who says so
    repaired: Mapping[bytes, int] = {}  # CURVE key of who changed -> how often
    answers: Mapping[bytes, Rederived] = {}
    asked: Mapping[bytes, tuple[float, float]] = {}  # CURVE key -> when first and when last
    base: int = 0  # 1: replay goes from the base now, checkpoints have confirmed two sides
    took: float = 0.0  # seconds the slowest replay of this dispute took that was answered
    forced: bool = False  # agreement does not end it, only a confirmation by replay does


class Proof(msgspec.Struct, frozen=True):
    """The words on D of one state, and what became of them."""

    words: dict[bytes, int] = {}  # CURVE key -> D of its replica, its last word
    measured: dict[int, int] = {}  # roster number -> D its accepted results were measured on
    since: float = 0.0  # when the first word came
    dispute: Dispute | None = None
    spotted: bool = False  # whether the lone node was asked for its random piece


class Fault(msgspec.Struct, frozen=True):
    """A node whose replica was not what replay gives: how often, and the last time in words."""

    count: int
    commits: int
    told: tuple[str, ...]  # the reasons of that state: a message may come twice, the second time late

    @property
    def reason(self) -> str:
        return self.told[-1]


def sides(words: Mapping[bytes, int], stated: int | None) -> dict[int, list[bytes]]:
    """Who says which D. `stated`: what the ledger says already, a side even without nodes."""
    found: dict[int, list[bytes]] = {} if stated is None else {stated: []}
    for key, digest in words.items():
        found.setdefault(digest, []).append(key)
    return found


def there(node: Node | None, now: float) -> bool:
    """Whether an answer can be expected of a node."""
    return node is not None and not node.left and now - node.heard <= LOST_AFTER


def patience(state: Any, dispute: Dispute, key: bytes) -> float:
    """Seconds until a node that has not answered holds the run up no longer.

    Measured on those who have replayed the same, where somebody has; else from what replay usually takes: the
    node's own last update for the whole master, the reference kernel for pieces.
    """
    replay = key in dispute.repaired or dispute.forced or not dispute.pieces
    rounds, members = dispute.commits, state.lock.members
    seconds = 0.0
    if dispute.took:
        seconds = dispute.took
    elif replay and (dispute.forced or dispute.confirmed or dispute.repaired):
        node = state.nodes.get(key)
        seconds = READ_SECONDS + rounds * (node.ms if node is not None else 0) / 1000
    elif dispute.pieces:
        seconds = len(dispute.pieces) * rounds * members * PIECE_SECONDS
    return min(LEAST_PATIENCE + SLOWER * seconds, MOST_PATIENCE)


def barred(state: Any, key: bytes) -> str:
    """Why a node is not let in after too many faults of its replica; "" when it is."""
    fault = state.faults.get(key)
    if fault is None or fault.count < FAULTS_TO_LEAVE:
        return ""
    return (
        f"this node's replica was at fault {fault.count} times, the last time: {fault.reason}. Run `esnode "
        "doctor` on it; then the coordinator's operator lets it in again with `esnode nodes allow`"
    )


def misfit(state: Any, message: Rederived) -> str:
    """Why no node could have given this answer here; "" for one that could."""
    if not message.held:
        return ""  # what it mended by itself
    if any(piece >= len(pieces_of(state.lock)) for piece in message.pieces):
        return "it replayed a piece that no model of this run has"
    rows = (len(message.held), len(message.derived))
    if rows != (max(len(message.pieces), 1),) * 2:
        return f"{len(message.pieces)} pieces, {rows[0]} digests before the replay and {rows[1]} after it"
    if message.since > message.commits:
        return f"replay to {message.commits} rounds that began after {message.since}"
    if message.contradicted and state.chain.digest_at(message.contradicted - 1) is None:
        return f"it contradicts a digest after {rounds(message.contradicted - 1)} that no entry states"
    return ""


def witnessed(
    proof: Proof, nodes: Mapping[bytes, Node], round: int, now: float, unheard: Sequence[str] = ()
) -> Verdict:
    """Whether D may be signed: two nodes say it, or one that is alone (it reads back what it wrote).

    `unheard`: names of nodes that may still come back to a coordinator that has just started.
    """
    count = len(proof.words)
    if not count:
        return Verdict(False, "no node has told the digest of this state yet")
    if count > 1:
        return Verdict(True, f"{count} nodes have the same digest")
    others = [
        node.name
        for key, node in nodes.items()
        if key not in proof.words and standing(node, round, now)[0] == READY
    ] + list(unheard)
    if not others:
        return Verdict(True, "the only node there is has read back what it wrote")
    waited = now - proof.since
    if waited >= WITNESS_WAIT:
        return Verdict(True, f"no second node has told its digest for {waited:.0f} s")
    return Verdict(False, f"one node has told its digest, {', '.join(sorted(others)[:3])} not yet")


def pending(proof: Proof, dispute: Dispute, nodes: Mapping[bytes, Node], now: float) -> str:
    """Why D cannot be signed while replay decides: how long it has, and for whom it waits."""
    waiting = (key for key in dispute.asked if proof.words.get(key) not in dispute.confirmed)
    asked = sorted(nodes[key].name for key in waiting if key in nodes)
    words = f"two digests of this state, replay decides since {now - dispute.opened:.0f} s"
    return f"{words}, {', '.join(asked)} to answer" if asked else words


def picture(state: Any, reason: str) -> dict[str, Any]:
    """The section of the status: how D stands and why (`reason`), and a dispute in words."""
    proof: Proof = state.proof
    dispute = proof.dispute
    names = {key: node.name for key, node in state.nodes.items()}
    found = sides(proof.words, state.chain.digest)
    shown = None
    if dispute is not None:
        said = {f"{digest:016x}": [names.get(key, "?") for key in keys] for digest, keys in found.items()}
        shown = {
            "rounds": dispute.commits,
            "seconds": round(state.now - dispute.opened, 1),
            "sides": said,
            "confirmed": {f"{digest:016x}": name for digest, name in dispute.confirmed.items()},
            "pieces": [str(pieces_of(state.lock)[k]) for k in dispute.pieces],
        }
    return {"words": len(proof.words), "reason": reason, "dispute": shown}
