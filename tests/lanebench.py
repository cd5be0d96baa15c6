"""Lanes without processes: virtual time, masters that are lists of entries, faults chosen or drawn.

`Bench` stands for the shell and the node's core at once: it asks what a node would ask and holds every answer
against the contract of `esnode/events.py`. Called by `test_lanes.py`.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from esnode import events as ne
from esnode import lanes
from esnode import proofevents as pe
from esnode import snapshotevents as se
from esnode.laneevents import (
    Advance,
    Answer,
    Asked,
    Clock,
    Died,
    Effect,
    Fail,
    GoBack,
    Heard,
    Kill,
    Place,
    Refreshed,
    Reread,
    Said,
    Start,
    Tell,
    Tidings,
    Up,
    Wants,
)
from protocol.entries import Entry
from protocol.messages import Kind, Unit
from tests.bench import ledger
from tests.replica import Outcome


def digest_of(entries: tuple[Entry, ...], damage: int = 0) -> int:
    """D of a master that reflects these entries."""
    text = b"".join(entry.hash for entry in entries)
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little") ^ damage


def unit_of(number: int) -> Unit:
    return Unit(0, Kind.MEMBER, number, 0, 3)


@dataclass
class Memory:
    """A master. `damage`: bits that are wrong in it; `seen`: whoever reads will notice; `writing`: its leader
    does, so nobody may read it.
    """

    master: tuple[Entry, ...] = ()
    damage: int = 0
    seen: bool = False
    writing: bool = False
    writes: int = 0


@dataclass
class Engine:
    """What runs in a lane's process. `read`: how often its master had been written when it was reread."""

    pace: float = 1.0
    up: bool = False
    memory: Memory = field(default_factory=Memory)
    leads: bool = True
    read: int = 0
    reading: set[Unit] = field(default_factory=set)  # units that its master is read for
    life: int = 0  # counts processes
    running: set[Unit] = field(default_factory=set)
    always: int = 0  # damage of every replay: its arithmetic is wrong
    deadly: set[Unit] = field(default_factory=set)  # units it dies of
    stopped: bool = False  # SIGSTOP
    free: float = 0.0  # when it has done what it was told

    @property
    def master(self) -> tuple[Entry, ...]:
        return self.memory.master

    @property
    def damage(self) -> int:
        return self.memory.damage

    @damage.setter
    def damage(self, bits: int) -> None:
        self.memory.damage = bits

    def begin_to_read(self, unit: Unit) -> None:
        assert not self.memory.writing, "read while its leader writes"
        assert self.leads or self.read == self.memory.writes, "not reread since its leader wrote"
        self.reading.add(unit)


