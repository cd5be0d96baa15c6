"""The processes of a node's lanes: starts and ends them, carries words between them and the core of lanes.

Shell around `lanes.py`. To the daemon it is an engine like `reports.Solo`. Every lane has a process, a socket
and two threads, one that listens and one that speaks; all else happens in the daemon's own thread. Called by
`daemon.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from esnode import children, devices, duty, events, joined, laneevents, lanes, memory, nodeoptions
from esnode.engines.wish import Wish
from esnode.lanestate import STARTING, name_of
from esnode.lanewire import Alive, Bound, Loaded, Log, Need, Pipe, Planned, Refresh, Refused, Reread, Where
from esnode.nodeoptions import Options
from protocol.entries import Entry
from protocol.errors import UserError
from protocol.lock import Lock
from protocol.ranges import MAX_ENGINES

PAUSE = 0.02  # seconds between looks while the daemon has nothing else to do
WORDS = 400  # characters quoted of what a lane should not have sent


class LanesFailed(UserError):
    """No engine of this node can go on; the sentence says why."""


Told: TypeAlias = events.Effect | Where | Refresh  # what a lane has to hear


@dataclass
class _Process:
    """A lane's process. `sentence`: its last words, if it refused; `told`: what it has to hear."""

    process: subprocess.Popen[bytes]
    pipe: Pipe
    sentence: str = ""
    told: queue.SimpleQueue[Told | None] = field(default_factory=queue.SimpleQueue)


