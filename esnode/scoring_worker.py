"""The process that scores answers: `python -m esnode.scoring_worker PIPE`, of `esnode.scoring`.

Lives here: the child's side of the pipe, the limits it puts on itself, and the loop that calls the task. A
request is one frame, its answers come one frame each, so that the parent always knows which answer a hung or
crashed scorer was working on. Standard library, msgpack and `esnode.tasks` only: no torch, so it starts in a
tenth of a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":  # also during the imports below
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us

import msgpack

from esnode import fence, leash
from esnode.tasks import Item, Score, Task, TaskError, open_task

REASON_CHARACTERS = 200
FRAME_LIMIT = 64 * 1024 * 1024
FILE_BYTES = 256 * 1024 * 1024  # largest file a scorer may write
_LENGTH = struct.Struct("<I")


def pack(value: Any) -> bytes:
    """One frame: u32 little-endian length, then msgpack. Lone surrogates pass: models produce odd text."""
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """The value of a frame's body."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)


def read_exactly(stream: BinaryIO, count: int) -> bytes | None:
    """The next `count` bytes, or None at the end of the stream."""
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Pipe:
    """The child's ends of the two pipes; stdin and stdout are closed to the scorer's own code."""

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), "rb", buffering=0)
        self._answers = os.fdopen(os.dup(1), "wb", buffering=0)
        empty = os.open(os.devnull, os.O_RDWR)
        os.dup2(empty, 0)
        os.dup2(empty, 1)  # a scorer that prints must not write into the answers
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="requests", daemon=True).start()

    def _listen(self) -> None:
        """Read requests for ever. The end of the pipe means the parent is gone and nobody needs a score."""
        while True:
            length = read_exactly(self._requests, _LENGTH.size)
            body = read_exactly(self._requests, _LENGTH.unpack(length)[0]) if length else None
            if body is None:
                leash.end_group()  # also out of a scorer that runs for ever, with what it started
            self._queue.put(body)

    def receive(self) -> Any:
        """The next request."""
        return unpack(self._queue.get())

    def send(self, value: Any) -> None:
        """One answer."""
        frame = memoryview(pack(value))
        while frame:
            frame = frame[self._answers.write(frame) :]


def limit_process(memory_bytes: int) -> None:
    """Bound what the scorer can take from the machine. A limit that this system does not know is left out."""
    for name, value in (("RLIMIT_AS", memory_bytes), ("RLIMIT_FSIZE", FILE_BYTES), ("RLIMIT_CORE", 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some of them
            resource.setrlimit(getattr(resource, name), (value, value))


def limit_cpu(seconds: float) -> None:
    """The kernel ends this process when it burns `seconds` more: the last resort."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def describe(error: BaseException) -> str:
    """One short line."""
    return f"raised {type(error).__name__}: {error}".rstrip(": ")[:REASON_CHARACTERS]


def guarded(call: Callable[[], Any]) -> list[Any]:
    """What one call gave: ["score", reward, correct], ["more", messages] or ["failed", reason]."""
    try:
        return plain(call())
    except BaseException as error:  # SystemExit too: whatever a scorer does, it costs one answer
        return ["failed", describe(error)]


def plain(given: Any) -> list[Any]:
    """A score or a continuation in msgpack's types; anything else is a failure with its reason."""
    if isinstance(given, list):
        return ["more", [{"role": str(m["role"]), "content": str(m["content"])} for m in given]]
    if not isinstance(given, Score):
        return ["failed", f"returned {given!r:.80} instead of a score"]
    reward: Any = given.reward  # declared a float, but the user's code made it
    if not isinstance(reward, Real):
        return ["failed", f"the reward is {reward!r:.80}, not a number"]
    return ["score", float(reward), bool(given.correct)]


def score_batch(task: Task, items: Sequence[Item], texts: Sequence[str]) -> list[list[Any]]:
    """All answers by one call of the task; when it fails, each has the same reason."""
    try:
        scores = task.score_batch(items, texts)
        if len(scores) != len(texts):
            raise ValueError(f"score_batch returned {len(scores)} scores for {len(texts)} answers")
        return [plain(score) for score in scores]
    except BaseException as error:  # as in `guarded`
        return [["failed", describe(error)]] * len(texts)


def serve(task: Task, pipe: Pipe, seconds: float) -> None:
    """Answer requests until the parent goes away. A request: [split, indices, texts, conversations]."""
    while True:
        split, indices, texts, conversations = pipe.receive()
        items = [task.items_of(split)[index] for index in indices]
        if task.batched:
            limit_cpu(seconds * len(items))
            for outcome in score_batch(task, items, texts):
                pipe.send(outcome)
            continue
        for item, text, messages in zip(items, texts, conversations, strict=True):
            limit_cpu(seconds)
            pipe.send(guarded(partial(task.reply, item, messages, text)))


def main() -> None:
    """Open the task named by the first frame, say whether that worked, then serve."""
    leash.hold(int(sys.argv[1]))
    pipe = Pipe()
    opening = pipe.receive()
    limit_process(opening["memory"])
    try:
        code = Path(opening["code"]) if opening["code"] else None
        task = open_task(opening["spec"], opening["options"], opening["data"], code=code)
        task.warm_up()
        if not task.own_code:
            fence.close()
    except TaskError as error:
        pipe.send(["refused", str(error)])
    except Exception as error:
        pipe.send(["refused", f"the scorer of task {opening['spec']!r} does not start: it {describe(error)}"])
    else:
        pipe.send(["ready"])
        serve(task, pipe, opening["seconds"])


if __name__ == "__main__":
    main()
