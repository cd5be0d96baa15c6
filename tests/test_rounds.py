"""The decisions about a round and about who works on it: pure functions that also say why."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator import leases, membership, rounds
from coordinator.membership import Lease, Node
from coordinator.rounds import Cells, Round
from protocol.chain import Chain
from protocol.entries import COMPLETE, QUORUM, Admission, CommitBody, LockBody, RosterBody
from protocol.lock import Lock
from protocol.messages import Kind, Result, Unit
from protocol.plan import Ops
from protocol.seeds import member_seed
from tests.desk import desk_lock, forge, hello, key_of


def chain_of(lock: Lock, *names: str) -> Chain:
    """A chain with its lock and a roster."""
    first = forge(LockBody(lock.to_bytes()), None, round=0, digest=lock.digest)
    roster = RosterBody(tuple(Admission(k, key_of(name), name) for k, name in enumerate(names or ("a", "b"))))
    return Chain([first, forge(roster, first, round=0, digest=lock.digest)])


def opened(ops: dict[str, Any] | None = None, **options: Any) -> tuple[Lock, Chain, Round]:
    lock = desk_lock(**options)
    chain = chain_of(lock)
    return lock, chain, rounds.open_round(chain, Ops(**{"rounds": 3, "eval_every": 0, **(ops or {})}), 0.0)


def member(k: int, first: int = 0, last: int = 3, round: int = 0) -> Unit:
    return Unit(round, Kind.MEMBER, k, first, last)


def result(lock: Lock, unit: Unit, *sums: float, parent: bytes, correct: int = 0) -> Result:
    seed = member_seed(lock.run_id, unit.round, unit.member, lock.mirrored) if unit.kind == Kind.MEMBER else 0
    values = sums or (1.0,) * (unit.last - unit.first + 1)
    return Result(unit, seed, values, parent[:8], lock.digest, correct, 0, 1, (1, 1, 1), b"evidence", 0)


def filled(lock: Lock, round: Round, *members: int) -> Round:
    for k in members:
        round = rounds.fill(round, 0, result(lock, member(k), parent=round.parent))
    return round


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize(
    ("number", "every", "total", "due"),
    [(0, 2, 5, True), (1, 2, 5, False), (4, 2, 5, True), (5, 2, 5, True), (0, 0, 5, False), (5, 0, 5, False)],
)
def test_when_the_held_out_prompts_are_measured(number: int, every: int, total: int, due: bool) -> None:
    assert rounds.probe_due(desk_lock(), Ops(total, eval_every=every), number)[0] is due
    assert rounds.probe_due(desk_lock(heldout=0), Ops(total, eval_every=1), 0)[0] is False


def test_a_round_opens_empty_and_the_last_one_only_holds_a_probe() -> None:
    lock, chain, round = opened({"eval_every": 1}, members=4)
    assert (round.number, round.unsettled, round.free) == (0, 4, 16)
    assert round.parent == chain.entries[0].hash, (
        "roster entries do not change the state a round is measured on"
    )
    assert round.probe is not None and len(round.probe.sums) == 2
    final = rounds.open_round(chain, Ops(0, eval_every=1), 0.0)
    assert final.final and final.probe is not None and final.free == 0
    assert lock.chunk_count(Kind.MEMBER) == 4


# ---------------------------------------------------------------- filling


def test_cells_fill_once_and_the_counters_follow() -> None:
    lock, _, round = opened(members=4)
    part = rounds.fill(round, 1, result(lock, member(2, 1, 2), 0.5, 0.75, parent=round.parent))
    assert part.members[2].sums == (None, 0.5, 0.75, None)
    assert part.members[2].evaluators == (rounds.NOBODY, 1, 1, rounds.NOBODY)
    assert (part.free, part.unsettled) == (14, 4)
    whole = rounds.fill(part, 0, result(lock, member(2), 9.0, 9.0, 9.0, 1.0, parent=round.parent))
    assert whole.members[2].sums == (9.0, 0.5, 0.75, 1.0), "what is in keeps its value"
    assert (whole.free, whole.unsettled) == (12, 3) and whole.members[2].complete


def changed(lock: Lock, round: Round, unit: Unit, what: int, *, idle: bool, rare: bool) -> Round:
    if what < 2:
        return rounds.lease(round, unit, 1 if what or idle else -1)
    if what == 2:
        done = result(lock, unit, parent=round.parent)
        return rounds.fill(round, unit.last % 2, done, int(not idle and unit.first % 2))
    if what == 3:
        return rounds.fail(round, 0, unit, "no")
    if what == 4 and rare:
        return rounds.void(round, unit, "why", mirrored=False)
    return rounds.drop(round, 1) if rare else round


def test_counters_equal_a_recount_whatever_happens() -> None:
    """And a draft, which is changed in place, always is the value that is not."""
    lock, _, round = opened(members=6)
    draft = round.drafted()
    first_of_all = repr(round)
    rng = random.Random(1)
    for _ in range(400):
        first = rng.randrange(4)
        unit = member(rng.randrange(6), first, rng.randrange(first, 4))
        what, rare = rng.randrange(6), rng.random() < 0.05
        held = round.members[unit.member].leases[unit.first : unit.last + 1]

        before, text, idle = round, repr(round), min(held) == 0
        both = [changed(lock, one, unit, what, idle=idle, rare=rare) for one in (round, draft)]
        round, draft = both
        assert repr(before) == text, "a value stays"
        assert draft.draft and replace(draft, draft=False) == round
        assert all(cells.free == rounds.free_of(cells) for cells in round.members)
        assert round.free == sum(cells.free for cells in round.members)
        assert round.unsettled == sum(not cells.settled for cells in round.members)
        assert all(not cells.free for cells in round.members[: round.cursor])
    assert repr(opened(members=6)[2]) == first_of_all


# ---------------------------------------------------------------- judging


def test_judgement_of_results() -> None:
    lock, _, round = opened({"eval_every": 1}, members=4)
    here = round.parent

    def judged(unit: Unit, *sums: float, parent: bytes = here) -> tuple[str, bool]:
        verdict = rounds.judge(lock, round, result(lock, unit, *sums, parent=parent))
        return verdict.kind, verdict.conflict

    assert judged(member(0)) == ("ok", False)
    assert judged(member(0), parent=b"elsewhere") == ("refused", False)
    assert judged(member(0, round=1)) == ("refused", False)
    round = replace(filled(lock, round, 0), number=0)
    assert judged(member(0)) == ("duplicate", False)
    assert judged(member(0), 1.0, 1.0, 1.0, 0.5) == ("duplicate", True)
    round = rounds.fill(round, 0, result(lock, member(1, 0, 1), parent=here))
    assert judged(member(1), 0.5, 1.0, 1.0, 1.0) == ("ok", True), "new chunks count, old ones stay"
    round = rounds.void(round, member(2), "nobody can", mirrored=False)
    assert judged(member(2)) == ("late", False)
    late = rounds.judge(lock, replace(round, number=1), result(lock, member(0), parent=here))
    assert late.kind == "late" and late.reason == "the round is closed"


def test_a_probe_chunk_counts_its_correct_answers_once() -> None:
    lock, _, round = opened({"eval_every": 1}, members=4)
    first = Unit(0, Kind.PROBE, 0, 0, 0)
    round = rounds.fill(round, 0, result(lock, first, 1.5, parent=round.parent, correct=2))
    both = result(lock, Unit(0, Kind.PROBE, 0, 0, 1), 1.5, 0.25, parent=round.parent, correct=2)
    assert rounds.judge(lock, round, both).kind == "duplicate", (
        "whose answers were correct is not told per chunk"
    )
    second = Unit(0, Kind.PROBE, 0, 1, 1)
    round = rounds.fill(round, 1, result(lock, second, 0.25, parent=round.parent, correct=1))
    score = rounds.score_body(lock, round)
    assert (score.sums, score.correct, score.mean, score.prompts) == ((1.5, 0.25), 3, 1.75 / 4, 4)


# ---------------------------------------------------------------- giving up, closing


@pytest.mark.parametrize(
    ("failures", "nodes", "others", "void"),
    [
        ((0, 0), 1, 0, False),
        ((0, 0, 0), 1, 0, True),
        ((0, 0, 0), 2, 1, False),
        ((0, 0, 0), 2, 0, False),
        ((0, 1, 0), 2, 0, True),
        ((0, 1), 2, 0, False),
        ((0, 1, 0), 3, 1, False),
        ((0, 1, 0), 3, 0, True),
        ((0, 1, 2), 4, 1, True),
    ],
)
def test_three_failures_on_three_nodes_where_there_are_so_many(
    failures: tuple[int, ...], nodes: int, others: int, void: bool
) -> None:
    cells = Cells((None,), (rounds.NOBODY,), (0,), 1, failures=failures, reason="boom")
    verdict, reason = rounds.void_verdict(cells, nodes, others)
    assert verdict is void and ("boom" in reason) is void


def test_closing_waits_for_everybody_unless_the_plan_says_otherwise() -> None:
    lock, _, round = opened(members=6)
    round = filled(lock, round, 0, 1, 2, 4)
    assert rounds.closing(round, lock, Ops(3), now=0.0) == (None, "4 of 6 members are in")
    assert rounds.closing(round, lock, Ops(3, quorum=0.8), now=0.0)[0] is None
    close, reason = rounds.closing(round, lock, Ops(3, quorum=0.6), now=0.0)
    assert close is not None and close.code == QUORUM and close.members == (0, 1, 2, 4)
    assert [index for index, _ in close.voids] == [3, 5] and "quorum of 4" in reason
    close, _ = rounds.closing(filled(lock, round, 3, 5), lock, Ops(3), now=0.0)
    assert close is not None and close.code == COMPLETE and len(close.members) == 6


def test_a_quorum_of_a_mirrored_population_counts_whole_pairs() -> None:
    lock, _, round = opened(members=6, mirrored=True)
    round = filled(lock, round, 0, 2, 4, 5)
    close, reason = rounds.closing(round, lock, Ops(3, quorum=0.5), now=0.0)
    assert close is None and "2 of them in whole pairs" in reason
    close, _ = rounds.closing(filled(lock, round, 1), lock, Ops(3, quorum=0.5), now=0.0)
    assert close is not None and close.members == (0, 1, 4, 5)


def test_rewards_are_correctly_rounded_sums_over_prompts() -> None:
    lock, chain, round = opened(members=2)
    sums = (1e-17, 1.0, 1e-17, 0.5)
    for k in range(2):
        round = rounds.fill(round, 0, result(lock, member(k), *sums, parent=round.parent))
    close, _ = rounds.closing(round, lock, Ops(3), now=0.0)
    assert close is not None
    body = rounds.commit_body(chain, round, close)
    assert body.members[0].reward == math.fsum(sums) / 8
    assert (body.alpha, body.sigma) == (lock.alpha_at(0), lock.sigma_at(0))
    assert isinstance(body, CommitBody) and chain.append(
        forge(body, chain.entries[-1], round=0, digest=lock.digest)
    )


def test_the_evaluator_of_a_split_member_is_who_measured_most() -> None:
    lock, chain, round = opened(members=2)
    for number, unit in (
        (0, member(0, 0, 0)),
        (1, member(0, 1, 3)),
        (0, member(1, 0, 1)),
        (1, member(1, 2, 3)),
    ):
        round = rounds.fill(round, number, result(lock, unit, parent=round.parent))
    close, _ = rounds.closing(round, lock, Ops(3), now=0.0)
    assert close is not None
    assert [m.evaluator for m in rounds.commit_body(chain, round, close).members] == [1, 0]


# ---------------------------------------------------------------- who works on what


def node(
    lock: Lock, name: str, number: int, *units: Unit, pace: float | None = 1.0, since: float = 0.0
) -> Node:
    held = tuple(Lease(unit, since, since, since) for unit in units)
    made = Node(key_of(name), name, number, hello(lock), 0.0, 2, applied=0, pace=pace)
    return replace(made, leases=membership.placed(made.hello.lanes, held, since))


def leased(round: Round, *nodes: Node) -> Round:
    for holder in nodes:
        for lease in holder.leases:
            round = rounds.lease(round, lease.unit, 1)
    return round


def test_whole_members_first_then_even_shares_of_what_is_left() -> None:
    lock, _, round = opened(members=4)
    a = node(lock, "a", 0)
    assert leases.next_unit(round, lock, a, leases.Pool(2, 2), (0, 1))[0] == member(0)
    round = rounds.lease(rounds.lease(rounds.lease(round, member(0), 1), member(1), 1), member(2), 1)
    assert leases.next_unit(round, lock, a, leases.Pool(2, 2), (0, 1))[0] == member(3, 0, 1), "two share it"
    assert leases.next_unit(round, lock, a, leases.Pool(8, 8), (0, 1))[0] == member(3, 0, 0)
    round = rounds.lease(round, member(3), 1)
    assert leases.next_unit(round, lock, a, leases.Pool(2, 2), (0, 1)) == (
        None,
        "every chunk is in or in work",
    )


def test_a_member_stays_whole_where_batches_may_change_answers() -> None:
    lock, _, round = opened(members=4, repeatable=False)
    assert leases.next_unit(round, lock, node(lock, "a", 0), leases.Pool(50, 50), (0,))[0] == member(0)


def test_a_probe_goes_out_first_and_in_even_shares() -> None:
    lock, _, round = opened({"eval_every": 1}, members=4, repeatable=False)
    a = node(lock, "a", 0)
    assert leases.next_unit(round, lock, a, leases.Pool(1, 1), (0,))[0] == Unit(0, Kind.PROBE, 0, 0, 1)
    unit, _ = leases.next_unit(round, lock, a, leases.Pool(2, 2), (0, 1))
    assert unit == Unit(0, Kind.PROBE, 0, 0, 0)
    assert leases.next_unit(rounds.lease(round, unit, 1), lock, a, leases.Pool(2, 2), (0, 1))[0] == Unit(
        0, Kind.PROBE, 0, 1, 1
    )
    round = rounds.lease(round, Unit(0, Kind.PROBE, 0, 0, 1), 1)
    assert leases.next_unit(round, lock, a, leases.Pool(2, 2), (0, 1))[0] == member(0)


def test_a_failed_member_goes_to_a_node_that_has_not_tried() -> None:
    lock, _, round = opened(members=2)
    round = rounds.fail(round, 0, member(0), "no")
    a, b = node(lock, "a", 0), node(lock, "b", 1)
    assert leases.next_unit(round, lock, a, leases.Pool(1, 1), (0, 1))[0] == member(1)
    assert leases.next_unit(round, lock, b, leases.Pool(1, 1), (0, 1))[0] == member(0)
    assert leases.next_unit(round, lock, a, leases.Pool(1, 1), (0,))[0] == member(0), "alone it tries again"


def test_an_idle_node_shares_a_waiting_unit_by_speed() -> None:
    lock, _, round = opened(members=4)
    slow = replace(node(lock, "slow", 0, member(0), member(1), pace=3.0), heard=11.0)
    fast = node(lock, "fast", 1, pace=1.0)
    round = leased(filled(lock, round, 2, 3), slow)
    found, reason = leases.rescue(round, lock, leases.tail([slow, fast], 11.0), fast)
    assert found is not None and found.victim == slow.key and found.old == member(1)
    assert found.unit == member(1, 1, 3) and found.keep == member(1, 0, 0), "4 s there, 3 s here"
    assert "slow would have ended it in 13 s" in reason


def test_chunks_that_are_in_already_are_not_handed_on() -> None:
    lock, _, round = opened(members=2)
    slow = node(lock, "slow", 0, member(0), member(1, 0, 1), pace=3.0)
    idle = node(lock, "idle", 1, pace=3.0)
    round = rounds.fill(leased(round, slow), 1, result(lock, member(1, 0, 0), parent=round.parent))
    found, _ = leases.rescue(round, lock, leases.tail([slow, idle], 1.0), idle)
    assert found is not None and (found.unit, found.keep) == (member(1, 1, 1), None)


def test_the_slowest_running_unit_is_run_again_and_only_if_that_helps() -> None:
    """Whole, where members stay whole: the slowest first, then the next."""
    lock, _, round = opened(members=4, repeatable=False)
    slow = node(lock, "slow", 0, member(0), pace=10.0)
    slower = node(lock, "slower", 1, member(1), pace=20.0)
    idle = node(lock, "idle", 2, pace=1.0)
    round = leased(filled(lock, round, 2, 3), slow, slower)
    view = leases.tail([slow, slower, idle], 1.0)
    assert leases.rescue(round, lock, view, idle)[0] == leases.Rescue(member(1))
    again = rounds.lease(round, member(1), 1)
    view = view.along(member(1), idle)
    other = node(lock, "other", 3, pace=1.0)
    assert leases.rescue(again, lock, view, other)[0] == leases.Rescue(member(0))
    lazy = node(lock, "idle", 2, pace=50.0)
    assert leases.rescue(round, lock, leases.tail([slow, slower, lazy], 1.0), lazy)[0] is None


def test_idle_nodes_share_what_is_run_again_and_a_slow_helper_is_helped_too() -> None:
    lock, _, round = opened(members=2)
    slow = node(lock, "slow", 0, member(0), pace=20.0)
    idle = [node(lock, "a", 1, pace=9.0), node(lock, "b", 2), node(lock, "c", 3)]
    round = leased(filled(lock, round, 1), slow)
    view, found = leases.tail([slow, *idle], 1.0), []
    for helper in (*idle, idle[2]):
        rescue, _ = leases.rescue(round, lock, view, helper)
        assert rescue is not None and rescue.victim is None
        round, view = rounds.lease(round, rescue.unit, 1), view.along(rescue.unit, helper)
        found.append(rescue.unit)
    assert found == [member(0, 2, 3), member(0, 1, 1), member(0, 0, 0), member(0, 3, 3)]
    assert leases.rescue(round, lock, view, idle[1])[0] == leases.Rescue(member(0, 2, 2))


def test_no_chunk_is_run_by_more_than_three_nodes() -> None:
    lock, _, round = opened(members=2)
    slow = node(lock, "slow", 0, member(0), pace=20.0)
    idle = node(lock, "idle", 1, pace=1.0)
    round = leased(filled(lock, round, 1), slow, slow, slow)
    assert leases.rescue(round, lock, leases.tail([slow, idle], 1.0), idle)[0] is None


def test_what_a_silent_node_holds_is_run_again_at_once() -> None:
    lock, _, round = opened(members=2)
    silent = node(lock, "silent", 0, member(0), pace=1.0)
    idle = replace(node(lock, "idle", 1, pace=5.0), heard=7.0)
    round = leased(filled(lock, round, 1), silent)
    found, reason = leases.rescue(round, lock, leases.tail([silent, idle], 7.0), idle)
    assert found == leases.Rescue(member(0, 2, 3)) and reason == "silent is silent"


def test_a_node_is_known_to_be_slow_by_a_unit_that_others_ended() -> None:
    """From the progress it told, once that is enough; an older word on its pace counts too."""
    lock, _, _ = opened(members=2)
    holder = node(lock, "slow", 0, member(0), pace=None)
    told = replace(holder.leases[0], began=0.0, moved=10.0, progress=500)
    assert membership.pace_so_far(holder, told) == 5.0, "two of four chunks in 10 s"
    assert membership.pace_so_far(replace(holder, pace=1.0), told) == pytest.approx(0.7 + 0.3 * 5.0)
    for changes in ({"progress": 99}, {"began": None}, {"sent": False}, {"began": 10.0}):
        assert membership.pace_so_far(holder, replace(told, **changes)) is None, changes


@pytest.mark.parametrize(
    ("changes", "now", "standing"),
    [
        ({}, 1.0, membership.READY),
        ({}, 7.0, membership.SUSPECT),
        ({}, 16.0, membership.LOST),
        ({"number": None}, 1.0, membership.NEW),
        ({"applied": 3}, 1.0, membership.BEHIND),
        ({"applied": -1}, 1.0, membership.BEHIND),
        ({"applied": 4}, 1.0, membership.READY),
        ({"left": "bye"}, 1.0, membership.LEFT),
        ({"stalled": (member(0), 250)}, 1.0, membership.STALLED),
    ],
)
def test_how_a_node_stands(changes: dict[str, Any], now: float, standing: str) -> None:
    made = replace(node(desk_lock(), "a", 0), applied=5)
    word, reason = membership.standing(replace(made, **changes), 5, now)
    assert word == standing and reason


def test_a_lease_outlives_slow_units_but_not_still_ones() -> None:
    lock = desk_lock()
    held = Lease(member(0), 0.0, 0.0, moved=0.0, began=0.0)
    slow = replace(node(lock, "a", 0, pace=20.0), heard=399.0)
    assert not membership.expiry(slow, held, 30.0, None, 399.0).ok, "five times its usual 80 s are not over"
    assert membership.expiry(replace(slow, heard=401.0), held, 30.0, None, 401.0).ok
    quick = replace(node(lock, "a", 0, pace=0.1), heard=31.0)
    assert "no progress for 31 s" in membership.expiry(quick, held, 30.0, None, 31.0).reason
    assert not membership.expiry(quick, replace(held, moved=5.0), 30.0, None, 31.0).ok


def test_how_long_a_unit_that_moves_may_take_is_known_from_others() -> None:
    lock = desk_lock()
    held = Lease(member(0), 0.0, 0.0, moved=1000.0, began=0.0)
    new = replace(node(lock, "a", 0), heard=1000.0, pace=None)
    assert not membership.expiry(new, held, 30.0, None, 1000.0).ok, "nobody knows"
    for slow, pool in ((new, 1.0), (replace(new, pace=1.0), None)):
        known = membership.expiry(slow, held, 30.0, pool, 1000.0)
        assert known.reason == "no result for 1000 s, the limit is 120 s"
