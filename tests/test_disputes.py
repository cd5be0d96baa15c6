"""Two digests of one state: found in the round, settled by replay, whoever is in the majority."""

from __future__ import annotations

from typing import Any

import pytest

import coordinator.events as ce
from coordinator import claims, machine
from protocol.entries import CommitBody
from protocol.messages import Applied, Bye, DigestAsk, Rederive, Rederived, Refuse, Release, TensorDigests
from tests.desk import Desk, hello, key_of
from tests.world import World

RIGHT, WRONG, OTHER = 77, 78, 79


def second_round(*names: str, **options: Any) -> Desk:
    """A desk whose first round is committed: D of the second state is open."""
    desk = Desk(members=4, repeatable=False, **options)
    desk.join(*names)
    while desk.state.chain.round == 0:
        name = next(n for n in names if desk.assigned(n))
        desk.result(name, desk.assigned(name)[0])
    return desk


def work(desk: Desk, name: str, digest: int) -> None:
    """A node measures what it is given on a state with this digest."""
    while desk.state.chain.round == 1 and desk.assigned(name):
        desk.result(name, desk.assigned(name)[0], digest=digest)


def rederived(desk: Desk, name: str, held: int, derived: int, **changes: Any) -> tuple[ce.Effect, ...]:
    fields = {
        "commits": desk.state.chain.round, "pieces": (0,), "held": (held,), "derived": (derived,),
        "digest": derived, "contradicted": 0, "by": "kernel reference, esnode 0.1", "reason": "asked",
        "since": 0,
    }  # fmt: skip
    return desk.say(name, Rederived(**{**fields, **changes}))


def proof(desk: Desk) -> dict[str, Any]:
    section: dict[str, Any] = machine.status(desk.state)["proof"]
    return section


# ---------------------------------------------------------------- signing D


def test_d_is_signed_when_a_second_node_says_it() -> None:
    desk = second_round("a", "b")
    desk.applied("a", RIGHT)
    assert desk.state.digest is None
    assert proof(desk)["reason"] == "one node has told its digest, b not yet"
    desk.applied("b", RIGHT)
    assert desk.state.digest == RIGHT and proof(desk)["reason"] == "2 nodes have the same digest"


def test_a_lone_node_is_believed_at_once_and_a_silent_second_one_is_not_waited_for_for_ever() -> None:
    alone = second_round("a")
    alone.applied("a", RIGHT)
    assert alone.state.digest == RIGHT
    desk = second_round("a", "b")
    for _ in range(3):
        desk.applied("a", RIGHT)
        desk.beat("b")
        desk.tick(claims.WITNESS_WAIT / 2)
    assert desk.state.digest == RIGHT


def test_after_a_restart_the_first_node_to_return_is_not_believed_alone() -> None:
    desk = second_round("a", "b")
    work(desk, "b", RIGHT)
    desk.restart()
    desk.join("a")
    desk.applied("a", WRONG)
    assert desk.state.digest is None
    desk.join("b")
    desk.applied("b", RIGHT)
    assert desk.state.digest is None and desk.state.proof.dispute is not None, "it is settled by replay"


def test_after_a_restart_those_who_stay_away_are_not_waited_for_for_ever() -> None:
    desk = second_round("a", "b")
    desk.restart()
    desk.join("a")
    for _ in range(3):
        desk.applied("a", RIGHT)
        desk.tick(claims.WITNESS_WAIT / 2)
    assert desk.state.digest == RIGHT


# ---------------------------------------------------------------- disputes


def disputed(*names: str) -> Desk:
    """The first node of the names has another digest than the rest; all have told their pieces."""
    desk = second_round(*names)
    for name in names[1:]:
        desk.applied(name, RIGHT)
    desk.applied(names[0], WRONG)
    desk.say(names[0], TensorDigests(1, 0, 1, (WRONG,)))
    desk.say(names[1], TensorDigests(1, 0, 1, (RIGHT,)))
    return desk


def test_one_node_of_each_side_is_asked_for_its_pieces_and_nothing_is_signed_meanwhile() -> None:
    desk = second_round("a", "b", "c")
    desk.applied("a", RIGHT)
    desk.applied("b", WRONG)
    assert {m.commits for m in desk.sent(DigestAsk)} == {1} and len(desk.sent(DigestAsk)) == 2
    assert "replay decides" in desk.sent(DigestAsk, "b")[0].reason
    desk.applied("c", RIGHT)
    for name, digest in (("a", RIGHT), ("b", WRONG), ("c", RIGHT)):
        work(desk, name, digest)
    assert desk.state.round is not None and not desk.state.round.unsettled, "every member is in"
    assert desk.state.chain.round == 1, "and nothing is signed"
    shown = proof(desk)
    assert shown["dispute"]["sides"] == {f"{RIGHT:016x}": ["a", "c"], f"{WRONG:016x}": ["b"]}
    assert shown["reason"] == "two digests of this state, replay decides since 0 s, a, b to answer"
    assert machine.status(desk.state)["reason"] == f"every member is in; {shown['reason']}"


