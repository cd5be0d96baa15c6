"""Coordinators that are lost, copied, started twice or come back: what the run does, case by case."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

import coordinator.events as ce
import esnode.events as ne
from coordinator import machine
from coordinator.membership import Verdict
from coordinator.terms import ERA
from protocol.chain import Chain
from protocol.entries import EntryKind, parse, public_key
from protocol.messages import Rehello
from protocol.terms import EXIT_YIELDED
from tests import people
from tests.actors import COORDINATOR, SimCoordinator
from tests.checkers import Violation
from tests.world import World

HEIR, OTHER = (hashlib.blake2b(name, digest_size=32).digest() for name in (b"heir", b"other"))
FIRST = "node-0"


def world_of(**options: Any) -> World:
    """A run whose lock trusts two more signing keys."""
    return World(
        **{"heirs": (public_key(HEIR), public_key(OTHER)), "rounds": 6, "ops": {"eval_every": 0}, **options}
    )


def lose_coordinator(world: World) -> None:
    """Its machine is gone, and the journal with it."""
    world.coordinator.kill()
    world.coordinator.stopped = ("lost", 0)
    world.gone.add(COORDINATOR)


def succeed(
    world: World, raws: Sequence[bytes], name: str = "heir", key: bytes = HEIR, how: str = "wait"
) -> SimCoordinator:
    """`esnode coordinator serve --recover-from` on a ledger."""
    heir = SimCoordinator(world, name, key)
    heir.journal = [ce.EntryAppended(height, raw) for height, raw in enumerate(raws)]
    heir.recover = how
    world.coordinators[name] = world.coordinator = heir
    world.checkers.journal_lost(name)
    heir.start()
    return heir


def copy_of(world: World, original: SimCoordinator, name: str) -> SimCoordinator:
    """A coordinator on a copy of another's folder."""
    twin = SimCoordinator(world, name, original.key)
    twin.journal = list(original.journal)
    world.checkers.journal_copied(original.name, name)
    world.coordinators[name] = twin
    return twin


def move(world: World, home: str, *names: str) -> None:
    """These nodes connect to another coordinator, by a new invite."""
    for name in names or world.nodes:
        sim = world.nodes[name]
        sim.home = home
        if sim.up:
            sim.step(ne.Received(sim.clock, Rehello()))


def committed(world: World, round: int, limit: float = 200.0) -> None:
    """Go on until so many rounds are committed by the coordinator in charge."""
    while world.coordinator.state.chain.round < round:
        assert world.now < limit, world.lines[-20:]
        world.run(until=world.now + 0.05)


def raws_of(world: World, name: str = FIRST) -> list[bytes]:
    return list(world.nodes[name].disk.raws)


def tips(world: World) -> set[bytes]:
    return {sim.disk.raws[-1] for sim in world.nodes.values()}


# ---------------------------------------------------------------- a successor


def test_a_successor_goes_on_where_the_nodes_are() -> None:
    world = world_of()
    committed(world, 2)
    lose_coordinator(world)
    old = raws_of(world)[:3]  # the ledger somebody kept is older than what the nodes hold
    heir = succeed(world, old)
    assert heir.state.lineage.waiting
    held = max(len(sim.disk.raws) for sim in world.nodes.values())
    move(world, "heir")
    world.run()
    chain = heir.state.chain
    assert chain.ended and chain.round == 6 and len(tips(world)) == 1
    assert [entry.term for entry in chain.entries[:held]] == [1] * held, "nothing the nodes held is lost"
    assert chain.term == ERA and not heir.state.lineage.orphaned


def test_a_successor_waits_for_those_who_did_the_recent_work() -> None:
    world = world_of(paces=(0.02, 1.0, 1.0))  # node-0 does nearly everything
    committed(world, 3)
    lose_coordinator(world)
    heir = succeed(world, raws_of(world, "node-1"))
    move(world, "heir", "node-1", "node-2")
    world.run(until=world.now + 30)
    assert heir.state.lineage.waiting and heir.state.chain.round == 3
    status = world.status()
    assert status["state"] == "recovering" and "not heard: node-0" in status["reason"]
    move(world, "heir", "node-0")
    world.run()
    assert heir.state.chain.ended and len(tips(world)) == 1


