"""The simulator: a whole run in one thread, on virtual time, with every fault a seed can choose.

The pure cores, the wire, the ledger and the noise law are the production ones; `actors.py` stands for the shells,
`replica.py` for the model. After every step `checkers.py` looks at everything. Cases read like this:

    world = World(seed=7, nodes=3, rounds=4)
    world.crash("coordinator", at=3.0)
    world.run()

`python -m tests.world --seeds 0..99` sweeps random faults and prints every failing seed with one line to repeat it.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator import machine
from protocol import wire
from protocol.entries import public_key
from protocol.messages import Message
from protocol.plan import Ops
from tests.actors import COORDINATOR, Actor, CrashPoint, SimCoordinator, SimNode
from tests.checkers import Checkers, Violation, require
from tests.replica import make_lock

SAFETY = 40.0  # virtual seconds of faults
LIVENESS = 240.0  # virtual seconds after the last fault in which the run must end
FULL_LOG = 4000


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the world is until it heals. Chances are per message or per step."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.02  # mean seconds
    straggle: float = 0.0  # chance of a delay of up to 4 s, so that messages overtake each other
    crash_node: float = 0.0
    crash_coordinator: float = 0.0
    down: float = 3.0  # mean seconds until a killed process is started again
    until: float = 0.0  # when the world heals

    @staticmethod
    def of(rng: random.Random) -> Faults:
        """The faults of a seed: each kind is sometimes absent, so that the others get far."""

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


Rule = Callable[
    [str, Message], float | None
]  # (sender, message) -> extra delay; infinite: lost; None: as usual


class World:
    """One simulated run."""

    def __init__(
        self,
        seed: int = 0,
        nodes: int = 3,
        rounds: int = 4,
        *,
        faults: Faults | None = None,
        paces: tuple[float, ...] = (0.1, 0.15, 0.3),
        ops: Mapping[str, Any] | None = None,
        **lock: Any,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.steps = 0
        self.signing_key = hashlib.blake2b(b"coordinator", digest_size=32).digest()
        self.lock = make_lock(public_key(self.signing_key), **lock)
        self.ops = Ops(rounds=rounds, **{"eval_every": 2, **(ops or {})})
        self.checkers = Checkers(self.lock)
        self.lines: list[str] = []
        self.notes: list[tuple[str, str, Mapping[str, Any]]] = []
        self.rules: list[Rule] = []
        self.cuts: list[tuple[str, float, float]] = []
        self.nodes: dict[str, SimNode] = {}
        for k in range(nodes):
            name = f"node-{k}"
            key = hashlib.blake2b(name.encode(), digest_size=32).digest()
            self.nodes[name] = SimNode(self, name, key, paces[k % len(paces)])
        self.coordinator = SimCoordinator(self)
        self.by_key = {sim.key: sim for sim in self.nodes.values()}

    # ------------------------------------------------------------ time

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), action))

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at a moment of virtual time."""
        self.after(max(when - self.now, 0.0), action)

    def _step(self) -> None:
        self.now, _, action = heapq.heappop(self.events)
        self.steps += 1
        action()

    @property
    def healed(self) -> bool:
        return self.now >= self.faults.until

    # ------------------------------------------------------------ the network

    def send(self, sender: str, key: bytes, message: Message) -> None:
        """Carry one frame between the coordinator and the node of `key`, or lose it."""
        frame = wire.encode(message)
        to_node = sender == COORDINATOR
        delay = 0.0
        for rule in self.rules:
            extra = rule(sender, message)
            delay += extra or 0.0
        copies = 1
        if not self.healed:
            faults, chance = self.faults, self.random.random
            copies = 0 if chance() < faults.drop else 1 + (chance() < faults.duplicate)
        if delay == float("inf") or self._cut(self.by_key[key].name):
            copies = 0
        for _ in range(copies):
            decoded = wire.decode(frame, "coordinator" if to_node else "node")
            receiver: Actor = self.by_key[key] if to_node else self.coordinator
            self._deliver(receiver, key, decoded, delay + self._delay())

    def _delay(self) -> float:
        faults = self.faults
        if not self.healed and self.random.random() < faults.straggle:
            return self.random.uniform(0, 4)
        return self.random.expovariate(1 / (0.005 if self.healed else faults.delay))

    def _deliver(self, receiver: Actor, key: bytes, message: Message, delay: float) -> None:
        def arrive() -> None:
            if receiver.up:
                receiver.receive(key, message)

        self.after(delay, arrive)

    def _cut(self, name: str) -> bool:
        return any(name == cut and start <= self.now < end for cut, start, end in self.cuts)

    # ------------------------------------------------------------ what a case can do

    def crash(self, name: str, at: float, down: float = 1.0) -> None:
        """Kill a process and start it again after `down` seconds."""
        actor = self.actor(name)
        self.at(at, actor.kill)
        self.at(at + down, actor.start)

    def cut(self, name: str, start: float, end: float) -> None:
        """A node's link carries nothing for a while."""
        self.cuts.append((name, start, end))

    def hold(self, sender: str, kind: type[Message], seconds: float, times: int = 1) -> None:
        """Delay (or, with infinite seconds, lose) the next messages of a kind that a process sends."""
        left = itertools.count(times, -1)

        def rule(who: str, message: Message) -> float | None:
            matches = who == sender and type(message) is kind
            return seconds if matches and next(left) > 0 else None

        self.rules.append(rule)

    def poison(self, member: int, *names: str) -> None:
        """These nodes (all by default) fail whenever they evaluate this member."""
        for name in names or self.nodes:
            self.nodes[name].poisoned.add(member)

    def actor(self, name: str) -> Actor:
        return self.coordinator if name == COORDINATOR else self.nodes[name]

    def crash_point(self, name: str, size: int) -> CrashPoint | None:
        """Whether a process dies inside this step, and how far it gets; it is started again later."""
        faults = self.faults
        chance = faults.crash_coordinator if name == COORDINATOR else faults.crash_node
        if self.healed or self.random.random() >= chance:
            return None
        self.after(self.random.expovariate(1 / faults.down), self.actor(name).start)
        if self.random.random() < 0.5 or name != COORDINATOR:
            return CrashPoint(self.random.randint(0, size))
        return CrashPoint(None, self.random.randint(0, 3))

    # ------------------------------------------------------------ running

    def run(self, until: float | None = None) -> None:
        """Until the run has ended everywhere, or to a moment of virtual time."""
        if not self.steps:
            for actor in (self.coordinator, *self.nodes.values()):
                self.at(self.now, actor.start)
        deadline = self.faults.until + LIVENESS
        while self.events and not self.finished:
            if until is not None and self.events[0][0] > until:
                self.now = until
                return
            self._step()
            if self.healed:
                self._revive()
            require(self.now < deadline, f"the run does not end: {self.status()['reason']}")
        if until is None:
            self._check_end()

    def _revive(self) -> None:
        """After the faults every process that should run is started by somebody."""
        for actor in self.nodes.values():
            if not actor.up and actor.stopped is None and not self.scripted(actor):
                self.after(0.0, actor.start)
        waiting = any(sim.up for sim in self.nodes.values())
        if waiting and not self.coordinator.up and not self.scripted(self.coordinator):
            if self.coordinator.stopped is None or self.coordinator.stopped[1] == 0:
                self.after(0.0, self.coordinator.start)

    def scripted(self, actor: Actor) -> bool:
        """Whether the case itself decides when this process runs."""
        return not self.faults.until

    @property
    def finished(self) -> bool:
        """Every process has ended by itself: one that was killed comes back."""
        actors = (self.coordinator, *self.nodes.values())
        return all(not actor.up and actor.stopped is not None for actor in actors)

    def _check_end(self) -> None:
        require(self.checkers.ended, "everything stopped before the run ended")
        for name, sim in self.nodes.items():
            require(sim.stopped is not None and sim.stopped[1] == 0, f"{name} ended with {sim.stopped}")
            require(len(sim.disk.raws) == len(self.checkers.chain), f"{name} ends without the whole ledger")

    # ------------------------------------------------------------ looking

    def log(self, who: str, what: str) -> None:
        self.lines.append(f"{self.now:8.3f} {who}: {what}")

    def note(self, who: str, kind: str, fields: Mapping[str, Any]) -> None:
        self.notes.append((who, kind, fields))
        self.log(who, f"{kind} {fields}")

    def status(self) -> dict[str, Any]:
        return machine.status(self.coordinator.state)

    def count(self, kind: str, **fields: Any) -> int:
        """How many notes of a kind carry these fields."""
        wanted = fields.items()
        return sum(k == kind and wanted <= dict(f).items() for _, k, f in self.notes)


