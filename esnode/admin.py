"""Asking a coordinator on this machine, through the administration socket in its run folder.

The listening side is `coordinator/admin.py`. Called by the command line, `run.py` and `standing.py`.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from protocol import ipc
from protocol.errors import UserError

WAIT_SECONDS = 5.0
MAX_ANSWER = 1 << 28


class NoCoordinator(UserError):
    """Nobody answers: no coordinator runs on this folder, or it is stuck."""


class OrderRefused(UserError):
    """The coordinator answered that it will not do this; its sentence says why."""


def order(folder: Path, op: str, **fields: Any) -> dict[str, Any]:
    """`ask` for something that has to happen: OrderRefused when the coordinator refuses it, NoCoordinator
    with the command that starts one when none runs."""
    try:
        answer = ask(folder, op, **fields)
    except NoCoordinator as error:
        raise NoCoordinator(
            f"{error}. Only a running coordinator can do this: `esnode coordinator serve --data {folder}`"
        ) from None
    if "error" in answer:
        raise OrderRefused(str(answer["error"]))
    return answer


def ask(folder: Path, op: str, *, wait: float = WAIT_SECONDS, **fields: Any) -> dict[str, Any]:
    """Send one request ("status", "stop", ...) to the coordinator of the run in `folder`; its answer.

    NoCoordinator when nothing answers within `wait` seconds.
    """
    silent = f"the coordinator of {folder} does not answer; its log is {folder}/logs/coordinator.log"
    with ipc.endpoint(folder / "coordinator") as path, socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(wait)
        try:
            asker.connect(path)
        except (TimeoutError, BlockingIOError):  # too many wait to be answered
            raise NoCoordinator(silent) from None
        except OSError:  # no such file, or after a kill -9 the file alone is left
            raise NoCoordinator(f"no coordinator is running on {folder}") from None
        try:
            asker.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
            raw = ipc.read_line(asker, MAX_ANSWER)
        except OSError:
            raw = b""
        if not raw:
            raise NoCoordinator(silent)
        answer = json.loads(raw)
    assert isinstance(answer, dict)
    return answer
