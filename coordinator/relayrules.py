"""What a relay forwards and what not: credit between each two peers, a bound on small frames, the meters.

Pure. The receiver of bulk grants its sender credit with every question, the relay keeps the account: who
sends more than it was granted is dropped and counted, so no queue of the relay can grow beyond what its
reader asked for. Called by `relay.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from protocol.envelope import FREE

MOST_CREDIT = 32 * 1024 * 1024  # bytes one peer may be owed by another
SMALL_PER_SECOND = 200.0  # small frames of one peer, on average
SMALL_AT_ONCE = 400.0
PAIRS = 4096  # accounts kept; the oldest are forgotten


@dataclass
class Meter:
    """What one peer sent and got through this relay."""

    sent: int = 0
    got: int = 0
    frames: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: float = SMALL_AT_ONCE
    since: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "sent": self.sent, "got": self.got, "frames": self.frames, "dropped": dict(self.dropped),
        }  # fmt: skip


class Accounts:
    """Credit and meters of all peers."""

    def __init__(self) -> None:
        self.meters: dict[bytes, Meter] = {}
        self._credit: dict[tuple[bytes, bytes], int] = {}  # (sender, reader) -> bytes it may send

    def admit(self, source: bytes, target: bytes, grant: int, size: int, now: float) -> str:
        """Why a frame is not forwarded; "" when it is, and then it is accounted for."""
        meter = self.meter(source)
        meter.frames += 1
        why = self._small(meter, now) if size <= FREE else self._large(source, target, size)
        if why:
            meter.dropped[why] += 1
            return why
        if grant:
            owed = self._credit.pop((target, source), 0)
            self._credit[target, source] = min(owed + grant, MOST_CREDIT)
            if len(self._credit) > PAIRS:
                del self._credit[next(iter(self._credit))]
        meter.sent += size
        self.meter(target).got += size
        return ""

    def meter(self, key: bytes) -> Meter:
        return self.meters.setdefault(key, Meter())

    def _small(self, meter: Meter, now: float) -> str:
        if meter.since:
            earned = (now - meter.since) * SMALL_PER_SECOND
            meter.tokens = min(SMALL_AT_ONCE, meter.tokens + earned)
        meter.since = now
        if meter.tokens < 1:
            return "too many small frames"
        meter.tokens -= 1
        return ""

    def _large(self, source: bytes, target: bytes, size: int) -> str:
        left = self._credit.get((source, target), 0)
        if left < size:
            return "more than its reader granted"
        self._credit[source, target] = left - size
        return ""