class Fleet:
    """Several engines as one, as the daemon's engine and workshop."""

    def __init__(self, options: Options, lock: Lock, log: logging.Logger) -> None:
        """Starts the processes; `wait_loaded` waits for them."""
        self.wake: Callable[[], None] = lambda: None
        self._options, self._lock, self._log = options, lock, log
        self._plans = [devices.lane(spec) for spec in options.lanes]
        self._heard: queue.SimpleQueue[tuple[int, _Process, Any]] = queue.SimpleQueue()
        self._processes: dict[int, _Process] = {}
        self._loaded: dict[int, Loaded] = {}
        self._needs: dict[int, Planned] = {}  # of lanes whose process runs
        self._bounds: dict[int, int] = {}  # rows at once of lanes that ended for want of memory
        self._free = memory.available()  # before any of them has allocated anything
        self._chain: Sequence[Entry] = ()
        self._out: list[events.Event] = []
        self._failed = ""
        self._random = random.Random()
        self._state, effects = lanes.new(tuple(plan.devices for plan in self._plans), lock.digest)
        self._perform(effects)

    # ------------------------------------------------------------ what a daemon wants of an engine

    @property
    def about(self) -> events.About:
        """Who these lanes are together; a lane that was given up is not counted."""
        loaded = [self._loaded[number] for number in sorted(self._loaded)]
        first = loaded[0]
        backends = dict.fromkeys(lane.backend for lane in loaded)
        where = dict.fromkeys(lane.device for lane in loaded)
        name, count = self._options.name, self._state.offered
        words = "+".join(backends), "+".join(where)
        prints = tuple(dict.fromkeys(lane.fingerprint for lane in loaded))[:MAX_ENGINES]
        return events.About(
            name, *words, first.selftest, prints[0], first.versions, lanes=count, others=prints[1:],
            lost=self._state.lost,
        )  # fmt: skip

    def wait_loaded(self) -> None:
        """Wait until no lane is loading for the first time; LanesFailed when none can."""
        while not self._loaded or any(lane.phase == STARTING for lane in self._state.lanes):
            time.sleep(PAUSE)
            self.events(time.monotonic())

    def digest(self) -> int:
        """D of the base model, which every lane has compared with its own."""
        return self._lock.digest

    def rewind(self, entries: Sequence[Entry]) -> tuple[int, int]:
        """Before the first event: the newest snapshot that fits this ledger: (entries reflected, D)."""
        self.ask(events.Rewind(tuple(entries)), entries, 0)
        others: list[events.Event] = []
        while True:
            found = self.events(time.monotonic())
            others += [event for event in found if not isinstance(event, events.Rewound)]
            for event in found:
                if isinstance(event, events.Rewound):
                    self._out = others
                    return event.height, event.digest
            time.sleep(PAUSE)

    def ask(self, effect: events.Effect, chain: Sequence[Entry], upto: int) -> None:
        """What the core wants. `chain`: its ledger; `upto`: entries reflected after an Apply."""
        self._chain = chain
        self._step(laneevents.Asked(time.monotonic(), effect, upto))

    def events(self, now: float) -> list[events.Event]:
        """What the core hears. LanesFailed, with a sentence, when no lane is left."""
        while True:
            try:
                number, process, word = self._heard.get_nowait()
            except queue.Empty:
                break
            if self._processes.get(number) is process:
                self._hear(now, number, process, word)
        self._step(laneevents.Clock(now))
        if self._failed:
            raise LanesFailed(self._failed)
        found, self._out = self._out, []
        return [replace(event, now=now) for event in found]

    def close(self, wait: float = 0.0) -> bool:
        """End the processes; nothing of value is in them."""
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            _end(process.process)
        for process in processes:
            process.process.communicate()
        return True

    # ------------------------------------------------------------ around the core

    def _step(self, event: laneevents.Event) -> None:
        self._state, effects = lanes.step(self._state, event)
        self._perform(effects)

    def _perform(self, effects: Sequence[laneevents.Effect]) -> None:
        for effect in effects:
            match effect:
                case laneevents.Start(number):
                    self._start(number)
                case laneevents.Kill(number):
                    self._kill(number)
                case laneevents.Tell(number, what):
                    self._tell(number, what)
                case laneevents.Place(number, leader):
                    self._place(number, leader)
                case laneevents.Reread(number):
                    self._tell(number, Refresh())
                case laneevents.GoBack(number, upto):
                    self._tell(number, events.Rewind(tuple(self._chain[:upto])))
                case laneevents.Advance(number, since, upto):
                    self._tell(number, events.Apply(tuple(self._chain[since:upto])))
                case laneevents.Answer(event):
                    self._out.append(event)
                case laneevents.Tidings(words):
                    self._log.warning("%s", words)
                case laneevents.Fail(sentence):
                    self._failed = sentence

    def _hear(self, now: float, number: int, process: _Process, word: Any) -> None:
        match word:
            case Loaded():
                self._on_loaded(now, number, process, word)
            case Log(level, text):
                self._log.log(level, "%s: %s", name_of(self._state, number), text)
            case Alive():
                self._step(laneevents.Heard(now, number))
            case Refused(sentence):
                process.sentence = sentence
            case Bound(rows):
                self._bounds[number] = rows
                words = "%s takes at most %d prompts at once from now on: slower, and another fingerprint"
                self._log.warning(words, name_of(self._state, number), rows)
            case Planned():
                self._on_planned(number, word)
            case Need():
                self._step(laneevents.Wants(now, number))
            case Reread(digest):
                self._step(laneevents.Refreshed(now, number, digest))
            case None:
                self._on_end(now, number, process)
            case _:
                self._step(laneevents.Said(now, number, word))

    def _on_planned(self, number: int, planned: Planned) -> None:
        """All lanes must fit together when they start; one that starts again takes what it had."""
        self._needs[number] = planned
        if number in self._loaded:
            return
        needs = list(self._needs.values())
        self._failed = self._failed or memory.together([each.host for each in needs], self._free)
        if joined.read(self._options.run):
            try:
                duty.read_policy().admit_memory(sum(each.total for each in needs))
            except UserError as error:
                self._failed = self._failed or str(error)

    def _on_loaded(self, now: float, number: int, process: _Process, loaded: Loaded) -> None:
        others = {other.selftest for k, other in self._loaded.items() if k != number}
        if others and loaded.selftest not in others:
            process.sentence = f"kernel {loaded.backend!r} computes other bits than those of the other lanes"
            return self._kill(number)
        if loaded.run != self._lock.run_id:
            where = self._options.run / "lock.json"
            process.sentence = f"{where} has been altered since this node started: bring back the run's own"
            return self._kill(number)
        self._loaded[number] = loaded
        self._log.info("%s is ready: %s", name_of(self._state, number), loaded.backend)
        self._step(laneevents.Up(now, number))

    def _on_end(self, now: float, number: int, process: _Process) -> None:
        _end(process.process)  # and its own children, which may outlive it
        process.process.communicate()
        code = process.process.returncode
        process.told.put(None)
        process.pipe.close()
        del self._processes[number]
        self._needs.pop(number, None)
        reason = process.sentence or children.meaning(code)
        refused = bool(process.sentence)
        self._step(laneevents.Died(now, number, reason, self._random.random(), refused))

    # ------------------------------------------------------------ processes

    def _start(self, number: int) -> None:
        try:
            self._spawn(number)
        except OSError as error:  # no memory, no descriptor: perhaps later
            reason = f"its process cannot be started: {error.strerror}"
            self._step(laneevents.Died(time.monotonic(), number, reason, self._random.random()))

    def _spawn(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        plan, count = self._plans[number], len(self._plans)
        threads = plan.threads or max(1, self._options.threads // count)
        sharing = sum(other.devices == plan.devices for other in self._plans)
        ranks = ranks_of(self._options.lanes[number], self._options.wish)
        rows = self._bounds.get(number, 0)
        words = nodeoptions.lane_words(self._options, threads, plan.backend, sharing, ranks, rows)
        with contextlib.ExitStack() as unused, theirs:
            unused.callback(ours.close)
            process = subprocess.Popen(
                [sys.executable, "-m", "esnode.laneprocess", str(theirs.fileno()), *words],
                stdin=subprocess.PIPE,  # the leash: it ends with us
                env={**os.environ, **children.importable(), **devices.surroundings(plan, threads)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            unused.pop_all()
        started = _Process(process, Pipe(ours))
        self._processes[number] = started
        for name, target in (("hears", self._listen), ("speaks", self._speak)):
            arguments = (number, started)
            threading.Thread(target=target, args=arguments, name=f"{name} lane {number}", daemon=True).start()

    def _place(self, number: int, leader: int) -> None:
        name = name_of(self._state, number)
        if leader < 0:
            self._log.info("%s leads the master in host memory", name)
            return self._tell(number, Where(""))
        self._log.info("%s reads the master that %s leads", name, name_of(self._state, leader))
        path = self._loaded[leader].host_path
        assert path is not None, "who was told to lead has made one"
        self._tell(number, Where(path))

    def _listen(self, number: int, process: _Process) -> None:
        word: Any = 0
        while word is not None:
            try:
                word = process.pipe.receive()
            except Exception as error:  # whatever it sent: nothing that follows can be understood
                words = f"it sent what is no answer and is ended: {type(error).__name__}: {error}"
                self._heard.put((number, process, Log(logging.ERROR, words[:WORDS])))
                word = None
            self._heard.put((number, process, word))
            self.wake()

    def _speak(self, number: int, process: _Process) -> None:
        """A process that has stopped takes nothing: only this thread waits for it."""
        while (effect := process.told.get()) is not None:
            try:
                process.pipe.send(effect)
            except OSError:  # it has gone, which the other thread says, or goes now
                return _end(process.process)

    def _kill(self, number: int) -> None:
        if number in self._processes:
            _end(self._processes[number].process)

    def _tell(self, number: int, effect: Told) -> None:
        if number in self._processes:
            self._processes[number].told.put(effect)


def ranks_of(lane: str, wish: Wish) -> int:
    """Ranks of a lane's engine: as many as it has devices; 0 for as many as it takes."""
    count = len(devices.lane(lane).devices)
    return count if count > 1 else wish.tp


def _end(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a lane and all it started; nothing of value is in them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
