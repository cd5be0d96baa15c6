"""How much one peer may send, decided before a byte of it is parsed: two token buckets per key.

Pure arithmetic over a clock that is handed in. Called by `gate.py`, which drops and counts what is over the
limit; honest nodes repeat by themselves what mattered. ZeroMQ takes turns between connections, so a flood of
one peer never keeps another's messages from being read.
"""

from __future__ import annotations

from typing import NamedTuple

TOO_MANY = "too many messages"
TOO_MUCH = "too many bytes"


class Rate(NamedTuple):
    """What a peer may send on average, and at once after it was quiet."""

    messages: float  # per second
    message_burst: float
    bytes: float  # per second
    byte_burst: float


# A node returns one Result per unit, beats every 2 s and fetches now and then. 20,000 results a second over
# 1,000 nodes are 20 each; one fast node that is given many small units may reach some hundred. The largest
# message a node may send is 8 MB of ledger entries.
NODE = Rate(2_000, 8_000, 8e6, 64e6)
# A Hello that is refused is logged and kept in words, so it has a rate of its own; a node that finds no rest
# says it every second or two.
GREETER = Rate(2, 30, 1, 1)
# Each Fetch may bring a large answer: a node asks again when it has checked the last one's signatures.
FETCHER = Rate(100, 300, 1, 1)
# Behind an invite there is one question, repeated every few seconds; one invite may be for many machines.
NEWCOMER = Rate(5, 200, 5e3, 200e3)


class Limits:
    """The buckets of all peers under one rate. One entry per admitted key that ever sent anything."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._levels: dict[bytes, list[float]] = {}  # messages and bytes left, as of when

    def spend(self, peer: bytes, size: int, now: float) -> str:
        """Take one message of `size` bytes from the peer's buckets; a short reason when it is too much."""
        level = self._levels.get(peer)
        if level is None:
            level = self._levels[peer] = [self._rate.message_burst, self._rate.byte_burst, now]
        messages, left, since = level
        if now > since:
            rate, burst, byte_rate, byte_burst = self._rate
            level[2] = now
            messages += (now - since) * rate
            level[0] = messages = messages if messages < burst else burst
            left += (now - since) * byte_rate
            level[1] = left = left if left < byte_burst else byte_burst
        if messages < 1:
            return TOO_MANY
        if left < size:
            return TOO_MUCH  # what is dropped costs nothing: the next one passes as soon as there is room
        level[0], level[1] = messages - 1, left - size
        return ""
