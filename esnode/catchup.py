"""Snapshots in the node's core: when one is written, and how a node that is far behind catches up.

Pure. A node that is behind begins to replay at once, which measures what a round costs it. When what is left
would take long it asks for donors, begins to fetch their snapshot beside the replay, which measures the
link, and then goes the way that ends sooner. Called by `node.py` and `inbox.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from esnode.events import Event
from esnode.snapshotevents import (
    Fetched,
    FetchFailed,
    Fetching,
    FetchSnapshot,
    Moved,
    PeerPoisoned,
    PeerReached,
    Save,
    Saved,
    StopFetch,
)
from protocol.counting import rounds
from protocol.entries import EntryKind
from protocol.messages import Message
from protocol.peers import (
    CatchUp,
    Donors,
    DonorsAsk,
    Kept,
    PeerFault,
    PeerWay,
    Reach,
    Snapshots,
    WrongFile,
)

if TYPE_CHECKING:
    from esnode.nodestate import State, Turn

FEW_ROUNDS = 8  # are applied at once, whatever they cost
FIRST_ROUNDS = 2  # of a longer replay: enough to know what a round costs
FUSED = 64  # rounds applied in one pass while catching up
BATCH_SECONDS = 5.0  # of replay at most, so that a better way is not taken late
WORTH_SECONDS = 10.0  # a replay that takes less needs no other way
LOAD_RATE = 5e8  # bytes per second from the disk into the masters, with hashing
CLEARLY = 0.9  # a snapshot must beat replay by this factor
REPENT = 1.5  # and is given up when it comes to take so much longer than replay
ASK_AGAIN = 5.0  # seconds without Donors
LATER = 60.0  # seconds until a way that failed is thought of again,
MUCH_LATER = 1200.0  # and one that was chosen, and kept this node from replaying
MOST_KEPT = 2
REACH_EVERY = 32  # beats, so about a minute: the peers named in answer come and go


@dataclass(frozen=True, slots=True)
class Held:
    """A snapshot on this node's disk; `entry` is the hash of the commit it stands behind."""

    round: int
    root: bytes
    size: int
    entry: bytes


@dataclass(frozen=True, slots=True)
class Catch:
    """An attempt to catch up faster than by replay. `way`: "" while it is not decided."""

    asked: float
    round: int = 0
    root: bytes = b""
    size: int = 0
    way: str = ""


# ---------------------------------------------------------------- snapshots of one's own


def on_welcome(turn: Turn) -> None:
    """Say where the peer socket is and which snapshots lie here."""
    turn.set(every=None)
    turn.send(Reach(turn.state.about.addresses))
    for held in _valid(turn.state):
        turn.send(Kept(held.round, held.root, held.size))


def on_beat(turn: Turn) -> None:
    """Say again what the coordinator has not shown to know."""
    if turn.state.every is None or (turn.state.beats % REACH_EVERY == 0 and turn.state.about.addresses):
        turn.send(Reach(turn.state.about.addresses))
    for held in _valid(turn.state)[:1]:
        if not turn.state.chain.announces(held.round, held.root):
            turn.send(Kept(held.round, held.root, held.size))


def _valid(state: State) -> list[Held]:
    """Held snapshots that are states of this chain: a dead branch's are nobody's business."""
    commits = state.chain.commits
    return [
        h
        for h in state.held_snapshots
        if 0 < h.round <= len(commits) and commits[h.round - 1].hash == h.entry
    ]


def after_apply(turn: Turn, commits: int) -> None:
    """The engine applied so many commits: learn what they cost, write a snapshot where one is due."""
    state = turn.state
    if commits >= FIRST_ROUNDS:
        turn.set(pace=max(state.ms, 1) / 1000 / commits)
    last = state.chain.entries[state.applied - 1]
    if not state.every or last.kind is not EntryKind.COMMIT or state.rounds % state.every or state.saving:
        return
    turn.set(saving=True)
    turn.do(Save(state.rounds, last.hash, state.digest))


def after_rewind(turn: Turn) -> None:
    """The engine took the newest file that is what it says: newer ones are not, and are given to nobody."""
    state = turn.state
    wrong = [held for held in _valid(state) if held.round > state.rounds]
    turn.set(held_snapshots=tuple(held for held in state.held_snapshots if held not in wrong))


def _on_saved(turn: Turn, event: Saved) -> None:
    turn.set(saving=False)
    if event.reason:
        return turn.note("snapshot", round=event.round, reason=f"not written: {event.reason}")
    turn.note("snapshot", round=event.round, root=event.root.hex(), bytes=event.size, ms=event.ms)
    _hold(turn, Held(event.round, event.root, event.size, event.entry))


def _hold(turn: Turn, held: Held) -> None:
    others = [other for other in turn.state.held_snapshots if other.round != held.round]
    kept = sorted((*others, held), key=lambda row: -row.round)[:MOST_KEPT]
    turn.set(held_snapshots=tuple(kept))
    if turn.state.joined and held in _valid(turn.state):
        turn.send(Kept(held.round, held.root, held.size))


def _on_wrong_file(turn: Turn, message: WrongFile) -> None:
    """Never speak of this file again; write it once more if the master still is what it should hold.

    Otherwise the next one takes its place. This node itself would not resume from it: its D does not fit.
    """
    state = turn.state
    wrong = [h for h in state.held_snapshots if (h.round, h.root) == (message.round, message.root)]
    if not wrong:
        return
    turn.note("snapshot", round=message.round, reason=message.reason)
    turn.set(held_snapshots=tuple(held for held in state.held_snapshots if held not in wrong))
    busy = state.saving or state.applying or state.rewind or state.rewinding is not None
    if not busy and state.rounds == message.round and wrong[0] in _valid(state):
        turn.set(saving=True)
        turn.do(Save(message.round, wrong[0].entry, state.digest))


