"""The administration socket: where it lies, and how to reach a path that is too long for a unix socket.

Lives here because the coordinator listens there and the command line asks there. A unix socket's path may
have 107 bytes at most; for a longer one both sides go through a symbolic link in a private temporary
folder, so that the socket itself always lies in the run's folder, guarded by its mode.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

PATH_LIMIT = 100  # bytes; Linux allows 107, macOS 103
SOCKET = "admin.sock"


@contextlib.contextmanager
def endpoint(folder: Path) -> Iterator[str]:
    """The path of the socket in `folder` by which it is bound or reached, valid inside the context."""
    path = folder.absolute() / SOCKET
    if len(os.fsencode(path)) <= PATH_LIMIT:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="esnode-") as short:
        link = Path(short) / "c"
        link.symlink_to(folder.absolute())
        yield str(link / SOCKET)


def read_line(peer: socket.socket, limit: int) -> bytes:
    """What the other side sends up to its line's end; b"" when it closes or sends more than `limit` bytes."""
    data = b""
    while not data.endswith(b"\n"):
        more = peer.recv(65536)
        data += more
        if not more or len(data) > limit:
            return b""
    return data
