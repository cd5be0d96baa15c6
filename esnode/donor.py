"""A node's peer socket: `python -m esnode.donor --folder NODE --bind tcp://HOST:PORT`.

A process of its own at low priority, so that serving costs the node's work little and never waits behind it.
It serves snapshots from their files and ledger entries from the node's ledger to keys of the chain's roster,
directly and through the relay; ledger and task data also to whoever holds a signing key that the ledger
trusts (a successor, see `salvage.py`). Nothing is sent unasked: a question is a grant of credit.
Talks JSON lines with the daemon (`peers.py`) and ends with its stdin.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

if __name__ == "__main__":  # also during the imports below
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's: it closes our stdin

import zmq

from esnode import snapshot
from esnode.checkpoint import FOLDER
from esnode.lines import say
from esnode.policy import Pace
from esnode.snapshot import Reader, SnapshotError
from esnode.taskdata import TaskData
from protocol import envelope, keys, wire, zmtp
from protocol.keys import curve_public, parse_public, read_curve
from protocol.messages import BlobAsk, Entries, Fetch, Message
from protocol.peers import MOST_OWED, SLICE, Head, HeadAsk, PartAsk, PartData, Sorry
from protocol.rolls import Rolls

SLICE_SECONDS = 0.25  # of a limited rate are sent at once: each of several peers has its turn soon
SMALLEST_SLICE = 4096
HIGH_WATER = 64  # messages queued per peer: the rest waits in our own queue, within its grant
MOST_ROUTES = 64
ENTRIES_BYTES = 128 * 1024
IDLE_SECONDS = 60.0  # a file nobody asks for is closed then, and its disk space is free
NICE = 15
TURN_SLICES = 64
BLOCKED_SECONDS = 0.002  # until libzmq's queues are tried again
MAX_ASK = 4096

Route: TypeAlias = tuple[str, bytes]  # ("direct", routing id) or ("relay", key)


@dataclass
class Queue:
    """What one peer is owed."""

    jobs: deque[PartAsk | HeadAsk] = field(default_factory=deque)
    owed: int = 0


class Shelf:
    """The snapshots of a node's folder by root; files that are asked for stay open, so they may be pruned."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._open: dict[bytes, tuple[Reader, float]] = {}

    def find(self, root: bytes, now: float) -> Reader | None:
        """The snapshot of this root; None when there is none (any more)."""
        if root in self._open:
            reader = self._open[root][0]
            self._open[root] = (reader, now)
            return reader
        for path in snapshot.files(self._folder):
            try:
                reader = Reader(path)
            except (SnapshotError, OSError):
                continue
            if reader.manifest.root == root:
                self._open[root] = (reader, now)
                return reader
            reader.close()
        return None

    def tidy(self, now: float) -> None:
        for root, (reader, used) in list(self._open.items()):
            if now - used > IDLE_SECONDS:
                reader.close()
                del self._open[root]


