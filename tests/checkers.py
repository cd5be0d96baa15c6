"""What must hold after every step of a simulated run, whatever was dropped, doubled, delayed or killed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy

from msgspec.structs import replace

from coordinator import machine
from coordinator.events import (
    Audited,
    Effect,
    EntryAppended,
    Event,
    FaultFound,
    Note,
    Persist,
    Record,
    Recovery,
    ResultAccepted,
    Send,
)
from coordinator.state import State
from esnode.nodestate import State as NodeState
from protocol.entries import GENESIS, CommitBody, Entry, EntryKind, ScoreBody, parse
from protocol.lock import Lock
from protocol.messages import Ack, Assign, Commit, Enrolled, Entries, Kind, Message, Result, Unit
from tests import bounds
from tests.histories import Histories
from tests.promises import Promises, cells_of
from tests.replica import Truth, digest_of
from tests.tree import Known, Tree

SAMPLED = 25  # one batch of events in so many is looked at closely


class Violation(AssertionError):
    """A law of the protocol was broken."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


def _told(state: State) -> str:
    """All of a state in words; the chain by its entries."""
    rest = repr(replace(state, chain=None))  # type: ignore[arg-type]
    return f"{[entry.hash for entry in state.chain.entries]} {re.sub(' at 0x[0-9a-f]+', '', rest)}"


def _audited(before: State, after: State, peer: bytes, unit: Unit) -> bool:
    """Whether this node measures this unit a second time, as an audit."""
    cases = (*before.audits.cases, *after.audits.cases)
    if any(case.auditor == peer and case.first.unit == unit for case in cases):
        return True
    return bool(before.secret and before.ops.audit_share)  # begun and dropped within one batch of events