def test_who_changes_was_at_fault_and_its_rewards_are_measured_again() -> None:
    desk = disputed("a", "b", "c")
    assert [m.pieces for m in desk.sent(Rederive, "a")] == [(0,)]
    work(desk, "a", WRONG)
    assert desk.state.proof.measured == {0: WRONG}
    rederived(desk, "a", WRONG, RIGHT)
    assert desk.state.proof.dispute is None and desk.state.digest == RIGHT and desk.stop is None
    (fault,) = [node["fault"] for node in machine.status(desk.state)["nodes"] if node["name"] == "a"]
    assert "model.weight [0 .. 63] held" in fault and "kernel reference" in fault
    for name in "abc":
        work(desk, name, RIGHT)
    body = desk.state.chain.commits[1].body
    assert desk.state.chain.round == 2 and desk.state.chain.commits[1].digest == RIGHT
    assert isinstance(body, CommitBody) and len(body.members) == 4
    rederived(desk, "a", WRONG, RIGHT, commits=1)
    assert machine.status(desk.state)["counters"]["faults"] == 1, "said twice, counted once"


def test_the_majority_does_not_make_a_digest_right() -> None:
    desk = disputed("a", "b", "c")  # b and c agree, a differs
    rederived(desk, "a", WRONG, WRONG)
    assert desk.state.proof.dispute is not None
    rederived(desk, "b", RIGHT, WRONG)
    assert desk.sent(Rederive, "c"), "its fellow was wrong: it is asked itself"
    rederived(desk, "c", RIGHT, WRONG)
    assert desk.state.digest == WRONG and desk.state.proof.dispute is None and desk.stop is None


def test_two_confirmed_sides_stop_the_run_and_say_what_differs() -> None:
    desk = disputed("a", "b")
    rederived(desk, "a", WRONG, WRONG)
    rederived(desk, "b", RIGHT, RIGHT)
    assert desk.stop is not None and desk.stop.code == 1 and len(desk.sent(Bye)) == 2
    for words in ("model.weight [0 .. 63]", f"{WRONG:016x}", f"{RIGHT:016x}", "kernel reference, esnode 0.1"):
        assert words in desk.stop.reason


def test_a_checkpoint_settles_who_changes_and_the_base_who_does_not() -> None:
    """Replay from a checkpoint ends a dispute in which one side changes; it cannot stop the run."""
    desk = disputed("a", "b")
    assert [m.base for m in desk.sent(Rederive)] == [0, 0]
    rederived(desk, "a", WRONG, RIGHT, since=1)
    assert desk.state.proof.dispute is None and desk.state.digest == RIGHT and desk.stop is None
    desk = disputed("a", "b")
    rederived(desk, "b", RIGHT, RIGHT, since=0)
    rederived(desk, "a", WRONG, WRONG, since=1)  # its checkpoint may hold the same damage
    assert desk.stop is None and [(m.base, m.pieces) for m in desk.sent(Rederive, "a")] == [(1, (0,))]
    assert not desk.sent(Rederive, "b"), "it has replayed from the base"
    rederived(desk, "a", WRONG, RIGHT)
    assert desk.state.proof.dispute is None and desk.state.digest == RIGHT and desk.stop is None


def test_two_sides_that_insist_from_the_base_too_stop_the_run() -> None:
    desk = disputed("a", "b")
    for name, digest in (("a", WRONG), ("b", RIGHT)):
        rederived(desk, name, digest, digest, since=1)
    assert desk.stop is None and [m.base for m in desk.sent(Rederive)] == [1, 1]
    for name, digest in (("a", WRONG), ("b", RIGHT)):
        rederived(desk, name, digest, digest, since=1)
    assert desk.stop is None, "said twice"
    rederived(desk, "a", WRONG, WRONG)
    rederived(desk, "b", RIGHT, RIGHT)
    assert desk.stop is not None and "replay confirms both" in desk.stop.reason


def test_who_vanishes_in_a_dispute_leaves_the_other_to_a_whole_rebuild() -> None:
    desk = second_round("a", "b")
    desk.applied("b", RIGHT)
    desk.applied("a", WRONG)
    asked: list[Rederive] = []
    for _ in range(5):
        desk.tick(5.0)
        asked += desk.sent(Rederive, "a")
        desk.beat("a")
    assert asked[0].pieces == ()
    rederived(desk, "a", WRONG, RIGHT, pieces=())
    assert desk.state.digest == RIGHT and desk.state.proof.dispute is None