def test_what_a_revoked_node_evaluated_is_waited_for_by_nobody() -> None:
    world = world_of(paces=(0.02, 1.0, 1.0))  # node-0 does nearly everything
    committed(world, 3)
    world.failing = True
    people.revoke(world, FIRST, world.now, "it lies")
    committed(world, 4)
    lose_coordinator(world)
    world.gone.add(FIRST)
    heir = succeed(world, raws_of(world, "node-1"))
    move(world, "heir", "node-1", "node-2")
    world.run()
    assert heir.state.chain.ended


def test_an_answer_counts_once_the_node_keeps_it() -> None:
    """Else the node could answer a second successor, and both would begin in one term."""
    world = world_of(paces=(0.02, 1.0, 1.0))  # node-0 does nearly everything
    committed(world, 3)
    lose_coordinator(world)
    ledger = raws_of(world, "node-1")
    one = succeed(world, ledger, "one", HEIR)
    world.nodes[FIRST].full = True
    move(world, "one")
    world.run(until=world.now + 20)
    assert one.state.lineage.waiting and "not heard: node-0" in world.status()["reason"]
    assert world.count("membership", node=FIRST, what="returned"), "it says Hello, again and again"
    world.nodes[FIRST].full = False
    world.run()
    assert one.state.chain.ended and len(tips(world)) == 1
    assert world.count("membership", node=FIRST, what="answered") == 1


def test_a_successor_of_a_run_that_has_ended_tells_who_comes_and_names_who_does_not() -> None:
    world = world_of(rounds=2)
    world.network.cut("node-2", 0.5, 60.0)
    committed(world, 2)
    world.run(until=world.now + 1)
    lose_coordinator(world)
    world.failing = True
    heir = succeed(world, raws_of(world))
    world.run(until=59.0)
    move(world, "heir", "node-2")
    world.run(until=world.now + 5)
    assert raws_of(world, "node-2") == raws_of(world)
    world.run(until=world.now + machine.LINGER)
    assert heir.stopped == ("the run has ended after 2 rounds; not confirmed by node-0, node-1", 0)


def test_force_does_not_count() -> None:
    world = world_of(paces=(0.02, 1.0, 1.0))
    committed(world, 3)
    lose_coordinator(world)
    world.nodes[FIRST].kill()
    world.nodes[FIRST].stopped = ("gone", 0)
    world.gone.add(FIRST)
    heir = succeed(world, raws_of(world, "node-1"), how="force")
    move(world, "heir", "node-1", "node-2")
    world.run(until=world.now + 9)
    assert heir.state.lineage.waiting
    world.run()
    assert heir.state.chain.ended


def test_a_successor_that_is_killed_goes_on_waiting_or_working() -> None:
    world = world_of()
    committed(world, 2)
    lose_coordinator(world)
    heir = succeed(world, raws_of(world)[:3])
    first = heir.state.term
    world.run(until=world.now + 1)
    heir.kill()
    world.start(heir, 0.5)
    world.run(until=world.now + 2)
    assert heir.state.lineage.waiting
    move(world, "heir")
    committed(world, 4)
    heir.kill()
    world.start(heir, 0.5)
    world.run()
    assert heir.state.chain.ended and not heir.state.lineage.waiting
    assert first == ERA and heir.state.chain.term == ERA + 2, "its own starts stay in its era"


def test_a_key_that_an_amendment_trusts_may_succeed_and_then_take_the_lost_one_off_the_list() -> None:
    world = World(heirs=(), rounds=8, ops={"eval_every": 0})
    committed(world, 1)
    mine, theirs = public_key(world.signing_key), public_key(HEIR)
    world.coordinator.order(ce.AmendAsked(world.coordinator.clock, 3, None, None, None, (mine, theirs)))
    committed(world, 4)
    lose_coordinator(world)
    heir = succeed(world, raws_of(world))
    move(world, "heir")
    committed(world, 5)
    heir.order(ce.AmendAsked(heir.clock, 7, None, None, None, (theirs,)))
    world.run()
    assert heir.state.chain.ended and heir.state.chain.trusted == (theirs,) and len(tips(world)) == 1
    assert Chain(heir.state.chain.entries).signer == theirs


