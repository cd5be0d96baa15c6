"""Who has which snapshot: the root in the chain, the donors a joiner is sent to, how peers are reached.

Pure. Nothing here is journaled: nodes tell it again with every Welcome. `HANDLERS` belong to `machine.py`,
`due` is asked when a commit is made, `picture` by `picture.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from coordinator.claims import there
from coordinator.membership import alive
from coordinator.peers import Peer
from coordinator.state import State
from coordinator.turn import Turn
from protocol.counting import rounds
from protocol.messages import Message
from protocol.peers import (
    MOST_DONORS,
    MOST_NEIGHBOURS,
    CatchUp,
    Donor,
    Donors,
    DonorsAsk,
    Kept,
    Neighbours,
    PeerFault,
    PeerWay,
    Reach,
    Snapshots,
    WrongFile,
)

KEPT = 2  # snapshots a node is believed to hold
BUSY_SECONDS = 300.0  # how long a donor counts as busy with a joiner it was given to
FAULTS_TO_SHUN = 2  # reporters after whom nobody is sent to a donor any more
WORDS_THAT_COUNT = 2  # donors about whom one reporter's word counts for everybody
NEAR = 16  # peers looked at for neighbours
REMEMBERED = 32  # words of others about one peer


# ---------------------------------------------------------------- the root in the chain


def due(state: State) -> bytes:
    """The root for the commit that is about to be made: the newest that nodes agree on and no entry has.

    Two nodes must have reported it, one when no other is there. b"" when there is none.
    """
    there = [key for key, node in state.nodes.items() if alive(node, state.now)]
    enough = 2 if len(there) > 1 else 1
    votes: dict[tuple[int, bytes], int] = {}
    for key in there:
        for kept in _peer(state, key).kept:
            votes[kept.round, kept.root] = votes.get((kept.round, kept.root), 0) + 1
    agreed = [(round, count, root) for (round, root), count in votes.items() if count >= enough]
    round, _, root = max(agreed, default=(0, 0, b""))
    return b"" if not root or state.chain.announces(round, root) else root


def disagreements(state: State) -> list[str]:
    """Rounds of which two nodes report different roots, in words.

    Their masters have equal digests, or the replica proof has them already: one of the two writes wrongly.
    """
    said: dict[int, dict[bytes, list[str]]] = {}
    for key, peer in state.peers.items():
        name = state.nodes[key].name if key in state.nodes else key.hex()[:8]
        for kept in peer.kept:
            said.setdefault(kept.round, {}).setdefault(kept.root, []).append(name)
    return [
        _title(round)
        + ", ".join(f"{root.hex()[:12]} by {' and '.join(sorted(by))}" for root, by in sorted(roots.items()))
        for round, roots in sorted(said.items())
        if len(roots) > 1
    ]


def _title(round: int) -> str:
    return f"snapshot after {rounds(round)}: "


# ---------------------------------------------------------------- choosing donors


def choose(state: State, joiner: bytes, round: int) -> Donors:
    """Up to 16 donors of the newest announced snapshot beyond `round`, the least busy first."""
    found: dict[tuple[int, bytes], list[tuple[int, int, Donor]]] = {}
    sizes: dict[bytes, list[int]] = {}
    signed: dict[tuple[int, bytes], bool] = {}
    for key, peer in state.peers.items():
        why = _unfit(state, key, joiner)
        for kept in () if why else peer.kept:
            name = (kept.round, kept.root)
            if name not in signed:
                signed[name] = kept.round > round and state.chain.announces(*name)
            if signed[name]:
                node = state.nodes[key]
                row = (load(peer, state.now), node.number or 0, Donor(key, node.name, peer.addresses))
                found.setdefault(name, []).append(row)
                sizes.setdefault(kept.root, []).append(kept.size)
    if not found:
        return Donors(0, bytes(32), 0, ())
    newest, root = max(found)
    rows = sorted(found[newest, root], key=lambda row: row[:2])
    size = max(sorted(sizes[root]), key=sizes[root].count)  # the root does not say it: most donors do
    return Donors(newest, root, size, tuple(donor for _, _, donor in rows[:MOST_DONORS]))


def load(peer: Peer, now: float) -> int:
    """How many joiners this donor is believed to serve now."""
    return sum(now - since < BUSY_SECONDS for since in peer.given.values())


def _unfit(state: State, key: bytes, joiner: bytes) -> str:
    """Why a node is no donor for this joiner; "" when it is one."""
    node, peer = state.nodes.get(key), _peer(state, key)
    if node is None or not alive(node, state.now):
        return "it is not there"
    if key == joiner:
        return "it is the joiner itself"
    if joiner in peer.faults:
        return "it sent this joiner a poisoned part"
    return shunned(peer)


def shunned(peer: Peer) -> str:
    """Why nobody is sent to this donor any more; "" while it is trusted."""
    if len(peer.shunned_by) >= FAULTS_TO_SHUN:
        return f"{len(peer.shunned_by)} nodes had poisoned parts from it"
    return ""


# ---------------------------------------------------------------- messages


def announce(turn: Turn) -> None:
    """How often snapshots are due or where the relay is has changed."""
    turn.broadcast(Snapshots(turn.ops.snapshot_every, turn.state.relay))


def _on_reach(turn: Turn, key: bytes, message: Reach) -> None:
    before = turn.state.peers.get(key)
    _put(turn, key, replace(before or Peer(), addresses=message.addresses))
    turn.send(key, Snapshots(turn.ops.snapshot_every, turn.state.relay))
    near = neighbours(turn.state, key)
    if near:
        turn.send(key, Neighbours(near))
    if before is None or before.addresses != message.addresses:
        for other in near:  # in a small pool those that came first must hear of it too
            turn.send(other.key, Neighbours(neighbours(turn.state, other.key)))


def neighbours(state: State, key: bytes) -> tuple[Donor, ...]:
    """The few peers after this one, in a circle, that are there and can be dialled."""
    circle = list(state.peers)
    start = circle.index(key) + 1
    found: list[Donor] = []
    for other in (circle[start:] + circle[: start - 1])[:NEAR]:
        peer = state.peers[other]
        here = there(state.nodes.get(other), state.now)  # it may get its roster number in a moment
        if peer.addresses and here and not shunned(peer) and len(found) < MOST_NEIGHBOURS:
            found.append(Donor(other, state.nodes[other].name, peer.addresses[:4]))
    return tuple(found)


def _on_kept(turn: Turn, key: bytes, message: Kept) -> None:
    peer = _peer(turn.state, key)
    signed = _signed_instead(turn.state, message)
    if signed:
        return _tell_wrong(turn, key, message, signed)
    if message in peer.kept or message.round > turn.chain.round or turn.nodes[key].astray is not None:
        return  # known, or of another branch
    others = [kept for kept in peer.kept if kept.round != message.round]
    kept = tuple(sorted((*others, message), key=lambda row: -row.round)[:KEPT])
    _put(turn, key, replace(peer, kept=kept))
    turn.note("snapshot", node=turn.nodes[key].name, round=message.round, root=message.root.hex())
    if _contradicted(turn.state, message):
        words = next(w for w in disagreements(turn.state) if w.startswith(_title(message.round)))
        turn.count("snapshot disagreements", words)
        turn.note("dispute", what="snapshot", round=message.round, reason=words)


def _signed_instead(state: State, kept: Kept) -> bytes:
    """The signed root of this round, when it is another than this one; b"" otherwise."""
    others = {o.root for p in state.peers.values() for o in p.kept if o.round == kept.round} - {kept.root}
    if not others or state.chain.announces(kept.round, kept.root):
        return b""
    return next((root for root in sorted(others) if state.chain.announces(kept.round, root)), b"")


def _tell_wrong(turn: Turn, key: bytes, kept: Kept, signed: bytes) -> None:
    """A file that nobody can use: its replica has the run's D, or the replica proof would have it."""
    peer, name = _peer(turn.state, key), turn.nodes[key].name
    _put(turn, key, replace(peer, kept=tuple(row for row in peer.kept if row != kept)))
    reason = (
        f"snapshot after {rounds(kept.round)}: the signed root is {signed.hex()[:12]}, this file's is "
        f"{kept.root.hex()[:12]}, so the file is not what the replica held"
    )
    turn.send(key, WrongFile(kept.round, kept.root, reason))
    turn.count("wrong snapshot files", f"{name}: {reason}")
    turn.note("snapshot", node=name, round=kept.round, what="wrong file", reason=reason)


