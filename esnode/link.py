"""The node's connection to its coordinator: one DEALER socket, and an honest word about its state.

Shell. Lives here: encryption with the coordinator's key pinned, non-blocking sends, byte counts, and the
reading of socket events that tells "nobody listens there" from "wrong key" and "not admitted". Called by
`daemon.py` and `contact.py`, each from one thread. What cannot leave at once is dropped: the node's core says
everything again when it matters.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import zmq

from protocol import wire, zmtp
from protocol.errors import UserError
from protocol.keys import curve_public
from protocol.messages import SCHEMA, Message

log = logging.getLogger(__name__)

MAX_BODY = max(rule.limit for rule in SCHEMA if rule.sender != "node")
ROTATE_SECONDS = 6.0  # with several addresses, how long one may stay silent before the next is tried
ROTATE_FAILED_SECONDS = 1.0  # and how long it may fail
SILENT_SECONDS = 5.0  # a TCP connection without a finished handshake for this long is "silent"
_WATCHED = (
    zmq.Event.CONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_RETRIES = (zmq.Event.CLOSED, zmq.Event.CONNECT_RETRIED)
_CUT_HANDSHAKES = 3  # fewer may be a coordinator that is just starting or stopping


class LinkError(UserError):
    """An address that is none."""


class State(StrEnum):
    """Where the connection stands."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    SILENT = "silent"
    WRONG_KEY = "wrong key"
    FOREIGN = "foreign"
    REFUSED = "refused"


_SENTENCES = {
    State.CONNECTING: "connecting to {address}",
    State.CONNECTED: "connected to {address}",
    State.UNREACHABLE: "nothing answers at {address}; is the coordinator running, and is the port open?",
    State.SILENT: "{address} accepts connections but does not answer: stopped or overloaded",
    State.WRONG_KEY: "{address} breaks the handshake off: its key is not the one this node expects; "
    "if a successor serves the run now, ask its operator for an invite",
    State.FOREIGN: "what listens at {address} is no encrypted esnode coordinator",
    State.REFUSED: "the coordinator at {address} does not admit this node's key {key}; ask its operator",
}


@dataclass(frozen=True, slots=True)
class Health:
    """State of the connection, one sentence about it, and since when (monotonic seconds)."""

    state: State
    sentence: str
    since: float

    @property
    def hopeless(self) -> bool:
        """Waiting will not mend it: keys have to change."""
        return self.state in (State.WRONG_KEY, State.FOREIGN, State.REFUSED)


