"""What passed the gate and what did not, since the process began: the numbers behind status.

Shell's plain data, no sockets. Every table is bounded: names come from the list of admitted keys, reasons and
message types are fixed, keys of strangers are kept up to a number. Filled by `gate.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

REMEMBERED_STRANGERS = 16


@dataclass
class Counts:
    """Bytes are those on the TCP stream, framed; refusals are kept by peer and reason."""

    bytes_in: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)
    connections: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    strangers: dict[str, int] = field(default_factory=dict)

    def refuse(self, peer: str, reason: str) -> None:
        """Count one refusal under a peer's name and a fixed short reason."""
        self.refused.setdefault(peer, Counter())[reason] += 1

    def stranger(self, key: bytes) -> bool:
        """Remember a well-proved key that is not on the list, so that the operator can see who knocks.

        True when it is new.
        """
        text = key.hex()
        new = text not in self.strangers
        if new and len(self.strangers) >= REMEMBERED_STRANGERS:
            return False
        self.strangers[text] = self.strangers.get(text, 0) + 1
        return new

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, for status."""
        return {
            "bytes": {"in": dict(self.bytes_in), "out": dict(self.bytes_out)},
            "connections": dict(self.connections),
            "dropped": dict(self.dropped),
            "refused": {peer: dict(reasons) for peer, reasons in self.refused.items()},
            "strangers": dict(self.strangers),
        }
