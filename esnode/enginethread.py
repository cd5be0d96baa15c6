"""The one thread that touches the engine: it does what the core asks, one thing at a time, and reports back.

Shell. Evaluations end early between two decode steps when they are cancelled. Called by `daemon.py`;
everything here is written by one side and read by the other, so no lock is needed beyond the queues.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from esnode.events import About, Outcome
from protocol.errors import UserError
from protocol.ledger import Entry
from protocol.messages import Unit

REASON_CHARACTERS = 400  # of a failure, as it travels to the coordinator


class Workshop(Protocol):
    """Engine, prompts and scorer of one run, ready to work. Not thread-safe."""

    @property
    def about(self) -> About:
        """What Hello says of it."""

    def digest(self) -> int:
        """D of the master."""

    def apply(self, entries: Sequence[Entry]) -> list[int]:
        """Fold entries into the master; D after each."""

    def rewind(self, entries: Sequence[Entry]) -> tuple[int, int]:
        """Make the master a state of this beginning of the ledger: (how many entries it reflects, D)."""

    def evaluate(self, unit: Unit, stop: Callable[[], bool], progress: Callable[[int], None]) -> Outcome:
        """Measure a unit. `progress` takes thousandths; raises the engines' Cancelled after `stop()`."""

    def close(self) -> None:
        """End helper processes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An evaluation ended: with an outcome, with a failure in words, or early (both empty)."""

    unit: Unit
    outcome: Outcome | None
    failure: str


@dataclass(frozen=True, slots=True)
class Folded:
    """Entries were applied: D after each, and milliseconds of the whole."""

    digests: tuple[int, ...]
    ms: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The master was rewound: it reflects the first `height` entries given, with this D."""

    height: int
    digest: int
    ms: int


@dataclass(frozen=True, slots=True)
class _Rewind:
    """A command: rewind to a state of these entries."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine failed where it must not (applying, rewinding): its master can no longer be trusted."""

    trace: str


Report = Measured | Folded | Restored | Broken


class EngineThread:
    """Commands go in by method call, reports come out of `reports`; `wake` is called for each of them."""

    def __init__(self, workshop: Workshop, wake: Callable[[], None]) -> None:
        self.progress: tuple[Unit, int] | None = None  # of the running unit, thousandths
        self._workshop = workshop
        self._wake = wake
        self._commands: queue.SimpleQueue[Unit | tuple[Entry, ...] | _Rewind | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._cancelled: Unit | None = None
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def evaluate(self, unit: Unit) -> None:
        """Start a unit; a `Measured` follows."""
        self._cancelled = None
        self._commands.put(unit)

    def cancel(self, unit: Unit) -> None:
        """End this unit soon; its `Measured` still follows."""
        self._cancelled = unit

    def apply(self, entries: tuple[Entry, ...]) -> None:
        """Fold entries in; a `Folded` follows."""
        self._commands.put(entries)

    def rewind(self, entries: tuple[Entry, ...]) -> None:
        """Go back to a state of these entries; a `Restored` follows."""
        self._commands.put(_Rewind(entries))

    def reports(self) -> list[Report]:
        """What has come in since the last call."""
        found = []
        while True:
            try:
                found.append(self._reports.get_nowait())
            except queue.Empty:
                return found

    def close(self, wait: float) -> bool:
        """End the thread within `wait` seconds; False when it is still inside the engine."""
        self._quit.set()
        self._commands.put(None)
        self._thread.join(wait)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ inside the thread

    def _work(self) -> None:
        while (command := self._commands.get()) is not None and not self._quit.is_set():
            if isinstance(command, _Rewind):
                report = self._restore(command.entries)
            else:
                report = self._fold(command) if isinstance(command, tuple) else self._measure(command)
            self._reports.put(report)
            self._wake()

    def _measure(self, unit: Unit) -> Report:
        from esnode.engines.interface import Cancelled as StoppedEarly  # late: it loads numpy

        def stop() -> bool:
            return self._quit.is_set() or self._cancelled == unit

        def tell(thousandths: int) -> None:
            self.progress = (unit, thousandths)

        tell(0)
        try:
            return Measured(unit, self._workshop.evaluate(unit, stop, tell), "")
        except StoppedEarly:
            return Measured(unit, None, "")
        except UserError as error:
            return Measured(unit, None, str(error)[:REASON_CHARACTERS])
        except Exception as error:  # whatever it was, this unit cannot be had here; another node may try
            traceback.print_exc()
            return Measured(unit, None, f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
        finally:
            self.progress = None

    def _fold(self, entries: tuple[Entry, ...]) -> Report:
        began = time.monotonic()
        try:
            digests = tuple(self._workshop.apply(entries))
        except Exception:  # reported to the main thread, which stops the process
            return Broken(traceback.format_exc())
        return Folded(digests, int((time.monotonic() - began) * 1000))

    def _restore(self, entries: tuple[Entry, ...]) -> Report:
        began = time.monotonic()
        try:
            height, digest = self._workshop.rewind(entries)
        except Exception:  # as above
            return Broken(traceback.format_exc())
        return Restored(height, digest, int((time.monotonic() - began) * 1000))
