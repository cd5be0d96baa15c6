"""Reading a user's JSONL file into two splits. Lives here: the reader and the split rule. Standard library
only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esnode.tasks.interface import ChatMessage, Splits, TaskError

Record = dict[str, Any]
HELDOUT_NAMES = ("heldout", "test", "validation", "eval")


def read(path: Path) -> list[Record]:
    """The JSON objects of a file, one per line, blank lines skipped. TaskError names file and line."""
    if path.exists() and not path.is_file():  # a device or a pipe has no end, a folder no lines
        raise TaskError(f"{path} is no regular file: name a JSONL file")
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TaskError(f"there is no file {path}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is no JSONL file in UTF-8 ({error})") from error
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TaskError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise TaskError(
                f"{path}, line {number}: expected an object with fields, got {type(record).__name__}"
            )
        records.append({**record, "line": number})
    if not records:
        raise TaskError(f"{path} is empty: a task needs at least one train and one held-out line")
    return records


def require(record: Record, path: Path, *fields: str) -> None:
    """Raise TaskError unless one of these fields is there."""
    if not any(field in record for field in fields):
        have = ", ".join(key for key in record if key != "line") or "nothing"
        raise TaskError(f"{path}, line {record['line']}: needs a field {' or '.join(fields)}, it has {have}")


def prompt_of(record: Record, path: Path) -> Record:
    """The fields that start an episode: `messages`, or `prompt` and perhaps `system`."""
    require(record, path, "prompt", "messages")
    if "messages" in record:
        return {"messages": chat(record["messages"], f"{path}, line {record['line']}")}
    return {key: str(record[key]) for key in ("system", "prompt") if key in record}


def chat(messages: Any, where: str) -> list[ChatMessage]:
    """The messages of an item as texts. TaskError, which begins with `where`, when they are no chat."""
    if (
        not isinstance(messages, list | tuple)
        or not messages
        or not all(
            isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages
        )
    ):
        raise TaskError(f"{where}: messages must be a list of objects with role and content")
    return [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]


def split(records: Sequence[Record], items: Sequence[Record], share: float, path: Path) -> Splits:
    """Train and held-out items, by the records' `split` field when they have one, else by a hash of the
    prompt.

    The hash makes the choice independent of the file's order and keeps equal prompts in one split; `share` is
    the held-out part of the different prompts, at least one.
    """
    if any("split" in record for record in records):
        marks = [_mark(record, path) for record in records]
    else:
        if not 0 < share < 1:
            raise TaskError(
                f"{path}: heldout = {share}, choose a share between 0 and 1, or give lines a split field"
            )
        keys = [_key(item) for item in items]
        order = sorted(set(keys))
        chosen = set(order[: max(1, round(len(order) * share))])
        marks = ["heldout" if key in chosen else "train" for key in keys]
    train = [item for item, mark in zip(items, marks, strict=True) if mark == "train"]
    return train, [item for item, mark in zip(items, marks, strict=True) if mark == "heldout"]


def _mark(record: Record, path: Path) -> str:
    mark = record.get("split")
    if mark != "train" and mark not in HELDOUT_NAMES:
        raise TaskError(f"{path}, line {record['line']}: split is {mark!r}, expected 'train' or 'heldout'")
    return "train" if mark == "train" else "heldout"


def _key(item: Record) -> str:
    start = json.dumps([item.get("messages"), item.get("system"), item.get("prompt")], ensure_ascii=False)
    return hashlib.sha256(start.encode()).hexdigest()
