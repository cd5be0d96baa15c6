"""How much of a pool's speed reaches the run: real processes, and units that only take time.

    python benchmarks/pool.py [--case NAME] [--rounds 3] [--unit 5.0] [--json PATH]

Coordinator and nodes are the real processes over ZeroMQ with CURVE; a node's engine (`tests/toy_engine.py`)
sleeps for its unit's time, so that machines without spare processors can be measured. A round has 30 members
of 4 chunks; `--unit` is the seconds of a whole member on the slowest node, 5 unless said otherwise (with less
the fixed costs weigh more). Cases: `equal`, four equal nodes; `speeds`, nodes of speed 1, 2, 4 and 8; `far`,
four equal nodes behind a TCP relay that delays every byte by 0.1 s each way; `mixed`, three nodes each of
speed 1, 2, 4 and 8; `straggler`, eleven nodes of speed 8 and one of speed 1. The plan says `repeatable`, as
the engine's rewards do not depend on batches, so tails may be split.

Keys of the JSON, per case: `efficiency`, the work of the rounds at the nodes' summed solo speed over the time
they took, from commit to commit; `per_round`, the same of each; `seconds`; besides `unit`, `rounds`,
`members`. One more round comes before those that count: in it speeds become known.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

from tests.relay import Relay
from tests.runs import Processes, make_folder, wait_for

MEMBERS = 30
CASES: dict[str, tuple[int, ...]] = {
    "equal": (1, 1, 1, 1),
    "speeds": (1, 2, 4, 8),
    "far": (1, 1, 1, 1),
    "mixed": (1, 2, 4, 8) * 3,
    "straggler": (8,) * 11 + (1,),
}
DELAY = 0.1  # seconds each way in the case `far`


@contextlib.contextmanager
def pool(folder: Path, case: str, unit: float, rounds: int) -> Iterator[Processes]:
    """The processes of one case, nodes first in line so that all are there when work begins."""
    speeds = CASES[case]
    names = tuple(f"n{k}" for k in range(len(speeds)))
    make_folder(
        folder,
        names,
        rounds=rounds + 1,  # the first one warms up: speeds are not known before
        members=MEMBERS,
        repeatable=True,
        chunk=2,
        task_options={f"seconds of {name}": unit / speed for name, speed in zip(names, speeds, strict=True)},
    )
    plan = folder / "plan.toml"
    plan.write_text(plan.read_text().replace("eval_every = 2", "eval_every = 0"))
    with Processes(folder) as processes, contextlib.ExitStack() as stack:
        processes.coordinator()
        address = wait_for(lambda: processes.status().get("address"), 20)
        if case == "far":
            address = stack.enter_context(Relay(address, delay=DELAY)).address
        for name in names:
            processes.node(name, "--coordinator", address)
        yield processes


def commits(folder: Path) -> list[dict[str, Any]]:
    """The metrics lines of the rounds so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["kind"] == "commit"]


def measure(case: str, unit: float, rounds: int) -> dict[str, Any]:
    """One case, from the end of its first round to the end of its last."""
    with tempfile.TemporaryDirectory(prefix="esnode-bench-") as name:
        folder = Path(name)
        ideal = MEMBERS * unit / sum(CASES[case])
        with pool(folder, case, unit, rounds):
            wait_for(lambda: len(commits(folder)) > rounds, 60 + 3 * ideal * (rounds + 1), "for the rounds")
        times = [row["time"] for row in commits(folder)]
    spans = [after - before for before, after in pairwise(times)]
    return {
        "efficiency": round(ideal * rounds / sum(spans), 3),
        "per_round": [round(ideal / span, 3) for span in spans],
        "seconds": round(sum(spans), 2),
        "unit": unit,
        "rounds": rounds,
        "members": MEMBERS,
    }


@click.command()
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="Default: all.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--unit", default=5.0, show_default=True, help="Seconds of a member on the slowest node.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(cases: tuple[str, ...], rounds: int, unit: float, path: Path | None) -> None:
    """Measure how much of a pool's speed reaches the run."""
    found = {case: measure(case, unit, rounds) for case in cases or CASES}
    for case, figures in found.items():
        print(f"{case:9} {figures['efficiency']:.1%} of ideal, per round {figures['per_round']}")
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
