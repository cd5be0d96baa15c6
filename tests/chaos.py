"""Random kill -9, SIGSTOP, SIGTERM and restarts of a coordinator and four nodes, all real processes.

Two of the nodes have two engine processes (lanes) each, which are killed and stopped too: their node must go
on. With `--netns` each process lives in a network namespace of its own behind 10 Mbit/s, and links are cut;
with `--tiny` the engine is a real (tiny) language model. `python -m tests.chaos --minutes 30 --seed 1` tells
the story as it happens and ends with a verdict and the line that repeats it.

The schedule is drawn from the seed before anything starts. The supervisor here does what systemd would: it
starts again what was hit. Whatever else ends by itself before the run does is a violation, for it would need
a hand. At the end every reward and digest of the ledger must be those of a run without faults, which is
computed in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol import ledger
from protocol.chain import Chain
from protocol.entries import Admission, CommitBody, EndBody, LockBody, MemberReward, RosterBody, seal
from protocol.lock import Lock
from protocol.messages import Kind, Unit
from tests import netns, toy_engine, warden
from tests.runs import SIGNING_SEED, Processes, make_folder

COORDINATOR = "coordinator"
NODES = ("n1", "n2", "n3", "n4")
EVERYBODY = (COORDINATOR, *NODES)
FOREVER = 10**6  # rounds; the plan file is amended when the time of faults is over
LONG = 200.0  # seconds; units of longer runs take longer, so that replays from the base stay short
POLITE = 10.0  # seconds a process has to leave after SIGTERM
HEAL = 90.0  # seconds in which the run must end once nothing is disturbed any more
LOOK = 0.05
STATUS_EVERY = 5.0
DEED_WORDS = {"kill": "kill -9", "pause": "SIGSTOP", "terminate": "SIGTERM", "cut": "cut off"}
LANED = ("n1", "n2")  # nodes with two engine processes
LANES = ("--lane", "cpu", "--lane", "cpu")
LANE_DEEDS = {"lane": signal.SIGKILL, "stall": signal.SIGSTOP}  # to one of those processes
BLACKOUT = 0.04  # share of deeds that hit everybody at once


@dataclass(frozen=True)
class Deed:
    """At second `at`, `victim` is killed, paused or asked to end, and comes back `down` seconds later."""

    at: float
    victim: str
    what: str
    down: float


def schedule(
    seed: int,
    seconds: float,
    gap: float = 2.0,
    longest: float = 12.0,
    cuts: bool = False,
    lanes: bool = False,
) -> list[Deed]:
    """The deeds of a seed in order of time: one every `gap` seconds on average, none on somebody who is down.

    With `cuts` a third of them cut somebody's links, with `lanes` a third hit an engine process. Most
    downtimes are short; one in six is long enough to end leases (up to `longest`).
    """
    chance = random.Random(f"chaos {seed}")
    free = dict.fromkeys(EVERYBODY, 0.0)
    deeds, at = [], 0.0
    while (at := at + chance.expovariate(1 / gap)) < seconds:
        down = chance.uniform(3, longest) if chance.random() < 1 / 6 else chance.uniform(0, 2)
        kinds = ("kill", "kill", "pause", "terminate")
        kinds += ("cut", "cut") * cuts + ("lane", "stall") * lanes
        what = chance.choice(kinds)
        if what in LANE_DEEDS:
            victims: Sequence[str] = (chance.choice(LANED),)
        else:
            victims = EVERYBODY if chance.random() < BLACKOUT else (chance.choice(EVERYBODY),)
        for victim in victims:
            if free[victim] <= at:
                free[victim] = at + down + 0.5
                deeds.append(Deed(at, victim, what, down))
    return deeds


@dataclass
class Play:
    """One run under a schedule. `perform` returns what went wrong, in words; an empty list is a pass."""

    processes: Processes
    start: dict[str, Callable[[], Any]]
    deeds: list[Deed]
    seconds: float
    say: Callable[[str], None]
    net: netns.Net | None = None
    heal_seconds: float = HEAL
    violations: list[str] = field(default_factory=list)
    rounds: int = 0  # committed when it ended
    longest_wait: float = 0.0  # seconds without a commit, during the faults
    _back: dict[str, float] = field(default_factory=dict)  # who is down, and until when
    _paused: set[str] = field(default_factory=set)
    _cut: set[str] = field(default_factory=set)
    _stalled: list[tuple[float, int]] = field(default_factory=list)  # lanes that are stopped, until when
    lanes_hit: int = 0
    _leaving: dict[str, float] = field(default_factory=dict)  # who was asked to end, and the patience for it

    def perform(self) -> list[str]:
        """Start everybody, disturb, heal, wait for the end."""
        self._began = self._moved = time.monotonic()
        for name in EVERYBODY:
            self.start[name]()
        deeds = iter(self.deeds)
        deed = next(deeds, None)
        told = 0.0
        while (now := self._now) < self.seconds:
            while deed is not None and deed.at <= now:
                self._do(deed)
                deed = next(deeds, None)
            self._supervise()
            if now - told > STATUS_EVERY:
                told = now
                self._tell_status()
            time.sleep(LOOK)
        self._heal()
        return self.violations

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, line: str) -> None:
        self.say(f"{self._now:8.1f} s  {line}")

    def _violation(self, line: str) -> None:
        self.violations.append(line)
        self._tell(f"VIOLATION: {line}")

    def _do(self, deed: Deed) -> None:
        name, process = deed.victim, self.processes.running[deed.victim]
        if name in self._back or process.poll() is not None:
            return  # still on its way from the last deed: this machine is slower than the schedule
        if deed.what in LANE_DEEDS:
            return self._hit_lane(deed, lane_pids(process))
        self._tell(f"{DEED_WORDS[deed.what]} {name}, back in {deed.down:.1f} s")
        self._back[name] = self._now + deed.down
        if deed.what == "kill":
            self.processes.kill(name)
        elif deed.what == "cut":
            assert self.net is not None
            self._cut.add(name)
            self.net.cut(name)
        elif deed.what == "pause":
            self._paused.add(name)
            process.send_signal(signal.SIGSTOP)
        else:
            self._leaving[name] = self._now + POLITE
            process.send_signal(signal.SIGTERM)

    def _hit_lane(self, deed: Deed, pids: Sequence[int]) -> None:
        """Kill or stop one engine process of a node that stays up; the node starts it again by itself."""
        if not pids:
            return  # they are being started
        pid, how = pids[int(deed.at) % len(pids)], LANE_DEEDS[deed.what]
        self._tell(f"{how.name} to lane {pid} of {deed.victim}")
        self.lanes_hit += 1
        _send(pid, how)
        if how is signal.SIGSTOP:
            self._stalled.append((self._now + deed.down, pid))

    def _supervise(self) -> None:
        """Bring back whose time has come; notice who ended unasked."""
        for until, pid in [row for row in self._stalled if row[0] <= self._now]:
            self._stalled.remove((until, pid))
            _send(pid, signal.SIGCONT)
        for name in EVERYBODY:
            process = self.processes.running[name]
            if name in self._leaving:
                self._mind_leaving(name, process.poll())
            elif name in self._back:
                if self._now >= self._back[name]:
                    self._bring_back(name)
            elif process.poll() is not None:
                self._ended(name, process.returncode)

    def _ended(self, name: str, code: int) -> None:
        """Somebody whom nothing hit is gone."""
        words = self.processes.words(name).strip().splitlines()[-1:]
        self._violation(f"{name} ended by itself with code {code}: {words}")
        self.start[name]()

    def _mind_leaving(self, name: str, code: int | None) -> None:
        if code is None and self._now < self._leaving[name]:
            return
        if code is None:
            self._violation(f"{name} did not leave within {POLITE:.0f} s of SIGTERM")
            self.processes.kill(name)
        elif code not in (0, -signal.SIGTERM):  # the latter before it could install its handler
            self._violation(f"{name} left with code {code} after SIGTERM")
        del self._leaving[name]

    def _bring_back(self, name: str) -> None:
        del self._back[name]
        if name in self._paused:
            self._paused.discard(name)
            self.processes.running[name].send_signal(signal.SIGCONT)
            self._tell(f"SIGCONT {name}")
        elif name in self._cut and self.net is not None:
            self._cut.discard(name)
            self.net.heal(name)
            self._tell(f"{name} is connected again")
        else:
            self.start[name]()
            self._tell(f"{name} is started again")

    def _tell_status(self) -> None:
        if self._back.keys() & {COORDINATOR}:
            return
        status = self.processes.status()
        if not status:
            return
        self.longest_wait = max(self.longest_wait, time.monotonic() - self._moved)
        if status["round"] > self.rounds:
            self.rounds, self._moved = status["round"], time.monotonic()
        nodes = ", ".join(map(_standing, status["nodes"])) or "no node"
        members = status["members"]
        self._tell(
            f"term {status['term']}, round {status['round']}, {members['done']}/{members['total']} members; "
            f"{nodes}"
        )

    def _heal(self) -> None:
        """Everybody back and at work, two more rounds, and the run has to end by itself."""
        self._tell("no more faults")
        self._stalled = [(0.0, pid) for _, pid in self._stalled]
        while self._back or self._leaving or self._stalled:
            self._back = dict.fromkeys(self._back, 0.0)
            self._supervise()
            time.sleep(LOOK)
        limit = time.monotonic() + self.heal_seconds
        while time.monotonic() < limit:
            self._supervise()
            status = self.processes.status()
            if sum(node["state"] == "ready" for node in status.get("nodes", [])) == len(NODES):
                break  # who comes after the end would wait for a coordinator in vain
            time.sleep(LOOK)
        wanted = int(status.get("round", 0)) + 2
        plan = self.processes.folder / "plan.toml"
        plan.write_text(re.sub(r"rounds = \d+", f"rounds = {wanted}", plan.read_text()))
        waiting = set(EVERYBODY)
        while waiting and time.monotonic() < limit:
            for name in list(waiting):
                code = self.processes.running[name].poll()
                if code is not None:
                    waiting.discard(name)
                    if code:
                        self._violation(f"{name} ended with code {code} after the last round")
            time.sleep(LOOK)
        for name in sorted(waiting):
            self._violation(f"{name} still runs {self.heal_seconds:.0f} s after the last fault")


def lane_pids(node: subprocess.Popen[bytes]) -> list[int]:
    """The processes of a node's lanes, the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == node.pid and b"esnode.laneprocess" in words:
                found.append(int(entry.name))
    return sorted(found)


