"""The coordinator's core, event by event: what it journals, what it says, in which order, and why."""

from __future__ import annotations

import json
import tracemalloc
from statistics import median
from typing import Any

import pytest

import coordinator.events as ce
from coordinator import machine
from protocol.counting import SHOWN
from protocol.entries import CommitBody, EntryKind, RosterBody, public_key
from protocol.messages import (
    STOPPED,
    Bye,
    Entries,
    Fetch,
    Refuse,
    Rehello,
    Welcome,
)
from protocol.plan import Ops
from tests.desk import NONCE, SIGNING_KEY, Desk, desk_lock, hello, key_of
from tests.ledgers import KEY, small_ledger

# ---------------------------------------------------------------- start


def test_first_start_takes_a_term_and_appends_the_lock() -> None:
    desk = Desk()
    term, entry = (effect.record for effect in desk.effects if isinstance(effect, ce.Persist))
    assert term == ce.TermTaken(1, NONCE)
    assert isinstance(entry, ce.EntryAppended) and entry.height == 0
    lock = desk.appended[0]
    assert (lock.kind, lock.term, lock.nonce, lock.digest) == (EntryKind.LOCK, 1, NONCE, desk.lock.digest)
    assert machine.status(desk.state)["reason"].startswith("no node has joined yet")


def test_a_key_the_run_does_not_trust_stops() -> None:
    desk = Desk()
    state = machine.new(desk.lock, desk.ops, b"x" * 32, desk.allowed)
    _, effects = machine.step(state, ce.Started(0.0, 1, NONCE))
    assert any(isinstance(e, ce.Stop) and e.code == 1 and "signing key" in e.reason for e in effects)


def test_another_plan_on_the_same_journal_stops() -> None:
    desk = Desk()
    other = desk_lock(members=12)
    state = machine.new(other, desk.ops, SIGNING_KEY, desk.allowed)
    for record in desk.journal:
        state = machine.recall(state, record)
    _, effects = machine.step(state, ce.Started(0.0, 2, NONCE))
    stop = next(e for e in effects if isinstance(e, ce.Stop))
    assert stop.code == 1 and other.run_id.hex()[:16] in stop.reason


def test_a_start_costs_the_same_for_every_entry() -> None:
    """Recalling the journal of a long run takes its length, not the square of it."""
    writer = small_ledger(600, end=False)
    state = machine.new(writer.lock, Ops(rounds=600), KEY, {})
    taken = []
    tracemalloc.start()
    for height, entry in enumerate(writer.chain.entries):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        state = machine.recall(state, ce.EntryAppended(height, entry.raw))
        taken.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert len(state.history) == 600 and state.chain.height == writer.chain.height
    status = machine.status(state)  # asked for four times a second while `esnode run` shows it
    assert len(status["rewards"]) == SHOWN < 600 and status["rewards"][-1][0] == 599
    assert median(taken[-50:]) < 1.2 * median(taken[50:100])


# ---------------------------------------------------------------- joining


def test_hello_is_welcomed_and_the_roster_entry_admits() -> None:
    desk = Desk()
    desk.say("a", hello(desk.lock))
    (welcome,) = desk.sent(Welcome)
    assert (welcome.run, welcome.lock, welcome.term) == (desk.lock.run_id, desk.lock.to_bytes(), 1)
    assert not desk.new_units("a"), "no work before the roster names the evaluator"
    desk.tick()
    (entry,) = desk.appended
    assert isinstance(entry.body, RosterBody) and entry.body.admitted[0].name == "a"
    assert len(desk.new_units("a")) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wire_min": 2, "wire_max": 3}, "wire version"),
        ({"law": 2}, "noise law"),
        ({"run": b"r" * 32}, "works for run"),
        ({"digest": 5}, "base model"),
        ({"term": 7}, "term 7"),
        ({"selftest": b"otherbit"}, "other bits"),
    ],
)
def test_hello_is_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    desk = Desk()
    desk.join("a")
    desk.say("b", hello(desk.lock, **changes))
    (refuse,) = desk.sent(Refuse, "b")
    assert words in refuse.reason
    assert key_of("b") not in desk.state.nodes
    assert any(words in line for line in machine.status(desk.state)["refusals"])


