"""Random worlds: what a seed means, and the sweep behind `python -m tests.world --seeds A..B`.

Every fault of `world.py` and `network.py` is drawn for a seed with some chance, so that each is often absent
and the others get far. Called by the simulation's tests and the command line.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import subprocess
import time
import traceback
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import mischief, people, rulers, warden
from tests.mischief import IN_CALM, MISCHIEF, SAFETY, Mischief
from tests.network import Faults
from tests.world import World

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
    for chance, happens in (
        (0.4, mischief.disks),
        (0.3, mischief.partition),
        (0.3, mischief.leaves),
        (0.2, mischief.flips),
    ):
        if rng.random() < chance:
            happens(world, rng)
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
    several = any(happens is mischief.several_rulers for happens, _ in drawn)
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
    for happens, dice in drawn:
        if not (several and happens is mischief.succession):  # one way to lose the coordinator is enough
            happens(world, dice)
    return world


def _draw(seed: int, table: Iterable[tuple[float, Mischief]]) -> Iterator[tuple[Mischief, random.Random]]:
    for chance, happens in table:
        dice = random.Random(f"{happens.__name__} {seed}")
        if dice.random() < chance:
            yield happens, dice


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
    with ProcessPoolExecutor(jobs, initializer=warden.leave_with_parent, initargs=(os.getpid(),)) as pool:
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
