"""The node's core when it loses touch, and when the run or the node ends."""

from __future__ import annotations

import pytest

from esnode import events, node
from esnode.events import CancelUnit, Evaluate
from protocol.messages import (
    RELEASED,
    RUN_ENDED,
    STOPPED,
    Applied,
    Assign,
    Bye,
    Commit,
    CoordBeat,
    Entries,
    Fetch,
    Hello,
    Rehello,
    Release,
)
from tests.bench import ABOUT, LOCK, Bench, ledger, unit_of, working

# ---------------------------------------------------------------- losing touch


def test_a_gap_is_fetched_and_fetched_again() -> None:
    entries = ledger(LOCK.digest, 55)
    bench = Bench()
    bench.join(entries[:2])
    bench.hear(Commit(3, entries[3].raw))
    assert bench.sent(Fetch) == [Fetch(2, 256)] and bench.state.chain.height == 2
    bench.tick(1.0)
    assert not bench.sent(Fetch)
    bench.tick(1.5)
    assert bench.sent(Fetch) == [Fetch(2, 256)]
    bench.hear(Entries(2, (entries[2].raw, entries[3].raw)))
    assert bench.state.chain.height == 4


def test_a_coordinator_that_restarted_is_greeted_with_what_runs() -> None:
    bench = working()
    bench.hear(Rehello())
    assert bench.sent(Hello)[0].units == (unit_of(),)
    bench.hear(Rehello())
    assert not bench.sent(Hello), "one Hello answers all of them"
    assert bench.state.running, "work goes on"


def test_silence_makes_it_say_hello_again() -> None:
    bench = working()
    for _ in range(5):
        bench.tick(2.0)
    assert not bench.sent(Hello)
    bench.tick(2.0)
    assert bench.sent(Hello) and not bench.state.joined


def test_a_beat_of_a_higher_term_means_the_welcome_was_lost() -> None:
    bench = working()
    bench.hear(CoordBeat(9, 2, bench.state.chain.tip[:8], ()))
    bench.tick(1.0)
    assert bench.sent(Hello) and bench.state.term == 1
    bench.hear(CoordBeat(0, 50, b"whatever", ()))
    assert not bench.sent(Fetch), "a lower term is ignored"


# ---------------------------------------------------------------- ending


def test_the_end_is_confirmed_and_the_node_stops_with_bye_or_without() -> None:
    entries = ledger(LOCK.digest, end=True)
    bench = Bench()
    bench.join(entries[:3])
    bench.step(events.EntriesApplied(bench.now, (LOCK.digest, LOCK.digest, 99), 12))
    bench.hear(Commit(3, entries[3].raw))
    assert bench.sent(Applied)[0].height == 4 and bench.stop is None
    bench.tick(3.0)
    assert bench.stop is None, "somebody spoke a moment ago: this END may be none of the run's"
    bench.tick(2.0)
    assert bench.stop is not None and bench.stop.code == 0 and bench.stop.reason == RUN_ENDED


@pytest.mark.parametrize(
    ("reason", "code"),
    [(RUN_ENDED, 0), ("superseded: two machines use one key", 1)],
)
def test_bye_stops_with_the_code_its_reason_deserves(reason: str, code: int) -> None:
    bench = working()
    bench.hear(Bye(reason))
    assert bench.stop is not None and (bench.stop.reason, bench.stop.code) == (reason, code)


def test_a_coordinator_that_is_stopped_sends_nobody_home() -> None:
    """Its restart (an upgrade, say) must need no hand on any node."""
    bench = working()
    bench.hear(Bye(f"{STOPPED}: SIGTERM received"))
    assert bench.stop is None
    bench.hear(Rehello())  # what the daemon says after each reconnect
    assert bench.sent(Hello)
    bench = working()
    bench.step(events.Leave(bench.now, "SIGTERM"))
    bench.hear(Bye(f"{STOPPED}: SIGTERM received"))
    assert bench.stop is not None and bench.stop.code == 0


def test_leaving_hands_everything_back() -> None:
    bench = working()
    bench.hear(Assign(unit_of(member=1), bench.state.parent, 15))
    bench.step(events.Leave(bench.now, "SIGTERM"))
    assert bench.sent(Release) == [Release("SIGTERM")] and bench.all(CancelUnit)
    bench.step(events.Cancelled(bench.now, unit_of()))
    assert not bench.all(Evaluate)
    bench.hear(Bye(RELEASED))
    assert bench.stop is not None and bench.stop.code == 0
    bench = working()
    bench.step(events.Leave(bench.now, "SIGTERM"))
    bench.tick(3.0)
    assert bench.stop is not None and bench.stop.code == 0, "the Bye was lost"


# ---------------------------------------------------------------- pausing