def test_a_key_whose_amendment_is_not_in_force_yet_may_not_succeed() -> None:
    world = World(heirs=(), rounds=8, ops={"eval_every": 0})
    committed(world, 1)
    keys = (public_key(world.signing_key), public_key(HEIR))
    world.coordinator.order(ce.AmendAsked(world.coordinator.clock, 6, None, None, None, keys))
    committed(world, 3)
    lose_coordinator(world)
    world.failing = True
    heir = succeed(world, raws_of(world))
    assert heir.stopped is not None and "does not trust this coordinator's signing key" in heir.stopped[0]


# ---------------------------------------------------------------- dead branches


def apart(world: World) -> tuple[SimCoordinator, SimCoordinator]:
    """The old coordinator goes on with node-0, a successor begins with the others: (old, heir)."""
    old = world.coordinator
    committed(world, 2)
    heir = succeed(world, raws_of(world, "node-1"))
    move(world, "heir", "node-1", "node-2")
    world.run(until=world.now + 30)
    return old, heir


def test_a_node_on_a_dead_branch_goes_back_and_the_entries_are_named() -> None:
    world = world_of(rounds=30, paces=(0.3, 0.1, 0.1))
    world.checkers.recovering = True
    world.failing = True
    old, heir = apart(world)
    old.kill()
    old.stopped = ("lost", 0)
    root = heir.state.lineage.roots
    orphaned = raws_of(world)[root:]
    move(world, "heir", FIRST)
    world.run(until=world.now + 10)
    sim = world.nodes[FIRST]
    assert sim.disk.orphans == [(root, tuple(orphaned))]
    (named,) = [o for o in heir.state.lineage.orphaned if o.name == FIRST]
    assert (named.first, named.last - named.first + 1) == (root, len(orphaned))
    assert world.count("succession", what="leaves behind", node=FIRST) == 1
    assert world.count("orphans", first=root) == 1
    world.run()
    assert heir.state.chain.ended and len(tips(world)) == 1


def forced_low(world: World, key: bytes = HEIR) -> SimCoordinator:
    """A forced successor begins on an old ledger, then adopts what node-1 holds; node-0 holds one more."""
    committed(world, 4)
    world.run(until=world.now + 0.5)
    lose_coordinator(world)
    held, low = raws_of(world), 3
    for name, keep in ((FIRST, len(held)), ("node-1", len(held) - 1), ("node-2", low)):
        world.nodes[name].kill()
        world.nodes[name].tear(keep, damage=False)
    heir = succeed(world, held[:low], key=key, how="force")
    world.run(until=world.now + 12)
    assert heir.state.lineage.roots == low and not heir.state.lineage.waiting
    for name in ("node-1", "node-2"):
        world.nodes[name].home = "heir"
        world.nodes[name].start()
    committed(world, 5)
    assert raws_of(world, "node-1")[: len(held) - 1] == held[:-1]
    return heir


@pytest.mark.parametrize("same", [False, True], ids=["another key", "the lost one's key"])
def test_a_node_goes_back_that_holds_more_than_a_forced_successor_adopted_after_it_began(same: bool) -> None:
    world = world_of(nodes=3, rounds=8)
    heir = forced_low(world, world.signing_key if same else HEIR)
    held = raws_of(world)
    world.nodes[FIRST].home = "heir"
    world.nodes[FIRST].start()
    world.run()
    assert world.nodes[FIRST].disk.orphans == [(len(held) - 1, (held[-1],))]
    (named,) = heir.state.lineage.orphaned
    assert (named.name, named.first, named.term) == (FIRST, len(held) - 1, 1)
    assert heir.state.chain.ended and len(tips(world)) == 1


