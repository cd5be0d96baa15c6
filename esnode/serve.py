"""From a plan or a lock to a folder that a coordinator can serve, and the process that serves it.

A plan is resolved here, which needs the node extra; a lock with the task's data needs no torch. The folder is
one of `esnode run`, so either command continues what the other began. Called by `cli/coordinator.py`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from esnode import begin, children, folder, planfile, salvage
from esnode.begin import Request
from esnode.folder import RunFolder, write_file
from esnode.tell import Tell
from protocol import keys, ledger, plan, zmtp
from protocol.errors import UserError, cut
from protocol.lock import Lock
from protocol.logfile import why_not_bound
from protocol.plan import Ops, Plan

_RECOVERED = "recovered"  # folder of what was fetched from nodes
_NO_RUN = {".busy", _RECOVERED}  # what a start leaves that was killed before there was a run


class ServeError(UserError):
    """Plan, lock, data and folder do not fit together; the sentence says what to do."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the user asked for."""

    data: Path
    source: Path | None = None  # a plan or a lock; None: what the folder holds
    task_data: Path | None = None
    rounds: int | None = None
    code: Path | None = None
    allow: Sequence[str] = ()
    recover: Sequence[str] = ()  # ledgers, or nodes, of a run whose coordinator is lost
    survivor: Path | None = None  # the ledger that came of it, see `recover`


def take(order: Order) -> tuple[RunFolder, int]:
    """The folder, and the descriptor that keeps `esnode run` and other coordinators out of it."""
    place = RunFolder(order.data)
    if not place.is_run:
        if order.source is None and not order.recover:
            raise ServeError(
                f"{order.data} holds no run yet: name its plan, `esnode coordinator serve PLAN`."
            )
        names = {entry.name for entry in _entries(order.data)} if order.data.exists() else set()
        if order.recover and {entry.name for entry in place.coordinator.glob("*")} <= {"curve.key"}:
            names.discard(place.coordinator.name)  # the lost coordinator's key, so that its nodes come
        if names - _NO_RUN:
            raise ServeError(
                f"{order.data} exists and is no run folder. Choose a new or empty one with --data."
            )
        order.data.mkdir(parents=True, exist_ok=True)
    return place, folder.occupy(place, "--data")


