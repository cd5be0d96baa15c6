"""Whether the logits of a vLLM model are numbers, looked at where they are made.

vLLM would tell by the log-probability of every token, which is a tenth of a step on a CPU and an object for
every token anywhere. The functions run on vLLM's workers, in their processes. Called by `vllm_engine.py`.
"""

from __future__ import annotations

from typing import Any

import torch


class _Watch:
    """Largest logits of every row of every step since `begin`; None while nobody wants to know."""

    def __init__(self, model: Any) -> None:
        self._compute = model.compute_logits
        self.largest: list[torch.Tensor] | None = None
        model.compute_logits = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        logits = self._compute(*arguments, **options)
        if logits is not None and self.largest is not None:
            self.largest.append(logits.amax(-1))  # no number where one of the row's is none
        return logits


def begin(worker: Any) -> None:
    """Look at all logits of this worker's model from now on."""
    watch = worker.__dict__.get("_esnode_watch") or _Watch(worker.model_runner.model)
    worker.__dict__["_esnode_watch"] = watch
    watch.largest = []


def end(worker: Any) -> tuple[bool, bool]:
    """(whether any were seen since `begin`, whether the largest of every row was finite)."""
    watch = worker.__dict__["_esnode_watch"]
    seen, watch.largest = watch.largest, None
    return bool(seen), all(bool(largest.isfinite().all()) for largest in seen)
