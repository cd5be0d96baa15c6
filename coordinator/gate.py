"""The coordinator's door: one ROUTER socket, the ZAP responder that decides who may connect, all counting.

Shell. Lives here: identity (the CURVE key of every frame, never a routing id), the rule that the newest
Hello of a key owns its address, limits, and the counters of bytes and refusals that status shows. Called by
`server.py` from one thread. Sends never block: what cannot leave at once is dropped and counted, the
heartbeat repairs it.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol import wire, zmtp
from protocol.errors import UserError
from protocol.keys import KEY_BYTES, curve_public
from protocol.messages import SCHEMA, BlobAsk, Bye, Hello, Message, Refuse, Rehello

MAX_BODY = max(rule.limit for rule in SCHEMA if rule.sender != "coordinator")
UNKNOWN = "unknown"  # the peer of a refusal when no key was proved
_REMEMBERED_STRANGERS = 16
_MANY_PARTS = "a message of more than one part came from this node; it is shut out until a restart"
_SUPERSEDED = "another connection said Hello with this key; two machines must not share one"
_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class BindError(UserError):
    """The address cannot be listened on; the sentence says why."""


@dataclass
class Counts:
    """What passed and what did not since the process began. Bytes are those on the TCP stream, framed."""

    bytes_in: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    strangers: dict[str, int] = field(default_factory=dict)

    def refuse(self, peer: str, reason: str) -> None:
        """Count one refusal under a peer's name and a fixed short reason."""
        self.refused.setdefault(peer, Counter())[reason] += 1

    def stranger(self, key: bytes) -> None:
        """Remember a well-proved key that is not on the list, so that the operator can see who knocks."""
        text = key.hex()
        if text in self.strangers or len(self.strangers) < _REMEMBERED_STRANGERS:
            self.strangers[text] = self.strangers.get(text, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, for status."""
        return {
            "bytes": {"in": dict(self.bytes_in), "out": dict(self.bytes_out)},
            "dropped": dict(self.dropped),
            "refused": {peer: dict(reasons) for peer, reasons in self.refused.items()},
            "strangers": dict(self.strangers),
        }


@dataclass(frozen=True, slots=True)
class Delivery:
    """One accepted message: the holder of which key sent it, and how many bytes it took on the wire."""

    peer: bytes
    message: Message
    size: int


class Gate:
    """The socket and everything decided per connection. `names`: admitted CURVE keys and their labels."""

    def __init__(self, context: zmq.Context[Any], secret: bytes | None, names: Mapping[bytes, str]) -> None:
        """`secret`: the coordinator's 32-byte CURVE secret, or None for no encryption (loopback only)."""
        self.names = names
        self.counts = Counts()
        self.blobs: Callable[[BlobAsk], Message] | None = None  # answers at the door, no Hello needed
        self._encrypted = secret is not None
        self._shut_out: set[bytes] = set()
        self._address: dict[bytes, bytes] = {}
        self._last: tuple[Message, bytes] | None = None
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = _router(context, secret)
        self._monitor = self._router.get_monitor_socket(_HANDSHAKE_FAILURES)

    @property
    def sockets(self) -> tuple[Any, ...]:
        """What the server's poll waits for."""
        return (self._router, self._zap, self._monitor)

    def bind(self, address: str) -> str:
        """Listen on `tcp://host:port` (port 0: any) and return the address with its real port."""
        try:
            if not self._encrypted and not zmtp.is_loopback(address):
                raise BindError(
                    f"{address} is open to other machines; unencrypted means tcp://127.0.0.1:PORT"
                )
            self._router.setsockopt(zmq.IPV6, zmtp.needs_ipv6(address))
            self._router.bind(address)
        except ValueError as error:
            raise BindError(str(error)) from error
        except zmq.ZMQError as error:
            raise BindError(_why_not_bound(address, error)) from error
        return str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))

    def receive(self, limit: int) -> list[Delivery]:
        """Every acceptable message that waits, at most `limit` frames looked at."""
        self._answer_zap()
        self._read_monitor()
        accepted = []
        for _ in range(limit):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            delivery = self._admit(frames)
            if delivery:
                accepted.append(delivery)
        return accepted

    def send(self, peer: bytes, message: Message) -> int:
        """Queue a message for the connection that last said Hello with this key.

        Returns the bytes it takes on the wire, 0 when it was dropped.
        """
        address = self._address.get(peer)
        if address is None:
            self.counts.dropped[type(message).__name__] += 1
            return 0
        return self._send_to(address, message)

    def close(self, farewell: bool) -> None:
        """Close; with `farewell`, give what was sent last a moment to be read.

        Leaving the queue is not enough: a node's libzmq throws unread messages away when the connection ends.
        """
        if farewell and self._address:
            time.sleep(zmtp.FAREWELL_MS / 1000)
        self._router.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)
        self._router.close(zmtp.FAREWELL_MS if farewell else 0)

    # ------------------------------------------------------------ one message

    def _admit(self, frames: list[zmq.Frame]) -> Delivery | None:
        route = frames[0].bytes
        peer = self._key_of(frames)
        if peer is None:
            self.counts.refuse(UNKNOWN, "no key")
            return None
        name = self.names.get(peer)
        if name is None:
            self.counts.refuse(UNKNOWN, "not on the list")
            return None
        if peer in self._shut_out:
            self.counts.refuse(name, "shut out")
            return None
        if len(frames) != 2:  # size limits hold per part, so many parts are a way around them
            self._shut_out.add(peer)
            self._address.pop(peer, None)
            self.counts.refuse(name, "more than one part")
            self._send_to(route, Refuse(_MANY_PARTS))
            return None
        body = frames[1].bytes
        size = zmtp.wire_size(len(body), self._encrypted)
        try:
            message = wire.decode(body, "node")
        except wire.MalformedMessage:
            self.counts.bytes_in["malformed"] += size
            self.counts.refuse(name, "malformed")
            return None
        self.counts.bytes_in[type(message).__name__] += size
        if isinstance(message, BlobAsk) and self.blobs is not None:
            self._send_to(route, self.blobs(message))
            return None
        if not self._owns_address(peer, route, message):
            return None
        return Delivery(peer, message, size)

    def _owns_address(self, peer: bytes, route: bytes, message: Message) -> bool:
        current = self._address.get(peer)
        if isinstance(message, Hello):
            if current is not None and current != route:
                self._send_to(current, Bye(_SUPERSEDED))
            self._address[peer] = route
        elif current != route:
            self.counts.refuse(self.names[peer], "before Hello")  # usual after a reconnect
            self._send_to(route, Rehello())
            return False
        return True

    def _key_of(self, frames: list[zmq.Frame]) -> bytes | None:
        if not self._encrypted:
            route = frames[0].bytes
            return route[1:] if len(route) == 1 + KEY_BYTES and route[:1] == zmtp.PLAIN_PREFIX else None
        try:
            return bytes.fromhex(str(frames[-1].get("User-Id")))
        except (zmq.ZMQError, ValueError):
            return None

    def _encode(self, message: Message) -> bytes:
        if self._last is None or self._last[0] is not message:  # a commit goes to everybody: encode it once
            self._last = (message, wire.encode(message))
        return self._last[1]

    def _send_to(self, route: bytes, message: Message) -> int:
        kind = type(message).__name__
        body = self._encode(message)
        try:
            self._router.send_multipart([route, body], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counts.dropped[kind] += 1
            return 0
        size = zmtp.wire_size(len(body), self._encrypted)
        self.counts.bytes_out[kind] += size
        return size

    # ------------------------------------------------------------ connections

    def _answer_zap(self) -> None:
        """Decide every handshake that waits (ZeroMQ RFC 27): only CURVE, only listed keys; User-Id = key."""
        while self._zap.poll(0):
            version, request, _domain, _address, _identity, mechanism, *proof = self._zap.recv_multipart()
            status, text, user = b"400", b"not on the list", b""
            key = proof[0] if mechanism == b"CURVE" and proof else b""
            if key in self.names and key not in self._shut_out:
                status, text, user = b"200", b"OK", key.hex().encode()
            else:
                name = self.names.get(key)
                self.counts.refuse(name or UNKNOWN, "shut out" if name else "not on the list")
                if name is None:
                    self.counts.stranger(key)
            self._zap.send_multipart([version, request, status, text, user, b""])

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            reason = _handshake_failure(event["event"], event["value"])
            if reason:
                self.counts.refuse(UNKNOWN, reason)


def _router(context: zmq.Context[Any], secret: bytes | None) -> zmq.Socket[Any]:
    router: zmq.Socket[Any] = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, zmtp.HIGH_WATER)
    router.setsockopt(zmq.RCVHWM, zmtp.HIGH_WATER)
    router.setsockopt(zmq.LINGER, zmtp.LINGER_MS)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_BODY)
    router.setsockopt(zmq.HANDSHAKE_IVL, zmtp.HANDSHAKE_MS)
    router.setsockopt(zmq.TCP_KEEPALIVE, 1)  # for peers that vanish without having announced a heartbeat
    router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    router.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if secret is None:
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # the routing id is the key here, and a reconnect reuses it
    else:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        router.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(secret))
        router.setsockopt(zmq.ZAP_DOMAIN, zmtp.ZAP_DOMAIN)
    return router


def _why_not_bound(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another program; choose another port, or port 0 for any free one"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{address} is no address of this machine; use 127.0.0.1, 0.0.0.0 or one of its own"
    if error.errno == errno.EACCES:
        return f"no permission to listen on {address}; choose a port above 1023"
    return f"cannot listen on {address}: {os.strerror(error.errno or 0)}"


def _handshake_failure(event: int, value: int) -> str | None:
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return None  # counted where it was decided
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "not encrypted"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "wrong coordinator key"
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        return "broken handshake"
    return "handshake cut short"
