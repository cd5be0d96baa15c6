"""Audits: chosen secretly, measured twice, judged by two tests; liars are caught and nobody else."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

import coordinator.events as ce
from coordinator import audit, machine
from coordinator.audit import Sums
from coordinator.cases import Audits, Case, Half
from coordinator.membership import QUARANTINED, standing
from protocol.messages import Evidence, Kind, Release, Unit
from protocol.shaping import coefficients
from tests.desk import Desk, hello, key_of
from tests.pool import LIARS, SECRET, Pool

# ---------------------------------------------------------------- as they run


def test_an_audit_looks_like_any_other_unit_and_never_counts_twice() -> None:
    pool = Pool(1, 3, share=1.0, members=4)
    pool.rounds(3)
    state = pool.desk.state
    assert state.chain.round == 3 and state.counters["audits begun"] == 12
    assert (
        state.counters["audits"]
        + len(state.audits.cases)
        + state.counters.get("audits that ran out of time", 0)
        >= 12
    )
    for commit in state.chain.commits:
        assert [m.index for m in commit.body.members] == [0, 1, 2, 3]
    assert "conflicts" not in state.counters, "another value of an audit is no conflict"


def test_the_choice_depends_on_the_secret_alone() -> None:
    begun = []
    for _ in range(2):
        pool = Pool(2, 3, share=0.3)
        pool.rounds(4)
        begun.append(pool.desk.state.counters["audits begun"])
    assert begun[0] == begun[1] and 10 <= begun[0] <= 40
    desk = Desk(ops={"audit_share": 1.0})
    desk.join("a", "b")
    desk.result("a", desk.assigned("a")[0])
    assert not desk.state.audits.cases, "no secret, no audit"


def test_one_node_alone_is_not_audited_and_no_round_waits() -> None:
    pool = Pool(3, 1, share=1.0, members=4)
    pool.rounds(3)
    assert pool.desk.state.chain.round == 3 and "audits begun" not in pool.desk.state.counters


def test_a_round_does_not_wait_for_ever_for_a_second_result() -> None:
    pool = Pool(4, 2, share=1.0, members=2)
    desk = pool.desk
    case = None
    while case is None:
        name = next(n for n in "ab" if desk.assigned(n))
        pool._measure(name, desk.assigned(name)[0])
        case = next((c for c in desk.state.audits.cases if c.auditor), None)
    slow = desk.allowed[case.auditor]
    fast = "a" if slow == "b" else "b"
    for _ in range(100):
        for unit in desk.assigned(fast):
            pool._measure(fast, unit)
        if desk.assigned(slow) and desk.state.round is not None and desk.state.round.unsettled:
            others = [u for u in desk.assigned(slow) if u != case.first.unit]
            for unit in others:
                pool._measure(slow, unit)
        pool._answer()
        desk.tick(2.0)
        desk.beat("a", *((u, 1) for u in desk.assigned("a")))
        desk.beat("b", *((u, 1) for u in desk.assigned("b")))
        if desk.state.chain.round:
            break
    assert desk.state.chain.round == 1 and desk.state.counters["audits that ran out of time"] >= 1


def audited_desk(*names: str) -> Desk:
    """Nodes with a member each; "b" measures that of "a" a second time."""
    desk = Desk(ops={"audit_share": 1.0}, secret=SECRET, members=len(names), chunk=4, repeatable=False)
    desk.join(*names)
    unit = desk.assigned("a")[0]
    desk.result("a", unit)
    assert unit in desk.assigned("b") and auditors(desk) == {"b"}
    return desk


def auditors(desk: Desk) -> set[str]:
    """Who is to measure something a second time; "" for nobody yet."""
    return {desk.allowed.get(case.auditor, "") for case in desk.state.audits.cases if not case.second}


def silence(desk: Desk, *others: str) -> None:
    """All but these say nothing until they are suspect."""
    for _ in range(7):
        for name in others:
            desk.beat(name, *((unit, 1) for unit in desk.assigned(name)))
        desk.tick(1.0)


def test_no_round_waits_for_an_audit_that_nobody_is_there_to_do() -> None:
    """Two nodes, one is killed: both of its units are the other's, and nothing is waited for."""
    desk = audited_desk("a", "b")
    silence(desk, "a")
    assert auditors(desk) == {""} and [unit.member for unit in desk.assigned("a")] == [1]
    desk.work("a")
    assert desk.state.chain.round == 1
    assert desk.state.counters["audits that nobody else could do"] == 2


