"""The one thread that changes the engine: it does what the core asks, one thing at a time, and reports back.

Shell. Evaluations end early between two decode steps when they are cancelled; scores come in from a thread of
their own, beside the next command. Called by `reports.py`; everything here is written by one side and read by
the other, so no lock is needed beyond the queues.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

from esnode.checkpoint import Saved
from esnode.engines.interface import Cancelled, EngineEnded
from esnode.events import About, Outcome
from esnode.replay import DamagedMaster
from protocol.counting import milliseconds
from protocol.entries import Entry
from protocol.errors import UserError
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
        """Fold entries into the master; D after each. DamagedMaster, and nothing done, where it changed."""

    def rewind(self, entries: Sequence[Entry]) -> tuple[int, int]:
        """Make the master a state of this beginning of the ledger: (how many entries it reflects, D)."""

    @property
    def host_path(self) -> str | None:
        """What other workshops attach to, of a master in host memory."""

    def refresh(self) -> int:
        """Take over what the leader of a shared master has written; D."""

    def save(self, round: int, entry: bytes, digest: int, done: Callable[[Saved], None]) -> None:
        """Begin to write the master as a snapshot; `done` is called from another thread when it is over."""

    def evaluate(
        self, unit: Unit, sigma: float, stop: Callable[[], bool], progress: Callable[[int], None]
    ) -> Future[Outcome]:
        """Measure a unit, a member's with noise of scale `sigma`; the engine is free when this returns.

        The future comes when the scores are there, in the order of the calls and from another thread.
        `progress` takes thousandths. Raised here or in the future: the engines' Cancelled after `stop()`;
        only here, and nothing is measured: DamagedMaster where the master changed by itself.
        """

    def damaged(self) -> tuple[str, ...]:
        """Tensors whose master has changed by itself since it was written."""

    def all_held(self) -> tuple[int, ...]:
        """Digests of all pieces of the master, read from memory."""

    def held(self, pieces: Sequence[int]) -> tuple[int, ...]:
        """Digests of these pieces of the master, read from memory."""

    def derive(
        self, entries: Sequence[Entry], pieces: Sequence[int], base: bool
    ) -> tuple[tuple[int, ...], int]:
        """Digests of these pieces by replay with the reference kernel, and from which round on.

        Beside anything else. `base`: from the base (0) even where there is a checkpoint.
        """

    def mend(self, pieces: Sequence[int]) -> int:
        """Overwrite pieces with what was derived last; D."""

    def heal(self, entries: Sequence[Entry], tensors: Sequence[str]) -> int:
        """Replay damaged tensors into the master; D."""

    def close(self) -> None:
        """End helper processes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An evaluation ended: with an outcome, with a failure in words, or early (both empty)."""

    unit: Unit
    outcome: Outcome | None
    failure: str


@dataclass(frozen=True, slots=True)
class Generated:
    """All answers of a unit are there; its `Measured` follows when they are scored."""

    unit: Unit


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
class Taken:
    """What the leader of a shared master wrote has been taken over; D."""

    digest: int


@dataclass(frozen=True, slots=True)
class Wounded:
    """The master changed by itself: this unit was not measured, or (None) nothing was folded in."""

    unit: Unit | None
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repaired:
    """Weights were replaced by what replay gives; D."""

    digest: int


@dataclass(frozen=True, slots=True)
class Read:
    """Digests of all pieces, and the tensors that are not what was last written to them."""

    digests: tuple[int, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Derived:
    """What pieces held when it was asked, and what replay gives, begun from a state of `since` rounds."""

    pieces: tuple[int, ...]
    held: tuple[int, ...]
    derived: tuple[int, ...]
    since: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine failed where it must not (applying, rewinding): its master can no longer be trusted."""

    trace: str
    sentence: str = ""  # of an engine that ended by itself
    rows: int = 0  # that a new engine should take at once at most; 0: any number


Report = (
    Measured | Generated | Folded | Restored | Taken | Saved | Wounded | Repaired | Read | Derived | Broken
)


