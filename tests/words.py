"""What happens in a simulated run, in words: notes of the cores become lines that people read.

Called by `world.py` for its story and by `transcripts.py`. What happens all the time is left out there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.counting import nth, rounds

Fields = Mapping[str, Any]
QUIET = {"unit", "ack", "link", "lease", "applied"}  # in a transcript: too many, or only words to oneself


def sentence(kind: str, fields: Fields) -> str:
    """A note in words."""
    if kind == "commit":
        void = f", {fields['voids']} void" if fields["voids"] else ""
        mean = f"mean {fields['mean']:.3f}"
        return f"commits {nth(fields['round'])}: {fields['members']} members{void}, {mean}"
    if kind == "score" and "mean" in fields:
        return f"held-out score after {rounds(fields['round'])}: {fields['mean']:.3f}"
    if kind == "membership":
        reason = "" if fields["reason"] == "welcome" else f" ({fields['reason']})"
        return f"{fields['node']} {fields['what']}{reason}"
    if kind == "lease":
        return f"{fields['node']}: member {fields['member']} {fields['what']}, {fields['reason']}"
    if "what" in fields:
        kind, fields = f"{kind} {fields['what']}", {k: v for k, v in fields.items() if k != "what"}
    return f"{kind}: {', '.join(f'{name} {_plain(value)}' for name, value in fields.items())}"


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()[:16]
    return f"{value:.1f}" if isinstance(value, float) else str(value)
