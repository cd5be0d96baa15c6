"""The relay as the coordinator's child: started, watched, started again, ended with it.

Shell. Called by `server.py` about four times a second; it never waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from protocol import zmtp
from protocol.errors import UserError

AGAIN_SECONDS = 5.0  # before a relay that ended is started again
OFF = "off"


class RelayError(UserError):
    """The relay cannot be had; the sentence says why."""


def relay_bind(wanted: str | None, bind: str) -> str:
    """Where the relay listens: as asked; by default beside a coordinator that other machines can reach.

    RelayError when one of the two is no address.
    """
    try:
        for address in (bind, *([wanted] if wanted and wanted != OFF else [])):
            zmtp.host_and_port(address)
    except ValueError as error:
        raise RelayError(str(error)) from error
    if wanted == OFF or (wanted is None and zmtp.is_loopback(bind)):
        return ""
    return wanted or f"tcp://{zmtp.host_and_port(bind)[0]}:0"


class RelayChild:
    """One process of `coordinator.relay`, or none when `bind` is empty."""

    def __init__(self, folder: Path, bind: str, log: logging.Logger, mbit: float = 0.0) -> None:
        """`folder`: the run's. `mbit`: most it may carry, Mbit/s, 0 for no limit."""
        self.port = 0  # where it listens now, 0 while it does not
        self._folder = folder
        self._bind = bind
        self._mbit = mbit
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._line = b""
        self._again = 0.0

    def look(self, now: float) -> bool:
        """Start it where it is due and hear its port; whether `port` has changed."""
        before = self.port
        if self._process is None:
            if self._bind and now >= self._again:
                self._start()
        elif self._process.poll() is not None:
            self._log.warning("the relay has ended; it is started again in %.0f s", AGAIN_SECONDS)
            self._end()
            self._again = now + AGAIN_SECONDS
        elif not self.port:
            self._hear()
        return self.port != before

    def _start(self) -> None:
        words = ("--data", str(self._folder), "--bind", self._bind, "--mbit", str(self._mbit))
        command = [sys.executable, "-m", "coordinator.relay", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._line = b""

    def _hear(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._line += os.read(self._process.stdout.fileno(), 4096)
        if self._line.endswith(b"\n"):
            address = str(json.loads(self._line)["address"])
            self.port = zmtp.host_and_port(address)[1]
            # the same port after a restart: nodes and firewalls know it
            self._bind = f"tcp://{zmtp.host_and_port(self._bind)[0]}:{self.port}"
            self._log.info("relay for nodes that cannot dial each other: port %d", self.port)

    def _end(self) -> None:
        process, self._process, self.port = self._process, None, 0
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End it."""
        self._bind = ""
        self._end()
