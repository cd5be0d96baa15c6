"""The plan: the TOML file a user writes. `[run]` becomes the lock, `[ops]` is read by the coordinator only.

Pure. `parse` validates every field, `render` writes a plan back, `changed` overrides single values under the
same rules. `esnode.template` writes commented ones; docs/plan.md describes every field.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from protocol.errors import UserError, cut
from protocol.fields import TABLE
from protocol.plan_fields import ALPHAS, FIELDS, MEMBERS, OPTIONS, SCHEDULES, TABLES, PlanField
from protocol.shaping import MAX_MEMBERS


class PlanError(UserError):
    """A plan that cannot run: one line naming the field, its value and what to write instead."""


@dataclass(frozen=True, slots=True)
class Ops:
    """How the run is operated. May change while it runs; no replica's arithmetic depends on it."""

    rounds: int
    quorum: float = 1.0  # share of members that closes a round
    eval_every: int = 5  # rounds between held-out probes; 0 = none at all
    snapshot_every: int = 10  # rounds between the snapshots that nodes write; 0 = none
    max_share: float = 1.0  # the largest part of a round one node evaluates when three or more are ready
    stall_seconds: float = 30.0  # a unit without progress for this long is given to another node
    audit_share: float = 0.02  # share of units, chosen secretly, that a second node measures as well


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A parsed plan. Fields are those of docs/plan.md; names are the lock's wherever both have them."""

    model: str
    task: str
    ops: Ops
    live_dtype: str = "bfloat16"
    master: str = "float32"
    repeatable: bool = False
    trusted: tuple[str, ...] = ()
    date: str = "2026-01-01"
    seed: int = 0  # u64; acts through the run id
    members: int
    mirrored: bool = False
    sigma: tuple[float, ...]  # bf16 values
    alpha: tuple[float, ...] = (0.0,)
    shaping: str = "zscore"
    clip: float = 0.0
    std_floor: float = 0.0
    update: bool = True
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    per_round: int = 0
    chunk: int = 0
    max_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    task_options: dict[str, Any] = field(default_factory=dict)


def parse(toml_text: str) -> Plan:
    """The plan in a TOML text. PlanError, one line, for whatever cannot run."""
    try:
        tables = tomllib.loads(toml_text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"the plan is not valid TOML: {error}") from error
    except RecursionError as error:
        raise PlanError(
            "the plan is nested too deeply to be read; tables of tables are not needed"
        ) from error
    return _build(tables)


_PATHS = {row.path: row for row in FIELDS} | {OPTIONS: None}


def _build(tables: Mapping[str, Any]) -> Plan:
    """Validate nested tables, as TOML gives them, into a plan."""
    values: dict[str, Any] = {}
    ops: dict[str, Any] = {}
    found = _flatten(tables)
    for path in found:
        if path not in _PATHS:
            raise _unknown(path)
    for row in FIELDS:
        if row.path in found:
            target = ops if row.table == "ops" else values
            target[row.key] = _read(row, found[row.path])
        elif row.required:
            raise PlanError(
                f"{row.path} is missing: write {row.key} = ... in [{row.table}], {row.rule.expects}"
            )
    options = found.get(OPTIONS, {})
    try:
        values["task_options"] = TABLE.read(options)
    except ValueError as error:
        raise PlanError(f"{OPTIONS}: {str(error) or 'must be ' + TABLE.expects}") from error
    plan = Plan(**values, ops=Ops(**ops))
    _check(plan)
    return plan


def _flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """{"run.es.sigma": value, ...}; the options table stays one value."""
    found: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [("", tables)]
    while pending:
        path, value = pending.pop()
        if path == OPTIONS or (path and path not in TABLES):
            found[path] = value
        elif not isinstance(value, Mapping):
            raise PlanError(
                f"{path} = {_shown(value)}: must be a table, written [{path}] on a line of its own"
            )
        else:
            for key in reversed(value):
                name = key if "." not in key else f'"{key}"'  # a quoted dot must not pass for a table
                pending.append((f"{path}.{name}" if path else name, value[key]))
    return found


def _read(row: PlanField, value: Any) -> Any:
    try:
        return row.rule.read(value)
    except ValueError as error:
        reason = str(error) or _remedy(row, value)
        raise PlanError(f"{row.path} = {_shown(value)}: {reason}") from error


def _remedy(row: PlanField, value: Any) -> str:
    if row.rule is MEMBERS and value == 1 and value is not True:
        return f"one member has nothing to be compared with: write 2 to {MAX_MEMBERS}"
    if row.rule is ALPHAS and isinstance(value, int | float) and value < 0:
        return "must be above 0: to walk down a reward negate the reward, to stand still write update = false"
    if row.path == "run.task" and isinstance(value, Mapping):
        return f'must be a name like task = "short-answers"; the task\'s own options go into [{OPTIONS}]'
    return f"must be {row.rule.expects}"


