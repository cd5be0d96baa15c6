"""Every task by name. Lives here: the registry, and how a task becomes data when a plan is locked and a task
again.

A spec is a name from the table below, followed by `:argument` for those that take one (`gym:chain_sum`,
`file:questions.jsonl`). To add a task, write a module with a `Task` subclass and name it in `BUILTIN`.
Standard library only; a task's module is imported when it is asked for. Called by `locking.py`,
`scoring_worker.py` and the daemon.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esnode.tasks.interface import ChatMessage, Item, Score, Task, TaskError

__all__ = [
    "ChatMessage",
    "Item",
    "Score",
    "Task",
    "TaskError",
    "materialise",
    "names",
    "open_task",
    "scorer_digest",
]

BUILTIN: dict[str, tuple[str, str]] = {
    "short-answers": ("short_answers", "ShortAnswers"),
    "conciseness": ("conciseness", "Conciseness"),
    "countdown": ("countdown", "Countdown"),
    "arithmetic": ("arithmetic", "Arithmetic"),
    "gym": ("gym", "Gym"),
    "file": ("file", "FileTask"),
    "likelihood": ("likelihood", "Likelihood"),
    "python": ("python", "PythonTask"),
}
ARGUMENTS = {"gym": "NAME", "file": "PATH.jsonl", "likelihood": "PATH.jsonl", "python": "FILE.py"}
COMMON_OPTIONS: dict[str, Any] = {"time_limit": 5.0}  # seconds of scoring per answer
_SHARED = ("answers.py", "interface.py")  # sources that every score depends on


def names() -> list[str]:
    """Every spec a plan may hold, with its argument's name: "countdown", "gym:NAME", ..."""
    return [f"{name}:{ARGUMENTS[name]}" if name in ARGUMENTS else name for name in BUILTIN]


def find(spec: str) -> tuple[type[Task], str]:
    """The class behind a spec and the spec's argument ("" for none). Raises TaskError for an unknown spec."""
    name, colon, argument = spec.partition(":")
    if name not in BUILTIN:
        close = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.75)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise TaskError(f"there is no task {spec!r}: {hint}choose one of {', '.join(names())}")
    if bool(argument) != (name in ARGUMENTS) or (colon and not argument):
        form = f"{name}:{ARGUMENTS[name]}" if name in ARGUMENTS else name
        raise TaskError(
            f"task {spec!r} {'takes no argument' if argument else 'is incomplete'}: write {form!r}"
        )
    module, attribute = BUILTIN[name]
    return getattr(importlib.import_module(f"esnode.tasks.{module}"), attribute), argument


def resolve_options(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the task, the given ones checked against the names and types of the defaults."""
    task, _ = find(spec)
    resolved = {**COMMON_OPTIONS, **task.defaults}
    for key, given in options.items():
        if key not in resolved:
            raise TaskError(f"task {spec!r} has no option {key!r}: it knows {', '.join(sorted(resolved))}")
        default = resolved[key]
        value = float(given) if type(default) is float and type(given) is int else given
        if type(value) is not type(default):
            kind = type(default).__name__
            raise TaskError(f"task {spec!r}: option {key!r} is {value!r}, expected {kind} like {default!r}")
        resolved[key] = value
    if not 0 < resolved["time_limit"] <= 3600:
        raise TaskError(f"task {spec!r}: time_limit is {resolved['time_limit']}, choose 0.1 to 3600 seconds")
    return resolved


def materialise(spec: str, options: Mapping[str, Any], *, code: Path | None = None) -> bytes:
    """The task as data: canonical JSONL, a header line with spec and settled options, then one line per item.

    The same spec, options and sources give the same bytes, whose SHA-256 the lock pins. `code` is the folder
    that `python:` tasks are loaded from. Raises TaskError, also when a split is empty.
    """
    task, argument = find(spec)
    argument = task.locate(argument, code)
    settled = task.settle(argument, resolve_options(spec, options))
    splits = dict(zip(("train", "heldout"), task.items(argument, settled), strict=True))
    lines: list[Mapping[str, Any]] = [{"task": spec, "options": settled}]
    for split, items in splits.items():
        if not items:
            raise TaskError(
                f"task {spec!r} has no {split} items, so nothing could be trained or measured on it"
            )
        lines += [{**item, "split": split} for item in items]
    return b"".join(_line(line, spec) for line in lines)


def _line(value: Mapping[str, Any], spec: str) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {spec!r}: an item or option is not plain JSON ({error})") from error


def header(data: bytes) -> tuple[str, dict[str, Any]]:
    """The spec and the settled options a data blob was made with."""
    try:
        first = json.loads(data[: data.index(b"\n")])
        return str(first["task"]), dict(first["options"])
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"the task data is damaged: its first line is no header ({error})") from error


def open_task(spec: str, options: Mapping[str, Any], data: bytes, *, code: Path | None = None) -> Task:
    """The task of a data blob made by `materialise` with this spec and these settled options.

    Imports nothing that scoring needs (see `Task.warm_up`). Raises TaskError when blob and arguments do not
    belong together, or when the code of a `python:` task is missing or is not the one that was pinned.
    """
    task, argument = find(spec)
    if header(data) != (spec, dict(options)):
        raise TaskError(f"the task data was not made for task {spec!r} with these options")
    splits: dict[str, list[Item]] = {"train": [], "heldout": []}
    for number, line in enumerate(data.splitlines()[1:], start=2):
        try:
            item = json.loads(line)
            splits[item.pop("split")].append(item)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TaskError(f"the task data is damaged in line {number} ({error})") from error
    return task(splits["train"], splits["heldout"], options, task.locate(argument, code))


def scorer_digest(spec: str, code: Path | None = None) -> str:
    """Hex SHA-256 over the sources that decide a score: the task's module, what all tasks share, the user's
    file.
    """
    task, argument = find(spec)
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in [*(here / name for name in _SHARED), *task.sources(task.locate(argument, code))]:
        content = source.read_bytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
