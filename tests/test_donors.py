"""Snapshots in the coordinator: which root enters the chain, who is a donor, what a complaint does."""

from __future__ import annotations

from typing import Any

import coordinator.events as ce
from coordinator import donors, machine
from protocol.entries import CommitBody
from protocol.messages import WIRE_VERSION
from protocol.peers import CatchUp, Donors, DonorsAsk, Kept, PeerFault, PeerWay, Reach, Snapshots, WrongFile
from protocol.plan import Ops
from tests.desk import Desk, key_of

ROOT, OTHER = b"R" * 32, b"S" * 32
HERE = ("tcp://10.0.0.1:4000",)


def desk(names: str = "abc", rounds: int = 9) -> Desk:
    """Nodes of these names after one committed round, snapshots due every round."""
    made = Desk(members=2, ops={"rounds": rounds, "snapshot_every": 1})
    made.join(*names)
    for name in names:
        made.say(name, Reach(HERE))
    close_round(made, names)
    return made


def close_round(made: Desk, names: str) -> CommitBody:
    """Everybody works until the round is committed, then stands at the tip."""
    before = made.state.chain.round
    made.tick(0.3)
    for name in names * 3:
        if made.state.chain.round == before:
            made.work(name)
    assert made.state.chain.round == before + 1
    for name in names:
        made.applied(name, 1000 + before)
    body = made.state.chain.commits[-1].body
    assert isinstance(body, CommitBody)
    return body


def picture(made: Desk) -> dict[str, Any]:
    return machine.status(made.state)["snapshots"]


def test_nodes_learn_how_often_and_hear_of_changes() -> None:
    made = desk("a")
    made.say("a", Reach(HERE))
    assert made.sent(Snapshots, "a") == [Snapshots(1, 0)]
    made.step(ce.RelayOpened(made.now, 4100))
    assert made.sent(Snapshots, "a") == [Snapshots(1, 4100)]
    made.step(ce.OpsChanged(made.now, Ops(rounds=9, eval_every=0, snapshot_every=5)))
    assert made.sent(Snapshots, "a") == [Snapshots(5, 4100)]


def test_two_must_agree_before_a_root_enters_the_chain() -> None:
    made = desk()
    made.say("a", Kept(1, ROOT, 999))
    assert close_round(made, "abc").snapshot == b""
    made.say("b", Kept(1, ROOT, 999))
    assert close_round(made, "abc").snapshot == ROOT
    assert close_round(made, "abc").snapshot == b"", "once is enough"
    assert picture(made)["announced"] == {"1": ROOT.hex()}


def test_one_is_enough_when_it_is_alone() -> None:
    made = desk("a")
    made.say("a", Kept(1, ROOT, 999))
    assert close_round(made, "a").snapshot == ROOT


def test_a_round_that_is_not_committed_is_not_believed() -> None:
    made = desk("a")
    made.say("a", Kept(2, ROOT, 999))
    assert close_round(made, "a").snapshot == b""


def test_a_disagreement_is_shown_and_the_majority_is_announced() -> None:
    made = desk()
    made.say("a", Kept(1, OTHER, 999))
    made.say("b", Kept(1, ROOT, 999))
    assert made.notes("dispute")[0]["what"] == "snapshot"
    made.say("c", Kept(1, ROOT, 999))
    assert close_round(made, "abc").snapshot == ROOT
    (words,) = picture(made)["disagreements"]
    assert "by a" in words and "by b and c" in words
    made.say("d", DonorsAsk(0))


def test_whoever_keeps_another_file_than_the_signed_one_is_told() -> None:
    made = desk()
    for name, root in zip("abc", (OTHER, ROOT, ROOT), strict=True):
        made.say(name, Kept(1, root, 999))
    assert not made.sent(WrongFile, "a"), "nothing is signed yet"
    assert close_round(made, "abc").snapshot == ROOT
    made.say("a", Kept(1, OTHER, 999))  # as nodes do until they see the root in the chain
    (told,) = made.sent(WrongFile, "a")
    assert (told.round, told.root) == (1, OTHER)
    assert f"signed root is {ROOT.hex()[:12]}" in told.reason
    assert machine.status(made.state)["counters"]["wrong snapshot files"] == 1
    assert not picture(made)["disagreements"]
    made.say("a", Kept(1, ROOT, 999))  # written again
    assert not made.sent(WrongFile, "a") and picture(made)["peers"]["a"]["kept"] == [1]


