"""Runs this machine has joined: where their folders lie, and what each remembers of its coordinator.

Shell. A folder is `~/.local/share/esnode/<first 16 hex digits of the run id>` (or in $ESNODE_DATA), laid out
like a run's folder as far as a node needs it, plus `joined.json`. Called by `join.py`, `nodeoptions.py` and
`duty.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from esnode.folder import write_file
from protocol import zmtp
from protocol.errors import UserError

FILE = "joined.json"
PAUSED = "paused"  # a file of this name, in a run's folder or beside them, pauses nodes
SHORT = 16  # hex digits of a run id that name its folder


class JoinedError(UserError):
    """No run, several runs, or a damaged note where one was expected."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What a machine remembers of a run it was let into."""

    run: bytes  # 32 bytes
    addresses: tuple[str, ...]  # of the coordinator, in the order to try them
    nodes: Mapping[str, bool]  # name of each node here: whether the coordinator took its key

    def enrolled(self, name: str, addresses: Sequence[str]) -> Joined:
        """With one more node that was let in; `addresses` go first."""
        known = dict.fromkeys((*addresses, *self.addresses))
        return replace(self, addresses=tuple(known), nodes={**self.nodes, name: True})


def root() -> Path:
    """Where the folders of joined runs lie."""
    named = os.environ.get("ESNODE_DATA")
    return Path(named).expanduser() if named else Path.home() / ".local" / "share" / "esnode"


def folder_of(run: bytes, data: Path | None = None) -> Path:
    """The folder of a run on this machine."""
    return (data or root()) / run.hex()[:SHORT]


def read(folder: Path) -> Joined | None:
    """What `folder` remembers; None when it is no joined run's. JoinedError when the note is damaged."""
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _checked(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise JoinedError(
            f"{path} is damaged. Remove that one file and join again with an invite: keys and ledger beside "
            "it stay good"
        ) from error


def _checked(plain: Any) -> Joined:
    run = bytes.fromhex(plain["run"])
    addresses = tuple(plain["addresses"])
    for address in addresses:
        zmtp.host_and_port(address)
    nodes = {str(name): value is True for name, value in plain["nodes"].items()}
    if len(run) != 32 or not addresses:
        raise ValueError
    return Joined(run, addresses, nodes)


def write(folder: Path, joined: Joined) -> None:
    """Keep it, in one step."""
    plain = {"run": joined.run.hex(), "addresses": joined.addresses, "nodes": dict(joined.nodes)}
    write_file(folder / FILE, (json.dumps(plain, indent=1) + "\n").encode(), 0o600)


def known(data: Path | None = None) -> list[Path]:
    """Folders of all runs that this machine has joined."""
    return sorted(path.parent for path in (data or root()).glob(f"*/{FILE}"))


def find(run: str | None, data: Path | None = None) -> Path:
    """The folder of the run whose id begins with `run`; of the only one when that is None."""
    folders = known(data)
    wanted = (run or "").strip().lower()
    found = [path for path in folders if path.name.startswith(wanted[:SHORT])]
    if len(found) == 1:
        return found[0]
    place = data or root()
    if not folders:
        raise JoinedError(f"no run was joined here yet ({place}): `esnode join INVITE` joins one")
    names = ", ".join(path.name for path in folders)
    if not found:
        raise JoinedError(f"no joined run has an id that begins with {wanted}; there are {names}")
    raise JoinedError(f"several runs were joined here: name one with --run ({names})")
