"""From whom a node gets the ledger entries it lacks: the coordinator, and peers where that is slow or silent.

Pure: protocol and the node's pure modules only. Entries are signed, so any node is as good a source. The
coordinator names a few peers after Welcome; one of them is asked when a Fetch has no answer for seconds, and
while the coordinator is not heard at all. What a peer sends is taken under the same verification, and never
stops this node unless it proves a key that signed twice. Called by `node.py` and `inbox.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from esnode import branches
from esnode.events import Store
from esnode.nodestate import State, Turn
from esnode.snapshotevents import FetchEntries, PeerEntries
from protocol.chain import BrokenChain
from protocol.entries import MalformedEntry, parse
from protocol.messages import Fetch, Message
from protocol.peers import Neighbours

FETCH_AGAIN = 2.0  # seconds without Entries
FETCH_COUNT = 256
PEER_AGAIN = 4.0  # seconds until the next peer is asked, when the last one has not answered
QUIET_AGAIN = 10.0  # while the coordinator is silent, after a peer that had nothing new
SILENT = 12.0  # seconds without the coordinator until peers are asked for what it may have said to them


def fetch(turn: Turn) -> None:
    """Ask for what is missing. Called after every event."""
    state = turn.state
    behind = state.wanted > state.chain.height
    if state.joined and behind:
        if state.fetched is None or state.now - state.fetched >= FETCH_AGAIN:
            if state.fetched is not None:
                _ask(turn)  # it is slow, or it lacks them
            turn.send(Fetch(state.chain.height, FETCH_COUNT))
            turn.set(fetched=state.now)
    elif state.closing and not state.joined:
        _ask(turn)  # the coordinator may have gone with its last word
    elif not state.joined and not state.paused and not state.leaving and state.now - state.heard > SILENT:
        _ask(turn)


def _ask(turn: Turn) -> None:
    """The next peer, unless one is being asked or none had anything new a moment ago."""
    state, sources = turn.state, turn.state.sources
    known = {key for key, _ in state.chain.roster.values()}
    peers = [peer for peer in sources.peers if peer.key in known]
    if not peers or state.chain.ended:
        return
    if state.now - sources.asked < (
        PEER_AGAIN if sources.open or state.joined or state.closing else QUIET_AGAIN
    ):
        return
    peer = peers[sources.turn % len(peers)]
    turn.set(sources=replace(sources, turn=sources.turn + 1, asked=state.now, open=True))
    turn.do(FetchEntries(peer, state.chain.height, FETCH_COUNT))


def answered(turn: Turn, event: PeerEntries) -> None:
    """What a peer holds beyond this node's ledger; it is asked on as long as it has more."""
    before = turn.state.chain.height
    turn.set(sources=replace(turn.state.sources, open=False))
    if not event.raws or turn.state.leaving:
        return
    take(turn, event.first, event.raws, peer=event.key)
    state = turn.state
    peer = next((peer for peer in state.sources.peers if peer.key == event.key), None)
    more = not state.joined or state.wanted > state.chain.height
    if state.chain.height > before and peer is not None and more and not state.stopped:
        turn.note("ledger", what="fetched from a peer", entries=state.chain.height - before, peer=peer.name)
        turn.set(sources=replace(state.sources, asked=state.now, open=True))
        turn.do(FetchEntries(peer, state.chain.height, FETCH_COUNT))


def _on_neighbours(turn: Turn, message: Neighbours) -> None:
    turn.set(sources=replace(turn.state.sources, peers=message.peers))


# ---------------------------------------------------------------- taking entries in


def take(turn: Turn, first: int, raws: tuple[bytes, ...], peer: bytes = b"") -> None:
    """Verify and store the entries that follow the tip; look at those already held for a second signature.

    `peer`: the node they come from, b"" for the coordinator. An entry that may not follow stops this node
    when the coordinator sends it; a peer that sends one is not asked again.
    """
    chain = turn.state.chain
    start = chain.height
    for height, raw in enumerate(raws, first):
        if height < chain.height:
            branches.look(turn, chain, height, raw)
        elif height == chain.height:
            if peer and not _expected(turn.state, height, raw):
                break
            chain = chain.copy() if height == start else chain
            try:
                chain.append(raw)
            except BrokenChain as error:
                if peer:
                    _drop(turn, peer, f"entry {height} may not follow: {error.reason}")
                    break
                if branches.elsewhere(turn.state, chain, raw):
                    return turn.note("ledger", reason=f"entry {height} is of another branch than mine")
                turn.stop(f"the coordinator sent entry {height}, which may not follow: {error.reason}", 1)
        if turn.state.stopped:
            return
    if chain.height > start:
        if chain.lock.run_id != turn.state.lock.run_id:
            return turn.stop("the coordinator's ledger is of another run than this node's lock", 1)
        turn.do(Store(start, tuple(entry.raw for entry in chain.entries[start:])))
        turn.set(chain=chain, wanted=max(turn.state.wanted, chain.height))
        if not turn.state.applying:
            turn.check_digest()


def _expected(state: State, height: int, raw: bytes) -> bool:
    """Whether an entry from a peer may be the run's: the coordinator has that many, or its term is no older.

    A peer that follows a coordinator which a successor has replaced must not lead this node after it.
    """
    if height < state.wanted:
        return True
    try:
        return parse(raw).term >= state.term
    except MalformedEntry:
        return True  # and be refused in words


def _drop(turn: Turn, key: bytes, reason: str) -> None:
    sources = turn.state.sources
    turn.note("ledger", peer=key.hex()[:16], reason=reason)
    turn.set(sources=replace(sources, peers=tuple(peer for peer in sources.peers if peer.key != key)))


HANDLERS: dict[type[Message], Callable[[Turn, Any], None]] = {Neighbours: _on_neighbours}
