"""likelihood:<jsonl>: the reward is the mean log-likelihood of a given target: forward passes only, no
decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esnode.tasks import records
from esnode.tasks.interface import Splits, Task


class Likelihood(Task):
    """Fields: `prompt` (or `messages`, optional `system`) and `target` (or `answer`); optional `split`."""

    name = "likelihood"
    mode = "likelihood"
    low, high = -30.0, 0.0
    defaults: Mapping[str, Any] = {"heldout": 0.2}  # share of the lines when they carry no split

    @classmethod
    def items(cls, argument: str, options: Mapping[str, Any]) -> Splits:
        path = Path(argument).expanduser()
        lines = records.read(path)
        items = []
        for line in lines:
            records.require(line, path, "target", "answer")
            items.append(
                {**records.prompt_of(line, path), "target": str(line.get("target", line.get("answer")))}
            )
        return records.split(lines, items, options["heldout"], path)
