"""The ledger of a run whose coordinator is lost, and the task's data, from nodes that are still there.

Shell. A node's peer socket admits, besides the run's roster, whoever holds a signing key that the node's
ledger trusts: the CURVE key that follows from it is all a successor needs (`protocol.keys.heir_secret`). What
comes is verified entry by entry like a file; of several ledgers the strongest counts (`protocol.terms`).
What cannot work is one sentence within ten seconds. Called by `serve.py`; needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from esnode import reach
from esnode.lines import Wire
from esnode.tell import Tell
from protocol import keys, ledger, wire, zmtp
from protocol.chain import BrokenChain, Chain
from protocol.entries import public_key
from protocol.errors import UserError
from protocol.lock import Lock
from protocol.messages import WIRE_VERSION, Blob, BlobAsk, Entries, Fetch, Message
from protocol.peers import Sorry
from protocol.terms import signed_twice, stronger

NAMED_SECONDS = 2.0  # for a host's name
SILENT_SECONDS = 5.5  # without a connection, or without an answer
FAILED_SECONDS = 2.0  # a handshake that fails for so long does not come about
EXPLAIN_SECONDS = 1.5  # to find out why nobody answers: these together stay below ten seconds
SLOW_SECONDS = 60.0  # after which a node must have given
LEAST_PACE = 4096  # bytes a second
ASK_AGAIN = 2.0
ASK_COUNT = 256
MOST_BYTES = wire.RULE_BY_TYPE[Entries].limit
MOST_TASK = 2**32 - 1
MOST_LEDGER = 2**30  # bytes of entries taken from one node; some thousands of times a long run's
FILE = "survivor.ledger"
PEER_FILE = "peer"  # in a node's folder: where its peer socket is, as --recover-from takes it


class SalvageError(UserError):
    """No ledger, or no task data, can be had from what was named; the sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A node's peer socket and the key it proves."""

    address: str
    key: bytes

    def __str__(self) -> str:
        return f"{self.address}/{self.key.hex()}"


def source_of(text: str) -> Source | Path:
    """What --recover-from names: a ledger file, or `tcp://HOST:PORT/KEY`. SalvageError when it is neither."""
    if "://" not in text:
        return Path(text)
    address, slash, key = text.partition("://")[2].partition("/")
    address = f"{text.partition('://')[0]}://{address}"
    try:
        zmtp.host_and_port(address)
    except ValueError as error:
        raise SalvageError(f"--recover-from {error}") from None
    if not slash or len(key) != 64:
        raise SalvageError(
            f"--recover-from {text} does not say which node that is: name its key too, tcp://HOST:PORT/KEY. "
            f"The whole line is in the file `{PEER_FILE}` of the node's folder on its machine"
        )
    return Source(address, keys.parse_public(key, f"--recover-from {address}"))


def bring(texts: Sequence[str], seed: bytes, folder: Path, tell: Tell) -> Path:
    """A ledger file to begin from: the one that is named, or the strongest of all, written into `folder`.

    `seed`: the successor's signing key. From a node the task's data come too, beside the ledger, as
    `task.jsonl`. What was in vain is told as a step of the work, as long as anything came.
    """
    named = [source_of(text) for text in texts]
    missing = next((str(one) for one in named if isinstance(one, Path) and not one.is_file()), "")
    if missing:
        raise SalvageError(f"--recover-from {missing}: there is no such ledger file")
    if len(named) == 1 and isinstance(named[0], Path):
        return named[0]
    folder.mkdir(parents=True, exist_ok=True)
    found: list[tuple[Chain, Source | Path]] = []
    failed: list[str] = []
    for path in (one for one in named if isinstance(one, Path)):
        reading = ledger.read(path)
        found += [(reading.chain, path)] if reading.chain.height else []
        failed += [] if reading.chain.height else [f"{path} is {reading}"]
    with Lines([one for one in named if isinstance(one, Source)], seed) as lines:
        lines.read_ledgers(tell)
        found += [(line.chain, line.source) for line in lines.all if not line.reason]
        failed += [f"{line.source.address}: {line.reason}" for line in lines.all if line.reason]
        if not found:
            raise SalvageError(
                f"no ledger could be had: {'; '.join(failed)}. Name other nodes, or a copy of a node.ledger"
            )
        for sentence in failed:
            tell(f"going on without {sentence}", 1, 1)
        chain = _strongest(found)
        path = folder / FILE
        path.write_bytes(ledger.MAGIC + b"".join(entry.raw for entry in chain.entries))
        lines.read_task(chain.lock, folder / "task.jsonl", tell)
    return path


def _strongest(found: Sequence[tuple[Chain, Source | Path]]) -> Chain:
    """The later term, then the longer chain; all must be of one run, and no term of two histories."""
    best, where = found[0]
    for chain, place in found[1:]:
        if chain.lock.run_id != best.lock.run_id:
            raise SalvageError(
                f"{where} holds run {best.lock.run_id.hex()[:16]}, {place} run "
                f"{chain.lock.run_id.hex()[:16]}: name sources of one run"
            )
        for entry in chain.entries:
            if twice := signed_twice(best, entry):
                raise SalvageError(f"{place}: {twice}")
        if stronger(chain, best):
            best, where = chain, place
    return best


# ---------------------------------------------------------------- lines


def _too_slow(bytes_: int, seconds: float) -> str:
    """Why one who always gives a little is not waited for; "" for a pace that comes to an end."""
    if seconds < SLOW_SECONDS or bytes_ >= LEAST_PACE * seconds:
        return ""
    return f"it gave {bytes_:,} bytes in {seconds:.0f} s, which would not come to an end"


