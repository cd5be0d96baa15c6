"""Whole runs in the simulator: named cases that tell a story. Random ones are in `test_sweep.py`."""

from __future__ import annotations

import pytest

from coordinator.events import EntryAppended, ResultAccepted
from protocol.entries import EntryKind, ScoreBody, parse
from protocol.messages import Ack, Applied, Assign, Bye, Commit, Entries, Hello, Result, Welcome
from tests.actors import CrashPoint
from tests.network import LOST
from tests.world import World


def tips(world: World) -> set[bytes]:
    return {parse(sim.disk.raws[-1]).hash for sim in world.nodes.values()}


# ---------------------------------------------------------------- stories


def test_a_quiet_run() -> None:
    world = World(seed=1, nodes=3, rounds=4)
    world.run()
    kinds = [entry.kind for entry in world.checkers.chain]
    assert kinds[0] is EntryKind.LOCK and kinds[-1] is EntryKind.END and kinds.count(EntryKind.COMMIT) == 4
    scores = [e.body for e in world.checkers.chain if isinstance(e.body, ScoreBody)]
    assert [body.state_round for body in scores] == [0, 2, 4]
    assert len(tips(world)) == 1
    assert {m.evaluator for body in world.checkers.closed_rounds for m in body.members} == {0, 1, 2}, (
        "all of them worked"
    )


def test_the_weights_do_not_depend_on_the_pool() -> None:
    digests = set()
    for seed, nodes in enumerate((1, 2, 5)):
        world = World(seed, nodes=nodes, rounds=3, mirrored=True)
        world.run()
        digests.add(world.checkers.digest)
    assert len(digests) == 1


def test_a_late_result_is_counted_and_never_used() -> None:
    world = World(seed=2, nodes=2, rounds=6, ops={"quorum": 0.5, "eval_every": 0})
    world.network.hold("node-1", Result, seconds=4.0)
    world.run()
    assert world.status()["counters"]["late"] >= 1
    assert any(
        reason.startswith("left out") for body in world.checkers.closed_rounds for _, reason in body.voids
    )


def test_a_result_that_arrives_twice_counts_once() -> None:
    world = World(seed=3, nodes=2, rounds=2)
    world.network.hold("node-0", Ack, LOST, times=2)
    world.run()
    accepted = [record for record in world.coordinator.journal if isinstance(record, ResultAccepted)]
    cells = [
        (r.result.unit.round, r.result.unit.kind, r.result.unit.member, r.result.unit.first) for r in accepted
    ]
    assert len(cells) == len(set(cells))


def test_the_coordinator_dies_between_flush_and_send() -> None:
    """The commit is in the journal, nobody has heard of it: it must be the one that counts."""
    world = World(seed=4, nodes=3, rounds=3)
    died = []

    def crash(records: object) -> CrashPoint | None:
        assert isinstance(records, list)
        entries = [parse(record.raw) for record in records if isinstance(record, EntryAppended)]
        if died or not any(entry.kind is EntryKind.COMMIT for entry in entries):
            return None
        died.append(entries[-1].hash)
        world.start(world.coordinator, 1.0)
        return CrashPoint(None, sends=0)

    world.coordinator.crash_when = crash
    world.run()
    first = next(entry for entry in world.checkers.chain if entry.kind is EntryKind.COMMIT)
    assert first.hash == died[0] and first.term == 1
    assert world.checkers.chain[-1].term == 2


def test_the_coordinator_dies_in_the_flush_of_a_commit() -> None:
    """The commit is lost with the journal's tail; the next term signs its own."""
    world = World(seed=4, nodes=3, rounds=3)
    died = []

    def crash(records: object) -> CrashPoint | None:
        assert isinstance(records, list)
        for k, record in enumerate(records):
            if isinstance(record, EntryAppended) and parse(record.raw).kind is EntryKind.COMMIT and not died:
                died.append(parse(record.raw).hash)
                world.start(world.coordinator, 1.0)
                return CrashPoint(records=k)
        return None

    world.coordinator.crash_when = crash
    world.run()
    first = next(entry for entry in world.checkers.chain if entry.kind is EntryKind.COMMIT)
    assert first.hash != died[0] and first.term == 2


def test_nodes_work_again_soon_after_a_coordinator_crash_and_nothing_is_measured_twice() -> None:
    world = World(seed=5, nodes=3, rounds=3)
    world.crash("coordinator", at=2.0, down=1.0)
    world.run(until=2.9)
    evaluations = sum(sim.evaluations for sim in world.nodes.values())
    accepted = sum(isinstance(record, ResultAccepted) for record in world.coordinator.journal)
    world.run(until=8.0)
    assert all(node["state"] == "ready" for node in world.status()["nodes"])
    assert sum(isinstance(r, ResultAccepted) for r in world.coordinator.journal) > accepted
    assert sum(sim.evaluations for sim in world.nodes.values()) > evaluations
    world.run()


def test_a_node_restarts_in_the_middle_of_a_round() -> None:
    world = World(seed=6, nodes=2, rounds=3)
    world.crash("node-1", at=1.0, down=0.5)
    world.run()
    assert world.count("membership", node="node-1", what="returned") == 1


def test_a_node_that_dies_for_good_is_replaced_within_fifteen_seconds() -> None:
    world = World(seed=7, nodes=2, rounds=3, paces=(0.1, 0.1))
    world.lose("node-1", at=1.0)
    world.run(until=1.1)
    round = world.coordinator.state.chain.round
    world.run(until=16.0)
    assert world.coordinator.state.chain.round > round
    world.run()


