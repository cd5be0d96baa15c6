"""What a coordinator needs before it can serve: lock, operating settings, keys, list of nodes, its address.

Shell. Reads the run's folder and refuses in one sentence what cannot work. Called by `server.py` at start,
and for the operating settings whenever the plan file changes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from protocol import keys, plan, zmtp
from protocol.errors import UserError
from protocol.lock import Lock, LockError, lock_from_bytes
from protocol.plan import Ops

ADDRESS = "address"
PUBLIC_KEY = "curve.pub"


class SetupError(UserError):
    """The folder cannot be served; the sentence says what is missing."""


@dataclass
class Setup:
    """The inputs of one coordinator process."""

    folder: Path
    lock: Lock
    ops: Ops
    signing_seed: bytes
    curve_secret: bytes
    roster: dict[bytes, str]
    _plan_seen: tuple[int, int] = field(default=(0, 0), repr=False)

    @property
    def ledger_path(self) -> Path:
        """The run's ledger file."""
        return self.folder / "run.ledger"

    @classmethod
    def load(cls, folder: Path) -> Setup:
        """Read everything, make the CURVE key at the first start, publish its public half."""
        inner = folder / "coordinator"
        lock = _read_lock(folder / "lock.json")
        plan_path = folder / "plan.toml"
        ops = _ops(plan_path)
        seed = _signing_seed(inner / "signing.key")
        secret = _own_key(inner / "curve.key")
        replace_file(inner / PUBLIC_KEY, keys.curve_public(secret).hex() + "\n")
        return cls(
            folder, lock, ops, seed, secret, keys.read_roster(inner / "roster.json"), _stamp(plan_path)
        )

    def changed_ops(self, log: logging.Logger) -> Ops | None:
        """The plan's `[ops]` if the file changed and they differ; a broken plan is logged and ignored."""
        path = self.folder / "plan.toml"
        stamp = _stamp(path)
        if stamp == self._plan_seen:
            return None
        self._plan_seen = stamp
        try:
            ops = plan.parse(path.read_text(encoding="utf-8")).ops
        except (UserError, OSError, UnicodeDecodeError) as error:
            log.warning("%s changed but is not used: %s", path, error)
            return None
        if ops == self.ops:
            return None
        self.ops = ops
        return ops


def usual_address(folder: Path, bind: str) -> str | None:
    """The address of the last start, when `bind` leaves the port open and names the same host."""
    try:
        last = (folder / "coordinator" / ADDRESS).read_text().strip()
        zmtp.host_and_port(last)
    except (OSError, ValueError):  # damaged: it is written anew
        return None
    host, _, port = bind.rpartition(":")
    return last if port == "0" and last.rpartition(":")[0] == host else None


def publish_address(folder: Path, address: str) -> None:
    """Tell nodes on this machine where to connect; written last, so that its presence means "listening"."""
    local = address.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
    replace_file(folder / "coordinator" / ADDRESS, local + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a small text file in one step."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def _ops(path: Path) -> Ops:
    try:
        return plan.parse(_read(path, "it sets the number of rounds").decode("utf-8", "replace")).ops
    except plan.PlanError as error:
        raise SetupError(f"{path}: {error}") from error


def _own_key(path: Path) -> bytes:
    try:
        return keys.new_curve_file(path)
    except keys.KeyDamaged as error:
        raise SetupError(
            f"{error}. Put a copy of it back; without one, move it away: another is made, and machines that "
            "joined need a new invite"
        ) from error


def _signing_seed(path: Path) -> bytes:
    try:
        return keys.read_signing(path)
    except keys.KeyFileError as error:
        if path.exists() and not isinstance(error, keys.KeyDamaged):
            raise
        raise SetupError(
            f"{error}. It is a copy of {keys.user_signing_file()}: `esnode coordinator serve` makes it again "
            "where there is none"
        ) from error


def _read(path: Path, hint: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SetupError(f"there is no {path}; {hint}") from None


def _read_lock(path: Path) -> Lock:
    try:
        return lock_from_bytes(_read(path, "`esnode plan lock` or `esnode run` writes it"))
    except LockError as error:
        raise SetupError(
            f"{path} is damaged ({error}): put a copy of it back, for example a node's, or remove it and "
            "start with `esnode coordinator serve`, which makes it again from the ledger"
        ) from error


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
