"""Where a run's weights start: the base checkpoint, or for a fork a round of its parent, rebuilt once.

A parent's state is kept in the cache as a model folder in float32, so nothing is lost, and named by its
digest; it can be deleted at any time. Called by `rebuild.py`, `fork.py`, `workshop.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from esnode import export, models, rebuild
from esnode.rebuild import Ledger, Rebuilt, Tell, silent
from protocol.errors import UserError
from protocol.ledger import BrokenChain, check_fork
from protocol.lock import Lock, Parent


class NoParent(UserError):
    """The ledger of a fork's parent is missing or is not the one the lock names."""


def starting_folder(lock: Lock, base: Path, parents: Path, tell: Tell = silent) -> Path:
    """The model folder whose weights are those the run starts from.

    `base` is the folder of the lock's base model; `parents` holds the ledgers of a fork's ancestors as
    RUNID.ledger. Raises NoParent, and what rebuilding raises.
    """
    return (
        base if lock.parent is None else state_folder(parent_ledger(lock, parents), lock.parent, base, tell)
    )


def parent_ledger(lock: Lock, parents: Path) -> Ledger:
    """The ledger that the lock of a fork names, checked against it."""
    assert lock.parent is not None
    path = parents / f"{lock.parent.run}.ledger"
    if not path.is_file():
        raise NoParent(
            f"this run was forked from run {lock.parent.run[:16]}, whose ledger {path} "
            "is missing. Copy it there."
        )
    ledger = rebuild.open_ledger(path)
    try:
        check_fork(lock, ledger.chain)
    except BrokenChain as error:
        raise NoParent(f"{path} is not the ledger this run was forked from: {error.reason}.") from error
    return ledger


def state_folder(ledger: Ledger, state: Parent, base: Path, tell: Tell = silent) -> Path:
    """The weights of one round of a ledger as a float32 model folder in the cache, made if missing."""
    target = _place(ledger.lock, state.round, state.digest)
    if target.is_dir():
        return target
    with _turn(target):  # the nodes of a run start together: one rebuilds, the others wait
        if not target.is_dir():
            rebuilt = rebuild.at(ledger, state.round, str(base), tell=tell)
            if rebuilt.digest != state.digest:
                raise rebuild.WrongWeights(
                    f"round {state.round} of {ledger.path} has digest {rebuilt.digest:016x}, the fork "
                    f"starts from {state.digest:016x}."
                )
            _write(rebuilt, target)
    return target


def keep(rebuilt: Rebuilt) -> Path:
    """Put rebuilt weights where `state_folder` will look for them."""
    target = _place(rebuilt.lock, rebuilt.round, rebuilt.digest)
    with _turn(target):
        if not target.is_dir():
            _write(rebuilt, target)
    return target


def _place(lock: Lock, round: int, digest: int) -> Path:
    return models.cache().parent / "states" / f"{lock.run_id.hex()[:16]}-{round}-{digest:016x}"


@contextmanager
def _turn(target: Path) -> Iterator[None]:
    """One process at a time makes a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(rebuilt: Rebuilt, target: Path) -> None:
    draft = target.with_name(target.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    export.write(rebuilt.engine, replace(rebuilt.lock, live_dtype="float32"), rebuilt.model.path, draft)
    os.rename(draft, target)
