"""Where other machines may dial this one: the addresses that go into an invite.

Shell (asks the kernel for this machine's interfaces). Needs no outbound connection and no name service.
Called by `server.py` once the port is known.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from protocol import invite, zmtp

MOST = 6  # addresses in an invite when nobody names them
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_INNER = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "podman")  # other machines are not there
_PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))  # reserved: nobody answers


def advertised(bound: str, named: Sequence[str]) -> tuple[str, ...]:
    """The addresses to dial for a socket bound to `bound`, the best first.

    `named` are the operator's: HOST, HOST:PORT or tcp://HOST:PORT, the port being that of `bound` by default.
    Without them: the bound host, or when that is every interface, this machine's addresses. InviteError for
    an address nobody can dial.
    """
    host, port = zmtp.host_and_port(bound)
    if named:
        return tuple(dict.fromkeys(_completed(text, port) for text in named))
    if host not in ("0.0.0.0", "[::]", "*"):
        return (bound,)
    hosts = list(dict.fromkeys(_own_hosts(with_ipv6=host == "[::]")))[:MOST] or ["127.0.0.1"]
    return tuple(f"tcp://{found}:{port}" for found in hosts)


def _completed(text: str, port: int) -> str:
    place = text.removeprefix("tcp://")
    with contextlib.suppress(ValueError):
        place = f"[{ipaddress.IPv6Address(place)}]"  # a bare IPv6 address
    if place.endswith("]") or ":" not in place:
        place = f"{place}:{port}"
    invite.check_address(f"tcp://{place}")
    return f"tcp://{place}"


def _own_hosts(with_ipv6: bool) -> Iterator[str]:
    """Hosts as they stand in an address, those of the default route first."""
    for family, target in _PROBES:
        if family == socket.AF_INET or with_ipv6:
            yield from _usable(_source(family, target))
    for name in _interfaces():
        yield from _usable(_ipv4_of(name))
    if with_ipv6:
        for found in _ipv6():
            yield from _usable(found)


def _source(family: int, target: str) -> str:
    """The address a packet to `target` would leave from; nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no route: a machine without a network has no such address
        return ""


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex() if not name.startswith(_INNER)]


def _ipv4_of(name: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            answer = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:  # an interface without an address, or no Linux
        return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6() -> list[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # no IPv6, or no Linux
        return []
    rows = [line.split() for line in lines]
    return [
        str(ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in rows if not row[5].startswith(_INNER)
    ]


def _usable(text: str) -> Iterator[str]:
    """The host part for an address others can dial: not loopback, not link-local, IPv6 in brackets."""
    if not text:
        return
    found = ipaddress.ip_address(text)
    if not (found.is_loopback or found.is_link_local or found.is_unspecified):
        yield f"[{found}]" if found.version == 6 else str(found)
