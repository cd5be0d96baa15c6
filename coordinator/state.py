"""What the coordinator knows, and how a journal record changes it.

Pure. State is a fold: `adopt` takes one ledger entry in, `recall` one journal record; both run at start over
the whole journal and, entry by entry, in live steps. Called by `turn.py` and `machine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from coordinator import enrolment, rounds
from coordinator.audit import Sums
from coordinator.cases import Audits
from coordinator.claims import Fault, Proof
from coordinator.enrolment import Guests
from coordinator.events import (
    AmendOrdered,
    Audited,
    EntryAppended,
    FaultFound,
    InviteOpened,
    KeyAllowed,
    KeyRevoked,
    Record,
    Recovery,
    ResultAccepted,
    SecretTaken,
    TermSeen,
    TermTaken,
)
from coordinator.leases import Pool
from coordinator.lineage import Lineage
from coordinator.membership import Node
from coordinator.peers import Peer
from coordinator.rounds import Round
from protocol.chain import Chain
from protocol.entries import AmendBody, CommitBody, Entry, EntryKind, RosterBody, ScoreBody, parse
from protocol.growing import Growing
from protocol.lock import Lock
from protocol.plan import Ops
from protocol.shaping import mean_and_std
from protocol.terms import prove_term

LEDGER = "the ledger"


class CommitSummary(msgspec.Struct, frozen=True):
    """One committed round in numbers."""

    round: int
    members: int
    voids: int
    mean: float
    high: float
    low: float
    std: float


class State(msgspec.Struct, frozen=True):
    """All the coordinator knows; a value: neither it nor anything in it is changed in place."""

    lock: Lock
    ops: Ops
    key: bytes  # Ed25519 seed that signs entries
    guests: Guests  # whom the gate lets in
    chain: Chain = msgspec.field(default_factory=Chain)
    term: int = 0
    nonce: bytes = b""
    term_proof: bytes = b""  # that this key took the term
    lineage: Lineage = Lineage()  # other histories of this run
    now: float = 0.0
    wall: float = 0.0  # unix seconds as of the last tick; 0 when the shell does not say
    slip: float = 0.0  # seconds the shell's clock has jumped back
    started: bool = False
    round: Round | None = None
    digest: int | None = None  # D of the open round's state
    witness: str = ""  # why it is known
    proof: Proof = Proof()  # what the nodes say of that state
    faults: Mapping[bytes, Fault] = {}  # CURVE key -> how often its replica was wrong
    secret: bytes = b""  # decides what is checked
    audits: Audits = msgspec.field(default_factory=Audits)  # in the making
    evidence: Mapping[tuple[bytes, bytes], Sums] = {}  # of audits, by pair of CURVE keys, the smaller first
    misses: Mapping[bytes, tuple[int, str]] = {}  # CURVE key -> audits failed for want of evidence, the last
    quarantined: Mapping[bytes, str] = {}  # CURVE key -> why it gets no units
    nodes: Mapping[bytes, Node] = msgspec.field(default_factory=dict)
    numbers: Mapping[bytes, int] = msgspec.field(default_factory=dict)  # CURVE key -> roster number
    pool: Pool = Pool(0, 0)  # who shares the work, as of the last tick or membership event
    decisions: tuple[tuple[float, str], ...] = ()  # the last few about nodes and units: when, and in words
    alive: tuple[int, ...] = ()  # roster numbers of the nodes that are there at all, likewise
    looked: float = float("-inf")  # when idle nodes last looked for something to take over
    peers: Mapping[bytes, Peer] = msgspec.field(default_factory=dict)  # CURVE key -> as a peer of others
    relay: int = 0  # port of the relay, 0 while there is none
    selftest: bytes = b""  # what the pool's kernels answer
    counters: Mapping[str, int] = msgspec.field(default_factory=dict)
    refusals: tuple[str, ...] = ()  # the last few, in words
    history: Growing[CommitSummary] = msgspec.field(default_factory=Growing)
    scores: Growing[ScoreBody] = msgspec.field(default_factory=Growing)
    orders: tuple[AmendOrdered, ...] = ()  # amendments that are not in the chain yet
    ending: float | None = None  # when END was announced
    stopped: str = ""

    @property
    def allowed(self) -> Mapping[bytes, str]:
        """CURVE key -> name of everybody who may say Hello."""
        return self.guests.allowed


def new(lock: Lock, ops: Ops, key: bytes, allowed: Mapping[bytes, str]) -> State:
    """An empty coordinator. `key`: 32-byte Ed25519 seed that signs entries; `allowed`: CURVE key -> name."""
    return State(lock, ops, key, Guests(dict(allowed)))


def adopt(state: State, entry: Entry) -> State:
    """The state after one more ledger entry; BrokenChain when it may not follow."""
    chain = state.chain.copy()
    chain.append(entry)
    state = replace(state, chain=chain)
    if entry.kind in (EntryKind.LOCK, EntryKind.COMMIT):
        opened, audits = rounds.open_round(chain, state.ops, state.now), state.audits.copy()
        audits.close()
        state = replace(
            state,
            round=opened,
            digest=chain.digest,
            witness=LEDGER if chain.digest is not None else "",
            proof=Proof(),
            audits=audits,
            nodes={key: replace(node, leases=(), stalled=None) for key, node in state.nodes.items()},
        )
    if isinstance(entry.body, CommitBody):
        return replace(state, history=state.history.plus(summary(entry.round, entry.body)))
    if isinstance(entry.body, ScoreBody):
        assert state.round is not None
        return replace(state, scores=state.scores.plus(entry.body), round=replace(state.round, probe=None))
    if isinstance(entry.body, RosterBody):
        return _enrol(state, entry.body)
    if isinstance(entry.body, AmendBody):
        return replace(state, orders=_open_orders(state.orders, entry.body))
    return state


def _open_orders(orders: tuple[AmendOrdered, ...], done: AmendBody) -> tuple[AmendOrdered, ...]:
    """The orders without the first one that this entry fulfils (its first round may have had to move)."""
    for k, order in enumerate(orders):
        given = (order.alpha, order.sigma, order.members, order.trusted)
        if given == (done.alpha, done.sigma, done.members, done.trusted):
            return orders[:k] + orders[k + 1 :]
    return orders


def _enrol(state: State, body: RosterBody) -> State:
    keys = {number: key for key, number in state.numbers.items()}
    guests = enrolment.adopt(state.guests, body, keys)
    gone = [keys[number] for number in body.revoked]
    numbers = {key: number for key, number in state.numbers.items() if key not in gone}
    nodes = {key: replace(node, number=None) if key in gone else node for key, node in state.nodes.items()}
    for admission in body.admitted:
        numbers[admission.key] = admission.number
        if admission.key in nodes:
            nodes[admission.key] = replace(nodes[admission.key], number=admission.number)
    return replace(state, guests=guests, numbers=numbers, nodes=nodes)


def recall(state: State, record: Record) -> State:
    """Fold one journal record; after the last, `step` with `Started` (term = last + 1) goes on from there."""
    if isinstance(record, TermTaken):
        forgiven = rounds.forgive(state.round) if state.round else None
        proof = prove_term(state.lock.run_id, record.term, record.nonce, state.key)
        return replace(state, term=record.term, nonce=record.nonce, term_proof=proof, round=forgiven)
    if isinstance(record, EntryAppended):
        return adopt(state, parse(record.raw))
    if isinstance(record, InviteOpened | KeyAllowed | KeyRevoked):
        state = replace(state, guests=enrolment.fold(state.guests, record))
        return pardon(state, record.key) if isinstance(record, KeyAllowed) else state
    if isinstance(record, FaultFound):
        return blame(state, record)
    if isinstance(record, Audited):
        return admit_evidence(state, record)
    if isinstance(record, SecretTaken):
        return replace(state, secret=record.secret)
    if isinstance(record, AmendOrdered):
        return replace(state, orders=(*state.orders, record))
    if isinstance(record, TermSeen):
        seen = max(state.lineage.seen, record.term)
        return replace(state, lineage=replace(state.lineage, seen=seen))
    if isinstance(record, Recovery):
        return _succeed(state, record)
    round = state.round
    if round is None:
        return state
    if isinstance(record, ResultAccepted):
        state = measure(state, record.evaluator, record.result.digest)
        assert state.round is not None
        return replace(state, round=rounds.fill(state.round, record.evaluator, record.result))
    return replace(state, round=rounds.fail(round, record.evaluator, record.unit, record.reason))


def _succeed(state: State, record: Recovery) -> State:
    """A successor waits on a beginning of the chain, or begins."""
    given = min(state.lineage.given, record.height) if state.lineage.waiting else record.height
    lineage = replace(state.lineage, waiting=not record.open, given=given)
    if record.open:
        lineage = replace(lineage, began=state.term, roots=record.height, before=record.key)
    entries = state.chain.entries[: record.height]
    if record.height < state.chain.height:
        nodes = {key: replace(node, number=None, leases=()) for key, node in state.nodes.items()}
        state = replace(state, chain=Chain(), round=None, digest=None, witness="", proof=Proof())
        state = replace(state, numbers={}, history=Growing(), scores=Growing(), nodes=nodes)
        for entry in entries:
            state = adopt(state, entry)
    return replace(state, lineage=lineage)


def learn(state: State, digest: int, witness: str) -> State:
    """D of the open round's state is known, and why."""
    return replace(state, digest=digest, witness=witness)


