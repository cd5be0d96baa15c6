"""The coordinator's door: one ROUTER socket, the ZAP responder that decides who may connect, all counting.

Shell. Lives here: identity (the CURVE key of every frame, never a routing id), the live list of keys and what
each may say, limits, and the rule that the newest Hello of a key owns its address. Called by `server.py` from
one thread. Sends never block: what cannot leave at once is dropped and counted, the heartbeat repairs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from coordinator import sockets
from coordinator.counts import Counts
from coordinator.enrolment import Guests
from coordinator.events import Received
from coordinator.holders import SUPERSEDED, Holders
from coordinator.limits import FETCHER, GREETER, NEWCOMER, NODE, Limits
from protocol import wire, zmtp
from protocol.errors import UserError
from protocol.keys import KEY_BYTES
from protocol.logfile import why_not_bound
from protocol.messages import BlobAsk, Bye, Enrol, Enrolled, Fetch, Hello, Message, Refuse, Rehello

UNKNOWN = "unknown"  # the peer of a refusal when no admitted key was proved
SHARED_BYTES = 1024  # a larger body is not copied per peer
NEWCOMERS = "newcomers"  # the peers behind invites
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # flags of an enum take microseconds to join
_IN_BUNDLE = 2  # bytes that a message costs there besides its own
_KEYS = 8192  # spelled keys remembered
_PENDING_NEWCOMERS = 4096  # connections that wait for the answer to an Enrol: for one turn of the server
_MANY_PARTS = (
    "a message of more than one part came under this node's key; it is shut out until the coordinator is "
    "restarted. If it was not this machine, revoke the key"
)
_AT_THE_DOOR = (Enrol, BlobAsk, Hello)
_ONLY_ENROL = "an invite's key may say Enrol and nothing else"

log = logging.getLogger(__name__)


class BindError(UserError):
    """The address cannot be listened on; the sentence says why."""


class Gate:
    """The socket and everything decided per connection. `guests`: the keys that are let in, see `admit`."""

    def __init__(self, context: zmq.Context[Any], secret: bytes | None, guests: Guests) -> None:
        """`secret`: the coordinator's 32-byte CURVE secret, or None for no encryption (loopback only)."""
        self.guests = guests
        self.counts = Counts()
        self.blobs: Callable[[bytes, BlobAsk], Message] | None = None  # answers at the door, no Hello needed
        self._encrypted = secret is not None
        self._shut_out: set[bytes] = set()
        self._holders = Holders(self._send_to)
        self._newcomers: dict[bytes, bytes] = {}  # permanent key -> connection that asked to enrol it
        self._of_nodes, self._of_newcomers = Limits(NODE), Limits(NEWCOMER)
        self._hellos = Limits(GREETER)
        self._fetches = Limits(FETCHER)
        self._now = 0.0
        self._keys: dict[Any, bytes] = {}  # User-Id -> the key it spells
        self._waiting: dict[bytes, list[bytes]] = {}  # route -> frames that leave with `flush`
        self._last: tuple[Message, bytes] | None = None
        self._shared: tuple[bytes, zmq.Frame] | None = None  # a large frame: one copy for all peers
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = sockets.router(context, secret)
        self._put = partial(zmq.backend.Socket.send, self._router)  # pyzmq's own takes three times as long
        self._monitor = self._router.get_monitor_socket(sockets.WATCHED)

    def admit(self, guests: Guests) -> None:
        """Use another list from now on. A key taken off it is unheard from the next frame on."""
        fresh = guests.allowed.keys() - self.guests.allowed.keys()
        self._shut_out -= fresh  # the operator let it in again
        self._holders.keep(guests.allowed.keys())
        self.guests = guests

    def place(self, peer: bytes) -> str:
        """The network address that a node's connection comes from; empty when there is none."""
        return self._holders.place(peer)

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
            raise BindError(why_not_bound(address, error.errno)) from error
        return str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))

    def receive(self, limit: int) -> list[Received]:
        """Every acceptable message that waits, at most `limit` frames looked at."""
        self._now = time.monotonic()
        self._answer_zap()
        self._read_monitor()
        accepted = []
        receive, admit = self._router.recv, self._admit
        for _ in range(limit):
            try:
                route = receive(_NOW)
            except zmq.Again:
                break
            event = admit(route, receive(_NOW, copy=False))
            if event is not None:
                accepted.append(event)
        return accepted

    def send(self, peer: bytes, message: Message) -> int:
        """Keep a message for the connection that last said Hello with this key: it leaves with `flush`.

        The answer to an Enrol goes to the connection that asked for this key. Returns the bytes the message
        takes on the wire, 0 when there is nobody to send it to.
        """
        address = self._holders.routes.get(peer)
        if self._newcomers and isinstance(message, Enrolled | Refuse):
            address = self._newcomers.pop(peer, address)
        if address is None:
            self.counts.dropped[type(message).__name__] += 1
            return 0
        frame = self._encode(message)
        waiting = self._waiting.get(address)
        if waiting is None:
            self._waiting[address] = [frame]
            return zmtp.wire_size(len(frame), self._encrypted)
        waiting.append(frame)
        return len(frame) + _IN_BUNDLE

    def flush(self) -> None:
        """Send what was kept: to each connection in as few frames as can be."""
        waiting, self._waiting = self._waiting, {}
        for route, frames in waiting.items():
            for group, frame in wire.bundles(frames):
                self._send_frame(route, frame, group)
        self._shared = None

    def close(self, farewell: bool) -> None:
        """Close; with `farewell`, give what was sent last a moment to be read.

        Leaving the queue is not enough: a node's libzmq throws unread messages away when the connection ends.
        """
        if farewell and self._holders.routes:
            time.sleep(zmtp.FAREWELL_MS / 1000)
        self._router.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)
        self._router.close(zmtp.FAREWELL_MS if farewell else 0)

    # ------------------------------------------------------------ one message

    def _admit(self, route: bytes, part: zmq.Frame) -> Received | None:
        """What came from a connection, if it is to be heard. `part`: the first after the route."""
        peer = self._key_of(route, part)
        body, more = part.bytes, part.more
        size = zmtp.wire_size(len(body), self._encrypted) + (self._skip_parts() if more else 0)
        if peer is None:
            self.counts.refuse(UNKNOWN, "no key")
            return None
        label = self.guests.allowed.get(peer)
        name = label or self._name_of(peer)
        reason = self._barred(peer) if label is None or self._shut_out else ""
        limits = self._of_newcomers if label is None else self._of_nodes
        reason = reason or limits.spend(peer, size, self._now)
        if reason:
            self.counts.refuse(name, reason)
            return None
        if more:  # size limits hold per part, so many parts are a way around them
            self._shut(peer, name, route)
            return None
        try:
            message = wire.decode(body, "node")
        except wire.MalformedMessage as error:
            self.counts.bytes_in["malformed"] += size
            oversized = isinstance(error, wire.OversizedMessage)
            self.counts.refuse(name, "oversized" if oversized else "malformed")
            return None
        self.counts.bytes_in[type(message).__name__] += size
        if not self._may_say(peer, name, route, message, part):
            return None
        return Received(self._now, peer, message, size)

    def _skip_parts(self) -> int:
        """Read the other parts of a message, of which nothing is kept; their bytes."""
        size, more = 0, True
        while more:
            part = self._router.recv(_NOW, copy=False)
            size, more = size + len(part), part.more
        return size

    def _name_of(self, peer: bytes) -> str:
        return self.guests.allowed.get(peer) or (NEWCOMERS if peer in self.guests.invites else UNKNOWN)

    def _barred(self, peer: bytes) -> str:
        """Why a key has no business here at all; empty when it has."""
        if peer in self._shut_out:
            return "shut out"
        if peer in self.guests.allowed or peer in self.guests.invites:
            return ""
        return "revoked key" if peer in self.guests.revoked else "not on the list"

    def _shut(self, peer: bytes, name: str, route: bytes) -> None:
        """Bar a key for good, and tell the sender as well as the node that uses it, if they differ."""
        self.counts.refuse(name, "more than one part")
        log.warning("%s is shut out: a message of more than one part came under its key", name)
        self._shut_out.add(peer)
        for address in {route, self._holders.drop(peer) or route}:
            self._send_to(address, Refuse(_MANY_PARTS))

    def _may_say(self, peer: bytes, name: str, route: bytes, message: Message, part: zmq.Frame) -> bool:
        if peer in self.guests.invites:
            return self._from_newcomer(route, message)
        if isinstance(message, _AT_THE_DOOR):
            return self._before_hello(peer, name, route, message, part)
        if self._holders.routes.get(peer) != route:
            self.counts.refuse(name, "before Hello")  # usual after a reconnect
            self._send_to(route, Rehello())
            return False
        if isinstance(message, Fetch) and self._fetches.spend(peer, 0, self._now):
            self.counts.refuse(name, "too many Fetches")
            return False
        return True

    def _before_hello(
        self, peer: bytes, name: str, route: bytes, message: Enrol | BlobAsk | Hello, part: zmq.Frame
    ) -> bool:
        """What a connection may say before it holds its key."""
        if isinstance(message, Enrol):  # its answer would go to another key's connection
            self.counts.refuse(name, "Enrol without an invite")
            return False
        if isinstance(message, BlobAsk):
            if self.blobs is not None:
                self._send_to(route, self.blobs(peer, message))
            return False
        if self._hellos.spend(peer, 0, self._now):
            self.counts.refuse(name, "too many Hellos")
            return False
        return self._on_hello(peer, name, route, _origin(part))

    def _from_newcomer(self, route: bytes, message: Message) -> bool:
        if not isinstance(message, Enrol):
            self.counts.refuse(NEWCOMERS, "not an Enrol")
            self._send_to(route, Refuse(_ONLY_ENROL))
            return False
        while len(self._newcomers) >= _PENDING_NEWCOMERS:
            del self._newcomers[next(iter(self._newcomers))]
        self._newcomers[message.key] = route
        return True

    def _on_hello(self, peer: bytes, name: str, route: bytes, place: str) -> bool:
        held = self._holders.routes.get(peer) is not None
        refusal = self._holders.claim(peer, route, place, self._now)
        if refusal == SUPERSEDED:
            self.counts.refuse(name, "late Hello")
            self._send_to(route, Bye(SUPERSEDED))
        elif refusal:
            self.counts.refuse(name, "two machines use one key")
            self._send_to(route, Refuse(refusal))
            if held:  # the moment they were found out; what follows is only counted
                log.warning("%s: %s", name, refusal)
        return not refusal

    def _key_of(self, route: bytes, part: zmq.Frame) -> bytes | None:
        if not self._encrypted:
            return route[1:] if len(route) == 1 + KEY_BYTES and route[:1] == zmtp.PLAIN_PREFIX else None
        try:
            user = part.get(b"User-Id")
            key = self._keys.get(user)
            if key is None:
                key = bytes.fromhex(str(user))
                if len(self._keys) >= _KEYS:
                    self._keys.clear()
                self._keys[user] = key
            return key
        except (zmq.ZMQError, ValueError):
            return None

    def _encode(self, message: Message) -> bytes:
        if self._last is None or self._last[0] is not message:  # a commit goes to everybody: encode it once
            self._last = (message, wire.encode(message))
        return self._last[1]

    def _send_to(self, route: bytes, message: Message) -> int:
        """Send to a connection at once; the bytes on the wire, 0 when it is gone or takes nothing more."""
        frame = self._encode(message)
        return self._send_frame(route, frame, (frame,))

    def _send_frame(self, route: bytes, frame: bytes, frames: Sequence[bytes]) -> int:
        """A frame and those it carries; its bytes on the wire, 0 when it was dropped."""
        try:
            self._put(route, _MORE)
            if len(frame) > SHARED_BYTES:
                self._router.send(self._share(frame), _NOW, copy=False)
            else:
                self._put(frame, _NOW)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counts.dropped.update(wire.NAMES[frame[1]] for frame in frames)
            return 0
        size = rest = zmtp.wire_size(len(frame), self._encrypted)
        out = self.counts.bytes_out
        for inner in frames[1:]:
            share = len(inner) + _IN_BUNDLE
            out[wire.NAMES[inner[1]]] += share
            rest -= share
        out[wire.NAMES[frames[0][1]]] += rest
        return size

    def _share(self, frame: bytes) -> zmq.Frame:
        if self._shared is None or self._shared[0] is not frame:
            self._shared = (frame, zmq.Frame(frame))
        return self._shared[1]

    # ------------------------------------------------------------ connections

    def _answer_zap(self) -> None:
        """Decide every handshake that waits (ZeroMQ RFC 27): only CURVE, only listed keys; User-Id = key."""
        while self._zap.poll(0):
            version, request, _domain, address, _identity, mechanism, *proof = self._zap.recv_multipart()
            status, text, user = b"400", b"not on the list", b""
            key = proof[0] if mechanism == b"CURVE" and proof else b""
            reason = self._barred(key)
            if not reason:
                status, text, user = b"200", b"OK", key.hex().encode()
            else:
                self.counts.refuse(self._name_of(key), reason)
                if reason == "not on the list" and self.counts.stranger(key):
                    place = address.decode("ascii", "replace")
                    log.info("a key that is not on the list knocks from %s: %s", place, key.hex())
            self._zap.send_multipart([version, request, status, text, user, b""])

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event, value = zmtp.monitor_event(self._monitor.recv_multipart())
            if event == zmq.Event.ACCEPTED:
                self.counts.connections["accepted"] += 1
            elif event == zmq.Event.DISCONNECTED:  # among them those that sent a frame too large
                self.counts.connections["ended"] += 1
            else:
                reason = sockets.handshake_failure(event, value)
                if reason:
                    self.counts.refuse(UNKNOWN, reason)


def _origin(part: zmq.Frame) -> str:
    """The network address a message came from, as libzmq saw it."""
    try:
        return str(part.get("Peer-Address"))
    except zmq.ZMQError:
        return "?"
