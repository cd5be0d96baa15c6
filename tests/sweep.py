"""Random worlds: what a seed means, and the sweep behind `python -m tests.world --seeds A..B`.

Every fault of `world.py` and `network.py` is drawn for a seed with some chance, so that each is often absent
and the others get far. Called by the simulation's tests and the command line.
"""

from __future__ import annotations

import argparse
import datetime
import math
import random
import subprocess
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from protocol.plan import bf16
from tests import people, rulers, warden
from tests.actors import COORDINATOR
from tests.network import Faults
from tests.replica import Outcome, evidence_of
from tests.world import World

Mischief = Callable[[World, random.Random], None]
SAFETY = 40.0  # virtual seconds of faults
DAY = 86_400.0
KEEPER = "node-0"  # never goes for good


CALM = Faults(drop=0.01, duplicate=0.05, delay=0.02, until=SAFETY)


def draw_faults(rng: random.Random) -> Faults:
    """Each kind of fault is sometimes absent, so that the others get far."""

    def maybe(*values: float) -> float:
        return rng.choice((0.0, *values))

    return Faults(
        drop=maybe(0.02, 0.1, 0.3),
        duplicate=maybe(0.05, 0.3),
        delay=rng.choice((0.005, 0.05, 0.3)),
        straggle=maybe(0.02, 0.1),
        crash_node=maybe(0.001, 0.01),
        crash_coordinator=maybe(0.001, 0.01, 0.03),
        torn=maybe(0.3),
        down=rng.choice((0.3, 3.0, 12.0)),
        until=SAFETY,
    )


LONG = Faults(drop=0.02, delay=0.02, crash_node=0.0005, torn=0.3, down=1.0, until=SAFETY)


def long_world(seed: int) -> World:
    """Many rounds, slow updates, latecomers: catching up by snapshots, while nodes die and disks fill."""
    rng = random.Random(f"long {seed}")
    world = World(
        seed,
        nodes=rng.choice((2, 3)),
        rounds=rng.choice((16, 22)),
        faults=LONG,
        paces=(0.05, 0.08),
        ops={"eval_every": 8, "snapshot_every": rng.choice((2, 3, 5))},
        members=4,
        chunk=8,
    )
    world.apply_ms = rng.choice((800.0, 1500.0))
    key = people.invite(world, 1.0, uses=3)
    for k in range(rng.randint(1, 3)):
        people.newcomer(world, f"late-{k}", key, rng.uniform(20, 36))
    for name in sorted(world.nodes):
        world.nodes[name].larder.poisons = rng.random() < 0.2
    for chance, mischief in ((0.4, disks), (0.3, partition), (0.3, leaves), (0.2, flips)):
        if rng.random() < chance:
            mischief(world, rng)
    return world


def of_seed(seed: int) -> World:
    """The world of a seed: faults, pool, plan and mischief are all drawn from it.

    Every kind of mischief has its own dice, so that a new kind changes no old seed that does not draw it.
    """
    rng = random.Random(f"world {seed}")
    dice = random.Random(f"calm {seed}")
    calm = dice.random() < 0.1
    every, audits = dice.choice((0, 1, 2)), dice.choice((0.0, 0.02, 0.5))
    if dice.random() < 0.05:
        return long_world(seed)
    drawn = list(_draw(seed, MISCHIEF if not calm else IN_CALM))
    several = any(mischief is several_rulers for mischief, _ in drawn)
    world = World(
        seed,
        nodes=rng.choice((1, 2, 3, 3, 5)),
        rounds=rng.choice((2, 3, 4)),
        faults=draw_faults(rng) if not calm else CALM,
        paces=rng.choice(((0.1,), (0.05, 0.1, 0.4), (0.2, 0.3))),
        ops={
            "eval_every": rng.choice((0, 1, 2)),
            "quorum": rng.choice((1.0, 1.0, 1.0, 0.5)),
            "snapshot_every": every,
            "audit_share": audits,
        },
        members=rng.choice((4, 6)),
        mirrored=rng.random() < 0.4,
        repeatable=rng.random() < 0.7,
        chunk=rng.choice((2, 3, 8)),
        **({"heirs": rulers.HEIRS} if several else {}),
    )
    for mischief, dice in drawn:
        if not (several and mischief is succession):  # one way to lose the coordinator is enough
            mischief(world, dice)
    return world


