"""Which connection speaks for which key: the one that said Hello last, unless two machines take turns.

A Hello of an older connection than the holder's is late: a machine whose packets were lost for a while is
back on a new connection before what it said on the old one arrives.

Pure bookkeeping over a clock and a way to tell a connection something, both handed in. Called by `gate.py`.
A machine that comes back after its old connection died takes no key from anybody; a swap is counted only when
the old connection can still be told, and three of them within a minute mean two machines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from protocol.messages import Bye, Message, Refuse

MAX_SWAPS = 3
SWAP_SECONDS = 60.0  # in which they count, and how long both are refused then
ROUTE_BYTES = 5
SUPERSEDED = "another connection said Hello with this key; two machines must not share one"
TWO_MACHINES = (
    "two machines use one key: connections from {} and {} took it from each other {} times within a minute; "
    "give one of them its own key (join again with a new invite). The other may return in a minute"
)


class Holders:
    """The holder of every key that said Hello. Bounded by the list of admitted keys.

    `routes`: where messages for a key go, libzmq's routing id of its connection; only read by others.
    """

    def __init__(self, tell: Callable[[bytes, Message], int]) -> None:
        """`tell(route, message)` sends at once; 0 when the connection is gone or takes nothing more."""
        self.routes: dict[bytes, bytes] = {}
        self._tell = tell
        self._places: dict[bytes, str] = {}  # the network address it comes from
        self._swaps: dict[bytes, list[float]] = {}
        self._refused: dict[bytes, tuple[float, str]] = {}  # until when, and why

    def place(self, peer: bytes) -> str:
        """The network address a key's connection comes from; empty when there is none."""
        return self._places.get(peer, "")

    def drop(self, peer: bytes) -> bytes | None:
        """Forget a key's connection; its route, should it have to be told."""
        self._places.pop(peer, None)
        return self.routes.pop(peer, None)

    def keep(self, peers: Collection[bytes]) -> None:
        """Forget the connections of all other keys."""
        for peer in self.routes.keys() - peers:
            self.drop(peer)

    def claim(self, peer: bytes, route: bytes, place: str, now: float) -> str:
        """A Hello over this connection. Empty: it holds the key now; else why it is refused.

        SUPERSEDED: it is older than the connection that holds the key.
        """
        until, words = self._refused.get(peer, (0.0, ""))
        if now < until:
            return words
        old = self.routes.get(peer)
        if old is not None and _older(route, old):
            return SUPERSEDED
        if old is not None and old != route:
            swaps = [at for at in self._swaps.get(peer, []) if now - at < SWAP_SECONDS]
            words = ""
            if len(swaps) + 1 >= MAX_SWAPS:
                words = TWO_MACHINES.format(self.place(peer), place, MAX_SWAPS)
            if self._tell(old, Refuse(words) if words else Bye(SUPERSEDED)):
                swaps.append(now)
                if words:
                    self._refused[peer] = (now + SWAP_SECONDS, words)
                    del self._swaps[peer]
                    self.drop(peer)
                    return words
            self._swaps[peer] = swaps
        self.routes[peer], self._places[peer] = route, place
        return ""


def _older(route: bytes, other: bytes) -> bool:
    """Whether a connection stood before another one: libzmq counts its routing ids up after a zero byte."""
    if len(route) != ROUTE_BYTES or len(other) != ROUTE_BYTES:
        return False  # without encryption nodes name themselves
    ahead = (int.from_bytes(other, "big") - int.from_bytes(route, "big")) % 2**32
    return 0 < ahead < 2**31
