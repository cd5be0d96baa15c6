"""Several engines as one: units, agreement, repair, crashes; on virtual time, and under drawn faults."""

from __future__ import annotations

import random

import pytest

from esnode import events as ne
from esnode import lanes
from esnode import proofevents as pe
from esnode import snapshotevents as se
from esnode.laneevents import Said
from tests.lanebench import Bench, ready, replace, unit_of


def of(bench: Bench, kind: type) -> list:
    return [event for event in bench.answers if isinstance(event, kind)]


# ---------------------------------------------------------------- units


def test_units_go_to_free_lanes_and_the_quickest_gets_the_next() -> None:
    bench = ready(3.0, 1.0)
    bench.evaluate(0, 1, 2)
    bench.run(1.1)
    assert unit_of(1) in bench.outcomes and unit_of(2) not in bench.outcomes
    bench.run(4.0)
    assert not bench.busy
    bench.evaluate(3)
    bench.run(1.1)
    assert unit_of(3) in bench.outcomes, "the quick lane is asked first"


def test_a_lane_that_only_scores_is_free() -> None:
    bench = ready(5.0)
    bench.evaluate(0, 1)
    bench.run(1.0)
    assert len(bench.state.waiting) == 1
    bench._step(bench_said(bench, ne.Generated(0.0, unit_of(0))))
    assert not bench.state.waiting and of(bench, ne.Generated)


def bench_said(bench: Bench, event: ne.Event):  # type: ignore[no-untyped-def]
    return Said(bench.now, 0, event)


def test_a_waiting_unit_is_cancelled_at_once_and_a_running_one_by_its_lane() -> None:
    bench = ready(3.0)
    bench.evaluate(0, 1)
    bench.ask(ne.CancelUnit(unit_of(1)))
    assert isinstance(bench.outcomes[unit_of(1)], ne.Cancelled)
    bench.ask(ne.CancelUnit(unit_of(0)))
    bench.run(4.0)
    assert isinstance(bench.outcomes[unit_of(0)], ne.Cancelled)


# ---------------------------------------------------------------- crashes


def test_the_unit_of_a_killed_engine_is_run_by_another_and_the_lane_comes_back() -> None:
    bench = ready(2.0, 2.0)
    bench.apply(3)
    bench.run(1.0)
    bench.evaluate(0)
    bench.run(0.5)
    bench.kill(0)
    changed = of(bench, ne.LanesChanged)[-1]
    assert (changed.lanes, changed.lost) == (1, "lane 0 (cpu0) has ended: killed by signal 9")
    bench.run(3.0)
    assert isinstance(bench.outcomes[unit_of(0)], ne.Evaluated)
    bench.run(8.0)
    assert [lane.phase for lane in bench.state.lanes] == ["ready", "ready"]
    changed = of(bench, ne.LanesChanged)[-1]
    assert bench.engines[0].master == bench.chain[:3] and (changed.lanes, changed.lost) == (2, "")


def test_a_lane_that_comes_back_catches_up_with_a_node_that_goes_on() -> None:
    bench = ready(1.0, 1.0)
    bench.kill(0)
    for _ in range(6):
        bench.apply()
        bench.run(0.7)
    bench.run(3.0)
    assert bench.engines[0].master == bench.chain[:6] and bench.state.lanes[0].phase == "ready"


def test_a_crash_within_an_update_holds_nobody_up() -> None:
    bench = ready(1.0, 1.0, 1.0)
    bench.apply()
    bench.kill(1)
    bench.run(0.5)
    assert of(bench, ne.EntriesApplied)


def test_all_engines_die_within_an_update_and_the_first_that_returns_does_it() -> None:
    bench = ready(1.0, 1.0)
    bench.apply(2)
    bench.run(1.0)
    bench.apply()
    bench.kill(0)
    bench.kill(1)
    bench.run(8.0)
    assert bench.applied == 3 and bench.moving is None


def test_a_unit_that_ends_engines_is_failed_after_the_second() -> None:
    bench = ready(1.0, 1.0)
    for engine in bench.engines:
        engine.deadly.add(unit_of(0))
    bench.evaluate(0)
    bench.run(4.0)
    assert "2 engines ended" in getattr(bench.outcomes[unit_of(0)], "reason", "")


