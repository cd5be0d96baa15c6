"""Connections from a receiver to donors: direct ones, and the one through the relay.

Shell. Lives here: DEALER sockets with the donor's key pinned, and in words why a way does not come about; and
the lines both peer processes write for the daemon. Called by `receiver.py`, `donor.py`, `gleaner.py` and
`salvage.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import zmq

from protocol import envelope, zmtp
from protocol.keys import curve_public
from protocol.peers import SLICE

DIRECT_SECONDS = 3.0  # how long a direct connection may take before the relay is used
REDIAL_SECONDS = 2.0  # after a refusal, which a newcomer gets until its roster entry is there
RETRY_RELAYED = 3.0  # a peer the relay did not find may just be reconnecting to it
MOST = max(SLICE + 4096, envelope.MAX_FRAME)
BATCH = 64  # messages taken per turn
_ENVELOPES = 256  # bytes of credit per message beyond its data
_WATCHED = (
    zmq.Event.CONNECTED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.CLOSED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_VERDICTS = (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_AUTH)
_HANDSHAKES = (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, *_VERDICTS)
CUT = "it cuts the handshake: its key is not the one expected, or it is just ending"
_WHY = {
    zmq.Event.CONNECTED: "it accepts connections and stays silent",
    zmq.Event.CONNECT_RETRIED: "nothing answers",
    zmq.Event.CLOSED: "nothing answers",
    zmq.Event.DISCONNECTED: "the connection was cut",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: CUT,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "what listens there is no peer",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not admit this node's key yet",
}


def say(**words: Any) -> None:
    """One line of JSON for the daemon that started this process."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class Wire:
    """One DEALER socket to one address, and how its connection stands."""

    def __init__(
        self, context: zmq.Context[Any], secret: bytes, key: bytes, address: str, most: int = MOST
    ) -> None:
        """`most`: bytes of the largest message taken."""
        self._to = context, secret, key, most
        self.address = address
        self.up = False
        self.reason = "no answer at all"
        self.failed = False  # in a handshake, and not by chance: that says more than the retries after it
        self._cuts = 0
        self._dial()

    def _dial(self) -> None:
        context, secret, key, most = self._to
        self._refused: float | None = None  # when; libzmq never dials again after it
        self._dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 1024),  # small questions only, bounded by the window
            (zmq.RCVHWM, zmtp.HIGH_WATER),
            (zmq.LINGER, zmtp.LINGER_MS),
            (zmq.MAXMSGSIZE, most),
            (zmq.CONNECT_TIMEOUT, zmtp.CONNECT_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, zmtp.HANDSHAKE_MS),
            (zmq.RECONNECT_IVL, zmtp.RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, zmtp.RECONNECT_MAX_MS),
            (zmq.HEARTBEAT_IVL, zmtp.HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, zmtp.HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, zmtp.needs_ipv6(self.address)),
        ):
            self._dealer.setsockopt(option, value)
        self._dealer.setsockopt(zmq.CURVE_SERVERKEY, key)
        self._dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(secret))
        self._monitor = self._dealer.get_monitor_socket(_WATCHED)
        self._dealer.connect(self.address)

    @property
    def sockets(self) -> tuple[Any, Any]:
        return (self._dealer, self._monitor)

    def watch(self) -> None:
        """Read what the socket's monitor saw; dial again a while after a refusal."""
        if self._refused is not None and time.monotonic() - self._refused > REDIAL_SECONDS:
            self.close()
            self._dial()
        while self._monitor.poll(0):
            event = zmq.Event(zmtp.monitor_event(self._monitor.recv_multipart())[0])
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.up, self.failed, self._cuts = True, False, 0
            elif event in _WHY:
                if event in _VERDICTS:
                    self._refused = time.monotonic()
                if event == zmq.Event.DISCONNECTED:
                    self.up = False
                self._cuts += event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
                self.failed = self.failed or self._cuts > 1 or event in _VERDICTS
                if not self.up and (event in _HANDSHAKES or not self.failed):
                    self.reason = _WHY[event]

    def send(self, body: bytes) -> bool:
        try:
            self._dealer.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes]:
        found = []
        for _ in range(BATCH):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 1:
                found.append(frames[0])
        return found

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)


