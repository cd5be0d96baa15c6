"""A bare node on a bench: feed it events, look at the effects, with a small signed ledger to feed it from."""

from __future__ import annotations

from typing import TypeVar

from esnode import events, node
from esnode.events import Evaluate, Send
from protocol.entries import (
    Admission,
    CommitBody,
    EndBody,
    Entry,
    LockBody,
    MemberReward,
    RosterBody,
)
from protocol.messages import (
    Assign,
    Entries,
    Kind,
    Message,
    Unit,
    Welcome,
)
from protocol.terms import prove_term
from tests.desk import NONCE, SIGNING_KEY, desk_lock, forge, key_of
from tests.replica import Outcome

E = TypeVar("E")
M = TypeVar("M", bound=Message)
LOCK = desk_lock(members=2)
ABOUT = events.About("n", "reference", "cpu", b"selftest", b"engine-1")
OUTCOME = Outcome((1.0, 1.0, 1.0, 1.0), 3)


def ledger(*digests: int, end: bool = False) -> list[Entry]:
    """Lock, roster, then one commit per digest, which is D of the state before it; perhaps END."""
    entries = [forge(LockBody(LOCK.to_bytes()), None, round=0, digest=LOCK.digest)]

    def add(body: CommitBody | RosterBody | EndBody, round: int, digest: int) -> None:
        entries.append(forge(body, entries[-1], round=round, digest=digest))

    add(RosterBody((Admission(0, key_of("n"), "n"),)), 0, LOCK.digest)
    for round, digest in enumerate(digests):
        rows = tuple(MemberReward(k, 0.25 + k / 2, 0) for k in range(2))
        add(CommitBody(LOCK.alpha_at(round), LOCK.sigma_at(round), rows), round, digest)
    if end:
        add(EndBody("done"), len(digests), 99)
    return entries


def unit_of(round: int = 0, member: int = 0) -> Unit:
    return Unit(round, Kind.MEMBER, member, 0, 3)


def welcome_of(term: int, nonce: bytes, seed: bytes, height: int = 0, tip: bytes = b"") -> Welcome:
    """A coordinator's Welcome with the proof of its term."""
    proof = prove_term(LOCK.run_id, term, nonce, seed)
    return Welcome(1, LOCK.run_id, LOCK.to_bytes(), term, height, tip, proof)


class Bench:
    """A node's state and the effects of the last step."""

    def __init__(
        self,
        held: list[Entry] | None = None,
        *,
        term: int = 0,
        height: int = 0,
        digest: int = LOCK.digest,
        proof: bytes = b"",
    ) -> None:
        self.state = node.new(LOCK, ABOUT)
        self.now = 10.0
        self.effects: tuple[events.Effect, ...] = ()
        raws = tuple(entry.raw for entry in held or [])
        self.step(events.Started(self.now, term, raws, height, digest, proof=proof))

    def step(self, event: events.Event) -> tuple[events.Effect, ...]:
        self.state, self.effects = node.step(self.state, event)
        return self.effects

    def tick(self, seconds: float = 0.0) -> tuple[events.Effect, ...]:
        self.now += seconds
        return self.step(events.Tick(self.now))

    def hear(self, message: Message) -> tuple[events.Effect, ...]:
        return self.step(events.Received(self.now, message))

    def welcome(self, entries: list[Entry], term: int = 1) -> tuple[events.Effect, ...]:
        tip = entries[-1].hash
        return self.hear(welcome_of(term, NONCE, SIGNING_KEY, len(entries), tip))

    def join(self, entries: list[Entry]) -> None:
        """Welcomed, all entries fetched."""
        self.welcome(entries)
        self.hear(Entries(self.state.chain.height, tuple(e.raw for e in entries[self.state.chain.height :])))

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def sent(self, kind: type[M]) -> list[M]:
        return [send.message for send in self.all(Send) if isinstance(send.message, kind)]

    @property
    def stop(self) -> events.Stop | None:
        return next(iter(self.all(events.Stop)), None)


def working(entries: list[Entry] | None = None) -> Bench:
    """A joined node that evaluates member 0 of round 0."""
    bench = Bench()
    bench.join(entries or ledger())
    bench.hear(Assign(unit_of(), bench.state.parent, 15))
    assert bench.all(Evaluate) == [Evaluate(unit_of(), LOCK.sigma_at(0))]
    return bench