def the_odd_one_gone() -> Desk:
    """Two digests of one state, and the only node with one of them has left: whole masters are rebuilt."""
    desk = second_round("a", "b", "c")
    for name, digest in (("a", WRONG), ("b", RIGHT), ("c", RIGHT)):
        desk.applied(name, digest)
    desk.say("a", Release("its owner needs it"))
    desk.tick(5.0)
    return desk


def test_a_rebuild_that_errs_is_asked_for_again_and_confirms_nothing() -> None:
    """Seed 4003: the other side had gone, and the first who rebuilt its whole master erred in that."""
    desk = the_odd_one_gone()
    assert [(m.pieces, m.base) for m in desk.sent(Rederive, "b")] == [((), 1)]
    rederived(desk, "b", RIGHT, OTHER, pieces=())
    assert [(m.pieces, m.base) for m in desk.sent(Rederive, "b")] == [((), 2)], "nobody else has that"
    assert desk.sent(Rederive, "c")
    rederived(desk, "c", RIGHT, RIGHT, pieces=())
    assert desk.stop is None and desk.state.proof.dispute is not None
    rederived(desk, "b", OTHER, RIGHT, pieces=())
    assert desk.stop is None and desk.state.proof.dispute is None and desk.state.digest == RIGHT
    assert desk.state.faults[key_of("b")].count == 2


def test_a_rebuild_that_comes_out_wrong_twice_is_a_side() -> None:
    desk = the_odd_one_gone()
    rederived(desk, "b", RIGHT, OTHER, pieces=())
    rederived(desk, "c", RIGHT, RIGHT, pieces=())
    rederived(desk, "b", OTHER, OTHER, pieces=())
    assert desk.stop is not None and "replay confirms both" in desk.stop.reason


def test_a_digest_that_contradicts_what_is_signed_leads_to_replay_and_then_to_a_stop() -> None:
    """The ledger's word is a side without nodes: only replay can take its part."""
    desk = Desk()
    desk.join("a")
    desk.say("a", Applied(1, desk.state.chain.entries[0].hash[:8], 12345, 3))
    assert desk.stop is None and desk.sent(Rederive, "a")[0].pieces == ()
    again = Desk()
    again.join("a")
    again.say("a", Applied(1, again.state.chain.entries[0].hash[:8], 12345, 3))
    rederived(again, "a", 12345, again.lock.digest, pieces=())
    assert again.stop is None and again.state.proof.dispute is None
    rederived(desk, "a", 12345, 12345, pieces=())
    assert desk.stop is not None and "a wrong digest was signed" in desk.stop.reason


def test_a_result_of_another_state_is_refused_and_not_held_against_the_member() -> None:
    desk = second_round("a", "b", "c")
    for name in "bc":
        desk.applied(name, RIGHT)
    rederived(desk, "b", RIGHT, RIGHT)
    unit = desk.assigned("a")[0]
    desk.applied("a", RIGHT)
    desk.result("a", unit, digest=WRONG)
    assert desk.state.proof.dispute is not None, "its word on D as well"
    desk.say("a", TensorDigests(1, 0, 1, (RIGHT,)))
    assert desk.state.proof.dispute is None, "read afresh, it agrees: an old word was on its way"


def test_faults_survive_a_restart_and_five_send_the_machine_away() -> None:
    desk = second_round("a", "b")
    for number in range(5):
        desk.say("a", Rederived(1, (), (), (), RIGHT, 0, "esnode 0.1", f"flip {number}", 0))
    assert desk.sent(Bye, "a") and "at fault 5 times" in desk.sent(Bye, "a")[0].reason
    desk.restart()
    assert desk.state.faults[key_of("a")].count == 5


def test_a_report_that_comes_twice_is_one_fault_and_its_old_word_is_not_heard() -> None:
    """Seed 700875: what a node said of its damage came again, after the dispute about that was settled."""
    desk = second_round("a", "b", "c")
    for name in "abc":
        desk.applied(name, RIGHT)
    report = Rederived(1, (), (), (), WRONG, 0, "esnode 0.1", "a flip; replay gives another digest", 0)
    desk.say("a", report)
    desk.say("a", TensorDigests(1, 0, 1, (WRONG,)))
    desk.say("b", TensorDigests(1, 0, 1, (RIGHT,)))
    rederived(desk, "a", WRONG, RIGHT)
    rederived(desk, "b", RIGHT, RIGHT)
    assert desk.state.proof.dispute is None
    count = desk.state.faults[key_of("a")].count
    desk.say("a", report)
    assert desk.state.faults[key_of("a")].count == count and desk.state.proof.dispute is None


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize("nodes", [1, 2, 10])
def test_a_bit_flipped_in_memory_is_found_in_that_round_and_mended(nodes: int) -> None:
    """Every unit and every update reads the master back first, so no reward is ever measured on it."""
    world = World(seed=13, nodes=nodes, rounds=6)
    world.run(until=3.5)
    round = world.coordinator.state.chain.round
    world.nodes["node-0"].flip()
    world.run()
    found = [f for who, kind, f in world.notes if kind == "dispute" and f.get("what") == "at fault"]
    assert [(f["node"], f["round"]) for f in found] in ([("node-0", round)], [("node-0", round + 1)])
    assert "model.weight changed in memory" in found[0]["reason"]
    assert all(sim.replica.digest == world.checkers.digest for sim in world.nodes.values())


