"""A TCP relay: counts what passes, the truth that byte counters are compared with, and delays it.

Kernels without netem have no other delay. As a process: `python -m tests.relay --listen tcp://127.0.0.1:7001
--target tcp://10.0.0.1:7000 --delay 0.1` (seconds, each way).
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import threading
import time

CONNECT_SECONDS = 3.0
PIECE = 65536
PIECES = 64  # on their way in one direction before the relay stops reading


class Relay:
    """Listens on `listen` and passes every connection on to `target`, each byte `delay` seconds late.

    Addresses look like tcp://host:port; IPv6 hosts in brackets.
    """

    def __init__(self, target: str, listen: str = "tcp://127.0.0.1:0", delay: float = 0.0) -> None:
        self._target = _split(target)
        self._delay = delay
        host, port = _split(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.address = f"{listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self.up = 0  # bytes towards the target
        self.down = 0
        self._ends: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def total(self) -> int:
        """Bytes in both directions so far."""
        return self.up + self.down

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                inner, _ = self._listener.accept()
                self._ends.add(inner)
                _spawn(self._join, inner)

    def _join(self, inner: socket.socket) -> None:
        try:
            outer = socket.create_connection(self._target, timeout=CONNECT_SECONDS)
        except OSError:
            return self._end(inner)
        outer.settimeout(None)
        self._ends.add(outer)
        for source, sink, up in ((inner, outer, True), (outer, inner, False)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            way: queue.Queue[tuple[float, bytes]] = queue.Queue(PIECES)
            _spawn(self._read, source, way, up)
            _spawn(self._write, way, sink, source)

    def _read(self, source: socket.socket, way: queue.Queue[tuple[float, bytes]], up: bool) -> None:
        data = b"."
        while data:
            data = b""
            with contextlib.suppress(OSError):  # a reset ends like an end of file
                data = source.recv(PIECE)
            if up:
                self.up += len(data)
            else:
                self.down += len(data)
            way.put((time.monotonic() + self._delay, data))

    def _write(
        self, way: queue.Queue[tuple[float, bytes]], sink: socket.socket, source: socket.socket
    ) -> None:
        while (item := way.get())[1]:
            due, data = item
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                sink.sendall(data)
            except OSError:
                self._end(source, sink)  # now the reader comes to its end, also one that waits for room
        self._end(source, sink)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            self._ends.discard(end)
            with contextlib.suppress(OSError):  # wakes up whoever waits in recv, which close alone does not
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Cut everything."""
        self._end(self._listener, *self._ends)
        self._thread.join()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _spawn(work: object, *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]


def main() -> None:
    """Relay until killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.relay")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    arguments = parser.parse_args()
    Relay(arguments.target, arguments.listen, arguments.delay)
    threading.Event().wait()


if __name__ == "__main__":
    main()
