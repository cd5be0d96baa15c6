"""The administration socket: JSON requests from this machine's owner, answered from the server's loop.

Shell. A unix socket in the run's folder, mode 0600: whoever may open the folder's files may ask. One request,
one answer: {"op": "status"} gives the status object, {"op": "stop", "reason": text} asks for a clean stop.
Called by `server.py`; the asking side is `esnode/admin.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from protocol import ipc

MAX_REQUEST = 64 * 1024
Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Admin:
    """The listening side. `handler` turns one request object into one answer object."""

    def __init__(self, context: zmq.Context[Any], folder: Path, handler: Handler) -> None:
        self._handler = handler
        self._path = folder / ipc.SOCKET
        self._resources = contextlib.ExitStack()
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        self.socket.setsockopt(zmq.LINGER, 100)
        address = self._resources.enter_context(ipc.endpoint(folder))
        previous = os.umask(0o177)  # the socket must never exist with a wider mode, not even for a moment
        try:
            self.socket.bind(address)
        finally:
            os.umask(previous)

    def serve(self) -> None:
        """Answer every request that waits. A request that is no JSON object gets {"error": ...}."""
        while self.socket.poll(0):
            raw = b"".join(self.socket.recv_multipart())
            with contextlib.suppress(zmq.Again):  # the asker is gone; nothing is owed to it
                self.socket.send(json.dumps(self._answer(raw)).encode(), zmq.NOBLOCK)

    def close(self) -> None:
        """Close and remove the socket file."""
        self.socket.close()
        self._path.unlink(missing_ok=True)
        self._resources.close()

    def _answer(self, raw: bytes) -> dict[str, Any]:
        try:
            request = json.loads(raw)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return {"error": "a request is one JSON object"}
        return self._handler(request)
