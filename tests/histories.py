"""The journal of each coordinator as an observer sees it: one path of entries that only grows.

Only a successor that still waits may cut its own, and only to take over a stronger one. Every entry of a
branch, living or dead, therefore follows the last one that its own coordinator flushed. Methods return what
is wrong, "" for nothing. Called by `checkers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.events import EntryAppended, Record, Recovery
from coordinator.state import State
from coordinator.terms import ERA
from protocol.chain import Chain
from protocol.entries import CommitBody, Entry, EntryKind, RosterBody, parse, public_key
from protocol.terms import common, signed_twice
from tests.tree import Tree

LAST = 8  # commits whose evaluators a successor counts


class Histories:
    """`paths`: hashes of the entries in each coordinator's journal, in order."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.paths: dict[str, list[bytes]] = {}
        self.cut: dict[str, tuple[int, int]] = {}  # term and height that a coordinator gave up in this turn
        self.starters: dict[tuple[int, bytes], bytes] = {}  # term and signing key -> start
        self.promised: dict[bytes, set[bytes]] = {}  # node -> proofs of the terms it put on its disk
        self.begun: dict[
            bytes, tuple[str, int]
        ] = {}  # tip -> the unforced successor that began there, its term
        self.cloned = False  # whether two coordinators sign as one

    def starts(self, name: str, journal: Sequence[Record]) -> str:
        path: list[bytes] = []
        for record in journal:
            if isinstance(record, EntryAppended):
                path.append(parse(record.raw).hash)
            elif isinstance(record, Recovery) and not record.open:
                del path[record.height :]
        known = self.paths.setdefault(name, path)
        return "" if path == known else f"the journal of {name} holds other entries than it flushed"

    def promises(self, key: bytes, proof: bytes) -> None:
        """A node has put the proof of a term on its disk: it answers no other of this number."""
        self.promised.setdefault(key, set()).add(proof)

    def forget(self, name: str) -> None:
        self.paths.pop(name, None)

    def append(self, name: str, height: int, entry: Entry) -> str:
        path = self.paths.setdefault(name, [])
        if height != len(path) or (path and entry.parent != path[-1]):
            return f"{name} flushes entry {height}, which does not follow the last of its {len(path)}"
        path.append(entry.hash)
        return ""

    def recovers(self, name: str, before: State, after: State, record: Recovery) -> str:
        """A successor waits, drops its last entries for a stronger branch, or begins."""
        path = self.paths[name]
        if record.open:
            return self._begins(name, after)
        if record.height == len(path):
            return ""  # it starts to wait
        if not before.lineage.waiting:
            return f"{name} drops entries, and is no successor that waits"
        self.cut[name] = self._rank(path)
        del path[record.height :]
        return ""

    def turned(self, name: str, before: State, after: State) -> str:
        """The end of a turn that was flushed whole."""
        given_up, path = self.cut.pop(name, None), self.paths.get(name, [])
        if given_up is not None and self._rank(path) <= given_up:
            return f"{name} left a chain of term and height {given_up} for one of {self._rank(path)}"
        for digest in path[before.chain.height :]:
            entry = self.tree.known[digest].entry
            if entry.nonce != after.nonce or self.cloned:
                continue
            if self.starters.setdefault((entry.term, public_key(after.key)), entry.nonce) != entry.nonce:
                return f"term {entry.term} of one key was started twice"
        return ""

    def _rank(self, path: Sequence[bytes]) -> tuple[int, int]:
        return (self.tree.known[path[-1]].entry.term, len(path)) if path else (0, 0)

    def _begins(self, name: str, after: State) -> str:
        """Those who did more than half of the recent work have answered, nobody showed a stronger chain."""
        path = self.paths[name]
        for branch in after.lineage.branches.values():
            if (branch.term, branch.height) > self._rank(path) and not _chosen_against(after, branch):
                return f"{name} begins at {self._rank(path)}, a node showed {(branch.term, branch.height)}"
        rows = [key for key in self.recent_workers(path) if key not in after.guests.revoked]
        shown = {*after.nodes, *after.lineage.branches}
        heard = sum(key in shown and after.term_proof in self.promised.get(key, ()) for key in rows)
        ended = self.tree.known[path[-1]].entry.kind is EntryKind.END  # then it opens no round
        if rows and 2 * heard <= len(rows) and not after.lineage.force and not ended:
            return f"{name} begins although {heard} of {len(rows)} recent members are heard"
        if rows and not (ended or after.lineage.force or after.guests.revoked or self.cloned):
            other, term = self.begun.setdefault(path[-1], (name, after.term))
            # Started again after it had yielded to that era, it takes over.
            took_over = after.lineage.seen // ERA >= term // ERA
            if other != name and not took_over:
                return f"{name} and {other} both begin behind one entry, and nobody forced either"
        return ""

    def recent_workers(self, path: Sequence[bytes]) -> list[bytes]:
        """CURVE keys of those who evaluated the members of the last commits, without revoked ones."""
        entries = [self.tree.known[digest].entry for digest in path]
        rosters = [entry.body for entry in entries if isinstance(entry.body, RosterBody)]
        keys = {row.number: row.key for body in rosters for row in body.admitted}
        for number in (number for body in rosters for number in body.revoked):
            del keys[number]  # it cannot answer: nobody waits for it
        bodies = [entry.body for entry in entries if isinstance(entry.body, CommitBody)][-LAST:]
        evaluators = [member.evaluator for body in bodies for member in body.members]
        return [keys[number] for number in evaluators if number in keys]


def _chosen_against(after: State, branch: Chain) -> bool:
    """Whether one key signed two histories, and the ledger that the operator kept holds the other one."""
    shared = common(after.chain, branch)
    twice = any(signed_twice(after.chain, entry) for entry in branch.entries[shared:])
    return twice and shared < after.lineage.given
