"""The coordinator's ROUTER socket as it must be before it binds, and what libzmq's events about it mean.

Shell. Called by `gate.py`; opens nothing but the socket itself.
"""

from __future__ import annotations

from typing import Any

import zmq

from protocol import zmtp
from protocol.keys import curve_public
from protocol.messages import SCHEMA

MAX_BODY = max(rule.limit for rule in SCHEMA if rule.sender != "coordinator")
WATCHED = (
    zmq.Event.ACCEPTED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


def router(context: zmq.Context[Any], secret: bytes | None) -> zmq.Socket[Any]:
    """A ROUTER with every option set; CURVE with the 32-byte `secret`, or no encryption at all for None."""
    socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, zmtp.HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, zmtp.HIGH_WATER)
    socket.setsockopt(zmq.LINGER, zmtp.LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY)
    socket.setsockopt(zmq.HANDSHAKE_IVL, zmtp.HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # for peers that vanish without having announced a heartbeat
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if secret is None:
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # the routing id is the key here, and a reconnect reuses it
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(secret))
        socket.setsockopt(zmq.ZAP_DOMAIN, zmtp.ZAP_DOMAIN)
    return socket


def handshake_failure(event: int, value: int) -> str | None:
    """A short reason for a failed handshake, or None when it is counted where it was decided."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return None  # counted where it was decided
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "not encrypted"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "wrong coordinator key"
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        return "broken handshake"
    return "handshake cut short"