def require_free(bind: str) -> None:
    """Refuse an address that another program listens on, before a model is read for minutes."""
    host, port = zmtp.host_and_port(bind)
    try:
        places = socket.getaddrinfo(None if host == "*" else host.strip("[]"), port, flags=socket.AI_PASSIVE)
        family, _, _, _, place = places[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as libzmq does
            probe.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # what else there is the coordinator finds out
            raise ServeError(why_not_bound(bind, error.errno)) from error


def recover(place: RunFolder, order: Order, tell: Tell) -> Order:
    """The order with the ledger file that a successor begins with; one that has begun fetches nothing."""
    if not order.recover:
        return order
    folder = place.path / _RECOVERED
    kept = folder / salvage.FILE
    if place.is_run and kept.exists() and (place.coordinator / "journal.sqlite").exists():
        return replace(order, survivor=kept)
    return replace(order, survivor=salvage.bring(order.recover, begin.signing_seed(), folder, tell))


def settle(place: RunFolder, order: Order, tell: Tell) -> Lock:
    """Bring the folder to the point where it can be served. ServeError when it is another plan's."""
    found = planfile.read(order.source) if order.source is not None else None
    if isinstance(found, Lock) and order.survivor is None:
        _from_lock(place, found, order)
    elif isinstance(found, Plan) and place.is_run and order.survivor is None:
        _same_plan(place, found, order)
    if order.survivor is not None:
        _from_ledger(place, order.survivor, found, order)
    fresh = not place.is_run
    source = order.source if fresh else None
    try:
        lock = begin.settle(place, Request(plan=source, rounds=order.rounds, code=order.code), tell)
    except Exception:
        if fresh:
            begin.discard(place)
        raise
    begin.admit(place, order.allow)
    return lock


def become(place: RunFolder, descriptor: int, words: Sequence[str]) -> NoReturn:
    """Let the coordinator take this process's place, the folder still taken by it.

    It is another package, which must run without this one.
    """
    os.set_inheritable(descriptor, True)
    command = [sys.executable, "-m", "coordinator.server", "--data", str(place.path), *words]
    sys.stdout.flush()
    os.execve(sys.executable, command, {**os.environ, **children.importable()})


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except NotADirectoryError:
        raise ServeError(f"{path} is a file. Choose a new or empty folder with --data.") from None


def _same_plan(place: RunFolder, given: Plan, order: Order) -> None:
    """Refuse another run's plan; take over `[ops]`, which may change at any time."""
    wanted = plan.parse(begin.draft(Request(plan=order.source)))
    held = planfile.read_plan(place.plan)
    for rule in fields(Plan):
        ours, theirs = getattr(held, rule.name), getattr(wanted, rule.name)
        if rule.name != "ops" and ours != theirs:
            raise ServeError(
                f"{place.path} holds the run of another plan: {rule.name} is {_shown(ours)} there and "
                f"{_shown(theirs)} in {order.source}. Give the new plan its own folder with --data."
            )
    if given.ops != held.ops:
        write_file(place.plan, plan.render(plan.changed(held, **_ops(given.ops))).encode())


def _from_lock(place: RunFolder, lock: Lock, order: Order) -> None:
    """Write the files of a lock's run, or refuse when the folder holds another."""
    if place.is_run:
        held = folder.lock_of(place).run_id if place.lock.exists() else b""
        if held != lock.run_id:
            raise ServeError(
                f"{place.path} holds run {held.hex()[:16] or 'without a lock'}, {order.source} is the lock "
                f"of run {lock.run_id.hex()[:16]}. Give it its own folder with --data."
            )
        return
    if order.rounds is None:
        raise ServeError(f"{order.source} is a lock, which does not say how long to train: add --rounds R.")
    if begin.own_key() not in lock.trusted:
        raise ServeError(
            f"{order.source} does not trust this user's signing key {begin.own_key()}, so no node would "
            "follow this coordinator. Write it into the plan's `trusted` and lock again, or put the key of "
            f"the user who made the lock into {keys.user_signing_file()}."
        )
    assert order.source is not None
    data = _task_data(lock, order, order.source)
    named = {rule.name: getattr(lock, rule.name) for rule in fields(Plan) if rule.name != "ops"}
    write_file(place.task, data)
    write_file(place.lock, lock.to_bytes())
    write_file(place.plan, plan.render(Plan(**named, ops=Ops(rounds=order.rounds))).encode())


def _from_ledger(place: RunFolder, path: Path, given: Plan | Lock | None, order: Order) -> None:
    """The files of a lost coordinator's run, from its ledger; a folder that has them keeps them."""
    reading = ledger.read(path)
    if not reading.chain.height:
        raise ServeError(f"nothing can be recovered from {path}: it is {reading}.")
    lock, trusted = reading.chain.lock, [key.hex() for key in reading.chain.trusted]
    if begin.own_key() not in trusted:
        raise ServeError(
            f"{path} does not trust this user's signing key {begin.own_key()}, so no node would follow this "
            f"successor. Put a key that it trusts into {keys.user_signing_file()}."
        )
    if place.is_run:
        if place.lock.exists() and folder.lock_of(place).run_id != lock.run_id:
            raise ServeError(f"{place.path} holds another run than {path}. Choose another with --data.")
        return
    rounds = order.rounds or (given.ops.rounds if isinstance(given, Plan) else None)
    if rounds is None:
        raise ServeError(f"{path} does not say how long to train: add --rounds R, or name the plan.")
    named = {rule.name: getattr(lock, rule.name) for rule in fields(Plan) if rule.name != "ops"}
    ops = plan.changed(given, rounds=rounds).ops if isinstance(given, Plan) else Ops(rounds=rounds)
    write_file(place.task, _task_data(lock, order, path))
    write_file(place.lock, lock.to_bytes())
    write_file(place.plan, plan.render(Plan(**named, ops=ops)).encode())


def _task_data(lock: Lock, order: Order, source: Path) -> bytes:
    """The task's data, from --task-data or beside `source`; it must be what the lock was made with."""
    path = order.task_data or source.with_name("task.jsonl")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ServeError(
            f"cannot read the task's data {path} ({error.strerror}): name the file that `esnode plan lock "
            "--data` wrote, with --task-data."
        ) from error
    if hashlib.sha256(data).hexdigest() != lock.data:
        raise ServeError(f"{path} is not the data that {source} was made with (its SHA-256 differs).")
    return data


def _ops(ops: Ops) -> dict[str, object]:
    return {rule.name: getattr(ops, rule.name) for rule in fields(Ops)}


def _shown(value: object) -> str:
    return cut(str(value[0] if isinstance(value, tuple) and len(value) == 1 else value))
