"""Settings that change while a run lasts: the operator's order, its entry, what coordinator and nodes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import coordinator.events as ce
from coordinator import amend, machine
from esnode import admin
from protocol import ledger
from protocol.chain import BrokenChain
from protocol.entries import AmendBody, CommitBody, EntryKind, ScoreBody, public_key
from protocol.fields import bf16
from protocol.shaping import mean_and_std
from tests.desk import Desk, forge, hello
from tests.runs import Processes, make_folder, wait_for
from tests.test_rounds import chain_of
from tests.world import World


def order(desk: Desk, **request: Any) -> str:
    """Ask for a change; why it is refused, or nothing."""
    event, reason = amend.asked(desk.state, request)
    if event is not None:
        desk.step(event)
    return reason


def test_an_order_becomes_an_entry_and_counts_from_its_round() -> None:
    desk = Desk(members=4)
    desk.join("a")
    assert order(desk, alpha=0.5, members=6, from_round=1) == ""
    assert desk.kinds[-1] is EntryKind.AMEND and not desk.state.orders
    assert desk.state.round is not None and len(desk.state.round.members) == 4, "the open round stays"
    desk.work("a")
    first = desk.state.chain.commits[0].body
    assert isinstance(first, CommitBody) and len(first.members) == 4 and first.alpha == desk.lock.alpha_at(0)
    desk.applied("a", 77)
    desk.work("a")
    second = desk.state.chain.commits[1].body
    assert isinstance(second, CommitBody) and len(second.members) == 6 and second.alpha == 0.5


def test_an_order_waits_for_d_and_survives_a_restart() -> None:
    desk = Desk(members=4)
    desk.join("a")
    desk.work("a")
    assert desk.state.digest is None
    assert order(desk, sigma=0.1, from_round=2) == ""
    assert desk.kinds[-1] is EntryKind.COMMIT and len(desk.state.orders) == 1
    assert machine.status(desk.state)["amendments"] == [
        "sigma 0.100098 from round 3 on (not in the ledger yet)"
    ]
    desk.restart()
    assert [o.sigma for o in desk.state.orders] == [bf16(0.1)]
    tip = desk.state.chain.tip
    desk.say("a", hello(desk.lock, height=desk.state.chain.height, tip=tip, term=1, digest=77))
    desk.tick()
    body = desk.state.chain.entries[-1].body
    assert isinstance(body, AmendBody) and (body.from_round, body.sigma) == (2, bf16(0.1))
    assert not desk.state.orders
    assert machine.status(desk.state)["amendments"] == ["sigma 0.100098 from round 3 on"]
    desk.restart(term=3)
    assert not desk.state.orders, "an order that is fulfilled is not given again"


def test_an_order_that_comes_too_late_moves_to_the_next_round() -> None:
    desk = Desk(members=4)
    desk.join("a")
    desk.work("a")
    assert order(desk, alpha=0.5, from_round=2) == ""
    desk.work("a")  # results of the new round tell D, and close it before the next tick
    assert desk.state.chain.round == 2
    desk.applied("a", 78)
    desk.tick()
    bodies = [entry.body for entry in desk.state.chain.entries if isinstance(entry.body, AmendBody)]
    assert [body.from_round for body in bodies] == [3]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            {"alpha": 0.5, "from_round": 0},
            "the first one that can change is round 2",
        ),
        ({"from_round": 1}, "changes nothing"),
        ({"alpha": -1.0, "from_round": 1}, "alpha = -1 cannot be: it has to be above 0"),
        ({"alpha": "x", "from_round": 1}, "no number"),
        ({"members": 1, "from_round": 1}, "members = 1 cannot be: it has to be"),
        ({"members": 2.5, "from_round": 1}, "no number"),
        ({"sigma": 0.0, "from_round": 1}, "sigma = 0 cannot be: it has to be a positive bf16 number"),
        ({"alpha": 0.5}, "from_round is missing"),
        ({"trusted": ["00" * 32], "from_round": 1}, "own key"),
        ({"trusted": ["abc"], "from_round": 1}, "no signing key"),
        ({"trusted": [7], "from_round": 1}, "no signing key"),
        ({"trusted": "00" * 32, "from_round": 1}, "a list"),
    ],
)
def test_what_cannot_be_is_refused_in_words(request_: dict[str, Any], words: str) -> None:
    desk = Desk(members=4)
    desk.join("a")
    height = desk.state.chain.height
    assert words in order(desk, **request_)
    assert desk.state.chain.height == height


def test_a_new_list_of_signing_keys_waits_for_its_round_and_survives_a_restart() -> None:
    desk = Desk(members=4)
    desk.join("a")
    keys = [public_key(desk.state.key).hex(), public_key(bytes(32)).hex()]
    desk.work("a")
    assert order(desk, trusted=[*keys, keys[0]], from_round=2) == ""
    desk.restart()
    tip = desk.state.chain.tip
    desk.say("a", hello(desk.lock, height=desk.state.chain.height, tip=tip, term=1, digest=77))
    desk.tick()
    body = desk.state.chain.entries[-1].body
    assert isinstance(body, AmendBody) and [key.hex() for key in body.trusted] == keys
    assert not desk.state.orders and len(desk.state.chain.trusted) == 1, "not before round 2"
    desk.work("a")
    assert [key.hex() for key in desk.state.chain.trusted] == keys


def test_nodes_measure_with_the_amended_sigma() -> None:
    """The simulator's checker replays every reward on a path of its own, with the commit's sigma."""
    world = World(seed=5, nodes=2, rounds=4, members=4)
    world.run(until=0.5)
    event = ce.AmendAsked(world.now, 2, None, bf16(0.3), 6)
    world.coordinator._process([event])
    world.run()
    bodies = [e.body for e in world.coordinator.state.chain.entries if isinstance(e.body, CommitBody)]
    assert [len(body.members) for body in bodies] == [4, 4, 6, 6]
    assert [body.sigma == bf16(0.3) for body in bodies] == [False, False, True, True]


def test_amend_over_the_administration_socket_of_a_real_run(tmp_path: Path) -> None:
    lock = make_folder(tmp_path, ("n1",), rounds=6, task_options={"seconds": 0.1})
    with Processes(tmp_path) as processes:
        processes.coordinator()
        processes.node("n1")
        wait_for(lambda: processes.status().get("round", 0) >= 1)
        answer = admin.ask(tmp_path, "amend", from_round=4, alpha=0.125, sigma=0.126)
        assert answer == {
            "ok": True, "from_round": 4, "alpha": 0.125, "sigma": bf16(0.126), "members": None, "trusted": [],
            "rounds": 6,
        }  # fmt: skip
        assert "error" in admin.ask(tmp_path, "amend", from_round=0, alpha=0.1)
        processes.wait_end()
    chain = ledger.read(tmp_path / "run.ledger").chain
    assert [chain.alpha_at(k) for k in (3, 4)] == [lock.alpha_at(3), 0.125]
    assert len(chain.commits) == 6


# ---------------------------------------------------------------- numbers too large to be added


def test_sums_that_cannot_be_added_are_refused_not_a_crash() -> None:
    desk = Desk()
    huge = 1.7e308
    chain = chain_of(desk.lock)
    body = ScoreBody(0, 4, huge, 0, (huge, huge))
    entry = forge(body, chain.entries[-1], round=0, digest=desk.lock.digest)
    with pytest.raises(BrokenChain, match="cannot be added"):
        chain.append(entry)
    with pytest.raises(ValueError, match="too large"):
        mean_and_std([huge, huge])