def measure(state: State, evaluator: int, digest: int) -> State:
    """A result of this evaluator, measured on a state with this D, is taken in.

    What it measured before on another state is dropped.
    """
    before = state.proof.measured.get(evaluator)
    if before == digest:
        return state
    if before is not None:
        state = drop(state, evaluator)
    return replace(state, proof=replace(state.proof, measured={**state.proof.measured, evaluator: digest}))


def drop(state: State, evaluator: int) -> State:
    """The open round without the rewards of this evaluator: they are measured, and audited, again."""
    measured = {number: digest for number, digest in state.proof.measured.items() if number != evaluator}
    round = rounds.drop(state.round, evaluator) if state.round else None
    audits = state.audits.copy()
    for key, number in state.numbers.items():
        if number == evaluator:
            audits.forget(key)
    return replace(state, round=round, audits=audits, proof=replace(state.proof, measured=measured))


def blame(state: State, record: FaultFound) -> State:
    """A node was at fault."""
    old = state.faults.get(record.key)
    told = old.told if old is not None and old.commits == record.commits else ()
    fault = Fault((old.count if old else 0) + 1, record.commits, (*told, record.reason))
    number = state.numbers.get(record.key)
    if number is not None:
        state = drop(state, number)
    return replace(state, faults={**state.faults, record.key: fault})


