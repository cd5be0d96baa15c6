"""Asks one peer at a time for ledger entries, in the daemon's own loop: they are small.

Shell. Called by `peers.py`; `sources.py` decides whom and when, and checks what comes.
"""

from __future__ import annotations

from typing import Any

import zmq

from esnode.events import Event
from esnode.lines import Direct
from esnode.snapshotevents import FetchEntries, PeerEntries
from protocol import wire
from protocol.messages import Entries, Fetch, Message

IDLE_SECONDS = 30.0  # a connection that nobody needs is closed then
MOST_BYTES = wire.RULE_BY_TYPE[Entries].limit


class Gleaner:
    """At most one connection, to the peer that was asked last."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: the node's own CURVE key."""
        self._secret = secret
        self._context: zmq.Context[Any] = zmq.Context()
        self._line: Direct | None = None
        self._key = b""
        self._order: FetchEntries | None = None  # not sent yet
        self._until = 0.0

    def ask(self, order: FetchEntries, now: float) -> None:
        """Put the question as soon as the connection stands."""
        if order.peer.key != self._key or self._line is None:
            self._hang_up()
            self._key = order.peer.key
            self._line = Direct(self._context, self._secret, self._key, order.peer.addresses, MOST_BYTES)
        self._order, self._until = order, now + IDLE_SECONDS

    def events(self, now: float) -> list[Event]:
        """Answers since the last call."""
        line = self._line
        if line is None:
            return []
        line.watch(now)
        if self._order is not None and line.up:
            line.send(wire.encode(Fetch(self._order.first, self._order.count)))
            self._order = None
        found: list[Event] = []
        for body in line.receive():
            try:
                message: Message = wire.decode(body, "peer")
            except wire.MalformedMessage:
                self._hang_up()
                return found
            if isinstance(message, Entries):
                found.append(PeerEntries(now, self._key, message.first, message.entries))
        if now > self._until:
            self._hang_up()
        return found

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def close(self) -> None:
        """Let go of the sockets."""
        self._hang_up()
        self._context.term()
