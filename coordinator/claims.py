"""What the nodes say of the open round's state: values, and the questions asked of them.

Pure. `disputes.py` acts on them. Part of `state.State`; imports protocol and `membership` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from coordinator.membership import LOST_AFTER, READY, Node, Verdict, standing
from protocol.messages import Rederived
from protocol.pieces import pieces_of

WITNESS_WAIT = 15.0  # seconds a round waits for a second node's word on D


class Dispute(msgspec.Struct, frozen=True):
    """Two digests of one state, until replay has settled them."""

    commits: int
    opened: float
    digests: Mapping[bytes, tuple[int, ...]] = {}  # CURVE key -> digests of its pieces, as they come in
    pieces: tuple[int, ...] = ()  # that differ and are re-derived; () while not located
    confirmed: Mapping[int, str] = {}  # D that replay gave -> who says so
    repaired: frozenset[bytes] = frozenset()  # who changed
    answers: Mapping[bytes, Rederived] = {}
    asked: Mapping[bytes, tuple[float, float]] = {}  # CURVE key -> when first and when last
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
    reason: str


def sides(words: Mapping[bytes, int], stated: int | None) -> dict[int, list[bytes]]:
    """Who says which D. `stated`: what the ledger says already, a side even without nodes."""
    found: dict[int, list[bytes]] = {} if stated is None else {stated: []}
    for key, digest in words.items():
        found.setdefault(digest, []).append(key)
    return found


def there(node: Node | None, now: float) -> bool:
    """Whether an answer can be expected of a node."""
    return node is not None and not node.left and now - node.heard <= LOST_AFTER


def witnessed(proof: Proof, nodes: Mapping[bytes, Node], round: int, now: float) -> Verdict:
    """Whether D may be signed: two nodes say it, or one that is alone (it reads back what it wrote)."""
    count = len(proof.words)
    if not count:
        return Verdict(False, "no node has told the digest of this state yet")
    if count > 1:
        return Verdict(True, f"{count} nodes have the same digest")
    others = [
        node.name
        for key, node in nodes.items()
        if key not in proof.words and standing(node, round, now)[0] == READY
    ]
    if not others:
        return Verdict(True, "the only node there is has read back what it wrote")
    waited = now - proof.since
    if waited >= WITNESS_WAIT:
        return Verdict(True, f"no second node has told its digest for {waited:.0f} s")
    return Verdict(False, f"one node has told its digest, {', '.join(sorted(others)[:3])} not yet")


def picture(state: Any) -> dict[str, Any]:
    """The section of the status: how D stands, and a dispute in words."""
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
    return {"words": len(proof.words), "reason": state.witness, "dispute": shown}
