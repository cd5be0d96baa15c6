"""The node process: `python -m esnode.daemon --run DIR --name NAME`.

Shell around the pure core. Lives here: the loop that feeds the core with messages, ticks and the engine's
reports, and performs its effects in order. Exit codes: 0 the run is over or the node left, 1 refused in one
sentence on stderr, 70 a bug, 130 a second Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

if __name__ == "__main__":  # the imports below take a second or two
    from esnode import departure

    departure.at_once(signal.SIGINT)

import zmq

from esnode import (
    checkpoint,
    departure,
    devices,
    events,
    gpugroups,
    joined,
    mending,
    node,
    nodeoptions,
    peers,
    reach,
    reports,
)
from esnode.duty import Duty
from esnode.enginethread import Workshop
from esnode.fleet import Fleet
from esnode.link import Link, State
from esnode.nodeoptions import Options
from esnode.notebook import Notebook
from esnode.snapshotevents import FetchEntries, FetchSnapshot, StopFetch
from protocol import logfile
from protocol.entries import parse
from protocol.errors import UserError
from protocol.lock import Lock
from protocol.messages import Rehello

TICK_SECONDS = 0.2
HOPELESS_SECONDS = 3.0  # how long "wrong key" must last before it is believed
ADDRESS_SECONDS = 1.0  # between looks at the address file while there is no connection
LEAVE_SECONDS = 5.0  # a node that was asked to leave is gone by then
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class DaemonError(UserError):
    """The node cannot start or go on; the sentence says why."""


class Daemon:
    """One node. `run` returns the exit code."""

    def __init__(self, options: Options, lock: Lock, log: logging.Logger) -> None:
        """Take the node's folder; the model is loaded by `run`."""
        self._options = options
        self._log = log
        self._lock = lock
        self._notebook = Notebook(options.folder, self._lock.run_id)
        if self._notebook.warning:
            log.warning("%s", self._notebook.warning)
        self._secret = nodeoptions.own_key(options.folder)
        self._duty = Duty(options.run, log.warning) if joined.read(options.run) else None
        self.stuck = False  # only a hard exit ends this process in time: the engine did not come back
        self._loading = True
        self._leave: str | None = None
        self._leave_by = float("inf")
        self._stopped: tuple[str, int] | None = None
        self._next_look = 0.0
        self._peers: peers.Peers | None = None

    def request_leave(self, reason: str) -> None:
        """Ask the loop to leave cleanly; safe in a signal handler."""
        if self._loading:
            departure.leave()  # nothing is held and nobody knows us yet
        departure.limit(LEAVE_SECONDS)
        self._leave = self._leave or reason

    # ------------------------------------------------------------ life

    def run(self) -> int:
        """Load, connect, work, leave."""
        self._notebook.refuse_if_over()  # nobody may be left who could say so
        workshop = self._load()
        self._loading = False
        try:
            link = self._connect()
        except BaseException:
            workshop.close()
            raise
        if link is None:
            workshop.close()
            return 0
        self._link = link
        self._attach(workshop)
        try:
            if self._first_contact():
                self._begin(workshop)
                self._work()
            return 0
        finally:
            self._close(workshop)

    def _attach(self, workshop: Workshop | Fleet) -> None:
        """The engine in its thread or its processes, and what wakes this loop for its reports."""
        self._wake_in, wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        wake_out.setblocking(False)
        if isinstance(workshop, Fleet):
            workshop.wake = lambda: _poke(wake_out)
            self._engine: reports.Solo | Fleet = workshop
        else:
            self._engine = reports.Solo(workshop, lambda: _poke(wake_out), self._log)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._watch_link()

    def _begin(self, workshop: Workshop | Fleet) -> None:
        """The core's first event, with everything this node has kept."""
        options, book = self._options, self._notebook
        self._peers, dial = peers.open_peers(options, self._link.address, self._log)
        about = dataclasses.replace(workshop.about, addresses=dial, catch_up=options.catch_up)
        self._state = node.new(self._lock, about)
        raws = book.raws
        checkpoint.sweep(options.folder / checkpoint.FOLDER)
        height, digest = self._resume(workshop, raws)
        kept = checkpoint.kept(options.folder, self._lock)
        now = time.monotonic()
        self._mind_duty(now)
        self._step(events.Started(now, book.term, raws, height, digest, kept, book.proof))

    def _work(self) -> None:
        """Until the core says that it is over; DaemonError when that is not as it should be."""
        while self._stopped is None:
            self._turn()
        reason, code = self._stopped
        self._log.log(logging.ERROR if code else logging.INFO, "stopped: %s", reason)
        if code:
            raise DaemonError(reason)

    def _load(self) -> Workshop | Fleet:
        began, options = time.monotonic(), self._options
        workshop: Workshop | Fleet
        if options.lanes:
            options = gpugroups.settle(options, self._lock, self._log)
            used = [device for spec in options.lanes for device in devices.lane(spec).devices]
            who = devices.who(options.name, options.run)
            self._devices = devices.claim(tuple(dict.fromkeys(used)), who)
            workshop = Fleet(options, self._lock, self._log)
        else:
            workshop = nodeoptions.loader(options.loader)(options, self._lock)
        try:
            if isinstance(workshop, Fleet):
                workshop.wait_loaded()
            else:
                nodeoptions.check_base(workshop.digest(), self._lock)
        except BaseException:
            workshop.close()
            raise
        about = workshop.about
        lanes = f"{about.lanes} lanes, " if about.lanes > 1 else ""
        where = f"{lanes}kernel {about.backend} on {about.device}"
        self._log.info("ready in %.1f s: %s", time.monotonic() - began, where)
        return workshop

    def _resume(self, workshop: Workshop | Fleet, raws: Sequence[bytes]) -> tuple[int, int]:
        """Load the newest snapshot of this node's own that fits its ledger: (entries reflected, D)."""
        if not checkpoint.kept(self._options.folder, self._lock):
            return 0, self._lock.digest
        height, digest = workshop.rewind([parse(raw) for raw in raws])
        if height:
            self._log.info("resumed from a snapshot behind entry %d", height)
        return height, digest

    def _connect(self) -> Link | None:
        """Find out where the coordinator is and open the socket; None when told to leave meanwhile."""
        options = self._options
        self._contact_by = time.monotonic() + options.wait
        key_file = nodeoptions.key_file(options.run)  # a first start writes it a moment before it listens
        while not ((addresses := nodeoptions.addresses(options)) and (options.plain or key_file.exists())):
            if self._leave is not None:
                return None
            if time.monotonic() > self._contact_by:
                if addresses:
                    break  # and say that the key is missing
                raise DaemonError(nodeoptions.no_coordinator(options.run))
            time.sleep(TICK_SECONDS)
        server_key = None if options.plain else nodeoptions.pinned_key(options.run)
        return Link(addresses, server_key, self._secret)

    def _first_contact(self) -> bool:
        """Wait for the connection; False when told to leave. DaemonError when it cannot come about."""
        while not self._link.connections:
            now = time.monotonic()
            self._poller.poll(int(TICK_SECONDS * 1000))
            self._link.receive()
            self._mind_link(now)
            health = self._link.health(now)
            late = now > self._contact_by
            if late or (health.hopeless and now - health.since > HOPELESS_SECONDS):
                why = "" if health.state == State.REFUSED else reach.sentence(self._link.address)
                if late or not why:
                    raise DaemonError(f"{why or health.sentence} (for the run in {self._options.run})")
            if self._leave is not None:
                return False
        return True

    def _turn(self) -> None:
        self._poller.poll(int(TICK_SECONDS * 1000))
        now = time.monotonic()
        before = self._link.connections
        for message in self._link.receive():
            self._step(events.Received(now, message))
        if self._link.connections != before:  # unknown over there until Hello: said without a round trip
            self._step(events.Received(now, Rehello()))
        self._hear_engine(now)
        self._hear_peers(now)
        if self._leave is not None and self._leave_by == float("inf"):
            self._leave_by = now + LEAVE_SECONDS
            self._step(events.Leave(now, self._leave))
        if now > self._leave_by:
            self._stop(self._leave or "left", 0)
        self._mind_duty(now)
        self._step(events.Tick(now))
        self._mind_link(now)

    def _step(self, event: events.Event) -> None:
        """Step the core, adopt its state, perform its effects in order."""
        if self._stopped is None:
            self._state, effects = node.step(self._state, event)
            for effect in effects:
                self._perform(effect)

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.Send(message):
                self._link.send(message)
            case FetchSnapshot() | FetchEntries() | StopFetch():
                if self._peers is not None:
                    self._peers.perform(effect)
            case events.Store(first, raws):
                self._notebook.store(first, raws)
            case events.Orphan(first, raws):
                kept = self._notebook.orphan(first, raws)
                self._log.warning("%d entries of another branch are kept in %s", len(raws), kept)
            case events.StoreTerm(term, proof):
                self._notebook.store_term(term, proof)
            case events.Note(kind, fields):
                self._log.info("%s", logfile.sentence(kind, fields))
            case events.Stop(reason, code):
                self._stop(reason, code)
            case _:
                state = self._state
                self._engine.ask(effect, state.chain.entries, state.applied + state.applying)

    def _stop(self, reason: str, code: int) -> None:
        self._stopped = self._stopped or (reason, code)

    # ------------------------------------------------------------ engine and link

    def _hear_engine(self, now: float) -> None:
        _drain(self._wake_in)
        for event in self._engine.events(now):
            self._step(event)

    def _hear_peers(self, now: float) -> None:
        if self._peers is not None:
            self._peers.relay(self._link.address, self._state.relay)
            for event in self._peers.events(now):
                self._step(event)

    def _mind_duty(self, now: float) -> None:
        """Pause and resume as this machine's owner wants."""
        if self._duty is not None and self._duty.look(now):
            reason = self._duty.reason
            self._step(events.Pause(now, reason) if reason else events.Resume(now))

    def _mind_link(self, now: float) -> None:
        """Log changes of the connection; follow a coordinator of this folder that listens elsewhere now."""
        health = self._link.health(now)
        if self._link.is_news(health):
            usual = health.state in (State.CONNECTED, State.CONNECTING)
            self._log.log(logging.INFO if usual else logging.WARNING, "%s", health.sentence)
        if health.state == State.REFUSED and self._link.shut_out:
            raise DaemonError(health.sentence)
        changed = self._link.refresh(now)
        if not self._options.coordinator and health.state != State.CONNECTED and now > self._next_look:
            self._next_look = now + ADDRESS_SECONDS
            published = nodeoptions.published_address(self._options.run)
            if published and published != (self._link.address,):
                self._link.redirect(published)
                changed = True
        if changed:
            self._watch_link()

    def _watch_link(self) -> None:
        for stale, _ in list(self._poller.sockets):
            if stale is not self._wake_in:
                self._poller.unregister(stale)
        for fresh in self._link.sockets:
            self._poller.register(fresh, zmq.POLLIN)

    def _close(self, workshop: Workshop | Fleet) -> None:
        clean = self._stopped is not None and self._stopped[1] == 0
        self._link.close(farewell=clean)
        if self._peers is not None:
            self._peers.close()
        self.stuck = not self._engine.close(wait=2.0 if clean else 0.5) or self._leave is not None
        workshop.close()
        self._notebook.close()


