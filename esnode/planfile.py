"""Plan and lock files as `esnode plan` uses them: read either, describe either, resolve a plan.

Needs no torch until a plan is resolved. Called by `cli/plan.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esnode import tasks
from protocol.counting import rounds
from protocol.errors import UserError
from protocol.lock import Lock, Parent, lock_from_bytes, resolve_slice
from protocol.plan import Plan, parse, render_value
from protocol.plan_fields import FIELDS, OPTIONS

if TYPE_CHECKING:
    from esnode.tell import Tell

QUARTER = "a quarter of the round"
_LONGEST = 8 * 1024 * 1024


class PlanFileError(UserError):
    """A file that cannot be read as a plan or a lock, or must not be overwritten."""


def read(path: Path) -> Plan | Lock:
    """A plan (TOML) or a lock (JSON), told apart by its first character."""
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)  # also of what has no end
    except IsADirectoryError as error:
        raise PlanFileError(f"{path} is a folder: name its plan.toml or its lock.json.") from error
    except OSError as error:
        raise PlanFileError(f"cannot read {path}: {error.strerror}.") from error
    if len(data) > _LONGEST:
        raise PlanFileError(f"{path} is neither a plan nor a lock: it is longer than {_LONGEST} bytes.")
    if data.lstrip()[:1] == b"{":
        return lock_from_bytes(data)
    return parse(_text(path, data))


def read_plan(path: Path) -> Plan:
    """A plan; PlanFileError when the file is already a lock."""
    found = read(path)
    if isinstance(found, Lock):
        raise PlanFileError(
            f"{path} is a lock already: it needs no resolving, its run id is {found.run_id.hex()}."
        )
    return found


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanFileError(
            f"{path} is neither a plan nor a lock: byte {error.start} is not UTF-8."
        ) from error


def as_json(found: Plan | Lock) -> str:
    """One JSON object: a lock's canonical text, or a plan's fields."""
    return (
        found.to_bytes().decode("utf-8") if isinstance(found, Lock) else json.dumps(asdict(found), indent=2)
    )


def describe(found: Plan | Lock) -> str:
    """Aligned `field  value` lines for a person; sigma is shown as the bf16 number that is really used."""
    rows = _lock_rows(found) if isinstance(found, Lock) else _plan_rows(found)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _shown(key: str, value: Any) -> str:
    if key in ("sigma", "alpha"):
        numbers = ", ".join(f"{number:.10g}" for number in value[:6]) + (", ..." if len(value) > 6 else "")
        return numbers + (" (rounded to bf16)" if key == "sigma" else "")
    return render_value(value) if isinstance(value, bool | int | float) else _words(value)


def _parent(parent: Parent | None) -> str:
    return f"run {parent.run[:16]} after {rounds(parent.round)}" if parent else "none"


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    return str(value)


def _plan_rows(plan: Plan) -> list[tuple[str, str]]:
    options = tasks.resolve_options(plan.task, plan.task_options)
    left = {
        "per_round": "all of the task's",
        "chunk": f"{resolve_slice(plan.per_round, 0, plan.per_round)[1]}" if plan.per_round else QUARTER,
        "max_new_tokens": "the task's own limit",
    }
    rows = []
    for row in FIELDS:
        value = getattr(plan.ops if row.table == "ops" else plan, row.key)
        open_ = value == 0 and row.key in left
        rows.append((row.path, left[row.key] if open_ else _shown(row.key, value)))
    rows += [(f"{OPTIONS}.{key}", render_value(value)) for key, value in options.items()]
    return sorted(rows, key=lambda row: row[0].startswith("ops."))


_SUMMED_UP = ("manifest", "parent", "digest", "stop_ids")


def _lock_rows(lock: Lock) -> list[tuple[str, str]]:
    trained = [tensor for tensor in lock.manifest if tensor.trained]
    count = sum(math.prod(tensor.shape) for tensor in trained)
    total = sum(math.prod(tensor.shape) for tensor in lock.manifest)
    rows = [
        ("run id", lock.run_id.hex()),
        ("tensors", f"{len(trained)} of {len(lock.manifest)} trained, {count:,} of {total:,} weights"),
        ("start digest", f"{lock.digest:016x}"),
        ("parent", _parent(lock.parent)),
        ("stop ids", _words(lock.stop_ids)),
    ]
    names = [name for name in lock.__dataclass_fields__ if name not in _SUMMED_UP]
    return [*rows, *((name, _shown(name, getattr(lock, name))) for name in names)]


def resolve(path: Path, out: Path, data_out: Path | None, tell: Tell, *, code: Path | None = None) -> Lock:
    """Resolve a plan with this user's signing key, as `esnode run` does; write the lock and the task's data.

    A file that is already there is only replaced by the same bytes.
    """
    from esnode import locking
    from esnode.begin import own_key

    plan = read_plan(path)
    lock, data, _ = locking.resolve(plan, trusted=[own_key()], progress=tell, code=code)
    _write(out, lock_from_bytes(lock.to_bytes()).to_bytes())  # what cannot be read back is never written
    if data_out is not None:
        _write(data_out, data)
    return lock


def _write(path: Path, data: bytes) -> None:
    if path.exists() and path.read_bytes() != data:
        raise PlanFileError(
            f"{path} is there already and says something else: choose another name or move it away."
        )
    path.write_bytes(data)