def admit_evidence(state: State, record: Audited) -> State:
    """An audit's outcome enters the evidence; the rewards of whoever goes into quarantine are dropped."""
    sums = Sums(*record.sums)
    pair = (record.first, record.second)
    if record.first > record.second:
        pair, sums = (record.second, record.first), sums.turned
    evidence = {**state.evidence, pair: (state.evidence.get(pair, Sums()) + sums).floored}
    misses = dict(state.misses)
    for key, fault in record.faults:
        misses[key] = (misses.get(key, (0, ""))[0] + 1, fault)
    state = replace(state, evidence=evidence, misses=misses)
    for key, reason in record.quarantine:
        nodes = dict(state.nodes)
        if key in nodes:
            nodes[key] = replace(nodes[key], quarantined=reason)
        state = replace(state, nodes=nodes, quarantined={**state.quarantined, key: reason})
        if key in state.numbers:
            state = drop(state, state.numbers[key])
    return state


def pardon(state: State, key: bytes) -> State:
    """The operator lets a node in again, or out of quarantine: it begins without a past."""
    nodes = dict(state.nodes)
    if key in nodes:
        nodes[key] = replace(nodes[key], quarantined="")
    return replace(
        state,
        nodes=nodes,
        evidence={pair: sums for pair, sums in state.evidence.items() if key not in pair},
        misses={other: count for other, count in state.misses.items() if other != key},
        faults={other: fault for other, fault in state.faults.items() if other != key},
        quarantined={other: reason for other, reason in state.quarantined.items() if other != key},
    )


def summary(round: int, body: CommitBody) -> CommitSummary:
    """A commit's rewards in numbers."""
    rewards = [member.reward for member in body.members]
    mean, std = mean_and_std(rewards)
    return CommitSummary(round, len(rewards), len(body.voids), mean, max(rewards), min(rewards), std)
