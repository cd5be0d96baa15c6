"""The simulator's two shells: what `coordinator/server.py` and `esnode/daemon.py` do, on virtual time and
lists.

They keep the same contract of order (compute, persist and flush, adopt, perform) and can be killed anywhere
in it. What a kill spares is what is on "disk": the journal, a node's ledger and its highest term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import coordinator.events as ce
import esnode.events as ne
from coordinator import machine
from esnode import node
from protocol.entries import EntryKind, parse
from protocol.messages import Kind, Message, Unit
from tests.checkers import require
from tests.replica import Replica, measure

if TYPE_CHECKING:
    from tests.world import World

TICK = 0.25
COORDINATOR = "coordinator"


class Actor:
    """A process that can be started, killed and started again."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.up = False
        self.life = 0  # counts starts: what an earlier life scheduled never reaches a later one
        self.stopped: tuple[str, int] | None = None  # (reason, code) of a process that ended by itself

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Do something after `delay`, if this life lasts."""
        life = self.life

        def run() -> None:
            if self.up and self.life == life:
                action()

        self.world.after(delay, run)

    def start(self) -> None:
        if not self.up:
            self.up, self.stopped = True, None
            self.life += 1
            self.world.log(self.name, "starts")
            self.begin()
            self.later(self.world.random.uniform(0, TICK), self._tick)

    def kill(self) -> None:
        """kill -9: nothing but the disk remains."""
        if self.up:
            self.up = False
            self.world.log(self.name, "is killed")

    def stop(self, reason: str, code: int) -> None:
        require(code == 0 or self.world.failing, f"{self.name} stops with code {code}: {reason}")
        self.up, self.stopped = False, (reason, code)
        self.world.log(self.name, f"stops with code {code}: {reason}")

    def _tick(self) -> None:
        self.tick()
        self.later(TICK, self._tick)

    def begin(self) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def receive(self, peer: bytes, message: Message) -> None:
        raise NotImplementedError

    def arrive(self, peer: bytes, message: Message) -> None:
        """A message from or for the node of this key; nobody hears it while the process is down."""
        if self.up:
            self.receive(peer, message)


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """Where in the contract of order a process dies: records flushed (None: all), then messages sent."""

    records: int | None
    sends: int = 0


class SimCoordinator(Actor):
    """`coordinator/server.py` on a list instead of SQLite."""

    def __init__(self, world: World) -> None:
        super().__init__(world, COORDINATOR)
        self.journal: list[ce.Record] = []
        self.inbox: list[ce.Event] = []
        self.state = self._empty()
        self.crash_when: Callable[[Sequence[ce.Record]], CrashPoint | None] = lambda records: None

    def _empty(self) -> machine.State:
        allowed = {sim.key: sim.name for sim in self.world.nodes.values()}
        return machine.new(self.world.lock, self.world.ops, self.world.signing_key, allowed)

    def recall(self) -> machine.State:
        state = self._empty()
        for record in self.journal:
            state = machine.recall(state, record)
        return state

    def begin(self) -> None:
        self.inbox = []
        self.state = self.recall()
        self._process([ce.Started(self.world.now, self.state.term + 1, self.world.random.randbytes(8))])

    def kill(self) -> None:
        if self.up:
            self.world.checkers.recalled(self.state, self.recall())
        super().kill()

    def terminate(self) -> None:
        """SIGTERM."""
        if self.up:
            self._process([ce.StopRequested(self.world.now, "asked to")])

    def tick(self) -> None:
        self._process([*self._drain(), ce.Tick(self.world.now)])

    def receive(self, peer: bytes, message: Message) -> None:
        """Frames gather until the next turn of the loop: one flush for all of them."""
        if not self.inbox:
            self.later(self.world.random.uniform(0, 0.01), lambda: self._process(self._drain()))
        self.inbox.append(ce.Received(self.world.now, peer, message))

    def _drain(self) -> list[ce.Event]:
        taken, self.inbox = self.inbox, []
        return taken

    def _process(self, events: Sequence[ce.Event]) -> None:
        state, effects = self.state, list[ce.Effect]()
        for event in events:
            state, caused = machine.step(state, event)
            effects += caused
        records = [effect.record for effect in effects if isinstance(effect, ce.Persist)]
        crash = self.crash_when(records) or self.world.crash_point(self.name, len(records))
        flushed = records[: crash.records] if crash else records
        self.journal += flushed
        for record in flushed:
            if isinstance(record, ce.EntryAppended):
                self.world.checkers.durable(record.height, record.raw)
        if crash and crash.records is not None:
            self.world.log(
                self.name, f"crashes in a flush, {len(flushed)} of {len(records)} records are safe"
            )
            return Actor.kill(self)
        self.state = state
        self.world.checkers.coordinator(state)
        self._perform(effects, crash.sends if crash else None)

    def _perform(self, effects: Sequence[ce.Effect], sends: int | None) -> None:
        for effect in effects:
            if isinstance(effect, ce.Send):
                if sends == 0:
                    break
                sends = None if sends is None else sends - 1
                self.world.checkers.sent(effect.message, self.state)
                self.world.send(self.name, effect.peer, effect.message)
            elif isinstance(effect, ce.Note):
                self.world.note(self.name, effect.kind, effect.fields)
            elif isinstance(effect, ce.Stop):
                return self.stop(effect.reason, effect.code)
        if sends is not None:
            self.world.log(self.name, "crashes after a flush, some messages never leave")
            self.kill()


@dataclass
class Disk:
    """What a node keeps."""

    raws: list[bytes] = field(default_factory=list)
    term: int = 0


class SimNode(Actor):
    """`esnode/daemon.py` around a vector. `pace`: virtual seconds per prompt."""

    def __init__(self, world: World, name: str, key: bytes, pace: float) -> None:
        super().__init__(world, name)
        self.key = key
        self.pace = pace
        self.disk = Disk()
        self.poisoned: set[int] = set()  # members this node cannot evaluate
        self.hung = 0.0  # seconds the next evaluation hangs
        self.replica = Replica(world.lock)
        self.evaluations = 0
        self.job = 0
        self.state = node.new(world.lock, self._about())

    def _about(self) -> ne.About:
        return ne.About(self.name, "reference", "simulated", b"selftest", b"engine-1")

    def begin(self) -> None:
        self.replica = Replica(self.world.lock)
        self.state = node.new(self.world.lock, self._about())
        self.job += 1
        digest = self.replica.digest
        self.step(ne.Started(self.world.now, self.disk.term, tuple(self.disk.raws), 0, digest))

    def tick(self) -> None:
        self.step(ne.Tick(self.world.now))

    def receive(self, peer: bytes, message: Message) -> None:
        self.step(ne.Received(self.world.now, message))

    def leave(self) -> None:
        """SIGTERM."""
        if self.up:
            self.step(ne.Leave(self.world.now, "asked to"))

    def hang(self, seconds: float) -> None:
        """The next evaluation takes this much longer and tells no progress meanwhile."""
        self.hung = seconds

    def flip(self, index: int = 5, bit: int = 3) -> None:
        """One bit of one weight of the master turns over."""
        self.replica.master.view("uint32")[index] ^= 1 << bit

    def step(self, event: ne.Event) -> None:
        self.state, effects = node.step(self.state, event)
        crash = self.world.crash_point(self.name, len(effects)) if effects else None
        for k, effect in enumerate(effects):
            if crash and k >= (crash.records or 0):
                return self.kill()
            self._perform(effect)

    def _perform(self, effect: ne.Effect) -> None:
        world = self.world
        match effect:
            case ne.Send(message):
                world.checkers.sent(message, None)
                world.send(self.name, self.key, message)
            case ne.Evaluate(unit):
                self._evaluate(unit)
            case ne.CancelUnit(unit):
                self.later(0.05, partial(self._cancel, unit, self.job))
            case ne.Apply(entries):
                digests = self.replica.apply(entries)
                for entry, digest in zip(entries, digests, strict=True):
                    world.checkers.replica(entry.round + (entry.kind is EntryKind.COMMIT), digest, self.name)
                ms = 20 * len(entries)
                self.later(ms / 1000, lambda: self.step(ne.EntriesApplied(world.now, digests, ms)))
            case ne.Rewind():
                self.replica = Replica(world.lock)
                digest = self.replica.digest
                self.later(0.05, lambda: self.step(ne.Rewound(world.now, 0, digest, 50)))
            case ne.Store(first, raws):
                require(first <= len(self.disk.raws), f"{self.name} stores entry {first} behind a gap")
                for height, raw in enumerate(raws, first):
                    require(world.checkers.chain[height].raw == parse(raw).raw, "a node stores another chain")
                self.disk.raws[first:] = raws
            case ne.StoreTerm(term):
                require(term > self.disk.term, "a term goes back")
                self.disk.term = term
            case ne.Note(kind, fields):
                world.note(self.name, kind, fields)
            case ne.Stop(reason, code):
                self.stop(reason, code)

    def _evaluate(self, unit: Unit) -> None:
        self.job += 1
        self.evaluations += 1
        lock, job = self.world.lock, self.job
        prompts = sum(lock.chunk_size(unit.kind, k) for k in range(unit.first, unit.last + 1))
        seconds = self.pace * prompts * self.world.random.uniform(0.8, 1.2) + self.hung
        self.hung = 0.0

        def halfway() -> None:
            if job == self.job:
                self.step(ne.Progress(self.world.now, unit, 500))

        def done() -> None:
            if job != self.job:
                return
            self.job += 1
            if unit.kind == Kind.MEMBER and unit.member in self.poisoned:
                return self.step(ne.EvaluationFailed(self.world.now, unit, "out of memory"))
            outcome = measure(lock, self.replica.master, unit)
            self.step(ne.Evaluated(self.world.now, unit, outcome))

        self.later(seconds / 2, halfway)
        self.later(seconds, done)

    def _cancel(self, unit: Unit, job: int) -> None:
        if job == self.job:
            self.job += 1
            self.step(ne.Cancelled(self.world.now, unit))
