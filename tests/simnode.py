"""The simulated node: what `esnode/daemon.py` does, on virtual time, with a vector for a model.

`Disk` is what a kill spares. Called by `world.py`; the order of effects is that of `esnode/events.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import esnode.events as ne
import esnode.proofevents as pe
from esnode import node
from esnode.snapshotevents import FetchEntries, FetchSnapshot, Save, StopFetch
from protocol.entries import Entry, EntryKind
from protocol.messages import RUN_ENDED, Bye, Enrol, Enrolled, Kind, Message, Refuse, Unit
from tests.actors import COORDINATOR, Actor
from tests.checkers import require
from tests.larder import Larder, entries_held, started
from tests.replica import NAME, Outcome, Replica, measure

if TYPE_CHECKING:
    from tests.world import World

ENROL_AGAIN = 1.0  # seconds without an answer


@dataclass
class Disk:
    """What a node keeps."""

    raws: list[bytes] = field(default_factory=list)
    term: int = 0
    enrolled: bool = False  # whether the invite's answer came
    proof: bytes = b""
    orphans: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)  # (first height, entries)


class SimNode(Actor):
    """A node process. `pace`: virtual seconds per prompt."""

    def __init__(self, world: World, name: str, key: bytes, pace: float) -> None:
        super().__init__(world, name)
        self.key = key
        self.home = COORDINATOR  # whom it connects to
        self.pace = pace
        self.disk = Disk()
        self.poisoned: set[int] = set()  # members this node cannot evaluate
        self.invite: bytes | None = None  # the one-time key of a machine that joins by one
        self.lie: Callable[[Outcome], Outcome] = lambda outcome: outcome
        self.hung = 0.0  # seconds the next evaluation hangs
        self.replica = Replica(world.lock)
        self.larder = Larder(self)
        self.derived = self.replica  # what replay gave last
        self.wrong = False  # the next update is
        self.insists = False  # and it comes out the same in every replay
        self.errs: bytes | None = None  # the hash of the entry at which it does
        self.mute: tuple[type[Message], ...] = ()  # what it never says
        self.ears: list[Callable[[Message], None]] = []  # who listens to all it says
        self.evaluations = 0
        self.lanes = 1
        self.frees = False  # whether a lane is free while its unit is being scored
        self.job = 0
        self.jobs: dict[Unit, int] = {}  # what is being evaluated
        self.using: set[Unit] = set()  # those that need the weights still
        self.state = node.new(world.lock, self._about())

    def _about(self) -> ne.About:
        dial = (f"tcp://{self.name}:1",) if self.world.dialled else ()
        return ne.About(
            self.name, "reference", "simulated", b"selftest", b"engine-1", addresses=dial, lanes=self.lanes
        )

    def begin(self) -> None:
        held = entries_held(self)
        if held and held[-1].kind is EntryKind.END:  # `notebook.refuse_if_over`
            self.stop(f"{RUN_ENDED} after {held[-1].round} rounds", 0)
        elif self._newcomer:
            self._enrol()
        else:
            self._work()

    def _enrol(self) -> None:
        """What `esnode join` does first, until there is an answer."""
        if self.invite is not None and self._newcomer:
            self.world.send(self.name, self.invite, Enrol(self.key, self.name))
            self.later(ENROL_AGAIN, self._enrol)

    def _on_enrolled(self, message: Message) -> None:
        if isinstance(message, Refuse | Bye):
            self.stop(message.reason, 1)
        elif isinstance(message, Enrolled) and not self.out_of_room():
            self.world.checkers.enrolled(self.key)
            self.disk.enrolled = True
            self._work()

    @property
    def _newcomer(self) -> bool:
        return self.invite is not None and not self.disk.enrolled

    def _work(self) -> None:
        self.replica = self._fresh()
        self.state = node.new(self.world.lock, self._about())
        self.jobs, self.using = {}, set()
        self.step(started(self))

    def tick(self) -> None:
        if not self._newcomer:
            self.step(ne.Tick(self.clock))

    def receive(self, peer: bytes, message: Message) -> None:
        if self._newcomer:
            return self._on_enrolled(message)
        self.step(ne.Received(self.clock, message))

    # ------------------------------------------------------------ what can happen to it

    def leave(self) -> None:
        """SIGTERM."""
        if self._newcomer and self.up:
            self.stop("asked to", 0)
        elif self.up:
            self.step(ne.Leave(self.clock, "asked to"))

    def say(self, make: type[ne.Pause | ne.Resume], *fields: str) -> None:
        """The owner's word, if the node is up."""
        if self.up and not self._newcomer:
            self.step(make(self.clock, *fields))

    def hang(self, seconds: float) -> None:
        """The next evaluation takes this much longer and tells no progress meanwhile."""
        self.hung = seconds

    def flip(self, index: int = 5, bit: int = 3) -> None:
        """One bit of one weight of the master turns over in memory."""
        self.world.checkers.flipped = True
        self.replica.flip(index, bit, seen=True)

    def miscompute(self) -> None:
        """The next update, live or replayed, has one wrong bit, unnoticed here; who `insists` repeats it."""
        self.wrong = True
        self.world.checkers.faulty.add(self.name)

    def tear(self, keep: int, damage: bool) -> None:
        """The ledger file keeps so many entries; with `damage` the next one is there with a wrong byte."""
        raws = self.disk.raws
        if keep >= len(raws):
            return
        torn = [raws[keep][:-1] + bytes([raws[keep][-1] ^ 1])] if damage else []
        self.world.log(self.name, f"its ledger file is cut from {len(raws)} to {keep} entries")
        self.world.checkers.torn(self.name, raws[keep:])
        raws[keep:] = torn

    # ------------------------------------------------------------ effects

    def step(self, event: ne.Event) -> None:
        self.state, effects = node.step(self.state, event)
        self.world.checkers.node(self.name, self.state)
        crash = self.world.crash_point(self.name, len(effects)) if effects else None
        for effect in effects[: crash.records] if crash else effects:
            self._perform(effect)
            if not self.up:
                return
        if crash:
            self.kill()
            if crash.torn and self.world.random.random() < 0.3:
                self.larder.tear()
            elif crash.torn:
                self.tear(self.world.random.randint(0, len(self.disk.raws)), self.world.random.random() < 0.5)

    def _perform(self, effect: ne.Effect) -> None:
        world = self.world
        match effect:
            case ne.Send(message) if not isinstance(message, self.mute):
                for ear in self.ears:
                    ear(message)
                world.checkers.sent(message, None)
                world.send(self.name, self.key, message)
            case ne.Evaluate(unit, sigma):
                self._evaluate(unit, sigma)
            case ne.CancelUnit(unit):
                self.later(0.05, partial(self._cancel, unit, self.jobs.get(unit, 0)))
            case ne.Apply(entries):
                self._apply(entries)
            case ne.Rewind(entries):
                self._rewind(entries)
            case Save():
                self.larder.save(effect)
            case FetchSnapshot():
                self.larder.fetch(effect)
            case FetchEntries():
                self.larder.ask(effect)
            case StopFetch():
                self.larder.stop()
            case pe.Heal(entries):
                self._still()
                self.derived = self._fresh()
                self._compute(self.derived, entries)
                self.later(0.1, self._overwrite)
            case pe.Mend():
                self._still()
                self.later(0.01, self._overwrite)
            case pe.TakeDigests():
                read, damaged = (self.replica.digest,), (NAME,) if self.replica.damaged else ()
                self.later(0.01, lambda: self.step(pe.Digested(self.clock, read, damaged)))
            case pe.Prove():
                self._prove(effect)
            case ne.Store(first, raws):
                self._store(first, raws)
            case ne.Orphan(first, raws):
                held = tuple(self.disk.raws[first : first + len(raws)])  # a damaged one may lie behind these
                require(held == raws, f"{self.name} orphans what it does not hold")
                if not self.out_of_room():
                    self.disk.orphans.append((first, raws))
                    del self.disk.raws[first:]
            case ne.StoreTerm(term, proof):
                require(term > self.disk.term, "a term goes back")
                if not self.out_of_room():
                    self.disk.term, self.disk.proof = term, proof
                    world.checkers.histories.promises(self.key, proof)
            case ne.Note(kind, fields):
                world.note(self.name, kind, fields)
            case ne.Stop(reason, code):
                self.stop(reason, code)

    def _store(self, first: int, raws: tuple[bytes, ...]) -> None:
        require(first <= len(self.disk.raws), f"{self.name} stores entry {first} behind a gap")
        if not self.out_of_room():
            self.world.checkers.stored(self.name, self.disk.raws[:first], raws)
            self.disk.raws[first:] = raws

    # ------------------------------------------------------------ the engine

    def _compute(self, replica: Replica, entries: tuple[Entry, ...]) -> tuple[int, ...]:
        """Updates, of which the last comes out wrong when one is to."""
        if self.wrong and entries:
            self.wrong = False
            self.errs = entries[-1].hash if self.insists else None
            replica.errs = entries[-1].hash
        return replica.apply(entries)

    def _fresh(self) -> Replica:
        """A master at the start of the run. No two machines err in the same weight."""
        return Replica(self.world.lock, self.errs, list(self.world.nodes).index(self.name))

    def _still(self) -> None:
        require(not self.using, f"{self.name} moves weights under a running unit")

    def _apply(self, entries: tuple[Entry, ...]) -> None:
        self._still()
        if self.replica.damaged:
            return self.later(0.01, lambda: self.step(pe.Damaged(self.clock, None, (NAME,))))
        digests = self._compute(self.replica, entries)
        for entry, digest in zip(entries, digests, strict=True):
            self.world.checkers.replica(entry, digest, self.name)
        ms = int(self.world.apply_ms * len(entries))
        self.later(ms / 1000, lambda: self.step(ne.EntriesApplied(self.clock, digests, ms)))

    def _rewind(self, entries: tuple[Entry, ...]) -> None:
        self._still()
        loaded = self.larder.load(entries)
        height, self.replica = 0, self._fresh()
        if loaded is not None:
            height, file = loaded
            self.replica.write(file.master)
        digest = self.replica.digest
        self.later(0.05, lambda: self.step(ne.Rewound(self.clock, height, digest, 50)))

    def _prove(self, effect: pe.Prove) -> None:
        """The master is one piece."""
        held, entries, since = (self.replica.digest,), effect.entries, 0
        self.derived = self._fresh()
        found = None if effect.base else self.larder.load(entries, stated=True)
        if found is not None:
            height, file = found
            self.derived.write(file.master)
            entries, since = entries[height:], file.round
        self._compute(self.derived, entries)
        derived = (self.derived.digest,)
        self.later(0.3, lambda: self.step(pe.Proved(self.clock, effect.pieces, held, derived, since)))

    def _overwrite(self) -> None:
        self.replica = self.derived
        self.step(pe.Mended(self.clock, self.replica.digest))

    def _evaluate(self, unit: Unit, sigma: float) -> None:
        require(unit not in self.jobs, f"{self.name} evaluates a unit twice at once")
        require(len(self.using) < self.lanes, f"{self.name} evaluates more units than it has lanes")
        self.job += 1
        lock, job = self.world.lock, self.job
        self.jobs[unit] = job
        self.using.add(unit)
        if self.replica.damaged:
            return self.later(0.01, partial(self._damaged, unit, job))
        master = self.replica.master
        self.evaluations += 1
        prompts = sum(lock.chunk_size(unit.kind, k) for k in range(unit.first, unit.last + 1))
        seconds = self.pace * prompts * self.world.random.uniform(0.8, 1.2) + self.hung
        self.hung = 0.0

        def halfway() -> None:
            if self.jobs.get(unit) == job:
                self.step(ne.Progress(self.clock, unit, 500))

        def generated() -> None:
            if self.jobs.get(unit) == job:
                self.using.discard(unit)
                self.step(ne.Generated(self.clock, unit))

        def done() -> None:
            if not self._ends(unit, job):
                return
            if unit.kind == Kind.MEMBER and unit.member in self.poisoned:
                return self.step(ne.EvaluationFailed(self.clock, unit, "out of memory"))
            outcome = self.lie(measure(lock, master, unit, sigma))
            self.step(ne.Evaluated(self.clock, unit, outcome))

        self.later(seconds / 2, halfway)
        if self.frees:
            self.later(seconds * 0.8, generated)
        self.later(seconds, done)

    def _ends(self, unit: Unit, job: int) -> bool:
        """Whether this evaluation is still the one that runs; from now on it is not."""
        if self.jobs.get(unit) != job:
            return False
        del self.jobs[unit]
        self.using.discard(unit)
        return True

    def offer(self, lanes: int) -> None:
        """A lane is lost, or is back."""
        self.lanes = lanes
        if self.up and not self._newcomer:
            self.step(ne.LanesChanged(self.clock, lanes))

    def _damaged(self, unit: Unit, job: int) -> None:
        if self._ends(unit, job):
            self.step(pe.Damaged(self.clock, unit, (NAME,)))

    def _cancel(self, unit: Unit, job: int) -> None:
        if self._ends(unit, job):
            self.step(ne.Cancelled(self.clock, unit))
