"""Commented plans that run as they are, for `esnode plan new` and for `esnode run` without a plan.

The numbers per task were measured or published; what a task does not state is the default. Imports the task's
module for its options, nothing heavy. Called by `begin.py`, `evaluate.py`, `bench.py` and `cli/plan.py`.
"""

from __future__ import annotations

from typing import Any

from esnode import tasks
from protocol.plan import default_of, parse, render_value
from protocol.plan_fields import FIELDS, OPTIONS

# Per task: values by key, and where they come from.
_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "short-answers": (
        "Likelihood of a short right answer: forward passes only, so a CPU is enough.",
        {
            "members": 32,
            "mirrored": True,
            "sigma": 0.002,
            "alpha": 0.006,
            "per_round": 48,
            "chunk": 16,
            "rounds": 12,
            "eval_every": 2,
        },
    ),
    "conciseness": (
        "Reward for answers as short as the target; generates 24 tokens per prompt.",
        {
            "members": 16,
            "mirrored": True,
            "sigma": 0.002,
            "alpha": 0.006,
            "per_round": 16,
            "chunk": 16,
            "max_new_tokens": 24,
            "rounds": 8,
            "eval_every": 2,
        },
    ),
    "countdown": (
        "Reach a number with the given ones; the settings of Qiu et al. (arXiv 2509.24372), which want GPUs.",
        {
            "members": 30,
            "sigma": 0.001,
            "alpha": 0.0005,
            "per_round": 200,
            "max_new_tokens": 1024,
            "rounds": 500,
        },
    ),
    "arithmetic": (
        "Small sums with one right number each; wants a model that gets some of them right already.",
        {"members": 32, "mirrored": True, "sigma": 0.001, "alpha": 0.001, "per_round": 64, "rounds": 100},
    ),
    "gym": (
        "A dataset of reasoning-gym with its own scorer.",
        {
            "members": 30,
            "sigma": 0.001,
            "alpha": 0.0005,
            "per_round": 100,
            "max_new_tokens": 512,
            "rounds": 200,
        },
    ),
    "file": (
        "Questions and answers of your own.",
        {"members": 30, "sigma": 0.001, "alpha": 0.0005, "rounds": 100},
    ),
    "likelihood": (
        "Mean log-likelihood of your own targets: forward passes only, nothing is decoded.",
        {"members": 32, "mirrored": True, "sigma": 0.002, "alpha": 0.006, "rounds": 15},
    ),
    "python": (
        "Your own scoring function, in the folder that --code names.",
        {"members": 30, "sigma": 0.001, "alpha": 0.0005, "rounds": 100},
    ),
}
DEFAULT_TASK = "short-answers"


def template(task: str = DEFAULT_TASK, model: str = "demo") -> str:
    """A plan for a task (`countdown`, `gym:chain_sum`, ...) and a model, every field and option explained.

    What the task does not set stands as a comment with its default. TaskError for an unknown task, PlanError
    for a model name that no plan can hold.
    """
    options = tasks.resolve_options(task, {})
    intro, preset = _PRESETS[task.partition(":")[0]]
    # Equal batches give equal answers, so that a run that was killed and resumed ends in the same bits.
    stated = {"model": model, "task": task, "repeatable": True, **preset}
    lines = [
        f"# {intro}",
        "# Every field: docs/plan.md. [run] is the run's identity, [ops] may change any time.",
        *_tables(stated, options),
    ]
    plan = "\n".join(lines) + "\n"
    parse(plan)
    return plan


def _tables(stated: dict[str, Any], options: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    table = ""
    for row in FIELDS:
        if row.table == "ops" != table:
            lines += ["", f"[{OPTIONS}]", "# the task's own options: docs/tasks.md"]
            lines += [f"# {key} = {render_value(value)}" for key, value in options.items()]
        if row.table != table:
            table = row.table
            lines += ["", f"[{table}]"]
        lines.append(f"# {row.meaning}")
        value = stated[row.key] if row.key in stated else default_of(row)
        lines.append(f"{'' if row.key in stated else '# '}{row.key} = {render_value(value)}")
    return lines