class Checkers:
    """The omniscient observer. It sees every flush, every message sent, every apply."""

    def __init__(self, lock: Lock, probes: Callable[[int], bool]) -> None:
        """`probes`: whether the state after so many commits is measured on the held-out prompts."""
        self.lock = lock
        self.probes = probes
        self.truth = Truth(lock)
        self.tree = Tree(self.truth)
        self.recovering = False  # whether a successor may leave a branch behind
        self.histories = Histories(self.tree)
        self.commits: dict[tuple[int, bytes, int], bytes] = {}  # (term, start, round) -> hash
        self.measured: dict[tuple[Unit, bytes, int], tuple[float, ...]] = {}
        self.promises: dict[str, Promises] = {}  # of each coordinator
        self.stored_by: dict[str, set[bytes]] = {}  # what each node has put on its disk
        self.void_probes: set[tuple[str, int]] = set()  # that some coordinator gave up, after three failures
        self.batches = 0
        self.let_in: set[bytes] = set()  # keys that were on the list when somebody was told
        self.honest = True  # whether every node measures and applies what it should
        self.liars = False  # whether somebody reports what it has not measured
        self.flipped = False  # whether memory changes by itself: a lone node may save it
        self.faulty: set[str] = set()  # nodes whose replica may be wrong for a while

    # ------------------------------------------------------------ the chain

    @property
    def chain(self) -> list[Entry]:
        """The entries of the branch with the highest term."""
        return self.tree.chain()

    @property
    def closed_rounds(self) -> list[CommitBody]:
        """Commits of the chain, in order; a test that looks at each of them means at least one."""
        found = [entry.body for entry in self.chain if isinstance(entry.body, CommitBody)]
        assert found, "no round was closed"
        return found

    @property
    def ended(self) -> bool:
        head = self.tree.head
        if self.histories.cloned:  # of two copies the one that is kept may be of a lower term
            return any(entry.kind is EntryKind.END for entry in self.tree.known_raw.values())
        return head is not None and head.entry.kind is EntryKind.END

    @property
    def digest(self) -> int:
        """D of the state at the head."""
        assert self.tree.head is not None
        return digest_of(self.tree.head.master)

    def durable(self, name: str, height: int, raw: bytes) -> None:
        """An entry is flushed by a coordinator, behind those it holds."""
        entry = parse(raw)
        head, before = self.tree.head, self.tree.before(entry)
        found = self.tree.add(entry)
        problem = self.histories.append(name, height, entry)
        require(not problem, problem)
        if found is None:  # taken over from a node, who had it from another coordinator or a lost journal
            require(self.recovering, f"{name} flushes entry {height} twice")
            if isinstance(entry.body, CommitBody) and before is not None:
                self.promised(name).settle(before.closing)
            return
        require(found.height == height, f"entry {height} is shown behind entry {found.height - 1}")
        require(before is head or self.recovering, f"two entries at height {height}: the chain forks")
        if isinstance(entry.body, CommitBody) and before is not None:
            self._commit(name, entry, entry.body, before)
        elif isinstance(entry.body, ScoreBody) and before is not None:
            self._score(entry.body, before)

    def _commit(self, name: str, entry: Entry, body: CommitBody, before: Known) -> None:
        key = (entry.term, entry.nonce, entry.round)
        require(
            self.commits.setdefault(key, entry.hash) == entry.hash, f"two commits of term and round {key}"
        )
        indices = [member.index for member in body.members]
        require(len(indices) == len(set(indices)), f"round {entry.round}: a member counts twice")
        named = {*indices, *(index for index, _ in body.voids)}
        for kind, index, chunk in self.promised(name).settle(before.closing):
            what = f"acknowledged chunk {chunk} of member {index} of round {entry.round} is lost"
            require(kind == Kind.PROBE or index in named, what)
        if self.probes(entry.round):
            known = entry.round in before.scored or (name, entry.round) in self.void_probes
            require(known, f"round {entry.round} closed before its held-out probe")
        if self.honest:
            self._replay(entry, body, before)
            root_ok = not body.snapshot or self.tree.rooted(body.snapshot, before) or self.flipped
            require(root_ok, f"round {entry.round} carries a root of no true state of its branch")

    def _replay(self, entry: Entry, body: CommitBody, before: Known) -> None:
        """D and every reward are what an independent replay finds."""
        require(entry.digest == digest_of(before.master), f"round {entry.round}: D is not the replay's")
        for member in body.members if not self.liars else ():
            right = self.truth.member_reward(before.master, entry.round, member.index, body.sigma)
            what = f"round {entry.round}: reward of {member.index} is not the measured one"
            require(member.reward == right, what)

    def _score(self, body: ScoreBody, before: Known) -> None:
        right = self.truth.probe(before.master, body.state_round)
        same = (body.sums, body.correct) == (right.sums, right.correct)
        require(same or self.liars or not self.honest, "a score is not the measured one")
        require(body.state_round not in before.scored, "a state is scored twice")

    def stored(self, name: str, held: Sequence[bytes], raws: Sequence[bytes]) -> None:
        """A node puts entries behind those it holds."""
        tip = parse(held[-1]).hash if held else GENESIS
        for raw in raws:
            entry = parse(raw)
            require(entry.hash in self.tree.known, f"{name} stores an entry that no coordinator flushed")
            require(entry.parent == tip, f"{name} stores an entry that does not follow its last")
            tip = entry.hash
        self.stored_by.setdefault(name, set()).update(raws)

    def orphans_named(self, name: str, orphans: Sequence[bytes]) -> None:
        """Every commit of a dead branch that a node held and did not lose with its disk is kept and named."""
        living = {entry.hash for entry in self.chain}
        for raw in self.stored_by.get(name, set()) - set(orphans):
            entry = parse(raw)
            lost = entry.kind is EntryKind.COMMIT and entry.hash not in living
            require(not lost, f"{name} held commit {entry.round} of a dead branch, which it does not name")

    def torn(self, name: str, raws: Sequence[bytes]) -> None:
        """A node's disk loses entries."""
        self.stored_by.get(name, set()).difference_update(raws)

    # ------------------------------------------------------------ coordinators and their journals

    def promised(self, name: str) -> Promises:
        """What a coordinator has acknowledged."""
        return self.promises.setdefault(name, Promises())

    def starts(self, name: str, journal: Sequence[Record]) -> None:
        """A coordinator starts: its journal holds the entries that it flushed, no more and no less."""
        problem = self.histories.starts(name, journal)
        require(not problem, problem)

    def journal_lost(self, name: str) -> None:
        """From now on a coordinator works on another journal: a successor's, or an old copy.

        What it acknowledged and did not commit is gone; a branch may be left behind.
        """
        self.recovering = True
        self.promises.pop(name, None)
        self.histories.forget(name)

    def journal_copied(self, name: str, twin: str) -> None:
        """A second coordinator works on a copy of the first one's journal, its key included."""
        self.recovering = self.histories.cloned = True
        self.promises[twin] = deepcopy(self.promised(name))

    def over(self, raws: Sequence[bytes]) -> bool:
        """Whether a node's ledger ends with an END: its process starts no more."""
        last = self.tree.known_raw.get(raws[-1]) if raws else None
        return last is not None and last.kind is EntryKind.END

    def told_apart(self, name: str, key: bytes, stops: Sequence[tuple[str, str]]) -> None:
        """A node rests on another END than the run's: if it worked lately, somebody's last words say so."""
        if self.tree.head is None or self.tree.head.entry.kind is not EntryKind.END:
            return  # of a copied folder's branches the one of the lower term was kept, and ended
        if key not in self.histories.recent_workers([entry.hash for entry in self.chain]):
            return
        lacking = ("not confirmed by", "not heard since")
        words = [
            told
            for _, told in stops
            if "two histories" in told
            or "two copies" in told
            or (name in told and any(how in told for how in lacking))
        ]
        require(bool(words), f"{name} rests on another END than the run's, and nobody says so")

    def at_head(self, raws: Sequence[bytes]) -> bool:
        """Whether a node's ledger is the branch with the highest term, all of it."""
        head = self.tree.head
        return bool(raws) and head is not None and raws[-1] == head.entry.raw

    # ------------------------------------------------------------ records and messages

    def caused(self, name: str, before: State, after: State, effects: Sequence[Effect], flushed: int) -> None:
        """What a coordinator did in one turn, in order; only so many of its records are on the disk."""
        promises = self.promised(name)
        for effect in effects:
            if isinstance(effect, Persist):
                flushed -= 1
                if flushed < 0:
                    return
                self._recorded(name, before, after, effect.record)
            elif isinstance(effect, Note) and effect.kind == "score" and "void" in effect.fields:
                self.void_probes.add((name, effect.fields["round"]))
            elif isinstance(effect, Send) and isinstance(effect.message, Ack):
                if effect.message.verdict == "ok" and not promises.acknowledge(effect.message.unit):
                    audit = _audited(before, after, effect.peer, effect.message.unit)
                    require(audit, "an Ack without its record")
            elif isinstance(effect, Send) and isinstance(effect.message, Assign):
                unit, parent = effect.message.unit, effect.message.parent
                known = promises.of(parent)
                again = _audited(before, after, effect.peer, unit) or not cells_of(unit) <= known
                require(again, f"{unit} is assigned although all of it was acknowledged")
        problem = self.histories.turned(name, before, after)
        require(not problem, problem)

    def _recorded(self, name: str, before: State, after: State, record: Record) -> None:
        if isinstance(record, EntryAppended):
            self.durable(name, record.height, record.raw)
        elif isinstance(record, Recovery):
            problem = self.histories.recovers(name, before, after, record)
            require(not problem, problem)
        elif isinstance(record, ResultAccepted):
            self._accepted(before, after, record.evaluator)
            self.promised(name).record(record)
        elif isinstance(record, FaultFound):
            self._distrust(name, before, after, record.key)
        elif isinstance(record, Audited):
            for key, _ in record.quarantine:
                self._distrust(name, before, after, key)

    def _distrust(self, name: str, before: State, after: State, key: bytes) -> None:
        """What this node measured in the open round counts no more."""
        numbers = {**after.numbers, **before.numbers}
        if key in numbers and before.round is not None:
            self.promised(name).drop(numbers[key], before.round.parent[:8])

    def sent(self, message: Message, coordinator: State | None) -> None:
        """A message leaves a process."""
        if isinstance(message, Commit):
            self._shown(message.height, message.entry)
        elif isinstance(message, Entries):
            for height, raw in enumerate(message.entries, message.first):
                self._shown(height, raw)
        elif isinstance(message, Result) and not self.liars:
            key = (message.unit, message.parent, message.digest)
            right = self.measured.setdefault(key, message.sums)
            require(right == message.sums, f"{message.unit} was measured twice with different sums")
        elif isinstance(message, Enrolled):
            require(coordinator is not None, "only the coordinator lets anybody in")
            self.let_in |= set(coordinator.allowed) if coordinator else set()

    def _shown(self, height: int, raw: bytes) -> None:
        known = self.tree.known.get(parse(raw).hash)
        require(known is not None and known.height == height, f"entry {height} is sent before it is flushed")

    # ------------------------------------------------------------ states

    def coordinator(self, name: str, state: State) -> None:
        """A coordinator's state after a step."""
        limit = bounds.coordinator(state)
        require(not limit, limit)
        self._guests(state)
        round = state.round
        if round is None:
            return
        for kind, member, chunk in self.promised(name).of(round.parent):
            if kind == Kind.PROBE and round.probe is None:
                continue
            cells = round.probe if kind == Kind.PROBE else round.members[member]
            known = cells is not None and cells.sums[chunk] is not None
            require(known, f"acknowledged chunk {chunk} is forgotten")
        free = sum(cells.free for cells in round.members)
        unsettled = sum(not cells.settled for cells in round.members)
        require((round.free, round.unsettled) == (free, unsettled), "the round's counters are wrong")
        require(
            all(not cells.free for cells in round.members[: round.cursor]), "the cursor passed free chunks"
        )
        self._leases(state)

    def _leases(self, state: State) -> None:
        round = state.round
        assert round is not None
        counts: dict[tuple[int, int, int], int] = {}
        for node in state.nodes.values():
            units = [lease.unit for lease in node.leases]
            require(len(units) == len(set(units)), f"{node.name} holds a lease twice")
            began = [lease.began is not None for lease in node.leases]
            require(sum(began) == min(len(units), node.hello.lanes), f"{node.name} begins more than it can")
            require(began == sorted(began, reverse=True), f"a unit waits before one that runs at {node.name}")
            for unit in units:
                for chunk in range(unit.first, unit.last + 1):
                    key = (unit.kind, unit.member, chunk)
                    counts[key] = counts.get(key, 0) + 1
        whole = [(Kind.PROBE, 0, round.probe)] if round.probe else []
        whole += [(Kind.MEMBER, k, cells) for k, cells in enumerate(round.members)]
        for kind, member, cells in whole:
            for chunk, count in enumerate(cells.leases):
                require(
                    count == counts.get((kind, member, chunk), 0), f"leases of member {member} are miscounted"
                )

    def node(self, name: str, state: NodeState) -> None:
        """A node's state after a step."""
        limit = bounds.node(state, self.lock)
        require(not limit, f"{name}: {limit}")

    def enrolled(self, key: bytes) -> None:
        """A newcomer hears that it is in."""
        require(key in self.let_in, "a newcomer was told it is in and nobody remembers")

    def _accepted(self, before: State, after: State, evaluator: int) -> None:
        """The coordinator counts a result; its state before and after."""
        states = [state for state in (before, after) if evaluator in state.numbers.values()]
        keys = [key for key, number in states[0].numbers.items() if number == evaluator]
        require(keys[0] in states[0].allowed, f"roster number {evaluator} is out and its result counts")

    def _guests(self, state: State) -> None:
        guests = state.guests
        require(not guests.allowed.keys() & guests.revoked.keys(), "a key is both in and out")
        for invite in guests.invites.values():
            require(len(set(invite.used)) == len(invite.used) <= invite.uses, "an invite was used too often")

    def picture(self, state: State) -> str | None:
        """Everything in a state, now and then."""
        self.batches += 1
        return None if self.batches % SAMPLED else _told(state)

    def folded(
        self,
        before: str | None,
        state: State,
        events: Sequence[Event],
        after: State,
        caused: Sequence[Sequence[Effect]],
    ) -> None:
        """A batch of events is the same as one after the other, and the state before it is untouched."""
        if before is None:
            return
        require(before == _told(state), "a step changed the state it started from")
        stepped, effects = state, []
        for event in events:
            stepped, found = machine.step(stepped, event)
            effects.append(found)
        require(effects == list(caused), "a batch of events caused other effects than one after the other")
        require(_told(stepped) == _told(after), "a batch of events leads elsewhere than one after the other")

    def recalled(self, live: State, again: State) -> None:
        """What the journal remembers is what the process knew."""
        require(again.guests == live.guests, "the journal recalls another list")
        require(again.chain.tip == live.chain.tip, "the journal recalls another chain")
        if live.round is None or again.round is None:
            return require(live.round is again.round, "the journal recalls another round")
        require(again.round.number == live.round.number, "the journal recalls another round")
        for mine, theirs in zip(live.round.members, again.round.members, strict=True):
            same = (mine.sums, mine.evaluators, mine.failures) == (
                theirs.sums,
                theirs.evaluators,
                theirs.failures,
            )
            require(same, "the journal recalls other rewards")

    def replica(self, entry: Entry, digest: int, name: str) -> None:
        """A node's master after an entry."""
        if self.honest and name not in self.faulty:
            right = digest_of(self.tree.known[entry.hash].master)
            require(digest == right, f"{name} differs from the replay after entry {entry.round}")
