"""A gate in this process with raw clients in front of it: what the tests of the coordinator's door share."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import zmq

from coordinator.enrolment import Guests
from coordinator.gate import Gate
from esnode.link import Link, State
from protocol import keys
from protocol.messages import Hello, Message, NodeBeat

SERVER, N1, N2, STRANGER = (bytes([k]) * 32 for k in (1, 2, 3, 4))
NAMES = {keys.curve_public(N1): "n1", keys.curve_public(N2): "n2"}
HELLO = Hello(1, 1, 1, bytes(32), "n", "cpu", "cpu", b"s" * 8, (b"f" * 8,), 0, b"", 1, 0, ())
BEAT = NodeBeat(1, b"t" * 8, ())


class Door:
    """A gate in this process, and raw clients in front of it."""

    def __init__(self, plain: bool = False) -> None:
        self.context = zmq.Context()
        self.gate = Gate(self.context, None if plain else SERVER, Guests(NAMES))
        self.address = self.gate.bind("tcp://127.0.0.1:0")
        self.links: list[Link] = []
        self.clients = zmq.Context()

    def link(self, secret: bytes, server: bytes | None = None) -> Link:
        link = Link([self.address], server or keys.curve_public(SERVER), secret)
        self.links.append(link)
        return link

    def raw(self, secret: bytes) -> zmq.Socket[Any]:
        """A DEALER that may send whatever it likes."""
        dealer = self.clients.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.curve_serverkey = keys.curve_public(SERVER)
        dealer.curve_secretkey, dealer.curve_publickey = secret, keys.curve_public(secret)
        dealer.connect(self.address)
        return dealer

    def pump(self, seconds: float = 0.3, until: int = 1) -> list[tuple[bytes, Message]]:
        """Serve for a while, or until this many messages were accepted."""
        found: list[tuple[bytes, Message]] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(found) < until:
            found += [(event.peer, event.message) for event in self.gate.receive(100)]
            time.sleep(0.005)
        return found

    def say(self, link: Link, message: Message, seconds: float = 3.0) -> list[tuple[bytes, Message]]:
        """Send as soon as the connection stands; what was accepted."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.pump(0.02)
            link.receive()
            if link.health(time.monotonic()).state == State.CONNECTED and link.send(message):
                return found + self.pump(1.0)
        raise AssertionError(link.health(time.monotonic()).sentence)

    def tapped(self, secret: bytes, message: Message) -> tuple[bytes, bytes, list[tuple[bytes, Message]]]:
        """A link says this over a tapped wire: bytes to the gate, bytes to the link, what was heard."""
        host, port = self.address.removeprefix("tcp://").split(":")
        seen = bytearray(), bytearray()
        with socket.create_server(("127.0.0.1", 0)) as tap:
            link = Link([f"tcp://127.0.0.1:{tap.getsockname()[1]}"], keys.curve_public(SERVER), secret)
            self.links.append(link)
            inner, _ = tap.accept()
            with inner, socket.create_connection((host, int(port))) as outer:
                inner.setblocking(False)
                outer.setblocking(False)
                said, found, deadline = False, [], time.monotonic() + 5
                while not found and time.monotonic() < deadline:
                    for source, sink, kept in ((inner, outer, seen[0]), (outer, inner, seen[1])):
                        with contextlib.suppress(BlockingIOError):
                            data = source.recv(65536)
                            kept.extend(data)
                            sink.sendall(data)
                    link.receive()
                    said = said or link.send(message)
                    found += self.pump(0.01)
        return bytes(seen[0]), bytes(seen[1]), found

    def state_of(self, link: Link, wanted: State, seconds: float = 6.0) -> str:
        """Serve until the link sees this state; its sentence."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.pump(0.02)
            link.receive()
            health = link.health(time.monotonic())
            if health.state == wanted:
                return health.sentence
        raise AssertionError(f"still {health.state}")

    def refused(self, who: str = "unknown") -> dict[str, int]:
        return dict(self.gate.counts.refused.get(who, {}))

    def close(self) -> None:
        for link in self.links:
            link.close(False)
        self.clients.destroy(0)
        self.gate.close(False)
        self.context.term()