def test_all_nodes_gone_then_back() -> None:
    world = World(seed=8, nodes=2, rounds=3)
    for name in world.nodes:
        world.crash(name, at=1.0, down=40.0)
    world.run(until=30.0)
    status = world.status()
    assert status["state"] == "paused" and "lost (silent for" in status["reason"]
    world.run()
    assert len(world.checkers.closed_rounds) == 3


def test_of_two_paused_nodes_the_one_whose_machine_goes_off_is_lost() -> None:
    world = World(seed=8, nodes=2, rounds=3)
    for name in world.nodes:
        world.pause(name, at=1.0, seconds=60.0)
    world.lose("node-1", at=5.0)
    for second in (4.0, 10.0, 30.0, 59.0):
        world.run(until=second)
        states = [node["state"] for node in world.status()["nodes"]]
        assert states == ["paused", "lost" if second > 20 else "paused"]
    world.run()
    assert len(world.checkers.closed_rounds) == 3


def test_a_member_nobody_can_evaluate_is_void_and_named() -> None:
    world = World(seed=9, nodes=3, rounds=2, members=6)
    world.poison(2)
    world.run()
    for body in world.checkers.closed_rounds:
        assert [index for index, _ in body.voids] == [2] and len(body.members) == 5
        assert body.voids[0][1].endswith("nodes: out of memory")


def test_a_member_one_node_cannot_evaluate_is_not_void() -> None:
    world = World(seed=10, nodes=2, rounds=2, members=6)
    world.poison(2, "node-0")
    world.run()
    assert all(not body.voids for body in world.checkers.closed_rounds)


def test_a_mirrored_pair_is_void_whole() -> None:
    world = World(seed=11, nodes=2, rounds=2, members=6, mirrored=True)
    world.poison(3)
    world.run()
    for body in world.checkers.closed_rounds:
        assert [index for index, _ in body.voids] == [2, 3]
        assert [member.index for member in body.members] == [0, 1, 4, 5]


def test_too_few_members_stop_the_run_loudly() -> None:
    world = World(seed=12, nodes=1, rounds=2, members=2)
    world.failing = True
    world.poison(0)
    world.run()
    assert world.coordinator.stopped is not None
    assert world.coordinator.stopped == (
        "round 1 has 1 members that could be evaluated: failed 3 times on 1 node: out of memory",
        1,
    )


def test_a_clean_leave_costs_nothing() -> None:
    world = World(seed=14, nodes=2, rounds=3)
    world.leave("node-1", at=1.0)
    world.run(until=1.5)
    assert world.nodes["node-1"].stopped == ("released", 0)
    assert not any(node["units"] for node in world.status()["nodes"] if node["name"] == "node-1")
    world.run()


def test_a_partition_heals_by_itself() -> None:
    world = World(seed=15, nodes=2, rounds=6)
    world.network.cut("node-1", 1.0, 21.0)
    world.run(until=20.9)
    assert {n["name"]: n["state"] for n in world.status()["nodes"]}["node-1"] in ("lost", "suspect")
    world.run()


def test_a_hung_engine_stalls_only_its_own_node() -> None:
    world = World(seed=16, nodes=2, rounds=3, ops={"stall_seconds": 5.0})
    world.at(1.0, lambda: world.nodes["node-1"].hang(60.0))
    world.run()
    assert world.now < 30.0


def test_a_late_joiner_replays_and_works() -> None:
    world = World(seed=17, nodes=3, rounds=6)
    world.crash("node-2", at=0.01, down=10.0)
    world.run()
    closed = world.checkers.closed_rounds
    assert {member.evaluator for commit in closed for member in commit.members} >= {2}


def test_nobody_works_ahead_of_a_stop_and_a_restart_goes_on() -> None:
    world = World(seed=18, nodes=2, rounds=3)
    world.at(2.0, world.coordinator.terminate)
    world.restart(at=4.0)
    world.run(until=3.9)
    assert [actor.stopped is not None and actor.stopped[1] for actor in world.actors] == [0, 0, 0]
    world.run()
    assert len(world.checkers.closed_rounds) == 3


def test_a_node_that_hears_no_commit_at_all_fetches_everything_the_end_included() -> None:
    """The run ended while one node had not heard of it, and it was told to stop without the last entries."""
    world = World(seed=21, nodes=2, rounds=3)
    world.network.hold("node-1", Commit, LOST, times=1000)
    world.run()
    assert len(tips(world)) == 1


@pytest.mark.parametrize("kind", [Hello, Welcome, Assign, Result, Ack, Commit, Entries, Applied, Bye])
def test_any_one_kind_of_message_may_be_lost(kind: type) -> None:
    """The first three of it from or to each node; the run still ends, and soon."""
    world = World(seed=19, nodes=2, rounds=2)
    for name in world.nodes:
        world.network.hold(name, kind, LOST, times=3)
    world.run()
    assert world.now < 60.0, world.lines[-20:]


def test_the_last_word_on_d_may_be_lost() -> None:
    """Without a probe only Applied tells D of the final state, which END needs."""
    world = World(seed=20, nodes=1, rounds=1, ops={"eval_every": 0})
    world.network.hold("node-0", Applied, LOST)
    world.run()
    assert world.now < 30.0
