"""How work is spread: speeds, slices, limits, deadlines, and how much of a pool's speed reaches the run."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import coordinator.events as ce
import tests.world
from coordinator import leases, machine, rounds
from coordinator.leases import Pool
from coordinator.membership import LOST_AFTER
from protocol.entries import QUORUM, CommitBody
from protocol.messages import Failed, Kind, Release
from protocol.plan import Ops
from tests.desk import Desk, hello, key_of
from tests.runs import Processes, make_folder, wait_for
from tests.test_rounds import filled, member, node, opened
from tests.world import World

# ---------------------------------------------------------------- efficiency, in virtual time


def efficiency(
    monkeypatch: pytest.MonkeyPatch,
    paces: tuple[float, ...],
    delay: float = 0.0,
    audit: float = 0.0,
    seeds: tuple[int, ...] = (3,),
    **lock: Any,
) -> float:
    """Work at the summed solo speed over the time it took, all rounds but the first (no speed is known then).

    `paces`: seconds per prompt of each node; a unit takes 0.8 to 1.2 times that. The mean of some `seeds`.
    """
    monkeypatch.setattr(tests.world, "LIVENESS", 1e6)
    return sum(_efficiency(seed, paces, delay, audit, lock) for seed in seeds) / len(seeds)


def _efficiency(
    seed: int, paces: tuple[float, ...], delay: float, audit: float, lock: dict[str, Any]
) -> float:
    count = 5
    ops = {"eval_every": 0, "audit_share": audit}
    world = World(seed, len(paces), count, paces=paces, ops=ops, members=30, **({"repeatable": True} | lock))
    if delay:
        world.network.rules.append(lambda *_: delay)
    times = []
    note = world.note

    def watch(who: str, kind: str, fields: Any) -> None:
        if kind == "commit":
            times.append(world.now)
        note(who, kind, fields)

    world.note = watch  # type: ignore[method-assign]
    world.run()
    ideal = 30 * world.lock.per_round / sum(1 / pace for pace in paces)
    return ideal * (count - 1) / sum(after - before for before, after in pairwise(times))


def test_four_equal_nodes_with_units_of_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert efficiency(monkeypatch, (0.625,) * 4) >= 0.95


def test_an_audit_costs_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units measured twice are work that the ideal does not count."""
    assert efficiency(monkeypatch, (0.625,) * 4, audit=0.02, seeds=(3, 4, 5, 6)) >= 0.93


def test_speeds_of_one_two_four_and_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert efficiency(monkeypatch, (5.0, 2.5, 1.25, 0.625)) >= 0.9


def test_one_slow_node_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would end last is run again by all who are idle, in parts; soon it is known to be slow."""
    assert efficiency(monkeypatch, (0.625,) * 14 + (5.0,), seeds=(3, 4, 5), chunk=1) >= 0.85


def test_nearly_as_many_unlike_nodes_as_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole members at first: some nodes are four times as slow as others, and nobody knows."""
    paces = (0.625, 0.625, 0.95, 1.25, 1.9, 2.5, 0.625) * 4
    assert efficiency(monkeypatch, paces, seeds=(3, 4, 5), chunk=1) >= 0.75


def test_a_round_trip_of_200_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert efficiency(monkeypatch, (0.625,) * 4, delay=0.1) >= 0.85