def _draw(seed: int, table: Iterable[tuple[float, Mischief]]) -> Iterator[tuple[Mischief, random.Random]]:
    for chance, mischief in table:
        dice = random.Random(f"{mischief.__name__} {seed}")
        if dice.random() < chance:
            yield mischief, dice


# ---------------------------------------------------------------- mischief


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
        world.at(rng.uniform(0, SAFETY / 4), world.nodes[_node(world, rng)].miscompute)


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
    )


def several_rulers(world: World, rng: random.Random) -> None:
    """Two successors at once, an old coordinator that comes back, a copied data folder, or Sybils."""
    at = rng.uniform(2, SAFETY / 2)
    notices = rng.uniform(at + 5, SAFETY)
    what = rng.choice(("two", "old", "clone", "sybils"))
    if what == "two":
        hows = [rng.choice(("wait", "wait", "force")) for _ in range(2)]
        rulers.two_successors(world, at, [_node(world, rng) for _ in range(2)], hows, notices)
    elif what == "old":
        rulers.old_one_returns(world, at, _node(world, rng), rng.uniform(at, notices), notices)
    elif what == "clone":
        rulers.cloned_folder(world, at, notices)
    else:
        names = sorted(world.nodes)[-(2 * len(world.nodes) // 3) :] if len(world.nodes) > 2 else []
        rulers.sybils(world, at, names, _node(world, rng))


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
)
IN_CALM: tuple[tuple[float, Mischief], ...] = (
    (1.0, miscomputes),
    (0.3, flips),
    (0.3, poisoned),
    (0.3, slows),
)

# ---------------------------------------------------------------- sweeping


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a seed ended: `problem` is empty when nothing was violated, `story` is for people."""

    seed: int
    problem: str
    story: str
    trace: str

    def __str__(self) -> str:
        return f"seed {self.seed} fails: {self.problem}\n  {repeat(self.seed)}"


def repeat(seed: int) -> str:
    """The line that repeats a seed."""
    return f"python -m tests.world --seeds {seed}..{seed} --verbose"


def examine(seed: int) -> Verdict:
    """Run one seed to its end."""
    world = of_seed(seed)
    problem = trace = ""
    try:
        world.run()
    except Exception as error:  # a violation, or the core's own assertion
        problem, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    return Verdict(seed, problem, "\n".join(world.lines), trace)


def _without_story(seed: int) -> Verdict:
    found = examine(seed)
    return found if found.problem else Verdict(seed, "", "", "")


def sweep(seeds: Iterable[int], jobs: int = 1) -> Iterator[Verdict]:
    """The verdict of every seed, in order."""
    if jobs == 1:
        yield from map(examine, seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=warden.leave_with_parent) as pool:
        yield from pool.map(_without_story, seeds, chunksize=8)


def fresh_window(count: int) -> range:
    """Seeds nobody has tried: another window for every commit, or every day where there is no commit."""
    here = Path(__file__).parent
    asked = ["git", "-C", str(here), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    first = zlib.crc32((found or datetime.date.today().isoformat()).encode()) // count * count
    return range(first, first + count)


def check(seed: int) -> None:
    """Run one seed; what breaks carries the line that repeats it and the end of the story."""
    found = examine(seed)
    tail = "\n".join(found.story.splitlines()[-30:])
    assert not found.problem, f"{found}\n{tail}\n{found.trace}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.world", description="Sweep seeds of random faults."
    )
    parser.add_argument("--seeds", default="0..99", help="A..B, both included")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--verbose", action="store_true", help="tell each story in full")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(".."))
    failed, begun = [], time.perf_counter()
    for verdict in sweep(range(first, last + 1), 1 if arguments.verbose else arguments.jobs):
        if arguments.verbose:
            print(verdict.story)
        if verdict.problem:
            failed.append(verdict.seed)
            print(verdict, flush=True)
        if arguments.verbose:
            print(verdict.trace, end="")
    count, seconds = last - first + 1, time.perf_counter() - begun
    speed = f"{seconds:.1f} s, {60 * count / seconds:.0f} a minute"
    print(f"{count} seeds, {len(failed)} fail {failed or ''} ({speed})")
    return 1 if failed else 0