class Line:
    """One node's peer socket: its ledger as it comes in."""

    def __init__(self, context: zmq.Context[Any], source: Source, secret: bytes, signing: bytes) -> None:
        self.source = source
        self.chain = Chain()
        self.reason = ""  # why nothing comes of it
        self.done = False
        self.wire = Wire(context, secret, source.key, source.address, MOST_BYTES)
        self._signing = signing
        self._began = self._moved = time.monotonic()
        self._asked = float("-inf")
        self._bytes = 0

    def turn(self, now: float) -> None:
        """Ask, hear, give up."""
        self.wire.watch()
        for body in self.wire.receive():
            if not self.done:
                self._take(body, now)
        if self.done:
            return
        if self.wire.up and now - self._asked >= ASK_AGAIN:
            self.wire.send(wire.encode(Fetch(self.chain.height, ASK_COUNT)))
            self._asked = now
        waited = now - self._moved
        if waited > SILENT_SECONDS or (self.wire.failed and waited > FAILED_SECONDS):
            self._fail(self._why() if not self.wire.up else f"no answer for {waited:.0f} s")
        elif slow := _too_slow(self._bytes, now - self._began):
            self._fail(slow)

    def _why(self) -> str:
        if "does not admit" in self.wire.reason:
            return (
                f"its ledger does not trust this user's signing key {self._signing.hex()}: put one that it "
                f"trusts into {keys.user_signing_file()}"
            )
        return self.wire.reason

    def _take(self, body: bytes, now: float) -> None:
        try:
            message: Message = wire.decode(body, "peer")
        except wire.MalformedMessage as error:
            return self._fail(f"it sent a malformed message ({error})")
        if not isinstance(message, Entries) or message.first != self.chain.height:
            return  # an answer to a question that was asked twice
        self._moved, self._asked = now, float("-inf")
        self._bytes += sum(map(len, message.entries))
        if self._bytes > MOST_LEDGER:
            return self._fail(f"its ledger does not end within {MOST_LEDGER:,} bytes")
        try:
            for raw in message.entries:
                self.chain.append(raw)
        except BrokenChain as error:
            return self._fail(f"its ledger holds an entry that may not follow: {error}")
        if not message.entries:
            self._end()

    def _end(self) -> None:
        """It has no more."""
        if not self.chain.height:
            self._fail("its ledger is empty")
        elif self._signing not in self.chain.trusted:
            self._fail(self._why())
        self.done = True

    def _fail(self, reason: str) -> None:
        self.reason, self.done = reason, True


class Lines:
    """All nodes that were named, asked at the same time. A context manager."""

    def __init__(self, sources: Sequence[Source], seed: bytes) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        nameless = reach.unresolved([one.address for one in sources], NAMED_SECONDS) if sources else {}
        secret, signing = keys.heir_secret(seed), public_key(seed)
        self.all = [Line(self._context, one, secret, signing) for one in sources]
        for line in self.all:
            line.reason = nameless.get(line.source.address, "")
            line.done = bool(line.reason)

    def read_ledgers(self, tell: Tell) -> None:
        """Until each has given all it has, or nothing more can be expected of it."""
        while not all(line.done for line in self.all):
            self._wait()
            for line in self.all:
                line.turn(time.monotonic())
            tell("fetching the ledger", max(line.chain.height for line in self.all), 0)
        self._explain()

    def _explain(self) -> None:
        """Why nobody is there, seen with a plain connection: a cut handshake alone proves no wrong key."""
        absent = {line.source.address: line for line in self.all if line.reason == line.wire.reason}
        for address, reason in reach.obstacles(list(absent), EXPLAIN_SECONDS).items():
            absent[address].reason = reason

    def read_task(self, lock: Lock, path: Path, tell: Tell) -> None:
        """The task's data from whoever has them. Without, whoever needs them says what to do."""
        wanted = bytes.fromhex(lock.data)
        for line in self.all:
            if line.chain.height and self._task_from(line, wanted, path, tell):
                return

    def _task_from(self, line: Line, digest: bytes, path: Path, tell: Tell) -> bool:
        partial = path.with_name(path.name + ".part")
        whole = hashlib.sha256()
        began = time.monotonic()
        with partial.open("wb") as file:
            while (blob := self._blob(line, digest, file.tell())) is not None:
                file.write(blob.data)
                whole.update(blob.data)
                tell("fetching the task's data", file.tell(), blob.total)
                if file.tell() >= blob.total or blob.total > MOST_TASK:
                    break
                if slow := _too_slow(file.tell(), time.monotonic() - began):
                    tell(f"going on without the task's data of {line.source.address}: {slow}", 1, 1)
                    break
        if blob is None or whole.digest() != digest:
            partial.unlink()
            return False
        os.replace(partial, path)
        return True

    def _blob(self, line: Line, digest: bytes, offset: int) -> Blob | None:
        """One part; None when it has none, or is silent."""
        deadline, again = time.monotonic() + SILENT_SECONDS, 0.0
        while (now := time.monotonic()) < deadline:
            if now >= again:
                line.wire.send(wire.encode(BlobAsk(WIRE_VERSION, WIRE_VERSION, digest, offset)))
                again = now + ASK_AGAIN
            self._wait()
            line.wire.watch()
            for body in line.wire.receive():
                try:
                    message: Message = wire.decode(body, "peer")
                except wire.MalformedMessage:
                    return None
                if isinstance(message, Sorry):
                    return None
                if isinstance(message, Blob) and (message.digest, message.offset) == (digest, offset):
                    return message
        return None

    def _wait(self) -> None:
        poller = zmq.Poller()
        for line in self.all:
            for one in line.wire.sockets:
                poller.register(one, zmq.POLLIN)
        poller.poll(100)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self.all:
            line.wire.close()
        self._context.term()