class Bench:
    """Lanes and the node they work for."""

    def __init__(self, *paces: float, seed: int = 0, commits: int = 20, shared: Sequence[int] = ()) -> None:
        """`shared`: lanes whose master belongs in host memory."""
        self.shared = frozenset(shared)
        self.random = random.Random(seed)
        self.now, self.order = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.engines = [Engine(pace) for pace in paces]
        self.chain = tuple(ledger(*range(1, commits)))
        self.applied = self.snapshot = 0
        self.busy: set[Unit] = set()
        self.moving: ne.Effect | None = None  # an Apply or Rewind that is not answered
        self.errand: ne.Effect | None = None
        self.outcomes: dict[Unit, ne.Event] = {}
        self.answers: list[ne.Event] = []
        self.words: list[str] = []
        self.failed = ""
        self.starts = 0
        self.refuses: set[int] = set()
        self.state, effects = lanes.new(tuple((f"cpu{k}",) for k in range(len(paces))), digest_of(()))
        self._perform(effects)

    # ------------------------------------------------------------ the node

    def ask(self, effect: ne.Effect, upto: int = 0) -> None:
        self._step(Asked(self.now, effect, upto))

    def evaluate(self, *numbers: int) -> None:
        for number in numbers:
            assert unit_of(number) not in self.busy and self.moving is None
            self.busy.add(unit_of(number))
            self.ask(ne.Evaluate(unit_of(number), 0.5))

    def apply(self, count: int = 1) -> None:
        assert not self.busy and self.moving is None
        entries = self.chain[self.applied : self.applied + count]
        self.moving = ne.Apply(entries)
        self.ask(self.moving, self.applied + len(entries))

    def rewind(self, far: bool) -> None:
        self.moving = ne.Rewind(() if far else self.chain[: self.applied])
        self.ask(self.moving)

    def _hear(self, event: ne.Event) -> None:
        self.answers.append(event)
        match event:
            case ne.Evaluated(_, unit) | ne.EvaluationFailed(_, unit) | ne.Cancelled(_, unit):
                assert unit in self.busy, "an answer nobody asked for"
                self.busy.remove(unit)
                self.outcomes[unit] = event
            case ne.EntriesApplied(_, digests):
                assert isinstance(self.moving, ne.Apply) and len(digests) == len(self.moving.entries)
                self.applied += len(digests)
                self.moving = None
                assert digests[-1] == self.truth, "the node was told another D than replay gives"
            case ne.Rewound(_, height, digest):
                assert isinstance(self.moving, ne.Rewind)
                self.applied, self.moving = height, None
                assert digest == self.truth
            case ne.LanesDiffer(_, _, far):
                self.moving = None
                for unit in sorted(self.busy, key=lambda unit: unit.member):
                    self.ask(ne.CancelUnit(unit))
                self._when_idle(lambda: self.rewind(far))
            case pe.Digested() | pe.Proved() | pe.Mended() | se.Saved():
                assert self.errand is not None
                self.errand = None
                if isinstance(event, se.Saved) and not event.reason:
                    self.snapshot = max(self.snapshot, event.round)

    def _when_idle(self, action: Callable[[], None]) -> None:
        if self.busy or self.moving:
            return self.after(0.1, lambda: self._when_idle(action))
        action()

    @property
    def truth(self) -> int:
        return digest_of(self.chain[: self.applied])

    # ------------------------------------------------------------ the shell

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), action))

    def run(self, seconds: float) -> None:
        """Let time pass, with a Clock twice a second."""
        end = self.now + seconds
        while self.now < end and not self.failed:
            beat = min(self.now + 0.5, end)
            while self.events and self.events[0][0] <= beat:
                self.now, _, action = heapq.heappop(self.events)
                action()
            self.now = beat
            for number, engine in enumerate(self.engines):
                if engine.up and not engine.stopped:
                    self._step(Heard(self.now, number))
            self._step(Clock(self.now))

    def _step(self, event: Any) -> None:
        self.state, effects = lanes.step(self.state, event)
        self._perform(effects)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Start(number):
                    self._start(number)
                case Kill(number):
                    self.kill(number, "it was ended")
                case Tell(number, what):
                    self._tell(number, what)
                case Place(number, leader):
                    self._place(number, leader)
                case Reread(number):
                    self._reread(number)
                case GoBack(number, upto):
                    self._tell(number, ne.Rewind(self.chain[:upto]))
                case Advance(number, since, upto):
                    self._tell(number, ne.Apply(self.chain[since:upto]))
                case Answer(event):
                    self._hear(event)
                case Tidings(words):
                    self.words.append(words)
                case Fail(sentence):
                    self.failed = sentence

    def _start(self, number: int) -> None:
        engine = self.engines[number]
        assert not engine.up, "started twice"
        self.starts += 1
        engine.up, engine.life, engine.memory, engine.leads = True, engine.life + 1, Memory(), True
        engine.running, engine.reading, engine.free, engine.stopped = set(), set(), self.now, False
        if number in self.refuses:
            return self.after(0.5, lambda: self.kill(number, "out of memory: buy more", refused=True))
        if number in self.shared:
            return self._later(0.3, number, lambda: self._step(Wants(self.now, number)))
        self._later(1.0, number, lambda: self._step(Up(self.now, number)))

    def _later(self, seconds: float, number: int, action: Callable[[], None]) -> None:
        """Unless this process has ended by then, or is stopped."""
        engine, life = self.engines[number], self.engines[number].life

        def due() -> None:
            if engine.up and engine.life == life and not engine.stopped:
                action()

        self.after(seconds, due)

    def _place(self, number: int, leader: int) -> None:
        """A lane that loads is told whose master it reads."""
        engine = self.engines[number]
        if not engine.up:
            return
        if leader >= 0:
            assert self.engines[leader].leads and self.engines[leader].up
            engine.memory, engine.leads, engine.read = self.engines[leader].memory, False, -1
        self._later(0.7, number, lambda: self._step(Up(self.now, number)))

    def _reread(self, number: int) -> None:
        engine = self.engines[number]
        if not engine.up:
            return
        engine.free = max(engine.free, self.now) + 0.1

        def done() -> None:
            assert not engine.memory.writing, "reread while its leader writes"
            engine.read = engine.memory.writes
            self._step(Refreshed(self.now, number, digest_of(engine.master)))  # that of the header

        self._later(engine.free - self.now, number, done)

    def kill(self, number: int, why: str = "killed by signal 9", refused: bool = False) -> None:
        """kill -9 of an engine."""
        engine = self.engines[number]
        if engine.up:
            engine.up = False
            self._step(Died(self.now, number, why, self.random.random(), refused))

    def flip(self, number: int, seen: bool) -> None:
        """A bit of one master turns over."""
        self.engines[number].damage ^= 1 << self.random.randrange(40)
        self.engines[number].memory.seen = seen

    def _tell(self, number: int, what: ne.Effect) -> None:
        """One lane does one thing after another, but proofs, and hears a cancel at once."""
        engine = self.engines[number]
        if not engine.up:
            return
        life = engine.life
        if isinstance(what, ne.CancelUnit):
            engine.running.discard(what.unit)
            return
        if isinstance(what, ne.Evaluate):
            engine.running.add(what.unit)
        seconds = engine.pace if isinstance(what, ne.Evaluate) else 0.2
        begin = max(engine.free, self.now)
        engine.free = begin + seconds
        if isinstance(what, ne.Apply | ne.Rewind | pe.Mend):
            assert engine.leads, "a reader was told to write"
            self._later(begin - self.now, number, lambda: self._begin_to_write(engine))
        elif isinstance(what, ne.Evaluate):
            unit = what.unit
            self._later(begin - self.now, number, lambda: engine.begin_to_read(unit))

        def done() -> None:
            if not engine.up or engine.life != life or engine.stopped:
                return
            if isinstance(what, ne.Evaluate) and what.unit in engine.deadly:
                return self.kill(number, "segmentation fault")
            self._step(Said(self.now, number, self._answer(engine, what)))

        self.after(engine.free - self.now, done)

    def _begin_to_write(self, engine: Engine) -> None:
        for other in self.engines:
            reads = other is not engine and other.up and other.memory is engine.memory
            assert not (reads and other.reading), "written while another lane evaluates"
        engine.memory.writing = True

    def _answer(self, engine: Engine, what: ne.Effect) -> ne.Event:
        if isinstance(what, ne.Apply | ne.Rewind | pe.Mend):
            engine.memory.writing = False
            engine.memory.writes += 1
        elif isinstance(what, ne.Evaluate):
            engine.reading.discard(what.unit)
        if engine.damage and engine.memory.seen and isinstance(what, ne.Evaluate | ne.Apply):
            return pe.Damaged(0.0, what.unit if isinstance(what, ne.Evaluate) else None, ("w",))
        match what:
            case ne.Evaluate(unit):
                if unit not in engine.running:
                    return ne.Cancelled(0.0, unit)
                assert digest_of(engine.master, engine.damage) == self.truth, "measured on a wrong master"
                return ne.Evaluated(0.0, unit, Outcome((1.0,), 1))
            case ne.Apply(entries):
                digests = []
                for entry in entries:
                    engine.memory.master = (*engine.master, entry)
                    digests.append(digest_of(engine.master, engine.damage))
                return ne.EntriesApplied(0.0, tuple(digests), 200)
            case ne.Rewind(entries):
                height = min(self.snapshot, len(entries))
                engine.memory.master, engine.damage = self.chain[:height], engine.always
                return ne.Rewound(0.0, height, digest_of(engine.master, engine.damage), 200)
            case se.Save(round, entry, _):
                return se.Saved(0.0, len(engine.master), entry, b"r", round, "", 9)
            case pe.TakeDigests():
                damaged = ("w",) if engine.damage and engine.memory.seen else ()
                return pe.Digested(0.0, (digest_of(engine.master, engine.damage),), damaged)
            case pe.Prove(entries, pieces, _):
                held = (digest_of(engine.master, engine.damage),)
                return pe.Proved(0.0, pieces, held, (digest_of(entries),))
            case pe.Mend():
                engine.damage = 0
                return pe.Mended(0.0, digest_of(engine.master))
        raise AssertionError(what)


def ready(*paces: float, **options: Any) -> Bench:
    """Lanes that have loaded, all at the base."""
    bench = Bench(*paces, **options)
    bench.run(2.0)
    assert all(lane.phase == "ready" for lane in bench.state.lanes)
    return bench


__all__ = ["Bench", "ready", "replace", "unit_of"]
