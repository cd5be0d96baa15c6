"""What the coordinator knows of a node as a peer of other nodes. A value, kept in the state.

Pure. `donors.py` decides with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from protocol.peers import Kept


class Peer(msgspec.Struct, frozen=True):
    """One node's word on itself and other nodes' words on it."""

    addresses: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()  # the newest round first
    given: Mapping[bytes, float] = {}  # joiner -> when it was sent here
    faults: Mapping[bytes, str] = {}  # who complained -> what about
    shunned_by: frozenset[bytes] = frozenset()  # of those, whose word counts for everybody
    ways: Mapping[bytes, tuple[str, str]] = {}  # who reaches it -> ("direct" | "relay" | "none", why)
    catching: str = ""  # how it catches up itself, with its numbers
