"""The simulator's faults one by one: partitions, deaf and mute links, clocks, disks, stopped processes."""

from __future__ import annotations

from dataclasses import replace

from coordinator.events import KeyAllowed
from protocol.messages import Enrolled, NodeBeat, Rehello
from tests import people
from tests.network import LOST
from tests.world import World

DAY = 86_400.0


def test_one_half_of_the_pool_goes_on_while_the_other_is_cut_off() -> None:
    world = World(seed=30, nodes=4, rounds=8)
    world.network.part({"node-0", "node-1"}, 1.0, 31.0)
    world.run(until=30.0)
    states = {node["name"]: node["state"] for node in world.status()["nodes"]}
    assert states["node-0"] == states["node-1"] == "lost" and states["node-2"] == "ready"
    assert world.coordinator.state.chain.round >= 2
    world.run()


def test_a_coordinator_cut_off_from_everybody_waits_and_nothing_is_lost() -> None:
    world = World(seed=31, nodes=3, rounds=4)
    world.network.part({"coordinator"}, 1.0, 61.0)
    world.run(until=60.0)
    round = world.coordinator.state.chain.round
    assert world.status()["state"] == "paused"
    world.run(until=66.0)
    ready = [node for node in world.status()["nodes"] if node["state"] == "ready"]
    assert len(ready) == 3, "traffic is back within 5 s"
    assert world.coordinator.state.chain.round >= round
    world.run()


def test_a_node_that_is_heard_but_hears_nothing_holds_nobody_up() -> None:
    world = World(seed=32, nodes=2, rounds=4, ops={"stall_seconds": 5.0})
    world.network.cut("node-1", 1.0, 1000.0, "in")
    world.lose("node-1", at=39.0)
    world.run(until=38.0)
    assert world.checkers.ended
    world.run()


def test_a_node_that_hears_but_is_not_heard_is_replaced() -> None:
    world = World(seed=33, nodes=2, rounds=4)
    world.network.cut("node-1", 1.0, 1000.0, "out")
    world.lose("node-1", at=59.0)
    world.run()
    assert world.now < 60.0


def test_clocks_that_jump_a_day_either_way_cost_seconds() -> None:
    for seed, seconds in ((34, DAY), (35, -DAY)):
        for name in ("coordinator", "node-0", "node-1"):
            world = World(seed, nodes=2, rounds=4)
            world.jump(name, at=1.5, seconds=seconds)
            world.run()
            assert world.now < 30.0, (name, seconds)


def test_a_node_whose_clock_went_back_goes_on_beating() -> None:
    world = World(seed=36, nodes=1, rounds=2, paces=(2.0,))
    world.jump("node-0", at=1.5, seconds=-DAY)
    world.run(until=2.0)
    heard: list[float] = []
    world.network.rules.append(
        lambda sender, _, message: heard.append(world.now) or 0.0 if type(message) is NodeBeat else 0.0
    )
    world.run(until=12.0)
    assert len(heard) >= 4


def test_a_full_disk_ends_the_coordinator_before_it_speaks_and_it_returns_when_there_is_room() -> None:
    world = World(seed=37, nodes=2, rounds=4)
    world.fill("coordinator", 1.0, 21.0)
    world.run(until=20.0)
    records = len(world.coordinator.journal)
    assert not world.coordinator.up
    world.run(until=20.5)
    assert len(world.coordinator.journal) == records
    world.run()
    assert len(world.checkers.closed_rounds) == 4


def test_a_full_disk_ends_a_node_and_it_returns_when_there_is_room() -> None:
    world = World(seed=38, nodes=2, rounds=6)
    world.fill("node-0", 1.0, 11.0)
    world.run(until=10.0)
    held = len(world.nodes["node-0"].disk.raws)
    assert held < len(world.checkers.chain)
    world.run()


def test_a_torn_ledger_file_is_filled_again() -> None:
    for keep, damage in ((0, False), (0, True), (3, False), (3, True)):
        world = World(seed=39, nodes=2, rounds=6)
        world.crash("node-0", at=4.0, down=1.0)
        world.at(4.5, lambda k=keep, d=damage, w=world: w.nodes["node-0"].tear(k, d))  # type: ignore[misc]
        world.run()
        assert any("cut from" in line for line in world.lines)


def test_a_stopped_process_goes_on_where_it_was() -> None:
    for name in ("coordinator", "node-0"):
        world = World(seed=40, nodes=2, rounds=12)
        world.freeze(name, at=1.0, seconds=30.0)
        world.run()
        assert world.now < 90.0, name


def test_a_slow_node_does_not_make_the_round_wait_for_all_its_work() -> None:
    world = World(seed=41, nodes=2, rounds=4, paces=(0.1, 0.1))
    world.slow("node-1", 30.0, start=0.5, end=LOST)
    world.lose("node-1", at=100.0)
    world.run()
    assert world.now < 60.0


# ---------------------------------------------------------------- people


def test_machines_join_by_invites_and_work() -> None:
    world = World(seed=42, nodes=1, rounds=6)
    key = people.invite(world, at=1.0, uses=2)
    people.newcomer(world, "new-0", key, at=1.5)
    people.newcomer(world, "new-1", key, at=2.5)
    world.run()
    assert {member.evaluator for member in world.checkers.closed_rounds[-1].members} == {0, 1, 2}