def _unknown(path: str) -> PlanError:
    """Name the nearest known key, or the table where the same key belongs."""
    table, _, key = path.rpartition(".")
    elsewhere = [row.table for row in FIELDS if row.key == key]
    if elsewhere:
        where = f"[{table}]" if table else "the file's top"
        return PlanError(f"{path} is not a field of {where}: {key} belongs in [{elsewhere[0]}]")
    inside = {row.key: row.key for row in FIELDS if row.table == table}
    inside |= {name.rpartition(".")[2]: f"[{name}]" for name in TABLES if name.rpartition(".")[0] == table}
    near = difflib.get_close_matches(key, inside, 1)
    return PlanError(
        f"{path} is an unknown field: {f'did you mean {inside[near[0]]}?' if near else 'remove it'}"
    )


def _shown(value: Any) -> str:
    """A value in an error line, cut to a readable length."""
    try:
        shown = render_value(value)
    except (TypeError, ValueError):
        shown = str(value)
    return cut(shown.replace("\n", " "))


def _check(plan: Plan) -> None:
    """What fields must hold between each other."""
    if plan.mirrored and plan.members % 2:
        raise PlanError(
            f"run.es.members = {plan.members}: mirrored members come in pairs; write {plan.members - 1} or "
            f"{plan.members + 1}, or mirrored = false"
        )
    if plan.update and min(plan.alpha) <= 0:
        written = plan.alpha[0] if len(plan.alpha) == 1 else plan.alpha
        raise PlanError(
            f"run.es.alpha = {_shown(written)}: must be above 0; "
            "to measure without moving the weights write update = false"
        )
    if plan.per_round and plan.chunk > plan.per_round:
        raise PlanError(
            f"run.prompts.chunk = {plan.chunk}: a round has {plan.per_round} prompts; write 0 for a quarter"
        )


def default_of(row: PlanField) -> Any:
    """What a field is when the file leaves it out; dataclasses.MISSING for a required one."""
    owner: type[Any] = Ops if row.table == "ops" else Plan
    value = next(f for f in fields(owner) if f.name == row.key).default
    return value[0] if row.rule in SCHEDULES and isinstance(value, tuple) else value


def changed(plan: Plan, **values: Any) -> Plan:
    """The plan with fields replaced (those of `[ops]` by their own names), under the same rules as a file."""
    ops = {key: values.pop(key) for key in [f.name for f in fields(Ops)] if key in values}
    known = {f.name for f in fields(Plan)} - {"ops"}
    if not values.keys() <= known:
        raise TypeError(f"no plan fields: {sorted(values.keys() - known)}")
    return _build(_tables(replace(plan, **values, ops=replace(plan.ops, **ops))))


# ---------------------------------------------------------------- writing


def _tables(plan: Plan) -> dict[str, Any]:
    """Nested tables with every field, the inverse of `_build`."""
    run: dict[str, Any] = {}
    ops: dict[str, Any] = {}
    for row in FIELDS:
        target = ops if row.table == "ops" else run
        if row.table not in ("run", "ops"):
            target = run.setdefault(row.table.partition(".")[2], {})
        target[row.key] = getattr(plan.ops if row.table == "ops" else plan, row.key)
    run[OPTIONS.partition(".")[2]] = plan.task_options
    return {"run": run, "ops": ops}


def render(plan: Plan) -> str:
    """Canonical TOML: every field, in the order of docs/plan.md. parse(render(plan)) == plan."""
    lines: list[str] = []
    table = ""
    for row in FIELDS:
        if row.table == "ops" != table and plan.task_options:
            lines += ["", f"[{OPTIONS}]"]
            lines += [f"{_key(key)} = {render_value(value)}" for key, value in plan.task_options.items()]
        if row.table != table:
            table = row.table
            lines += ["", f"[{table}]"]
        value = getattr(plan.ops if table == "ops" else plan, row.key)
        if row.rule in SCHEDULES and len(value) == 1:
            value = value[0]
        lines.append(f"{row.key} = {render_value(value)}")
    return "\n".join(lines[1:]) + "\n"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else render_value(key)


def render_value(value: Any) -> str:
    """A value as TOML writes it. TypeError for what TOML has no word for."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # TOML's basic strings are JSON's, but for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {render_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(render_value(item) for item in value) + "]"
    raise TypeError(f"TOML has no word for {value!r}")
