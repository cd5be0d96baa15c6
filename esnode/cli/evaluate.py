"""`esnode evaluate`: a model or a ledger, a task, a table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from esnode.cli import options
from esnode.cli.ledger import BASE, ROUND, told


@click.command()
@click.argument("what", metavar="MODEL|LEDGER")
@click.option("--task", metavar="T", help="What to measure [default: the ledger's own task].")
@click.option(
    "--split",
    type=click.Choice(["heldout", "train"]),
    default="heldout",
    show_default=True,
    help="Which of the task's prompts.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Sampled answers per prompt, besides the greedy one [default: 0].",
)
@click.option(
    "--temperature",
    type=options.Number(min=0),
    default=1.0,
    metavar="X",
    show_default=True,
    help="Temperature of sampled answers.",
)
@click.option(
    "--top-p",
    type=options.Number(0, 1, min_open=True),
    default=1.0,
    metavar="P",
    show_default=True,
    help="Sample from the likeliest tokens that hold P of the probability.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Longest answer, in tokens [default: the run's on its own task, else the task's].",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    show_default=True,
    help="Seed of sampled answers.",
)
@click.option(
    "--option", "-o", "pairs", multiple=True, metavar="KEY=VALUE", help="A task option, as in [run.options]."
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Precision that a MODEL decodes in; a LEDGER says its own.",
)
@options.code
@BASE
@ROUND
@options.threads
@click.option("--json", "as_json", is_flag=True, help="Print the report, per-prompt results too, as JSON.")
def evaluate(
    what: str,
    task: str | None,
    split: str,
    samples: int,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    pairs: Sequence[str],
    dtype: str,
    code: Path | None,
    base: str | None,
    round_: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Score MODEL, or the weights of a round of LEDGER, on a task.

    Always measured: the greedy answers (for likelihood tasks: the mean log-likelihood). With --samples N
    also mean@N, the mean share of right answers, and pass@k without bias (Chen et al. 2021) for k = 1, 2, 4,
    ... up to N. Intervals are 95% over prompts: Wilson's for the share of right greedy answers, percentile
    bootstrap for the rest. The greedy score of a LEDGER on its own task is measured in the run's batches: on
    the engine that measured it there it is the held-out score of the ledger again. The task's data are those
    of the run: task.jsonl beside the ledger, else made again.

    \b
    Examples:
      esnode evaluate demo --task short-answers
      esnode evaluate runs/mine --round 0
      esnode evaluate runs/mine --task countdown --samples 16 --temperature 0.8 --json
    """
    from rich.console import Console

    from esnode import evaluate as measuring

    settings = measuring.Settings(split, samples, temperature, top_p, max_new_tokens, seed)
    chosen = dict(map(parse_option, pairs))
    with told() as tell:
        if measuring.is_ledger(what):
            subject = measuring.open_ledger(
                what, task, chosen, round=round_, base=base, threads=threads, code=code, settings=settings,
                tell=tell,
            )  # fmt: skip
        else:
            _refuse_ledger_options(task, base, round_)
            subject = measuring.open_model(
                what, task or "", chosen, live_dtype=dtype, threads=threads, code=code, settings=settings,
                tell=tell,
            )  # fmt: skip
        try:
            report = subject.measure(settings, tell)
        finally:
            subject.close()
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1, ensure_ascii=False))
    else:
        Console().print(report.table())


def parse_option(pair: str) -> tuple[str, Any]:
    """KEY=VALUE with the value as TOML writes it; a bare word is a text."""
    key, equals, value = pair.partition("=")
    if not key or not equals:
        raise click.UsageError(f"--option {pair}: write KEY=VALUE, for example -o seed=3")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _refuse_ledger_options(task: str | None, base: str | None, round_: int | None) -> None:
    if task is None:
        raise click.UsageError("a model needs a task to be measured on: --task short-answers, for example")
    if base is not None or round_ is not None:
        raise click.UsageError("--base and --round are for ledgers: MODEL|LEDGER names a model here")
