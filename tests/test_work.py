"""What becomes of work at the coordinator: results, failures, closing rounds, leases and their repair."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import coordinator.events as ce
from coordinator import machine
from coordinator.membership import LOST_AFTER, SUSPECT_AFTER
from protocol.entries import CommitBody, EntryKind, ScoreBody
from protocol.messages import (
    RUN_ENDED,
    Ack,
    Assign,
    Bye,
    Cancel,
    Commit,
    CoordBeat,
    Failed,
    Fetch,
    Kind,
    NodeBeat,
    Release,
    Unit,
)
from tests.desk import Desk, hello, key_of

# ---------------------------------------------------------------- results


def test_a_result_is_journaled_before_it_is_acknowledged() -> None:
    desk = Desk()
    desk.join("a")
    desk.result("a", desk.assigned("a")[0])
    order = [type(e).__name__ for e in desk.effects if isinstance(e, ce.Persist | ce.Send)]
    assert order[:2] == ["Persist", "Send"]
    assert desk.sent(Ack)[0].verdict == "ok"
    (accepted,) = [e.record for e in desk.effects if isinstance(e, ce.Persist)]
    assert isinstance(accepted, ce.ResultAccepted)
    assert accepted.evaluator == desk.state.nodes[key_of("a")].number
    assert len(desk.assigned("a")) == 2, "the queue is filled again in the same step"


def test_the_same_result_again_is_a_duplicate_and_another_value_a_conflict() -> None:
    desk = Desk()
    desk.join("a", "b")
    unit = desk.assigned("a")[0]
    desk.result("a", unit)
    desk.result("a", unit)
    assert desk.sent(Ack)[0].verdict == "duplicate"
    assert not any(isinstance(e, ce.Persist) for e in desk.effects)
    desk.result("b", unit, reward=0.1)
    assert desk.sent(Ack)[0].verdict == "duplicate"
    assert machine.status(desk.state)["counters"]["conflicts"] == 1
    assert desk.state.round is not None
    assert desk.state.round.members[unit.member].sums[0] == desk.result_of(unit).sums[0], (
        "the first one stays"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed"),
        ({"parent": b"elsewhr!"}, "measured on state"),
        ({"sums": (0.5,)}, "1 sums for 4 chunks"),
        ({"sums": (0.5, 0.5, 0.5, 9.0)}, "range is 0.0 .. 1.0"),
        ({"sums": (0.5, 0.5, 0.5, float("nan"))}, "range"),
        ({"sums": (0.5, 0.5, 0.5, float("-inf"))}, "range"),
    ],
)
def test_bad_results_are_refused_and_counted(changes: dict[str, Any], words: str) -> None:
    desk = Desk()
    desk.join("a")
    unit = desk.assigned("a")[0]
    desk.result("a", unit, **changes)
    (ack,) = desk.sent(Ack)
    assert ack.verdict.startswith("refused: ") and words in ack.verdict
    assert machine.status(desk.state)["counters"]["refused results"] == 1
    assert desk.state.round is not None and not desk.state.round.members[unit.member].complete
    assert any(isinstance(record, ce.UnitFailed) for record in desk.journal), "it counts as a failed try"


def test_a_member_that_does_not_exist_is_refused() -> None:
    desk = Desk(members=4)
    desk.join("a")
    for unit in (Unit(0, 0, 4, 0, 3), Unit(0, 0, 0, 0, 4), Unit(1, 0, 0, 0, 3)):
        result = desk.result_of(Unit(0, Kind.MEMBER, 0, 0, 3))
        desk.say("a", msgspec.structs.replace(result, unit=unit))
        assert desk.sent(Ack)[0].verdict.startswith("refused")


def test_a_late_result_is_acknowledged_counted_and_never_used() -> None:
    desk = Desk(members=4, repeatable=False)
    desk.join("a", "b")
    late = desk.result_of(desk.assigned("b")[0], reward=0.9)
    desk.work("a")
    assert desk.state.chain.round == 0, "two units are with b"
    for unit in desk.assigned("b"):
        desk.result("a", unit)
    assert desk.state.chain.round == 1
    desk.say("b", late)
    assert desk.sent(Ack)[0].verdict == "late"
    assert machine.status(desk.state)["counters"]["late"] == 1


def test_any_valid_result_counts_whoever_holds_the_lease() -> None:
    desk = Desk(members=6)
    desk.join("a", "b")
    unit = desk.assigned("b")[0]
    desk.result("a", unit)
    assert desk.sent(Ack)[0].verdict == "ok"
    assert desk.sent(Cancel, "b")[0].unit == unit, "b need not go on"


# ---------------------------------------------------------------- closing


def test_the_last_result_commits_cancels_and_hands_out_the_next_round_in_one_step() -> None:
    desk = Desk(members=4)
    desk.join("a", "b")
    while desk.state.chain.round == 0:
        desk.result("a", (desk.assigned("a") or desk.assigned("b"))[0])
    body = desk.appended[-1].body
    assert isinstance(body, CommitBody) and [m.index for m in body.members] == [0, 1, 2, 3]
    assert [m.reward for m in body.members] == pytest.approx([0.5, 0.51, 0.52, 0.53])
    sends = [e.message for e in desk.effects if isinstance(e, ce.Send)]
    commit = next(k for k, message in enumerate(sends) if isinstance(message, Commit))
    assign = next(k for k, message in enumerate(sends) if isinstance(message, Assign))
    assert isinstance(sends[0], Ack) and commit < assign
    assert {unit.round for unit in desk.new_units()} == {1}
    assert desk.notes("commit")[0]["members"] == 4


def test_entries_other_than_commits_wait_until_d_is_known() -> None:
    desk = Desk(members=4)
    desk.join("a")
    desk.work("a")
    assert desk.state.chain.round == 1 and desk.state.digest is None
    desk.say("b", hello(desk.lock))
    desk.tick()
    assert desk.kinds[-1] is EntryKind.COMMIT, "nobody has told D of this state"
    desk.applied("a", 77)
    desk.tick()
    assert desk.kinds[-1] is EntryKind.ROSTER and desk.state.chain.entries[-1].digest == 77


def test_failures_void_a_member_on_two_nodes() -> None:
    desk = Desk(members=6)
    desk.join("a", "b")
    unit = desk.assigned("a")[0]
    desk.say("a", Failed(unit, "out of memory"))
    assert unit.member not in [held.member for held in desk.assigned("a")], "another node tries first"
    for _ in range(2):
        while not (bad := [(n, u) for n in "ba" for u in desk.assigned(n) if u.member == unit.member]):
            desk.result("b", desk.assigned("b")[0])
        desk.say(bad[0][0], Failed(bad[0][1], "out of memory"))
    assert desk.notes("void")[0]["member"] == unit.member
    for name in ("a", "b"):
        desk.work(name)
    body = desk.state.chain.commits[0].body
    assert isinstance(body, CommitBody)
    assert body.voids == ((unit.member, "failed 3 times on 2 nodes: out of memory"),)
    assert unit.member not in [member.index for member in body.members]


def test_two_that_fail_everything_void_nothing_that_a_third_can_evaluate() -> None:
    desk = Desk(members=6)
    desk.join("a", "b", "c")
    for _ in range(40):
        for name in "ab":
            for unit in desk.assigned(name):
                desk.say(name, Failed(unit, "no"))
        if desk.state.chain.round:
            break
        for unit in desk.assigned("c")[:1]:
            desk.result("c", unit)
        desk.tick(0.3)
    assert not desk.notes("void") and desk.state.chain.round == 1


def test_a_lone_node_voids_after_three_tries_and_a_pair_leaves_whole() -> None:
    desk = Desk(members=6, mirrored=True)
    desk.join("a")
    for _ in range(3):
        desk.say("a", Failed(next(unit for unit in desk.assigned("a") if unit.member == 0), "no"))
    desk.work("a")
    body = desk.state.chain.commits[0].body
    assert isinstance(body, CommitBody)
    assert [index for index, _ in body.voids] == [0, 1] and "partner" in body.voids[1][1]
    assert [member.index for member in body.members] == [2, 3, 4, 5]


def test_fewer_than_two_members_stop_loudly_and_a_restart_tries_again() -> None:
    desk = Desk(members=2)
    desk.join("a")
    for _ in range(3):
        desk.say("a", Failed(next(unit for unit in desk.assigned("a") if unit.member == 0), "disk full"))
    desk.work("a")
    assert desk.stop is not None and desk.stop.code == 1
    assert "1 members" in desk.stop.reason and "disk full" in desk.stop.reason
    desk.restart()
    assert desk.stop is None
    desk.say("a", hello(desk.lock))
    desk.work("a")
    assert desk.state.chain.round == 1


def test_quorum_closes_without_the_missing_and_names_them() -> None:
    desk = Desk(members=4, repeatable=False, ops={"quorum": 0.5})
    desk.join("a", "b")
    for unit in desk.assigned("a"):
        desk.result("a", unit)
    body = desk.state.chain.commits[0].body
    assert isinstance(body, CommitBody) and body.closed == 1 and len(body.members) == 2
    assert [reason for _, reason in body.voids] == ["left out by the quorum of 0.5"] * 2


def test_probes_are_scored_before_the_commit_and_at_the_end() -> None:
    desk = Desk(members=4, ops={"rounds": 1, "eval_every": 5})
    desk.join("a")
    assert desk.assigned("a")[0].kind == Kind.PROBE
    desk.work("a")
    assert desk.kinds == [EntryKind.LOCK, EntryKind.ROSTER, EntryKind.SCORE, EntryKind.COMMIT]
    desk.applied("a", 77)
    desk.work("a", limit=2)
    assert desk.kinds[-2:] == [EntryKind.SCORE, EntryKind.END]
    scores = [e.body for e in desk.state.chain.entries if isinstance(e.body, ScoreBody)]
    assert [body.state_round for body in scores] == [0, 1] and scores[0].mean == pytest.approx(0.5)


def test_the_run_ends_when_every_node_has_confirmed_the_end() -> None:
    desk = Desk(members=4, ops={"rounds": 1})
    desk.join("a", "b")
    while desk.state.chain.round == 0:
        desk.result("a", (desk.assigned("a") or desk.assigned("b"))[0])
    desk.applied("a", 77)
    assert desk.kinds[-1] is EntryKind.COMMIT, "two nodes, so two must say it"
    desk.applied("b", 77)
    assert desk.kinds[-1] is EntryKind.END and desk.sent(Commit, "b")
    desk.applied("a", 77)
    assert desk.sent(Bye, "a")[0].reason.startswith(RUN_ENDED) and desk.stop is None, "b has not confirmed"
    desk.applied("b", 77)
    assert desk.stop is not None and desk.stop.code == 0
    assert machine.step(desk.state, ce.Tick(desk.now))[1] == (), "nothing after the stop"


def test_a_silent_node_does_not_keep_the_end_waiting() -> None:
    desk = Desk(members=4, ops={"rounds": 1})
    desk.join("a")
    desk.work("a")
    desk.applied("a", 77)
    desk.tick(1.0)
    assert desk.stop is None
    desk.tick(LOST_AFTER)
    assert desk.stop is not None and desk.stop.code == 0


# ---------------------------------------------------------------- leases


def test_a_lost_nodes_units_go_elsewhere_and_it_returns_with_a_beat() -> None:
    desk = Desk(members=4)
    desk.join("a", "b")
    lost = desk.assigned("a")
    for _ in range(8):
        desk.beat("b", *((unit, 10) for unit in desk.assigned("b")))
        desk.tick(2.0)
    assert not desk.assigned("a")
    assert machine.status(desk.state)["nodes"][0]["state"] == "lost"
    for unit in desk.assigned("b"):
        desk.result("b", unit)
    assert set(lost) <= set(desk.assigned("b")), "all that is left is with b"
    desk.beat("a", *((unit, 600) for unit in lost))
    assert desk.assigned("a") == lost, "it is still of use"


def test_an_idle_node_doubles_the_unit_of_a_silent_one() -> None:
    desk = Desk(members=4, repeatable=False)
    desk.join("a", "b")
    running, waiting = desk.assigned("a")
    desk.work("b", limit=2)
    assert desk.assigned("b") == [waiting] and desk.sent(Cancel, "a"), "what waits there is taken over"
    desk.tick(SUSPECT_AFTER + 1)
    desk.result("b", waiting)
    assert desk.assigned("b") == desk.assigned("a") == [running], "what runs there is doubled"


def test_a_unit_that_stands_still_is_given_to_others() -> None:
    desk = Desk(members=4, ops={"stall_seconds": 30.0})
    desk.join("a", "b")
    stuck = desk.assigned("a")[0]
    for _ in range(17):
        desk.beat("a", (stuck, 400))
        desk.beat("b", *((unit, 0) for unit in desk.assigned("b")))
        if len(desk.assigned("b")) > 1:
            desk.result("b", desk.assigned("b")[0])
        desk.tick(2.0)
    status = {node["name"]: node for node in machine.status(desk.state)["nodes"]}
    assert status["a"]["state"] == "stalled" and "40%" in status["a"]["reason"]
    assert not desk.assigned("a")
    desk.beat("a", (stuck, 700))
    assert desk.assigned("a")[0] == stuck, "it moves again"


@pytest.mark.parametrize("fast", [False, True])
def test_units_longer_than_the_limits_teach_what_is_usual(fast: bool) -> None:
    """Of a large model on a slow machine: each step of a unit takes 40 s, the unit 200; or steps of 4 s in a
    pool that is much faster. Its leases end in the first unit, and no more.
    """
    desk = Desk(members=800, ops={"stall_seconds": 30.0})
    desk.join("a", "b")
    step, running, ended = 4 if fast else 40, desk.assigned("a")[0], []
    for second in range(2, 1002, 2):
        waiting = [unit for unit in desk.assigned("a") if unit != running]
        desk.beat("a", (running, second % 200 // step * step * 4), *((unit, 0) for unit in waiting))
        desk.beat("b", *((unit, 0) for unit in desk.assigned("b")))
        if fast:
            desk.result("b", desk.assigned("b")[0])
        if second % 200 == 0:
            desk.result("a", running)
            running = desk.assigned("a")[0]
        desk.tick(2.0)
        ended += [
            second for note in desk.notes("membership") if note["node"] == "a" and "leases" in note["what"]
        ]
    assert ended and max(ended) < 200
    pace = desk.state.nodes[key_of("a")].pace
    assert pace is not None and 45 < pace < 55


def test_release_gives_everything_back() -> None:
    desk = Desk(members=4)
    desk.join("a", "b")
    desk.say("a", Release("SIGTERM"))
    assert desk.sent(Bye, "a") and not desk.assigned("a")
    assert machine.status(desk.state)["nodes"][0]["state"] == "left"
    desk.work("b")
    assert desk.state.chain.round == 1


def test_a_beat_repairs_both_ways() -> None:
    desk = Desk(members=6)
    desk.join("a", "b")
    first, second = desk.assigned("a")
    useless = Unit(0, Kind.MEMBER, first.member, 0, 3)
    desk.now += 1.0
    desk.beat("a", (first, 100))
    assert not desk.sent(Assign), "the Assign may still be on its way"
    desk.now += 3.0
    desk.beat("a", (first, 200))
    assert desk.new_units("a") == [second], "it was lost"
    assert desk.sent(CoordBeat)[0].units == (first, second)
    desk.result("b", useless)
    desk.beat("a", (first, 300), (second, 0))
    assert [cancel.unit for cancel in desk.sent(Cancel, "a")] == [first], "its member is in"


def test_a_beat_from_another_branch_is_asked_for_its_entries_and_given_no_work() -> None:
    desk = Desk()
    desk.join("a")
    desk.say("a", NodeBeat(2, b"deadbeef", ()))
    assert desk.sent(Fetch, "a")[0].first == 1 and not desk.new_units("a")


# ---------------------------------------------------------------- nodes with several lanes


def lanes_of(desk: Desk, **lanes: int) -> None:
    """These nodes say Hello with so many lanes."""
    for name, count in lanes.items():
        desk.say(name, hello(desk.lock, lanes=count))
    desk.tick()


def test_every_lane_gets_a_unit_before_one_waits_anywhere() -> None:
    desk = Desk(members=6, repeatable=False)
    lanes_of(desk, a=1, b=4)
    assert (len(desk.assigned("a")), len(desk.assigned("b"))) == (2, 4), "five lanes, six members"
    desk = Desk(members=20)
    lanes_of(desk, a=1, b=4)
    assert (len(desk.assigned("a")), len(desk.assigned("b"))) == (2, 5)


def test_a_lane_more_gets_its_unit_and_a_lane_less_gives_one_back_only_when_it_is_done() -> None:
    desk = Desk(members=20)
    lanes_of(desk, a=1)
    held = desk.assigned("a")
    desk.say("a", hello(desk.lock, lanes=3, units=tuple(held)))
    assert len(desk.assigned("a")) == 4 and desk.assigned("a")[:2] == held
    held = desk.assigned("a")
    desk.say("a", hello(desk.lock, lanes=1, units=tuple(held)))
    assert desk.assigned("a") == held[:2] and len(desk.sent(Cancel)) == 2


def test_the_pace_of_a_node_is_that_of_a_lane() -> None:
    desk = Desk(members=20)
    lanes_of(desk, a=2)
    one, two, _ = desk.assigned("a")
    desk.now += 4
    desk.result("a", one)
    desk.result("a", two)
    assert desk.state.nodes[key_of("a")].pace == 1.0, "four chunks in four seconds, in either lane"


def test_one_lane_that_stands_still_does_not_hide_behind_the_others() -> None:
    desk = Desk(members=20, ops={"stall_seconds": 30.0})
    lanes_of(desk, a=2)
    still = desk.assigned("a")[0]
    for _ in range(12):
        desk.now += 3
        desk.beat("a", *((unit, 0) for unit in desk.assigned("a")))
        desk.result("a", desk.assigned("a")[1])
        desk.tick()
        if not desk.assigned("a"):
            break
    assert desk.state.nodes[key_of("a")].stalled == (still, 0)