def _contradicted(state: State, kept: Kept) -> bool:
    return any(o.round == kept.round and o.root != kept.root for p in state.peers.values() for o in p.kept)


def _on_ask(turn: Turn, key: bytes, message: DonorsAsk) -> None:
    answer = choose(turn.state, key, message.round)
    for donor in answer.donors:
        peer = _peer(turn.state, donor.key)
        given = {**peer.given, key: turn.now}
        _put(turn, donor.key, replace(peer, given=_last(given)))
    turn.send(key, answer)


def _on_catch_up(turn: Turn, key: bytes, message: CatchUp) -> None:
    """The joiner's choice; one that does not go on loading frees its donors."""
    _put(turn, key, replace(_peer(turn.state, key), catching=f"{message.way}: {message.reason}"))
    turn.note("catch-up", node=turn.nodes[key].name, way=message.way, reason=message.reason)
    if message.way == "snapshot":
        return
    for other, peer in turn.state.peers.items():
        if key in peer.given:
            rest = {joiner: since for joiner, since in peer.given.items() if joiner != key}
            _put(turn, other, replace(peer, given=rest))


def _on_way(turn: Turn, key: bytes, message: PeerWay) -> None:
    if message.key in turn.nodes:
        peer = _peer(turn.state, message.key)
        ways = _last({**peer.ways, key: (message.way, message.reason[:200])})
        _put(turn, message.key, replace(peer, ways=ways))