def test_a_copy_of_a_successor_that_signs_behind_what_it_adopted_stops_both() -> None:
    world = world_of(nodes=3, rounds=40)
    heir = forced_low(world)
    clone = copy_of(world, heir, "clone")
    world.failing = True
    clone.start()
    move(world, "clone", "node-2")
    world.run(until=world.now + 25)
    assert clone.state.chain.term == ERA + 1 and heir.state.chain.term == ERA
    move(world, "heir", "node-2")
    world.run(until=world.now + 5)
    assert heir.stopped is not None and "two copies of this coordinator went separate ways" in heir.stopped[0]


def test_an_old_coordinator_that_comes_back_stops_when_it_meets_the_new_term() -> None:
    world = world_of()
    committed(world, 2)
    old = world.coordinator
    lose_coordinator(world)
    heir = succeed(world, raws_of(world))
    move(world, "heir")
    committed(world, 3)
    world.gone.discard(COORDINATOR)
    world.failing = True
    old.start()
    move(world, COORDINATOR, FIRST)
    world.run(until=world.now + 5)
    assert old.stopped is not None and old.stopped[1] == EXIT_YIELDED
    taken = f"term {heir.state.term} (key {public_key(HEIR).hex()[:16]}"
    assert taken in old.stopped[0] and "node-0 answered" in old.stopped[0]
    move(world, "heir", FIRST)
    world.run()
    assert heir.state.chain.ended and len(tips(world)) == 1


@pytest.mark.parametrize("answered", [True, False], ids=["a node answered it", "a node holds its entries"])
def test_an_old_coordinator_stops_when_a_successor_has_its_own_key(answered: bool) -> None:
    """It goes above its own key's terms, or a restored backup could not go on, but only within its era."""
    world = world_of(rounds=8)
    committed(world, 2)
    old = world.coordinator
    lose_coordinator(world)
    heir = succeed(world, raws_of(world), key=world.signing_key)
    move(world, "heir")
    committed(world, 3)
    world.gone.discard(COORDINATOR)
    world.failing = True
    if not answered:  # it had them from a peer
        world.nodes[FIRST].kill()
        world.nodes[FIRST].disk.term, world.nodes[FIRST].disk.proof = old.state.term, old.state.term_proof
        world.nodes[FIRST].start()
    old.start()
    move(world, COORDINATOR, FIRST)
    world.run(until=world.now + 5)
    assert old.stopped is not None and old.stopped[1] == EXIT_YIELDED
    assert f"has taken term {heir.state.term} (key" in old.stopped[0]
    assert "with this one's signing key" in old.stopped[0]
    assert old.state.chain.round == 2, "it has not gone on behind it"
    old.start()  # as a service does
    move(world, COORDINATOR, FIRST)
    world.run(until=world.now + 5)
    assert old.stopped is not None and old.state.term < ERA
    move(world, "heir", FIRST)
    world.run()
    assert heir.state.chain.ended and len(tips(world)) == 1


def test_a_successor_is_above_terms_that_nobody_has_shown_it() -> None:
    """The lost one had restarted and signed for a node that is away while the others answer."""
    world = world_of(nodes=4, rounds=8, paces=(0.1,))
    committed(world, 2)
    for name in list(world.nodes)[1:]:
        world.network.cut(name, world.now, world.now + 60.0)
    world.coordinator.kill()
    world.coordinator.start()
    while parse(raws_of(world)[-1]).term == 1:
        world.run(until=world.now + 0.05)
    kept, left = raws_of(world, "node-1"), raws_of(world)
    lose_coordinator(world)
    world.nodes[FIRST].kill()
    world.run(until=world.now + 60)
    heir = succeed(world, kept)
    move(world, "heir")
    committed(world, 4)
    world.nodes[FIRST].start()
    world.run()
    assert heir.state.chain.ended and len(tips(world)) == 1
    assert world.nodes[FIRST].disk.orphans == [(len(kept), tuple(left[len(kept) :]))]


# ---------------------------------------------------------------- copies


def test_an_old_copy_of_the_folder_adopts_what_its_nodes_hold() -> None:
    world = world_of()
    committed(world, 1)
    records = len(world.coordinator.journal)
    committed(world, 3)
    old = world.coordinator
    old.kill()
    held = max((raws_of(world, name) for name in world.nodes), key=len)
    old.journal = old.journal[:records]
    world.checkers.journal_lost(old.name)
    old.start()
    world.run()
    assert old.state.chain.ended and len(tips(world)) == 1
    assert raws_of(world)[: len(held)] == held and old.state.chain.term == 2


