"""Invites, newcomers, the operator's orders: on a bare coordinator, without sockets or clocks."""

from __future__ import annotations

import pytest

import coordinator.events as ce
from coordinator import enrolment, roster
from protocol.entries import MAX_NAME, EntryKind, RosterBody
from protocol.messages import (
    RUN_ENDED,
    Bye,
    Enrol,
    Enrolled,
    Message,
    Refuse,
    Welcome,
)
from tests.desk import Desk, hello, key_of

INVITE, OTHER = b"i" * 32, b"j" * 32
NEW, NEWER = key_of("new"), key_of("newer")
WALL = 1_900_000_000.0


def told(desk: Desk, key: bytes) -> list[Message]:
    """What the last step sent to a key."""
    return [e.message for e in desk.effects if isinstance(e, ce.Send) and e.peer == key]


def records(desk: Desk) -> list[ce.Record]:
    return [e.record for e in desk.effects if isinstance(e, ce.Persist)]


def invite(desk: Desk, key: bytes = INVITE, *, uses: int = 1, hours: float = 24) -> None:
    desk.step(ce.InviteMade(desk.now, key, int(WALL + hours * 3600), uses))
    at(desk, WALL)


def at(desk: Desk, wall: float) -> None:
    desk.step(ce.Tick(desk.now, wall))


def enrol(desk: Desk, key: bytes = NEW, *, by: bytes = INVITE, name: str = "new") -> Message:
    """The one answer to an Enrol, which goes to the key that it names."""
    desk.step(ce.Received(desk.now, by, Enrol(key, name)))
    (answer,) = told(desk, key)
    return answer


def refused(answer: Message) -> str:
    assert isinstance(answer, Refuse), answer
    return answer.reason


def greet(desk: Desk, key: bytes) -> None:
    desk.step(ce.Received(desk.now, key, hello(desk.lock)))


def revoke(desk: Desk, key: bytes, reason: str = "lost") -> None:
    desk.step(ce.NodeRevoked(desk.now, key, reason))


# ---------------------------------------------------------------- newcomers


def test_an_invite_lets_one_machine_in() -> None:
    desk = Desk()
    invite(desk)
    assert enrol(desk) == Enrolled(desk.lock.run_id, 1)
    assert records(desk) == [ce.KeyAllowed(NEW, "new", 1)], "admission and use are one record"
    greet(desk, NEW)
    assert any(isinstance(message, Welcome) for message in told(desk, NEW))
    desk.tick()
    assert desk.state.chain.roster == {0: (NEW, "new")}


def test_the_same_key_gets_the_same_answer_and_another_is_refused() -> None:
    desk = Desk()
    invite(desk)
    first = enrol(desk)
    assert enrol(desk, name="renamed") == first and records(desk) == []
    assert "invite 1 works once and was used by another machine" in refused(enrol(desk, NEWER))
    assert NEWER not in desk.state.allowed and desk.state.counters == {"refused enrolments": 1}


def test_answers_survive_a_restart() -> None:
    desk = Desk()
    invite(desk)
    invite(desk, OTHER)
    first = enrol(desk)
    desk.restart()
    assert enrol(desk) == first and records(desk) == []
    assert "used by another machine" in refused(enrol(desk, NEWER))
    assert enrol(desk, NEWER, by=OTHER, name="new") == Enrolled(desk.lock.run_id, 2)
    assert desk.state.allowed[NEWER] == "new-2"


def test_the_journal_holds_no_secret() -> None:
    desk = Desk()
    invite(desk)
    assert desk.journal[-1] == ce.InviteOpened(1, INVITE, int(WALL + 86400), 1)


def test_expiry_goes_by_the_coordinators_clock() -> None:
    desk = Desk()
    invite(desk, hours=1)
    at(desk, WALL + 3599)
    assert enrolment.standing(desk.state.guests.invites[INVITE], desk.state.wall) == "open"
    at(desk, WALL + 2 * 86400 + 3600)
    assert refused(enrol(desk)) == "invite 1 expired 2 days ago: ask for a new one"
    assert desk.state.guests.allowed.keys() == desk.allowed.keys()
    desk.restart()
    desk.step(ce.Tick(desk.now, WALL + 3601))
    assert "expired 1 seconds ago" in refused(enrol(desk))


def test_an_answer_that_was_lost_comes_again_after_expiry() -> None:
    desk = Desk()
    invite(desk, hours=1)
    first = enrol(desk)
    at(desk, WALL + 99999)
    assert enrol(desk) == first


def test_an_invite_for_several_machines() -> None:
    desk = Desk()
    invite(desk, uses=2)
    assert isinstance(enrol(desk), Enrolled) and isinstance(enrol(desk, NEWER), Enrolled)
    assert "works 2 times" in refused(enrol(desk, key_of("newest")))


