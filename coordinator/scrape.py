"""The port Prometheus reads: one thread that answers `GET /metrics` with what the server's loop gives it.

Shell. The thread touches nothing of the coordinator: it asks, and the loop, which owns all state, answers at
its next turn (a tick is a quarter of a second). Off unless asked for. Whoever reaches the port reads counters
and the run's id, and can change nothing; it has no password, so it listens on loopback unless another host is
named. Called by `server.py`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from coordinator import metrics
from protocol.errors import UserError

LOOPBACK = "127.0.0.1"
ANSWER_SECONDS = 5.0
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
            self._http = _listener(*_split(address), self._handler())
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


def _listener(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> TCPServer:
    """http.server's own class looks its name up in DNS first, which may take long."""

    class Server(TCPServer):
        allow_reuse_address = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server((host, port), handler)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ScrapeError(f"{address!r} is no place for metrics; it should look like 127.0.0.1:9477 or 9477")
    return host.strip("[]") or LOOPBACK, int(port)