@pytest.mark.parametrize("nodes", [2, 10])
def test_an_update_gone_wrong_is_found_in_that_round_and_never_enters_the_chain(nodes: int) -> None:
    """The checkers replay every signed D and every reward."""
    world = World(seed=14, nodes=nodes, rounds=6)
    world.run(until=3.5)
    round = world.coordinator.state.chain.round
    world.nodes["node-1"].miscompute()
    world.run()
    found = [f for _, kind, f in world.notes if kind == "dispute" and f.get("what") == "at fault"]
    assert [(f["node"], f["round"]) for f in found] == [("node-1", round + 1)]
    assert all(sim.replica.digest == world.checkers.digest for sim in world.nodes.values())


def test_a_lone_node_gone_wrong_is_found_by_a_random_check_and_the_run_stops() -> None:
    """Nobody can contradict it in that round; what it signed meanwhile is named."""
    world = World(seed=15, nodes=1, rounds=9)
    world.failing, world.checkers.honest = True, False
    world.run(until=0.5)
    world.nodes["node-0"].miscompute()
    world.run()
    assert world.coordinator.stopped is not None
    reason, code = world.coordinator.stopped
    assert code == 1 and "the ledger states digest" in reason, reason
    assert world.coordinator.state.chain.round in (3, 4, 5)


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_machine_whose_replay_insists_stops_the_run_whatever_the_majority(nodes: int) -> None:
    world = World(seed=16, nodes=nodes, rounds=6)
    world.failing = True
    world.run(until=3.5)
    sim = world.nodes["node-1"]
    sim.miscompute()
    sim.insists = True
    world.run()
    assert world.coordinator.stopped is not None
    assert world.coordinator.stopped[1] == 1 and "replay confirms both" in world.coordinator.stopped[0]


def test_who_is_silent_in_a_dispute_is_waited_for_as_long_as_replay_takes() -> None:
    desk = disputed("a", "b", "c")
    rederived(desk, "b", RIGHT, RIGHT)
    began = desk.now
    while not desk.state.nodes[key_of("a")].left:
        assert desk.now - began < 100
        for name in "abc":
            desk.beat(name)
        desk.tick(2.0)
    assert desk.now - began > 55 and "has not answered in a dispute" in desk.sent(Bye, "a")[0].reason
    assert desk.state.faults[key_of("a")].count == 1


def test_who_has_answered_is_not_sent_away_because_another_is_silent() -> None:
    """Seed 320393: the one that had confirmed its side was, 62 s after it had been asked."""
    desk = disputed("a", "b", "c")
    rederived(desk, "b", RIGHT, RIGHT)
    for _ in range(60):
        for name in "abc":
            desk.beat(name)
        desk.tick(2.0)
    assert desk.state.nodes[key_of("a")].left and not desk.state.nodes[key_of("b")].left
    assert key_of("b") not in desk.state.faults


def test_whose_side_another_has_confirmed_is_not_sent_away_for_an_answer_it_still_owes() -> None:
    """Seed 13123: of three sides two were asked; one changed to the third's, which then waited in vain."""
    desk = disputed("a", "b", "c")
    desk.applied("c", OTHER)
    desk.say("c", TensorDigests(1, 0, 1, (OTHER,)))
    rederived(desk, "a", WRONG, RIGHT)
    for _ in range(60):
        for name in "abc":
            desk.beat(name)
        desk.tick(2.0)
    assert desk.state.nodes[key_of("c")].left and not desk.state.nodes[key_of("b")].left
    assert desk.state.digest == RIGHT and key_of("b") not in desk.state.faults


def test_a_node_of_many_faults_is_not_let_in_until_the_operator_says_so() -> None:
    desk = second_round("a", "b")
    for number in range(5):
        desk.say("a", Rederived(1, (), (), (), RIGHT, 0, "esnode 0.1", f"flip {number}", 0))
    desk.say("a", hello(desk.lock))
    assert "at fault 5 times" in desk.sent(Refuse, "a")[0].reason
    desk.step(ce.NodeAllowed(desk.now, key_of("a"), "a"))
    desk.say("a", hello(desk.lock))
    assert not desk.sent(Refuse, "a") and key_of("a") not in desk.state.faults
    desk.restart()
    assert key_of("a") not in desk.state.faults
