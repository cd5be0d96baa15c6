"""A run folder with a language model of random weights, for `chaos.py --tiny`; importing torch is slow."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from esnode import begin, workshop
from esnode import folder as folders
from esnode.nodeoptions import Options
from esnode.tell import silent
from esnode.workshop import Workshop
from protocol import keys, ledger
from tests import tiny
from tests.runs import SIGNING_SEED

PLAN = """
[run]
model = "{model}"
task = "likelihood:{pairs}"
repeatable = true
[run.es]
members = 6
mirrored = true
sigma = 0.0078125
alpha = 0.02
[ops]
rounds = {rounds}
eval_every = 4
"""


def make_folder(folder: Path, names: Sequence[str], rounds: int) -> None:
    """The files of a new run, beside a model and a task; the signing key is that of the toy runs."""
    inputs = folder / "inputs"
    inputs.mkdir(parents=True)
    model = tiny.write(inputs / "model")
    pairs = inputs / "pairs.jsonl"
    pairs.write_text(
        "".join(json.dumps({"prompt": f"say {k}", "target": f"{k}{k}"}) + "\n" for k in range(10))
    )
    plan = inputs / "plan.toml"
    plan.write_text(PLAN.format(model=model, pairs=pairs, rounds=rounds))
    keys.write_signing(inputs / "coordinator.key", SIGNING_SEED)
    before = os.environ.get("ESNODE_CONFIG")
    os.environ["ESNODE_CONFIG"] = str(inputs)
    try:
        place = folders.RunFolder(folder)
        begin.settle(place, begin.Request(out=folder, plan=plan), silent)
        begin.admit(place, names)
    finally:
        if before is None:
            del os.environ["ESNODE_CONFIG"]
        else:
            os.environ["ESNODE_CONFIG"] = before


def load(folder: Path) -> Workshop:
    """The engine of a run in this process."""
    lock = ledger.read(folder / "run.ledger").chain.lock
    return workshop.load(Options(run=folder, name="truth", threads=1), lock)