def test_a_stranger_is_refused_and_an_unknown_connection_asked_to_say_hello() -> None:
    desk = Desk()
    desk.step(ce.Received(desk.now, b"?" * 32, hello(desk.lock)))
    refuse = next(e.message for e in desk.effects if isinstance(e, ce.Send))
    assert isinstance(refuse, Refuse) and "list" in refuse.reason
    desk.beat("a")
    assert desk.sent(Rehello, "a")


def test_the_newest_hello_of_a_key_supersedes_and_keeps_the_units_it_names() -> None:
    desk = Desk()
    desk.join("a", "b")
    first, second = desk.assigned("a")
    desk.say("a", hello(desk.lock, units=(first,)))
    assert desk.assigned("a")[0] == first
    assert second not in [lease.unit for lease in desk.state.nodes[key_of("a")].leases if not lease.sent]
    desk.say("a", hello(desk.lock))
    assert all(lease.sent for lease in desk.state.nodes[key_of("a")].leases), "a new process holds nothing"


def test_fetch_is_answered_from_the_chain() -> None:
    desk = Desk()
    desk.join("a")
    desk.say("a", Fetch(0, 10))
    (entries,) = desk.sent(Entries)
    assert entries.entries == tuple(entry.raw for entry in desk.state.chain.entries)
    desk.say("a", Fetch(1, 1))
    assert desk.sent(Entries)[0].first == 1 and len(desk.sent(Entries)[0].entries) == 1
    desk.say("a", Fetch(50, 1))
    assert not desk.sent(Entries)


# ---------------------------------------------------------------- restart, operator


def test_a_restart_goes_on_with_the_accepted_cells_and_the_units_that_run() -> None:
    desk = Desk(members=4)
    desk.join("a")
    done, running = desk.assigned("a")
    desk.result("a", done)
    before = desk.state
    desk.restart()
    assert desk.state.round is not None and before.round is not None
    assert desk.state.round.members[done.member].sums == before.round.members[done.member].sums
    assert desk.state.term == 2 and desk.state.digest == before.digest
    desk.beat("a", (running, 500))
    assert desk.sent(Rehello)
    tip = desk.state.chain.tip
    desk.say("a", hello(desk.lock, height=desk.state.chain.height, tip=tip, term=1, units=(running,)))
    assert desk.assigned("a")[0] == running and running not in desk.new_units("a")
    desk.work("a")
    commit = desk.state.chain.commits[0]
    assert commit.term == 2 and isinstance(commit.body, CommitBody) and len(commit.body.members) == 4


def test_stop_says_bye_and_keeps_the_round() -> None:
    desk = Desk()
    desk.join("a")
    desk.step(ce.StopRequested(desk.now, "Ctrl-C"))
    assert desk.sent(Bye, "a")[0].reason.startswith(STOPPED)
    assert desk.stop is not None and desk.stop.code == 0


def test_changed_ops_apply_to_the_open_run() -> None:
    desk = Desk(members=4, ops={"rounds": 1})
    desk.join("a")
    desk.work("a")
    desk.step(ce.OpsChanged(desk.now, Ops(rounds=2, eval_every=0)))
    assert desk.state.round is not None and not desk.state.round.final
    desk.applied("a", 77)
    assert desk.kinds[-1] is EntryKind.COMMIT
    desk.work("a")
    assert desk.state.chain.round == 2


def test_step_leaves_its_input_alone() -> None:
    desk = Desk(members=4)
    desk.join("a")
    before = desk.state
    picture = repr(before), before.chain.height, json.dumps(machine.status(before), sort_keys=True)
    desk.work("a")
    assert desk.state.chain.round == 1
    after = repr(before), before.chain.height, json.dumps(machine.status(before), sort_keys=True)
    assert picture == after


def test_status_is_json_and_says_why() -> None:
    desk = Desk(members=4, ops={"eval_every": 1})
    desk.join("a")
    desk.work("a", limit=3)
    status = json.loads(json.dumps(machine.status(desk.state)))
    assert status["state"] == "running" and "of 4 members" in status["reason"]
    assert status["nodes"][0]["accepted"] == 3 and status["nodes"][0]["reason"] == "after 0 rounds"
    assert status["members"] == {"done": 2, "total": 4, "void": 0} and status["scores"][0][0] == 0
    assert public_key(SIGNING_KEY).hex() == desk.lock.trusted[0]