def _on_fault(turn: Turn, key: bytes, message: PeerFault) -> None:
    """One word marks the donor for the one who complains, two for everybody: a liar shuns nobody alone.

    A node's word counts for everybody about two donors at most, so that two that collude cannot shun all.
    """
    if message.key not in turn.nodes or message.key == key:
        return
    peer = _peer(turn.state, message.key)
    words = f"part {message.part} of {message.root.hex()[:12]}: {message.reason[:120]}"
    about = sum(key in other.shunned_by for other in turn.state.peers.values())
    counts = len(peer.shunned_by) < FAULTS_TO_SHUN and about < WORDS_THAT_COUNT
    by = peer.shunned_by | {key} if counts else peer.shunned_by
    _put(turn, message.key, replace(peer, faults=_last({**peer.faults, key: words}), shunned_by=by))
    donor, joiner = turn.nodes[message.key].name, turn.nodes[key].name
    turn.count("poisoned parts", f"{donor} sent {joiner} a poisoned part ({words})")
    turn.note("poisoned", node=donor, by=joiner, reason=words)


HANDLERS: dict[type[Message], Callable[[Turn, bytes, Any], None]] = {
    Reach: _on_reach,
    Kept: _on_kept,
    DonorsAsk: _on_ask,
    CatchUp: _on_catch_up,
    PeerWay: _on_way,
    PeerFault: _on_fault,
}


# ---------------------------------------------------------------- status


def picture(state: State) -> dict[str, Any]:
    """Snapshots and peers as status shows them."""
    agreed = {
        kept.round: kept.root.hex()
        for peer in state.peers.values()
        for kept in peer.kept
        if state.chain.announces(kept.round, kept.root)
    }
    return {
        "every": state.ops.snapshot_every,
        "relay_port": state.relay,
        "announced": {str(round): root for round, root in sorted(agreed.items())},
        "disagreements": disagreements(state),
        "peers": {state.nodes[key].name: _shown(state, key) for key in state.peers if key in state.nodes},
    }


def _shown(state: State, key: bytes) -> dict[str, Any]:
    peer = _peer(state, key)
    names = {other: node.name for other, node in state.nodes.items()}
    return {
        "addresses": list(peer.addresses),
        "kept": [kept.round for kept in peer.kept],
        "serving": load(peer, state.now),
        "reached": reached(peer),
        "ways": {names.get(by, by.hex()[:8]): list(way) for by, way in peer.ways.items()},
        "faults": {names.get(by, by.hex()[:8]): words for by, words in peer.faults.items()},
        "donor": shunned(peer) or "yes",
        "catching_up": peer.catching,
    }


def reached(peer: Peer) -> str:
    """How others reach this node, as the words after "reached"."""
    if not peer.addresses:
        return "not at all (it serves nobody)"
    if not peer.ways:
        return "by nobody yet (not tried)"
    ways = [way for way, _ in peer.ways.values()]
    words = ", ".join(f"{way} by {ways.count(way)}" for way in ("direct", "relay", "none") if way in ways)
    why = next((why for way, why in peer.ways.values() if way != "direct"), "")
    return words + f" ({why})" * bool(why)


# ---------------------------------------------------------------- small parts


def _peer(state: State, key: bytes) -> Peer:
    return state.peers.get(key) or Peer()


def _put(turn: Turn, key: bytes, peer: Peer) -> None:
    turn.set(peers={**turn.state.peers, key: peer})


def _last(words: dict[bytes, Any]) -> dict[bytes, Any]:
    """The newest few: what others say about a peer must not grow for ever."""
    return dict(list(words.items())[-REMEMBERED:])
