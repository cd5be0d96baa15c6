"""From chat messages to token ids, once. Lives here: rendering, tokenising, stop ids, the pinned digest.

Engines receive token ids only, so all of a run's nodes work on the same ones: the lock holds a SHA-256 over
the ids of each split, and a node whose tokenizer gives others refuses to work. May import transformers.
Called by `locking.py`, `episodes.py`, `evaluate.py` and whoever shows answers.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esnode.models import ModelError, read_json
from esnode.tasks import ChatMessage, Task
from protocol.errors import UserError, cut, first_line

SPLITS = ("train", "heldout")
_CLOCK = re.compile(r"""strftime_now\(\s*("[^"]*"|'[^']*')\s*\)""")
_CLOCK_TEST = re.compile(r"strftime_now\s+is\s+(not\s+)?(defined|none)", re.IGNORECASE)
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")  # what configurations call it
_SENTINEL = "esnode-sentinel"
AT_ONCE = 512  # texts given to the tokenizer together: what it returns takes ten times the room of the ids

Ids = tuple[int, ...]


class PromptError(UserError):
    """Prompts that cannot be rendered or tokenised, or do not fit the model; the sentence names the first."""


class Prepared:
    """A task's prompts as token ids of one tokenizer.

    `task` is the task, `stop_ids` the ids that end an answer (sorted), `end_of_turn` the one that the chat
    template writes after an answer (None when it writes none), `context` the model's longest sequence (0:
    unknown).
    """

    def __init__(
        self, tokenizer: Any, task: Task, date: str, *, eos_ids: Sequence[int] = (), context: int = 0
    ) -> None:
        self.task = task
        self.context = context
        self._tokenizer = tokenizer
        self._date = datetime.date.fromisoformat(date)
        self._template = pinned_template(_template_of(tokenizer), self._date)
        self.end_of_turn = self._find_end_of_turn()
        found = {*eos_ids, tokenizer.eos_token_id, self.end_of_turn}
        self.stop_ids: Ids = tuple(sorted(token for token in found if token is not None))
        self._prompts = {split: self._tokenise_split(split) for split in SPLITS}
        self._targets = {split: self._tokenise_targets(split) for split in SPLITS}

    def count(self, split: str) -> int:
        """Prompts of "train" or "heldout"."""
        return len(self._prompts[split])

    def ids_of(self, split: str, index: int) -> Ids:
        """The prompt: the rendered chat up to where the model speaks."""
        return tuple(self._prompts[split][index])

    def target_ids(self, split: str, index: int) -> Ids:
        """What the reward is the likelihood of, with the end of the turn; empty for tasks that generate."""
        return tuple(self._targets[split][index])

    def render(self, messages: Sequence[ChatMessage]) -> Ids:
        """Token ids of a chat up to where the model speaks. PromptError when the template refuses it."""
        return tuple(self._tokenise([self._text(messages, "a conversation")])[0])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens left out."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def digest(self, split: str) -> str:
        """Hex SHA-256 over all token ids of a split.

        Hashed, everything u32 little-endian: the ASCII text "esnode tokens 1", the number of prompts, then
        for each prompt in order its length and ids, its target's length and ids (length 0 where nothing is
        scored so).
        """
        whole = hashlib.sha256(b"esnode tokens 1" + struct.pack("<I", self.count(split)))
        for prompt, target in zip(self._prompts[split], self._targets[split], strict=True):
            for ids in (prompt, target):
                whole.update(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids))
        return whole.hexdigest()

    def require_room(self, max_new_tokens: int, engine: int = 0) -> None:
        """Raise PromptError when a prompt and its answer or target do not fit into the context.

        That of the model, and of an engine that takes less (0: it does not); conversations keep to it too.
        """
        if engine and (not self.context or engine < self.context):
            self.context = engine
        for split in SPLITS:
            for index, (prompt, target) in enumerate(
                zip(self._prompts[split], self._targets[split], strict=True)
            ):
                new = len(target) if self.task.mode == "likelihood" else max_new_tokens
                if self.context and len(prompt) + new > self.context:
                    whose = "the engine's" if self.context == engine else "the model's"
                    raise PromptError(
                        f"{split} prompt {index} of task {self.task.name!r} has {len(prompt)} tokens, with "
                        f"{new} more it exceeds {whose} context of {self.context}: shorten it, or lower "
                        "max_new_tokens"
                    )

    # ------------------------------------------------------------ inside

    def _text(self, messages: Sequence[ChatMessage], what: str, prompt: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
                date_string=self._date.strftime("%d %b %Y"),  # what the Llama templates ask for
            )
            return text
        except TemplateError as error:
            raise PromptError(
                f"the model's chat template refuses {what} of task {self.task.name!r} ({error}): use another "
                "model, or phrase the task's messages differently (some know no system message)"
            ) from error

    def _tokenise(self, texts: Sequence[str]) -> list[array[int]]:
        """Token ids of each text, 4 bytes an id: a task may have a hundred thousand prompts."""
        found: list[array[int]] = []
        for start in range(0, len(texts), AT_ONCE):
            some = list(texts[start : start + AT_ONCE])
            # The template has written every special token, a leading BOS included.
            rows = self._tokenizer(some, add_special_tokens=False)["input_ids"]
            found += [array("I", ids) for ids in rows]
        return found

    def _tokenise_split(self, split: str) -> list[array[int]]:
        items = self.task.items_of(split)
        texts = [
            self._text(self.task.start(item), f"{split} item {index}") for index, item in enumerate(items)
        ]
        return self._tokenise(texts)

    def _tokenise_targets(self, split: str) -> list[array[int]]:
        items = self.task.items_of(split)
        if self.task.mode != "likelihood":
            return [array("I")] * len(items)
        targets = self._tokenise([self.task.target(item) for item in items])
        for index, ids in enumerate(targets):
            if not ids:
                raise PromptError(f"{split} item {index} of task {self.task.name!r} has an empty target")
            if self.end_of_turn is not None:
                ids.append(self.end_of_turn)
        return targets

    def _find_end_of_turn(self) -> int | None:
        """The special token that the template puts right after what the assistant said."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
        _, found, tail = self._text(chat, "a plain question and answer", prompt=False).rpartition(_SENTINEL)
        ids = self._tokenise([tail])[0] if found and tail else []
        return ids[0] if ids and ids[0] in _special_ids(self._tokenizer) else None


def prepare(folder: Path, task: Task, date: str, max_new_tokens: int = 0) -> Prepared:
    """Tokenise a task with a model folder's tokenizer. `date` (YYYY-MM-DD) is today for the chat template.

    The folder's generation_config.json is read for its end-of-text ids only: penalties and sampling settings
    in it would change answers behind the plan's back. `max_new_tokens` 0 means the task's own limit. Raises
    PromptError, and ModelError when a file is damaged.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its library raises
        raise PromptError(f"the tokenizer of {folder} cannot be loaded: {first_line(error)}") from error
    config = _json(folder / "config.json")
    text_config = config.get("text_config") or {}
    eos: list[int] = []
    for source in (config, text_config, _json(folder / "generation_config.json")):
        eos += _numbers(source.get("eos_token_id"), "eos_token_id", folder)
    lengths = [
        _numbers(source.get(name), name, folder) for source in (text_config, config) for name in _CONTEXT
    ]
    context = next((length for found in lengths for length in found if length), 0)
    prepared = Prepared(tokenizer, task, date, eos_ids=eos, context=context)
    prepared.require_room(max_new_tokens or task.max_new_tokens)
    return prepared


