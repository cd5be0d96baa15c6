"""`esnode run`: a coordinator and its nodes as processes of this machine, from the plan to the report.

Phases: take the folder, settle the plan (`begin.py`), train (here), finish (`finish.py`). Ctrl-C, SIGTERM
and kill -9 in any of them leave a folder that `--resume` continues to the same bits: the truth is the
coordinator's journal, and this process keeps nothing that matters. Called by `cli/run.py`.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from esnode import admin, begin, finish, folder, planfile, progress
from esnode.begin import Request
from esnode.board import Board
from esnode.children import Child, ChildFailed, Children
from esnode.folder import RunFolder
from esnode.history import Costs, LedgerTail, Tail, title_of
from esnode.progress import Snapshot, say
from protocol import ledger, plan
from protocol.counting import rounds as counted
from protocol.errors import UserError
from protocol.lock import Lock

RUNS = Path("runs")
LOOK_SECONDS = 0.25
LISTEN_SECONDS = 60.0  # a coordinator that replays a long journal on a slow disk still makes it
ALONE_SECONDS = 8.0  # a coordinator without any node left gets this long to end by itself
INTERRUPTED = 130


class RunStopped(UserError):
    """The processes ended although the run did not."""


def run(request: Request, console: Console) -> int:
    """Do it all; returns the exit code. UserError for whatever the user can mend."""
    place = choose(request)
    with interruptible():
        descriptor = folder.occupy(place)
        try:
            _phases(place, request, console, descriptor)
        except KeyboardInterrupt:
            # Everything is stopped already: a second Ctrl-C must not change the exit code any more.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            say(
                console,
                f"\nStopped; everything so far is kept. Continue with:\n  {resume_command(place, request)}",
            )
            return INTERRUPTED
        finally:
            os.close(descriptor)
    return 0


def choose(request: Request) -> RunFolder:
    """The folder to work in: the one named, the newest one (`--resume` alone), or a new one under runs/."""
    if request.resume:
        begin.require_resumable(request)
        return folder.open_run(request.out or newest(RUNS))
    task = plan.parse(begin.draft(request)).task  # refuses a bad plan before anything is created
    if request.out is not None:
        return folder.create(request.out)
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in Path(task).stem)[:60]
    return folder.create(RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}")


def newest(runs: Path) -> Path:
    """The run folder under `runs` whose files changed last."""
    found = [path.parent for path in runs.glob("*/plan.toml")]
    if not found:
        raise folder.FolderError(f"there is no run under {runs}/; name the run's folder.")
    return max(found, key=lambda path: max(entry.stat().st_mtime for entry in path.iterdir()))


def resume_command(place: RunFolder, request: Request) -> str:
    """What to type to continue in the same way."""
    words = ["esnode", "run", "--resume", "--out", str(place.path)]
    if request.code is not None:
        words += ["--code", str(request.code)]
    for flag, value, default in (
        ("--nodes", request.nodes, Request.nodes),
        ("--threads", request.threads, Request.threads),
    ):
        if value != default:
            words += [flag, str(value)]
    return shlex.join([*words, *request.typed])


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal end a run as cleanly as Ctrl-C does."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # What is ignored was ignored on purpose: `nohup` does so with SIGHUP.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _phases(place: RunFolder, request: Request, console: Console, descriptor: int) -> None:
    try:
        folder.require_space(place)
        say(console, f"run folder {place.path}")
        with progress.bars(console) as tell:
            lock = begin.settle(place, request, tell)
    except Exception:  # after a Ctrl-C alone there is something to resume
        if not request.resume:
            begin.discard(place)
        raise
    say(
        console,
        f"run {lock.run_id.hex()[:16]}: {title_of(lock)}, {lock.members} members per round",
    )
    if not _ended(place, lock, request.rounds):
        _train(place, lock, request, console, descriptor)
    with progress.bars(console) as tell:
        outcome = finish.finish(place, request, tell)
    finish.show(outcome, console)


def _ended(place: RunFolder, lock: Lock, wanted: int | None = None) -> bool:
    """Whether the ledger has its END entry; RequestError when more rounds than that are `wanted`.

    A ledger that a crash cut anywhere is not ended: the coordinator repairs it from its journal.
    """
    if not place.ledger.exists():
        return False
    reading = ledger.read(place.ledger)
    if reading.chain.height and reading.chain.lock.run_id != lock.run_id:
        raise folder.FolderError(
            f"{place.ledger} is the ledger of another run than {place.lock}. "
            "Move it away; this run's own is written again from its journal."
        )
    if not reading.ended:
        return False
    if wanted is not None and wanted > reading.chain.round:
        raise begin.RequestError(
            f"this run has ended after {counted(reading.chain.round)}, nothing can follow. "
            f"Train on with `esnode fork {place.path} --plan PLAN`."
        )
    return True


# ---------------------------------------------------------------- training


@dataclass
class Watch:
    """Everything the display follows, refreshed at each look."""

    place: RunFolder
    lock: Lock
    rounds: int
    ledger: LedgerTail
    units: Tail
    metrics: Tail
    board: Board
    resume: str  # the command that continues this run
    costs: Costs = field(default_factory=Costs)
    times: dict[int, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    status: dict[str, Any] = field(default_factory=dict)

    def look(self, restarts: int) -> Snapshot:
        """Read what is new in the folder and ask the coordinator."""
        for row in self.units.new():
            self.costs.add_unit(row)
        for row in self.metrics.new():
            self.costs.add_metric(row)
            if row["kind"] == "commit":
                self.times[row["round"]] = row["time"]
        past = self.ledger.refresh()
        self.board.update(past, self.times)
        try:
            self.status = admin.ask(self.place.path, "status", wait=1.0)
        except admin.NoCoordinator:
            self.status = {}
        elapsed = time.monotonic() - self.began
        return Snapshot(past, self.costs, self.status, self.rounds, elapsed, restarts)


def _train(place: RunFolder, lock: Lock, request: Request, console: Console, descriptor: int) -> None:
    """Run coordinator and nodes until the ledger has its END entry."""
    rounds = planfile.read_plan(place.plan).ops.rounds
    names = [f"node-{number}" for number in range(1, request.nodes + 1)]
    begin.admit(place, names)
    board = Board(place)
    watch = Watch(
        place,
        lock,
        rounds,
        LedgerTail(place.ledger, lock),
        Tail(place.units),
        Tail(place.metrics),
        board,
        resume_command(place, request),
    )
    children = Children()
    try:
        _start(place, names, request, descriptor, children)
        _follow(watch, children, console)
        if _ended(place, lock):  # else the nodes would wait for the coordinator's return
            children.wait(folder.STALE_WAIT)
    except KeyboardInterrupt:
        say(console, "stopping coordinator and nodes")
        raise
    finally:
        children.stop()
        watch.look(children.restarts)
        board.close()
    if not _ended(place, lock):
        raise RunStopped(
            f"the coordinator was stopped before the last round. Continue with `{watch.resume}`."
        )


def _start(place: RunFolder, names: list[str], request: Request, descriptor: int, children: Children) -> None:
    address_file = place.coordinator / "address"
    address_file.unlink(missing_ok=True)
    arguments = ("--data", str(place.path), "--bind", "tcp://127.0.0.1:0")
    log = place.log("coordinator")
    children.add(Child("coordinator", "coordinator.server", arguments, log, keep_open=(descriptor,)))
    for name, lanes in zip(names, request.lanes or ((),) * len(names), strict=True):  # they load meanwhile
        children.add(_node(place, name, lanes, request, descriptor))
    deadline = time.monotonic() + LISTEN_SECONDS
    while not address_file.exists():
        children.look(time.monotonic())
        if time.monotonic() > deadline:
            raise ChildFailed(f"the coordinator does not start to listen; its log is {log}.")
        time.sleep(0.05)


def _node(place: RunFolder, name: str, lanes: Sequence[str], request: Request, descriptor: int) -> Child:
    arguments = ("--run", str(place.path), "--name", name, "--threads", str(request.threads))
    code = ("--code", str(request.code)) if request.code else ()
    words = (*arguments, *code, *request.node_words, *(word for lane in lanes for word in ("--lane", lane)))
    return Child(name, "esnode.daemon", words, place.log(name), keep_open=(descriptor,))


def _follow(watch: Watch, children: Children, console: Console) -> None:
    """Show the run until the coordinator ends."""
    past = watch.ledger.refresh()
    shown = len(past.rounds), len(past.heldout)  # those of before a resume are no news
    if console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for now in _looks(watch, children):
                live.update(progress.view(now), refresh=True)
        return
    for now in _looks(watch, children):
        shown = _print_news(now, shown, console)
    _print_news(watch.look(children.restarts), shown, console, all_of_them=True)


def _looks(watch: Watch, children: Children) -> Iterator[Snapshot]:
    """A snapshot every moment while the coordinator runs; what crashed is restarted in between."""
    coordinator = children.all["coordinator"]
    nodes = [child for child in children.all.values() if child is not coordinator]
    alone_since: float | None = None
    while coordinator.code != 0:  # crashes and refusals are `look`'s business
        now = time.monotonic()
        children.look(now)
        if all(node.code == 0 for node in nodes):
            alone_since = alone_since or now
            if now - alone_since > ALONE_SECONDS:
                raise RunStopped(f"all nodes have left. Continue with `{watch.resume}`.")
        yield watch.look(children.restarts)
        time.sleep(LOOK_SECONDS)


def _print_news(
    now: Snapshot, shown: tuple[int, int], console: Console, all_of_them: bool = False
) -> tuple[int, int]:
    """Print the rounds and held-out scores that came since; how many of each have been printed. A round is a
    line in the ledger a moment before its seconds are in the metrics: it waits for them."""
    rounds, scores = shown
    for row in now.history.rounds[rounds:]:
        scores = _print_scores(now, rounds, scores, console)  # measured before the round
        newest = row is now.history.rounds[-1]
        if newest and row.round not in now.costs.round_seconds and not all_of_them:
            return rounds, scores
        say(console, progress.line(row, now.costs, now.rounds))
        rounds += 1
    return rounds, _print_scores(now, rounds, scores, console)


def _print_scores(now: Snapshot, rounds: int, scores: int, console: Console) -> int:
    """Those of the weights after `rounds` rounds, or fewer."""
    for score in now.history.heldout[scores:]:
        if score.round > rounds:
            break
        say(console, progress.score_line(score))
        scores += 1
    return scores