def test_two_machines_with_one_invite() -> None:
    world = World(seed=43, nodes=1, rounds=6)
    key = people.invite(world, at=1.0)
    for name in ("new-0", "new-1"):
        people.newcomer(world, name, key, at=1.5, excuses=(people.USED,))
    world.run()
    ends = [world.nodes[name].stopped for name in ("new-0", "new-1")]
    assert sorted(end[1] for end in ends if end) == [0, 1]


def test_a_newcomer_whose_answers_are_lost_asks_again_and_uses_the_invite_once() -> None:
    world = World(seed=44, nodes=1, rounds=6)
    key = people.invite(world, at=1.0)
    world.network.hold("new-0", Enrolled, LOST, times=3)
    people.newcomer(world, "new-0", key, at=1.5)
    world.run()
    assert world.nodes["new-0"].disk.enrolled
    assert sum(isinstance(record, KeyAllowed) for record in world.coordinator.journal) == 1


def test_a_revoked_node_is_out_at_once_and_may_be_put_back() -> None:
    world = World(seed=45, nodes=2, rounds=8)
    people.revoke(world, "node-1", at=2.0)
    people.readmit(world, "node-1", at=6.0)
    world.run(until=5.0)
    assert world.nodes["node-1"].stopped == ("revoked: sold", 1)
    world.run()
    numbers = {member.evaluator for body in world.checkers.closed_rounds[-2:] for member in body.members}
    now = world.coordinator.state.numbers
    assert numbers == set(now.values()), "put back under a new number"
    assert now[world.nodes["node-1"].key] == 2


# ---------------------------------------------------------------- snapshots


def late_joiner(seed: int) -> World:
    """Updates take longer than rounds are worth replaying; the newcomer comes at round 10 or so."""
    world = World(seed, nodes=3, rounds=26, members=4, chunk=8, ops={"snapshot_every": 4, "eval_every": 0})
    world.apply_ms = 1500.0
    people.newcomer(world, "late", people.invite(world, at=1.0), at=45.0)
    return world


def test_a_late_joiner_takes_a_snapshot_from_its_peers() -> None:
    world = late_joiner(50)
    world.run()
    assert world.count("catch-up", node="late", way="snapshot loaded") >= 1
    assert 3 in {member.evaluator for body in world.checkers.closed_rounds[-6:] for member in body.members}


def test_a_donor_that_poisons_is_marked_and_left_out() -> None:
    world = late_joiner(51)
    world.nodes["node-0"].larder.poisons = True
    world.run()
    assert world.count("catch-up", node="late", way="snapshot loaded") >= 1
    assert world.count("poisoned", node="node-0", by="late") == 1


def test_donors_that_vanish_leave_the_replay() -> None:
    world = late_joiner(52)
    for name in ("node-0", "node-1", "node-2"):
        world.crash(name, at=58.0, down=8.0)
    world.run()
    assert world.nodes["late"].stopped == ("the run has ended", 0)


def test_a_restarted_node_resumes_from_its_own_snapshot() -> None:
    world = World(seed=53, nodes=2, rounds=6, ops={"snapshot_every": 2})
    world.crash("node-1", at=9.0, down=1.0)
    world.run()
    assert any("resumes from its snapshot" in line for line in world.lines)
    torn = World(seed=53, nodes=2, rounds=6, ops={"snapshot_every": 2})
    torn.crash("node-1", at=9.0, down=1.0)
    torn.at(9.5, torn.nodes["node-1"].larder.tear)
    torn.run()


# ---------------------------------------------------------------- audits and successors


def test_a_node_that_loses_its_evidence_by_restarts_is_no_liar() -> None:
    """Its scores served as references of audits after they had gone with its process: quarantine."""
    world = World(seed=54, nodes=3, rounds=6, ops={"audit_share": 1.0})
    for at in (2.0, 3.5, 5.0, 6.5, 8.0, 9.5):
        world.crash("node-2", at=at, down=0.3)
    world.run()
    assert not world.coordinator.state.quarantined
    assert world.status()["counters"]["audits"] >= 5


def test_a_liar_without_evidence_is_in_quarantine_after_one_audit() -> None:
    world = World(seed=55, nodes=3, rounds=4, ops={"audit_share": 0.5})
    world.checkers.liars = True
    world.nodes["node-1"].lie = lambda outcome: replace(outcome, sums=tuple(s + 0.1 for s in outcome.sums))
    world.run()
    assert list(world.coordinator.state.quarantined) == [world.nodes["node-1"].key]
    liar = world.coordinator.state.numbers[world.nodes["node-1"].key]
    assert liar not in {member.evaluator for member in world.checkers.closed_rounds[-1].members}


def test_a_successor_takes_the_longest_ledger_that_was_shown() -> None:
    """Other nodes' ledgers were longer than the one recovered from, and their second Hello was lost."""
    world = World(seed=56, nodes=3, rounds=6)
    world.network.cut("node-1", 4.0, 9.0)
    people.recover(world, at=9.0, source="node-1")
    world.network.hold("node-0", Rehello, LOST, times=2)
    world.network.hold("node-2", Rehello, LOST, times=2)
    world.run()
    assert not world.checkers.tree.dead()
