"""Limits, invites, revocation and cloned keys at the door: the arithmetic pure, the rest with real ZeroMQ."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import pytest
import zmq

from coordinator.enrolment import Guests, Invitation
from coordinator.holders import MAX_SWAPS, SUPERSEDED, SWAP_SECONDS, Holders
from coordinator.limits import NODE, TOO_MANY, TOO_MUCH, Limits, Rate
from esnode.link import State
from protocol import keys, wire
from protocol.messages import Bye, Enrol, Enrolled, Fetch, Message, Refuse, Rehello
from tests.door import BEAT, HELLO, N1, N2, NAMES, STRANGER, Door
from tests.runs import wait_for

ONE_TIME = b"\x09" * 32
INVITE = Invitation(1, keys.curve_public(ONE_TIME), 2_000_000_000, 1)
KEY1, KEY2, NEW = (keys.curve_public(secret) for secret in (N1, N2, STRANGER))


@pytest.fixture
def door() -> Iterator[Door]:
    opened = Door()
    opened.gate.admit(Guests(NAMES, {INVITE.key: INVITE}))
    yield opened
    opened.close()


# ---------------------------------------------------------------- limits


def test_twenty_results_a_second_of_a_thousand_nodes_pass() -> None:
    limits = Limits(NODE)
    for tick in range(200):
        for node in range(1000):
            assert limits.spend(b"%d" % node, 300, tick / 20) == ""


def test_one_fast_node_with_many_small_results_passes() -> None:
    limits = Limits(NODE)
    assert not any(limits.spend(b"fast", 300, k / 2000) for k in range(20_000))


def test_a_flood_is_cut_to_the_rate() -> None:
    limits = Limits(Rate(10, 20, 1e9, 1e9))
    passed = [k for k in range(10_000) if not limits.spend(b"x", 1, k / 1000)]
    assert passed[:20] == list(range(20)) and len(passed) == pytest.approx(20 + 100, abs=2)
    assert limits.spend(b"x", 1, 9.999) == TOO_MANY
    assert limits.spend(b"y", 1, 9.999) == "", "each peer has its own"
    assert limits.spend(b"x", 1, 10.5) == "", "it may go on as soon as it is quiet"


def test_bytes_have_a_limit_of_their_own() -> None:
    limits = Limits(Rate(1000, 1000, 100, 1000))
    assert limits.spend(b"x", 900, 0.0) == ""
    assert limits.spend(b"x", 900, 0.0) == TOO_MUCH
    assert limits.spend(b"x", 100, 0.0) == "", "what was dropped cost nothing"
    assert limits.spend(b"x", 500, 4.9) == TOO_MUCH and limits.spend(b"x", 500, 5.1) == ""


def test_a_clock_that_stands_still_gives_nothing_away() -> None:
    limits = Limits(Rate(10, 2, 1e9, 1e9))
    assert [limits.spend(b"x", 1, t) for t in (5.0, 4.0, 5.0)] == ["", "", TOO_MANY]


def test_the_largest_message_passes() -> None:
    assert Limits(NODE).spend(b"x", wire.MAX_FRAME, 0.0) == ""


# ---------------------------------------------------------------- two machines, one key


class Wire:
    """Connections that can be told something, and those that are gone."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.told: list[tuple[bytes, Message]] = []

    def tell(self, route: bytes, message: Message) -> bool:
        if route in self.gone:
            return False
        self.told.append((route, message))
        return True


def test_the_newest_hello_holds_the_key() -> None:
    net = Wire()
    holders = Holders(net.tell)
    assert holders.claim(b"k", b"r1", "10.0.0.1", 0.0) == "" and holders.routes.get(b"k") == b"r1"
    assert holders.claim(b"k", b"r1", "10.0.0.1", 1.0) == "" and net.told == []
    assert holders.claim(b"k", b"r2", "10.0.0.2", 2.0) == ""
    assert net.told == [(b"r1", Bye(SUPERSEDED))] and holders.place(b"k") == "10.0.0.2"


def test_a_late_hello_of_the_connection_before_takes_nothing(door: Door) -> None:
    """After packets were lost one way, what was said on the old connection comes when the new one stands."""
    old = door.link(N1)
    assert door.say(old, HELLO)
    new = door.link(N1)
    assert door.say(new, HELLO)
    for _ in range(2):
        assert door.say(old, HELLO) == []
    assert door.refused("n1") == {"late Hello": 2}
    assert wait_for(old.receive)[0] == Bye(SUPERSEDED)
    assert new.receive() == [] and door.say(new, HELLO) and door.say(new, BEAT)


def test_the_count_of_connections_wraps() -> None:
    net = Wire()
    holders = Holders(net.tell)
    assert holders.claim(b"k", b"\0" + b"\xff" * 4, "10.0.0.1", 0.0) == ""
    assert holders.claim(b"k", bytes(5), "10.0.0.1", 1.0) == ""
    assert holders.claim(b"k", b"\0" + b"\xff" * 4, "10.0.0.1", 2.0) == SUPERSEDED
    assert holders.routes.get(b"k") == bytes(5) and len(net.told) == 1