def test_more_nodes_than_members_all_have_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole members would leave 2 of 32 nodes idle and the others with one unit each."""
    assert efficiency(monkeypatch, (0.625,) * 32, chunk=1) >= 0.6


# ---------------------------------------------------------------- slices


def test_members_are_split_when_nodes_outnumber_them_and_each_node_keeps_its_slice() -> None:
    desk = Desk(members=2, per_round=8, chunk=2, repeatable=False)
    desk.join("a", "b", "c", "d")
    slices = {name: {(u.first, u.last) for u in desk.assigned(name)} for name in "abcd"}
    assert sorted(slices.values(), key=str) == [{(k, k)} for k in range(4)]
    assert all([u.member for u in desk.assigned(name)] == [0, 1] for name in "abcd")
    status = machine.status(desk.state)
    assert status["nodes"][0]["why"] == "its slice of every member"
    for name in "abcd":
        desk.work(name)
    assert desk.state.chain.round == 1


def test_slices_go_by_speed_and_cover_every_chunk_once() -> None:
    lock, _, _ = opened(members=2)
    for paces in ((1.0, 1.0, 1.0), (1.0, 8.0, 2.0), (9.0, 1.0, 1.0), (None, None, 0.5)):
        nodes = [replace(node(lock, f"n{k}", k), pace=pace) for k, pace in enumerate(paces)]
        for chunks in (3, 4, 7, 16):
            found = leases.columns(nodes, chunks)
            covered = [k for first, last in found.values() for k in range(first, last + 1)]
            assert covered == list(range(chunks)), (paces, chunks, found)
    fast = leases.columns([replace(node(lock, f"n{k}", k), pace=p) for k, p in enumerate((1.0, 3.0))], 16)
    assert fast == {0: (0, 11), 1: (12, 15)}
    turns = leases.columns([node(lock, f"n{k}", k) for k in range(5)], 2)
    assert turns == {0: (0, 0), 1: (1, 1), 2: (0, 0), 3: (1, 1), 4: (0, 0)}


def test_the_last_units_are_shares_by_speed() -> None:
    lock, _, round = opened(members=2)  # 8 chunks
    slow, fast = replace(node(lock, "s", 0), pace=4.0), replace(node(lock, "f", 1), pace=1.0)
    pool = Pool(2, 2, leases.speed_of([slow, fast]))
    assert leases.next_unit(round, lock, slow, pool, (0, 1))[0] == member(0, 0, 1), "a fifth of eight chunks"
    unit, why = leases.next_unit(round, lock, fast, pool, (0, 1))
    assert unit == member(0) and why == "a whole member"


# ---------------------------------------------------------------- limits


def test_no_node_gets_more_than_the_plans_share() -> None:
    desk = Desk(members=12, repeatable=True, ops={"max_share": 0.4})
    desk.join("a", "b", "c")
    for _ in range(40):
        held = desk.assigned("a")
        if not held:
            break
        desk.result("a", held[0])
    assert desk.state.round is not None
    done = sum(cells.evaluators.count(0) for cells in desk.state.round.members)
    assert done == 20, "48 chunks, two fifths of them rounded up"
    status = {row["name"]: row for row in machine.status(desk.state)["nodes"]}
    assert status["a"]["why"] == "it has the plan's share of this round"


def test_two_nodes_know_no_limit() -> None:
    desk = Desk(members=8, repeatable=False, ops={"max_share": 0.4})
    desk.join("a", "b")
    desk.work("a")
    assert desk.state.round is not None
    assert sum(cells.evaluators.count(0) == 4 for cells in desk.state.round.members) >= 6


def test_a_quarantined_node_gets_nothing() -> None:
    desk = Desk(members=8)
    desk.join("a", "b")
    key = next(iter(desk.state.nodes))
    found = replace(desk.state.nodes[key], quarantined="its rewards disagree")
    desk.state = replace(desk.state, nodes={**desk.state.nodes, key: found})
    desk.result("a", desk.assigned("a")[0])
    assert not desk.new_units("a")
    assert machine.status(desk.state)["nodes"][0]["state"] == "quarantined"


# ---------------------------------------------------------------- the deadline of a quorum


def test_the_rest_of_a_round_has_a_while_by_what_the_quorum_needed() -> None:
    lock, _, round = opened(members=4)
    ops = Ops(3, quorum=0.5)
    round = replace(filled(lock, round, 0, 1), opened=100.0)
    assert rounds.quorum_is_in(round, lock, ops)[0] == {0, 1}
    round = replace(round, quorum=140.0)
    found, reason = rounds.closing(round, lock, ops, now=141.0)
    assert found is None and reason == "the quorum of 2 is in; the other 2 have 9 s more"
    found, _ = rounds.closing(round, lock, ops, now=150.0)
    assert found is not None and found.code == QUORUM and [k for k, _ in found.voids] == [2, 3]
    assert rounds.closing(round, lock, Ops(3), now=1e9)[0] is None, "a quorum of 1 drops nobody, ever"


def test_a_slow_member_within_the_deadline_counts() -> None:
    desk = Desk(members=4, ops={"quorum": 0.5}, repeatable=False)
    desk.join("a", "b")
    desk.now += 40.0
    slow = desk.assigned("b")[0]
    while len(desk.assigned("a")) and desk.state.round and desk.state.round.unsettled > 1:
        desk.result("a", next(unit for unit in desk.assigned("a") if unit != slow))
    desk.tick(2.0)
    assert desk.state.chain.round == 0
    desk.result("b", slow)
    body = desk.state.chain.commits[0].body
    assert isinstance(body, CommitBody) and len(body.members) == 4


# ---------------------------------------------------------------- reasons


def test_status_shows_the_last_decisions_and_why() -> None:
    desk = Desk(members=4, repeatable=False)
    desk.join("a", "b")
    desk.work("b", limit=2)
    words = [words for _, words in machine.status(desk.state)["decisions"]]
    assert any(line.startswith("membership: a joined") for line in words)
    taken = [line for line in words if line.startswith("lease: b takes over member")]
    assert taken and "would have ended it" in taken[0]
    for _ in range(100):
        desk.step(desk_event(desk))
    assert len(machine.status(desk.state)["decisions"]) <= 30


def test_status_shows_which_members_fail_and_why_they_are_not_given_up() -> None:
    desk = Desk(members=4)
    desk.join("a", "b")
    unit = desk.assigned("a")[0]
    desk.say("a", Failed(unit, "out of memory"))
    words = "1 failure, 3 make it void; the last: out of memory"
    assert machine.status(desk.state)["failing"] == [[f"member {unit.member}", words]]


def test_a_node_that_left_has_no_reason_for_work() -> None:
    desk = Desk(members=4)
    desk.join("a", "b")
    assert machine.status(desk.state)["nodes"][0]["why"]
    desk.step(ce.Received(desk.now, key_of("a"), Release("SIGTERM received")))
    left = machine.status(desk.state)["nodes"][0]
    assert left["state"] == "left" and left["why"] == ""


def test_a_paused_node_reads_paused_until_it_works_again_or_leaves() -> None:
    """It is connected, so it has not left, and says so again and again; one that falls silent is lost."""
    desk = Desk(members=4)
    desk.join("a", "b")

    def shown() -> tuple[str, str]:
        node = machine.status(desk.state)["nodes"][0]
        return node["state"], node["reason"]

    desk.say("a", Release("outside its hours", stays=True))
    for _ in range(20):
        desk.tick(5.0)
        desk.say("a", Release("outside its hours", stays=True))
        assert not desk.effects, "no news"
    desk.tick(LOST_AFTER)
    assert shown() == ("paused", "outside its hours") and not desk.assigned("a")
    desk.tick(1.0)
    assert shown() == ("lost", "outside its hours, and silent for 16 s"), "its machine was switched off"
    desk.say("a", Release("outside its hours", stays=True))
    assert shown() == ("paused", "outside its hours")
    desk.say("a", Release("paused by its owner", stays=True))
    assert shown() == ("paused", "paused by its owner")
    desk.tick(16.0)
    desk.join("a")
    assert shown()[0] == "ready"
    desk.say("a", Release("paused by its owner", stays=True))
    desk.say("a", Release("SIGTERM received"))
    assert shown() == ("left", "released: SIGTERM received")
    desk.say("a", Release("paused by its owner", stays=True))
    assert shown()[0] == "left", "a late copy"


@pytest.mark.parametrize(("seconds", "words"), [(7.4, "would have ended it in 7 s"), (math.inf, "is silent")])
def test_no_endless_seconds_are_shown(seconds: float, words: str) -> None:
    assert leases._would_end(seconds) == words


def desk_event(desk: Desk) -> Any:
    """A Hello from a node that is there: one more decision."""
    return ce.Received(desk.now, key_of("a"), hello(desk.lock))


# ---------------------------------------------------------------- real processes


def units_done(folder: Path) -> list[dict[str, Any]]:
    """The lines of units.jsonl."""
    path = folder / "units.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_kill_9_of_a_node_its_units_run_elsewhere_within_15_s(tmp_path: Path) -> None:
    make_folder(tmp_path, ("n1", "n2"), rounds=50, members=4, task_options={"seconds": 0.7})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        processes.node("n2")
        wait_for(lambda: any(row["units"] for row in nodes(processes) if row["name"] == "n2"))
        processes.kill("n2")
        killed, round = time.monotonic(), processes.status()["round"]
        wait_for(lambda: processes.status()["round"] > round + 1)
        assert time.monotonic() - killed < 15


def nodes(processes: Processes) -> list[dict[str, Any]]:
    """The nodes of status, none while nobody answers."""
    found: list[dict[str, Any]] = processes.status().get("nodes", [])
    return found


def cells_of(rows: list[dict[str, Any]]) -> set[tuple[int, int, int]]:
    """Round, member and chunk of all that these lines are about."""
    members = [row for row in rows if row["kind"] == Kind.MEMBER]
    return {(r["round"], r["member"], k) for r in members for k in range(r["first"], r["last"] + 1)}


def test_kill_9_of_the_coordinator_work_goes_on_within_5_s_and_nothing_is_measured_again(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path, ("n1", "n2"), rounds=2, members=10, task_options={"seconds": 0.5})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        processes.node("n2")
        wait_for(lambda: processes.status().get("members", {}).get("done", 0) >= 3)
        processes.kill("coordinator")
        before = len(units_done(tmp_path))
        processes.coordinator()
        began = time.monotonic()
        wait_for(lambda: len(units_done(tmp_path)) > before)
        assert time.monotonic() - began < 5
        processes.wait_end()
    rows = units_done(tmp_path)
    accepted, after = cells_of(rows[:before]), cells_of(rows[before:])
    assert len(accepted | after) == 2 * 10 * 4
    assert len(accepted) >= 3 * 4 and not accepted & after, "what was accepted is not measured again"
