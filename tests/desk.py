"""A bare coordinator on a desk: feed it events, look at the effects. No sockets, no clock, no network.

desk = Desk(members=4)
desk.join("a")
unit = desk.assigned("a")[0]
desk.result("a", unit)
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import coordinator.events as ce
from coordinator import machine
from protocol import seeds
from protocol.entries import Body, Entry, EntryKind, parse, public_key, seal
from protocol.lock import Lock
from protocol.messages import Applied, Assign, Hello, Kind, Message, NodeBeat, Result, Unit
from protocol.plan import Ops
from tests.replica import make_lock

SIGNING_KEY = bytes(range(32))
NONCE = b"12345678"
M = TypeVar("M", bound=Message)


def key_of(name: str) -> bytes:
    """The CURVE key of a node."""
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


def desk_lock(**options: Any) -> Lock:
    return make_lock(public_key(SIGNING_KEY), **options)


def hello(lock: Lock, **changes: Any) -> Hello:
    """A newcomer's Hello: the base model, an empty ledger."""
    fields: dict[str, Any] = {
        "wire_min": 1,
        "wire_max": 1,
        "law": 1,
        "run": lock.run_id,
        "name": "x",
        "backend": "reference",
        "device": "cpu",
        "selftest": b"selftest",
        "fingerprints": (b"engine-1",),
        "height": 0,
        "tip": b"",
        "digest": lock.digest,
        "term": 0,
        "units": (),
        "proof": b"",
        "lanes": 1,
    }
    return Hello(**{**fields, **changes})


class Desk:
    """A coordinator's state, its journal and the effects of the last step."""

    def __init__(
        self, *, ops: dict[str, Any] | None = None, names: str = "abcdef", secret: bytes = b"", **lock: Any
    ) -> None:
        """`secret` chooses what is audited; without one nothing is."""
        self.lock = desk_lock(**lock)
        self.ops = Ops(**{"rounds": 3, "eval_every": 0, **(ops or {})})
        self.allowed = {key_of(name): name for name in names}
        self.state = machine.new(self.lock, self.ops, SIGNING_KEY, self.allowed)
        self.journal: list[ce.Record] = []
        self.effects: tuple[ce.Effect, ...] = ()
        self.now = 100.0
        self.step(ce.Started(self.now, 1, NONCE, secret=secret))

    # ------------------------------------------------------------ events

    def step(self, event: ce.Event) -> tuple[ce.Effect, ...]:
        self.state, self.effects = machine.step(self.state, event)
        self.journal += [effect.record for effect in self.effects if isinstance(effect, ce.Persist)]
        return self.effects

    def tick(self, seconds: float = 0.0) -> tuple[ce.Effect, ...]:
        self.now += seconds
        return self.step(ce.Tick(self.now))

    def say(self, name: str, message: Message) -> tuple[ce.Effect, ...]:
        return self.step(ce.Received(self.now, key_of(name), message))

    def join(self, *names: str) -> None:
        """Newcomers with the base model say Hello and get on the roster."""
        for name in names:
            self.say(name, hello(self.lock))
        self.tick()

    def restart(self, term: int = 2) -> tuple[ce.Effect, ...]:
        """Kill the process and start it again on its journal."""
        self.state = machine.new(self.lock, self.ops, SIGNING_KEY, self.allowed)
        for record in self.journal:
            self.state = machine.recall(self.state, record)
        self.now = 5.0  # another clock
        return self.step(ce.Started(self.now, term, NONCE[::-1]))

    def result_of(self, unit: Unit, reward: float = 0.5, **changes: Any) -> Result:
        """A well-formed result; every prompt gets the same reward, a little higher for higher members."""
        lock = self.lock
        chunks = range(unit.first, unit.last + 1)
        sums = tuple((reward + unit.member % 50 / 100) * lock.chunk_size(unit.kind, k) for k in chunks)
        member = unit.kind == Kind.MEMBER
        seed = seeds.member_seed(lock.run_id, unit.round, unit.member, lock.mirrored) if member else 0
        digest = self.state.digest if self.state.digest is not None else 77
        assert self.state.round is not None
        fields: dict[str, Any] = {
            "unit": unit,
            "seed": seed,
            "sums": sums,
            "parent": self.state.round.parent[:8],
            "digest": digest,
            "correct": 0,
            "floored": 0,
            "tokens": 5,
            "times": (1, 2, 3),
            "evidence": b"evidence",
            "engine": 0,
        }
        return Result(**{**fields, **changes})

    def result(self, name: str, unit: Unit, reward: float = 0.5, **changes: Any) -> tuple[ce.Effect, ...]:
        return self.say(name, self.result_of(unit, reward, **changes))

    def applied(self, name: str, digest: int) -> tuple[ce.Effect, ...]:
        """A node says it stands at the tip."""
        chain = self.state.chain
        return self.say(name, Applied(chain.height, chain.tip[:8], digest, 12))

    def beat(self, name: str, *units: tuple[Unit, int]) -> tuple[ce.Effect, ...]:
        chain = self.state.chain
        return self.say(name, NodeBeat(chain.height, chain.tip[:8], units))

    def work(self, name: str, limit: int = 1000) -> None:
        """A node measures everything it is given until the round closes or nothing is left."""
        round = self.state.chain.round
        for _ in range(limit):
            held = self.assigned(name)
            if not held or self.state.chain.round > round:
                return
            self.result(name, held[0])

    # ------------------------------------------------------------ looking

    def assigned(self, name: str) -> list[Unit]:
        """The units a node is believed to hold, the running one first."""
        return [lease.unit for lease in self.state.nodes[key_of(name)].leases]

    def sent(self, kind: type[M], name: str | None = None) -> list[M]:
        """Messages of a kind in the last step's effects, to one node or to all."""
        sends = [effect for effect in self.effects if isinstance(effect, ce.Send)]
        return [
            send.message
            for send in sends
            if isinstance(send.message, kind) and name in (None, self.allowed.get(send.peer))
        ]

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [e.fields for e in self.effects if isinstance(e, ce.Note) and e.kind == kind]

    @property
    def stop(self) -> ce.Stop | None:
        return next((effect for effect in self.effects if isinstance(effect, ce.Stop)), None)

    @property
    def appended(self) -> list[Entry]:
        """Entries the last step journaled."""
        records = [effect.record for effect in self.effects if isinstance(effect, ce.Persist)]
        return [parse(record.raw) for record in records if isinstance(record, ce.EntryAppended)]

    @property
    def kinds(self) -> list[EntryKind]:
        """Kinds of all entries in order."""
        return [entry.kind for entry in self.state.chain.entries]

    def new_units(self, name: str | None = None) -> list[Unit]:
        """Units assigned in the last step."""
        return [assign.unit for assign in self.sent(Assign, name)]


def forge(body: Body, parent: Entry | None, *, round: int, digest: int, key: bytes = SIGNING_KEY) -> Entry:
    """An entry signed on the desk, for the node's tests."""
    before = parent.hash if parent else bytes(32)
    return seal(body, parent=before, term=1, nonce=NONCE, round=round, digest=digest, key=key)
