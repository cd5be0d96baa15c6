"""The relay: two nodes that cannot dial each other exchange snapshots through the coordinator's machine.

A process of its own, `python -m coordinator.relay --data DIR --bind tcp://HOST:PORT`, with its own socket, so
that bulk never waits in front of control. It forwards opaque frames between keys of the run's roster and
holds to the rules of `relayrules.py`. Once a second it writes what it carried to `coordinator/relay.json`.
Started by `server.py`; ends when its stdin ends.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # also during the imports below
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's: it closes our stdin

import zmq

from coordinator.relayrules import Accounts
from protocol import envelope, keys, zmtp
from protocol.errors import UserError
from protocol.keys import KEY_BYTES, curve_public
from protocol.rolls import Rolls

STATUS_SECONDS = 1.0
FRAMES = 64  # forwarded per turn
HIGH_WATER = 2 * envelope.READER // envelope.FRAME  # frames per peer and direction; libzmq counts roughly
FILE = "relay.json"


class Relay:
    """One ROUTER socket and the accounts of those who use it."""

    def __init__(self, folder: Path, bind: str, rate: float = 0.0) -> None:
        """`folder`: the run's. `rate`: bytes per second through this relay, 0 for no limit."""
        self._folder = folder / "coordinator"
        secret = keys.read_curve(self._folder / "curve.key")
        self._rolls = Rolls(folder / "run.ledger")
        self._rate = rate
        self._free = 0.0  # when all that was carried is paid for
        self._accounts = Accounts()
        self._mute = False  # the disk's refusal is told once
        self._strangers = 0
        self._routes: dict[bytes, bytes] = {}  # key -> the connection that spoke last
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = _router(self._context, secret)
        self._router.setsockopt(zmq.IPV6, zmtp.needs_ipv6(bind))
        self._router.bind(bind)
        self.address = str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))

    def serve(self) -> None:
        """Forward until stdin ends."""
        poller = zmq.Poller()
        for what in (self._router, self._zap, sys.stdin.fileno()):
            poller.register(what, zmq.POLLIN)
        next_status = time.monotonic()
        while True:
            wait = self._free - time.monotonic()  # it does not read then: senders' queues fill
            if wait > 0:
                time.sleep(min(wait, 0.2))
            ready = dict(poller.poll(max(0, math.ceil((next_status - time.monotonic()) * 1000))))
            if sys.stdin.fileno() in ready:
                return
            self._answer_zap()
            self._forward()
            now = time.monotonic()
            if now >= next_status:
                next_status = now + STATUS_SECONDS
                self._write_status()

    def close(self) -> None:
        self._write_status()
        self._zap.close(0)
        self._router.close(0)
        self._context.term()

    # ------------------------------------------------------------ frames

    def _forward(self) -> None:
        for _ in range(FRAMES):
            if self._free > time.monotonic():
                return
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._carry(frames)

    def _carry(self, frames: list[zmq.Frame]) -> None:
        now = time.monotonic()
        source = _key_of(frames)
        if source is None or source not in self._rolls.keys:  # each frame: a revoked key's connection stays
            self._strangers += 1
            return
        meter = self._accounts.meter(source)
        route = frames[0].bytes
        self._routes[source] = route
        try:
            if len(frames) != 2:
                raise envelope.BadEnvelope("more than one part")
            target, grant, payload = envelope.open_frame(frames[1].bytes)
        except envelope.BadEnvelope:
            meter.dropped["malformed"] += 1
            return
        if target == source:
            return  # only to be known here
        to = self._routes.get(target)
        why = "" if to and target in self._rolls.keys else "that peer is not connected to the relay"
        why = why or self._accounts.admit(source, target, grant, len(payload), now)
        if not why and to is not None and not self._send(to, envelope.close(source, grant, payload)):
            why = "that peer does not read"
            meter.dropped[why] += 1
        if why:
            self._send(route, envelope.close(target, envelope.NO_WAY, why.encode()))
        elif self._rate:
            self._free = max(self._free, now) + len(payload) / self._rate

    def _send(self, route: bytes, frame: bytes) -> bool:
        try:
            self._router.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def _answer_zap(self) -> None:
        """Only CURVE, only keys of the roster; the key becomes the User-Id of every frame."""
        while self._zap.poll(0):
            version, request, _domain, _address, _identity, mechanism, *proof = self._zap.recv_multipart()
            key = proof[0] if mechanism == b"CURVE" and proof else b""
            if key in self._rolls.keys:
                answer = (b"200", b"OK", key.hex().encode(), b"")
            else:
                self._strangers += 1
                answer = (b"400", b"not on the roster", b"", b"")
            self._zap.send_multipart([version, request, *answer])

    def _write_status(self) -> None:
        shown = {
            "pid": os.getpid(),
            "address": self.address,
            "strangers": self._strangers,
            "connected": len(self._routes),
            "peers": {key.hex(): meter.as_dict() for key, meter in self._accounts.meters.items()},
        }
        path = self._folder / FILE
        draft = path.with_name(FILE + ".new")
        try:
            draft.write_text(json.dumps(shown))
            os.replace(draft, path)
        except OSError as error:  # a full disk is the server's to end for; what is forwarded needs none
            if not self._mute:
                sys.stderr.write(f"the relay cannot write {path}: {error.strerror}\n")
            self._mute = True


def _router(context: zmq.Context[Any], secret: bytes) -> zmq.Socket[Any]:
    router: zmq.Socket[Any] = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.LINGER, zmtp.LINGER_MS),
        (zmq.MAXMSGSIZE, envelope.MAX_FRAME),
        (zmq.HANDSHAKE_IVL, zmtp.HANDSHAKE_MS),
        (zmq.HEARTBEAT_IVL, zmtp.HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, zmtp.HEARTBEAT_TIMEOUT_MS),
        (zmq.CURVE_SERVER, 1),
    ):
        router.setsockopt(option, value)
    router.setsockopt(zmq.CURVE_SECRETKEY, secret)
    router.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(secret))
    router.setsockopt(zmq.ZAP_DOMAIN, zmtp.ZAP_DOMAIN)
    return router


def _key_of(frames: list[zmq.Frame]) -> bytes | None:
    try:
        key = bytes.fromhex(str(frames[-1].get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return None
    return key if len(key) == KEY_BYTES else None


def read_status(folder: Path) -> dict[str, Any] | None:
    """What the relay of a run's folder wrote last; None when there is none."""
    try:
        found = json.loads((folder / "coordinator" / FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the address as one line of JSON, then serve."""
    parser = argparse.ArgumentParser(prog="coordinator.relay", description="Forward between nodes.")
    parser.add_argument("--data", type=Path, required=True, help="the run's folder")
    parser.add_argument("--bind", required=True, help="address to listen on; port 0 means any free port")
    parser.add_argument("--mbit", type=float, default=0.0, help="limit of all it carries; 0: none")
    options = parser.parse_args(arguments)
    try:
        relay = Relay(options.data, options.bind, options.mbit * 125_000)
    except (UserError, zmq.ZMQError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        sys.stdout.write(json.dumps({"address": relay.address}) + "\n")
        sys.stdout.flush()
        relay.serve()
    except BrokenPipeError:  # the server was killed while this process started
        os._exit(0)  # not even Python's own last flush has anybody to write to
    finally:
        relay.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
