"""Everything before the first round: plan from words and flags, its lock, keys, the folder's first files.

Each step leaves a folder that `esnode run --resume` can continue: the plan is written first, the lock last,
and a folder without a lock is locked again from its plan. Called by `run.py` and `fork.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from esnode import models, planfile
from esnode.folder import FolderError, RunFolder, lock_of, without_plan, write_file
from esnode.tell import Tell
from esnode.template import template
from protocol import keys, ledger, plan
from protocol.entries import public_key
from protocol.errors import UserError
from protocol.lock import Lock
from protocol.plan import Plan

DEMO_MODEL = "demo"
DEMO_TASK = "short-answers"


class RequestError(UserError):
    """Flags that contradict each other or the folder."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for. None means: the plan's or the default."""

    out: Path | None = None
    resume: bool = False
    plan: Path | None = None
    task: str | None = None
    model: str | None = None
    rounds: int | None = None
    seed: int | None = None
    nodes: int = 2
    threads: int = 1
    code: Path | None = None  # the folder that `python:` tasks may be loaded from
    lanes: tuple[tuple[str, ...], ...] = ()  # those of each node; empty: an engine in each node's process
    node_words: tuple[str, ...] = ()  # further arguments of every node process
    typed: tuple[str, ...] = ()  # the options about engines, to be typed again


def draft(request: Request) -> str:
    """The text of plan.toml: the file as it is, or a template, with the flags written into it."""
    if request.plan is None:
        text = template(request.task or DEMO_TASK, request.model or DEMO_MODEL)
    else:
        planfile.read_plan(request.plan)  # refuses what is no plan, in words
        text = request.plan.read_text(encoding="utf-8")
    written = plan.parse(text)
    wanted = _with_flags(written, request)
    return text if wanted == written else plan.render(wanted)


def _with_flags(written: Plan, request: Request) -> Plan:
    model = models.settled(request.model or written.model)  # a later --resume may run in another directory
    rounds = written.ops.rounds if request.rounds is None else request.rounds
    seed = written.seed if request.seed is None else request.seed
    return plan.changed(written, model=model, task=request.task or written.task, rounds=rounds, seed=seed)


def signing_seed() -> bytes:
    """This user's own signing key, made at first use: the same plan of the same user is the same run."""
    return keys.new_signing_file(keys.user_signing_file())


def own_key() -> str:
    """The public half of `signing_seed`, as a plan's `trusted` names it (hex)."""
    return public_key(signing_seed()).hex()


def settle(folder: RunFolder, request: Request, tell: Tell) -> Lock:
    """Bring the folder to the point where processes can start, and return its lock."""
    if not folder.is_run:
        if folder.lock.exists() and request.plan is None:
            raise FolderError(without_plan(folder))
        write_file(folder.plan, draft(request).encode())
    else:
        _adjust(folder, request)
    lock = _kept(folder) or _lock(folder, request.code, tell)
    folder.coordinator.mkdir(exist_ok=True)
    keys.write_signing(folder.coordinator / "signing.key", signing_seed())
    return lock


def require_resumable(request: Request) -> None:
    """Refuse flags that a run which exists cannot follow any more; --rounds may change while it lasts."""
    for flag, value in (
        ("--plan", request.plan),
        ("--task", request.task),
        ("--model", request.model),
        ("--seed", request.seed),
    ):
        if value is not None:
            raise RequestError(
                f"{flag} cannot change a run that exists, it is locked to its plan. "
                "Start another run, or fork this one (`esnode fork --help`)."
            )


def _adjust(folder: RunFolder, request: Request) -> None:
    """Write changed operating settings into the plan."""
    if request.rounds is None:
        return
    written = planfile.read_plan(folder.plan)
    if written.ops.rounds != request.rounds:
        write_file(folder.plan, plan.render(plan.changed(written, rounds=request.rounds)).encode())


def _kept(folder: RunFolder) -> Lock | None:
    """The lock of a run that has one: lock.json or, should that be lost, the ledger's first entry."""
    if folder.lock.exists():
        return lock_of(folder)
    if not folder.ledger.exists():
        return None
    chain = ledger.read(folder.ledger).chain
    if not chain.height:
        return None
    write_file(folder.lock, chain.lock.to_bytes())
    return chain.lock


def _lock(folder: RunFolder, code: Path | None, tell: Tell) -> Lock:
    from esnode import locking

    parsed = planfile.read_plan(folder.plan)
    lock, data, _model = locking.resolve(parsed, trusted=[own_key()], progress=tell, code=code)
    write_file(folder.task, data)
    write_file(folder.lock, lock.to_bytes())
    return lock


def discard(folder: RunFolder) -> None:
    """Take back the first files of a run that could not be locked, and the folder if that leaves it empty."""
    if folder.lock.exists():
        return
    for path in (folder.plan, folder.task, folder.busy):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds something of the user's
        folder.path.rmdir()


def admit(folder: RunFolder, names: Sequence[str]) -> None:
    """Make each node's key and write the list of those the coordinator lets in. Names once admitted stay."""
    roster_file = folder.coordinator / "roster.json"
    roster = keys.read_roster(roster_file)
    for name in names:
        secret = keys.new_curve_file(folder.node(name) / "curve.key")
        roster.setdefault(keys.curve_public(secret), name)
    keys.write_roster(roster_file, roster)
