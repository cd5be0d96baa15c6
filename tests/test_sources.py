"""The ledger comes from any peer: where the coordinator is slow, silent or lacks it; never blindly."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from coordinator import donors
from esnode import events
from esnode.events import Apply, Store
from esnode.gleaner import Gleaner
from esnode.snapshotevents import FetchEntries, PeerEntries
from protocol import keys
from protocol.entries import Entry, parse
from protocol.messages import Commit, CoordBeat, Entries, Fetch
from protocol.peers import Donor, Neighbours, Reach
from tests.bench import LOCK, Bench, ledger
from tests.desk import Desk, key_of
from tests.donors import Exchange
from tests.runs import wait_for
from tests.world import World

PEERS = (Donor(key_of("n"), "n", ("tcp://10.0.0.1:4000",)),)  # on the roster of `bench.ledger`


def raws(entries: list[Entry]) -> tuple[bytes, ...]:
    return tuple(entry.raw for entry in entries)


def behind() -> tuple[Bench, list[Entry]]:
    """A joined node with peers, that knows of two commits it does not have."""
    entries = ledger(LOCK.digest, 55)
    bench = Bench()
    bench.join(entries[:2])
    bench.hear(Neighbours(PEERS))
    bench.hear(Commit(3, entries[3].raw))
    assert bench.sent(Fetch) == [Fetch(2, 256)] and not bench.all(FetchEntries)
    return bench, entries


def test_a_slow_coordinator_is_asked_again_and_a_peer_too() -> None:
    bench, entries = behind()
    bench.tick(2.1)
    assert bench.sent(Fetch) and bench.all(FetchEntries) == [FetchEntries(PEERS[0], 2, 256)]
    bench.step(PeerEntries(bench.now, PEERS[0].key, 2, raws(entries[2:])))
    assert bench.all(Store) == [Store(2, raws(entries[2:]))] and bench.all(Apply)
    assert not bench.all(FetchEntries), "nothing is missing any more"


def test_a_peer_is_asked_on_as_long_as_it_has_more() -> None:
    bench, entries = behind()
    bench.tick(2.1)
    bench.step(PeerEntries(bench.now, PEERS[0].key, 2, raws(entries[2:3])))
    assert bench.all(FetchEntries) == [FetchEntries(PEERS[0], 3, 256)]
    bench.step(PeerEntries(bench.now, PEERS[0].key, 3, ()))
    assert not bench.all(FetchEntries), "it has no more"
    bench.tick(1.0)
    bench.tick(1.2)
    bench.tick(2.1)
    assert bench.all(FetchEntries) == [FetchEntries(PEERS[0], 3, 256)], "but may have it later"


def test_while_the_coordinator_is_silent_peers_are_asked_now_and_then() -> None:
    bench = Bench()
    entries = ledger(LOCK.digest, 55)
    bench.join(entries[:3])
    bench.step(events.EntriesApplied(bench.now, (LOCK.digest, LOCK.digest, 55), 12))
    bench.hear(Neighbours(PEERS))
    asked = []
    for _ in range(200):
        bench.tick(0.25)
        asked += [bench.now - 10.0] * len(bench.all(FetchEntries))
        if bench.all(FetchEntries):
            bench.step(PeerEntries(bench.now, PEERS[0].key, 3, ()))
    assert 12 < asked[0] < 13 and all(9 < b - a < 11 for a, b in pairwise(asked))
    bench.step(PeerEntries(bench.now, PEERS[0].key, 3, raws(entries[3:])))
    assert bench.state.chain.height == 4, "and what they have is taken"


def test_what_a_peer_forges_is_not_taken_and_it_is_not_asked_again() -> None:
    bench, entries = behind()
    bench.tick(2.1)
    forged = entries[2].raw[:-1] + bytes([entries[2].raw[-1] ^ 1])
    bench.step(PeerEntries(bench.now, PEERS[0].key, 2, (forged,)))
    assert bench.stop is None and not bench.all(Store) and not bench.state.sources.peers
    bench.tick(5.0)
    assert not bench.all(FetchEntries)
    bench.hear(Entries(2, raws(entries[2:])))
    assert bench.state.chain.height == 4


def test_a_peer_does_not_lead_a_node_after_a_coordinator_that_was_replaced() -> None:
    """It has answered a later term, and knows of no more entries than it has."""
    entries = ledger(LOCK.digest, 55)
    bench = Bench()
    bench.welcome(entries[:3], term=4)
    bench.hear(Entries(0, raws(entries[:3])))
    bench.hear(Neighbours(PEERS))
    bench.tick(13.0)
    assert not bench.state.joined and bench.all(FetchEntries)
    bench.step(PeerEntries(bench.now, PEERS[0].key, 3, raws(entries[3:])))
    assert bench.state.chain.height == 3 and bench.stop is None
    bench.welcome(entries, term=4)
    bench.step(PeerEntries(bench.now, PEERS[0].key, 3, raws(entries[3:])))
    assert bench.state.chain.height == 4, "the coordinator of that term has them"


def test_who_is_not_on_the_roster_is_not_asked() -> None:
    bench, _ = behind()
    bench.hear(Neighbours((Donor(b"s" * 32, "stranger", ("tcp://10.0.0.1:4000",)),)))
    bench.tick(2.1)
    assert bench.sent(Fetch) and not bench.all(FetchEntries)


def test_the_coordinator_names_a_few_peers_that_can_be_dialled() -> None:
    made = Desk(members=2)
    made.join("a", "b", "c")
    made.say("a", Reach(("tcp://10.0.0.1:1",)))
    assert not made.sent(Neighbours, "a"), "nobody else can be dialled"
    made.say("b", Reach(()))
    (near,) = made.sent(Neighbours, "b")
    assert [peer.name for peer in near.peers] == ["a"]
    made.say("c", Reach(("tcp://10.0.0.3:1",)))
    (near,) = made.sent(Neighbours, "a")
    assert [peer.name for peer in near.peers] == ["c"], "who came first hears of it too"
    assert donors.neighbours(made.state, key_of("c"))[0].addresses == ("tcp://10.0.0.1:1",)


def test_a_silent_coordinator_and_one_node_that_has_the_last_commit() -> None:
    """It reached one node only, and was killed for good: a successor finds it on every node."""
    world = World(nodes=3, rounds=6)
    world.dialled = True
    while world.coordinator.state.chain.round < 2:
        world.run(until=world.now + 0.05)
    for name in ("node-1", "node-2"):
        world.network.hold(name, Commit, float("inf"), times=4)
        world.network.hold(name, Entries, float("inf"), times=4)
        world.network.hold(name, CoordBeat, float("inf"), times=50)
    while world.coordinator.state.chain.round < 3:
        world.run(until=world.now + 0.05)
    height = world.coordinator.state.chain.height
    world.run(until=world.now + 0.1)
    world.coordinator.kill()
    world.coordinator.stopped = ("lost", 0)
    world.gone.add("coordinator")
    lacking = [name for name in world.nodes if len(world.nodes[name].disk.raws) < height]
    assert lacking
    world.run(until=world.now + 40)
    assert all(len(world.nodes[name].disk.raws) >= height for name in lacking)
    assert world.count("ledger", what="fetched from a peer")


def test_entries_come_over_a_real_socket(tmp_path: Path) -> None:
    with Exchange(tmp_path) as exchange:
        exchange.donor("a")
        gleaner = Gleaner(keys.read_curve(exchange.node("j") / "curve.key"))
        peer = Donor(exchange.keys["a"], "a", exchange.addresses["a"])
        gleaner.ask(FetchEntries(peer, 1, 256), time.monotonic())
        (answer,) = wait_for(lambda: gleaner.events(time.monotonic()), 10)
        assert (answer.first, answer.key) == (1, peer.key) and [parse(raw) for raw in answer.raws]
        gleaner.ask(FetchEntries(peer, 2, 256), time.monotonic())
        (answer,) = wait_for(lambda: gleaner.events(time.monotonic()), 10)
        assert answer.raws == (), "a peer without more says so"
        gleaner.close()
