"""How much a node may still put on its disk: what is free, less a reserve, and what its owner allows.

Shell. Imports no engine. Asked before a snapshot is written (`checkpoint.py`) or fetched (`receiver.py`), and
by `join.py` before a run is admitted. The policy is read each time, so that a change holds from the next one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from esnode import duty, joined
from esnode.policy import GB, PolicyError

SPARE_BYTES = 256 * 1024 * 1024  # left on the disk for ledger and logs
_BLOCK = 512  # bytes, what st_blocks counts


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one node. `spare`: bytes that stay free; `home`: where joined runs lie, whose disk the
    policy bounds; None: it does not.
    """

    spare: int = SPARE_BYTES
    home: Path | None = None

    def short(self, folder: Path, needed: int, there: int = 0) -> str:
        """Why `needed` bytes, of which the disk holds `there` already, do not fit into `folder`; or ""."""
        free = _free(folder)
        if free + there < needed + self.spare:
            wanted = (needed + self.spare) / 1e6
            return f"{free / 1e6:.0f} MB are free in {folder}, {wanted:.0f} MB are needed"
        return self._forbidden(needed - there) if self.home is not None else ""

    def _forbidden(self, more: int) -> str:
        assert self.home is not None
        try:
            limit = duty.read_policy().disk_gb
        except PolicyError as error:
            return str(error)
        used = taken(self.home)
        if not limit or used + more <= limit * GB:
            return ""
        return (
            f"the runs in {self.home} take {used / 1e6:.0f} MB, {more / 1e6:.0f} MB more are needed, and "
            f"this machine's policy allows {limit:g} GB (disk_gb)"
        )


def _free(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def of_run(run: Path) -> Room:
    """The room of a node in a run's folder: the policy is about joined runs."""
    return Room(home=run.parent if joined.read(run) else None)


def taken(home: Path, but: Path | None = None) -> int:
    """Bytes on the disk that the joined runs in `home` take, all or all `but` one."""
    total = 0
    for run in joined.known(home):
        for file in run.rglob("*") if run != but else ():
            try:
                total += file.stat().st_blocks * _BLOCK
            except FileNotFoundError:  # a node is at work there
                continue
    return total
