"""Scoring that cannot take the daemon down. Lives here: `Scorer`, the parent's side of a scoring process.

Every answer is scored in a child process (`scoring_worker.py`) under limits of time, CPU and memory. An
answer whose scorer raises, hangs, crashes or returns nonsense gets the task's floor, is counted, and the
reason is kept; a child that hung or died is killed with everything it started, and a new one takes its place.
Called by `episodes.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from esnode.children import importable
from esnode.engines.interface import Cancelled, StopCheck, never
from esnode.scoring_worker import FRAME_LIMIT, pack, unpack
from esnode.tasks import ChatMessage, Score, open_task
from protocol.errors import UserError, cut
from protocol.logfile import one_line

START_SECONDS = 60.0  # importing what a scorer needs, on a busy machine
LOOK_SECONDS = 0.05  # how often a waiting parent looks whether its work was cancelled
LONGEST_REASON = 300  # a child runs code of others and may say anything
MEMORY_BYTES = 2 * 1024**3
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "SYSTEMROOT")


class ScorerError(UserError):
    """The scoring process cannot start: the task's code, data or packages are not usable on this machine."""


class _Gone(Exception):
    """The child ended, or sent what is no answer; the text says how."""


class _TooSlow(Exception):
    """Nothing came within the time limit."""


_Answer: TypeAlias = tuple[int, str, Sequence[ChatMessage]]  # item number, text, conversation so far


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows one answer: the end of the episode with a score, or messages to append and another turn.

    `failure` says why the score is the floor although nobody scored; empty otherwise.
    """

    score: Score | None = None
    more: tuple[ChatMessage, ...] = ()
    failure: str = ""


class Scorer:
    """Scores answers of one task in a process of its own. Callers in several threads take turns.

    `options` are settled ones and `data` is the blob they came with (`tasks.materialise`);
    `options["time_limit"]` is in seconds per answer. The child starts with `start()` or the first answer, so
    that importing overlaps other work.
    """

    def __init__(
        self, spec: str, options: Mapping[str, Any], data: bytes, *, code: Path | None = None
    ) -> None:
        self.task = open_task(spec, options, data, code=code)
        self.seconds = float(options.get("time_limit", 5.0))
        self.failures: Counter[str] = Counter()  # answers given the floor, by reason
        self._opening = {
            "spec": spec,
            "options": dict(options),
            "data": data,
            "code": str(code) if code else "",
            "seconds": self.seconds,
            "memory": MEMORY_BYTES,
        }
        self._child: _Child | None = None
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the child if none runs; does not wait for it."""
        if self._child is None:
            self._child = _Child(self._opening)

    def close(self) -> None:
        """End the child and everything it started. The scorer can be used again."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def score_batch(
        self, split: str, indices: Sequence[int], texts: Sequence[str], stop: StopCheck = never
    ) -> list[Score]:
        """One score per answer of a single-turn task, the floor where scoring failed; see `judge`."""
        scores = [verdict.score for verdict in self.judge(split, indices, texts, stop=stop)]
        if None in scores:
            raise ValueError(f"task {self.task.name!r} has several turns: use judge")
        return [score for score in scores if score is not None]

    def judge(
        self,
        split: str,
        indices: Sequence[int],
        texts: Sequence[str],
        conversations: Sequence[Sequence[ChatMessage]] | None = None,
        stop: StopCheck = never,
    ) -> list[Verdict]:
        """What follows each answer, in order. `conversations[k]` is the chat that answer k ends.

        `indices` are item numbers within the split. Failures of the task's code are verdicts, counted in
        `failures`. Raises Cancelled when `stop()` turns true, ScorerError when no child can be started.
        """
        assert all(0 <= index < len(self.task.items_of(split)) for index in indices)
        answers = list(zip(indices, texts, conversations or [()] * len(texts), strict=True))
        while not self._turn.acquire(timeout=LOOK_SECONDS):
            if stop():
                raise Cancelled
        try:
            return self._verdicts(split, answers, stop)
        finally:
            self._turn.release()

    def _verdicts(self, split: str, answers: Sequence[_Answer], stop: StopCheck) -> list[Verdict]:
        verdicts: list[Verdict] = []
        if self.task.batched and len(answers) > 1:
            replies, fate = self._request(split, answers, stop)
            if fate is None and all(reply[0] != "failed" for reply in replies):
                verdicts = [self._verdict(reply) for reply in replies]
        # A batch that failed as a whole is tried again answer by answer, so that only the guilty ones pay.
        step = 1 if self.task.batched else len(answers)
        while len(verdicts) < len(answers):
            replies, fate = self._request(split, answers[len(verdicts) :][:step], stop)
            verdicts += [self._verdict(reply) for reply in replies]
            if fate is not None:
                verdicts.append(self._floor(fate))
        self.failures.update(verdict.failure for verdict in verdicts if verdict.failure)
        return verdicts

    def _request(
        self, split: str, answers: Sequence[_Answer], stop: StopCheck
    ) -> tuple[list[Any], str | None]:
        """The child's replies in order, and what became of it when there are fewer than answers."""
        indices, texts, talks = zip(*answers, strict=True)
        limit = self.seconds * (len(answers) if self.task.batched else 1)
        replies: list[Any] = []
        child = self._ready(stop)
        try:
            child.send([split, indices, texts, talks], limit)
            while len(replies) < len(answers):
                replies.append(child.receive(limit, stop))
        except _TooSlow:
            self.close()
            return replies, f"ran over its time limit of {self.seconds:g} s"
        except _Gone as gone:
            self.close()
            return replies, str(gone)
        except Cancelled:
            self.close()  # it may be in the middle of an answer
            self.start()  # the next one imports beside the engine's work
            raise
        return replies, None

    def _ready(self, stop: StopCheck) -> _Child:
        if self._child is not None and self._child.dead:
            self.close()  # it died between two requests: no answer's fault
        self.start()
        assert self._child is not None
        try:
            self._child.ready(stop)
        except (_Gone, _TooSlow) as error:
            self.close()
            raise ScorerError(f"the scorer of task {self.task.name!r} does not start: {error}") from error
        except (ScorerError, Cancelled):
            self.close()
            raise
        return self._child

    def _verdict(self, reply: Any) -> Verdict:
        """A reply taken at its word only where it is a finite reward within the declared range."""
        match reply:
            case ["more", list() as messages]:
                return Verdict(more=tuple(messages))
            case ["score", float() as reward, bool() as correct]:
                if math.isfinite(reward) and self.task.low <= reward <= self.task.high:
                    return Verdict(Score(reward, correct))
                declared = f"{self.task.low:g} to {self.task.high:g}"
                return self._floor(f"the reward is {reward!r}, outside the declared {declared}")
            case ["failed", str() as reason]:
                return self._floor(one_line(cut(reason, LONGEST_REASON)))
        return self._floor("the scoring process sent nonsense")

    def _floor(self, reason: str) -> Verdict:
        return Verdict(Score(self.task.floor, False), failure=reason)