def test_an_audit_goes_to_another_node_when_the_second_one_falls_silent() -> None:
    desk = audited_desk("a", "b", "c")
    desk.work("c")
    silence(desk, "a", "c")
    assert any(unit.member == 0 for unit in desk.assigned("c")), "a third node measures it"
    desk.result("b", Unit(0, Kind.MEMBER, 0, 0, desk.lock.chunk_count(Kind.MEMBER) - 1))
    assert "audits" not in desk.state.counters, "a late second result is not one any more"


@pytest.mark.parametrize("way", ["released", "said Hello anew"])
def test_an_audit_goes_to_another_node_when_the_second_one_gives_it_back(way: str) -> None:
    desk = audited_desk("a", "b", "c")
    case = next(case for case in desk.state.audits.cases if desk.allowed.get(case.auditor) == "b")
    if way == "released":
        desk.say("b", Release("SIGTERM"))
    else:
        desk.say("b", hello(desk.lock))  # a new process: it holds nothing
    desk.tick()
    auditor = desk.allowed[desk.state.audits.by_number[case.number].auditor]
    assert auditor != "a" and case.first.unit in desk.assigned(auditor)


def test_evidence_that_does_not_fit_its_hash_is_quarantine_at_once() -> None:
    pool = Pool(5, 4, share=1.0, members=8)
    pool.forge.add("b")
    pool.rounds(3)
    assert pool.quarantined["b"] == "its evidence does not fit its hash (1 failed audit)"


def test_a_case_that_ended_with_its_node_is_not_judged_after_it() -> None:
    """One message feeds two cases; the first puts its sender out, and with it the second one's auditor."""
    pool = Pool(5, 3, share=0.0, members=8)
    desk, a, b, c = pool.desk, key_of("a"), key_of("b"), key_of("c")
    one, other = (Unit(0, Kind.MEMBER, member, 0, 0) for member in (0, 1))
    owed = Half(a, one, b"no hash!", (1.0,), b"")
    case = Case(0, owed, auditor=b, second=Half(b, one, b"", (1.0,), b"", done=True))
    twin = Case(
        0, Half(c, other, b"", (1.0,), b"", done=True), theirs=(owed,), auditor=a,
        second=Half(a, other, b"", (1.0,), b"", done=True),
    )  # fmt: skip
    audits = Audits().copy()
    audits.begin(case)
    audits.begin(twin)
    desk.state = replace(desk.state, audits=audits)
    desk.say("a", Evidence(one, 0, 25, (0.5,) * 25))
    assert set(pool.quarantined) == {"a"} and not desk.state.audits.cases
    assert desk.state.counters["failed audits"] == 1


def test_a_restarted_node_that_has_lost_its_evidence_is_no_liar() -> None:
    pool = Pool(6, 3, share=1.0, members=4)
    desk, key = pool.desk, key_of("a")
    while not any(key in (case.first.key, case.auditor) for case in desk.state.audits.cases):
        name = next(name for name in "abc" if desk.assigned(name))
        pool._measure(name, desk.assigned(name)[0])
    pool.kept = {held: scores for held, scores in pool.kept.items() if held[0] != "a"}
    pool.join("a")
    assert not any(key in {half.key for half in case.pair} for case in desk.state.audits.cases)
    pool.rounds(3)
    assert desk.state.chain.round == 3 and not pool.quarantined


def test_quarantine_drops_what_is_not_committed_and_the_operator_lifts_it() -> None:
    pool = Pool(7, 4, share=0.5)
    pool.rounds(15)
    pool.join("e", LIARS["noise of the right spread"])
    pool.rounds(60)
    assert list(pool.quarantined) == ["e"]
    desk, key = pool.desk, key_of("e")
    state = desk.state
    assert standing(state.nodes[key], state.chain.round, state.now)[0] == QUARANTINED
    assert not desk.assigned("e")
    number = state.numbers[key]
    assert state.round is not None and all(number not in c.evaluators for c in state.round.members)
    section = machine.status(state)["audit"]["nodes"]["e"]
    assert "correlation" in section["quarantine"] and section["prompts"] >= audit.ENOUGH
    recalled = machine.new(desk.lock, desk.ops, state.key, desk.allowed)
    for record in desk.journal:
        recalled = machine.recall(recalled, record)
    assert recalled.quarantined == state.quarantined and recalled.evidence == state.evidence
    desk.step(ce.NodeAllowed(desk.now, key, "e"))
    assert not desk.state.quarantined and desk.state.nodes[key].quarantined == ""
    assert desk.new_units("e") or (desk.tick(1.0) and desk.assigned("e"))