def pinned_template(template: str, date: datetime.date) -> str:
    """The chat template with every look at the clock replaced by what it would show on `date`.

    transformers gives templates a function `strftime_now(format)` and no way to replace it, so the calls are
    replaced in the text. PromptError when one is written so that this cannot be done.
    """
    midnight = datetime.datetime.combine(date, datetime.time())
    pinned = _CLOCK.sub(lambda call: json.dumps(midnight.strftime(call.group(1)[1:-1])), template)
    if "strftime_now" in _CLOCK_TEST.sub("", pinned):
        raise PromptError(
            "the model's chat template reads the clock in a way that cannot be pinned to the plan's date: "
            "put an edited copy into the model folder as chat_template.jinja"
        )
    return pinned


def _template_of(tokenizer: Any) -> str:
    try:
        template: str = tokenizer.get_chat_template()
        return template
    except ValueError as error:
        raise PromptError(
            "the model has no chat template, so prompts cannot be rendered: use an instruction-tuned model, "
            "or put its template into the folder as chat_template.jinja"
        ) from error


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, content in added.items() if content.special)}


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _numbers(given: Any, name: str, folder: Path) -> list[int]:
    """A whole number (2048.0 is one too), a list of them or nothing, of a configuration."""
    found = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(one) is int or (type(one) is float and one.is_integer()) for one in found):
        what = f"{name} is {cut(repr(given))}, which is no whole number"
        raise ModelError(f"{folder}: {what}: copy the model again.")
    return [int(one) for one in found]
