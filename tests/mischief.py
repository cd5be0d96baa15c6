"""Everything that may happen to a random world, each with its chance: the table that `sweep.py` draws from.

A mischief is a function of a world and its own dice. Called by `sweep.py` only; the deeds themselves are in
`world.py`, `people.py`, `rulers.py` and `rogues.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from protocol.fields import bf16
from tests import people, rogues, rulers
from tests.actors import COORDINATOR
from tests.replica import Outcome, evidence_of
from tests.world import World

Mischief = Callable[[World, random.Random], None]
SAFETY = 40.0  # virtual seconds of faults
DAY = 86_400.0
KEEPER = "node-0"  # never goes for good


def _nodes(world: World, rng: random.Random) -> list[str]:
    names = sorted(world.nodes)
    return rng.sample(names, rng.randint(1, len(names)))


def _node(world: World, rng: random.Random) -> str:
    return rng.choice(sorted(world.nodes))


def _any(world: World, rng: random.Random) -> str:
    return rng.choice([COORDINATOR, *sorted(world.nodes)])


def _early(rng: random.Random) -> float:
    return rng.uniform(0, SAFETY / 2)


def lanes(world: World, rng: random.Random) -> None:
    """Nodes with several engines, some of which come and go; some are free while answers are scored."""
    for name in sorted(world.nodes):
        sim = world.nodes[name]
        sim.lanes, sim.frees = rng.randint(1, 4), rng.random() < 0.5
        if rng.random() < 0.3:
            whole = sim.lanes
            world.at(_early(rng), partial(sim.offer, rng.randint(1, whole)))
            world.at(SAFETY / 2 + _early(rng), partial(sim.offer, whole))


def poisoned(world: World, rng: random.Random) -> None:
    world.poison(rng.randrange(4), *_nodes(world, rng))


def cuts(world: World, rng: random.Random) -> None:
    """A link that carries nothing, or nothing one way."""
    for name in _nodes(world, rng):
        start = _early(rng)
        world.network.cut(name, start, start + rng.uniform(1, 20), rng.choice(("both", "in", "out")))


def partition(world: World, rng: random.Random) -> None:
    start = _early(rng)
    side = set(_nodes(world, rng)) | ({COORDINATOR} if rng.random() < 0.3 else set())
    world.network.part(side, start, start + rng.uniform(1, 20))


def lopsided(world: World, rng: random.Random) -> None:
    """Each direction of each link loses its own share."""
    for name in sorted(world.nodes):
        world.network.loss[COORDINATOR, name] = rng.choice((0.0, 0.1, 0.6))
        world.network.loss[name, COORDINATOR] = rng.choice((0.0, 0.1, 0.6))


def far_away(world: World, rng: random.Random) -> None:
    world.network.lag(_node(world, rng), rng.uniform(0.1, 3.0), end=SAFETY)


def leaves(world: World, rng: random.Random) -> None:
    world.leave(_node(world, rng), _early(rng), rng.uniform(0.5, 10))


def hangs(world: World, rng: random.Random) -> None:
    sim = world.nodes[_node(world, rng)]
    seconds = rng.uniform(20, 80)
    world.at(_early(rng), lambda: sim.hang(seconds))


def slows(world: World, rng: random.Random) -> None:
    start = _early(rng)
    world.slow(_node(world, rng), rng.choice((3.0, 10.0)), start, start + rng.uniform(5, 20))


def stops(world: World, rng: random.Random) -> None:
    """The operator stops the coordinator and starts it again."""
    world.at(_early(rng), world.coordinator.terminate)
    world.restart(at=SAFETY / 2 + 5)


def freezes(world: World, rng: random.Random) -> None:
    world.freeze(_any(world, rng), _early(rng), rng.choice((1.0, 8.0, 19.0)))


def clocks(world: World, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        world.jump(_any(world, rng), rng.uniform(0, SAFETY), rng.choice((-DAY, -20.0, -3.0, 3.0, 20.0, DAY)))


def disks(world: World, rng: random.Random) -> None:
    start = _early(rng)
    world.fill(_any(world, rng), start, start + rng.uniform(0.1, 15))


def churn(world: World, rng: random.Random) -> None:
    """Some come late; some go and do not come back."""
    for name in sorted(world.nodes):
        what = rng.choice(("late", "killed", "released", "stays")) if name != KEEPER else "stays"
        if what == "late":
            world.crash(name, at=0.0, down=rng.uniform(1, SAFETY))
        elif what == "killed":
            world.lose(name, at=_early(rng))
        elif what == "released":
            world.leave(name, at=_early(rng))


def newcomers(world: World, rng: random.Random) -> None:
    """Machines join by invites, some in a race for the last use of one."""
    for k in range(rng.randint(1, 3)):
        begin = _early(rng)
        uses, count = rng.choice(((1, 1), (1, 2), (2, 2), (2, 3)))
        key = people.invite(world, begin, uses=uses)
        for j in range(count):
            excuses = (people.USED,) if count > uses else ()
            at = begin + rng.choice((0.0, rng.uniform(0, 10)))
            people.newcomer(world, f"new-{k}{j}", key, at, rng.choice((0.05, 0.2)), excuses)


def revocations(world: World, rng: random.Random) -> None:
    """Keys are put out, some are put back."""
    names = [name for name in sorted(world.nodes) if name != KEEPER] + ["new-00", "new-10"]
    for name in rng.sample(names, rng.randint(1, 2)):
        at = _early(rng)
        people.revoke(world, name, at)
        if name in world.nodes and rng.random() < 0.4:
            people.readmit(world, name, at + rng.uniform(0, 10))


def flips(world: World, rng: random.Random) -> None:
    """Bits turn over in memory, at most three in one node: after five repairs a machine is sent away."""
    for name in _nodes(world, rng):
        for _ in range(rng.randint(1, 3)):
            bit = rng.randrange(32)
            world.at(rng.uniform(0, SAFETY), partial(world.nodes[name].flip, rng.randrange(64), bit))


def miscomputes(world: World, rng: random.Random) -> None:
    """An update comes out wrong and its node does not notice; others must, so they are there."""
    if len(world.nodes) > 1:
        at = rng.uniform(0, SAFETY / 4)
        world.at(at, world.nodes[_node(world, rng)].miscompute)


def amends(world: World, rng: random.Random) -> None:
    """The operator changes the settings while the run goes on."""
    for _ in range(rng.randint(1, 2)):
        alpha, sigma = rng.choice((None, 0.02)), rng.choice((None, bf16(0.03)))
        members = rng.choice((4, 6, 8))
        round = rng.randint(1, 3)
        people.amend(world, rng.uniform(0, SAFETY), round, alpha=alpha, sigma=sigma, members=members)


def succession(world: World, rng: random.Random) -> None:
    """The coordinator's machine is lost; a successor goes on from some node's ledger, not always the best."""
    people.recover(
        world,
        rng.uniform(2, SAFETY / 2),
        _node(world, rng),
        force=rng.random() < 0.3,
        moving=rng.choice((1.0, 10.0)),
        own=_owns_key(rng),
    )


def several_rulers(world: World, rng: random.Random) -> None:
    """Two successors at once, an old coordinator that comes back, a copied data folder, or Sybils."""
    at = rng.uniform(2, SAFETY / 2)
    notices = rng.uniform(at + 5, SAFETY)
    what = rng.choice(("two", "old", "clone", "sybils"))
    if what == "two":
        hows = [rng.choice(("wait", "wait", "force")) for _ in range(2)]
        sources = [_node(world, rng) for _ in range(2)]
        rulers.two_successors(world, at, sources, hows, notices, own=_owns_key(rng))
    elif what == "old":
        source, back = _node(world, rng), rng.uniform(at, notices)
        rulers.old_one_returns(world, at, source, back, notices, own=_owns_key(rng))
    elif what == "clone":
        rulers.cloned_folder(world, at, notices)
    else:
        names = sorted(world.nodes)[-(2 * len(world.nodes) // 3) :] if len(world.nodes) > 2 else []
        rulers.sybils(world, at, names, _node(world, rng), own=_owns_key(rng))


def _owns_key(rng: random.Random) -> bool:
    """Whether the lost coordinator's signing key was copied. Drawn last: older dice stay as they were."""
    return rng.random() < 0.3