def _send(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it went with its node
        os.kill(pid, how)


def _standing(node: dict[str, Any]) -> str:
    why = "" if node["state"] == "ready" else f" ({node['reason']})"
    return f"{node['name']} {node['state']}{why}"


# ---------------------------------------------------------------- what must come out


def fault_free(workshop: Any, lock: Lock, rounds: int) -> Chain:
    """The ledger of a run in which nothing ever happens, by one engine in this process."""
    chain = Chain()

    def add(body: Any, round: int) -> Any:
        return chain.append(
            seal(
                body, parent=chain.tip, term=1, nonce=bytes(8), round=round, digest=workshop.digest(),
                key=SIGNING_SEED,
            )
        )  # fmt: skip

    add(LockBody(lock.to_bytes()), 0)
    add(RosterBody((Admission(1, bytes(32), "one"),)), 0)
    for round in range(rounds):
        members = tuple(_members(workshop, lock, round))
        entry = add(CommitBody(lock.alpha_at(round), lock.sigma_at(round), members), round)
        workshop.apply([entry])
    add(EndBody("done"), rounds)
    return chain


def _members(workshop: Any, lock: Lock, round: int) -> Iterator[MemberReward]:
    last = len(lock.chunks_of(Kind.MEMBER)) - 1
    for index in range(lock.members):
        unit = Unit(round, Kind.MEMBER, index, 0, last)
        sums = workshop.evaluate(unit, lock.sigma_at(round), lambda: False, lambda _: None).result().sums
        yield MemberReward(index, math.fsum(sums) / lock.per_round, 1)


def differences(path: Path, workshop: Any) -> list[str]:
    """How a ledger differs from the fault-free one of as many rounds: [] when every reward and D agree."""
    reading = ledger.read(path)
    if not reading.ended or reading.problem is not None:
        return [f"the ledger is not whole: {reading}"]
    truth = fault_free(workshop, reading.chain.lock, reading.chain.round)
    found = []
    for entry, right in zip(reading.chain.commits, truth.commits, strict=True):
        rewards = [(m.index, m.reward) for m in entry.body.members]
        if entry.digest != right.digest:
            found.append(f"round {entry.round} began at {entry.digest:016x}, not at {right.digest:016x}")
        if rewards != [(m.index, m.reward) for m in right.body.members]:
            found.append(f"the rewards of round {entry.round} are others")
    if reading.chain.entries[-1].digest != truth.entries[-1].digest:
        found.append("the final digests differ")
    return found[:5]


# ---------------------------------------------------------------- whole runs


def toy(folder: Path, deeds: Sequence[Deed], seconds: float, say: Callable[[str], None]) -> Play:
    """A whole run of the toy engine under `deeds`; its violations are complete."""
    make_folder(folder, NODES, FOREVER, **_lock_of(seconds))
    with Processes(folder) as processes:
        words = {name: LANES if name in LANED else () for name in NODES}
        start: dict[str, Callable[[], Any]] = {
            name: lambda n=name: processes.node(n, *words[n]) for name in NODES
        }
        start[COORDINATOR] = processes.coordinator
        play = Play(processes, start, list(deeds), seconds, say)
        play.perform()
    return judged(play, toy_truth)


def across_namespaces(
    folder: Path, deeds: Sequence[Deed], seconds: float, say: Callable[[str], None]
) -> Play:
    """The same with each process in a network namespace: 10 Mbit/s, 1% of packets lost."""
    make_folder(folder, NODES, FOREVER, **_lock_of(seconds))
    with netns.Net(NODES, "10mbit") as net, netns.Site(folder, net) as site:
        for name in NODES:
            net.lose(name, 0.01)
        start: dict[str, Callable[[], Any]] = {name: lambda n=name: site.join(n) for name in NODES}
        start[COORDINATOR] = site.serve
        play = Play(site, start, list(deeds), seconds, say, net)
        play.perform()
    return judged(play, toy_truth)


def tiny_model(folder: Path, deeds: Sequence[Deed], seconds: float, say: Callable[[str], None]) -> Play:
    """The same with a real language model of random weights, on loopback."""
    from tests import tiny_chaos

    tiny_chaos.make_folder(folder, NODES, FOREVER)
    with Processes(folder) as processes:
        start: dict[str, Callable[[], Any]] = {
            name: lambda n=name: processes.node(n, loader="") for name in NODES
        }
        start[COORDINATOR] = processes.coordinator
        play = Play(processes, start, list(deeds), seconds, say, heal_seconds=3 * HEAL)
        play.perform()
    return judged(play, tiny_chaos.load)


def _lock_of(seconds: float) -> dict[str, Any]:
    return {"members": 8, "task_options": {"seconds": 0.08 if seconds < LONG else 0.4}}


def toy_truth(folder: Path) -> Any:
    lock = ledger.read(folder / "run.ledger").chain.lock
    return toy_engine.ToyWorkshop(lock, "truth", 0.0)


def judged(play: Play, truth: Callable[[Path], Any]) -> Play:
    """Add to a run's violations what its logs and its ledger show."""
    folder = play.processes.folder
    for name in EVERYBODY:
        if "Traceback" in play.processes.words(name):
            play.violations.append(f"{name} wrote a traceback")
    if not play.violations:
        play.violations += differences(folder / "run.ledger", truth(folder))
    return play


def main() -> int:
    """The command; exit code 1 on any violation."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Real processes, random kills."
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, default=2.0, help="seconds between deeds, on average")
    parser.add_argument("--netns", action="store_true", help="each process in its network namespace")
    parser.add_argument("--tiny", action="store_true", help="a tiny language model instead of the toy engine")
    parser.add_argument("--keep", type=Path, help="a new folder for the run, kept")
    arguments = parser.parse_args()
    warden.watch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with nobody left behind
    if arguments.netns and netns.why_not():
        print(netns.why_not())
        return 1
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    seconds = 60 * arguments.minutes
    act = across_namespaces if arguments.netns else tiny_model if arguments.tiny else toy
    lanes = act is toy
    deeds = schedule(arguments.seed, seconds, arguments.gap, cuts=arguments.netns, lanes=lanes)
    play = act(folder, deeds, seconds, lambda line: print(line, flush=True))
    chain = ledger.read(folder / "run.ledger").chain
    hit = f" ({play.lanes_hit} of them hit lanes)" * lanes
    print(f"{len(deeds)} deeds{hit}, {chain.round} rounds, {chain.term} terms")
    print(f"no commit for {play.longest_wait:.0f} s at worst; final digest {chain.entries[-1].digest:016x}")
    print(
        "\n".join(play.violations) or "equal to the fault-free run in every reward and digest, 0 manual steps"
    )
    print(f"{'FAIL' if play.violations else 'PASS'}; repeat with: {' '.join(_repeat(arguments))}")
    if arguments.keep is None and not play.violations:
        shutil.rmtree(folder)
    else:
        print(f"the run's folder is {folder}")
    return 1 if play.violations else 0


def _repeat(arguments: argparse.Namespace) -> Iterator[str]:
    yield f"python -m tests.chaos --minutes {arguments.minutes:g} --seed {arguments.seed}"
    yield f"--gap {arguments.gap:g}" + " --netns" * arguments.netns + " --tiny" * arguments.tiny


if __name__ == "__main__":
    sys.exit(main())
