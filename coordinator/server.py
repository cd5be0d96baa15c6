"""The coordinator process: `python -m coordinator.server --data DIR --bind tcp://127.0.0.1:0`.

Shell around the pure core. Lives here: the loop and its order of effects. Every turn drains the socket,
steps the core once per message, flushes everything it must remember in one transaction, adopts the new
state, and only then speaks. Needs no torch. Exit codes: 0 the run is over or was asked to stop, 1 refused
in one sentence on stderr, 3 another coordinator is at work, 70 a bug.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # during the imports below nothing is held yet: Ctrl-C just ends it
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import zmq

from coordinator import amend, greeting, heir, machine, process, reach
from coordinator.admin import Admin
from coordinator.blobs import Shelf
from coordinator.events import (
    Effect,
    Event,
    Note,
    OpsChanged,
    Persist,
    Received,
    Recovery,
    RelayOpened,
    ResultAccepted,
    Send,
    Started,
    Stop,
    StopRequested,
    Tick,
)
from coordinator.gate import BindError, Gate
from coordinator.journal import Journal, entries_of
from coordinator.options import parse
from coordinator.orders import Orders
from coordinator.outputs import Outputs
from coordinator.relay import read_status
from coordinator.relaychild import RelayChild, relay_bind
from coordinator.setup import Setup, publish_address, usual_address
from protocol import logfile
from protocol.entries import EntryKind
from protocol.entries import parse as parse_entry
from protocol.errors import UserError
from protocol.keys import curve_public
from protocol.messages import Ack, Assign, Unit

if TYPE_CHECKING:
    from coordinator.scrape import Scrape

TICK_SECONDS = 0.25
BATCH = 512  # frames per turn: one flush for all of them
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class Server:
    """One coordinator on one run folder. `run` returns the exit code."""

    def __init__(
        self,
        setup: Setup,
        bind: str,
        plain: bool,
        log: logging.Logger,
        *,
        scrape: Scrape | None = None,
        advertise: Sequence[str] = (),
        relay: str = "",
        relay_mbit: float = 0.0,
        recover: Path | None = None,
        force: bool = False,
    ) -> None:
        """Recall the journal and listen.

        `scrape`: the port for Prometheus, closed by `close`; `advertise`: addresses for invites, see
        `reach.advertised`; `relay`: where the relay shall listen, "" for none; `relay_mbit`: most it may
        carry, Mbit/s, 0 for no limit; `recover`: the ledger that a successor begins with, `force`: it does
        not count who has answered.
        """
        self._setup = setup
        self._scrape = scrape
        self._log = log
        self._born = time.monotonic()
        self._journal = Journal(setup.folder / "coordinator" / "journal.sqlite", setup.lock.run_id)
        self._recover = ("force" if force else "wait") if recover is not None else ""
        if recover is not None:
            heir.prepare(self._journal, recover)
        self._state = self._recall()
        self._outputs = Outputs(setup.folder, log)
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = Gate(self._context, None if plain else setup.curve_secret, self._state.guests)
        self._gate.blobs = Shelf(setup.lock, setup.folder / "task.jsonl").answer
        self.address = self._bind(bind)
        self._orders = Orders(
            lambda: self._state,
            lambda event: self._process([event]),
            b"" if plain else curve_public(setup.curve_secret),
            lambda: reach.advertised(self.address, advertise),
        )
        if advertise:
            reach.advertised(self.address, advertise)  # refused now, not when somebody is to be invited
        self._admin = Admin(setup.folder / "coordinator", self._answer)
        self._poller = zmq.Poller()
        for socket in (*self._gate.sockets, self._admin.socket):
            self._poller.register(socket, zmq.POLLIN)
        self._relay = RelayChild(setup.folder, "" if plain else relay, log, relay_mbit)
        self._assigned: dict[tuple[bytes, Unit], int] = {}  # bytes of each Assign, until its result is in
        self._reported: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._stop_reason: str | None = None
        self._stopped: Stop | None = None

    # ------------------------------------------------------------ start

    def _recall(self) -> machine.State:
        """State of the journal; the ledger file is brought to the journal's chain."""
        state = machine.new(self._setup.lock, self._setup.ops, self._setup.signing_seed, self._setup.roster)
        cut = False
        for record in self._journal.replay():
            cut = cut or isinstance(record, Recovery)
            state = machine.recall(state, record)
        raws = [entry.raw for entry in state.chain.entries]
        self._ledger, added = heir.open_file(self._setup.ledger_path, raws, cut)
        if added or self._ledger.cut:
            self._log.info("ledger file completed from the journal: %d entries added", added)
        return state

    def _bind(self, bind: str) -> str:
        """Listen, preferring the port of the last start when any will do: nodes are still trying that one."""
        usual = usual_address(self._setup.folder, bind)
        if usual:
            try:
                return self._gate.bind(usual)
            except BindError as error:
                self._log.info("not on the old address: %s", error)
        return self._gate.bind(bind)

    def request_stop(self, reason: str) -> None:
        """Ask the loop to end cleanly; safe in a signal handler."""
        self._stop_reason = self._stop_reason or reason

    # ------------------------------------------------------------ the loop

    def run(self, invites: int = 0) -> int:
        """Serve until the core stops; `invites` of them are printed as soon as nodes may come."""
        publish_address(self._setup.folder, self.address)
        self._log.info("serving run %s on %s", self._setup.lock.run_id.hex()[:12], self.address)
        now = time.monotonic()
        term, entropy = machine.next_term(self._state), os.urandom(40)
        self._process([Started(now, term, entropy[:8], time.time(), entropy[8:], self._recover)])
        made = [self._orders.invite() for _ in range(invites if self._stopped is None else 0)]
        greeting.show(made, self._setup.folder, self.address)
        next_tick = now
        while self._stopped is None:
            self._poller.poll(max(0, int((next_tick - time.monotonic()) * 1000)))
            now = time.monotonic()
            events: list[Event] = [*self._gate.receive(BATCH)]
            self._admin.serve()
            if self._scrape is not None:
                self._scrape.feed(self._status)
            if now >= next_tick:
                events += self._ticked(now)
                next_tick = now + TICK_SECONDS
            self._process(events)
        self._log.info("stopped: %s", self._stopped.reason)
        if self._stopped.code == 0:
            self._log.info("%s", greeting.farewell(self._setup.folder, self._state.chain.ended))
        return self._stopped.code

    def _ticked(self, now: float) -> list[Event]:
        events: list[Event] = [Tick(now, time.time())]
        if self._relay.look(now):
            events.append(RelayOpened(now, self._relay.port))
        ops = self._setup.changed_ops(self._log)
        if ops is not None:
            events.append(OpsChanged(now, ops))
        if self._stop_reason is not None:
            events.append(StopRequested(now, self._stop_reason))
        return events

    def _process(self, events: Sequence[Event]) -> None:
        """Step all events, flush once, adopt, then perform the rest in order (see `events.py`)."""
        state, caused = machine.fold(self._state, events)
        records = [effect.record for effects in caused for effect in effects if isinstance(effect, Persist)]
        self._journal.append(records)
        self._state = state
        rare = [record for record in records if not isinstance(record, ResultAccepted)]
        self._ledger = heir.extend(self._ledger, rare)
        for event, effects in zip(events, caused, strict=True):
            self._perform(event, effects)
        self._gate.flush()
        self._outputs.flush()
        if self._state.guests is not self._gate.guests:  # now: whoever was put out has been told
            self._gate.admit(self._state.guests)
        for raw in entries_of(rare):
            self._prune(raw)

    def _perform(self, event: Event, effects: Sequence[Effect]) -> None:
        sizes: dict[str, int] = {}
        for effect in effects:
            if isinstance(effect, Send):
                message = effect.message
                size = self._gate.send(effect.peer, message)
                if isinstance(message, Ack):
                    sizes["Ack"] = size  # its line is not written yet
                elif isinstance(message, Assign):
                    self._assigned[effect.peer, message.unit] = size
            elif isinstance(effect, Persist):
                if isinstance(effect.record, ResultAccepted) and isinstance(event, Received):
                    assigned = self._assigned.pop((event.peer, effect.record.result.unit), 0)
                    sizes = {"Assign": assigned, "Result": event.size}
                    self._outputs.unit(effect.record, self._state.nodes[event.peer].name, sizes)
            elif isinstance(effect, Note):
                self._outputs.note(effect, **(self._bytes_by_type() if effect.kind == "commit" else {}))
                if effect.kind == "commit" and self._scrape is not None:
                    self._scrape.round_closed(effect.fields["seconds"])
            elif isinstance(effect, Stop):
                self._stopped = effect

    def _prune(self, raw: bytes) -> None:
        entry = parse_entry(raw)
        if entry.kind == EntryKind.COMMIT:
            self._journal.prune(entry.round)
            self._assigned = {key: size for key, size in self._assigned.items() if key[1].round > entry.round}

    # ------------------------------------------------------------ numbers

    def _bytes_by_type(self) -> dict[str, Any]:
        """What has passed since the last commit, for a commit's line."""
        counts, before = self._gate.counts, self._reported
        self._reported = (counts.bytes_in.copy(), counts.bytes_out.copy())
        return {
            "bytes_in": dict(self._reported[0] - before[0]),
            "bytes_out": dict(self._reported[1] - before[1]),
        }

    def _status(self) -> dict[str, Any]:
        """The core's picture and what only the process knows."""
        return machine.status(self._state) | {
            "address": self.address,
            "pid": os.getpid(),
            "uptime": round(time.monotonic() - self._born, 1),
            "wire": self._gate.counts.as_dict(),
            "places": {key.hex(): self._gate.place(key) for key in self._state.nodes},
            "relay": read_status(self._setup.folder) if self._relay.port else None,
        }

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request of the administration socket."""
        order = self._orders.answer(request)
        if order is not None:
            return order
        if request.get("op") == "status":
            return self._status()
        if request.get("op") == "stop":
            self.request_stop(str(request.get("reason", "stopped by the operator")))
            return {"ok": True}
        if request.get("op") == "amend":
            return self._amend(request)
        known = "status, stop, invite, nodes, allow, revoke and amend"
        return {"error": f"unknown request {request.get('op')!r}; there are {known}"}

    def _amend(self, request: dict[str, Any]) -> dict[str, Any]:
        """Journal the operator's change before saying that it will be made."""
        event, reason = amend.asked(self._state, request)
        if event is None:
            return {"error": reason}
        self._process([event])
        return {"ok": True, **amend.told(event), "rounds": self._state.ops.rounds}

    def close(self) -> None:
        """Let go of everything; queued goodbyes may leave after a clean stop."""
        if self._scrape is not None:
            self._scrape.close()
        self._relay.close()
        self._admin.close()
        self._gate.close(farewell=self._stopped is not None)
        self._context.term()
        self._outputs.close()
        self._ledger.close()
        self._journal.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, serve, and turn refusals into one sentence and exit code 1."""
    options = parse(arguments)
    log: logging.Logger | None = None
    try:
        setup = Setup.load(options.data)
        log = logfile.start(options.data / "logs" / "coordinator.log", "coordinator")
        return _serve(setup, options, log)
    except UserError as error:
        logfile.last_words(log, str(error))
        return error.exit_code
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        logfile.last_words(log, f"{error.strerror}{where}; {logfile.remedy(error.errno)}")
        return 1
    except Exception:
        traceback.print_exc()
        return EXIT_BUG


def _serve(setup: Setup, options: argparse.Namespace, log: logging.Logger) -> int:
    process.raise_file_limit(len(setup.roster), log)
    process.take_turns()
    scrape = None
    if options.metrics:
        from coordinator.scrape import Scrape  # late: it loads a web server that few ask for

        scrape = Scrape(options.metrics)
        log.info("metrics at http://%s/metrics", scrape.address)
    server = Server(
        setup,
        options.bind,
        options.plain,
        log,
        scrape=scrape,
        advertise=options.advertise,
        relay=relay_bind(options.relay, options.bind),
        relay_mbit=options.relay_mbit,
        recover=options.recover_from,
        force=options.force,
    )

    def stop(number: int, _frame: Any) -> None:
        signal.signal(number, lambda *_: os._exit(EXIT_INTERRUPTED))  # the journal survives anything
        server.request_stop(f"{signal.Signals(number).name} received")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    process.keep_memory()
    try:
        return server.run(options.invites)
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