def test_nobody_enrols_without_an_invite() -> None:
    desk = Desk()
    assert "needs an invite" in refused(enrol(desk))
    assert "needs an invite" in refused(enrol(desk, by=key_of("a")))  # a node's key is no invite


def test_the_invites_own_key_is_never_a_nodes_key() -> None:
    desk = Desk()
    invite(desk)
    assert "cannot be a node's own key" in refused(enrol(desk, INVITE))
    desk.step(ce.NodeAllowed(desk.now, INVITE, "x"))
    assert INVITE not in desk.state.allowed
    greet(desk, INVITE)
    assert "not on the coordinator's list" in refused(told(desk, INVITE)[0])


def test_a_key_on_the_list_uses_nothing_up() -> None:
    desk = Desk()
    invite(desk)
    assert enrol(desk, key_of("a")) == Enrolled(desk.lock.run_id, 1) and records(desk) == []
    assert desk.state.allowed[key_of("a")] == "a"
    assert isinstance(enrol(desk), Enrolled)


def test_an_ended_run_takes_nobody() -> None:
    desk = Desk(ops={"rounds": 1})
    desk.join("a")
    desk.work("a")
    desk.applied("a", 7)
    assert desk.state.chain.ended
    desk.step(ce.InviteMade(desk.now, INVITE, int(WALL), 1))
    assert refused(enrol(desk)) == RUN_ENDED


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gpu box", "gpu box"),
        ("\x1b[2J\x1b]0;owned\x07x", "[2J]0;ownedx"),
        ("a\nb\tc", "abc"),
        ("\u202eevil", "evil"),
        ("x" * 99, "x" * MAX_NAME),
        ("a", "a-2"),
        ("\x00 ", f"node-{NEW.hex()[:8]}"),
    ],
)
def test_names_are_safe_to_print_and_different(name: str, shown: str) -> None:
    desk = Desk()
    invite(desk)
    enrol(desk, name=name)
    assert desk.state.allowed[NEW] == shown


def test_long_names_stay_within_their_limit() -> None:
    guests = enrolment.Guests({bytes([k]) * 32: enrolment.label("x" * 99, b"") for k in (1,)})
    assert len(enrolment.unique(guests, "x" * MAX_NAME)) <= MAX_NAME


# ---------------------------------------------------------------- put out


def test_revoked_at_once_and_in_the_ledger() -> None:
    desk = Desk()
    desk.join("a", "b")
    assert desk.assigned("a")
    revoke(desk, key_of("a"))
    assert told(desk, key_of("a"))[0] == Bye("revoked: lost")
    assert desk.assigned("a") == []
    assert [entry.body for entry in desk.appended] == [RosterBody((), (0,))]
    assert desk.state.chain.roster == {1: (key_of("b"), "b")}
    assert roster.listing(desk.state)["revoked"] == {key_of("a").hex(): "lost"}
    desk.work("b")
    assert desk.state.chain.round == 1, "its units went to others"


@pytest.mark.parametrize("again", ["hello", "result", "beat"])
def test_every_message_of_a_revoked_key_is_refused(again: str) -> None:
    desk = Desk()
    desk.join("a", "b")
    unit = desk.assigned("a")[0]
    result = desk.result_of(unit)
    revoke(desk, key_of("a"))
    before = desk.state.round
    if again == "hello":
        greet(desk, key_of("a"))
    elif again == "result":
        desk.say("a", result)
    else:
        desk.beat("a", (unit, 100))
    assert told(desk, key_of("a")) == [Bye("revoked: lost")] and len(desk.effects) == 1
    assert desk.state.round == before


def test_a_result_that_was_accepted_before_still_counts() -> None:
    desk = Desk(ops={"rounds": 1}, members=2)
    desk.join("a", "b")
    unit = desk.assigned("a")[0]
    desk.result("a", unit)
    revoke(desk, key_of("a"))
    desk.work("b")
    assert EntryKind.COMMIT in desk.kinds


def test_the_entry_waits_until_the_state_is_known() -> None:
    desk = Desk(members=2)
    desk.join("a", "b")
    for name in ("a", "b", "a", "b"):
        desk.work(name)
    assert desk.state.digest is None
    revoke(desk, key_of("a"))
    assert desk.appended == [] and 0 in desk.state.chain.roster
    desk.applied("b", 7)
    desk.tick()
    assert [entry.body for entry in desk.appended] == [RosterBody((), (0,))]


def test_revocation_survives_a_restart_and_the_start_list() -> None:
    desk = Desk()
    desk.join("a")
    revoke(desk, key_of("a"))
    desk.restart()
    assert key_of("a") in desk.allowed and key_of("a") not in desk.state.allowed
    greet(desk, key_of("a"))
    assert told(desk, key_of("a")) == [Bye("revoked: lost")]


