"""What a node knows, and one step of it in the making.

Pure: protocol and `esnode.events` only. Lives here: `State`, its parts, `Turn`, and the questions both event
and message handlers ask. Called by `node.py` and `inbox.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import msgspec.structs

from esnode.catchup import Catch, Held
from esnode.events import About, CancelUnit, Effect, Note, Send, Stop
from esnode.proofevents import Proved
from protocol.chain import Chain
from protocol.entries import Entry, EntryKind
from protocol.lock import Lock
from protocol.messages import (
    WIRE_VERSION,
    Applied,
    DigestAsk,
    Hello,
    Message,
    Rederive,
    Rederived,
    Result,
    Unit,
)
from protocol.peers import Donor
from protocol.ranges import MAX_LOST

HELLO_FIRST, HELLO_LAST = 0.5, 2.0  # seconds between Hellos, doubling
UNITS_TOLD = 64
FINISHED = 1000  # thousandths


@dataclass(frozen=True, slots=True)
class Work:
    """A unit in the queue and the first 8 bytes of the state it belongs to."""

    unit: Unit
    parent: bytes


@dataclass(frozen=True, slots=True)
class Running:
    """A unit that is being evaluated. Its outcome is dropped once `cancelled`.

    `scoring`: it needs the weights no more.
    """

    unit: Unit
    progress: int = 0
    cancelled: bool = False
    scoring: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """A result nobody acknowledged yet, and when it left last."""

    result: Result
    at: float


@dataclass(frozen=True, slots=True)
class Kept:
    """The per-prompt scores behind a result, for the audit."""

    unit: Unit
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Where the replica proof stands here; see `proof.py`."""

    reading: DigestAsk | None = None  # digests are being read for it: the master must stand still
    question: Rederive | None = None  # being answered
    held: int = 0  # D when it was asked
    damaged: tuple[str, ...] = ()  # tensors to be healed
    mend: Proved | None = None  # pieces to be overwritten
    mending: bool = False  # the engine does it
    answered: Rederive | None = None  # the last one that was
    answer: Rederived | None = None  # how: told again when asked again
    report: Rederived | None = None  # damage found here
    contradicted: int = 0  # 1 + first round whose stated D this replica does not have, 0 for none


@dataclass(frozen=True, slots=True)
class Sources:
    """The peers that may be asked, and the question that is open."""

    peers: tuple[Donor, ...] = ()
    turn: int = 0  # whose turn it is
    asked: float = float("-inf")  # when a peer was asked, last
    open: bool = False  # and it has not answered


class State(msgspec.Struct, frozen=True):
    """All a node knows; a value: neither it nor anything in it is changed in place."""

    lock: Lock
    about: About
    now: float = 0.0
    slip: float = 0.0  # seconds the shell's clock has jumped back
    chain: Chain = msgspec.field(default_factory=Chain)
    applied: int = 0  # entries the master reflects
    digest: int = 0  # D of the master
    ms: int = 0  # the last apply
    engines: tuple[bytes, ...] = ()  # fingerprints told in Hello; results name theirs by its place
    running: tuple[Running, ...] = ()
    applying: int = 0  # entries of an Apply that is not answered: the engine is busy
    rewind: bool = False  # the master must go back before anything else is done with it
    rewind_far: bool = False  # to the base, no checkpoint is good enough
    rewinding: tuple[Entry, ...] | None = None  # entries of a Rewind that is not answered: likewise busy
    proof: Proof = Proof()
    kept: tuple[Kept, ...] = ()  # scores of the newest units measured
    queue: tuple[Work, ...] = ()
    unacked: tuple[Sent, ...] = ()
    term: int = 0  # highest ever answered
    term_proof: bytes = b""
    joined: bool = False
    heard: float = 0.0  # the coordinator, last
    spoke: float = 0.0  # this node, last
    beats: int = 0
    beaten: float = 0.0  # when the last of them left
    hello_at: float = 0.0  # when the next Hello is due while not joined
    hello_wait: float = HELLO_FIRST
    wanted: int = 0  # height the coordinator is known to have
    fetched: float | None = None  # when the Fetch left that is not answered
    sources: Sources = Sources()  # peers that may be asked instead
    every: int | None = None  # rounds between snapshots; None until the coordinator has said it
    relay: int = 0  # port of the relay beside the coordinator, 0 for none
    held_snapshots: tuple[Held, ...] = ()  # on this node's disk, the newest first
    saving: bool = False  # a Save is not answered
    pace: float = 0.0  # seconds that replay takes per round, 0 while unknown
    catch: Catch | None = None  # a faster way than replay is being looked for, or taken
    catch_later: float = 0.0  # not before then again
    leaving: str = ""
    paused: str = ""  # why this machine's owner lets it do nothing for now
    closing: bool = False  # paused, the run has ended: the rest of the ledger is on its way
    unknown: bool = False  # paused, and the coordinator has not been told over this connection
    until: float | None = None  # a leaving or ended node stops then, Bye or not
    stopped: bool = False

    @property
    def parent(self) -> bytes:
        """First 8 bytes of the hash that names the chain's state: the last commit's, or the lock's."""
        if not self.chain.height:
            return b""
        return (self.chain.commits[-1] if self.chain.commits else self.chain.entries[0]).hash[:8]

    @property
    def rounds(self) -> int:
        """Commits the master reflects."""
        if self.applied == 0:
            return 0
        last = self.chain.entries[self.applied - 1]
        return last.round + (last.kind is EntryKind.COMMIT)

    @property
    def busy(self) -> int:
        """Lanes whose unit still needs the weights: while there is one they must not move."""
        return sum(not run.scoring for run in self.running)

    @property
    def held(self) -> tuple[tuple[Unit, int], ...]:
        """Units with progress: the running ones, those that wait, those whose result is not acknowledged."""
        held: list[tuple[Unit, int]] = []
        held += [(run.unit, run.progress) for run in self.running if not run.cancelled]
        held += [(work.unit, 0) for work in self.queue]
        held += [(sent.result.unit, FINISHED) for sent in self.unacked]
        return tuple(held[:UNITS_TOLD])