def pauses(world: World, rng: random.Random) -> None:
    """The owner of a machine pauses its node and lets it go on."""
    for name in _nodes(world, rng):
        at = _early(rng)
        for begin in (at, at + rng.uniform(2, 10)):
            world.pause(name, begin, rng.choice((0.0, 1.0, 6.0)))


def liars(world: World, rng: random.Random) -> None:
    """A node reports more than it measured, with scores that bear it out or with none that do."""
    names = [name for name in sorted(world.nodes) if name != KEEPER]
    if not names:
        return
    world.checkers.liars = True
    consistent = rng.random() < 0.5

    def more(outcome: Outcome) -> Outcome:
        scores = tuple(min(score + 0.1, 1.0) for score in outcome.scores)
        size = len(scores) // len(outcome.sums) or 1
        sums = tuple(math.fsum(scores[k * size : (k + 1) * size]) for k in range(len(outcome.sums)))
        if not consistent:
            return replace(outcome, sums=sums)
        return replace(outcome, sums=sums, scores=scores, evidence=evidence_of(scores))

    world.nodes[rng.choice(names)].lie = more


def dialled(world: World, rng: random.Random) -> None:
    """Nodes give each other ledger entries, some of them spoiled ones."""
    world.dialled = True
    for name in sorted(world.nodes):
        world.nodes[name].larder.poisons = world.nodes[name].larder.poisons or rng.random() < 0.1


def insists(world: World, rng: random.Random) -> None:
    """A machine whose kernel errs, in every replay too. Once it is taken away, two must be left: another
    that errs needs somebody to contradict it.
    """
    if len(world.nodes) > 2:
        rogues.insist(world, rng.choice([n for n in sorted(world.nodes) if n != KEEPER]), _early(rng) / 2)


def silent(world: World, rng: random.Random) -> None:
    """Where somebody insists it is that one: against its word alone nobody could know better."""
    insisting = [name for name in sorted(world.nodes) if world.nodes[name].ears]
    rogues.fall_silent(world, insisting[0] if insisting else _node(world, rng))


def recants(world: World, rng: random.Random) -> None:
    rogues.recant(world, _nodes(world, rng), rng.uniform(0, SAFETY))


MISCHIEF: tuple[tuple[float, Mischief], ...] = (
    (0.3, poisoned),
    (0.3, cuts),
    (0.2, partition),
    (0.2, lopsided),
    (0.1, far_away),
    (0.25, leaves),
    (0.15, hangs),
    (0.15, slows),
    (0.15, stops),
    (0.2, freezes),
    (0.2, clocks),
    (0.2, disks),
    (0.25, churn),
    (0.25, newcomers),
    (0.2, revocations),
    (0.2, flips),
    (0.2, amends),
    (0.15, succession),
    (0.15, liars),
    (0.4, lanes),
    (0.3, dialled),
    (0.12, several_rulers),
    (0.15, pauses),
    (0.1, silent),
    (0.1, recants),
)
IN_CALM: tuple[tuple[float, Mischief], ...] = (
    (1.0, miscomputes),
    (0.3, flips),
    (0.3, poisoned),
    (0.3, slows),
    (0.25, insists),
    (0.25, silent),
    (0.25, recants),
)
