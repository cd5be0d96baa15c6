"""Random worlds: what a seed means, and the sweep behind `python -m tests.world --seeds A..B`."""

from __future__ import annotations

import argparse
import random
import time
import traceback

from tests.world import Faults, World

SAFETY = 40.0  # virtual seconds of faults


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
        down=rng.choice((0.3, 3.0, 12.0)),
        until=SAFETY,
    )


def of_seed(seed: int) -> World:
    """The world of a seed: faults, pool, plan and mischief are all drawn from it."""
    rng = random.Random(f"world {seed}")
    world = World(
        seed,
        nodes=rng.choice((1, 2, 3, 3, 5)),
        rounds=rng.choice((2, 3, 4)),
        faults=draw_faults(rng),
        paces=rng.choice(((0.1,), (0.05, 0.1, 0.4), (0.2, 0.3))),
        ops={"eval_every": rng.choice((0, 1, 2)), "quorum": rng.choice((1.0, 1.0, 1.0, 0.5))},
        members=rng.choice((4, 6)),
        mirrored=rng.random() < 0.4,
        repeatable=rng.random() < 0.7,
        chunk=rng.choice((2, 3, 8)),
    )
    _mischief(world, rng)
    return world


def _mischief(world: World, rng: random.Random) -> None:
    """Poisoned members, cut links, clean leaves, hung engines."""
    names = sorted(world.nodes)
    if rng.random() < 0.3:
        world.poison(rng.randrange(4), *rng.sample(names, rng.randint(1, len(names))))
    if rng.random() < 0.4:
        start = rng.uniform(0, SAFETY / 2)
        world.cut(rng.choice(names), start, start + rng.uniform(1, 20))
    if rng.random() < 0.3:
        world.leave(rng.choice(names), rng.uniform(0, SAFETY / 2), rng.uniform(0.5, 10))
    if rng.random() < 0.2:
        sim = world.nodes[rng.choice(names)]
        world.at(rng.uniform(0, SAFETY / 2), lambda: sim.hang(rng.uniform(20, 80)))
    if rng.random() < 0.2:
        world.at(rng.uniform(0, SAFETY / 2), world.coordinator.terminate)
        world.restart(at=SAFETY / 2 + 5)


def check(seed: int) -> World:
    """Run one seed to its end; what breaks carries the line that repeats it and the end of the story."""
    world = of_seed(seed)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"repeat with: python -m tests.world --seeds {seed}..{seed} --verbose")
        error.add_note("\n".join(world.lines[-30:]))
        raise
    return world


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.world", description="Sweep seeds of random faults."
    )
    parser.add_argument("--seeds", default="0..99", help="A..B, both included")
    parser.add_argument("--verbose", action="store_true", help="tell each story in full")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(".."))
    failed, begun = [], time.perf_counter()
    for seed in range(first, last + 1):
        world = of_seed(seed)
        try:
            world.run()
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed} fails: {type(error).__name__}: {error}")
            print(f"  python -m tests.world --seeds {seed}..{seed} --verbose", flush=True)
            if arguments.verbose:
                traceback.print_exc()
        if arguments.verbose:
            print("\n".join(world.lines))
    seconds = time.perf_counter() - begun
    print(f"{last - first + 1} seeds, {len(failed)} fail {failed or ''} ({seconds:.1f} s)")
    return 1 if failed else 0