def test_a_cloned_folder_that_signs_the_same_round_stops_everything_and_prints_both() -> None:
    world = world_of(rounds=30, nodes=4, paces=(0.1,))
    committed(world, 2)
    first = world.coordinator
    first.kill()
    clone = copy_of(world, first, "clone")
    world.failing = True
    first.start()
    clone.start()
    assert first.state.term == clone.state.term and first.state.nonce != clone.state.nonce
    for sim in list(world.nodes.values())[:2]:
        move(world, "clone", sim.name)
    world.run(until=world.now + 10)
    move(world, COORDINATOR, "node-0")
    world.run(until=world.now + 5)
    assert first.stopped is not None and first.stopped[1] == 1
    words = first.stopped[0]
    assert "signed two histories" in words and "a copied data folder or key" in words
    assert first.state.nonce.hex() in words and clone.state.nonce.hex() in words
    assert public_key(world.signing_key).hex()[:16] in words


def test_after_a_cloned_folder_a_successor_goes_on_from_the_ledger_that_was_kept() -> None:
    """The last words of both copies say so, and nodes of the other branch come back to it."""
    world = world_of(rounds=30, nodes=4, paces=(0.1,))
    committed(world, 2)
    first = world.coordinator
    first.kill()
    clone = copy_of(world, first, "clone")
    world.failing = True
    first.start()
    clone.start()
    for name in ("node-0", "node-1"):
        move(world, "clone", name)
    world.run(until=world.now + 10)
    move(world, COORDINATOR, "node-0")
    world.run(until=world.now + 5)
    assert first.stopped is not None and "signed two histories" in first.stopped[0]
    clone.kill()
    clone.stopped = ("its operator stopped it", 0)
    world.gone.update((COORDINATOR, "clone"))
    kept, others = raws_of(world, "node-2"), raws_of(world, "node-0")
    heir = succeed(world, kept)
    for name, sim in world.nodes.items():
        sim.home = "heir"
        world.start(sim, 0.5 if name != "node-0" else 3.0)
    world.run()
    assert heir.state.chain.ended and len(tips(world)) == 1 and raws_of(world)[: len(kept)] == kept
    for name in ("node-0", "node-1"):
        assert world.nodes[name].disk.orphans, "what it leaves behind is kept"
    assert others[-1] in world.nodes["node-0"].disk.orphans[0][1]


def test_two_forced_successors_that_both_sign_stop_everything_and_are_called_two() -> None:
    """Nothing is copied there, unlike with a cloned folder; what helps is the same."""
    world = world_of(nodes=4, rounds=80, paces=(0.1,))
    committed(world, 2)
    lose_coordinator(world)
    ledger = raws_of(world)
    one = succeed(world, ledger, "one", HEIR, "force")
    two = succeed(world, ledger, "two", OTHER, "force")
    world.failing = True
    move(world, "one", FIRST, "node-1")
    move(world, "two", "node-2", "node-3")
    world.run(until=world.now + 20)
    assert one.state.chain.term == two.state.chain.term == ERA
    move(world, "one", "node-2")
    world.run(until=world.now + 5)
    assert one.stopped is not None and one.stopped[1] == 1
    words = one.stopped[0]
    assert (
        "signed two histories" in words and "Two coordinators of different keys took the same term" in words
    )
    assert "copied" not in words and "recover from the ledger you keep" in words
    assert all(public_key(key).hex()[:16] in words for key in (HEIR, OTHER))
    two.kill()
    two.stopped = ("its operator stopped it", 0)
    world.gone.update(("one", "two"))
    kept = raws_of(world, "node-3")
    heir = succeed(world, kept, "third", world.signing_key)
    for name, sim in world.nodes.items():
        sim.home = "third"
        world.start(sim, 0.5 if name == "node-3" else 1.0)
    world.run()
    assert heir.state.chain.ended and len(tips(world)) == 1 and raws_of(world)[: len(kept)] == kept
    assert heir.state.chain.term == 2 * ERA


