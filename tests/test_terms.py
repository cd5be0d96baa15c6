"""Which of two coordinators of different keys stays: by eras, whatever number a start has given either."""

from __future__ import annotations

import pytest

from coordinator.terms import ERA
from protocol.entries import parse
from protocol.terms import EXIT_YIELDED
from tests.actors import COORDINATOR, SimCoordinator
from tests.test_succession import (
    FIRST,
    HEIR,
    OTHER,
    committed,
    lose_coordinator,
    move,
    raws_of,
    succeed,
    tips,
    world_of,
)
from tests.world import World


def two_successors(world: World) -> tuple[SimCoordinator, SimCoordinator]:
    """Both wait, each with a key of its own; the first one is in charge."""
    committed(world, 2)
    lose_coordinator(world)
    ledger = raws_of(world)
    one, two = succeed(world, ledger, "one", HEIR), succeed(world, ledger, "two", OTHER)
    world.coordinator, world.failing = one, True
    return one, two


def yielded(ruler: SimCoordinator) -> bool:
    return ruler.stopped is not None and ruler.stopped[1] == EXIT_YIELDED


@pytest.mark.parametrize("met_by", ["the one that waits", "the one at work"])
def test_one_that_waits_and_was_started_again_stops_nobody_at_work(met_by: str) -> None:
    """Its second start has a higher number, and has signed no more than its first."""
    world = world_of(nodes=4, rounds=40, paces=(0.1,))
    one, two = two_successors(world)
    two.kill()
    two.start()
    assert (one.state.term, two.state.term) == (ERA, ERA + 1)
    move(world, "one", FIRST, "node-1", "node-2")
    move(world, "two", "node-3")
    committed(world, 6)
    if met_by == "the one at work":
        two.kill()
        two.stopped = ("its operator stopped it", 0)
        move(world, "one", "node-3")
    else:
        move(world, "two", FIRST, "node-1")
        world.run(until=world.now + 10)
        assert yielded(two), "the nodes that answered the other count for that one"
        move(world, "one")
    world.run()
    assert one.state.chain.ended and len(tips(world)) == 1


def test_one_that_yielded_takes_over_in_a_later_era() -> None:
    """The other has signed in a term that nobody has shown, and is lost with it."""
    world = world_of(nodes=4, rounds=40, paces=(0.1,))
    one, two = two_successors(world)
    move(world, "one")
    committed(world, 4)
    for name in list(world.nodes)[1:]:
        world.network.cut(name, world.now, world.now + 60.0)
    one.kill()
    one.start()
    while parse(raws_of(world)[-1]).term != ERA + 1:  # only the first node has heard of this start
        world.run(until=world.now + 0.05)
    one.kill()
    one.stopped = ("lost", 0)
    world.gone.add("one")
    world.nodes[FIRST].kill()
    world.run(until=world.now + 60)
    move(world, "two", "node-1", "node-2", "node-3")
    world.run(until=world.now + 5)
    assert yielded(two)
    two.start()  # as its last words say
    world.coordinator = two
    assert two.state.term == 2 * ERA, "not the number of the other's second start"
    move(world, "two", "node-1", "node-2", "node-3")
    committed(world, two.state.chain.round + 4)
    world.nodes[FIRST].start()
    move(world, "two", FIRST)
    world.run()
    assert two.state.chain.ended and len(tips(world)) == 1 and world.nodes[FIRST].disk.orphans


def test_after_failing_over_and_back_the_folder_between_stops() -> None:
    world = world_of(nodes=4, rounds=40, paces=(0.1,))
    committed(world, 2)
    lose_coordinator(world)
    heir = succeed(world, raws_of(world))
    move(world, "heir")
    committed(world, 4)
    heir.kill()
    heir.stopped = ("lost", 0)
    world.gone.add("heir")
    back = succeed(world, raws_of(world), "back", world.signing_key)
    move(world, "back")
    committed(world, 6)
    world.gone.discard("heir")
    world.failing = True
    heir.start()
    move(world, "heir", FIRST)
    world.run(until=world.now + 5)
    assert yielded(heir) and heir.state.chain.round == 4
    move(world, "back", FIRST)
    world.run()
    assert back.state.chain.ended and back.state.term == 2 * ERA and len(tips(world)) == 1


def test_entries_of_another_successor_end_the_wait_as_an_answer_to_it_does() -> None:
    """A node may hold them from a peer, without having answered it."""
    world = world_of(nodes=4, rounds=40, paces=(0.1,))
    old = world.coordinators[COORDINATOR]
    one, two = two_successors(world)
    move(world, "one")
    committed(world, 4)
    node = world.nodes["node-3"]
    node.kill()
    node.disk.term, node.disk.proof, node.home = old.state.term, old.state.term_proof, "two"
    node.start()
    world.run(until=world.now + 6)
    assert yielded(two) and two.state.lineage.waiting and two.state.term == ERA
    move(world, "one")
    world.run()
    assert one.state.chain.ended and len(tips(world)) == 1
