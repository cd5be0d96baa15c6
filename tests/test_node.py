"""The node's core, event by event: what it says, what it asks of the engine and the disk, in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from esnode import events
from esnode.events import Apply, CancelUnit, Evaluate, Send, Store, StoreTerm
from protocol.entries import (
    Admission,
    EndBody,
    EntryKind,
    RosterBody,
)
from protocol.messages import (
    Ack,
    Applied,
    Assign,
    Cancel,
    Commit,
    CoordBeat,
    Entries,
    Failed,
    Fetch,
    Hello,
    NodeBeat,
    Refuse,
    Result,
    Welcome,
)
from protocol.seeds import member_seed
from tests.bench import LOCK, OUTCOME, Bench, ledger, unit_of, working
from tests.desk import desk_lock, forge, key_of

# ---------------------------------------------------------------- joining


def test_hello_is_repeated_with_backoff_until_welcome() -> None:
    bench = Bench()
    (first,) = bench.sent(Hello)
    assert (first.run, first.height, first.tip, first.digest) == (LOCK.run_id, 0, b"", LOCK.digest)
    times = []
    for _ in range(40):
        if bench.tick(0.25):
            times.append(bench.now)
    assert times == [10.5, 11.5, 13.5, 15.5, 17.5, 19.5]
    bench.welcome(ledger())
    assert bench.state.joined and bench.sent(Fetch) == [Fetch(0, 256)]


def test_a_higher_term_is_on_disk_before_it_is_answered() -> None:
    bench = Bench(term=3)
    entries = ledger()
    bench.welcome(entries, term=2)
    assert not bench.state.joined and not bench.sent(Fetch), "a lower term is ignored"
    bench.welcome(entries, term=5)
    assert [type(effect) for effect in bench.effects] == [StoreTerm, Send, Send], "Reach and Fetch"
    assert bench.state.term == 5
    bench.welcome(entries, term=5)
    assert not bench.all(StoreTerm)


def test_entries_are_verified_stored_and_only_then_used() -> None:
    bench = Bench()
    entries = ledger(LOCK.digest)
    bench.welcome(entries)
    bench.hear(Entries(0, tuple(entry.raw for entry in entries)))
    assert [type(effect) for effect in bench.effects] == [Store, Apply]
    assert bench.all(Store)[0] == Store(0, tuple(entry.raw for entry in entries))
    assert bench.all(Apply)[0].entries == tuple(entries)
    bench.step(events.EntriesApplied(bench.now, (LOCK.digest, LOCK.digest, 55), 12))
    (applied,) = bench.sent(Applied)
    assert (applied.height, applied.tip, applied.digest, applied.ms) == (3, entries[2].hash[:8], 55, 12)


def test_every_round_leaves_a_line_in_the_nodes_log() -> None:
    bench = Bench()
    entries = ledger(LOCK.digest)
    bench.welcome(entries)
    bench.hear(Entries(0, tuple(entry.raw for entry in entries)))
    bench.step(events.EntriesApplied(bench.now, (LOCK.digest, LOCK.digest, 55), 12))
    (note,) = [note for note in bench.all(events.Note) if note.kind == "applied"]
    assert (note.fields["what"], note.fields["ms"]) == ("1 round", 12)


def test_a_restarted_node_replays_what_it_holds_and_says_so() -> None:
    entries = ledger(LOCK.digest, 55)
    bench = Bench(entries)
    (hello,) = bench.sent(Hello)
    assert (hello.height, hello.tip, hello.digest) == (4, entries[-1].hash, 0), (
        "D of the tip is not known yet"
    )
    assert bench.all(Apply)[0].entries == tuple(entries)
    bench.welcome(entries)
    assert not bench.sent(Fetch)


def test_damage_on_disk_is_fetched_again() -> None:
    entries = ledger(LOCK.digest)
    broken = entries[2].raw[:40] + bytes([entries[2].raw[40] ^ 1]) + entries[2].raw[41:]
    bench = Bench()
    bench.step(events.Started(bench.now, 0, (entries[0].raw, entries[1].raw, broken), 0, LOCK.digest))
    assert bench.state.chain.height == 2 and bench.stop is None
    bench.welcome(entries)
    assert bench.sent(Fetch) == [Fetch(2, 256)]
    bench.hear(Entries(2, (entries[2].raw,)))
    assert bench.all(Store)[0].first == 2, "written over the damage"


def test_refusals_stop_with_the_reason() -> None:
    bench = Bench()
    bench.hear(Refuse("this key is not on the list"))
    assert bench.stop is not None and bench.stop.code == 1 and "not on the list" in bench.stop.reason
    other = desk_lock(members=12)
    bench = Bench()
    bench.hear(Welcome(1, other.run_id, other.to_bytes(), 1, 1, b"t" * 32, bytes(104)))
    assert bench.stop is not None and "another run" in bench.stop.reason


# ---------------------------------------------------------------- what it must never follow


def test_an_entry_of_an_untrusted_key_stops_the_node() -> None:
    bench = Bench()
    entries = ledger()
    bench.join(entries)
    forged = forge(EndBody("mine now"), entries[-1], round=0, digest=LOCK.digest, key=b"x" * 32)
    bench.hear(Commit(2, forged.raw))
    assert bench.stop is not None and bench.stop.code == 1 and "not signed by a key" in bench.stop.reason


def test_two_signed_entries_of_one_height_stop_the_node_and_name_both() -> None:
    bench = Bench()
    entries = ledger()
    bench.join(entries)
    mine = forge(EndBody("one"), entries[-1], round=0, digest=LOCK.digest)
    other = forge(EndBody("two"), entries[-1], round=0, digest=LOCK.digest)
    bench.hear(Commit(2, mine.raw))
    bench.hear(Commit(2, mine.raw))
    assert bench.stop is None, "the same entry again is nothing"
    bench.hear(Commit(2, other.raw))
    assert bench.stop is not None
    assert mine.hash.hex() in bench.stop.reason and other.hash.hex() in bench.stop.reason


@pytest.mark.parametrize("fused", [False, True])
def test_a_replica_that_differs_from_the_ledger_goes_on_and_says_so(fused: bool) -> None:
    """Replay settles who is right, so neither the ledger nor the replica wins by itself."""
    entries = ledger(LOCK.digest, 55)
    bench = Bench()
    bench.join(entries if fused else entries[:3])
    digests = (LOCK.digest, LOCK.digest, 56, 57) if fused else (LOCK.digest, LOCK.digest, 56)
    bench.step(events.EntriesApplied(bench.now, digests, 12))
    if not fused:
        bench.hear(Commit(3, entries[3].raw))
        bench.step(events.EntriesApplied(bench.now, (57,), 12))
    assert bench.stop is None and bench.sent(Applied)[0].digest == 57
    assert bench.state.proof.contradicted == 2, "1 + the round after which the ledger says otherwise"


def test_another_base_model_stops_the_node() -> None:
    bench = Bench(digest=4)
    assert bench.stop is not None and "base model" in bench.stop.reason


# ---------------------------------------------------------------- work


def test_one_unit_at_a_time_and_only_on_its_own_state() -> None:
    bench = Bench()
    entries = ledger(LOCK.digest)
    bench.join(entries[:2])
    bench.hear(Assign(unit_of(member=0), bench.state.parent, 15))
    bench.hear(Assign(unit_of(member=1), bench.state.parent, 15))
    bench.hear(Assign(unit_of(member=1), bench.state.parent, 15))
    bench.hear(Assign(unit_of(round=1), entries[2].hash[:8], 15))
    assert len(bench.state.queue) == 2 and not bench.all(Evaluate)
    bench.step(events.Evaluated(bench.now, unit_of(), OUTCOME))
    (result,) = bench.sent(Result)
    assert result.seed == member_seed(LOCK.run_id, 0, 0, False) and result.digest == LOCK.digest
    assert result.parent == entries[0].hash[:8] and result.sums == OUTCOME.sums
    assert [effect.unit for effect in bench.all(Evaluate)] == [unit_of(member=1)]
    bench.step(events.Evaluated(bench.now, unit_of(member=1), OUTCOME))
    assert not bench.all(Evaluate), "round 1 is not reached"
    bench.hear(Commit(2, entries[2].raw))
    assert bench.all(Apply) and not bench.all(Evaluate)
    bench.step(events.EntriesApplied(bench.now, (55,), 12))
    assert [effect.unit for effect in bench.all(Evaluate)] == [unit_of(round=1)]


def test_an_assign_that_overtakes_the_ledger_waits() -> None:
    bench = Bench()
    entries = ledger()
    bench.welcome(entries)
    bench.hear(Assign(unit_of(), entries[0].hash[:8], 15))
    bench.join(entries)
    assert [effect.unit for effect in bench.all(Evaluate)] == [unit_of()]


def test_a_commit_cancels_what_runs_and_its_outcome_is_dropped() -> None:
    entries = ledger(LOCK.digest)
    bench = working(entries[:2])
    bench.hear(Commit(2, entries[2].raw))
    assert bench.all(CancelUnit) == [CancelUnit(unit_of())] and not bench.all(Apply), "the engine is busy"
    bench.step(events.Evaluated(bench.now, unit_of(), OUTCOME))
    assert not bench.sent(Result) and bench.all(Apply)


def test_entries_that_move_no_weights_do_not_disturb_the_engine() -> None:
    entries = ledger()
    bench = working(entries)
    more = forge(RosterBody((Admission(1, key_of("m"), "m"),)), entries[-1], round=0, digest=LOCK.digest)
    bench.hear(Commit(2, more.raw))
    assert bench.all(Store) and not bench.all(CancelUnit)
    bench.step(events.Evaluated(bench.now, unit_of(), OUTCOME))
    assert bench.sent(Result)[0].parent == entries[0].hash[:8]


def test_cancel_and_failure() -> None:
    bench = working()
    bench.hear(Cancel(unit_of()))
    assert bench.all(CancelUnit)
    bench.step(events.Cancelled(bench.now, unit_of()))
    assert not bench.state.running and not bench.sent(Failed)
    bench.hear(Assign(unit_of(member=1), bench.state.parent, 15))
    bench.step(events.EvaluationFailed(bench.now, unit_of(member=1), "out of memory"))
    assert bench.sent(Failed) == [Failed(unit_of(member=1), "out of memory")]


def test_a_result_is_sent_until_it_is_acknowledged() -> None:
    bench = working()
    bench.step(events.Evaluated(bench.now, unit_of(), OUTCOME))
    tip = bench.state.chain.tip[:8]
    bench.hear(CoordBeat(1, 2, tip, (unit_of(),)))
    assert not bench.sent(Result), "it may still be on its way"
    bench.now += 2.5
    bench.hear(CoordBeat(1, 2, tip, (unit_of(),)))
    assert bench.sent(Result)
    bench.tick(2.5)
    assert bench.sent(NodeBeat)[0].units == ((unit_of(), 1000),)
    bench.hear(Ack(unit_of(), "ok"))
    bench.now += 2.5
    bench.hear(CoordBeat(1, 2, tip, ()))
    assert not bench.sent(Result)


def test_beats_tell_tip_and_progress_and_now_and_then_d() -> None:
    bench = working()
    bench.step(events.Progress(bench.now, unit_of(), 400))
    tip, told = bench.state.chain.tip[:8], 0
    for _ in range(8):
        bench.tick(2.0)
        assert bench.sent(NodeBeat) == [NodeBeat(2, tip, ((unit_of(), 400),))]
        told += len(bench.sent(Applied))
        bench.hear(CoordBeat(1, 2, tip, (unit_of(),)))
    assert told == 2, "a lost Applied must not be lost for good"


def test_a_long_replay_that_says_applied_every_second_hears_the_coordinator() -> None:
    """Applied has no answer: without beats the coordinator seemed silent, and Hello was said again."""
    bench, beats = Bench(), 0
    bench.state = structs.replace(bench.state, about=replace(bench.state.about, catch_up="replay"))
    bench.join(ledger(LOCK.digest, *range(1, 40)))
    while bench.state.applying:
        (apply,) = bench.all(Apply)
        bench.tick(1.0)
        if bench.sent(NodeBeat):
            beats += 1
            bench.hear(CoordBeat(1, bench.state.chain.height, bench.state.chain.tip[:8], ()))
        commits = [entry.kind is EntryKind.COMMIT for entry in apply.entries]
        after = (
            k.round + 1 if moves else LOCK.digest for k, moves in zip(apply.entries, commits, strict=True)
        )
        bench.step(events.EntriesApplied(bench.now, tuple(after), 5000))
        assert bench.sent(Applied) and bench.state.joined
    assert bench.now > 25 and beats <= (bench.now - 10) / 2


def test_step_leaves_its_input_alone() -> None:
    entries = ledger(LOCK.digest)
    bench = working(entries[:2])
    before = bench.state
    picture = repr(before), before.chain.height
    bench.hear(Commit(2, entries[2].raw))
    assert bench.state.chain.height == 3 and bench.state.running != before.running
    assert (repr(before), before.chain.height) == picture


# ---------------------------------------------------------------- several lanes


def wide(lanes: int = 2) -> Bench:
    """A joined node with several lanes that evaluates as many units."""
    bench = Bench()
    bench.step(events.LanesChanged(bench.now, lanes))
    bench.join(ledger())
    for member in range(lanes):
        bench.hear(Assign(unit_of(member=member), bench.state.parent, 15))
    assert [run.unit.member for run in bench.state.running] == list(range(lanes))
    return bench


def test_every_lane_has_a_unit_and_the_next_one_waits() -> None:
    bench = wide()
    assert not bench.hear(Assign(unit_of(member=2), bench.state.parent, 15))
    bench.step(events.Progress(bench.now, unit_of(member=1), 300))
    assert bench.state.held == ((unit_of(), 0), (unit_of(member=1), 300), (unit_of(member=2), 0))
    bench.step(events.Evaluated(bench.now, unit_of(member=1), OUTCOME))
    assert bench.sent(Result)[0].unit.member == 1
    assert [effect.unit.member for effect in bench.all(Evaluate)] == [2]


def test_a_unit_that_is_only_scored_leaves_its_lane_to_the_next() -> None:
    bench = working()
    bench.hear(Assign(unit_of(member=1), bench.state.parent, 15))
    bench.step(events.Generated(bench.now, unit_of()))
    assert [effect.unit.member for effect in bench.all(Evaluate)] == [1]
    bench.step(events.Evaluated(bench.now, unit_of(), OUTCOME))
    assert bench.sent(Result)[0].unit.member == 0 and not bench.all(Evaluate)


def test_weights_move_when_no_lane_needs_them_any_more() -> None:
    entries = ledger(LOCK.digest)
    bench = wide()
    bench.hear(Commit(2, entries[2].raw))
    assert [effect.unit.member for effect in bench.all(CancelUnit)] == [0, 1]
    bench.step(events.Cancelled(bench.now, unit_of(member=1)))
    assert not bench.all(Apply)
    bench.step(events.Generated(bench.now, unit_of()))
    assert bench.all(Apply), "what is being scored needs no weights"
    bench.step(events.Evaluated(bench.now, unit_of(), OUTCOME))
    assert not bench.sent(Result), "it would be late"


def test_a_unit_that_was_cancelled_and_comes_again_waits_until_it_has_ended() -> None:
    bench = working()
    bench.step(events.LanesChanged(bench.now, 2))
    bench.hear(Cancel(unit_of()))
    assert not bench.hear(Assign(unit_of(), bench.state.parent, 15))
    bench.step(events.Cancelled(bench.now, unit_of()))
    assert bench.all(Evaluate)


def test_the_coordinator_hears_of_lanes_and_of_engines_that_answer_otherwise() -> None:
    bench = working()
    bench.step(events.LanesChanged(bench.now, 3))
    assert [(hello.lanes, hello.units) for hello in bench.sent(Hello)] == [(3, (unit_of(),))]
    assert not bench.step(events.LanesChanged(bench.now, 3))
    bench.step(events.Evaluated(bench.now, unit_of(), replace(OUTCOME, fingerprint=b"smaller_")))
    kinds = [type(send.message) for send in bench.all(Send)]
    assert kinds == [Hello, Result], "the result names an engine that was told of before"
    assert bench.sent(Hello)[0].fingerprints == (b"engine-1", b"smaller_") and bench.sent(Hello)[0].units
    assert bench.sent(Result)[0].engine == 1
