"""The simulator's checkers bite: each of these broken programs is found out by a few seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace

import coordinator.events as ce
import esnode.events as ne
from coordinator import machine, rounds
from coordinator.state import State
from esnode import evidence, inbox, node
from esnode.nodestate import Turn
from protocol.messages import Ack, Commit, Kind, Unit
from tests import bounds
from tests.desk import Desk
from tests.replica import make_lock
from tests.sweep import examine

SEEDS = range(40)


def problems() -> Iterator[str]:
    for seed in SEEDS:
        found = examine(seed).problem
        if found:
            yield found


def found(*words: str) -> str:
    """The first problem any seed meets, which must be told in one of these ways."""
    problem = next(problems(), "")
    assert problem, "no seed found it"
    assert any(word in problem for word in words), problem
    return problem


Fold = tuple[State, list[tuple[ce.Effect, ...]]]


def broken_machine(monkeypatch: pytest.MonkeyPatch, change) -> None:  # type: ignore[no-untyped-def]
    """A coordinator whose effects are altered."""
    fold = machine.fold

    def worse(state: State, events) -> Fold:  # type: ignore[no-untyped-def]
        state, caused = fold(state, events)
        return state, [tuple(effect for e in effects for effect in change(e)) for effects in caused]

    monkeypatch.setattr(machine, "fold", worse)
    monkeypatch.setattr("tests.checkers.SAMPLED", 10**9)


def test_an_acknowledgement_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(effect: ce.Effect) -> list[ce.Effect]:
        lost = isinstance(effect, ce.Persist) and isinstance(effect.record, ce.ResultAccepted)
        return [] if lost and effect.record.result.unit.member == 1 else [effect]  # type: ignore[union-attr]

    broken_machine(monkeypatch, change)
    found("an Ack without its record")


def test_an_entry_that_is_told_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(effect: ce.Effect) -> list[ce.Effect]:
        lost = isinstance(effect, ce.Persist) and isinstance(effect.record, ce.EntryAppended)
        return [] if lost and effect.record.height == 4 else [effect]  # type: ignore[union-attr]

    broken_machine(monkeypatch, change)
    found("is sent before it is flushed", "recalls another", "BrokenChain", "AssertionError")


def test_a_result_of_another_state_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_problem", lambda lock, round, result: "")
    step = node.step

    def lazy(state, event):  # type: ignore[no-untyped-def]
        """Never moves its master, and says of its results what the coordinator wants to hear."""
        if isinstance(event, ne.Evaluated):
            event = replaced(event, outcome=replaced(event.outcome, sums=(0.0,) * len(event.outcome.sums)))
        return step(state, event)

    monkeypatch.setattr(node, "step", lazy)
    found("is not the measured one")


def test_a_commit_that_is_not_announced_to_the_disk_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    step = node.step

    def forgetful(state, event):  # type: ignore[no-untyped-def]
        state, effects = step(state, event)
        return state, tuple(e for e in effects if not (isinstance(e, ne.Store) and e.first == 3))

    monkeypatch.setattr(node, "step", forgetful)
    found("behind a gap", "does not follow its last", "without the whole ledger", "does not end")


def test_a_lost_commit_that_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_learn_height", lambda turn, height: None)
    monkeypatch.setattr("esnode.sources.fetch", lambda turn: None)
    found("does not end")


def test_acknowledgements_that_are_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing breaks: nodes send again until the round closes. It must not be taken for a fault."""
    broken_machine(
        monkeypatch,
        lambda effect: [] if isinstance(effect, ce.Send) and isinstance(effect.message, Ack) else [effect],
    )
    assert not examine(3).problem


def test_commits_that_are_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing breaks either: beats tell the height."""
    broken_machine(
        monkeypatch,
        lambda effect: [] if isinstance(effect, ce.Send) and isinstance(effect.message, Commit) else [effect],
    )
    assert not examine(3).problem


def test_state_that_grows_without_end_is_found() -> None:
    state = Desk().state
    assert not bounds.coordinator(state)
    crowded = replace(state, counters={str(k): k for k in range(1000)})
    assert "counters holds 1000 things" in bounds.coordinator(crowded)


def test_scores_of_rounds_gone_and_of_a_branch_that_was_left_make_room() -> None:
    """A node that went back from round 90 to round 50 does not hold scores of round 90 for ever."""
    turn = Turn(node.new(make_lock(bytes(32)), ne.About("a", "reference", "cpu", b"s", b"e")))
    for round in (*range(90), *range(50, 80)):
        for member in range(10):
            evidence.keep(turn, Unit(round, Kind.MEMBER, member, 0, 0), (1.0,))
            assert len(turn.state.kept) <= evidence.MOST
    assert max(kept.unit.round for kept in turn.state.kept) == 79
