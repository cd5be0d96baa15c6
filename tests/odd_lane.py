"""Loaders whose first lane that gets there goes wrong once: a file in the run's folder is the token.

`flip`: a bit of one lane's master turns over before its next unit; `wrong`: its update comes out wrong, and
nothing there notices; `short`: its engine ends for want of memory; `child`: lanes start a process of their
own, whose number is a file's; `die`: all lanes die while they load; `hold`: units wait as long as it is
there. Called by `test_fleet.py` and `test_orphans.py` as the `--loader` of lanes.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from esnode import workshop
from esnode.engines.interface import EngineEnded
from esnode.nodeoptions import Options
from protocol.lock import Lock
from tests import toy_engine


def _wins(token: Path) -> bool:
    try:
        os.rename(token, token.with_suffix(f".{os.getpid()}"))
    except OSError:
        return False
    return True


def _hold(folder: Path) -> None:
    while (folder / "hold").exists():
        time.sleep(0.05)


def tiny(options: Options, lock: Lock) -> Any:
    """The real workshop."""
    made = workshop.load(options, lock)
    evaluate = made.evaluate

    def odd(*arguments: Any) -> Any:
        _hold(options.run)
        if _wins(options.run / "flip"):
            import torch

            part = made._engine._replica.state.parts[0]  # type: ignore[attr-defined]
            part.master.view(torch.int32)[7] ^= 1 << 12
        return evaluate(*arguments)

    made.evaluate = odd  # type: ignore[method-assign]
    return made


def toy(options: Options, lock: Lock) -> Any:
    """The toy."""
    if (options.run / "die").exists():
        os.abort()
    if (options.run / "child").exists():
        child = subprocess.Popen(["sleep", "600"])
        (options.run / f"child.{child.pid}").touch()
    if options.wish.rows:
        (options.run / f"rows.{options.wish.rows}").touch()
    made = toy_engine.load(options, lock)
    apply = made.apply

    def odd(*arguments: Any) -> Any:
        digests = apply(*arguments)
        if _wins(options.run / "wrong"):
            made._master = made._master.copy()
            made._master.view("uint32")[5] ^= 8
            digests[-1] = made._written = made.digest()
        return digests

    evaluate = made.evaluate

    def held(*arguments: Any) -> Any:
        _hold(options.run)
        if _wins(options.run / "short"):
            ended = EngineEnded("rank 1 ran out of memory")
            ended.rows = 5
            raise ended
        return evaluate(*arguments)

    made.apply, made.evaluate = odd, held
    return made


def hungry(options: Options, lock: Lock) -> Any:
    """The toy, which says that it takes 4 GB of host memory and 6 in all."""
    assert options.planned is not None
    options.planned(4 * 10**9, 6 * 10**9)
    return toy(options, lock)


def scored(options: Options, lock: Lock) -> Any:
    """The toy, with a scoring process beside it."""
    from esnode import tasks
    from esnode.scoring import Scorer

    made = toy(options, lock)
    data = tasks.materialise("arithmetic", {})
    made.scorer = Scorer("arithmetic", tasks.header(data)[1], data)
    made.scorer.start()
    return made
