"""The daemon's side of the peer processes: starts them, tells them what to do, turns their words into events.

Shell. `donor.py` serves this node's snapshots as long as the node lives; `receiver.py` fetches one and ends.
Both are children that end with their stdin, so none outlives the daemon. Called by `daemon.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esnode import joined, nodeoptions, room
from esnode.duty import read_policy
from esnode.events import Event
from esnode.folder import write_file
from esnode.gleaner import Gleaner
from esnode.nodeoptions import Options
from esnode.policy import MBIT
from esnode.room import Room
from esnode.salvage import PEER_FILE
from esnode.snapshotevents import (
    Fetched,
    FetchEntries,
    FetchFailed,
    Fetching,
    FetchSnapshot,
    Moved,
    PeerPoisoned,
    PeerReached,
    StopFetch,
)
from protocol import keys, zmtp
from protocol.peers import MOST_ADDRESSES

START_SECONDS = 10.0  # until the donor has said where it listens
AGAIN_SECONDS = 10.0  # before a donor that died is started again
MOVE_SECONDS = 10.0  # between looks whether this machine has other addresses now
LINE_BYTES = 1 << 16
EVERYWHERE = ("[::]", "*")  # both families, or IPv4 alone where there is no other
# glibc would map and unmap memory for every slice, at the price of a page fault every 4 KB of it
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 26)}
Place = tuple[int, Any]  # an address family and an address as sockets take it


class Child:
    """A process of ours that speaks JSON lines."""

    def __init__(self, module: str, *words: str) -> None:
        command = [sys.executable, "-m", module, *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, **MALLOC})
        assert self.process.stdout is not None
        self.fd = self.process.stdout.fileno()
        os.set_blocking(self.fd, False)
        self._rest = b""
        self.ended = False

    def tell(self, words: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has just ended: its last words say why
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        """Whole lines that came since the last call."""
        while True:
            try:
                data = os.read(self.fd, LINE_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Its stdin ends, and so does it."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Peers:
    """Both processes of one node."""

    def __init__(
        self, folder: Path, log: logging.Logger, server_key: bytes, rate: float, limits: Room
    ) -> None:
        """`folder`: the node's own; `server_key`: the coordinator's, also the relay's; `rate`: bytes per
        second that donating may take, 0 for no limit; `limits`: the disk's.
        """
        self._folder = folder
        self._log = log
        self._server_key = server_key
        self._rate = rate
        self._room = limits
        self._bind = ""
        self._places: list[Place] = []  # by which this machine's addresses are found; none: it has one
        self._dial: tuple[str, ...] = ()
        self._look = 0.0
        self._donor: Child | None = None
        self._again = 0.0
        self._receiver: Child | None = None
        self._fetching: FetchSnapshot | None = None
        self._relay = ""
        own = keys.read_curve(folder / "curve.key")
        self._key = keys.curve_public(own).hex()
        self._gleaner = Gleaner(own)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [child.process.pid for child in (self._donor, self._receiver) if child is not None]

    @property
    def port(self) -> int:
        """Of the peer socket, 0 while there is none."""
        return zmtp.host_and_port(self._bind)[1] if self._bind else 0

    # ------------------------------------------------------------ serving

    def serve(self, coordinator: str, port: int) -> tuple[str, ...]:
        """Open the peer socket; the addresses others may dial. Empty when it cannot be opened.

        On loopback alone when the coordinator is there too. `port` 0: any free one, the same after a restart
        where that is possible.
        """
        for host in ("127.0.0.1",) if zmtp.is_loopback(coordinator) else EVERYWHERE:
            self._bind = f"tcp://{host}:{port}"
            address = self._start_donor()
            if address:
                break
        else:
            return self._publish(())
        bound = zmtp.host_and_port(address)[1]
        self._bind = f"tcp://{host}:{bound}"
        self._places = [] if host == "127.0.0.1" else places(coordinator)
        return self._publish([host] if host == "127.0.0.1" else local_hosts(self._places))

    def _publish(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """The addresses others may dial from now on; also in a file, as --recover-from takes them."""
        self._dial = self._as_addresses(hosts)
        lines = [f"{address}/{self._key}\n" for address in self._dial]
        self._log.info("peers may dial %s", ", ".join(self._dial) or "nowhere")
        try:
            write_file(self._folder / PEER_FILE, "".join(lines).encode())
        except OSError as error:  # a full disk: the addresses are in the log too
            self._log.warning("%s is not written: %s", self._folder / PEER_FILE, error.strerror)
        return self._dial

    def _as_addresses(self, hosts: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"tcp://{host}:{self.port}" for host in hosts)[:MOST_ADDRESSES]

    def _moved(self, now: float) -> list[Event]:
        """Other addresses than before: the machine is in another network, or its lease ran out."""
        if not self._places or now < self._look:
            return []
        self._look = now + MOVE_SECONDS
        hosts = local_hosts(self._places)
        if not hosts or self._as_addresses(hosts) == self._dial:  # none: no network for now
            return []
        return [Moved(now, self._publish(hosts))]

    def _start_donor(self) -> str:
        self._stop_donor()
        also = ("--also", self._server_key.hex())
        words = ("--folder", str(self._folder), "--bind", self._bind, "--rate", str(self._rate), *also)
        self._donor = Child("esnode.donor", *words)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self._donor.ended:
            for words_ in self._donor.hear():
                if "address" in words_:
                    self._tell_relay()
                    return str(words_["address"])
                self._log.warning("peers cannot dial this node: %s", words_.get("failed"))
            time.sleep(0.02)
        self._stop_donor()
        return ""

    def relay(self, coordinator: str, port: int) -> None:
        """Be reachable through the relay beside the coordinator (port 0: there is none)."""
        host = zmtp.host_and_port(coordinator)[0]
        found = f"tcp://{host}:{port}" if port else ""
        if found != self._relay:
            self._relay = found
            self._tell_relay()

    def _tell_relay(self) -> None:
        if self._donor is not None and self._relay:
            self._donor.tell({"relay": self._relay, "key": self._server_key.hex()})

    def _stop_donor(self) -> None:
        if self._donor is not None:
            self._donor.close()
            self._donor = None

    # ------------------------------------------------------------ fetching

    def perform(self, effect: FetchSnapshot | FetchEntries | StopFetch) -> None:
        """What the core wants of peers."""
        match effect:
            case FetchSnapshot():
                self.fetch(effect)
            case FetchEntries():
                self._gleaner.ask(effect, time.monotonic())
            case StopFetch():
                self.stop_fetch()

    def fetch(self, order: FetchSnapshot) -> None:
        """Begin a transfer; its events come out of `events`."""
        self.stop_fetch()
        self._fetching = order
        self._receiver = Child("esnode.receiver", "--folder", str(self._folder))
        donors = [{"key": d.key.hex(), "name": d.name, "addresses": d.addresses} for d in order.donors]
        relay = {"address": self._relay, "key": self._server_key.hex()} if self._relay else None
        self._receiver.tell(
            {
                "round": order.round,
                "root": order.root.hex(),
                "size": order.size,
                "donors": donors,
                "relay": relay,
                "spare": self._room.spare,
                "home": str(self._room.home or ""),
            }
        )

    def stop_fetch(self) -> None:
        """End the transfer; nothing more is said of it."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = self._fetching = None

    # ------------------------------------------------------------ what they say

    def events(self, now: float) -> list[Event]:
        """What happened since the last call."""
        if self._donor is not None:
            self._donor.hear()
            if self._donor.ended:
                self._log.warning("the process that serves peers has ended; it is started again")
                self._stop_donor()
                self._again = now + AGAIN_SECONDS
        elif self._bind and now > self._again:
            self._again = now + AGAIN_SECONDS
            self._start_donor()
        return [*self._gleaner.events(now), *self._transferred(now), *self._moved(now)]

    def _transferred(self, now: float) -> list[Event]:
        if self._receiver is None:
            return []
        found = [event for words in self._receiver.hear() for event in self._event(words, now)]
        if self._receiver.ended:
            if not any(isinstance(event, Fetched | FetchFailed) for event in found):
                found.append(FetchFailed(now, "its process has ended; the log has the details"))
            self.stop_fetch()
        return found

    def _event(self, words: dict[str, Any], now: float) -> list[Event]:
        order = self._fetching
        assert order is not None
        match words:
            case {"fetching": [done, total, rate]}:
                return [Fetching(now, done, total, rate)]
            case {"reached": [key, way, reason]}:
                return [PeerReached(now, bytes.fromhex(key), way, reason)]
            case {"poisoned": [key, part, reason]}:
                return [PeerPoisoned(now, bytes.fromhex(key), order.root, part, reason)]
            case {"fetched": [entry, size, line]}:
                return [Fetched(now, order.round, bytes.fromhex(entry), order.root, size, line)]
            case {"failed": reason}:
                return [FetchFailed(now, str(reason))]
        return []

    def close(self) -> None:
        """End both."""
        self.stop_fetch()
        self._gleaner.close()
        self._stop_donor()
        self._bind = ""