def test_three_swaps_within_a_minute_refuse_both() -> None:
    net = Wire()
    holders = Holders(net.tell)
    words = [holders.claim(b"k", b"r%d" % k, f"10.0.0.{k % 2}", 10.0 * k) for k in range(MAX_SWAPS + 1)]
    assert words[:MAX_SWAPS] == [""] * MAX_SWAPS
    assert "two machines use one key" in words[-1] and "10.0.0.0" in words[-1] and "10.0.0.1" in words[-1]
    assert net.told[-1] == (b"r%d" % (MAX_SWAPS - 1), Refuse(words[-1]))
    assert holders.routes.get(b"k") is None
    for later in (1.0, SWAP_SECONDS - 1):
        assert holders.claim(b"k", b"r9", "10.0.0.0", 10.0 * MAX_SWAPS + later) == words[-1]
    assert holders.claim(b"k", b"r9", "10.0.0.0", 10.0 * MAX_SWAPS + SWAP_SECONDS) == ""
    assert holders.claim(b"j", b"r8", "10.0.0.0", 31.0) == "", "other keys never notice"


def test_slow_swaps_are_no_proof() -> None:
    net = Wire()
    holders = Holders(net.tell)
    for k in range(10):
        assert holders.claim(b"k", b"r%d" % k, "10.0.0.1", 31.0 * k) == ""


def test_one_machine_on_a_bad_line_is_not_two() -> None:
    """It reconnects every second, each time after its old connection died."""
    net = Wire()
    holders = Holders(net.tell)
    for k in range(30):
        assert holders.claim(b"k", b"r%d" % k, "10.0.0.1", float(k)) == ""
        net.gone.add(b"r%d" % k)


