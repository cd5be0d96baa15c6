"""Fetch one snapshot from several peers: `python -m esnode.receiver --folder NODE`.

A process of its own, so that bulk shares neither process nor connection with a node's control. What is asked
of whom is `transfer.py`'s decision; here are sockets, hashing and the file. The first line of stdin (JSON)
says what to fetch; lines of JSON on stdout say how it goes (see `peers.py`). Ends with its stdin. Checked
parts lie in the file while it grows, so another attempt begins where this one was cut.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # also during the imports below
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's: it closes our stdin

import zmq

from esnode import snapshot, transfer
from esnode import transferevents as te
from esnode.checkpoint import FOLDER, KEPT
from esnode.lines import Direct, ViaRelay, say
from esnode.room import Room
from esnode.snapshot import Manifest, SnapshotError
from protocol import wire
from protocol.counting import rounds
from protocol.keys import read_curve
from protocol.ledger import sync_path
from protocol.messages import Message
from protocol.peers import SLICE, Head, HeadAsk, PartAsk, PartData, Sorry

TICK_SECONDS = 0.05
CHECK_SECONDS = 0.002  # while a part is being hashed
TELL_SECONDS = 0.5
RATE_SECONDS = 10.0  # over which a rate is told: a pause of a few seconds is no reason to think it over
MEASURED_SECONDS = 1.0  # of transfer, or
MEASURED_BYTES = 32 * 1024 * 1024  # of it, until a rate is told


@dataclass
class Growing:
    """A part on its way from one donor, and how much of it is here."""

    data: bytearray
    got: int = 0


class Receiver:
    """One transfer. `run` returns whether the snapshot is whole in the folder."""

    def __init__(self, folder: Path, order: dict[str, Any]) -> None:
        """`order`: round, root, size, donors (key, name, addresses), relay (address, key) or null, and of the
        room spare and home ("": the policy bounds nothing).
        """
        self._folder = folder / FOLDER
        self._round, self._root = int(order["round"]), bytes.fromhex(order["root"])
        self._room = Room(int(order["spare"]), Path(order["home"]) if order["home"] else None)
        self._draft = self._folder / f"incoming-{order['root'][:16]}.part"
        self._secret = read_curve(folder / "curve.key")
        self._context: zmq.Context[Any] = zmq.Context()
        relay = order["relay"]
        self._relay = ViaRelay(self._context, self._secret, relay["address"], relay["key"]) if relay else None
        self._lines: dict[bytes, Direct] = {}
        self._said: set[bytes] = set()
        for donor in order["donors"]:
            key = bytes.fromhex(donor["key"])
            self._lines[key] = Direct(self._context, self._secret, key, tuple(donor["addresses"]))
        self._names = {bytes.fromhex(donor["key"]): donor["name"] for donor in order["donors"]}
        self._state = transfer.new(tuple(self._lines), time.monotonic())
        self._head = bytearray()
        self._head_of = b""  # whom it was asked of: nobody else can spoil it
        self._buffers: dict[tuple[bytes, int], Growing] = {}
        self._hasher = ThreadPoolExecutor(1)
        self._checks: dict[tuple[bytes, int], Future[bool]] = {}
        self._manifest: Manifest | None = None
        self._file = -1
        self._began = time.monotonic()
        self._resumed = 0
        self._next_word = 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=int(RATE_SECONDS / TELL_SECONDS))
        self._finished: str | None = None

    def run(self) -> bool:
        """Fetch to the end, good or bad; OSError when the disk does not take it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for stale in self._folder.glob("incoming-*.part"):
            if stale != self._draft:
                stale.unlink()
        while self._finished is None:
            self._wait()
            now = time.monotonic()
            self._meet(now)
            self._hear()
            self._hear_checks()
            self._step(te.Tick(now))
            self._tell(now)
        if self._finished:
            say(failed=self._finished)
            return False
        return self._keep()

    def close(self) -> None:
        self._hasher.shutdown(cancel_futures=True)
        for line in self._lines.values():
            line.close()
        if self._relay is not None:
            self._relay.close()
        if self._file >= 0:
            os.close(self._file)
        self._context.term()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        sockets = [s for line in self._lines.values() for s in line.sockets]
        if self._relay is not None:
            sockets += self._relay.sockets
        for one in sockets:
            poller.register(one, zmq.POLLIN)
        wait = CHECK_SECONDS if self._checks else TICK_SECONDS
        ready = dict(poller.poll(int(wait * 1000)))
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            sys.exit(0)  # the daemon is gone, or has changed its mind: what was checked stays on the disk

    # ------------------------------------------------------------ ways to the donors

    def _meet(self, now: float) -> None:
        """See who can be talked to: directly, or through the relay when that does not come about."""
        if self._relay is not None:
            self._relay.watch()
        for key, line in self._lines.items():
            line.watch(now)
            source = self._state.sources[key]
            if source.status == transfer.OPEN:
                if source.way == "direct" and not line.up:
                    self._step(te.Lost(now, key, line.reason))
            elif source.status != transfer.BANNED:
                self._open(key, line, now)

    def _open(self, key: bytes, line: Direct, now: float) -> None:
        if line.up:
            way, reason = "direct", ""
        elif not line.given_up(now):
            return
        elif self._relay is not None and self._relay.up and key not in self._relay.unreachable(now):
            way, reason = "relay", line.reason
        else:
            why = "there is no relay" if self._relay is None else self._relay.reason(key)
            return self._reached(key, "none", f"{line.reason}; {why}")
        self._step(te.Opened(now, key, way, reason))
        if self._state.sources[key].status == transfer.OPEN:  # not at once, if it was lost just now
            self._reached(key, way, reason)

    def _reached(self, key: bytes, way: str, reason: str) -> None:
        if way != "none" or key not in self._said:
            self._said.add(key)
            say(reached=[key.hex(), way, reason])

    # ------------------------------------------------------------ messages

    def _hear(self) -> None:
        for key, line in self._lines.items():
            for body in line.receive():
                self._take(key, body)
        if self._relay is not None:
            for key, answer in self._relay.receive():
                if answer is None:
                    self._step(te.Lost(time.monotonic(), key, self._relay.reason(key)))
                elif key in self._lines:
                    self._take(key, answer)

    def _take(self, key: bytes, body: bytes) -> None:
        try:
            message: Message = wire.decode(body, "peer")
        except wire.MalformedMessage as error:
            return self._step(te.Lost(time.monotonic(), key, f"it sent a malformed message ({error})"))
        now = time.monotonic()
        if isinstance(message, Head) and message.root == self._root:
            self._take_head(key, message, now)
        elif isinstance(message, PartData) and message.root == self._root:
            self._take_slice(key, message, now)
        elif isinstance(message, Sorry) and message.root == self._root:
            self._step(te.Lost(now, key, message.reason))

    def _take_head(self, key: bytes, message: Head, now: float) -> None:
        if self._manifest is not None or key != self._head_of or message.offset != len(self._head):
            return
        if message.total > snapshot.MAX_HEADER or not message.data:
            return self._step(te.Lost(now, key, "its snapshot's head is too large"))
        self._head += message.data
        if len(self._head) < message.total:
            return self._send(key, HeadAsk(self._root, len(self._head)), SLICE)
        try:
            manifest = snapshot.parse_head(bytes(self._head), self._root)
        except SnapshotError as error:
            self._head.clear()
            say(poisoned=[key.hex(), 0, str(error)])
            return self._step(te.Banned(now, key, str(error)))
        if manifest.header.round != self._round:
            found = rounds(manifest.header.round)
            self._finished = f"the root is of the state after {found}, not {self._round}"
            return
        self._manifest = manifest
        have = self._prepare(manifest)
        self._step(te.Began(now, manifest.header.total, manifest.header.part_size, have))

    def _prepare(self, manifest: Manifest) -> int:
        """Open the growing file; which parts an earlier attempt has left in it, checked now."""
        size = manifest.data_start + manifest.header.total
        self._file = os.open(self._draft, os.O_RDWR | os.O_CREAT, 0o600)
        there = os.fstat(self._file).st_blocks * 512
        why = self._room.short(self._folder, size, there)
        if why:
            raise OSError(28, why, str(self._folder))
        fresh = os.fstat(self._file).st_size != size
        os.ftruncate(self._file, size)
        snapshot.write_at(self._file, memoryview(manifest.head), 0)
        have = 0
        for number in () if fresh else range(manifest.header.parts):
            first, length = manifest.header.part(number)
            data = os.pread(self._file, length, manifest.data_start + first)
            if snapshot.hash_of(data) == manifest.hashes[number]:
                have |= 1 << number
                self._resumed += length
        return have

    def _take_slice(self, key: bytes, message: PartData, now: float) -> None:
        growing = self._buffers.get((key, message.part))
        if growing is None:
            return self._step(te.Came(now, key, message.part, len(message.data)))
        if message.offset != growing.got or self._manifest is None:
            return
        end = growing.got + len(message.data)
        if end > len(growing.data) or not message.data:
            return self._step(te.Lost(now, key, "it sent more than a part has"))
        growing.data[growing.got : end] = message.data
        growing.got = end
        self._step(te.Came(now, key, message.part, len(message.data)))
        if end < len(growing.data) or (key, message.part) not in self._buffers:
            return
        del self._buffers[key, message.part]
        place = self._manifest.data_start + self._manifest.header.part(message.part)[0]
        check = partial(self._check, growing.data, self._manifest.hashes[message.part], place)
        self._checks[key, message.part] = self._hasher.submit(check)

    def _check(self, part: bytearray, expected: bytes, place: int) -> bool:
        """Hash a whole part and, if it is good, write it; beside the sockets, both leave the interpreter."""
        good = snapshot.hash_of(part) == expected
        if good:
            snapshot.write_at(self._file, memoryview(part), place)
        return good

    def _hear_checks(self) -> None:
        for name, check in list(self._checks.items()):
            if check.done():
                del self._checks[name]
                self._step(te.Checked(time.monotonic(), *name, check.result()))

    # ------------------------------------------------------------ what the transfer wants

    def _step(self, event: te.Event) -> None:
        self._state, actions = transfer.step(self._state, event)
        for action in actions:
            match action:
                case te.AskHead(key):
                    self._head.clear()
                    self._head_of = key
                    self._send(key, HeadAsk(self._root, 0), SLICE)
                case te.Ask(key, part, offset, size):
                    if (key, part) not in self._buffers:
                        self._buffers[key, part] = Growing(bytearray(self._state.size_of(part)))
                    self._send(key, PartAsk(self._root, part, offset, size), size)
                case te.Drop(key, part):
                    self._buffers.pop((key, part), None)
                case te.Report(key, part):
                    say(poisoned=[key.hex(), part, "its hash does not fit"])
                case te.Finish(reason):
                    self._finished = reason

    def _send(self, key: bytes, message: Message, granted: int) -> None:
        """A question, directly or through the relay. What cannot leave is noticed as silence."""
        body = wire.encode(message)
        if self._state.sources[key].way == "relay" and self._relay is not None:
            self._relay.send(key, granted, body)
        else:
            self._lines[key].send(body)

    def _tell(self, now: float) -> None:
        state = self._state
        if now < self._next_word or state.began is None:
            return
        spent = now - state.began
        if spent < MEASURED_SECONDS and state.received < MEASURED_BYTES:
            return
        self._next_word = now + TELL_SECONDS
        if self._seen and now - self._seen[-1][0] > transfer.LOOK_SECONDS:
            self._seen.clear()  # this process was stopped
            return self._seen.append((now, state.received))
        since, before = self._seen[0] if self._seen else (state.began, 0)
        self._seen.append((now, state.received))
        say(fetching=[state.done, state.total, (state.received - before) / (now - since)])

    def _keep(self) -> bool:
        """Every part is checked and in the file: give it its name."""
        assert self._manifest is not None
        os.fsync(self._file)
        path = self._folder / snapshot.file_name(self._round)
        os.replace(self._draft, path)
        sync_path(self._folder)
        for old in snapshot.files(self._folder)[KEPT:]:
            old.unlink(missing_ok=True)
        say(fetched=[self._manifest.header.entry.hex(), path.stat().st_size, self._words()])
        return True

    def _words(self) -> str:
        spent = time.monotonic() - (self._state.began or self._began)
        shares = [
            f"{source.sent / 1e6:.1f} MB from {self._names[key]} ({source.way})"
            for key, source in self._state.sources.items()
            if source.sent
        ]
        rate = self._state.received / max(spent, 1e-3) / 1e6
        resumed = f", {self._resumed / 1e6:.1f} MB were here already" * bool(self._resumed)
        return f"{', '.join(shares)} in {spent:.1f} s, {rate:.1f} MB/s{resumed}"


def _first_line() -> bytes:
    """Read without a buffer: what comes later is waited for on the descriptor itself."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the order, fetch, and say in the last line how it ended."""
    parser = argparse.ArgumentParser(prog="esnode.receiver", description="Fetch a snapshot from peers.")
    parser.add_argument("--folder", type=Path, required=True, help="the node's folder")
    options = parser.parse_args(arguments)
    receiver = Receiver(options.folder, json.loads(_first_line()))
    try:
        return 0 if receiver.run() else 1
    except OSError as error:
        say(failed=f"{error.strerror} ({error.filename or options.folder})")
        return 1
    finally:
        receiver.close()


if __name__ == "__main__":
    sys.exit(main())
