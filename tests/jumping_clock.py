"""A process whose clocks jump when a file says so: `python -m tests.jumping_clock FILE MODULE ARGUMENT...`

FILE holds seconds, which are added to what `time.time` and `time.monotonic` say; it may change at any moment.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path


def _jumping(clock: Callable[[], float], path: Path) -> Callable[[], float]:
    last = 0.0

    def now() -> float:
        nonlocal last
        with contextlib.suppress(OSError, ValueError):  # it is being written
            last = float(path.read_text())
        return clock() + last

    return now


def main() -> None:
    path, module, *arguments = sys.argv[1:]
    time.time = _jumping(time.time, Path(path))
    time.monotonic = _jumping(time.monotonic, Path(path))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
