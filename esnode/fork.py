"""`esnode fork`: a run folder that starts from a round of another run. Called by `cli/ledger.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

from esnode import ancestry, begin, folder, models, planfile, rebuild
from esnode.folder import RunFolder, write_file
from esnode.rebuild import Ledger
from esnode.tell import Tell, silent
from protocol import plan
from protocol.lock import Parent


def fork(
    source: str | Path,
    round: int | None,
    plan_path: Path,
    out: Path | None = None,
    base: str | None = None,
    *,
    code: Path | None = None,
    tell: Tell = silent,
) -> RunFolder:
    """Prepare a folder whose lock names round `round` (None: the last) of `source` as its start.

    The plan says everything but the model, which is the parent's. `esnode run --resume` runs the folder.
    Raises what opening and rebuilding the parent, reading the plan and creating the folder raise.
    """
    from esnode import locking

    parent = rebuild.open_ledger(source)
    wanted = planfile.read_plan(plan_path)
    rebuilt = rebuild.at(parent, round, base, runnable=False, tell=tell)
    wanted = plan.changed(wanted, model=models.settled(base) if base else parent.lock.model)
    done = rebuilt.round
    state = Parent(parent.lock.run_id.hex(), done, _closing_hash(parent, done), rebuilt.digest)
    del rebuilt  # the weights: hashing wants room too
    lock, data, _ = locking.resolve(wanted, trusted=[begin.own_key()], parent=state, progress=tell, code=code)
    place = folder.create(out or _default(parent, done))
    _copy_ledgers(parent, place)
    write_file(place.task, data)
    write_file(place.lock, lock.to_bytes())
    # Last: with a plan and no lock the folder would be locked again, as a run without a parent.
    write_file(place.plan, plan.render(wanted).encode())
    return place


def _closing_hash(ledger: Ledger, round: int) -> str:
    entry = ledger.chain.commits[round - 1] if round else ledger.chain.entries[0]
    return entry.hash.hex()


def _default(parent: Ledger, round: int) -> Path:
    name = parent.path.parent.name if parent.path.name == "run.ledger" else parent.path.stem
    return Path("runs") / f"{name}-fork-{round}"


def _copy_ledgers(parent: Ledger, place: RunFolder) -> None:
    """The parent's ledger and those of its own ancestors: the fork can be rebuilt without their folders."""
    place.parents.mkdir(exist_ok=True)
    for ancestor in sorted(parent.parents.glob("*.ledger")):
        shutil.copyfile(ancestor, place.parents / ancestor.name)
    shutil.copyfile(parent.path, ancestry.file_of(parent.lock.run_id.hex(), place.parents))