def test_a_cloned_key_is_found_out(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    machines = []
    for _ in range(MAX_SWAPS):
        machines.append(door.link(N1))
        assert door.say(machines[-1], HELLO)
    assert door.say(door.link(N2), HELLO)
    machines.append(door.link(N1))
    assert door.say(machines[-1], HELLO) == []
    for machine in machines[-2:]:
        (last,) = wait_for(machine.receive)
        assert isinstance(last, Refuse) and "connections from 127.0.0.1 and 127.0.0.1" in last.reason
    assert door.refused("n1") == {"two machines use one key": 1}
    assert len(caplog.messages) == 1 and "n1: two machines" in caplog.messages[0]
    assert not door.gate.send(KEY1, Rehello()) and door.gate.send(KEY2, Rehello())


def test_one_machine_that_reconnects_is_not_two(door: Door) -> None:
    for _ in range(2 * MAX_SWAPS):
        link = door.link(N1)
        assert door.say(link, HELLO)
        door.links.remove(link)
        link.close(False)
        door.pump(0.1)
    assert door.refused("n1") == {}


# ---------------------------------------------------------------- floods


def test_a_flood_is_dropped_unparsed_and_nobody_else_notices(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    flooder, honest = door.raw(N2), door.link(N1)
    assert door.say(honest, HELLO)
    flooder.send(wire.encode(HELLO))
    assert door.pump(2.0)
    door.gate._of_nodes = Limits(Rate(100, 200, 1e9, 1e9))
    parsed: list[int] = []
    decode = wire.decode
    monkeypatch.setattr(wire, "decode", lambda frame, sender: parsed.append(1) or decode(frame, sender))
    sent, deadline = 0, time.monotonic() + 1.0
    frame = wire.encode(BEAT)
    while time.monotonic() < deadline:
        with contextlib.suppress(zmq.Again):  # its queue is full, and nobody else would empty it
            for _ in range(50):
                flooder.send(frame, zmq.NOBLOCK)
                sent += 1
        door.gate.receive(100)
    honest.send(BEAT)
    deadline = time.monotonic() + 3.0
    found: list[tuple[bytes, Message]] = []
    while (KEY1, BEAT) not in found and time.monotonic() < deadline:
        found += [(event.peer, event.message) for event in door.gate.receive(100)]
    assert (KEY1, BEAT) in found
    refused = door.refused("n2")[TOO_MANY]
    assert refused > 100 and len(parsed) < 1000 and len(parsed) + refused <= sent + 10
    assert door.refused("n1") == {}


def test_what_leaves_together_shares_a_frame(door: Door) -> None:
    """And is counted by message, to the byte."""
    link = door.link(N1)
    assert door.say(link, HELLO)
    for message in (Rehello(), Bye("a word"), Rehello()):
        assert door.gate.send(KEY1, message)
    assert link.receive() == [], "not before the journal is flushed"
    door.gate.flush()
    assert wait_for(link.receive) == [Rehello(), Bye("a word"), Rehello()]
    out = door.gate.counts.bytes_out
    assert set(out) == {"Rehello", "Bye"} and out.total() == link.bytes_in["Bundle"]


# ---------------------------------------------------------------- many parts


def test_a_node_shut_out_is_told_where_it_is_and_logged(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else sends parts under a node's key: the node itself has to hear why it is ignored."""
    caplog.set_level(logging.WARNING)
    node, other = door.link(N1), door.raw(N1)
    assert door.say(node, HELLO)
    other.send_multipart([b"x"] * 3000)
    door.pump(0.5)
    (told,) = wait_for(node.receive)
    assert isinstance(told, Refuse) and "more than one part" in told.reason
    assert wire.decode(other.recv(), "coordinator") == told
    assert any("n1 is shut out" in line for line in caplog.messages)
    assert not door.gate.send(KEY1, Rehello())
    door.gate.admit(Guests({KEY2: "n2"}, {}, {KEY1: "revoked"}))
    door.gate.admit(Guests(NAMES))
    assert door.say(door.link(N1), HELLO), "the operator let it in again"


# ---------------------------------------------------------------- invites


def test_a_newcomer_enrols_and_then_says_hello(door: Door) -> None:
    enrol = Enrol(NEW, "new")
    newcomer = door.link(ONE_TIME)
    assert door.say(newcomer, enrol) == [(INVITE.key, enrol)]
    assert door.gate.send(NEW, Enrolled(bytes(32), 1))
    door.gate.flush()
    assert wait_for(newcomer.receive) == [Enrolled(bytes(32), 1)]
    assert door.state_of(door.link(STRANGER), State.REFUSED)
    door.gate.admit(Guests({**NAMES, NEW: "new"}, {INVITE.key: INVITE}))
    assert door.say(door.link(STRANGER), HELLO) == [(NEW, HELLO)]


def test_two_newcomers_behind_one_invite_get_their_own_answers(door: Door) -> None:
    first, second = door.link(ONE_TIME), door.link(ONE_TIME)
    assert door.say(first, Enrol(b"a" * 32, "a")) and door.say(second, Enrol(b"b" * 32, "b"))
    assert door.gate.send(b"a" * 32, Enrolled(bytes(32), 1)) and door.gate.send(b"b" * 32, Refuse("used"))
    door.gate.flush()
    assert wait_for(first.receive) == [Enrolled(bytes(32), 1)]
    assert wait_for(second.receive) == [Refuse("used")]
    assert not door.gate.send(b"a" * 32, Refuse("again")), "one answer each"


@pytest.mark.parametrize("message", [HELLO, BEAT, Fetch(0, 1)], ids=lambda m: type(m).__name__)
def test_an_invites_key_may_say_nothing_but_enrol(door: Door, message: Message) -> None:
    newcomer = door.link(ONE_TIME)
    assert door.say(newcomer, message) == []
    (told,) = wait_for(newcomer.receive)
    assert isinstance(told, Refuse) and "Enrol and nothing else" in told.reason
    assert door.refused("newcomers") == {"not an Enrol": 1}


def test_a_nodes_key_cannot_enrol_others(door: Door) -> None:
    """The answer would go to another key's connection, and a refusal would end that node."""
    victim, attacker = door.link(N1), door.link(N2)
    assert door.say(victim, HELLO) and door.say(attacker, HELLO)
    assert door.say(attacker, Enrol(KEY1, "x")) == []
    assert door.refused("n2") == {"Enrol without an invite": 1}


def test_an_invites_answer_never_reaches_a_node(door: Door) -> None:
    victim, newcomer = door.link(N1), door.link(ONE_TIME)
    assert door.say(victim, HELLO) and door.say(newcomer, Enrol(KEY1, "x"))
    assert door.gate.send(KEY1, Refuse("no"))
    door.gate.flush()
    assert wait_for(newcomer.receive) == [Refuse("no")] and victim.receive() == []


# ---------------------------------------------------------------- revoked


def test_a_revoked_key_is_unheard_from_the_next_frame_on(door: Door) -> None:
    """Its connection is still open: the list is checked on every message."""
    node, other = door.link(N1), door.link(N2)
    assert door.say(node, HELLO) and door.say(other, HELLO)
    assert door.gate.send(KEY1, Bye("revoked: lost"))
    door.gate.flush()
    door.gate.admit(Guests({KEY2: "n2"}, {}, {KEY1: "lost"}))
    assert wait_for(node.receive) == [Bye("revoked: lost")]
    assert node.send(BEAT) and node.send(HELLO)
    assert door.pump(0.5) == [] and door.refused() == {"revoked key": 2}
    assert not door.gate.send(KEY1, Rehello()), "and nothing is sent to it any more"
    assert "does not admit" in door.state_of(door.link(N1), State.REFUSED)
    assert door.refused() == {"revoked key": 3}
    other.send(BEAT)
    assert door.pump(1.0) == [(KEY2, BEAT)]


def test_where_a_node_connects_from(door: Door) -> None:
    assert door.gate.place(KEY1) == ""
    door.say(door.link(N1), HELLO)
    assert door.gate.place(KEY1) == "127.0.0.1"
