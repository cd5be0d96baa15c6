"""Why a coordinator or peer cannot be reached at an address from here, in words.

Shell. All addresses are looked at at once and told apart within seconds: a name that does not resolve, a
closed port, a firewall that drops packets, no route, a port that hangs up, is silent or speaks otherwise.
Called by `contact.py`, `daemon.py` and `salvage.py`.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from protocol import zmtp

Place = tuple[socket.AddressFamily, tuple[object, ...]]
EXPLAIN_SECONDS = 1.5  # are enough to find out
_ZMTP = b"\xff" + bytes(8) + b"\x7f"  # how a greeting begins; sent without being asked
_NO_NAME_SERVICE = "the name service does not answer; check this machine's network and DNS"


def unresolved(addresses: Sequence[str], patience: float) -> dict[str, str]:
    """Reasons for those addresses whose host name does not resolve, or not within `patience` seconds."""

    def look(address: str, _deadline: float) -> str:
        return _places(address)[1]

    return _all_at_once(addresses, look, patience)


def obstacles(addresses: Sequence[str], patience: float) -> dict[str, str]:
    """Reasons for those addresses where nobody begins to speak ZMTP within `patience` seconds."""
    return _all_at_once(addresses, _knock, patience)


def sentence(address: str, patience: float = EXPLAIN_SECONDS) -> str:
    """Why the coordinator cannot be spoken to at an address; "" where somebody greets."""
    reason = obstacles([address], patience).get(address)
    return f"the coordinator cannot be reached. {address}: {reason}" if reason else ""


def _all_at_once(
    addresses: Sequence[str], look: Callable[[str, float], str], patience: float
) -> dict[str, str]:
    """What `look(address, deadline)` says of each address, where it says anything; only names hang."""
    answers: dict[str, str] = {}
    deadline = time.monotonic() + patience

    def ask(address: str) -> None:
        answers[address] = look(address, deadline)

    # Threads because name service blocks and cannot be told for how long; late ones are left behind.
    threads = [threading.Thread(target=ask, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + 0.2 - time.monotonic()))
    told = {address: answers.get(address, _NO_NAME_SERVICE) for address in addresses}
    return {address: reason for address, reason in told.items() if reason}


def _places(address: str) -> tuple[list[Place], str]:
    host, port = zmtp.host_and_port(address)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            return [], f"the name {host} cannot be looked up now; check its spelling and this machine's DNS"
        return [], f"there is no host of the name {host}; check its spelling"
    return [(family, place) for family, _, _, _, place in found], ""


def _knock(address: str, deadline: float) -> str:
    """Empty when somebody greets there as a ZMTP socket does at once, else what happens."""
    places, reason = _places(address)
    port = zmtp.host_and_port(address)[1]
    for k, (family, place) in enumerate(places):
        left = (deadline - time.monotonic()) / (len(places) - k)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as knock:
                knock.settimeout(max(0.1, left))
                knock.connect(place)
                return _greeting(knock, deadline)
        except OSError as error:
            reason = _why(error, port)
    return reason


def _greeting(knock: socket.socket, deadline: float) -> str:
    """What is wrong with the first byte that comes over a connection; "" for ZMTP's."""
    knock.settimeout(max(0.1, deadline - time.monotonic()))
    try:
        knock.sendall(_ZMTP)
        first = knock.recv(1)
    except TimeoutError:
        return "it accepts connections but stays silent: stopped or overloaded"
    except OSError:
        first = b""
    if not first:
        return "it accepts connections and hangs up: it is just ending, or a proxy has nothing behind it"
    return "" if _ZMTP.startswith(first) else "what listens there is something else than esnode"


def _why(error: OSError, port: int) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer at all; the host is off, or a firewall drops packets to port {port}"
    if error.errno == errno.ECONNREFUSED:
        return f"nothing listens on port {port} there: it is not running, or listens elsewhere"
    if error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return "this machine has no route there (no network, or no IPv6)"
    if error.errno == errno.EHOSTUNREACH:
        return "the host is off, or a firewall on the way rejects"
    return os.strerror(error.errno) if error.errno else str(error)