def _on_snapshots(turn: Turn, message: Snapshots) -> None:
    turn.set(every=message.every, relay=message.relay)


# ---------------------------------------------------------------- which way


def batch(state: State, behind: int) -> int:
    """How many of the commits that are behind may be applied now."""
    if state.catch is not None and (state.catch.way == "snapshot" or _forced(state)):
        return 0
    if behind <= FEW_ROUNDS:
        return behind
    if not state.pace:
        return FIRST_ROUNDS
    return max(FIRST_ROUNDS, min(FUSED, int(BATCH_SECONDS / state.pace)))


def _forced(state: State) -> bool:
    """The owner wants a snapshot, whatever the numbers say."""
    return state.about.catch_up == "snapshot"


def consider(turn: Turn) -> None:
    """Ask for donors when replaying what is left would take long. Called after every event."""
    state = turn.state
    behind = state.chain.round - state.rounds
    if not state.joined or state.leaving or state.rewind or state.wanted > state.chain.height:
        return
    worth = behind > 0 if _forced(state) else bool(state.pace) and behind * state.pace >= WORTH_SECONDS
    if not worth or state.now < state.catch_later or state.about.catch_up == "replay":
        return
    if state.catch is None or (not state.catch.root and state.now - state.catch.asked > ASK_AGAIN):
        turn.set(catch=Catch(state.now))
        turn.send(DonorsAsk(state.rounds))


def _on_donors(turn: Turn, message: Donors) -> None:
    state = turn.state
    if state.catch is None or state.catch.root:
        return
    known = {key for key, _ in state.chain.roster.values()}
    donors = tuple(donor for donor in message.donors if donor.key in known)
    if not donors or message.round <= state.rounds:
        return _settle(turn, "replay", "nobody has a newer snapshot")
    if not state.chain.announces(message.round, message.root):
        return _settle(turn, "replay", "the offered snapshot's root is in no signed entry")
    turn.set(catch=replace(state.catch, round=message.round, root=message.root, size=message.size))
    turn.do(FetchSnapshot(message.round, message.root, message.size, donors, state.relay))


def _on_fetching(turn: Turn, event: Fetching) -> None:
    """The link is measured: choose, or repent."""
    state, catch = turn.state, turn.state.catch
    if catch is None or not catch.root or catch.way == "replay" or event.rate <= 0:
        return
    size = max(event.total, 1)
    link = (size - event.done) / event.rate
    by_snapshot = link + size / LOAD_RATE + max(state.chain.round - catch.round, 0) * state.pace
    by_replay = (state.chain.round - state.rounds) * state.pace
    left = state.chain.round - state.rounds
    words = (
        f"replay of {rounds(left)} at {state.pace:.2f} s takes {by_replay:.0f} s; snapshot after "
        f"{rounds(catch.round)}, {size / 1e6:.0f} MB at {event.rate / 1e6:.1f} MB/s, and "
        f"{rounds(max(state.chain.round - catch.round, 0))} more {by_snapshot:.0f} s"
    )
    if not catch.way and (by_snapshot < CLEARLY * by_replay or _forced(state)):
        turn.set(catch=replace(catch, way="snapshot"))
        _tell(turn, "snapshot", words)
    elif not _forced(state) and by_snapshot > (REPENT if catch.way else CLEARLY) * by_replay:
        turn.do(StopFetch())
        _settle(turn, "replay", words)


def _on_fetched(turn: Turn, event: Fetched) -> None:
    """The snapshot lies in this node's folder, checked; the engine takes it like one of its own."""
    _hold(turn, Held(event.round, event.root, event.size, event.entry))
    if turn.state.catch is None:
        return
    turn.set(catch=None, catch_later=turn.state.now + LATER)
    if turn.state.rounds < event.round:
        turn.rewind()
    _tell(turn, "snapshot loaded", event.words)


def _on_fetch_failed(turn: Turn, event: FetchFailed) -> None:
    catch = turn.state.catch
    if catch is not None:
        _settle(turn, "replay", f"the snapshot could not be fetched: {event.reason}")
        if catch.way:
            turn.set(catch_later=turn.state.now + MUCH_LATER)


def _settle(turn: Turn, way: str, reason: str) -> None:
    turn.set(catch=None, catch_later=turn.state.now + LATER)
    _tell(turn, way, reason)


def _tell(turn: Turn, way: str, reason: str) -> None:
    turn.note("catch-up", way=way, reason=reason)
    turn.send(CatchUp(way, reason))


# ---------------------------------------------------------------- peers


def _on_reached(turn: Turn, event: PeerReached) -> None:
    turn.note("peer", key=event.key.hex()[:16], way=event.way, reason=event.reason)
    turn.send(PeerWay(event.key, event.way, event.reason))


def _on_poisoned(turn: Turn, event: PeerPoisoned) -> None:
    turn.note("peer", key=event.key.hex()[:16], part=event.part, reason=event.reason)
    turn.send(PeerFault(event.key, event.root, event.part, event.reason))


def _on_moved(turn: Turn, event: Moved) -> None:
    turn.set(about=replace(turn.state.about, addresses=event.addresses))
    if turn.state.joined:
        turn.send(Reach(event.addresses))


HANDLERS: dict[type[Message], Callable[[Turn, Any], None]] = {
    Snapshots: _on_snapshots,
    Donors: _on_donors,
    WrongFile: _on_wrong_file,
}
ON_EVENT: dict[type[Event], Callable[[Turn, Any], None]] = {
    Saved: _on_saved,
    Fetching: _on_fetching,
    Fetched: _on_fetched,
    FetchFailed: _on_fetch_failed,
    PeerReached: _on_reached,
    PeerPoisoned: _on_poisoned,
    Moved: _on_moved,
}