def test_pauses_between_restarts_double_and_a_hopeless_lane_is_given_up() -> None:
    bench = ready(1.0, 1.0)
    pauses = []
    for _ in range(4):
        bench.kill(0)
        pauses.append(bench.state.lanes[0].retry - bench.now)
        bench.run(15.0)
    assert all(0.5 * 2**k <= pause <= 1.5 * 2**k for k, pause in enumerate(pauses)), pauses
    bench.kill(0)
    assert bench.state.lanes[0].phase == "given up" and not bench.failed
    assert "lane 0 (cpu0) is given up: it has ended 5 times in a row" in bench.words[-1]
    bench.evaluate(0)
    bench.run(2.0)
    assert not bench.busy, "the other works on"


def test_a_measured_unit_ends_the_count() -> None:
    bench = ready(1.0)
    for k in range(7):
        bench.kill(0)
        bench.run(30.0)
        bench.evaluate(k)
        bench.run(2.0)
    assert not bench.failed and not bench.busy


def test_the_last_lane_given_up_ends_the_node_with_one_sentence() -> None:
    bench = Bench(1.0)
    bench.refuses.add(0)
    for _ in range(2):
        bench.kill(0)
        bench.run(10.0)
    assert (
        bench.failed == "no engine of this node is left. lane 0 (cpu0) is given up: out of memory: buy more"
    )


def test_an_engine_that_is_deaf_to_a_cancel_is_ended() -> None:
    bench = ready(1000.0, 1.0)
    bench.evaluate(0)
    bench.ask(ne.CancelUnit(unit_of(0)))
    bench.run(59.0)
    assert bench.busy
    bench.run(10.0)
    assert isinstance(bench.outcomes[unit_of(0)], ne.Cancelled) and bench.engines[0].life == 2


def test_an_engine_that_stands_still_is_ended_and_its_unit_runs_elsewhere() -> None:
    bench = ready(1e6, 1.0)
    bench.evaluate(0)
    bench.run(890.0)
    assert bench.busy
    bench.run(20.0)
    assert isinstance(bench.outcomes[unit_of(0)], ne.Evaluated)


def test_an_engine_that_does_not_end_an_update_is_ended() -> None:
    bench = ready(1.0, 1.0)
    bench.engines[0].free = 1e6
    bench.apply()
    bench.run(290.0)
    assert bench.moving
    bench.run(30.0)
    assert bench.applied == 1 and bench.engines[0].master == bench.chain[:1]


# ---------------------------------------------------------------- agreement


@pytest.mark.parametrize("seen", [True, False])
def test_an_odd_one_of_three_is_rebuilt_while_the_others_work(seen: bool) -> None:
    bench = ready(1.0, 1.0, 1.0)
    bench.apply(2)
    bench.run(1.0)
    bench.flip(1, seen)
    bench.apply()
    bench.run(0.3)
    assert bench.applied == 3, "nobody waits for the odd one"
    bench.evaluate(0, 1)
    bench.run(2.0)
    assert not bench.busy and bench.state.lanes[1].phase == "ready" and not bench.engines[1].damage
    (repaired,) = of(bench, ne.LaneRepaired)
    assert "lane 1 (cpu1)" in repaired.reason and ("changed in memory" in repaired.reason) == seen


def test_a_flip_that_is_noticed_before_a_unit_costs_the_unit_nothing() -> None:
    bench = ready(1.0, 1.0)
    bench.flip(0, seen=True)
    bench.evaluate(0)
    bench.run(4.0)
    assert isinstance(bench.outcomes[unit_of(0)], ne.Evaluated) and of(bench, ne.LaneRepaired)


def test_of_two_that_differ_nobody_is_believed_and_replay_decides() -> None:
    bench = ready(1.0, 1.0)
    bench.apply(2)
    bench.run(1.0)
    bench.flip(1, seen=False)
    bench.apply()
    bench.run(2.0)
    assert "lanes differ after one update" in of(bench, ne.LanesDiffer)[0].reason
    assert of(bench, ne.Rewound) and bench.applied == 0
    bench.apply(3)
    bench.run(1.0)
    assert bench.applied == 3 and [engine.damage for engine in bench.engines] == [0, 0]