def test_equal_engines_are_compared_exactly_and_a_difference_is_shown_not_punished() -> None:
    a, b = [0.0, 1.0, 0.5], [0.0, 1.0, 0.25]
    assert audit.compare(a, a, [a], [a], [], 0.0, 1.0, alike=True) == Sums(same=1)
    found = audit.compare(a, b, [], [], [], 0.0, 1.0, alike=True)
    assert (found.other, found.pairs, found.d) == (1, 3, 0.25)
    assert audit.judge({(b"a", b"b"): found}, ()) is None


# ---------------------------------------------------------------- the tests


def test_two_nodes_that_differ_say_nothing_about_which_is_wrong() -> None:
    evidence = {(b"a", b"b"): Sums(pairs=5000, d=500, dd=100)}
    assert audit.judge(evidence, ()) is None
    third = {**evidence, (b"a", b"c"): Sums(pairs=2000, d=200, dd=40), (b"b", b"c"): Sums(pairs=2000)}
    found = audit.judge(third, ())
    assert found is not None and found[0] == b"a" and "higher" in found[1]


def test_the_numbers_of_the_design_are_those_of_the_bias_test() -> None:
    limit = Sums(pairs=1000, d=0.02 * 1000 + 6 * 8, dd=63)
    assert limit.excess == pytest.approx(0) and (audit.ALLOWANCE, audit.SIGMAS) == (0.02, 6)
    assert audit.ERRORS == 4


def test_the_clip_bounds_the_pull_of_one_member() -> None:
    """A liar's single huge reward pulls as much as the clip lets it, whatever it says."""
    rewards = [0.5 + 0.001 * (k % 7) for k in range(29)]
    for huge in (1.0, 1e6):
        free = coefficients([*rewards, huge], 0.01, "zscore")
        bound = coefficients([*rewards, huge], 0.01, "zscore", clip=3.0)
        assert free is not None and bound is not None
        pull = [abs(found.c[-1]) * 2.0**-found.shift for found in (free, bound)]
        step = 0.01 / 30 * 2.0**-13
        assert pull[0] / step > 5 and pull[1] / step == pytest.approx(3.0, rel=1e-3)


def test_who_says_high_where_all_others_say_low_is_found_and_noise_of_the_prompts_is_not() -> None:
    """Rewards of 0 or 1: 20 prompts nobody solves, 5 that some do; one node solves a fifth of all."""
    nobody, some = [0.0] * 20, [0.0, 1.0, 0.0, 1.0, 1.0]
    others = [nobody + some, nobody + some[::-1], nobody + some]
    liar = [float(k % 5 == 0) for k in range(20)] + some
    evidence: dict[tuple[bytes, bytes], Sums] = {}
    for scores, caught in ((others[0], None), (liar, b"a")):
        for turn in range(12):
            pair = (b"a", b"bc"[turn % 2 : turn % 2 + 1])
            rates = audit.rates(evidence, b"a", ())
            new = audit.compare(
                scores, others[1], [scores], [others[2]], [others[0]], 0.0, 1.0,
                first_rates=rates, second_rates=audit.rates(evidence, pair[1], ()), alike=False,
            )  # fmt: skip
            evidence[pair] = (evidence.get(pair, Sums()) + new).floored
            evidence[b"b", b"c"] = evidence.get((b"b", b"c"), Sums()) + Sums(pairs=25, low=20, low_=20)
            found = audit.judge(evidence, ())
        assert (found and found[0]) == caught
    assert found is not None and "high in" in found[1] and "all others' are low" in found[1]


