"""A coordinator's door for tests of joining: it lets in whom, and says what, it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import zmq

from protocol import keys, wire
from protocol.invite import Invite, encode
from protocol.messages import Message

SERVER = b"\x05" * 32
ONE_TIME = b"\x06" * 32
Answer = Callable[[bytes, Message], Message | None]


class Doorman:
    """A CURVE ROUTER in a thread. `admit(key)` decides on connections, `answer(key, message)` what to say."""

    def __init__(
        self,
        admit: Callable[[bytes], bool],
        answer: Answer,
        host: str = "127.0.0.1",
        secret: bytes = SERVER,
    ) -> None:
        self._admit, self._answer = admit, answer
        self.heard: list[tuple[bytes, Message]] = []
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.ipv6 = ":" in host
        self._router.curve_server = True
        self._router.curve_secretkey, self._router.curve_publickey = secret, keys.curve_public(secret)
        self._router.bind(f"tcp://{host}:0")
        self.address = str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def invite(self, run: bytes, *addresses: str, server: bytes = SERVER, secret: bytes = ONE_TIME) -> str:
        """The text of an invite to this door."""
        return encode(Invite(addresses or (self.address,), keys.curve_public(server), run, secret, 2**33))

    def _serve(self) -> None:
        while not self._over.is_set():
            while self._zap.poll(5):
                version, request, _, _, _, _, key = self._zap.recv_multipart()
                status = b"200" if self._admit(key) else b"400"
                self._zap.send_multipart([version, request, status, b"", key.hex().encode(), b""])
            while self._router.poll(5):
                route, body = self._router.recv_multipart(copy=False)
                key = bytes.fromhex(str(body.get("User-Id")))
                message = wire.decode(body.bytes, "node")
                self.heard.append((key, message))
                answer = self._answer(key, message)
                if answer is not None:
                    self._router.send_multipart([route.bytes, wire.encode(answer)])

    def __enter__(self) -> Doorman:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._zap.close(0)
        self._router.close(0)
        self._context.term()
