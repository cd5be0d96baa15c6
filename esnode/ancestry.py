"""The runs a fork descends from: their ledgers, checked against each lock that names them.

A parent's ledger lies in the fork's folder as parents/RUNID.ledger, and so do those of the parent's own
ancestors. Called by `rebuild.py`, `fork.py` and `workshop.py`; needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from protocol import ledger
from protocol.chain import BrokenChain, Chain
from protocol.errors import UserError
from protocol.forks import check_fork
from protocol.lock import Lock


class NoParent(UserError):
    """The ledger of a fork's parent is missing or is not the one the lock names."""


def ancestors(lock: Lock, parents: Path) -> list[tuple[Chain, int]]:
    """The chains to replay before a run's own, oldest first, each with the number of rounds that count.

    Empty for a run that starts from a checkpoint. `parents` is the folder of their ledgers.
    """
    found: list[tuple[Chain, int]] = []
    while lock.parent is not None:
        chain = _parent(lock, parents)
        found.append((chain, lock.parent.round))
        lock = chain.lock
    return found[::-1]


def file_of(run: str, parents: Path) -> Path:
    """Where the ledger of an ancestor lies; `run` is its id in hex."""
    return parents / f"{run}.ledger"


def _parent(lock: Lock, parents: Path) -> Chain:
    assert lock.parent is not None
    path = file_of(lock.parent.run, parents)
    if not path.is_file():
        raise NoParent(
            f"this run was forked from run {lock.parent.run[:16]}, whose ledger {path} is missing. "
            "Copy it there."
        )
    chain = ledger.read(path).chain  # what follows the fork may be damaged or still being written
    try:
        check_fork(lock, chain)
    except BrokenChain as error:
        raise NoParent(f"{path} is not the ledger this run was forked from: {error.reason}.") from error
    return chain