class _Child:
    """One scoring process and the two pipes to it."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment |= importable()
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}  # equal scores everywhere; one core
        leash, self._leash = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "esnode.scoring_worker", str(leash)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=(leash,),
                start_new_session=True,  # its own group: Ctrl-C is not for it, kill() reaches its children
                bufsize=0,
            )
        except BaseException:
            os.close(self._leash)
            raise
        finally:
            os.close(leash)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._received = bytearray()
        self._ready = False
        with contextlib.suppress(_Gone, _TooSlow):  # `ready` meets the same and says so
            self.send(opening, START_SECONDS)

    @property
    def dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def ready(self, stop: StopCheck) -> None:
        """Wait until the task is open in the child. Raises ScorerError with the child's own words."""
        if self._ready:
            return
        match self.receive(START_SECONDS, stop):
            case ["ready"]:
                self._ready = True
            case ["refused", str() as reason]:
                raise ScorerError(one_line(reason))
            case _:
                raise _Gone("the scoring process sent nonsense")

    def send(self, value: Any, seconds: float) -> None:
        """Write one frame. Raises _Gone or _TooSlow."""
        frame = memoryview(pack(value))
        deadline = time.monotonic() + seconds
        while frame:
            try:
                frame = frame[os.write(self._in, frame) :]
            except BlockingIOError:
                self._wait(self._in, select.POLLOUT, deadline, never)
            except BrokenPipeError as error:
                raise _Gone(self._fate()) from error

    def receive(self, seconds: float, stop: StopCheck) -> Any:
        """The value of the next frame. Raises _Gone, _TooSlow, or Cancelled when `stop()` turns true."""
        deadline = time.monotonic() + seconds
        body = self._take(self._take_length(deadline, stop), deadline, stop)
        try:
            return unpack(body)
        except ValueError as error:
            raise _Gone("sent nonsense") from error

    def _take_length(self, deadline: float, stop: StopCheck) -> int:
        length = int.from_bytes(self._take(4, deadline, stop), "little")
        if length > FRAME_LIMIT:
            raise _Gone("sent nonsense")
        return length

    def _take(self, count: int, deadline: float, stop: StopCheck) -> bytes:
        while len(self._received) < count:
            try:
                part = os.read(self._out, 1 << 16)
            except BlockingIOError:
                self._wait(self._out, select.POLLIN, deadline, stop)
                continue
            if not part:
                raise _Gone(self._fate())
            self._received += part
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _wait(self, pipe: int, event: int, deadline: float, stop: StopCheck) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        while True:
            left = deadline - time.monotonic()
            if poll.poll(1000 * max(0.0, min(LOOK_SECONDS, left))):
                return
            if left <= 0:  # after the look, so that a parent that was itself held up blames nobody
                raise _TooSlow("it took too long")
            if stop():
                raise Cancelled

    def _fate(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        if code < 0:
            return f"crashed ({signal.Signals(-code).name})"
        return f"ended its process with exit code {code}"

    def kill(self) -> None:
        """End the process and everything it started, and wait for it."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()  # already gone (or, on macOS, a zombie group): this does nothing then
        self._process.wait()
        os.close(self._leash)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