def ready(names: str = "abcd") -> Desk:
    """All but the last node hold an announced snapshot of round 1."""
    made = desk(names)
    for name in names[:-1]:
        made.say(name, Kept(1, ROOT, 999))
    assert close_round(made, names).snapshot == ROOT
    return made


def asked(made: Desk, name: str, round: int = 0) -> Donors:
    made.say(name, DonorsAsk(round))
    return made.sent(Donors, name)[0]


def test_donors_have_the_newest_announced_snapshot() -> None:
    made = ready()
    made.say("a", Kept(2, OTHER, 999))
    answer = asked(made, "d")
    assert (answer.round, answer.root, answer.size) == (1, ROOT, 999)
    assert [donor.name for donor in answer.donors] == ["a", "b", "c"] and answer.donors[0].addresses == HERE
    made.say("b", Kept(2, OTHER, 999))
    close_round(made, "abcd")
    answer = asked(made, "d")
    assert (answer.round, [donor.name for donor in answer.donors]) == (2, ["a", "b"])
    assert not asked(made, "d", round=2).donors, "nothing newer"


def test_busy_donors_come_last_and_a_joiner_is_not_its_own() -> None:
    made = ready()
    assert [donor.name for donor in asked(made, "a").donors] == ["b", "c"]
    assert [donor.name for donor in asked(made, "d").donors] == ["a", "b", "c"]
    assert picture(made)["peers"]["b"]["serving"] == 2
    made.say("a", CatchUp("replay", "quicker"))
    assert picture(made)["peers"]["b"]["serving"] == 1
    assert picture(made)["peers"]["a"]["catching_up"] == "replay: quicker"
    made.tick(donors.BUSY_SECONDS + 1)
    assert picture(made)["peers"]["b"]["serving"] == 0


def test_a_silent_donor_is_none() -> None:
    made = ready()
    made.now += 20
    for name in "bd":
        made.beat(name)
    assert [donor.name for donor in asked(made, "d").donors] == ["b"]


def test_complaints_mark_a_donor() -> None:
    made = ready("abcde")
    fault = PeerFault(key_of("a"), ROOT, 3, "its hash does not fit")
    made.say("d", fault)
    assert [donor.name for donor in asked(made, "d").donors] == ["b", "c"]
    assert "a" in [donor.name for donor in asked(made, "e").donors], "one complaint shuns nobody for all"
    made.say("e", fault)
    assert "a" not in [donor.name for donor in asked(made, "b").donors]
    shown = picture(made)["peers"]["a"]
    assert shown["donor"] == "2 nodes had poisoned parts from it" and set(shown["faults"]) == {"d", "e"}
    assert made.state.counters["poisoned parts"] == 2
    made.say("a", PeerFault(key_of("a"), ROOT, 3, "of itself"))
    assert len(picture(made)["peers"]["a"]["faults"]) == 2


def test_two_that_collude_shun_two_donors_and_no_more() -> None:
    made = ready("abcdef")
    for donor in "abc":
        for liar in "ef":
            made.say(liar, PeerFault(key_of(donor), ROOT, 3, "its hash does not fit"))
    assert [donor.name for donor in asked(made, "d").donors] == ["c", "e"]
    assert [donor.name for donor in asked(made, "f").donors] == ["d", "e"], (
        "but nobody is sent to whom it complained about"
    )


def test_status_says_how_a_peer_is_reached_and_why_not() -> None:
    made = ready()
    assert picture(made)["peers"]["a"]["reached"] == "by nobody yet (not tried)"
    made.say("d", PeerWay(key_of("a"), "relay", "no answer at tcp://10.0.0.1:4000"))
    made.say("b", PeerWay(key_of("a"), "direct", ""))
    reached = picture(made)["peers"]["a"]["reached"]
    assert reached == "direct by 1, relay by 1 (no answer at tcp://10.0.0.1:4000)"


def test_a_restarted_coordinator_hears_it_all_again() -> None:
    made = ready("abc")
    made.restart()
    assert not made.state.peers and WIRE_VERSION == 1
    made.say("a", Kept(1, ROOT, 999))  # before Hello: nobody is known
    assert not made.state.peers
