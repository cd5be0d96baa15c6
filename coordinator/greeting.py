"""What a coordinator prints for the person who started it: the invite, and how to go on.

Shell: writes to standard output. Called by `server.py` once it listens.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol import zmtp


def show(made: Sequence[Mapping[str, Any]], folder: Path, bound: str) -> None:
    """Print invites, as `Orders.invite` made them, with the line to type on the other machine."""
    sys.stdout.write(words(made, folder, bound))
    sys.stdout.flush()


def words(made: Sequence[Mapping[str, Any]], folder: Path, bound: str) -> str:
    """The text of `show`.

    An invite stands on a line of its own, however long: terminals wrap it, and `esnode join` does not mind.
    """
    if not made:
        return ""
    place = shlex.quote(str(folder))
    until = time.strftime("%a %d %b %Y %H:%M:%S", time.localtime(made[0]["expires"]))
    each = "This lets one machine in" if len(made) == 1 else "Each line lets one machine in"
    lines = [f"{each}, until {until}. Keep it like a password.", ""]
    for invite in made:
        lines += [f"esnode join {invite['invite']}", ""]
    lines += [
        f"It dials {', '.join(made[0]['addresses'])}",
        _advice(bound),
        f"More invites: esnode invite {place}",
        f"Who is there: esnode status {place} --watch",
    ]
    return "\n".join(["", *lines, "", ""])


def _advice(bound: str) -> str:
    if zmtp.is_loopback(bound):
        return "(this machine only; listen for others with --bind tcp://0.0.0.0:PORT)"
    return "(wrong from outside? name the address to dial with --advertise HOST)"


def farewell(folder: Path, ended: bool) -> str:
    """What to do with the run in `folder` once its coordinator has stopped as it should."""
    place = shlex.quote(str(folder))
    if ended:
        return f"the trained model, where the node extra is installed: esnode export {place} --to model"
    return f"everything is kept; go on with: esnode coordinator serve --data {place} (and --bind as before)"
