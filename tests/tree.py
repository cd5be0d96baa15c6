"""Every entry that was ever signed in a simulated run, and what an independent replay makes of each.

Normally one chain. A successor that starts from a shorter ledger makes a branch, and the one it left is dead.
Called by `checkers.py`; `Truth` in `replica.py` computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.entries import GENESIS, CommitBody, Entry, EntryKind, ScoreBody
from tests.larder import root_of
from tests.replica import Truth, Weights


@dataclass(frozen=True, slots=True)
class Known:
    """One entry: where it stands, and the true state after it."""

    entry: Entry
    height: int
    closing: bytes  # hash of the entry that made this state: the last commit or the lock
    commits: int
    master: Weights
    scored: frozenset[int]  # states with a held-out score


class Tree:
    """All entries by hash. `head` is the tip of the branch with the highest term."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.known: dict[bytes, Known] = {}
        self.known_raw: dict[bytes, Entry] = {}
        self.roots: dict[bytes, bytes] = {}  # of a snapshot of every true state -> the commit that made it
        self.head: Known | None = None

    def add(self, entry: Entry) -> Known | None:
        """Take an entry in whose parent is known; None when it is known itself."""
        if entry.hash in self.known:
            return None
        parent = self.known.get(entry.parent)
        if parent is None:
            assert entry.parent == GENESIS and entry.kind is EntryKind.LOCK, "an entry without its parent"
            found = Known(entry, 0, entry.hash, 0, self.truth.base, frozenset())
        else:
            found = self._after(parent, entry)
        self.known[entry.hash] = found
        self.known_raw[entry.raw] = entry
        if entry.kind is EntryKind.COMMIT:
            self.roots[root_of(entry.hash, found.master)] = entry.hash
        if self.head is None or (entry.term, found.height) > (self.head.entry.term, self.head.height):
            self.head = found
        return found

    def _after(self, parent: Known, entry: Entry) -> Known:
        body = entry.body
        closing, commits, master, scored = parent.closing, parent.commits, parent.master, parent.scored
        if isinstance(body, CommitBody):
            closing, commits, master = entry.hash, commits + 1, self.truth.moved(master, entry.round, body)
        elif isinstance(body, ScoreBody):
            scored |= {body.state_round}
        return Known(entry, parent.height + 1, closing, commits, master, scored)

    def before(self, entry: Entry) -> Known | None:
        """What an entry follows; None for the first."""
        return self.known.get(entry.parent)

    def rooted(self, root: bytes, at: Known) -> bool:
        """Whether a snapshot with this root is of a state on the way to an entry."""
        commit = self.known.get(self.roots.get(root, b""))
        step: Known | None = at
        while commit is not None and step is not None and step.height > commit.height:
            step = self.known.get(step.entry.parent)
        return commit is not None and step is commit

    def chain(self, tip: bytes | None = None) -> list[Entry]:
        """The entries up to a tip, the head's by default."""
        at = self.head if tip is None else self.known[tip]
        path = []
        while at is not None:
            path.append(at.entry)
            at = self.known.get(at.entry.parent)
        return path[::-1]

    def dead(self) -> list[Entry]:
        """Entries on no way to the head."""
        living = {entry.hash for entry in self.chain()}
        return [known.entry for known in self.known.values() if known.entry.hash not in living]