# ---------------------------------------------------------------- small parts


def _poke(wake: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):  # full of earlier pokes: the loop will wake up anyway
        wake.send(b"x")


def _drain(wake: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):  # that is: empty
        while wake.recv(4096):
            continue


# ---------------------------------------------------------------- process


def limit_threads(threads: int) -> None:
    """Must run before torch, numba and numpy are imported: they read these once."""
    os.environ.update(devices.thread_limits(threads))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, work, and turn refusals into one sentence and exit code 1."""
    options = nodeoptions.parse(arguments)
    limit_threads(options.threads)
    log: logging.Logger | None = None
    daemon: Daemon | None = None
    try:
        lock = mending.lock_of(options)
        log = logfile.start(options.run / "logs" / f"{options.name}.log", options.name)
        daemon = Daemon(options, lock, log)
        _on_signals(daemon)
        code = daemon.run()
    except UserError as error:
        logfile.last_words(log, str(error))
        code = error.exit_code
    except OSError as error:
        traceback.print_exc()  # also a fault of ours may look like this
        where = f" ({error.filename})" if error.filename else ""
        logfile.last_words(log, f"{error.strerror}{where}; {logfile.remedy(error.errno)}")
        code = 1
    except Exception:
        traceback.print_exc()
        code = EXIT_BUG
    if daemon is not None and daemon.stuck:  # native code that does not come back must not crash the exit
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    return code


def _on_signals(daemon: Daemon) -> None:
    def leave(number: int, _frame: Any) -> None:
        signal.signal(number, now)
        daemon.request_leave(f"{signal.Signals(number).name} received")

    def now(_number: int, _frame: Any) -> NoReturn:
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)


if __name__ == "__main__":
    sys.exit(main())
