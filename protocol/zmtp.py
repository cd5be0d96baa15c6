"""Socket settings both ends share, and what a message costs on the wire.

Lives here because coordinator and node must agree on them. Opens nothing itself: `coordinator/gate.py` and
`esnode/link.py` apply them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

HIGH_WATER = 64  # messages queued per peer and direction before sends are dropped
LINGER_MS = 0  # nothing relies on delivery, so closing never waits
FAREWELL_MS = 500  # except at a clean stop, where Bye and Release may arrive first
HANDSHAKE_MS = 10_000  # a connection that has not proved its key by then is closed
CONNECT_TIMEOUT_MS = 3_000
RECONNECT_MS = 100  # first retry; doubles up to
RECONNECT_MAX_MS = 2_000
HEARTBEAT_MS = 5_000  # the node pings, the coordinator answers; TTL makes both sides notice a dead peer
HEARTBEAT_TIMEOUT_MS = 10_000
ZAP_DOMAIN = b"esnode"
# Of a routing id that carries a key when nothing is encrypted; it may not start with zero.
PLAIN_PREFIX = b"K"

_HOST = r"[A-Za-z0-9._*-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]|[0-9A-Fa-f:.]+"  # what libzmq takes
_SHORT_FRAME, _LONG_FRAME, _SHORT_LIMIT = 2, 9, 255
_CURVE_EXTRA = 33  # "\x07MESSAGE", 8 bytes of nonce, 16 of authenticator, 1 of flags


def wire_size(body: int, encrypted: bool) -> int:
    """Bytes on the TCP stream of one message with a body of `body` bytes (TCP/IP headers apart)."""
    payload = body + _CURVE_EXTRA if encrypted else body
    return payload + (_SHORT_FRAME if payload <= _SHORT_LIMIT else _LONG_FRAME)


def monitor_event(frames: Sequence[bytes]) -> tuple[int, int]:
    """(event, its value) that a socket's monitor tells. `zmq.utils.monitor` would load asyncio for it."""
    event, value = struct.unpack("=Hi", frames[0])
    return event, value


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `tcp://HOST:PORT`; IPv6 hosts keep their brackets. ValueError when it is no such thing."""
    scheme, separator, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    right = scheme == "tcp" and separator and re.fullmatch(_HOST, host) and re.fullmatch("[0-9]{1,5}", port)
    if not right or int(port) > 65535:
        raise ValueError(f"{address!r} is no address; it should look like tcp://HOST:PORT")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Whether a `tcp://HOST:PORT` address can only be reached from this machine."""
    host, _ = host_and_port(address)
    return host in ("localhost", "[::1]") or host.startswith("127.")


def families(address: str) -> tuple[bool, ...]:
    """The ways to dial it, whether with IPv6 each: libzmq takes one address of a name, maybe a dead one."""
    host, _ = host_and_port(address)
    return (needs_ipv6(address),) if host.startswith("[") or not needs_ipv6(address) else (True, False)


def needs_ipv6(address: str) -> bool:
    """Whether the host may be an IPv6 address: every name, and what stands in brackets."""
    host, _ = host_and_port(address)
    return not (host in ("*", "localhost") or host.replace(".", "").isdecimal())