def test_an_engine_whose_arithmetic_is_wrong_is_given_up_and_two_of_them_end_the_node() -> None:
    bench = ready(1.0, 1.0, 1.0)
    bench.engines[2].always = bench.engines[2].damage = 4
    bench.apply()
    bench.run(5.0)
    assert bench.applied == 1 and bench.state.lanes[2].phase == "given up"
    bench = ready(1.0, 1.0)
    bench.engines[1].always = bench.engines[1].damage = 4
    for _ in range(6):
        if not bench.moving and not bench.failed:
            bench.apply()
        bench.run(5.0)
    assert "compute different bits" in bench.failed and "esnode doctor" in bench.failed


# ---------------------------------------------------------------- errands


def test_what_one_lane_does_for_the_node() -> None:
    bench = ready(1.0, 1.0)
    bench.apply(3)
    bench.run(1.0)
    bench.errand = se.Save(3, b"e", bench.truth)
    bench.ask(bench.errand)
    bench.run(1.0)
    assert bench.snapshot == 3
    bench.errand = pe.TakeDigests()
    bench.ask(bench.errand)
    bench.kill(0)
    bench.run(1.0)
    assert of(bench, pe.Digested)[0].digests == (bench.truth,), "another one reads"
    bench.flip(1, seen=False)
    bench.errand = pe.Prove(bench.chain[:3], (0,), False)
    bench.ask(bench.errand)
    bench.run(1.0)
    bench.errand = pe.Mend((0,))
    bench.ask(bench.errand)
    bench.run(1.0)
    assert of(bench, pe.Mended)[0].digest == bench.truth


def test_a_snapshot_dies_with_its_engine_and_is_not_begun_on_a_later_state() -> None:
    bench = ready(1.0, 1.0)
    bench.errand = se.Save(3, b"e", bench.truth)
    bench.ask(bench.errand)
    bench.kill(0)
    assert of(bench, se.Saved)[0].reason == "the engine that wrote it has ended"


def test_damage_found_while_digests_are_read_is_mended_before_they_are_told() -> None:
    bench = ready(1.0)
    bench.apply(2)
    bench.run(1.0)
    bench.flip(0, seen=True)
    bench.errand = pe.TakeDigests()
    bench.ask(bench.errand)
    bench.run(3.0)
    (digested,) = of(bench, pe.Digested)
    assert digested.digests == (bench.truth,) and not digested.damaged and of(bench, ne.LaneRepaired)


# ---------------------------------------------------------------- one master for several lanes


def phases(bench: Bench) -> list[str]:
    return [lane.phase for lane in bench.state.lanes]


def test_one_leads_and_the_others_reread_what_it_wrote() -> None:
    bench = ready(1.0, 1.0, 1.0, shared=range(3))
    assert [engine.leads for engine in bench.engines] == [True, False, False]
    told = len(of(bench, ne.LanesChanged))
    for k in range(4):
        bench.apply()
        bench.run(0.25)
        assert bench.applied == k + 1, "D comes before the others have reread"
        bench.evaluate(3 * k, 3 * k + 1, 3 * k + 2)
        bench.run(1.5)
        assert not bench.busy and all(engine.master == bench.chain[: k + 1] for engine in bench.engines)
    assert len(of(bench, ne.LanesChanged)) == told, "rereading lanes are counted all the while"


def test_an_update_waits_for_a_lane_that_rereads() -> None:
    bench = ready(1.0, 1.0, shared=range(2))
    for _ in range(5):  # the bench asserts that nobody reads what is being written
        bench.apply()
        while bench.moving:
            bench.run(0.01)
        assert bench.state.lanes[1].phase == "catching up"
    bench.run(1.0)
    assert bench.applied == 5 and phases(bench) == ["ready", "ready"]


def test_a_reader_that_dies_starts_again_alone() -> None:
    bench = ready(1.0, 1.0, shared=range(2))
    bench.apply(3)
    bench.run(1.0)
    bench.evaluate(0, 1)
    bench.run(0.3)
    bench.kill(1)
    bench.run(5.0)
    assert not bench.busy and bench.engines[0].life == 1 and bench.engines[1].life == 2
    assert phases(bench) == ["ready", "ready"] and bench.engines[1].memory is bench.engines[0].memory