class EngineThread:
    """Commands go in by method call, reports come out of `reports`; `wake` is called for each of them."""

    def __init__(self, workshop: Workshop, wake: Callable[[], None]) -> None:
        self.progress: dict[Unit, int] = {}  # of what runs, thousandths
        self._workshop = workshop
        self._wake = wake
        self._commands: queue.SimpleQueue[Callable[[], Report | None] | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._cancelled: set[Unit] = set()
        self._quit = threading.Event()
        self._aside: list[threading.Thread] = []  # what runs beside the engine's thread
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def evaluate(self, unit: Unit, sigma: float) -> None:
        """Start a unit; a `Measured` follows, often a `Generated` before it."""
        self._cancelled.discard(unit)
        self._commands.put(partial(self._measure, unit, sigma))

    def cancel(self, unit: Unit) -> None:
        """End this unit soon; its `Measured` still follows."""
        self._cancelled.add(unit)

    def apply(self, entries: tuple[Entry, ...]) -> None:
        """Fold entries in; a `Folded` follows."""
        self._commands.put(partial(self._fold, entries))

    def rewind(self, entries: tuple[Entry, ...]) -> None:
        """Go back to a state of these entries; a `Restored` follows."""
        self._commands.put(partial(self._restore, entries))

    def refresh(self) -> None:
        """Take over what the leader of a shared master has written; a `Taken` follows."""
        self._commands.put(self._refresh)

    def heal(self, entries: tuple[Entry, ...], tensors: tuple[str, ...]) -> None:
        """Derive tensors again from these entries; a `Repaired` follows."""
        self._commands.put(lambda: self._repair(lambda: self._workshop.heal(entries, tensors)))

    def mend(self, pieces: tuple[int, ...]) -> None:
        """Overwrite pieces with what was derived last; a `Repaired` follows."""
        self._commands.put(lambda: self._repair(lambda: self._workshop.mend(pieces)))

    def read(self) -> None:
        """Read the digests of all pieces beside a running unit; a `Read` follows.

        Whoever asks sees to it that nothing is folded in meanwhile.
        """
        self._beside(lambda: Read(self._workshop.all_held(), self._workshop.damaged()))

    def prove(self, entries: tuple[Entry, ...], pieces: tuple[int, ...], base: bool) -> None:
        """Replay pieces beside whatever else happens; a `Derived` follows.

        What the master holds is read before this returns.
        """
        held = self._workshop.held(pieces)
        self._beside(lambda: Derived(pieces, held, *self._workshop.derive(entries, pieces, base)))

    def save(self, round: int, entry: bytes, digest: int) -> None:
        """Write the master as a snapshot beside what comes next; a `Saved` follows."""
        self._commands.put(lambda: self._workshop.save(round, entry, digest, self._tell))

    def reports(self) -> list[Report]:
        """What has come in since the last call."""
        found = []
        while True:
            try:
                found.append(self._reports.get_nowait())
            except queue.Empty:
                return found

    def close(self, wait: float) -> bool:
        """End the thread within `wait` seconds; False when it, or one beside it, is still inside native code.

        The interpreter must not end then: it would take the thread out of the middle of that code.
        """
        self._quit.set()
        self._commands.put(None)
        self._thread.join(wait)
        return not any(thread.is_alive() for thread in (self._thread, *self._aside))

    def _beside(self, work: Callable[[], Report]) -> None:
        """Do what the replica proof needs on a thread of its own."""

        def run() -> None:
            try:
                self._tell(work())
            except Exception as error:  # reported to the main thread, which stops the process
                self._tell(_broken(error))

        thread = threading.Thread(target=run, name="proof", daemon=True)
        thread.start()
        self._aside = [*(other for other in self._aside if other.is_alive()), thread]

    def _tell(self, report: Report) -> None:
        self._reports.put(report)
        self._wake()

    # ------------------------------------------------------------ inside the thread

    def _work(self) -> None:
        while (command := self._commands.get()) is not None and not self._quit.is_set():
            report = command()
            if report is not None:
                self._tell(report)

    def _measure(self, unit: Unit, sigma: float) -> Report | None:
        def stop() -> bool:
            return self._quit.is_set() or unit in self._cancelled

        def tell(thousandths: int) -> None:
            self.progress[unit] = thousandths

        def scored(outcome: Future[Outcome]) -> None:
            self._tell(self._ended(unit, outcome.result))

        tell(0)
        try:
            outcome = self._workshop.evaluate(unit, sigma, stop, tell)
        except Exception as error:
            return self._ended(unit, partial(_throw, error))
        if not outcome.done():
            self._tell(Generated(unit))
        outcome.add_done_callback(scored)
        return None

    def _ended(self, unit: Unit, result: Callable[[], Outcome]) -> Report:
        """What to say of an evaluation that gave, or raised, this."""
        self.progress.pop(unit, None)
        try:
            return Measured(unit, result(), "")
        except DamagedMaster as error:
            return Wounded(unit, error.tensors)
        except (Cancelled, CancelledError):
            return Measured(unit, None, "")
        except EngineEnded as error:
            return _broken(error)
        except UserError as error:
            return Measured(unit, None, str(error)[:REASON_CHARACTERS])
        except Exception as error:  # whatever it was, this unit cannot be had here; another node may try
            traceback.print_exc()
            return Measured(unit, None, f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])

    def _fold(self, entries: tuple[Entry, ...]) -> Report:
        began = time.monotonic()
        try:
            digests = tuple(self._workshop.apply(entries))
        except DamagedMaster as error:
            return Wounded(None, error.tensors)
        except Exception as error:  # reported to the main thread, which stops the process
            return _broken(error)
        return Folded(digests, milliseconds(time.monotonic() - began))

    def _restore(self, entries: tuple[Entry, ...]) -> Report:
        began = time.monotonic()
        try:
            height, digest = self._workshop.rewind(entries)
        except Exception as error:  # as above
            return _broken(error)
        return Restored(height, digest, milliseconds(time.monotonic() - began))

    def _refresh(self) -> Report:
        try:
            return Taken(self._workshop.refresh())
        except Exception as error:  # as above
            return _broken(error)

    def _repair(self, work: Callable[[], int]) -> Report:
        try:
            return Repaired(work())
        except Exception as error:  # as above
            return _broken(error)


def _throw(error: Exception) -> NoReturn:
    raise error


def _broken(error: Exception) -> Broken:
    """The report of what is being handled."""
    if isinstance(error, EngineEnded):
        return Broken(traceback.format_exc(), str(error), error.rows)
    return Broken(traceback.format_exc())
