"""The process of one lane: `python -m esnode.laneprocess DESCRIPTOR OPTION...`, options as for the daemon.

Shell: an engine as a single node has it, which does what comes over a socket from the node and reports back.
It ends with the node. A sentence that refuses goes to the node as it is (exit code 1), so does every line of
log and every traceback (exit code 70). Started by `fleet.py`.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace

if __name__ == "__main__":  # also during the imports below
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the node, which ends us

from esnode import leash, nodeoptions, reports
from esnode.engines.wish import LeaderGone
from esnode.enginethread import Broken, EngineThread, Taken
from esnode.events import Progress
from esnode.lanewire import Alive, Bound, Loaded, Log, Need, Pipe, Planned, Refresh, Refused, Reread, Where
from protocol.errors import UserError
from protocol.messages import Unit

EXIT_REFUSED, EXIT_BUG = 1, 70
REPORT_SECONDS = 0.2
ALIVE_SECONDS = 5.0


class _ToNode(logging.Handler):
    """Log lines go to the node."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send(Log(record.levelno, self.format(record)))


class LaneProcess:
    """One engine and the connection to its node."""

    def __init__(self, pipe: Pipe, options: nodeoptions.Options) -> None:
        self._pipe = pipe
        wish = replace(options.wish, ask=self._ask)
        self._options = replace(options, wish=wish, planned=lambda *sizes: pipe.send(Planned(*sizes)))
        self._where: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._follows = False  # a master that another lane writes
        self._engine: EngineThread | None = None
        self._wake = threading.Event()
        self._told: dict[Unit, int] = {}
        for name, target in (("node", self._listen), ("alive", self._beat)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def run(self) -> int:
        """Load, then work until the node is gone; the exit code."""
        options = self._options
        lock = nodeoptions.read_lock(options.run)
        workshop = nodeoptions.loader(options.loader)(options, lock)
        if not self._follows:  # else `Refresh` comes, and its answer is compared with the leader's D
            nodeoptions.check_base(workshop.digest(), lock)
        self._engine = EngineThread(workshop, self._wake.set)
        about = workshop.about
        self._pipe.send(
            Loaded(
                *(lock.run_id, about.backend, about.device, about.selftest),
                *(about.fingerprint, about.versions),
                workshop.host_path,
            )
        )
        while True:
            self._wake.wait(REPORT_SECONDS)
            self._wake.clear()
            self._tell_progress(self._engine)
            for report in self._engine.reports():
                if isinstance(report, Broken):
                    self._pipe.send(Log(logging.ERROR, report.sentence or report.trace))
                    if report.rows:
                        self._pipe.send(Bound(report.rows))
                    return EXIT_BUG
                if isinstance(report, Taken):
                    self._pipe.send(Reread(report.digest))
                else:
                    self._pipe.send(reports.event_of(0.0, report))

    def _ask(self) -> str:
        """The path of the master in host memory that another lane leads; empty: this one is to lead."""
        self._pipe.send(Need())
        path = self._where.get()
        self._follows = bool(path)
        return path

    def _tell_progress(self, engine: EngineThread) -> None:
        now = dict(engine.progress)
        for unit, thousandths in now.items():
            if self._told.get(unit) != thousandths:
                self._pipe.send(Progress(0.0, unit, thousandths))
        self._told = now

    def _listen(self) -> None:
        """Do what the node asks. Its end is ours, also in the middle of anything."""
        try:
            while (effect := self._pipe.receive()) is not None:
                if isinstance(effect, Where):
                    self._where.put(effect.path)
                    continue
                assert self._engine is not None, "nothing is asked before the engine is there"
                if isinstance(effect, Refresh):
                    self._engine.refresh()
                else:
                    reports.ask(self._engine, effect)
        except Exception:
            self._pipe.send(Log(logging.ERROR, traceback.format_exc()))
            os._exit(EXIT_BUG)
        leash.end_group()

    def _beat(self) -> None:
        """Say that this process runs. An engine that lets nobody else run, or a SIGSTOP, ends that."""
        try:
            while True:
                self._pipe.send(Alive())
                time.sleep(ALIVE_SECONDS)
        except OSError:
            return  # the node is gone, which the other thread hears


def main() -> int:
    """Run one lane."""
    leash.hold(0)  # with all it starts, ranks that load included
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    options = nodeoptions.parse(sys.argv[2:])
    log = logging.getLogger(options.name)
    log.setLevel(logging.DEBUG if os.environ.get("ESNODE_DEBUG") else logging.INFO)
    logging.getLogger().addHandler(_ToNode(pipe))
    try:
        return LaneProcess(pipe, options).run()
    except LeaderGone as error:  # it died meanwhile: begin again, behind another one
        pipe.send(Log(logging.WARNING, str(error)))
        return EXIT_BUG
    except UserError as error:
        pipe.send(Refused(str(error)))
        return EXIT_REFUSED
    except Exception:
        pipe.send(Log(logging.ERROR, traceback.format_exc()))
        return EXIT_BUG


if __name__ == "__main__":
    code = main()
    os._exit(code)  # without the interpreter's end: torch takes seconds for it