def open_peers(
    options: Options, coordinator: str, log: logging.Logger
) -> tuple[Peers | None, tuple[str, ...]]:
    """The peer processes of a node beside its connection to `coordinator`; the addresses others may dial.

    A node that shares its folder with the coordinator serves nobody unless a port is named; it can still
    fetch. None without encryption.
    """
    if options.plain:
        return None, ()
    mbit = options.peer_mbit or read_policy().bandwidth_mbit
    limits = room.of_run(options.run)
    peers = Peers(options.folder, log, nodeoptions.pinned_key(options.run), mbit * MBIT, limits)
    if options.peer_port is None and joined.read(options.run) is None:
        return peers, ()
    return peers, peers.serve(coordinator, options.peer_port or 0)


def places(coordinator: str) -> list[Place]:
    """Where the coordinator is and what this machine calls itself, as sockets take it."""
    found: list[Place] = []
    for host in (zmtp.host_and_port(coordinator)[0].strip("[]"), socket.gethostname()):
        with contextlib.suppress(OSError):
            known = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            found += [(family, place) for family, _, _, _, place in known]
    return found


def local_hosts(places: Sequence[Place]) -> list[str]:
    """Addresses of this machine that others may reach: the one that leads to the coordinator first."""
    found = dict.fromkeys(name for family, place in places for name in _own(family, place))
    return [name for name in found if not name.startswith("127.") and name != "[::1]"]


def _own(family: int, place: Any) -> Sequence[str]:
    """The address this machine would use towards `place`; nothing is sent to find out."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        name = str(probe.getsockname()[0]).split("%")[0]
        return [f"[{name}]" if ":" in name else name]
    return []
