"""One step in the making, or a batch of them: the next state and the effects gathered so far.

A `Turn` lives inside a single call of `machine.fold` and is never kept, so that stays a pure function.
Lives here: what several handlers need (append an entry, hand out and take back leases, count, stop). Called
by `machine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from coordinator import membership, rounds
from coordinator.cases import Audits
from coordinator.claims import Proof
from coordinator.enrolment import Guests
from coordinator.events import Effect, EntryAppended, Note, Persist, Record, Send, Stop
from coordinator.leases import Pool
from coordinator.lineage import Lineage
from coordinator.membership import LOST_AFTER, Lease, Node, alive, placed
from coordinator.rounds import Round
from coordinator.state import State, adopt
from protocol.chain import Chain
from protocol.counting import of_note
from protocol.entries import Body, CommitBody, LockBody, ScoreBody, seal
from protocol.lock import Lock
from protocol.messages import Assign, Bye, Cancel, Commit, Message, Unit
from protocol.plan import Ops

LEASE_SECONDS = int(LOST_AFTER)
_PIECES: tuple[str, ...] = ("lock", "ops", "guests", "chain", "term", "now", "started", "round", "digest")
_PIECES += ("proof", "secret", "audits", "nodes", "pool", "alive", "looked", "lineage", "slip", "counters")
_PIECES += ("refusals", "decisions")
_ENDS = {"stopped", "ending", "lineage"}
KEPT_REFUSALS = 20
KEPT_DECISIONS = 30
DECISIONS = frozenset({"membership", "lease", "failed", "void", "conflict", "quorum", "amend"})


class Turn:
    """The state so far, and the effects so far of one event.

    What handlers read piece by piece lies here as plain attributes, the fields of `State` of the same names;
    only `set`, `set_node`, `own` and the assignment of a round change them. A round and the nodes change
    several times per event: they gather in a draft and in copies of this turn's own, until the state is next
    asked for as a whole. So a batch of results copies each of them once.
    """

    lock: Lock
    ops: Ops
    guests: Guests
    chain: Chain
    term: int
    now: float
    started: bool
    round: Round  # the open one; there is one from the first entry on
    digest: int | None  # D of the open round's state, as far as anybody has said
    proof: Proof  # what the nodes say of it
    secret: bytes  # decides what is checked
    audits: Audits
    nodes: Mapping[bytes, Node]
    pool: Pool
    alive: tuple[int, ...]
    looked: float
    lineage: Lineage
    slip: float
    counters: Mapping[str, int]
    refusals: tuple[str, ...]
    decisions: tuple[tuple[float, str], ...]
    stopped: bool
    over: bool  # no more work is handed out

    _state: State  # as it was when it was last asked for
    _own: dict[bytes, Node] | None  # the nodes, once one of them has changed
    _told: Proof | None
    _audited: Audits | None

    def __init__(self, state: State) -> None:
        self.effects: list[Effect] = []
        self._changed: dict[str, Any] = {}
        self._mine: set[bytes] = set()  # keys of the nodes that are this turn's own
        self.state = state

    @property
    def state(self) -> State:
        """The state with everything that has happened in this step."""
        if self._own is not None:
            self._changed["nodes"] = self._own
            self._own = None
        self._told = self._audited = None
        self._mine.clear()
        if self.round is not self._state.round:
            self._changed["round"] = self.round
            self.round.draft = False
        if self._changed:
            self._state = replace(self._state, **self._changed)
            self._changed.clear()
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._own = self._told = self._audited = None
        self._mine.clear()
        self._changed.clear()
        for name in _PIECES:
            setattr(self, name, getattr(state, name))
        self._judge_the_end()

    def _judge_the_end(self) -> None:
        state, changed = self._state, self._changed
        ending = changed.get("ending", state.ending)
        self.stopped = bool(changed.get("stopped", state.stopped))
        self.over = self.stopped or ending is not None or self.lineage.waiting

    @property
    def allowed(self) -> Mapping[bytes, str]:
        """Keys on the list, and the names of their holders."""
        return self.guests.allowed

    @property
    def signable(self) -> int | None:
        """D of the open round's state, where it is known and nobody disputes it."""
        return None if self.proof.dispute else self.digest

    def set_clock(self, clock: float) -> None:
        """Time never goes back: after a clock that jumps back it goes on from where it was."""
        if self.started and clock + self.slip == self.now:
            return
        slip = max(self.slip, self.now - clock) if self.started else 0.0
        self.set(now=clock + slip, slip=slip)

    def set(self, **changes: Any) -> None:
        """Change anything but nodes and the round."""
        self._changed |= changes
        for name, value in changes.items():
            if name in _PIECES:
                setattr(self, name, value)
        if not _ENDS.isdisjoint(changes):
            self._judge_the_end()

    def set_node(self, node: Node) -> None:
        """Put a changed node in the place of the one with its key."""
        if self._own is None:
            self.nodes = self._own = dict(self.nodes)
        self._own[node.key] = node

    def own(self, key: bytes) -> Node:
        """A node as this turn's own, to be changed in place."""
        if key not in self._mine:
            self.set_node(replace(self.nodes[key]))
            self._mine.add(key)
        return self.nodes[key]

    def told(self) -> Proof:
        """The proof with tables of this turn's own, to be changed in place."""
        if self.proof is not self._told:
            proof = self.proof
            own = replace(proof, words=dict(proof.words), measured=dict(proof.measured))
            self.proof = self._told = self._changed["proof"] = own
        return self._told

    def own_audits(self) -> Audits:
        """The audits as this turn's own, to be changed in place."""
        if self.audits is not self._audited:
            self.audits = self._audited = self._changed["audits"] = self.audits.copy()
        return self._audited

    def draft(self) -> Round:
        """The open round as this turn's own: `rounds` changes it in place."""
        if not self.round.draft:
            self.round = self.round.drafted()
        return self.round

    # ------------------------------------------------------------ effects

    def taken(self) -> tuple[Effect, ...]:
        """The effects since the last call."""
        effects, self.effects = tuple(self.effects), []
        return effects

    def persist(self, record: Record) -> None:
        self.effects.append(Persist(record))

    def send(self, peer: bytes, message: Message) -> None:
        self.effects.append(Send(peer, message))

    def broadcast(self, message: Message) -> None:
        """To every node that is there, on the roster or not; entries only to those on this branch."""
        entry = isinstance(message, Commit)
        for key, node in self.nodes.items():
            if entry and node.astray is not None:
                continue
            if not node.left and self.now - node.heard <= LOST_AFTER:
                self.send(key, message)

    def note(self, topic: str, /, **fields: Any) -> None:
        self.effects.append(Note(topic, fields))
        if topic in DECISIONS:
            said = [f"{fields[name]}" for name in ("node", "what") if name in fields]
            said += [of_note(topic, fields["round"])] if "round" in fields else []
            said += [f"member {fields['member']}"] if "member" in fields else []
            words = f"{topic}: {' '.join(said)}" + f" ({fields['reason']})" * ("reason" in fields)
            self.set(decisions=(*self.decisions, (self.now, words))[-KEPT_DECISIONS:])

    def count(self, what: str, refusal: str = "", times: int = 1) -> None:
        """One more (or `times`) of `what` in status; a refusal is also kept in words."""
        counters = dict(self.counters)
        counters[what] = counters.get(what, 0) + times
        kept = (*self.refusals, refusal)[-KEPT_REFUSALS:] if refusal else self.refusals
        self.set(counters=counters, refusals=kept)

    def stop(self, reason: str, code: int, bye: str = "") -> None:
        """Say Bye to everybody and end the process."""
        self.broadcast(Bye(bye or reason))
        self.effects.append(Stop(reason, code))
        self.set(stopped=reason)

    # ------------------------------------------------------------ the chain

    def append(self, body: Body) -> None:
        """Sign one more entry, journal it and send it to everybody. D of the tip's state must be known."""
        state = self.state
        digest = state.lock.digest if isinstance(body, LockBody) else state.digest
        assert digest is not None
        entry = seal(
            body,
            parent=state.chain.tip,
            term=state.term,
            nonce=state.nonce,
            round=state.chain.round,
            digest=digest,
            key=state.key,
        )
        self.persist(EntryAppended(state.chain.height, entry.raw))
        opened = state.round.opened if state.round else state.now
        self.state = adopt(state, entry)
        self.broadcast(Commit(state.chain.height, entry.raw))
        if isinstance(body, CommitBody):
            self._note_commit(state.now - opened)
        elif isinstance(body, ScoreBody):
            self.note(
                "score",
                round=body.state_round,
                prompts=body.prompts,
                mean=body.mean,
                correct=body.correct,
            )

    def _note_commit(self, seconds: float) -> None:
        last = self.state.history[-1]
        applies = sorted(node.ms for node in self.nodes.values() if node.ms)
        self.note(
            "commit",
            round=last.round,
            mean=last.mean,
            max=last.high,
            min=last.low,
            std=last.std,
            members=last.members,
            voids=last.voids,
            seconds=seconds,
            update_ms=applies[len(applies) // 2] if applies else 0,
        )

    # ------------------------------------------------------------ leases

    def give(self, key: bytes, unit: Unit, why: str) -> None:
        """Lease a unit to a node and tell it."""
        node, now = self.own(key), self.now
        began = now if len(node.leases) < node.hello.lanes else None
        node.leases = (*node.leases, Lease(unit, now, now, now, began=began))
        node.why = why
        self.round = rounds.lease(self.draft(), unit, 1)
        self.send(key, Assign(unit, self.round.parent[:8], LEASE_SECONDS))

    def take(self, key: bytes, unit: Unit, tell: bool = False) -> Lease | None:
        """End a node's lease on exactly this unit, if it has one; `tell` cancels it over there."""
        held, kept = membership.without(self.nodes[key].leases, unit)
        if held is None:
            return None
        node = self.own(key)
        node.leases = placed(node.hello.lanes, kept, self.now)
        self.round = rounds.lease(self.draft(), unit, -1)
        if tell:
            node.pace = membership.pace_so_far(node, held)
            self.send(key, Cancel(unit))
        return held

    def take_all(self, key: bytes) -> None:
        """End all leases of a node."""
        for lease in self.nodes[key].leases:
            self.take(key, lease.unit)

    def count_in(self, node: Node) -> None:
        """Who is there, after one node has come."""
        if alive(node, self.now) and node.number not in self.alive:
            assert node.number is not None
            self.set(alive=tuple(sorted((*self.alive, node.number))))

    def census(self) -> None:
        """Recount who is there."""
        there = [n for n in self.nodes.values() if alive(n, self.now) and not n.quarantined]
        self.set(alive=tuple(sorted(node.number for node in there if node.number is not None)))