class Direct:
    """One donor by its own addresses, all tried at once; the first that connects is used."""

    def __init__(
        self,
        context: zmq.Context[Any],
        secret: bytes,
        key: bytes,
        addresses: Sequence[str],
        most: int = MOST,
    ) -> None:
        self._since = time.monotonic()
        self._wires: list[Wire] = []
        self._bad = ""
        for address in addresses:
            try:
                zmtp.host_and_port(address)
                self._wires.append(Wire(context, secret, key, address, most))
            except (ValueError, zmq.ZMQError) as error:
                self._bad = str(error)

    @property
    def sockets(self) -> list[Any]:
        return [one for wire in self._wires for one in wire.sockets]

    @property
    def up(self) -> bool:
        return any(wire.up for wire in self._wires)

    @property
    def reason(self) -> str:
        """Why it is not up."""
        words = [f"{wire.reason} at {wire.address}" for wire in self._wires]
        return "; ".join(words) or self._bad or "it has no address"

    def given_up(self, now: float) -> bool:
        """Whether it is time to try another way."""
        return not self._wires or now - self._since > DIRECT_SECONDS

    def watch(self, now: float) -> None:
        for wire in self._wires:
            wire.watch()
        if self.up and len(self._wires) > 1:
            best = next(wire for wire in self._wires if wire.up)
            for wire in self._wires:
                if wire is not best:
                    wire.close()
            self._wires = [best]
        if self.up:
            self._since = now

    def send(self, body: bytes) -> bool:
        return any(wire.send(body) for wire in self._wires if wire.up)

    def receive(self) -> list[bytes]:
        return [body for wire in self._wires for body in wire.receive()]

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        self._wires = []


class ViaRelay:
    """All donors that cannot be dialled, through the coordinator's relay."""

    def __init__(self, context: zmq.Context[Any], secret: bytes, address: str, key: str) -> None:
        """`key`: the coordinator's public key in hex."""
        self._wire = Wire(context, secret, bytes.fromhex(key), address)
        self._why: dict[bytes, tuple[float, str]] = {}

    @property
    def sockets(self) -> tuple[Any, Any]:
        return self._wire.sockets

    @property
    def up(self) -> bool:
        return self._wire.up

    def reason(self, key: bytes) -> str:
        """Why a donor is not reached this way."""
        if not self.up:
            return f"the relay: {self._wire.reason} at {self._wire.address}"
        return f"the relay: {self._why.get(key, (0.0, 'no answer'))[1]}"

    def unreachable(self, now: float) -> set[bytes]:
        """Donors the relay has just said not to reach."""
        return {key for key, (when, _) in self._why.items() if now - when < RETRY_RELAYED}

    def watch(self) -> None:
        self._wire.watch()

    def send(self, key: bytes, granted: int, body: bytes) -> bool:
        """A question to a donor, with credit for its answer."""
        grant = granted + _ENVELOPES * (1 + granted // SLICE)
        return self._wire.send(envelope.close(key, grant, body))

    def receive(self) -> list[tuple[bytes, bytes | None]]:
        """(donor, message); None for one the relay did not reach."""
        found: list[tuple[bytes, bytes | None]] = []
        for frame in self._wire.receive():
            try:
                key, grant, payload = envelope.open_frame(frame)
            except envelope.BadEnvelope:
                continue
            if grant == envelope.NO_WAY:
                self._why[key] = (time.monotonic(), payload.decode("utf-8", "replace")[:100])
                found.append((key, None))
            else:
                found.append((key, payload))
        return found

    def close(self) -> None:
        self._wire.close()