# ---------------------------------------------------------------- sweeps


def of_seed(seed: int) -> World:
    """The world a seed means in a sweep: faults, pool, plan and poison are all drawn from it."""
    rng = random.Random(f"world {seed}")
    mirrored = rng.random() < 0.4
    world = World(
        seed,
        nodes=rng.choice((1, 2, 3, 3, 5)),
        rounds=rng.choice((2, 3, 4)),
        faults=Faults.of(rng),
        paces=rng.choice(((0.1,), (0.05, 0.1, 0.4), (0.2, 0.3))),
        ops={"eval_every": rng.choice((0, 1, 2)), "stall_seconds": 30.0},
        members=rng.choice((4, 6)),
        mirrored=mirrored,
        repeatable=rng.random() < 0.7,
        chunk=rng.choice((2, 3, 8)),
    )
    if rng.random() < 0.3:
        names = rng.sample(sorted(world.nodes), rng.randint(1, len(world.nodes)))
        world.poison(rng.randrange(4), *names)
    if rng.random() < 0.4:
        name, start = rng.choice(sorted(world.nodes)), rng.uniform(0, SAFETY / 2)
        world.cut(name, start, start + rng.uniform(1, 20))
    return world


def check(seed: int) -> World:
    """Run one seed to its end; Violation (or whatever broke) if it does not hold."""
    world = of_seed(seed)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"repeat with: python -m tests.world --seeds {seed}..{seed} --verbose")
        error.add_note("\n".join(world.lines[-30:]))
        raise
    return world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0..99", help="A..B, both included")
    parser.add_argument("--verbose", action="store_true", help="print what happened")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(".."))
    failed, begun = [], time.perf_counter()
    for seed in range(first, last + 1):
        world = of_seed(seed)
        try:
            world.run()
        except (Violation, Exception) as error:
            failed.append(seed)
            print(f"seed {seed} fails: {type(error).__name__}: {error}")
            print(f"  python -m tests.world --seeds {seed}..{seed} --verbose")
            if arguments.verbose:
                traceback.print_exc()
        if arguments.verbose:
            print("\n".join(world.lines[-FULL_LOG:]))
    seconds = time.perf_counter() - begun
    print(f"{last - first + 1} seeds, {len(failed)} fail {failed or ''} ({seconds:.1f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
