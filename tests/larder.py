"""A simulated node's snapshots: written while it works, loaded at start, fetched from peers.

Stands for `esnode/checkpoint.py`, `transfer.py` and `donor.py`. A transfer takes time, loses donors on the
way, and meets poisoned parts. Called by `simnode.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import esnode.events as ne
from esnode.snapshotevents import (
    Fetched,
    FetchEntries,
    FetchFailed,
    Fetching,
    FetchSnapshot,
    PeerEntries,
    PeerPoisoned,
    PeerReached,
    Save,
    Saved,
)
from protocol.counting import rounds
from protocol.entries import Entry, EntryKind
from protocol.messages import Entries, Fetch
from protocol.peers import Donor
from tests.replica import Weights, digest_of

if TYPE_CHECKING:
    from tests.simnode import SimNode

KEPT = 2
SAVING = 0.2  # seconds of a write
PARTS = 8  # of a snapshot in transfer
PART_SECONDS = 0.15


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One file: the state after `round` commits, the last of which has the hash `entry`."""

    round: int
    entry: bytes
    digest: int
    master: Weights
    root: bytes  # of the master as it was written; stays what it is when the file is damaged

    @property
    def whole(self) -> bool:
        return self.root == root_of(self.entry, self.master)

    @property
    def size(self) -> int:
        return self.master.nbytes


def root_of(entry: bytes, master: Weights) -> bytes:
    """What goes into a commit: the same on every node that stands there."""
    return hashlib.blake2b(entry + master.tobytes(), digest_size=32).digest()


class Larder:
    """The snapshots on one node's disk; `files` outlives the process."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.files: list[Snapshot] = []  # the newest first
        self.poisons = False  # what it gives to others is spoiled
        self.transfer = 0  # counts transfers: an earlier one's parts are nobody's

    @property
    def listed(self) -> tuple[tuple[int, bytes, bytes, int], ...]:
        """As `Started` tells them."""
        return tuple((s.round, s.entry, s.root, s.size) for s in self.files)

    # ------------------------------------------------------------ its own

    def save(self, effect: Save) -> None:
        master = self.node.replica.master.copy()
        root = root_of(effect.entry, master)
        made = Snapshot(effect.round, effect.entry, effect.digest, master, root)
        self.node.later(SAVING, partial(self._saved, made))

    def _saved(self, made: Snapshot) -> None:
        node, ms = self.node, int(SAVING * 1000)
        reason = "no space left on device" if node.full else ""
        if not reason:
            self._keep(made)
        root, size = (b"", 0) if reason else (made.root, made.size)
        node.step(Saved(node.clock, made.round, made.entry, root, size, reason, ms))

    def _keep(self, made: Snapshot) -> None:
        others = [other for other in self.files if other.round != made.round]
        self.files = sorted((made, *others), key=lambda file: -file.round)[:KEPT]

    def load(self, entries: Sequence[Entry], *, stated: bool = False) -> tuple[int, Snapshot] | None:
        """The newest whole file that is a state of these entries, and how many of them it reflects.

        `stated`: they have to say its D.
        """
        heights = {entry.hash: k for k, entry in enumerate(entries) if entry.kind is EntryKind.COMMIT}
        for file in self.files:
            height = heights.get(file.entry)
            if height is None or digest_of(file.master) != file.digest:
                continue
            if stated and height + 1 == len(entries):
                continue
            if height + 1 < len(entries) and entries[height + 1].digest != file.digest:
                continue
            return height + 1, file
        return None

    def tear(self) -> None:
        """The newest file is damaged."""
        if self.files:
            master = self.files[0].master.copy()
            master.view(np.uint32)[0] ^= 1
            self.files[0] = replace(self.files[0], master=master)
            self.node.world.log(self.node.name, "its newest snapshot file is damaged")

    # ------------------------------------------------------------ from peers

    def fetch(self, effect: FetchSnapshot) -> None:
        self.transfer += 1
        self._next_part(effect, self.transfer, 0, effect.donors)

    def stop(self) -> None:
        self.transfer += 1

    def _next_part(self, effect: FetchSnapshot, transfer: int, done: int, donors: tuple[Donor, ...]) -> None:
        """One part after the other, from the donors in turn; who is gone or poisons is asked no more."""
        node = self.node
        if transfer != self.transfer or not node.up:
            return
        if done:
            node.step(
                Fetching(
                    node.clock, done * effect.size // PARTS, effect.size, effect.size / PARTS / PART_SECONDS
                )
            )
        if transfer != self.transfer or not node.up:
            return  # the core thought better of it
        if not donors:
            return node.step(FetchFailed(node.clock, "no donor is left"))
        donor = donors[done % len(donors)]
        peer = node.world.by_key[donor.key]
        file = next((f for f in peer.larder.files if f.root == effect.root), None)
        rest = tuple(other for other in donors if other is not donor)
        if not peer.up or file is None:
            node.step(PeerReached(node.clock, donor.key, "none", "it does not answer"))
            return node.later(1.0, partial(self._next_part, effect, transfer, done, rest))
        if peer.larder.poisons or not file.whole:
            node.step(PeerPoisoned(node.clock, donor.key, effect.root, done, "another hash"))
            return node.later(PART_SECONDS, partial(self._next_part, effect, transfer, done, rest))
        if done + 1 < PARTS:
            return node.later(PART_SECONDS, partial(self._next_part, effect, transfer, done + 1, donors))
        node.later(PART_SECONDS, partial(self._arrived, file, transfer))

    def _arrived(self, file: Snapshot, transfer: int) -> None:
        node = self.node
        if transfer != self.transfer:
            return
        if node.full:
            return node.step(FetchFailed(node.clock, "no space left on device"))
        self._keep(file)
        node.step(Fetched(node.clock, file.round, file.entry, file.root, file.size, "from peers"))

    # ------------------------------------------------------------ ledger entries

    def ask(self, effect: FetchEntries) -> None:
        """A question to a peer's ledger file and its answer: each takes its time, and may be lost."""
        node, world = self.node, self.node.world
        peer, question = world.by_key[effect.peer.key], Fetch(effect.first, effect.count)

        def answer() -> None:
            if not peer.up:
                return
            raws = tuple(entry.raw for entry in entries_held(peer)[effect.first :][: effect.count])
            if peer.larder.poisons and raws:
                raws = (raws[0][:-1] + bytes([raws[0][-1] ^ 1]), *raws[1:])
            for seconds in world.network.journeys(peer.name, node.name, Entries(effect.first, raws)):
                node.later(seconds, partial(arrive, raws))

        def arrive(raws: tuple[bytes, ...]) -> None:
            node.step(PeerEntries(node.clock, peer.key, effect.first, raws))

        for seconds in world.network.journeys(node.name, peer.name, question):
            world.after(seconds, answer)


def entries_held(node: SimNode) -> list[Entry]:
    """The entries of the ledger file that are whole, as the daemon reads them."""
    known = node.world.checkers.tree.known_raw
    found = []
    for raw in node.disk.raws:
        if raw not in known:
            break
        found.append(known[raw])
    return found


def started(node: SimNode) -> ne.Started:
    """Load the newest snapshot that fits and tell the core."""
    loaded = node.larder.load(entries_held(node))
    height = 0
    if loaded is not None:
        height, file = loaded
        node.replica.write(file.master)
        node.world.log(node.name, f"resumes from its snapshot after {rounds(file.round)}")
    disk = node.disk
    return ne.Started(
        node.clock,
        disk.term,
        tuple(disk.raws),
        height,
        node.replica.digest,
        snapshots=node.larder.listed,
        proof=disk.proof,
    )
