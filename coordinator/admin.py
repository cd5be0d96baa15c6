"""The administration socket: JSON requests from this machine's owner, answered from the server's loop.

Shell. A unix socket in the run's folder, mode 0600: whoever may open the folder's files may ask. One request,
one answer: {"op": "status"} gives the status object, {"op": "stop", "reason": text} asks for a clean stop.
Requests and answers are lines. A plain socket, because libzmq ends the process when it cannot accept on a
unix socket for want of descriptors, and strangers can use them up. Called by `server.py`; the asking side is
`esnode/admin.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol import ipc

MAX_REQUEST = 64 * 1024
ASKER_SECONDS = 0.5  # until an asker has said what it wants, and has read the answer
Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Admin:
    """The listening side. `handler` turns one request object into one answer object."""

    def __init__(self, folder: Path, handler: Handler) -> None:
        """Listen; whoever listened here before has ended: the journal's lock is held."""
        self._handler = handler
        self._path = folder / ipc.SOCKET
        self._path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX)
        previous = os.umask(0o177)  # the socket must never exist with a wider mode, not even for a moment
        try:
            with ipc.endpoint(folder) as address:
                self.socket.bind(address)
        finally:
            os.umask(previous)
        self.socket.listen(16)
        self.socket.setblocking(False)

    def serve(self) -> None:
        """Answer every request that waits. A request that is no JSON object gets {"error": ...}."""
        while True:
            try:
                asker, _ = self.socket.accept()
            except OSError:  # nobody there, or no descriptor left: the run is worth more than an answer
                return
            with asker, contextlib.suppress(OSError):  # the asker is gone; nothing is owed to it
                asker.settimeout(ASKER_SECONDS)
                raw = ipc.read_line(asker, MAX_REQUEST)
                if raw:
                    asker.sendall(json.dumps(self._answer(raw)).encode() + b"\n")

    def close(self) -> None:
        """Close and remove the socket file."""
        self.socket.close()
        self._path.unlink(missing_ok=True)

    def _answer(self, raw: bytes) -> dict[str, Any]:
        try:
            request = json.loads(raw)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return {"error": "a request is one JSON object"}
        return self._handler(request)
