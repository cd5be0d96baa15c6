"""The simulator: a whole run in one thread, on virtual time, with every fault a seed can choose.

The pure cores, the wire, the ledger and the noise law are the production ones. `actors.py` and `simnode.py`
stand for the shells, `network.py` for the wires, `replica.py` for the model, `larder.py` for snapshots. What
goes wrong: `people.py` (operators, newcomers), `rulers.py` (several coordinators), `rogues.py` (nodes against
the proof), drawn at random by `mischief.py` for `sweep.py`. `checkers.py` looks at everything after every
step. Cases read like this (`cases.py` has those with a transcript):

    world = World(seed=7, nodes=3, rounds=4)
    world.crash("coordinator", at=3.0)
    world.run()

`python -m tests.world --seeds 0..99` sweeps random faults; every failing seed comes with one line to repeat
it.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import esnode.events as ne
from coordinator import machine
from coordinator.rounds import probe_due
from protocol import wire
from protocol.entries import public_key
from protocol.messages import Message
from protocol.plan import Ops
from tests import words
from tests.actors import COORDINATOR, Actor, CrashPoint, SimCoordinator
from tests.checkers import Checkers, Violation, require
from tests.network import LOST, QUIET, Faults, Network
from tests.replica import make_lock
from tests.simnode import SimNode

LIVENESS = 300.0  # virtual seconds after the last fault in which the run must end


class World:
    """One simulated run. Keywords beyond those named go into the lock (see `replica.make_lock`)."""

    def __init__(
        self,
        seed: int = 0,
        nodes: int = 3,
        rounds: int = 4,
        *,
        faults: Faults = QUIET,
        paces: tuple[float, ...] = (0.1, 0.15, 0.3),
        ops: Mapping[str, Any] | None = None,
        **lock: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        # Time, and what waits for it.
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.coming = 0  # starts that are scheduled
        # The run, and who looks on.
        self.signing_key = hashlib.blake2b(b"coordinator", digest_size=32).digest()
        self.heir_key = hashlib.blake2b(b"heir", digest_size=32).digest()
        heirs = (public_key(self.heir_key),)
        self.lock = make_lock(public_key(self.signing_key), **{"heirs": heirs, **lock})
        self.ops = Ops(rounds=rounds, **{"eval_every": 2, **(ops or {})})
        self.checkers = Checkers(self.lock, lambda state: probe_due(self.lock, self.ops, state)[0])
        self.must: list[Callable[[], None]] = []  # what else has to hold after the run
        # What is told of it.
        self.story: list[tuple[float, str, str, bool]] = []  # (when, who, words, fit for a transcript)
        self.notes: list[tuple[str, str, Mapping[str, Any]]] = []  # (who, kind, fields)
        self.stops: list[tuple[str, str]] = []  # every process that ended by itself, and its last words
        # How the world is; cases and mischief change it.
        self.apply_ms = 20.0  # a node's time to apply one entry
        self.gone: set[str] = set()  # processes that go for good
        self.dialled = False  # whether nodes serve each other ledger entries
        self.minded = False  # whether an operator decides which coordinator is started
        self.failing = False  # whether a process may end with code 1
        self.excuses: dict[str, tuple[str, ...]] = {}  # words with which a process ("": any) may
        self.invites: list[bytes] = []
        # Who is there.
        self.network = Network(faults, self.random, lambda: self.now)
        self.nodes: dict[str, SimNode] = {}
        for k in range(nodes):
            name = f"node-{k}"
            key = hashlib.blake2b(name.encode(), digest_size=32).digest()
            self.nodes[name] = SimNode(self, name, key, paces[k % len(paces)])
        self.by_key = {sim.key: sim for sim in self.nodes.values()}
        self.allowed = {sim.key: sim.name for sim in self.nodes.values()}  # the coordinator's list at start
        self.coordinator = SimCoordinator(self)  # the one in charge
        self.coordinators = {COORDINATOR: self.coordinator}
        for actor in self.actors:
            self.start(actor, 0.0)
        if faults.until:
            self.at(faults.until, self._wake)

    @property
    def actors(self) -> tuple[Actor, ...]:
        return (*self.coordinators.values(), *self.nodes.values())

    def enter(self, sim: SimNode) -> None:
        """One more node."""
        self.nodes[sim.name] = self.by_key[sim.key] = sim
        sim.home = self.coordinator.name
        self.start(sim, 0.0)

    def excuse(self, *words: str, name: str = "") -> None:
        """From now on a process ("": any) may end with code 1 and any of these words."""
        self.excuses[name] = (*self.excuses.get(name, ()), *words)

    def excused(self, name: str, reason: str) -> bool:
        """Whether a process may end with code 1 and these words."""
        excuses = (*self.excuses.get(name, ()), *self.excuses.get("", ()))
        return self.failing or any(words in reason for words in excuses)

    def wall_at(self, moment: float) -> float:
        """Unix seconds of the coordinator's machine."""
        return 1.9e9 + moment

    def actor(self, name: str) -> Actor:
        return self.coordinators.get(name) or self.nodes[name]

    # ------------------------------------------------------------ time

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), action))

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at a moment of virtual time."""
        self.after(max(when - self.now, 0.0), action)

    def start(self, actor: Actor, delay: float) -> None:
        """Start a process after a while, if it is not up then."""

        def begin() -> None:
            self.coming -= 1
            if not (actor.name in self.gone and actor.stopped):
                actor.start()

        self.coming += 1
        self.after(delay, begin)

    @property
    def healed(self) -> bool:
        return self.now >= self.faults.until

    # ------------------------------------------------------------ the network

    def send(self, sender: str, key: bytes, message: Message) -> None:
        """Carry one frame between a coordinator and the node of `key`, or lose it.

        A newcomer sends its Enrol under an invite's key. A node hears the coordinator it is connected to.
        """
        down = sender in self.coordinators
        node = self.by_key.get(key) if down else self.nodes[sender]
        if node is None:
            return
        home = sender if down else node.home
        journeys = self.network.journeys(sender, node.name if down else home, message)
        if journeys:
            decoded = wire.decode(wire.encode(message), COORDINATOR if down else "node")
            for seconds in journeys:
                self.after(seconds, partial(self._deliver, node, home, key, decoded, down))

    def _deliver(self, node: SimNode, home: str, key: bytes, message: Message, down: bool) -> None:
        if node.home == home:
            receiver: Actor = node if down else self.coordinators[home]
            receiver.arrive(key, message)

    # ------------------------------------------------------------ what a case can do

    def crash(self, name: str, at: float, down: float = 1.0) -> None:
        """Kill a process; it is started again after `down` seconds."""
        actor = self.actor(name)

        def kill() -> None:
            actor.kill()
            self.start(actor, down)

        self.at(at, kill)

    def lose(self, name: str, at: float) -> None:
        """A process is killed and never comes back."""
        actor = self.actor(name)

        def kill() -> None:
            actor.kill()
            actor.stopped = ("killed for good", 0)

        self.gone.add(name)
        self.at(at, kill)

    def restart(self, at: float) -> None:
        """Somebody starts everything that is not up then."""
        for actor in self.actors:
            self.start(actor, at - self.now)

    def leave(self, name: str, at: float, back: float = LOST) -> None:
        """SIGTERM to a node; it is started again after `back` seconds."""
        sim = self.nodes[name]
        if back < LOST:
            self.at(at, lambda: self.start(sim, back))
        else:
            self.gone.add(name)
        self.at(at, sim.leave)

    def pause(self, name: str, at: float, seconds: float) -> None:
        """The owner of a node's machine pauses it for a while."""
        sim = self.nodes[name]
        self.at(at, partial(sim.say, ne.Pause, "asked to"))
        self.at(at + seconds, partial(sim.say, ne.Resume))

    def slow(self, name: str, factor: float, start: float, end: float) -> None:
        """A node computes slower for a while."""
        sim = self.nodes[name]
        self.at(start, lambda: setattr(sim, "pace", sim.pace * factor))
        self.at(end, lambda: setattr(sim, "pace", sim.pace / factor))

    def freeze(self, name: str, at: float, seconds: float) -> None:
        """A process is stopped (SIGSTOP) for a while; what is sent to it waits."""
        self.at(at, lambda: setattr(self.actor(name), "thaws", at + seconds))

    def jump(self, name: str, at: float, seconds: float) -> None:
        """The clock of a process jumps, forward or back."""

        def leap() -> None:
            self.actor(name).skew += seconds
            self.log(name, f"its clock jumps by {seconds:.1f} s")

        self.at(at, leap)

    def fill(self, name: str, start: float, end: float) -> None:
        """A process's disk has no room for a while."""
        self.at(start, lambda: setattr(self.actor(name), "full", True))
        self.at(end, lambda: setattr(self.actor(name), "full", False))

    def poison(self, member: int, *names: str) -> None:
        """These nodes (all by default) fail whenever they evaluate this member."""
        for name in names or self.nodes:
            self.nodes[name].poisoned.add(member)

    def crash_point(self, name: str, size: int) -> CrashPoint | None:
        """Whether a process dies inside this step, and how far it gets; it is started again later."""
        faults = self.faults
        if self.healed or not self._chance(
            faults.crash_coordinator if name in self.coordinators else faults.crash_node
        ):
            return None
        actor = self.actor(name)
        self.start(actor, self.random.expovariate(1 / faults.down))
        if isinstance(actor, SimNode):
            return CrashPoint(self.random.randint(0, size), torn=self._chance(faults.torn))
        return CrashPoint(0) if self.random.random() < 0.5 else CrashPoint(None, self.random.randint(0, 3))

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    # ------------------------------------------------------------ running

    def run(self, until: float | None = None) -> None:
        """Until the run has ended everywhere, or to a moment of virtual time."""
        deadline = self.faults.until + LIVENESS
        while self.events and not self.finished:
            if until is not None and self.events[0][0] > until:
                self.now = until
                return
            self.now, _, action = heapq.heappop(self.events)
            action()
            if self.faults.until and self.healed:
                self._revive()
            if self.now > deadline:
                raise Violation(f"the run does not end: {self.status()['reason']}")
        if until is None and not self.failing:
            self._check_end()

    def _revive(self) -> None:
        """After the faults what should run is started again: a node without END, a coordinator it needs."""
        if self.coming:
            return
        missing = [sim for sim in self.nodes.values() if sim.up or not self._satisfied(sim)]
        for sim in missing:
            if not sim.up:
                self.start(sim, 0.0)
        refused = self.coordinator.stopped and self.coordinator.stopped[1]
        if not self.coordinator.up and not (self.minded and refused) and (missing or not self.checkers.ended):
            self.start(self.coordinator, 0.0)

    def _wake(self) -> None:
        """Something happens when the world heals, even if nothing else does."""
        self.log("world", "heals")

    def _satisfied(self, sim: SimNode) -> bool:
        """Whether a node has nothing to wait for: it holds an END, with which none starts, or is gone."""
        if sim.name in self.gone and sim.stopped:
            return True
        if sim.stopped and sim.stopped[1]:
            return True
        return self.checkers.ended and self.checkers.over(sim.disk.raws)

    @property
    def finished(self) -> bool:
        """Every process has ended by itself and nothing brings it back."""
        if self.coming or any(actor.up or actor.stopped is None for actor in self.actors):
            return False
        if self.minded and not self.checkers.ended:
            return False
        return not self.faults.until or all(self._satisfied(sim) for sim in self.nodes.values())

    def _check_end(self) -> None:
        require(self.checkers.ended, "everything stopped before the run ended")
        for name, sim in self.nodes.items():
            require(self._satisfied(sim), f"{name} ends without the whole ledger")
            if self.checkers.at_head(sim.disk.raws):  # else it is gone for good and speaks to nobody
                self.checkers.orphans_named(name, [raw for _, raws in sim.disk.orphans for raw in raws])
            elif not (name in self.gone and sim.stopped) and self.checkers.over(sim.disk.raws):
                self.checkers.told_apart(name, sim.key, self.stops)
        for check in self.must:
            check()

    # ------------------------------------------------------------ looking

    def log(self, who: str, what: str, loud: bool = True) -> None:
        self.story.append((self.now, who, what, loud))

    def note(self, who: str, kind: str, fields: Mapping[str, Any]) -> None:
        self.notes.append((who, kind, fields))
        self.log(who, words.sentence(kind, fields), kind not in words.QUIET)

    @property
    def lines(self) -> list[str]:
        """The story so far."""
        return [f"{moment:8.3f} {who}: {what}" for moment, who, what, _ in self.story]

    def count(self, kind: str, **fields: Any) -> int:
        """How many notes of a kind carry these fields."""
        return sum(k == kind and fields.items() <= dict(f).items() for _, k, f in self.notes)

    def status(self) -> dict[str, Any]:
        """Of the coordinator in charge."""
        return machine.status(self.coordinator.state)


if __name__ == "__main__":
    from tests.sweep import main

    sys.exit(main())
