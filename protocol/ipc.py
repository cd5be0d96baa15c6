"""The administration socket: where it lies, and how to reach a path that is too long for a unix socket.

Lives here because the coordinator listens there and the command line asks there. A unix socket's path may
have 107 bytes at most; for a longer one both sides go through a symbolic link in a private temporary
folder, so that the socket itself always lies in the run's folder, guarded by its mode.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

PATH_LIMIT = 100  # bytes; Linux allows 107, macOS 103
SOCKET = "admin.sock"


@contextlib.contextmanager
def endpoint(folder: Path) -> Iterator[str]:
    """The `ipc://` address of the socket in `folder`, valid inside the context."""
    path = folder.absolute() / SOCKET
    if len(os.fsencode(path)) <= PATH_LIMIT:
        yield f"ipc://{path}"
        return
    with tempfile.TemporaryDirectory(prefix="esnode-") as short:
        link = Path(short) / "c"
        link.symlink_to(folder.absolute())
        yield f"ipc://{link / SOCKET}"