@pytest.mark.parametrize("within", ["unit", "update", "loading"])
def test_readers_follow_a_new_leader_when_theirs_dies(within: str) -> None:
    bench = ready(1.0, 1.0, 1.0, shared=range(3))
    old = bench.engines[1].memory
    bench.apply(2)
    bench.run(1.0)
    if within == "unit":
        bench.evaluate(0, 1, 2)
    elif within == "update":
        bench.apply()
    else:
        bench.kill(2)
        while bench.state.lanes[2].phase != "starting":
            bench.run(0.1)
    bench.run(0.1)
    bench.kill(0)
    bench.run(8.0)
    assert not bench.busy and not bench.moving and phases(bench) == ["ready"] * 3
    assert bench.state.leader != 0 and bench.engines[bench.state.leader].leads
    assert len({id(engine.memory) for engine in bench.engines}) == 1 and bench.engines[1].memory is not old
    assert bench.engines[1].master == bench.chain[: bench.applied]
    assert bench.state.lanes[1].crashes == 0, "it was ended for its leader's sake"


def test_a_leader_that_cannot_load_leaves_it_to_the_next() -> None:
    bench = Bench(1.0, 1.0, 1.0, shared=range(3))
    bench.run(0.5)
    assert [lane.role for lane in bench.state.lanes] == ["", "waits for a master", "waits for a master"]
    bench.kill(0, "too little memory", refused=True)
    bench.run(4.0)
    assert phases(bench) == ["given up", "ready", "ready"] and bench.state.leader == 1


def test_damage_that_a_reader_finds_is_mended_by_the_leader_alone() -> None:
    bench = ready(3.0, 1.0, 1.0, shared=range(3))
    bench.apply(2)
    bench.run(1.0)
    bench.evaluate(0)
    bench.run(0.1)
    bench.flip(1, seen=True)
    bench.evaluate(1)
    bench.run(8.0)
    assert not bench.busy and phases(bench) == ["ready"] * 3 and not bench.engines[0].damage
    assert "lane 0" in of(bench, ne.LaneRepaired)[0].reason
    assert all(engine.life == 1 for engine in bench.engines)


def test_a_mend_is_written_by_the_leader_and_reread() -> None:
    bench = ready(1.0, 1.0, shared=range(2))
    bench.apply(3)
    bench.run(1.0)
    bench.flip(0, seen=False)
    for errand in (pe.Prove(bench.chain[:3], (0,), False), pe.Mend((0,))):
        bench.errand = errand
        bench.ask(errand)
        bench.run(1.0)
    assert of(bench, pe.Mended)[0].digest == bench.truth
    bench.evaluate(0, 1)
    bench.run(2.0)
    assert not bench.busy and bench.engines[1].read == bench.engines[0].memory.writes


def test_lanes_with_a_master_of_their_own_are_compared_with_the_leader() -> None:
    bench = ready(1.0, 1.0, 1.0, shared=(1, 2))
    bench.apply(2)
    bench.run(1.0)
    bench.flip(0, seen=False)
    bench.apply()
    bench.run(2.0)
    assert "lanes differ after one update" in of(bench, ne.LanesDiffer)[0].reason
    bench.apply(2)
    bench.run(3.0)
    assert phases(bench) == ["ready"] * 3 and bench.engines[0].damage == 0


# ---------------------------------------------------------------- anything at all


@pytest.mark.parametrize("seed", range(120))
def test_any_faults(seed: int) -> None:
    """A node at work while engines die and bits flip: every unit is answered once, every D is replay's.

    With every other seed lanes share a master, all or some of them.
    """
    rng = random.Random(seed)
    paces = [rng.choice((0.3, 1.0, 2.5)) for _ in range(rng.randint(1, 4))]
    shared = [k for k in range(len(paces)) if rng.random() < 0.8] if seed % 2 else []
    bench = Bench(*paces, seed=seed, shared=shared)
    member = 0
    for _ in range(120):
        bench.run(rng.uniform(0.1, 1.0))
        assert not bench.failed, bench.failed
        dice = rng.random()
        if dice < 0.06:
            victim = rng.randrange(len(bench.engines))
            if bench.state.lanes[victim].crashes < lanes.MOST_CRASHES - 1:
                bench.kill(victim)
        elif dice < 0.10 and not bench.moving:
            bench.flip(rng.randrange(len(bench.engines)), seen=True)
        elif dice < 0.5 and not bench.moving and len(bench.busy) < bench.state.offered:
            bench.evaluate(member)
            member += 1
        elif dice < 0.7 and not bench.busy and not bench.moving and bench.applied < len(bench.chain):
            bench.apply()
        elif dice < 0.8 and bench.busy:
            bench.ask(ne.CancelUnit(min(bench.busy, key=lambda unit: unit.member)))
        elif dice < 0.84 and bench.errand is None and not bench.moving:
            bench.errand = se.Save(bench.applied, b"e", bench.truth)
            bench.ask(bench.errand)
        elif dice < 0.86 and not bench.busy and not bench.moving:
            bench.rewind(rng.random() < 0.5)
    bench.run(200.0)
    assert not bench.failed and not bench.busy and not bench.moving
    assert all(lane.phase in ("ready", "given up") for lane in bench.state.lanes)
    for lane, engine in zip(bench.state.lanes, bench.engines, strict=True):
        assert lane.phase == "given up" or engine.master == bench.chain[: bench.applied]


