"""Admitted nodes that lie about all but rewards: the coordinator goes on, counts it, and stays small."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import coordinator.events as ce
from coordinator import donors, machine, outputs, succession, terms
from esnode import transfer
from esnode import transferevents as te
from protocol import wire, zmtp
from protocol.chain import Chain
from protocol.messages import Evidence, EvidenceAsk, Fetch, Rederive, Rederived, Refuse, Unit, Welcome
from protocol.peers import Kept
from tests.desk import Desk, hello, key_of
from tests.door import HELLO, N1, Door
from tests.liar import HUGE, Liar
from tests.replica import evidence_of
from tests.test_disputes import RIGHT, WRONG, rederived, second_round

AUDITED = {"members": 4, "per_round": 4, "chunk": 4, "repeatable": False, "secret": bytes(32)}


@pytest.mark.parametrize("seed", range(12))
def test_no_message_of_a_liar_is_a_crash(seed: int) -> None:
    """It may stop the run with a false replay (docs/security.md), and then in one sentence."""
    desk = Desk(
        ops={"rounds": 6, "eval_every": 2, "audit_share": 0.5}, names="abc", secret=bytes(32), members=4
    )
    desk.join("a", "b", "c")
    liar = Liar(desk, "c", seed)
    for turn in range(250):
        try:
            message = wire.decode(wire.encode(liar.words()), "node")
        except ValueError:
            continue
        desk.say("c", message)
        name = "ab"[turn % 2]
        if not desk.state.stopped and desk.assigned(name):
            desk.result(name, desk.assigned(name)[0])
        if desk.state.stopped:
            assert "replay" in desk.state.stopped
            break
        desk.tick(0.05)
    machine.status(desk.state)
    assert len(desk.state.refusals) < 100 and len(desk.state.decisions) < 100


def test_scores_too_large_to_be_added_are_evidence_that_does_not_fit() -> None:
    desk = Desk(ops={"audit_share": 1.0}, names="ac", **AUDITED)
    desk.join("a", "c")
    scores = (HUGE, HUGE, 0.5, 0.5)
    for _ in range(20):
        for name in "ac":
            for unit in desk.assigned(name)[:1]:
                desk.result(name, unit, evidence=evidence_of(scores))
            for ask in desk.sent(EvidenceAsk, "c"):
                desk.say("c", Evidence(ask.unit, 0, 4, scores))
        desk.tick(0.3)
    assert "does not fit" in desk.state.quarantined[key_of("c")]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pieces": (10**6,)}, "no model of this run has"),
        ({"pieces": (0, 0)}, "2 pieces, 1 digests"),
        ({"held": (1, 2)}, "2 digests before the replay and 1 after"),
        ({"contradicted": 4_000_000}, "no entry states"),
        ({"since": 2}, "began after 2"),
    ],
)
def test_a_replay_that_cannot_be_is_counted_and_nothing_else(changes: dict[str, Any], why: str) -> None:
    desk = second_round("a", "b", "c")
    for name, digest in (("a", RIGHT), ("b", RIGHT), ("c", WRONG)):
        desk.applied(name, digest)
    before = desk.state.proof
    fields: dict[str, Any] = {
        "commits": 1,
        "pieces": (0,),
        "held": (WRONG,),
        "derived": (WRONG,),
        "digest": WRONG,
    }
    fields |= {"contradicted": 0, "by": "kernel reference", "reason": "asked", "since": 0, **changes}
    desk.say("c", Rederived(**fields))
    assert desk.state.proof == before and not desk.state.stopped
    assert desk.state.counters["misfit answers to a dispute"] == 1 and why in desk.state.refusals[-1]
    rederived(desk, "a", RIGHT, RIGHT)
    rederived(desk, "c", WRONG, RIGHT)
    assert desk.state.proof.dispute is None and desk.state.digest == RIGHT


@pytest.mark.parametrize("squatters", ["c", "cd"])
def test_units_that_are_always_nearly_done_do_not_keep_a_round_open(squatters: str) -> None:
    """They are taken for what they are by the time they have taken, not by what is told of them."""
    desk = Desk(members=4)
    desk.join("a", *squatters)
    everything = [Unit(0, 0, member, 0, 0) for member in range(4)]
    for turn in range(4 * 130):
        for name in squatters:
            desk.beat(name, *((unit, 900 + turn % 90) for unit in everything))
            assert len(desk.assigned(name)) <= 2
        if desk.assigned("a"):
            desk.result("a", desk.assigned("a")[0])
        if desk.state.chain.round:
            break
        desk.beat("a", *((unit, 1) for unit in desk.assigned("a")))
        desk.tick(0.5)
    assert desk.state.chain.round == 1, (turn, [desk.assigned(n) for n in "a" + squatters])


def test_a_height_that_grows_with_every_hello_does_not_keep_a_successor_waiting() -> None:
    desk = second_round("a", "b")
    desk.journal.append(ce.Recovery(False, desk.state.chain.height, bytes(32)))
    desk.restart(terms.ERA)
    assert desk.state.lineage.waiting
    for second in range(100):
        chain = desk.state.chain
        desk.say("c", hello(desk.lock, height=1000 + second, tip=bytes([second]) * 32))
        for name in "ab":
            own = hello(desk.lock, height=chain.height, tip=chain.tip, digest=RIGHT)
            desk.say(name, replace(own, term=desk.state.term, proof=desk.state.term_proof))
        desk.tick(1.0)
        if not desk.state.lineage.waiting:
            break
    assert second <= succession.TOLD_AT_ALL


def test_a_false_self_test_goes_with_the_node_that_brought_it() -> None:
    desk = Desk(members=4)
    desk.say("c", hello(desk.lock, selftest=b"false..."))
    desk.tick()
    desk.say("a", hello(desk.lock))
    assert "other bits than the pool" in desk.sent(Refuse, "a")[0].reason
    desk.step(ce.NodeRevoked(desk.now, key_of("c"), "a liar"))
    desk.say("a", hello(desk.lock))
    assert desk.sent(Welcome, "a")


def test_revoking_a_silent_node_ends_the_dispute_it_began() -> None:
    desk = second_round("a", "b", "c")
    for name, digest in (("a", RIGHT), ("b", RIGHT), ("c", WRONG)):
        desk.applied(name, digest)
    desk.step(ce.NodeRevoked(desk.now, key_of("c"), "a liar"))
    for _ in range(10):
        desk.tick(1.0)
        asked = [(name, ask) for name in "ab" for ask in desk.sent(Rederive, name)]
        for name, ask in asked:
            rederived(desk, name, RIGHT, RIGHT, pieces=ask.pieces)
        for name in "ab":
            desk.beat(name)
    assert desk.state.proof.dispute is None and desk.state.digest == RIGHT


def test_a_node_that_says_now_this_and_now_that_is_at_fault_without_any_replay() -> None:
    """It would open disputes and close them, and keep everybody from signing."""
    desk = second_round("a", "b", "c")
    desk.applied("a", RIGHT)
    desk.applied("b", RIGHT)
    for turn in range(12):
        if not desk.state.nodes[key_of("c")].left:
            desk.applied("c", (WRONG + turn, RIGHT)[turn % 2])
    assert desk.state.nodes[key_of("c")].left and desk.state.faults[key_of("c")].count == 5
    assert "of one state and then another" in desk.state.faults[key_of("c")].reason


def test_after_a_stop_by_a_false_replay_its_node_is_revoked_and_nothing_is_lost() -> None:
    desk = second_round("a", "b", "c")
    for name, digest in (("a", RIGHT), ("b", RIGHT), ("c", WRONG)):
        desk.applied(name, digest)
    for name, digest in (("c", WRONG), ("a", RIGHT)):
        rederived(desk, name, digest, digest, pieces=())
    assert "replay confirms both" in desk.state.stopped and "c has" in desk.state.stopped
    desk.restart()
    desk.step(ce.NodeRevoked(desk.now, key_of("c"), "a liar"))
    chain = desk.state.chain
    for name, digest in (("c", WRONG), ("a", RIGHT), ("b", RIGHT)):
        desk.say(name, hello(desk.lock, height=chain.height, tip=chain.tip, digest=digest))
    while desk.state.chain.round == 1:
        desk.work("a")
        desk.work("b")
        desk.tick(1.0)
    assert desk.state.chain.digest_at(1) == RIGHT


# ---------------------------------------------------------------- snapshots


def _kept(desk: Desk, **roots: tuple[bytes, int]) -> None:
    for name, (root, size) in roots.items():
        desk.say(name, Kept(1, root, size))


def test_the_root_that_most_nodes_have_is_announced() -> None:
    desk = second_round("a", "b", "c", "d", "e")
    right, false = b"\1" * 32, b"\xff" * 32
    _kept(desk, d=(false, 9), e=(false, 9), a=(right, 9), b=(right, 9), c=(right, 9))
    assert donors.due(desk.state) == right


def test_one_donor_cannot_say_how_large_a_snapshot_is(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = second_round("a", "b", "c")
    root = b"\1" * 32
    _kept(desk, a=(root, 900), b=(root, 900), c=(root, 2**60))
    monkeypatch.setattr(Chain, "announces", lambda *_: True)
    assert donors.choose(desk.state, key_of("d"), 0).size == 900


def test_donors_that_begin_every_part_and_end_none_do_not_hold_a_joiner_for_ever() -> None:
    """They are open, send, are found silent, open again: no node waits for that without end."""
    key = bytes(32)
    state, actions = transfer.step(transfer.new((key,), 0.0), te.Opened(0.0, key, "direct"))
    state, actions = transfer.step(state, te.Began(0.0, 64 << 20, 1 << 20, 0))
    now, ended = 0.0, ""
    while not ended and now < 2 * transfer.STANDSTILL:
        now += 0.5
        events: list[te.Event] = [
            te.Opened(now, key, "direct"),
            te.Tick(now),
        ]
        events += [te.Came(now, key, a.part, 1000) for a in actions if isinstance(a, te.Ask)]
        actions = ()
        for event in events:
            state, more = transfer.step(state, event)
            actions += more
        ended = next((a.reason for a in actions if isinstance(a, te.Finish)), "")
    assert "no donor has sent a whole part" in ended and state.received


# ---------------------------------------------------------------- storms


def test_a_storm_of_questions_is_not_answered(tmp_path: Path) -> None:
    """What is asked and never read would fill the coordinator's memory and take its time."""
    door = Door()
    try:
        raw = door.raw(N1)
        raw.send(wire.encode(HELLO))
        assert door.pump(3.0)
        for _ in range(1000):
            raw.send(wire.encode(Fetch(0, 1024)))
        heard = door.pump(2.0, until=1000)
        assert 200 < len(heard) < 700 and door.refused("n1")["too many Fetches"] > 200
    finally:
        door.close()


def test_what_one_node_says_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("storm")
    files = outputs.Outputs(tmp_path, log)
    with caplog.at_level(logging.INFO, "storm"):
        for number in range(2000):
            files.note(ce.Note("refused", {"node": "c", "reason": f"seed {number}"}))
        assert len(caplog.records) < 150
        files.note(ce.Note("refused", {"node": "a", "reason": "another's are still told"}))
        files.note(ce.Note("commit", {"round": 1}))
        assert [r.getMessage() for r in caplog.records[-2:]] == [
            "refused: a (another's are still told)", "commit: round 2",
        ]  # fmt: skip
    files.close()


@pytest.mark.parametrize(
    "address", ["tcp://127.0>0.1:5", "tcp://a b:5", "tcp://h\u00e4:5", "tcp://h:\u0663", "tcp://h/:1"]
)
def test_addresses_that_no_socket_takes(address: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        zmtp.host_and_port(address)
