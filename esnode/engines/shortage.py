"""Running out of memory in the middle of work: what counts as that, and what an engine makes of it.

Lives here: `Room`, the bound on rows that an engine learns, the `OutOfMemory` it raises, and the two ways to
live with one: measure again (`patiently`) or say so and end (`loading`); and what no process lives with, a
GPU that has failed (`alive`). May import torch. Called by the engines, `worker.py`, `workshop.py`,
`evaluate.py` and the command.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from esnode.engines.interface import EngineEnded
from esnode.memory import MemoryShort
from protocol.errors import UserError, cut, first_line

Given = ParamSpec("Given")
Result = TypeVar("Result")
# How allocators that have no exception of their own say it: torch on CPUs, CUDA's libraries, C++.
WORDS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "bad_alloc")
# How a GPU says that it has failed: every later call of the process says so too.
FAILED = ("CUDA error", "CUDA driver error", "HIP error", "Triton Error", "CUBLAS_STATUS", "CUDNN_STATUS")
WORDS_SHOWN = 120
log = logging.getLogger(__name__)


class OutOfMemory(UserError):
    """A batch did not fit. `rows` is the engine's bound from now on, 0 where not even one row fits."""

    def __init__(self, words: str, rows: int) -> None:
        super().__init__(words)
        self.rows = rows


def is_shortage(error: BaseException) -> bool:
    """Whether an allocation failed for want of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


@contextlib.contextmanager
def alive() -> Iterator[None]:
    """EngineEnded where the GPU fails, memory apart: a process cannot use it again, a new one often can."""
    try:
        yield
    except RuntimeError as error:
        if is_shortage(error) or not any(words in str(error) for words in FAILED):
            raise
        raise EngineEnded(
            f"the GPU has failed ({_shown(error)}): nothing more can be computed in this process, which has "
            "to be started again. Where that repeats itself, see `nvidia-smi` and the system's log"
        ) from error


class Room:
    """The most rows an engine takes at once: `rows`, 0 for no bound of this kind, halved by every failure.

    The bound only falls, and is part of the engine's fingerprint: other batches may give other answers.
    """

    def __init__(self) -> None:
        self.rows = 0

    def fingerprint(self, plain: bytes) -> bytes:
        """An engine's fingerprint under this bound; without one, `plain`. 8 bytes."""
        if not self.rows:
            return plain
        return hashlib.blake2b(plain + b"|rows %d" % self.rows, digest_size=8).digest()

    def batch(self, rows: int, work: Callable[[], Result]) -> Result:
        """What `work` on so many rows gives; OutOfMemory, and a lower bound, when memory ran out in it."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            words = _shown(error)
        # Only here, when the error and with it the frames that hold the batch are gone, memory is free again.
        free()
        if rows <= 1:
            raise OutOfMemory(
                f"one prompt alone does not fit into memory ({words}): free some, lower max_new_tokens, or "
                "leave this run to larger machines",
                0,
            )
        self.rows = rows // 2
        raise OutOfMemory(f"{rows} prompts at once do not fit into memory ({words})", self.rows)


def patiently(work: Callable[[], Result]) -> Result:
    """What `work` gives, done again from its beginning at every lower bound; OutOfMemory when one row is too
    much.
    """
    while True:
        try:
            return work()
        except OutOfMemory as error:
            if not error.rows:
                raise
            log.warning(
                "%s: from now on at most %d, which is slower and another engine fingerprint",
                error,
                error.rows,
            )


def loading(load: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same loader, but memory that runs out in it is a MemoryShort."""

    @functools.wraps(load)
    def guarded(*arguments: Given.args, **options: Given.kwargs) -> Result:
        try:
            return load(*arguments, **options)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            words = _shown(error)
        raise MemoryShort(
            f"memory ran out while the model was loaded ({words}): something else may be using it. Free "
            'some, use a smaller model or master = "bfloat16", or train fewer tensors ([run.train])'
        )

    return guarded


def free() -> None:
    """Give back what only the allocators still hold."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _shown(error: BaseException) -> str:
    return cut(first_line(error), WORDS_SHOWN)
