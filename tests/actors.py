"""The simulator's processes: what any of them goes through, and the coordinator (`coordinator/server.py`).

They keep the shells' contract of order (compute, persist and flush, adopt, perform) on virtual time and
lists, and can be killed anywhere in it. What a kill spares is what is on "disk". The node is in `simnode.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import coordinator.events as ce
from coordinator import machine
from protocol.messages import Message
from tests.checkers import require

if TYPE_CHECKING:
    from tests.world import World

TICK = 0.25
RETRY = 2.0  # seconds until something outside starts a process again that ended for want of room
COORDINATOR = "coordinator"


class Actor:
    """A process that can be started, killed and started again."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.up = False
        self.life = 0  # counts starts: what an earlier life scheduled never reaches a later one
        self.stopped: tuple[str, int] | None = None  # (reason, code) of a process that ended by itself
        self.skew = world.random.uniform(0, 1e5)  # of its machine's clock
        self.thaws = 0.0  # when a stopped process (SIGSTOP, a sleeping laptop) goes on
        self.full = False  # whether its disk has room

    @property
    def clock(self) -> float:
        """The monotonic clock of its machine."""
        return self.world.now + self.skew

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Do something after `delay`, if this life lasts."""
        life = self.life

        def run() -> None:
            if not self.up or self.life != life:
                return
            if self.world.now < self.thaws:
                return self.world.at(self.thaws, run)
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
        legal = code == 0 or self.world.excused(self.name, reason)
        require(legal, f"{self.name} stops with code {code}: {reason}")
        self.up, self.stopped = False, (reason, code)
        self.world.stops.append((self.name, reason))
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
            self.later(0.0, lambda: self.receive(peer, message))

    def out_of_room(self) -> bool:
        """Whether a write fails; the process ends then, as the shells do, and is started again and again."""
        if self.full:
            self.up = False
            self.world.log(self.name, "ends: the disk is full")
            self.world.start(self, RETRY)
        return self.full


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """Where in the contract of order a process dies: records flushed (None: all), then messages sent.

    For a node `records` counts its effects; `torn`: its ledger file has lost or damaged its end.
    """

    records: int | None
    sends: int = 0
    torn: bool = False


class SimCoordinator(Actor):
    """`coordinator/server.py` on a list instead of SQLite."""

    def __init__(self, world: World, name: str = COORDINATOR, key: bytes | None = None) -> None:
        """`key`: the Ed25519 seed that signs its entries, the run's first by default."""
        super().__init__(world, name)
        self.key = key or world.signing_key
        self.journal: list[ce.Record] = []
        self.recover = ""  # a successor waits, or is forced
        self.inbox: list[ce.Event] = []
        self.state = self._empty()
        self.crash_when: Callable[[Sequence[ce.Record]], CrashPoint | None] = lambda records: None

    def _empty(self) -> machine.State:
        world = self.world
        return machine.new(world.lock, world.ops, self.key, world.allowed)

    def recall(self) -> machine.State:
        state = self._empty()
        for record in self.journal:
            state = machine.recall(state, record)
        return state

    def begin(self) -> None:
        self.inbox = []
        self.world.checkers.starts(self.name, self.journal)
        self.state = self.recall()
        nonce = self.world.random.randbytes(8)
        term = machine.next_term(self.state)
        secret = self.world.random.randbytes(32)
        self._process([ce.Started(self.clock, term, nonce, self.wall, secret, self.recover)])

    def kill(self) -> None:
        if self.up:
            self.world.checkers.recalled(self.state, self.recall())
        super().kill()

    def terminate(self) -> None:
        """SIGTERM."""
        if self.up:
            self._process([ce.StopRequested(self.clock, "asked to")])

    def tick(self) -> None:
        self._process([*self._drain(), ce.Tick(self.clock, self.wall)])

    @property
    def wall(self) -> float:
        """Unix seconds."""
        return self.world.wall_at(self.world.now)

    def order(self, event: ce.Event) -> None:
        """The operator's word."""
        self._process([*self._drain(), event])

    def receive(self, peer: bytes, message: Message) -> None:
        """Frames gather until the next turn of the loop: one flush for all of them."""
        if not self.inbox:
            self.later(self.world.random.uniform(0, 0.01), lambda: self._process(self._drain()))
        self.inbox.append(ce.Received(self.clock, peer, message))

    def _drain(self) -> list[ce.Event]:
        taken, self.inbox = self.inbox, []
        return taken

    def _process(self, events: Sequence[ce.Event]) -> None:
        before = self.world.checkers.picture(self.state)
        state, caused = machine.fold(self.state, events)
        self.world.checkers.folded(before, self.state, events, state, caused)
        effects = [effect for per_event in caused for effect in per_event]
        records = [effect.record for effect in effects if isinstance(effect, ce.Persist)]
        if records and self.out_of_room():
            return
        crash = self.crash_when(records) or self.world.crash_point(self.name, len(records))
        flushed = records[: crash.records] if crash else records
        self.journal += flushed
        self.world.checkers.caused(self.name, self.state, state, effects, len(flushed))
        if crash and crash.records is not None:
            self.world.log(
                self.name, f"crashes in a flush, {len(flushed)} of {len(records)} records are safe"
            )
            return Actor.kill(self)
        self.state = state
        self.world.checkers.coordinator(self.name, state)
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
