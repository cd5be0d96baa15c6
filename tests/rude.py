"""Ports where something listens that is no esnode: what joins, nodes and successors have to tell apart.

with Port(hang_up) as port:
    connect to port.number
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Manners = Callable[[socket.socket, socket.socket], None]  # (the listener, a connection)


def hang_up(_: socket.socket, line: socket.socket) -> None:
    """As a proxy does whose backend is gone."""
    line.close()


def hear_and_hang_up(_: socket.socket, line: socket.socket) -> None:
    line.recv(64)
    line.close()


def answer_as_web_server(_: socket.socket, line: socket.socket) -> None:
    line.recv(64)
    line.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    line.close()


def end_in_the_handshake(listener: socket.socket, line: socket.socket) -> None:
    """As a process that is killed at that moment: nobody listens from then on."""
    listener.close()
    line.recv(10)
    line.close()


class Port:
    """A listener of these manners on loopback. A context manager."""

    def __init__(self, manners: Manners) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.number: int = self._listener.getsockname()[1]
        self._manners = manners
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                line, _ = self._listener.accept()
                with contextlib.suppress(OSError):  # the other side was faster
                    self._manners(self._listener, line)

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