class Turn:
    """One step in the making: the state and the effects so far. Never outlives the step."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.effects: list[Effect] = []

    def set(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, message: Message) -> None:
        self.do(Send(message))
        self.set(spoke=self.state.now)

    def note(self, topic: str, /, **fields: Any) -> None:
        self.do(Note(topic, fields))

    def stop(self, reason: str, code: int) -> None:
        if not self.state.stopped:
            self.do(Stop(reason, code))
            self.set(stopped=True)

    def say_hello(self) -> None:
        """Introduce this node, and say when the next Hello is due if nobody answers."""
        state, chain, about = self.state, self.state.chain, self.state.about
        self.send(
            Hello(
                wire_min=WIRE_VERSION,
                wire_max=WIRE_VERSION,
                law=state.lock.law,
                run=state.lock.run_id,
                name=about.name,
                backend=about.backend,
                device=about.device,
                selftest=about.selftest,
                fingerprints=state.engines,
                height=chain.height,
                tip=chain.tip if chain.height else b"",
                digest=state.digest if state.rounds == chain.round and not state.rewind else 0,
                term=state.term,
                units=tuple(unit for unit, _ in state.held),
                proof=state.term_proof,
                lanes=about.lanes,
                lost=about.lost[:MAX_LOST],
            )
        )
        wait = state.hello_wait
        self.set(hello_at=state.now + wait, hello_wait=min(2 * wait, HELLO_LAST))

    def say_hello_again(self) -> None:
        """What was told of this node has changed."""
        if self.state.joined:
            self.set(hello_wait=HELLO_FIRST)
            self.say_hello()

    def tell_applied(self) -> None:
        """D of the master, and where it stands."""
        state = self.state
        if state.applied and not state.rewind:
            tip = state.chain.entries[state.applied - 1].hash[:8]
            self.send(Applied(state.applied, tip, state.digest, state.ms))
            report = state.proof.report
            if report is not None and report.commits == state.rounds:
                self.send(report)

    def rewind(self, *, far: bool = False) -> None:
        """The master is of no use as it is: rewind it as soon as the engine is idle, then apply again.

        What hangs on the present state goes: units, results on their way, the word on D. `far`: no
        checkpoint is trusted, the base it must be.
        """
        self.forget_work()
        proof = replace(self.state.proof, damaged=(), mend=None, contradicted=0)
        self.set(rewind=True, rewind_far=far, applied=0, digest=0, proof=proof)

    def forget_work(self) -> None:
        """Units and results of this replica are of no use any more."""
        self.cancel_running()
        self.set(queue=(), unacked=())

    def fits(self, height: int, digest: int) -> bool:
        """Whether a master with this D may be the state after `height` entries, as far as they tell."""
        entries = self.state.chain.entries
        return (height < len(entries) and entries[height].digest == digest) or height == len(entries)

    def cancel_running(self, useless: Callable[[Unit], bool] = lambda unit: True) -> None:
        """The outcomes of these running units, or all, are of no use any more."""
        for run in self.state.running:
            if not run.cancelled and useless(run.unit):
                self.change(run.unit, cancelled=True)
                self.do(CancelUnit(run.unit))

    def end(self, unit: Unit) -> Running:
        """An evaluation was answered. The engine answers exactly what it was asked."""
        (ended,) = (run for run in self.state.running if run.unit == unit)
        self.set(running=tuple(run for run in self.state.running if run is not ended))
        return ended

    def change(self, unit: Unit, **changes: Any) -> None:
        """Something of a running unit changed."""
        running = self.state.running
        self.set(running=tuple(replace(run, **changes) if run.unit == unit else run for run in running))

    def check_digest(self) -> None:
        """The next entry states D of the state before it: it must be this replica's."""
        state = self.state
        if state.rewind:
            return
        if state.applied < state.chain.height:
            self.agrees(state.applied, state.digest)
        elif not state.applied and state.digest != state.lock.digest:
            self._differs(0, state.digest, state.lock.digest)

    def agrees(self, height: int, digest: int) -> None:
        """Compare D before entry `height` with what the entry says.

        Another base is the end. Another later state is not: the replica goes on as replay makes it and says
        its D, and replay settles who is right.
        """
        entry = self.state.chain.entries[height]
        if entry.digest != digest:
            self._differs(entry.round, digest, entry.digest)

    def _differs(self, round: int, mine: int, theirs: int) -> None:
        if round == 0:
            return self.stop(
                f"this is not the run's base model: its digest is {mine:016x}, the run starts from "
                f"{theirs:016x}. Use the model and revision that the plan names",
                1,
            )
        proof = self.state.proof
        self.set(proof=replace(proof, contradicted=proof.contradicted or round + 1))
        self.note("dispute", round=round, here=f"{mine:016x}", ledger=f"{theirs:016x}")
