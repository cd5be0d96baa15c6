"""The port Prometheus reads: threads that answer `GET /metrics` with what the server's loop gives it.

Shell. They touch nothing of the coordinator: they ask, and the loop, which owns all state, answers at
its next turn (a tick is a quarter of a second). Off unless asked for. Whoever reaches the port reads counters
and the run's id, and can change nothing; it has no password, so it listens on loopback unless another host is
named. Called by `server.py`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from coordinator import metrics
from protocol.errors import UserError

LOOPBACK = "127.0.0.1"
ANSWER_SECONDS = 5.0
MOST_AT_ONCE = 16  # connections; one more ends the oldest
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ScrapeError(UserError):
    """The port cannot be had; the sentence says why."""


class Scrape:
    """The listening thread. `feed` belongs to the server's loop, everything else to the thread."""

    def __init__(self, address: str) -> None:
        """`address`: "PORT" or "HOST:PORT"; port 0 means any."""
        self._asked, self._answered = threading.Event(), threading.Event()
        self._text = ""
        self._closed, self._seconds = 0, 0.0
        try:
            self._http = _Server(*_split(address), self._handler())
        except (OSError, OverflowError) as error:
            words = error.strerror if isinstance(error, OSError) else "ports end at 65535"
            raise ScrapeError(f"cannot serve metrics on {address}: {words}. Name another port") from error
        self.address = f"{self._http.server_address[0]!s}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def round_closed(self, seconds: float) -> None:
        """Count a round that took so long."""
        self._closed += 1
        self._seconds += seconds

    def feed(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Answer whoever waits; costs nothing while nobody does."""
        if self._asked.is_set():
            self._asked.clear()
            self._text = metrics.render({**status(), "closed": (self._closed, self._seconds)})
            self._answered.set()

    def close(self) -> None:
        """Stop listening."""
        self._answered.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _page(self) -> str | None:
        """The text, once the loop has come round; None when it does not."""
        self._answered.clear()
        self._asked.set()
        return self._text if self._answered.wait(ANSWER_SECONDS) else None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = self._page

        class Handler(BaseHTTPRequestHandler):
            timeout = ANSWER_SECONDS  # one who connects and says nothing must not keep the port

            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/metrics", "/"):
                    return self.send_error(404, "there is /metrics")
                text = page()
                if text is None:
                    return self.send_error(503, "the coordinator is busy")
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Scrapes are no news."""

        return Handler


class _Server(ThreadingMixIn, TCPServer):
    """A thread per connection, few of them, none for long: who floods the port shuts out nobody but himself.

    http.server's own class looks its name up in DNS first, which may take long.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, float] = {}  # since when, the oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._hang_up(lambda _: len(self._open) >= MOST_AT_ONCE)
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Every tenth of a second: an answer that takes longer than this was never meant to be read."""
        before = time.monotonic() - ANSWER_SECONDS
        with self._lock:
            self._hang_up(lambda since: since < before)

    def _hang_up(self, enough: Callable[[float], bool]) -> None:
        for request, since in list(self._open.items()):
            if not enough(since):
                return
            del self._open[request]
            with contextlib.suppress(OSError):  # it has hung up itself
                request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up in the middle of an answer is no news."""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ScrapeError(f"{address!r} is no place for metrics; it should look like 127.0.0.1:9477 or 9477")
    return host.strip("[]") or LOOPBACK, int(port)