class Donor:
    """ROUTER, ZAP responder, and a DEALER to the relay once there is one."""

    def __init__(self, folder: Path, bind: str, rate: float, always: Sequence[bytes] = ()) -> None:
        """`rate`: bytes per second to all peers together, 0 for no limit."""
        self._secret = read_curve(folder / "curve.key")
        self._rolls = Rolls(folder / "node.ledger", always)
        self._task = TaskData(folder.parent.parent)
        self._shelf = Shelf(folder)
        self._pace = Pace(rate)
        self._slice = min(max(int(rate * SLICE_SECONDS), SMALLEST_SLICE), SLICE) if rate else SLICE
        self._free = 0.0
        self._queues: dict[Route, Queue] = {}
        self.served = 0  # bytes of snapshots
        self._blocked = False  # nobody who is owed something could take it
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = _socket(self._context, zmq.ROUTER, self._secret)
        self._router.setsockopt(zmq.IPV6, zmtp.needs_ipv6(bind))
        self._router.bind(bind)
        self.address = str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._relay: zmq.Socket[Any] | None = None
        self._greeted = 0.0

    # ------------------------------------------------------------ loop

    def serve(self) -> None:
        """Until stdin ends."""
        told = 0.0
        while True:
            now = time.monotonic()
            busy = any(queue.jobs for queue in self._queues.values())
            wait = max(self._free - now, BLOCKED_SECONDS if self._blocked else 0.0) if busy else 0.5
            if not self._listen(min(wait, 0.5)):
                return
            now = time.monotonic()
            self._greet_relay(now)
            self._send(now)
            if now - told > 2.0:
                told = now
                self._shelf.tidy(now)
                busy_peers = sum(bool(queue.jobs) for queue in self._queues.values())
                say(served=[self.served, busy_peers])

    def _listen(self, wait: float) -> bool:
        poller = zmq.Poller()
        for what in (self._router, self._zap, sys.stdin.fileno(), self._relay):
            if what is not None:
                poller.register(what, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(wait * 1000)))
        if sys.stdin.fileno() in ready and not self._orders():
            return False
        self._answer_zap()
        for _ in range(256):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._direct(frames)
        self._relayed()
        return True

    def _orders(self) -> bool:
        """Lines of the daemon: where the relay is. False when it is gone."""
        data = os.read(sys.stdin.fileno(), 65536)
        for line in data.splitlines():
            order = json.loads(line)
            self._use_relay(str(order["relay"]), bytes.fromhex(order["key"]))
        return bool(data)

    # ------------------------------------------------------------ questions

    def _direct(self, frames: list[zmq.Frame]) -> None:
        try:
            key = bytes.fromhex(str(frames[-1].get("User-Id")))
        except (zmq.ZMQError, ValueError):
            return
        if len(frames) == 2:
            self._hear(("direct", frames[0].bytes), key, frames[1].bytes)

    def _relayed(self) -> None:
        for _ in range(256):
            if self._relay is None:
                return
            try:
                key, grant, payload = envelope.open_frame(self._relay.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except envelope.BadEnvelope:
                continue
            if grant == envelope.NO_WAY:
                self._queues.pop(("relay", key), None)
            else:
                self._hear(("relay", key), key, payload)

    def _hear(self, route: Route, key: bytes, body: bytes) -> None:
        """One question of a peer. Whoever is not on the roster (any more) gets no answer."""
        if not self._admits(key) or len(body) > MAX_ASK:
            return
        try:
            message: Message = wire.decode(body, "peer")
        except wire.MalformedMessage:
            return
        if isinstance(message, Fetch):
            raws = self._rolls.entries(message.first, message.count, ENTRIES_BYTES)
            self._say(route, Entries(message.first, wire.fitting(raws)))
        elif isinstance(message, BlobAsk):
            self._say(route, self._task.part(message))
        elif isinstance(message, HeadAsk | PartAsk) and key in self._rolls.keys:
            self._enqueue(route, message)

    def _admits(self, key: bytes) -> bool:
        return key in self._rolls.keys or key in self._rolls.heirs

    def _enqueue(self, route: Route, ask: HeadAsk | PartAsk) -> None:
        if route not in self._queues and len(self._queues) >= MOST_ROUTES:
            idle = [other for other, queue in self._queues.items() if not queue.jobs]
            if not idle:
                self._say(route, Sorry(ask.root, f"{MOST_ROUTES} peers are being served"))
                return
            del self._queues[idle[0]]
        if self._shelf.find(ask.root, time.monotonic()) is None:
            self._say(route, Sorry(ask.root, "this snapshot is not kept here any more"))
            return
        queue = self._queues.setdefault(route, Queue())
        size = ask.size if isinstance(ask, PartAsk) else SLICE
        if queue.owed + size > MOST_OWED:
            self._say(route, Sorry(ask.root, f"more than {MOST_OWED} bytes were asked for at once"))
            return
        queue.jobs.append(ask)
        queue.owed += size

    # ------------------------------------------------------------ answers

    def _send(self, now: float) -> None:
        """A few slices, each peer in its turn, while the pace allows."""
        for _ in range(TURN_SLICES):
            moved = False
            for route, queue in list(self._queues.items()):
                if now < self._free:
                    return
                if queue.jobs and self._send_one(route, queue, now):
                    self._queues[route] = self._queues.pop(route)  # the last to have its turn again
                    moved = True
                    now = time.monotonic()
            self._blocked = not moved
            if not moved:
                return

    def _send_one(self, route: Route, queue: Queue, now: float) -> bool:
        ask = queue.jobs[0]
        reader = self._shelf.find(ask.root, now)
        answer, rest = _answer(reader, ask, self._slice) if reader is not None else (None, None)
        if answer is None:
            queue.jobs.popleft()
            queue.owed = sum(j.size if isinstance(j, PartAsk) else SLICE for j in queue.jobs)
            return self._say(route, Sorry(ask.root, "there is no such part"))
        if not self._say(route, answer):
            return False
        sent = len(answer.data)
        queue.owed -= sent if isinstance(ask, PartAsk) else SLICE
        queue.jobs.popleft()
        if rest is not None:
            queue.jobs.appendleft(rest)
        self.served += sent
        self._free = now + self._pace.spend(now, sent)
        return True

    def _say(self, route: Route, message: Message) -> bool:
        """Hand a message to libzmq; False when its queue for this peer is full."""
        way, who = route
        body = wire.encode(message)
        try:
            if way == "direct":
                self._router.send_multipart([who, body], zmq.NOBLOCK)
            elif self._relay is not None:
                self._relay.send(envelope.close(who, 0, body), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._queues.pop(route, None)
            elif error.errno != zmq.EAGAIN:
                raise
            return False
        return True

    # ------------------------------------------------------------ sockets

    def _use_relay(self, address: str, key: bytes) -> None:
        if self._relay is not None:
            self._relay.close(0)
        self._relay = _socket(self._context, zmq.DEALER, self._secret, key)
        self._relay.setsockopt(zmq.IPV6, zmtp.needs_ipv6(address))
        self._relay.connect(address)
        self._greeted = 0.0

    def _greet_relay(self, now: float) -> None:
        """The relay knows where a key is from its last frame: say something now and then."""
        if self._relay is not None and now - self._greeted > 2.0:
            try:
                self._relay.send(envelope.close(curve_public(self._secret), 0, b""), zmq.NOBLOCK)
                self._greeted = now
            except zmq.Again:
                self._greeted = now - 1.5

    def _answer_zap(self) -> None:
        while self._zap.poll(0):
            version, request, _domain, _address, _identity, mechanism, *proof = self._zap.recv_multipart()
            key = proof[0] if mechanism == b"CURVE" and proof else b""
            known = self._admits(key)
            answer = (b"200", b"OK", key.hex().encode()) if known else (b"400", b"not on the roster", b"")
            self._zap.send_multipart([version, request, *answer, b""])

    def close(self) -> None:
        for socket in (self._router, self._zap, self._relay):
            if socket is not None:
                socket.close(0)
        self._context.term()


def _answer(
    reader: Reader, ask: HeadAsk | PartAsk, most: int
) -> tuple[Head | PartData | None, HeadAsk | PartAsk | None]:
    """The next slice of what was asked, and what remains of the question; (None, None) for nonsense."""
    if isinstance(ask, HeadAsk):
        head = reader.manifest.head
        data = head[ask.offset : ask.offset + SLICE]
        return (Head(ask.root, ask.offset, len(head), data), None) if data else (None, None)
    size = min(ask.size, most)
    try:
        data = reader.raw(ask.part, ask.offset, size)
    except IndexError:
        return None, None
    rest = None
    if ask.size > size:
        rest = PartAsk(ask.root, ask.part, ask.offset + size, ask.size - size)
    return PartData(ask.root, ask.part, ask.offset, data), rest


def _socket(
    context: zmq.Context[Any], kind: int, secret: bytes, server_key: bytes | None = None
) -> zmq.Socket[Any]:
    """A ROUTER that is a CURVE server, or a DEALER towards one."""
    made: zmq.Socket[Any] = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, zmtp.HIGH_WATER),
        (zmq.LINGER, zmtp.LINGER_MS),
        (zmq.HANDSHAKE_IVL, zmtp.HANDSHAKE_MS),
        (zmq.HEARTBEAT_IVL, zmtp.HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, zmtp.HEARTBEAT_TIMEOUT_MS),
        (zmq.MAXMSGSIZE, MAX_ASK if server_key is None else envelope.MAX_FRAME),
    ):
        made.setsockopt(option, value)
    made.setsockopt(zmq.CURVE_SECRETKEY, secret)
    made.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(secret))
    if server_key is None:
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.ZAP_DOMAIN, zmtp.ZAP_DOMAIN)
    else:
        made.setsockopt(zmq.IMMEDIATE, 1)
        made.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        made.setsockopt(zmq.RECONNECT_IVL, zmtp.RECONNECT_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, zmtp.RECONNECT_MAX_MS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Say where it listens as one line of JSON, then serve."""
    parser = argparse.ArgumentParser(prog="esnode.donor", description="Serve snapshots to peers.")
    parser.add_argument("--folder", type=Path, required=True, help="the node's folder")
    parser.add_argument("--bind", required=True, help="address to listen on; port 0 means any free port")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second; 0: no limit")
    parser.add_argument("--also", action="append", default=[], help="a key (hex) that is let in besides")
    options = parser.parse_args(arguments)
    os.nice(NICE)
    also = [parse_public(text, "--also") for text in options.also]
    try:
        donor = Donor(options.folder, options.bind, options.rate, also)
    except (zmq.ZMQError, ValueError, keys.KeyFileError) as error:
        say(failed=str(error))
        return 1
    say(address=donor.address)
    try:
        donor.serve()
    finally:
        donor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