def test_a_pause_hands_everything_back_and_takes_nothing() -> None:
    bench = working()
    bench.hear(Assign(unit_of(member=1), bench.state.parent, 15))
    bench.step(events.Pause(bench.now, "outside its hours"))
    assert bench.sent(Release) == [Release("outside its hours", stays=True)] and bench.all(CancelUnit)
    bench.step(events.Cancelled(bench.now, unit_of()))
    bench.hear(Bye(f"{RELEASED}: outside its hours"))
    assert not bench.hear(Assign(unit_of(member=2), bench.state.parent, 15))
    for _ in range(20):
        assert not bench.tick(4.9), "silence"
        bench.tick(0.1)
        assert bench.sent(Release) == [Release("outside its hours", stays=True)], "it is still there"
        assert len(bench.effects) == 1
    assert not bench.step(events.Pause(bench.now, "paused by its owner"))
    bench.step(events.Resume(bench.now))
    assert bench.sent(Hello)[0].units == ()
    bench.hear(Bye("revoked"))
    assert bench.stop is not None and bench.stop.code == 1


def test_a_paused_node_is_known_over_every_connection_and_hears_of_the_end() -> None:
    bench = working()
    bench.step(events.Pause(bench.now, "outside its hours"))
    for _ in range(3):  # however many come
        assert not bench.hear(Rehello())
    bench.tick(2.0)
    assert len(bench.sent(Hello)) == 1 and bench.sent(Release) == [Release("outside its hours", stays=True)]
    assert not bench.welcome(ledger()) and not bench.tick(2.0)
    bench.tick(20.0)
    assert not bench.sent(Hello) and bench.sent(Release)
    bench.hear(Bye(f"{RELEASED}: outside its hours"))
    assert bench.stop is None
    bench.hear(Bye(RUN_ENDED))
    assert bench.stop is None and bench.sent(Hello), "it wants the rest of the ledger first"


def test_a_late_copy_of_a_release_does_not_put_a_node_out_that_works_again() -> None:
    """The coordinator takes it for gone: it says that it is here, once for each such word."""
    bench = working()
    bench.hear(Bye(f"{RELEASED}: outside its hours"))
    assert bench.stop is None and len(bench.sent(Hello)) == 1
    bench.hear(Bye(f"{RELEASED}: outside its hours"))
    assert not bench.sent(Hello), "one Hello answers all that are on their way"


def test_a_paused_node_fetches_the_rest_of_the_ledger_and_computes_nothing() -> None:
    bench, entries = working(), ledger(LOCK.digest, 55, end=True)
    bench.step(events.Pause(bench.now, "outside its hours"))
    bench.step(events.Cancelled(bench.now, unit_of()))
    bench.hear(Bye(RUN_ENDED))
    bench.welcome(entries)
    assert bench.sent(Fetch) == [Fetch(2, 256)]
    bench.hear(Entries(2, tuple(entry.raw for entry in entries[2:])))
    assert bench.all(events.Store) and not bench.all(events.Apply)
    assert bench.stop is not None and bench.stop.code == 0


def test_a_paused_node_whose_coordinator_is_gone_with_the_end_says_what_it_lacks() -> None:
    bench = working()
    bench.step(events.Pause(bench.now, "outside its hours"))
    bench.step(events.Cancelled(bench.now, unit_of()))
    bench.hear(Bye(RUN_ENDED))
    for _ in range(70):
        bench.tick(0.25)
        if bench.stop:
            break
    assert bench.stop is not None and bench.stop.code == 0 and "stops after 0 rounds" in bench.stop.reason


def test_a_node_that_is_resumed_while_it_closes_works_to_the_end() -> None:
    bench, entries = working(), ledger(LOCK.digest, 55, end=True)
    bench.step(events.Pause(bench.now, "outside its hours"))
    bench.step(events.Cancelled(bench.now, unit_of()))
    bench.hear(Bye(RUN_ENDED))
    bench.step(events.Resume(bench.now))
    bench.tick(20.0)
    assert bench.stop is None
    bench.join(entries)
    assert bench.all(events.Apply)


def test_a_pause_before_the_welcome_is_told() -> None:
    bench = Bench()
    bench.step(events.Pause(bench.now, "outside its hours"))
    bench.welcome(ledger())
    bench.tick(2.0)
    assert bench.sent(Hello) and bench.sent(Release) == [Release("outside its hours", stays=True)]


def test_a_node_may_be_paused_before_it_starts() -> None:
    began = events.Started(10.0, 0, (), 0, LOCK.digest)

    def paused() -> node.State:
        state, _ = node.step(node.new(LOCK, ABOUT), events.Pause(10.0, "paused by its owner"))
        state, effects = node.step(state, began)
        assert not any(isinstance(effect, events.Send) for effect in effects)
        return state

    _, effects = node.step(paused(), events.Resume(11.0))
    assert any(isinstance(effect, events.Send) and isinstance(effect.message, Hello) for effect in effects)
    _, effects = node.step(paused(), events.Leave(11.0, "SIGTERM"))
    assert events.Stop("SIGTERM", 0) in effects
    _, effects = node.step(paused(), events.Tick(11.0))
    said = [effect.message for effect in effects if isinstance(effect, events.Send)]
    assert [type(message) for message in said] == [Hello, Release]
