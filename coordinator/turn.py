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
from coordinator.membership import LOST_AFTER, Lease, Node, alive, holding
from coordinator.rounds import Round
from coordinator.state import State, adopt
from protocol.chain import Chain
from protocol.entries import Body, CommitBody, LockBody, ScoreBody, seal
from protocol.lock import Lock
from protocol.messages import Assign, Bye, Cancel, Commit, Message, Unit
from protocol.plan import Ops

LEASE_SECONDS = int(LOST_AFTER)
KEPT_REFUSALS = 20
KEPT_DECISIONS = 30
DECISIONS = frozenset({"membership", "lease", "failed", "void", "conflict", "quorum", "amend"})


class Turn:
    """The state so far, and the effects so far of one event.

    Nodes and the open round change several times per event: their changes gather here, on copies, and enter
    the state when it is next read. What a result needs is read piece by piece (`chain`, `digest`, ...), so
    that a batch of results copies the nodes once.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._nodes: dict[bytes, Node] | None = None  # a copy that differs from the state's
        self._round: Round | None = None  # likewise
        self.effects: list[Effect] = []

    @property
    def state(self) -> State:
        """The state with everything that has happened in this step."""
        if self._nodes is not None:
            self._state = replace(self._state, nodes=self._nodes)
        if self._round is not None:
            self._state = replace(self._state, round=self._round)
        self._nodes = self._round = None
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self._nodes, self._round = state, None, None

    @property
    def now(self) -> float:
        return self._state.now

    @property
    def lock(self) -> Lock:
        return self._state.lock

    @property
    def chain(self) -> Chain:
        return self._state.chain

    @property
    def nodes(self) -> Mapping[bytes, Node]:
        return self._state.nodes if self._nodes is None else self._nodes

    @property
    def round(self) -> Round:
        """The open round; there is one from the first entry on."""
        found = self._round or self._state.round
        assert found is not None
        return found

    @round.setter
    def round(self, round: Round) -> None:
        self._round = round

    @property
    def ops(self) -> Ops:
        return self._state.ops

    @property
    def digest(self) -> int | None:
        """D of the open round's state, as far as anybody has said."""
        return self._state.digest

    @property
    def allowed(self) -> Mapping[bytes, str]:
        return self._state.allowed

    @property
    def guests(self) -> Guests:
        return self._state.guests

    @property
    def term(self) -> int:
        return self._state.term

    @property
    def pool(self) -> Pool:
        return self._state.pool

    @property
    def looked(self) -> float:
        return self._state.looked

    @property
    def alive(self) -> tuple[int, ...]:
        return self._state.alive

    @property
    def started(self) -> bool:
        return self._state.started

    @property
    def proof(self) -> Proof:
        """What the nodes say of the open round's state."""
        return self._state.proof

    @property
    def audits(self) -> Audits:
        """Audits in the making."""
        return self._state.audits

    @property
    def secret(self) -> bytes:
        """Decides what is checked."""
        return self._state.secret

    @property
    def signable(self) -> int | None:
        """D of the open round's state, where it is known and nobody disputes it."""
        return None if self._state.proof.dispute else self._state.digest

    @property
    def stopped(self) -> bool:
        return bool(self._state.stopped)

    @property
    def over(self) -> bool:
        """No more work is handed out."""
        state = self._state
        return bool(state.stopped) or state.ending is not None or state.lineage.waiting

    def set_clock(self, clock: float) -> None:
        """Time never goes back: after a clock that jumps back it goes on from where it was."""
        state = self._state
        if state.started and clock + state.slip == state.now:
            return
        slip = max(state.slip, state.now - clock) if state.started else 0.0
        self.set(now=clock + slip, slip=slip)

    def set(self, **changes: Any) -> None:
        """Change anything but nodes and the round."""
        self._state = replace(self._state, **changes)

    def set_node(self, node: Node) -> None:
        if self._nodes is None:
            self._nodes = dict(self._state.nodes)
        self._nodes[node.key] = node

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
            said += [f"{name} {fields[name]}" for name in ("round", "member") if name in fields]
            words = f"{topic}: {' '.join(said)}" + f" ({fields['reason']})" * ("reason" in fields)
            self.set(decisions=(*self._state.decisions, (self.now, words))[-KEPT_DECISIONS:])

    def count(self, what: str, refusal: str = "", times: int = 1) -> None:
        """One more (or `times`) of `what` in status; a refusal is also kept in words."""
        counters = dict(self._state.counters)
        counters[what] = counters.get(what, 0) + times
        kept = (*self._state.refusals, refusal)[-KEPT_REFUSALS:] if refusal else self._state.refusals
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
        node, now = self.nodes[key], self.now
        leases = (*node.leases, Lease(unit, now, now, now))
        self.set_node(holding(replace(node, why=why), leases, now))
        self.round = rounds.lease(self.round, unit, 1)
        self.send(key, Assign(unit, self.round.parent[:8], LEASE_SECONDS))

    def take(self, key: bytes, unit: Unit, tell: bool = False) -> Lease | None:
        """End a node's lease on exactly this unit, if it has one; `tell` cancels it over there."""
        node = self.nodes[key]
        held, kept = membership.without(node.leases, unit)
        if held is None:
            return None
        self.set_node(holding(node, kept, self.now))
        self.round = rounds.lease(self.round, unit, -1)
        if tell:
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
