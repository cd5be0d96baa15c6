"""The processes of a local run: start them, restart what crashes, stop them cleanly, quote their last words.

Each child runs on a leash (see `leash.py`), in its own session, so that Ctrl-C reaches only the parent, which
then asks the children one by one. Exit code 0 means done, 1 and 3 a refusal in words (never retried),
everything else a crash. Called by `run.py`; whoever starts another process of ours takes `importable`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import UserError
from protocol.terms import EXIT_YIELDED

MAX_CRASHES = 3  # within FORGET_AFTER seconds; a fourth one is a fault that restarting does not mend
FORGET_AFTER = 600.0
REFUSED = 1  # exit code of a UserError: the log says what to do, trying again would say it again
LAST_LINES = 8
GRACE = 15.0  # seconds between the polite request to stop and the kill


class ChildFailed(UserError):
    """A process of the run gave up; its last log lines follow."""


@dataclass
class Child:
    """One process and its history. `environment` is added to ours."""

    name: str
    module: str
    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    keep_open: tuple[int, ...] = ()  # descriptors the child inherits (the folder's lock)
    process: subprocess.Popen[bytes] | None = None
    crashes: list[float] = field(default_factory=list)
    retry_at: float | None = None

    @property
    def code(self) -> int | None:
        """Exit code, None while running or waiting for its restart."""
        return self.process.poll() if self.process and self.retry_at is None else None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self.retry_at = None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {self.name} starts\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "esnode.leash", self.module, *self.arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **importable(), **self.environment},
                pass_fds=self.keep_open,
                start_new_session=True,
            )

    def last_words(self) -> str:
        """The end of the log since the last start, shortened for a terminal."""
        text = self.log.read_bytes().decode("utf-8", "replace") if self.log.exists() else ""
        lines = [line for line in text.rpartition(" starts\n")[2].splitlines() if line.strip()]
        return "\n".join(lines[-LAST_LINES:])


class Children:
    """All processes of one run; call `look` often, with monotonic seconds."""

    def __init__(self) -> None:
        self.all: dict[str, Child] = {}
        self.restarts = 0

    def add(self, child: Child) -> None:
        """Start a child and watch it from now on."""
        self.all[child.name] = child
        child.start()

    def look(self, now: float) -> None:
        """Restart what crashed, after a pause that doubles; ChildFailed when that cannot mend it."""
        for child in self.all.values():
            if child.retry_at is not None:
                if now >= child.retry_at:
                    child.start()
                    self.restarts += 1
                continue
            code = child.code
            if code is None or code == 0:
                continue
            self._crashed(child, code, now)

    def _crashed(self, child: Child, code: int, now: float) -> None:
        if code in (REFUSED, EXIT_YIELDED):
            raise ChildFailed(f"{child.name} stopped: {_sentence(child)}")
        child.crashes = [at for at in child.crashes if now - at < FORGET_AFTER] + [now]
        if len(child.crashes) > MAX_CRASHES:
            raise ChildFailed(
                f"{child.name} crashed {len(child.crashes)} times ({meaning(code)}). "
                f"Its log is {child.log}; the last lines:\n{child.last_words()}"
            )
        child.retry_at = now + 2.0 ** (len(child.crashes) - 1)

    def ask_to_stop(self) -> None:
        """SIGTERM: each child says goodbye to its peers, flushes and ends."""
        for child in self.all.values():
            child.retry_at = None
            if child.running:
                assert child.process
                child.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Wait until every child has ended; False when some still run after `seconds`."""
        deadline = time.monotonic() + seconds
        while any(child.running for child in self.all.values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def kill(self) -> None:
        """End whatever still runs, with its own children."""
        for child in self.all.values():
            child.retry_at = None
            if child.running:
                assert child.process
                os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()

    def stop(self, grace: float = GRACE) -> None:
        """Ask, wait, and kill what does not listen."""
        self.ask_to_stop()
        if not self.wait(grace):
            self.kill()


def importable() -> dict[str, str]:
    """Environment for a process of ours: our packages are found wherever we were started, and nothing is
    imported from the working directory, where a user's file could bear the name of a module."""
    home = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _sentence(child: Child) -> str:
    """The child's own error sentence, else its last lines."""
    words = child.last_words()
    marked = [line for line in words.splitlines() if line.startswith("esnode: ")]
    return marked[-1].removeprefix("esnode: ") if marked else f"its log {child.log} ends with\n{words}"


def meaning(code: int) -> str:
    """What an exit code says."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", the usual sign of too little memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exit code {code}"