# ---------------------------------------------------------------- processes that are stopped


@pytest.mark.parametrize("moment", ["loading", "idle", "unit", "apply", "catching up"])
def test_a_stopped_process_is_ended_whatever_it_was_at(moment: str) -> None:
    bench = Bench(1.0, 1.0)
    if moment != "loading":
        bench.run(2.0)
    if moment == "unit":
        bench.evaluate(0, 1)
    if moment == "catching up":
        bench.apply(2)
        bench.run(1.0)
        bench.kill(0)
        while bench.state.lanes[0].phase != "catching up":
            bench.run(0.1)
    bench.engines[0].stopped = True
    if moment == "apply":
        bench.engines[1].stopped = True  # nobody has done it, so no pace of another says that one is late
        bench.apply()
    bench.run(130.0)
    assert any("says nothing any more and is ended" in words for words in bench.words)
    assert [lane.phase for lane in bench.state.lanes] == ["ready", "ready"]
    assert not bench.busy and bench.moving is None and not bench.failed


@pytest.mark.parametrize("moment", ["loading", "unit", "apply", "rereading"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_lane_over_a_shared_master(victim: int, moment: str) -> None:
    bench = Bench(1.0, 1.0, shared=range(2))
    if moment != "loading":
        bench.run(3.0)
    if moment == "unit":
        bench.evaluate(0, 1)
    elif moment != "loading":
        bench.apply()
        while moment == "rereading" and bench.moving:
            bench.run(0.01)
    bench.engines[victim].stopped = True
    bench.run(150.0)
    assert any("says nothing any more and is ended" in words for words in bench.words)
    assert phases(bench) == ["ready", "ready"] and not bench.busy and bench.moving is None
    assert bench.engines[1 - victim].life == (2 if victim == 0 and moment != "loading" else 1)


def test_a_node_that_was_stopped_itself_blames_nobody() -> None:
    bench = ready(1.0, 1.0)
    bench.now += 3600.0
    bench.run(10.0)
    assert bench.starts == 2 and not bench.words


def test_a_unit_lost_while_it_was_scored_is_not_measured_on_later_weights() -> None:
    """The node's core has been told that its answers are there, so an update may come before it is redone."""
    bench = ready(9.0, 9.0)
    bench.evaluate(0, 1)
    bench.run(0.5)
    for number, lane in enumerate(bench.state.lanes):
        bench._step(Said(bench.now, number, ne.Generated(0.0, lane.jobs[0].unit)))
    bench.busy.clear()  # to the core nobody needs the weights
    bench.apply()
    bench.busy |= {unit_of(0), unit_of(1)}
    bench.kill(0)
    bench.run(30.0)
    lost = [outcome for outcome in bench.outcomes.values() if isinstance(outcome, ne.EvaluationFailed)]
    assert not bench.busy and [outcome.reason for outcome in lost] == [
        "its engine ended while the answers were scored"
    ]


def test_units_that_a_given_up_lane_was_scoring_are_not_lost() -> None:
    bench = ready(5.0, 1.0)
    bench.evaluate(0)
    first, second = bench.state.lanes
    bench.state = replace(bench.state, lanes=(replace(first, phase="given up"), second))
    bench.kill(0)
    bench.run(3.0)
    assert isinstance(bench.outcomes[unit_of(0)], ne.Evaluated)
    assert bench.state.lanes[0].phase == "given up" and bench.starts == 2