LOST = World().signing_key


@pytest.mark.parametrize("keys", [(HEIR, OTHER), (LOST, HEIR), (HEIR, LOST), (LOST, LOST)])
def test_of_two_successors_at_most_one_begins(keys: tuple[bytes, bytes]) -> None:
    """Also where one or both have a copy of the lost coordinator's key."""
    world = world_of(nodes=4, rounds=80, paces=(0.1,))
    committed(world, 2)
    lose_coordinator(world)
    ledger = raws_of(world)
    one = succeed(world, ledger, "one", keys[0])
    two = succeed(world, ledger, "two", keys[1])
    assert one.state.term == two.state.term, "else one could begin above the other"
    world.failing = True
    move(world, "one", "node-0", "node-1", "node-2")
    move(world, "two", "node-3")
    world.coordinator = one
    world.run(until=world.now + 20)
    assert one.state.chain.round > 2 and two.state.lineage.waiting
    move(world, "two", "node-0")
    world.run(until=world.now + 5)
    assert two.stopped is not None and f"key {public_key(keys[0]).hex()[:16]}" in two.stopped[0]
    move(world, "one", "node-0", "node-3")
    world.run()
    assert one.state.chain.ended and len(tips(world)) == 1


def test_sybils_that_hide_the_newest_commits_do_not_count_for_more_than_their_work() -> None:
    world = world_of(paces=(0.02, 2.0, 2.0))  # node-0 is honest and does the work, the others are one person
    committed(world, 4)
    lose_coordinator(world)
    for name in ("node-1", "node-2"):  # they claim to hold an old beginning only
        sim = world.nodes[name]
        sim.kill()
        sim.disk.raws = sim.disk.raws[:4]
    ledger = raws_of(world)[:4]
    world.run(until=world.now + 1)
    heir = succeed(world, ledger)
    for name in ("node-1", "node-2"):
        world.nodes[name].start()
    move(world, "heir", "node-1", "node-2")
    world.run(until=world.now + 30)
    assert heir.state.lineage.waiting, "two of three nodes are not more than half of the work"
    held = raws_of(world)
    move(world, "heir", FIRST)
    world.run()
    assert raws_of(world, "node-1")[: len(held)] == held and heir.state.chain.ended
    assert sum(entry.kind is EntryKind.COMMIT for entry in heir.state.chain.entries) == 6
    assert not heir.state.lineage.orphaned


# ---------------------------------------------------------------- the checkers bite


def test_a_successor_that_begins_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.answers.answered", lambda state: Verdict(True, "who cares"))
    world = world_of(paces=(0.02, 1.0, 1.0))
    committed(world, 3)
    lose_coordinator(world)
    succeed(world, raws_of(world, "node-1"))
    move(world, "heir", "node-1", "node-2")
    with pytest.raises(Violation, match="begins although"):
        world.run(until=world.now + 30)


def test_a_successor_that_chooses_the_weaker_branch_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.succession.stronger", lambda one, other: False)
    world = world_of()
    committed(world, 2)
    lose_coordinator(world)
    succeed(world, raws_of(world)[:3])
    move(world, "heir")
    with pytest.raises(Violation, match="a node showed"):
        world.run(until=world.now + 30)


def test_a_journal_that_lost_entries_is_found_out() -> None:
    world = world_of()
    committed(world, 2)
    world.coordinator.kill()
    last = max(k for k, r in enumerate(world.coordinator.journal) if isinstance(r, ce.EntryAppended))
    del world.coordinator.journal[last]
    with pytest.raises(Violation, match="other entries than it flushed"):
        world.coordinator.start()


def test_two_starts_in_one_term_are_found_out() -> None:
    world = world_of(rounds=30)
    committed(world, 2)
    world.coordinator.kill()
    clone = copy_of(world, world.coordinator, "clone")
    world.failing, world.checkers.histories.cloned = True, False
    world.coordinator.start()
    clone.start()
    move(world, "clone", FIRST)
    with pytest.raises(Violation, match="started twice"):  # a lone node is believed after WITNESS_WAIT
        world.run(until=world.now + 30)
