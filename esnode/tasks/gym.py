"""gym:<name>: the datasets of reasoning-gym, scored by their own scorers.

Items are generated when a plan is locked and travel as data; other nodes need the package (its version is
pinned) for scoring only. Generation runs in a process with a fixed hash seed, because a few generators walk
over sets. Nearly all scorers want the bare answer, so the prompt asks for `<answer>` tags and only what
stands in them is scored; without tags the score is 0. Before a plan is locked the dataset's own answers must
get full marks this way, after a round trip through JSON: a dataset that fails is refused by name.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esnode.tasks.answers import tagged
from esnode.tasks.interface import ChatMessage, Item, Score, Splits, Task, TaskError

INSTRUCTION = "Give your final answer between <answer> and </answer> tags."
GENERATION_SECONDS = 600
PROSE = "I do not know."
CHECKED = 16  # items of a new data set whose own answer must get full marks

# Datasets of reasoning-gym 0.1.25 that cannot be used, and why. Every other one passed the check of `verify`.
REFUSED = {
    "boxnet": "it publishes no answer, so nothing shows that its scorer can give full marks",
    "composite": "it only mixes other datasets",
    "game_of_life_halting": "its scorer gives any text full marks",
    "rush_hour": "it publishes no answer, so nothing shows that its scorer can give full marks",
}
# Datasets with many right answers publish an example in their metadata instead.
EXAMPLE_ANSWER = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}


class Gym(Task):
    """One dataset; `parameters` are the fields of its configuration class."""

    name = "gym"
    low, high = 0.0, 1.0
    max_new_tokens = 128
    packages = ("reasoning-gym",)
    defaults: Mapping[str, Any] = {"train": 200, "heldout": 100, "seed": 0, "parameters": {}}

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        if argument in REFUSED:
            raise TaskError(f"gym:{argument} is refused: {REFUSED[argument]}")
        if min(options["train"], options["heldout"]) < 1:
            raise TaskError(f"gym:{argument}: train and heldout must be at least 1 item each")
        entries = _generated_apart(argument, options)
        return entries[: options["train"]], entries[options["train"] :]

    def start(self, item: Item) -> list[ChatMessage]:
        return [{"role": "user", "content": f"{item['entry']['question']}\n\n{INSTRUCTION}"}]

    def warm_up(self) -> None:
        self._dataset = _dataset(self.argument, self.options, size=len(self.train) + len(self.heldout))

    def score(self, item: Item, text: str) -> Score:
        answer = tagged(text)
        if answer is None:
            return Score(0.0, False)
        reward = float(self._dataset.score_answer(answer, entry=restored(item["entry"])))
        return Score(reward, reward >= 1.0)


# ---------------------------------------------------------------- entries as JSON and back


def plain(value: Any) -> Any:
    """JSON from which `restored` makes an equal value again: tuples and odd keys, which scorers compare, are
    marked.
    """
    if isinstance(value, tuple):
        return {"!tuple": [plain(element) for element in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return {key: plain(element) for key, element in value.items()}
        return {"!dict": [[plain(key), plain(element)] for key, element in value.items()]}
    return [plain(element) for element in value] if isinstance(value, list) else value


def restored(value: Any) -> Any:
    """The inverse of `plain`; always a fresh copy."""
    if isinstance(value, dict):
        if "!tuple" in value:
            return tuple(restored(element) for element in value["!tuple"])
        if "!dict" in value:
            return {restored(key): restored(element) for key, element in value["!dict"]}
        return {key: restored(element) for key, element in value.items()}
    return [restored(element) for element in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- generation


def _dataset(name: str, options: Mapping[str, Any], size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        usable = sorted(set(DATASETS) - set(REFUSED))
        close = difflib.get_close_matches(name, usable, n=3) or usable[:8]
        raise TaskError(f"reasoning-gym has no dataset {name!r} (of {len(usable)}); try {', '.join(close)}")
    try:
        return reasoning_gym.create_dataset(name, seed=options["seed"], size=size, **options["parameters"])
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(f"gym:{name} does not take these parameters: {error}") from error


def generate(name: str, options: Mapping[str, Any]) -> list[Item]:
    """`train + heldout` entries with different questions. Raises TaskError when the dataset has fewer, or is
    unfit.
    """
    wanted = options["train"] + options["heldout"]
    dataset = _dataset(name, options, size=10 * wanted)
    found: dict[str, Item] = {}
    for index in range(10 * wanted):
        if len(found) == wanted:
            break
        entry = dataset[index]
        found.setdefault(entry["question"], {"entry": _json_copy(name, entry)})
    if len(found) < wanted:
        raise TaskError(
            f"gym:{name} has only {len(found)} different questions with these parameters, {wanted} wanted"
        )
    items = list(found.values())
    verify(name, dataset, [item["entry"] for item in items[:: max(1, wanted // CHECKED)]])
    return items


def _json_copy(name: str, entry: Mapping[str, Any]) -> Any:
    try:
        copied = json.loads(json.dumps(plain(dict(entry)), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TaskError(f"gym:{name} is refused: its entries are not JSON ({error})") from error
    if restored(copied) != entry:
        raise TaskError(f"gym:{name} is refused: its entries do not survive JSON")
    return copied


def verify(name: str, dataset: Any, entries: list[Any]) -> None:
    """Raise TaskError unless the dataset's own answers, in `<answer>` tags, get full marks, prose not."""
    for entry in map(restored, entries):
        gold = entry["metadata"][EXAMPLE_ANSWER[name]] if name in EXAMPLE_ANSWER else entry["answer"]
        gold = gold if isinstance(gold, str) else json.dumps(gold)
        try:
            reward = dataset.score_answer(tagged(f"<answer>{gold}</answer>"), entry=copy.deepcopy(entry))
        except Exception as error:
            raise TaskError(f"gym:{name} is refused: scoring its own answer raised {error!r}") from error
        if not reward >= 1.0:
            raise TaskError(f"gym:{name} is refused: its own answer {gold[:60]!r} scores {reward}, not 1")
        if _prose_passes(dataset, entry):
            raise TaskError(f"gym:{name} is refused: its scorer gives {PROSE!r} full marks")


def _prose_passes(dataset: Any, entry: Any) -> bool:
    try:
        return bool(dataset.score_answer(PROSE, entry=copy.deepcopy(entry)) >= 1.0)
    except Exception:  # a scorer that cannot read prose costs such an answer the floor
        return False


def _generated_apart(name: str, options: Mapping[str, Any]) -> list[Item]:
    root = str(Path(__file__).parents[2])
    search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": search}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "esnode.tasks.gym"],
            input=json.dumps([name, dict(options)]),
            capture_output=True,
            check=False,
            text=True,
            env=environment,
            timeout=GENERATION_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        remedy = "ask for fewer items (train, heldout)"
        raise TaskError(f"gym:{name} was still generating after {GENERATION_SECONDS} s: {remedy}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TaskError(f"gym:{name} failed while generating: {last}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise TaskError(answer["refused"])
    items: list[Item] = answer["items"]
    return items


def main() -> None:
    """Read [name, options] from stdin, write {"items": [...]} or {"refused": why} to stdout."""
    name, options = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # generators that print must not get between
    try:
        answer: dict[str, Any] = {"items": generate(name, options)}
    except TaskError as error:
        answer = {"refused": str(error)}
    with output:
        json.dump(answer, output)


if __name__ == "__main__":
    main()