def test_readmitted_under_a_new_number() -> None:
    desk = Desk()
    desk.join("a", "b")
    revoke(desk, key_of("a"))
    invite(desk)
    assert "was revoked (lost): ask the operator" in refused(enrol(desk, key_of("a")))
    desk.step(ce.NodeAllowed(desk.now, key_of("a"), "a"))
    greet(desk, key_of("a"))
    desk.tick()
    assert desk.state.chain.roster == {1: (key_of("b"), "b"), 2: (key_of("a"), "a")}
    desk.restart()
    assert desk.state.numbers == {key_of("b"): 1, key_of("a"): 2} and key_of("a") in desk.state.allowed


def test_revoked_and_allowed_before_the_ledger_said_so() -> None:
    desk = Desk(members=2)
    desk.join("a", "b")
    for name in ("a", "b", "a", "b"):
        desk.work(name)
    revoke(desk, key_of("a"))
    desk.step(ce.NodeAllowed(desk.now, key_of("a"), "a"))
    desk.applied("b", 7)
    desk.tick()
    assert desk.state.chain.roster.keys() == {0, 1}


def test_the_holder_of_a_revoked_key_cannot_use_its_invite_again() -> None:
    desk = Desk()
    invite(desk, uses=5)
    enrol(desk)
    revoke(desk, NEW)
    assert "withdrawn (its holder was revoked)" in refused(enrol(desk, NEWER))


def test_an_invite_is_withdrawn_by_its_key() -> None:
    desk = Desk()
    invite(desk)
    revoke(desk, INVITE, "sent to the wrong person")
    assert "invite 1 was withdrawn (sent to the wrong person)" in refused(enrol(desk))
    assert desk.state.guests.revoked == {}


def test_orders_that_change_nothing_write_nothing() -> None:
    desk = Desk()
    invite(desk)
    for order in (
        ce.NodeRevoked(desk.now, NEW, "never seen"),
        ce.NodeAllowed(desk.now, key_of("a"), "b"),
        ce.InviteMade(desk.now, INVITE, 1, 1),
    ):
        assert desk.step(order) == ()
    assert desk.state.allowed == desk.allowed


def test_a_successor_takes_the_list_from_the_ledger() -> None:
    """Only entries, no journal of enrolments: who was admitted may go on, who was revoked may not."""
    desk = Desk(names="ab")
    desk.join("a", "b")
    revoke(desk, key_of("a"))
    desk.allowed = {}
    desk.journal = [record for record in desk.journal if isinstance(record, ce.EntryAppended | ce.TermTaken)]
    desk.restart()
    assert desk.state.allowed == {key_of("b"): "b"} and list(desk.state.guests.revoked) == [key_of("a")]


# ---------------------------------------------------------------- words of the operator


def test_find_by_name_key_and_number() -> None:
    desk = Desk(names="ab")
    invite(desk)
    guests = desk.state.guests
    assert enrolment.find(guests, "a") == [key_of("a")]
    assert enrolment.find(guests, key_of("b").hex()[:10].upper()) == [key_of("b")]
    assert enrolment.find(guests, "invite-1") == [INVITE]
    assert enrolment.find(guests, "invite-2") == enrolment.find(guests, "c") == []


def test_a_revoked_node_keeps_its_name_on_the_list() -> None:
    desk = Desk(names="ab")
    revoke(desk, key_of("a"), "sold")
    desk.restart()
    guests = desk.state.guests
    assert enrolment.find(guests, "a") == [key_of("a")], "its name finds it"
    assert roster.listing(desk.state)["former"] == {key_of("a").hex(): "a"}
    desk.step(ce.NodeAllowed(desk.now, key_of("a"), "a"))
    assert roster.listing(desk.state)["former"] == {}


def test_a_revoked_node_is_listed_with_the_number_that_commits_name_it_by() -> None:
    desk = Desk(names="ab")
    desk.join("a", "b")
    number = desk.state.numbers[key_of("b")]
    revoke(desk, key_of("b"), "sold")
    assert roster.listing(desk.state)["numbers"] == {key_of("b").hex(): number}
    desk.restart()
    assert roster.listing(desk.state)["numbers"] == {key_of("b").hex(): number}


def test_the_listing_shows_nodes_invites_and_revoked_keys() -> None:
    desk = Desk(names="a")
    invite(desk)
    enrol(desk)
    desk.join("a")
    rows = {row["name"]: row for row in roster.listing(desk.state)["nodes"]}
    assert rows["a"]["state"] == "ready" and rows["a"]["number"] == 0 and rows["a"]["invite"] is None
    assert rows["new"]["state"] == "expected" and rows["new"]["number"] is None and rows["new"]["invite"] == 1
