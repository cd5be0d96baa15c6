"""Whether this machine's nodes may work right now: the policy file, the clock, and the pause switch.

Shell. The policy file is `node.toml` in $ESNODE_CONFIG or ~/.config/esnode; the switch is an empty file
called `paused`, in one run's folder or beside all of them. Called by `join.py`, by the daemon of a joined run
(about once a second) and by `esnode policy`, `pause` and `resume`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from esnode import joined
from esnode.policy import Policy, PolicyError, parse
from protocol import keys

LOOK_SECONDS = 1.0


def policy_file() -> Path:
    """Where the policy lies, whether or not it exists."""
    return keys.user_signing_file().with_name("node.toml")


def read_policy() -> Policy:
    """The owner's policy; everything is allowed where there is no file. PolicyError when it has a fault."""
    path = policy_file()
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return Policy()
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read the policy file {path}: {error}") from error


def switch(place: Path, paused: bool) -> bool:
    """Pause or resume the nodes of a joined run's folder, or of what holds them all; whether it changed."""
    path = place / joined.PAUSED
    was = path.exists()
    if paused:
        place.mkdir(parents=True, exist_ok=True)
        path.touch()
    else:
        path.unlink(missing_ok=True)
    return was != paused


class Duty:
    """The question "may I work now?", answered about once a second. `reason` says why not, "" means yes."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        """`folder`: the joined run's; `warn` hears about a policy file that became unreadable."""
        self.reason = ""
        self._switches = (folder / joined.PAUSED, folder.parent / joined.PAUSED)
        self._policy = read_policy()
        self._stamp = _stamp()
        self._warn = warn
        self._next = 0.0

    def look(self, now: float) -> bool:
        """Look again when it is time; whether the answer changed. `now`: monotonic seconds."""
        if now < self._next:
            return False
        self._next = now + LOOK_SECONDS
        self._reread()
        before, self.reason = self.reason, self._why_not()
        return before != self.reason

    def _reread(self) -> None:
        stamp = _stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._policy = read_policy()
        except PolicyError as error:
            self._warn(f"{error}; the policy read before stays in force")

    def _why_not(self) -> str:
        if any(switch.exists() for switch in self._switches):
            return "paused by its owner"
        local = time.localtime()
        if not self._policy.working(local.tm_wday, local.tm_hour * 60 + local.tm_min):
            return f"outside the hours of its policy ({self._policy.schedule})"
        return ""


def _stamp() -> tuple[int, int]:
    try:
        status = policy_file().stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
