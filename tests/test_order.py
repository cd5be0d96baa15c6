"""Two orders of the same events never change what a commit says, where the plan makes results repeatable."""

from __future__ import annotations

import random

from protocol.entries import CommitBody, parse
from protocol.messages import Result, Unit
from tests.desk import Desk
from tests.replica import Replica, measure
from tests.world import World

MEMBERS = 6


def _results(desk: Desk, rng: random.Random, names: str) -> list[tuple[str, Result]]:
    """Every chunk of the open round measured once, by whom and in which pieces the dice say."""
    found = []
    master = Replica(desk.lock).master
    for member in range(MEMBERS):
        first = 0
        while first < 4:
            last = rng.randint(first, 3)
            unit = Unit(0, 0, member, first, last)
            sums = measure(desk.lock, master, unit).sums
            found.append((rng.choice(names), desk.result_of(unit, sums=sums)))
            first = last + 1
    return found


def _commit(desk: Desk, results: list[tuple[str, Result]]) -> bytes:
    for name, result in results:
        desk.say(name, result)
        if desk.appended:
            return next(e.raw for e in desk.appended if isinstance(e.body, CommitBody))
    raise AssertionError("the round did not close")


def _desk() -> Desk:
    desk = Desk(members=MEMBERS, chunk=2, per_round=8)
    desk.join("a", "b", "c")
    return desk


def test_any_order_of_the_same_results_signs_the_same_bytes() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        results = _results(_desk(), rng, "abc")
        raws = set()
        for _ in range(3):
            rng.shuffle(results)
            raws.add(_commit(_desk(), results))
        assert len(raws) == 1, seed


def test_duplicates_and_other_pieces_change_no_reward() -> None:
    """Who measured, in which pieces and how often is free; the rewards are not."""
    rows = set()
    for seed in range(30):
        rng = random.Random(seed)
        desk = _desk()
        results = _results(desk, rng, "abc") + _results(desk, rng, "abc")
        rng.shuffle(results)
        body = parse(_commit(desk, results)).body
        assert isinstance(body, CommitBody)
        rows.add(tuple((m.index, m.reward) for m in body.members))
    assert len(rows) == 1


def test_whole_runs_under_different_fates_train_the_same_weights() -> None:
    fates = set()
    for seed in range(6):
        world = World(seed, nodes=1 + seed % 4, rounds=3, chunk=2 + seed % 2)
        world.network.cut("node-0", 1.0, 1.0 + seed)
        world.crash("coordinator", at=0.7 * seed)
        world.run()
        fates.add(world.checkers.digest)
    assert len(fates) == 2, "one for each way of cutting prompts into chunks"
