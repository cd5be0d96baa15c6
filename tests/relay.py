"""A TCP relay that counts what passes, in both directions: the truth that byte counters are compared with."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Relay:
    """Listens on a loopback port and passes every connection on to `target` ("tcp://host:port")."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.up = 0  # bytes towards the target
        self.down = 0
        self._peers: dict[socket.socket, tuple[socket.socket, bool]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def total(self) -> int:
        """Bytes in both directions so far."""
        return self.up + self.down

    def _work(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    self._join()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass_on(key.fileobj)

    def _join(self) -> None:
        inner, _ = self._listener.accept()
        try:
            outer = socket.create_connection(self._target, timeout=1)
        except OSError:
            inner.close()
            return
        for source, sink, up in ((inner, outer, True), (outer, inner, False)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[source] = (sink, up)
            self._selector.register(source, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        if source not in self._peers:
            return
        sink, up = self._peers[source]
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(65536)
            sink.sendall(data)
        if up:
            self.up += len(data)
        else:
            self.down += len(data)
        if not data:
            self._end(source, sink)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            if self._peers.pop(end, None):
                self._selector.unregister(end)
                end.close()

    def close(self) -> None:
        """Cut everything."""
        self._over = True
        self._thread.join()
        self._end(*list(self._peers))
        self._listener.close()
        self._selector.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