def test_bets_against_a_node_are_seen_from_both_sides() -> None:
    sums = Sums(d=1.0, low=3, over=2, up=1.5, high_=4, down_=0.5)
    turned = sums.turned
    assert (turned.d, turned.low_, turned.over_, turned.up_, turned.high, turned.down) == (
        -1,
        3,
        2,
        1.5,
        4,
        0.5,
    )
    assert turned.turned == sums and Sums(up=-3.0, down_=-1.0, over=1.0).floored == Sums(over=1.0)


# ---------------------------------------------------------------- the study


def caught(seed: int, liar: str, graded: bool) -> int | None:
    """Prompts compared with a liar that joins an honest pool until it is in quarantine; None: never."""
    pool = Pool(seed, 5, graded=graded)
    pool.rounds(25)
    assert not pool.quarantined
    pool.join("f", LIARS[liar])
    pool.rounds(150)
    assert not set(pool.quarantined) - {"f"}, pool.quarantined
    return pool.prompts_of("f") if pool.quarantined else None


def study(seeds: int, graded: bool) -> dict[str, list[int]]:
    table: dict[str, list[int]] = {}
    for liar in LIARS:
        found = [caught(seed, liar, graded) for seed in range(seeds)]
        assert None not in found, f"{liar} was not caught"
        table[liar] = sorted(count for count in found if count is not None)
        kind = "graded" if graded else "0 or 1"
        middle, most = table[liar][seeds // 2], table[liar][-1]
        print(f"{liar}, {kind}: caught after {middle} prompts (half of {seeds}), {most} at most")
    return table


def test_what_is_summed_up_once_for_a_large_pool_is_what_every_node_for_itself_would_find() -> None:
    rng = random.Random(3)
    names = [bytes((k,)) * 32 for k in range(12)]
    evidence = {}
    for _ in range(40):
        one, two = sorted(rng.sample(names, 2))
        values = {name: rng.randrange(1, 400) / 4 for name in Sums.__struct_fields__}
        evidence[one, two] = Sums(**values)
    out = {names[1]: "lies", names[7]: "lies"}
    tables = audit.tables(evidence, out)
    for node in names:
        if node not in out:
            assert tables.get(node, {}) == audit.partners(evidence, node, out)
        others = {key for pair in evidence for key in pair} - {node, *out}
        alone = [audit.total(audit.partners(evidence, key, {node, *out}).values()) for key in others]
        enough = [row for row in alone if row.weight >= audit.SETTLED]
        found = audit.reference(evidence, node, out)
        assert found == (
            (audit._median([row.r for row in enough]), audit._median([row.error for row in enough]))
            if enough
            else None
        )
        usual = audit.total(alone)
        above, below = audit.rates(evidence, node, out)
        shares = ((usual.over, usual.low), (usual.under, usual.high))
        expected = [
            audit.ALLOWANCE + 2 * (hits + audit.MARGIN) / (prompts + audit.MARGIN) for hits, prompts in shares
        ]
        assert [above, below] == pytest.approx(expected)
    assert audit.judge(evidence, out, names) == audit.judge(evidence, out)


def test_every_kind_of_liar_is_caught() -> None:
    table = study(2, graded=True)
    assert max(max(row) for row in table.values()) <= 500


@pytest.mark.slow
@pytest.mark.parametrize("graded", [True, False])
def test_liars_in_full(graded: bool) -> None:
    """The figures of docs/trust.md."""
    table = study(20, graded)
    for liar, row in table.items():
        assert row[len(row) // 2] <= (300 if graded else 1500), liar


def honest_rounds(count: int, graded: bool, seed: int) -> Pool:
    pool = Pool(seed, 5, graded=graded, members=8, share=0.1)
    pool.rounds(count)
    assert pool.desk.state.chain.round == count and not pool.quarantined, pool.quarantined
    counters = pool.desk.state.counters
    assert not {"disputes", "faults", "failed audits", "quarantines"} & counters.keys(), counters
    print(f"{count} honest rounds, {counters['audits']} audits: no false alarm of proof or audit")
    return pool


def test_honest_nodes_on_unlike_hardware_raise_no_alarm() -> None:
    honest_rounds(150, True, 1)
    honest_rounds(150, False, 2)


@pytest.mark.slow
@pytest.mark.parametrize("graded", [True, False])
def test_ten_thousand_honest_rounds(graded: bool) -> None:
    honest_rounds(10_000, graded, 3)
