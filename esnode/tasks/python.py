"""python:<file.py>: a task in the user's own file.

The file defines `items()`, returning `(train, heldout)` lists of JSON objects, and `score(item, text)`,
returning a number, a `(number, correct)` pair or a `Score`. An item holds `prompt` (or `messages`) unless the
file defines `start(item)`. Optional: `reply(item, messages, text)` for several turns, and the constants LOW,
HIGH (0 and 1), MAX_NEW_TOKENS (64), MAX_TURNS (8; 1 without `reply`); what the file does not declare, the
options `low`, `high`, `max_new_tokens` and `max_turns` may.

Code is loaded only from the folder that the operator of this machine names, never from the network, and only
if its SHA-256 is the one that plan and lock pin. Scoring runs in the scoring process.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from esnode.tasks import records
from esnode.tasks.interface import ChatMessage, Item, Score, Splits, Task, TaskError

FOLDER_VARIABLE = "ESNODE_TASK_DIR"


class PythonTask(Task):
    """The argument, once located, is the path of the user's file."""

    name = "python"
    own_code = True
    # `code` pins the file's SHA-256; the rest holds where the file does not declare the constant.
    defaults: Mapping[str, Any] = {"code": "", "low": 0.0, "high": 1.0, "max_new_tokens": 64, "max_turns": 8}

    def __init__(
        self,
        train: Sequence[Item],
        heldout: Sequence[Item],
        options: Mapping[str, Any] | None = None,
        argument: str = "",
    ) -> None:
        super().__init__(train, heldout, options, argument)
        self.low, self.high = self.options["low"], self.options["high"]
        self.max_new_tokens, self.max_turns = self.options["max_new_tokens"], self.options["max_turns"]
        self._code: ModuleType | None = None
        _pinned(Path(argument), self.options["code"])

    @classmethod
    def locate(cls, argument: str, folder: Path | None) -> str:
        named = folder or (Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None)
        if named is None:
            raise TaskError(
                f"task 'python:{argument}' runs your own code: name the folder it may come from with "
                f"--code or {FOLDER_VARIABLE}"
            )
        root = named.expanduser().resolve()
        path = (root / argument).resolve()
        if not path.is_relative_to(root):
            raise TaskError(f"task 'python:{argument}': {path} lies outside the task folder {root}")
        if not path.is_file():
            raise TaskError(f"task 'python:{argument}': there is no file {path}")
        return str(path)

    @classmethod
    def settle(cls, argument: str, options: Mapping[str, Any]) -> dict[str, Any]:
        path = Path(argument)
        module = _load(path, options["code"])
        low = float(_declared(path, module, "low", options))
        high = float(_declared(path, module, "high", options))
        if not low < high:
            raise TaskError(f"{path}: LOW = {low} must be below HIGH = {high}")
        talks = hasattr(module, "reply")
        declared = {
            "code": _digest(_pinned(path, options["code"])),
            "low": low,
            "high": high,
            "max_new_tokens": int(_declared(path, module, "max_new_tokens", options)),
            "max_turns": int(_declared(path, module, "max_turns", options)) if talks else 1,
        }
        return {**options, **declared}

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        module = _load(Path(argument), options["code"])
        for needed in ("items", "score"):
            if not callable(getattr(module, needed, None)) and not (
                needed == "score" and hasattr(module, "reply")
            ):
                raise TaskError(f"{argument} defines no function {needed}()")
        try:
            made = module.items()
            splits = [list(split) for split in made] if isinstance(made, tuple) else []
        except (Exception, SystemExit) as error:
            raise TaskError(f"{argument}: items() failed: {type(error).__name__}: {error}") from error
        if len(splits) != 2:
            raise TaskError(f"{argument}: items() must return (train, heldout), two lists of objects")
        start = getattr(module, "start", None)
        train, heldout = (
            [_begun(item, start, f"{argument}: {name} item {number}") for number, item in enumerate(split)]
            for name, split in zip(("train", "heldout"), splits, strict=True)
        )
        return train, heldout

    @classmethod
    def sources(cls, argument: str) -> list[Path]:
        return [*super().sources(argument), Path(argument)]

    def warm_up(self) -> None:
        self._code = _load(Path(self.argument), self.options["code"])

    def score(self, item: Item, text: str) -> Score:
        return self._scored(self._module().score(item, text))

    def reply(self, item: Item, messages: Sequence[ChatMessage], text: str) -> list[ChatMessage] | Score:
        answer = getattr(self._module(), "reply", None)
        if answer is None:
            return self.score(item, text)
        given = answer(item, list(messages), text)
        return given if isinstance(given, list) else self._scored(given)

    def _module(self) -> ModuleType:
        if self._code is None:
            raise RuntimeError("the user's code is loaded in the scoring process only")
        return self._code

    def _scored(self, given: Any) -> Score:
        if isinstance(given, Score):
            return given
        reward, correct = given if isinstance(given, tuple) else (given, None)
        return Score(reward, reward == self.high if correct is None else bool(correct))


def _begun(item: Any, start: Callable[[Any], Any] | None, where: str) -> Item:
    """The item with the chat it starts, checked; TaskError, which begins with `where`, when there is none."""
    if not isinstance(item, Mapping):
        raise TaskError(f"{where} is {item!r:.50}, expected an object with fields (a dict)")
    if start is None and not {"prompt", "messages"} & item.keys():
        raise TaskError(
            f"{where} needs a field prompt or messages, or the file a function start(item); "
            f"it has {', '.join(map(str, item)) or 'nothing'}"
        )
    try:
        begun = {**item, "messages": start(item)} if start else dict(item)
    except (Exception, SystemExit) as error:
        raise TaskError(f"{where}: start() failed: {type(error).__name__}: {error}") from error
    if "messages" in begun:
        records.chat(begun["messages"], where)
    return begun


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _pinned(path: Path, pinned: str) -> bytes:
    content = path.read_bytes()
    found = _digest(content)
    if pinned and found != pinned:
        raise TaskError(
            f"{path} is not the code this plan pins: SHA-256 {found[:16]}..., pinned {pinned[:16]}..."
        )
    return content


def _load(path: Path, pinned: str) -> ModuleType:
    """Run exactly the bytes that were checked, as a module of its own."""
    content = _pinned(path, pinned)
    module = ModuleType(f"esnode_user_task_{_digest(content)[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and type hints look their module up
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise TaskError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _declared(path: Path, module: ModuleType, option: str, options: Mapping[str, Any]) -> float:
    """A constant of the user's file, or the option where the file has none.

    TaskError when it is no finite number, or when an option set in the plan says something else.
    """
    name, planned = option.upper(), options[option]
    given = getattr(module, name, planned)
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise TaskError(f"{path}: {name} = {given!r} must be a finite number")
    if planned not in (given, PythonTask.defaults[option]):
        raise TaskError(
            f"{path} declares {name} = {given}, the plan's option {option} is {planned}: drop one of them"
        )
    return given
