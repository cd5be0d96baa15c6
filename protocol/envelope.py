"""The frame a relay forwards: for (or from) whom, how much credit comes with it, and bytes it ignores.

Pure. Called by `coordinator/relay.py`, `esnode/donor.py` and `esnode/lines.py`.
"""

from __future__ import annotations

import struct

KEY = 32
FREE = 1024  # payloads up to this size need no credit: questions, refusals
MOST = 512 * 1024  # bytes of a payload
READER = 8 * 1024 * 1024  # bytes one reader may have asked for through a relay that have not come yet, where
FRAME = 64 * 1024  # is counted for each part besides: a relay's queue holds so many frames
NO_WAY = 0xFFFFFFFF  # in place of a grant, from the relay itself: not forwarded, the payload says why
_HEAD = struct.Struct(f"<{KEY}sI")


class BadEnvelope(Exception):
    """A frame that is none, or too large."""


def close(key: bytes, grant: int, payload: bytes) -> bytes:
    """A frame for the holder of `key`, who may send `grant` more bytes of large payloads in return."""
    return _HEAD.pack(key, grant) + payload


def open_frame(frame: bytes) -> tuple[bytes, int, bytes]:
    """(key, grant, payload); BadEnvelope when it is too short or too long."""
    if not _HEAD.size <= len(frame) <= _HEAD.size + MOST:
        raise BadEnvelope(f"{len(frame)} bytes")
    key, grant = _HEAD.unpack_from(frame)
    return key, grant, frame[_HEAD.size :]


MAX_FRAME = _HEAD.size + MOST