class Link:
    """One node's side of the wire. Not thread-safe."""

    def __init__(self, addresses: Sequence[str], server_key: bytes | None, secret: bytes) -> None:
        """Start connecting. `server_key`: the coordinator's public key, or None for no encryption (loopback
        only); `secret`: the node's own CURVE secret, whose public half is its identity.
        """
        self._ways = _ways(addresses)
        self._turn = 0
        self._server_key = server_key
        self._secret = secret
        self.bytes_in: Counter[str] = Counter()
        self.bytes_out: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.connections = 0  # finished handshakes so far
        self._state = State.CONNECTING
        self._told: set[str] = set()
        self._shut: set[str] = set()  # addresses that refused this key since the last connection
        self._context: zmq.Context[Any] = zmq.Context()
        self._open()

    @property
    def address(self) -> str:
        """The address in use."""
        return self._ways[self._turn][0]

    @property
    def shut_out(self) -> bool:
        """Whether every address has refused this node's key."""
        return self._shut.issuperset(address for address, _ in self._ways)

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        """What the daemon's poll waits for; they change after `redirect` or `refresh`."""
        return (self._dealer, self._monitor)

    def send(self, message: Message) -> bool:
        """Queue one message; False when there is no connection or its queue is full."""
        kind = type(message).__name__
        body = wire.encode(message)
        try:
            self._dealer.send(body, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped[kind] += 1
            return False
        self.bytes_out[kind] += zmtp.wire_size(len(body), self._server_key is not None)
        return True

    def receive(self, limit: int = 256) -> list[Message]:
        """Every well-formed message that waits, at most `limit`; others are logged and dropped."""
        self._read_monitor()
        messages: list[Message] = []
        for _ in range(limit):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            size = zmtp.wire_size(len(frames[0]), self._server_key is not None)
            try:
                if len(frames) != 1:
                    raise wire.MalformedMessage("more than one part")
                found = wire.decode_all(frames[0])
            except wire.MalformedMessage as error:
                log.warning("a malformed message of the coordinator is dropped: %s", error)
                continue
            self.bytes_in[wire.NAMES[frames[0][1]]] += size
            messages += found
        return messages

    def health(self, now: float) -> Health:
        """How the connection stands."""
        state = self._state
        if state == State.CONNECTING and self._tcp_since and now - self._tcp_since > SILENT_SECONDS:
            state = State.SILENT
        key = curve_public(self._secret).hex()
        return Health(state, _SENTENCES[state].format(address=self.address, key=key), self._since)

    def is_news(self, health: Health) -> bool:
        """Whether its sentence was not told since the last connection: addresses that fail take turns."""
        connected = health.state == State.CONNECTED
        news = self._told != {health.sentence} if connected else health.sentence not in self._told
        self._told = {health.sentence} if connected else self._told | {health.sentence}
        return news

    def refresh(self, now: float) -> bool:
        """With several addresses, try the next when this one keeps failing; True when sockets changed.

        A name is as good as two: it may have an address of each family.
        """
        health = self.health(now)
        if len(self._ways) < 2 or health.state == State.CONNECTED:
            return False
        following = [*self._ways[self._turn + 1 :], *self._ways[: self._turn]]
        if health.hopeless:  # a name's other family leads to the same place
            following = [way for way in following if way[0] != self.address]
        if not following:
            return False
        failing = health.hopeless or health.state == State.UNREACHABLE
        if now - self._tried < (ROTATE_FAILED_SECONDS if failing else ROTATE_SECONDS):
            return False
        self._turn = self._ways.index(following[0])
        self._reopen()
        return True

    def redirect(self, addresses: Sequence[str]) -> None:
        """Use other addresses from now on: a restarted coordinator may listen elsewhere."""
        self._ways, self._turn = _ways(addresses), 0
        self._reopen()

    def close(self, farewell: bool) -> None:
        """Close; with `farewell`, give queued messages a moment to leave."""
        self._end(zmtp.FAREWELL_MS if farewell else 0)
        self._context.term()

    # ------------------------------------------------------------ socket

    def _open(self) -> None:
        self._dealer = _dealer(self._context, *self._ways[self._turn], self._server_key, self._secret)
        self._monitor = self._dealer.get_monitor_socket(_WATCHED)
        self._tried = time.monotonic()  # since when this address is tried without success
        self._tcp_since = 0.0
        self._cut = 0
        self._set(State.CONNECTING, again=True)
        self._dealer.connect(self.address)

    def _reopen(self) -> None:
        self._end(0)
        self._open()

    def _end(self, linger: int) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(linger)

    def _set(self, state: State, again: bool = False) -> None:
        if again or state != self._state:
            self._state = state
            self._since = time.monotonic()

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            self._heed(zmtp.monitor_event(self._monitor.recv_multipart())[0])

    def _heed(self, event: int) -> None:
        now = time.monotonic()
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._cut, self._tcp_since = 0, 0.0
            self._shut.clear()
            self.connections += 1
            self._set(State.CONNECTED)
        elif event == zmq.Event.CONNECTED:
            self._tcp_since = self._tcp_since or now
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._shut.add(self.address)
            self._set(State.REFUSED)
        elif event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            self._set(State.FOREIGN)
        elif event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._cut, self._tcp_since = self._cut + 1, 0.0
            if self._cut >= _CUT_HANDSHAKES:
                self._set(State.WRONG_KEY)
        elif event == zmq.Event.DISCONNECTED and self._state == State.CONNECTED:
            self._tried = now
            self._set(State.CONNECTING)
        elif event in _RETRIES and self._state == State.CONNECTING and self._cut == 0:
            self._set(State.UNREACHABLE)  # a retry after a cut handshake would say nothing new


def _ways(addresses: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """Each address, and whether to dial it with IPv6."""
    if not addresses:
        raise LinkError("no coordinator address given")
    try:
        return tuple((address, v6) for address in addresses for v6 in zmtp.families(address))
    except ValueError as error:
        raise LinkError(str(error)) from error


def _dealer(
    context: zmq.Context[Any], address: str, v6: bool, server_key: bytes | None, secret: bytes
) -> zmq.Socket[Any]:
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.IMMEDIATE, 1),  # no queue without a connection: nothing stale floods the coordinator later
        (zmq.SNDHWM, zmtp.HIGH_WATER),
        (zmq.RCVHWM, zmtp.HIGH_WATER),
        (zmq.LINGER, zmtp.LINGER_MS),
        (zmq.MAXMSGSIZE, MAX_BODY),
        (zmq.CONNECT_TIMEOUT, zmtp.CONNECT_TIMEOUT_MS),
        (zmq.HANDSHAKE_IVL, zmtp.HANDSHAKE_MS),
        # doubling, from and to a value of this node's own: a thousand nodes do not come back at one moment
        (zmq.RECONNECT_IVL, random.randint(zmtp.RECONNECT_MS, 2 * zmtp.RECONNECT_MS)),
        (zmq.RECONNECT_IVL_MAX, random.randint(zmtp.RECONNECT_MAX_MS * 3 // 4, zmtp.RECONNECT_MAX_MS)),
        (zmq.HEARTBEAT_IVL, zmtp.HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, zmtp.HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, zmtp.HEARTBEAT_TIMEOUT_MS),
        (zmq.IPV6, v6),
    ):
        dealer.setsockopt(option, value)
    if server_key is None:
        dealer.setsockopt(zmq.ROUTING_ID, zmtp.PLAIN_PREFIX + curve_public(secret))
    else:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(secret))
    return dealer
