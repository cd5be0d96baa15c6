"""How long `esnode join` takes on this machine, from the command to its first unit, late in a run.

    python benchmarks/join.py --round 20 --members 30 --threads 2

Builds a run of the demo model that stands at `--round` (rewards out of thin air, digests true, so that a
joiner can replay it), starts its coordinator, joins by an invite in a folder of its own and waits for the
first result. Prints seconds per phase, and the processor time of the joining process, which other load on
the machine hardly changes. The model is in the cache already.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run from a checkout without installing

PLAN = """
[run]
model = "{model}"
task = "short-answers"
[run.es]
members = {members}
mirrored = true
sigma = 0.001
alpha = 0.0005
[ops]
rounds = 1000
eval_every = 0
"""


def main() -> None:
    """Build, join, print."""
    parser = argparse.ArgumentParser(description="seconds from `esnode join` to its first unit")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--round", type=int, default=20, help="rounds the run has behind it")
    parser.add_argument("--members", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="keep the built run here, and use it when it is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "run"
        os.environ["ESNODE_CONFIG"] = str(folder.parent / "config")
        if not (folder / "lock.json").exists():
            began = time.monotonic()
            build(folder, options.model, options.members, options.round, options.threads)
            print(f"run built in {time.monotonic() - began:.1f} s", file=sys.stderr)
        print(json.dumps(measure(folder, Path(scratch), options.threads), indent=1))


def build(folder: Path, model: str, members: int, rounds: int, threads: int) -> None:
    """A run folder whose journal stands after `rounds` commits."""
    from coordinator.events import EntryAppended, KeyRevoked, TermTaken
    from coordinator.journal import Journal
    from esnode import begin, kernels, models
    from esnode.folder import RunFolder
    from esnode.state import State
    from esnode.tell import silent
    from protocol.chain import Chain
    from protocol.entries import Admission, CommitBody, LockBody, MemberReward, RosterBody, seal

    plan = folder.parent / "join-bench.toml"
    folder.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(PLAN.format(model=model, members=members))
    lock = begin.settle(RunFolder(folder), begin.Request(out=folder, plan=plan), silent)
    kernel = kernels.pick("cpu", None, threads)
    state = State.load(lock, models.resolve(model).path, kernel)
    chain, draw, seed = Chain(), random.Random(1), begin.signing_seed()

    def add(body: object) -> object:
        round_ = chain.round if chain.height else 0
        entry = seal(
            body, parent=chain.tip, term=1, nonce=bytes(8), round=round_, digest=state.digest(), key=seed
        )  # fmt: skip
        return chain.append(entry)

    add(LockBody(lock.to_bytes()))
    first = bytes(31) + b"1"
    add(RosterBody((Admission(0, first, "first"),)))
    for round_ in range(rounds):
        rewards = tuple(MemberReward(k, -draw.random(), 0) for k in range(members))
        state.apply([add(CommitBody(lock.alpha_at(round_), lock.sigma_at(round_), rewards))])
        print(f"round {round_ + 1}", file=sys.stderr)
    journal = Journal(folder / "coordinator" / "journal.sqlite", lock.run_id)
    journal.append([TermTaken(1, bytes(8)), *(EntryAppended(h, e.raw) for h, e in enumerate(chain.entries))])
    journal.append([KeyRevoked(first, "it never was")])  # or its word on D would be waited for
    journal.close()


def measure(folder: Path, scratch: Path, threads: int) -> dict[str, float]:
    """Seconds since the join command until each mark in its log, and until its first result."""
    esnode = [sys.executable, "-m", "esnode.cli.main"]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "ESNODE_DATA": str(scratch / "joined")}
    units = folder / "units.jsonl"
    before = units.stat().st_size if units.exists() else 0
    (folder / "coordinator" / "address").unlink(missing_ok=True)
    serve = subprocess.Popen(
        [*esnode, "coordinator", "serve", "--data", str(folder), "--bind", "tcp://127.0.0.1:0"],
        env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until((folder / "coordinator" / "address").exists)
        invite = subprocess.run([*esnode, "invite", str(folder)], env=surroundings, check=True, text=True,
                                capture_output=True).stdout.strip()  # fmt: skip
        found: dict[str, float] = {}
        with (scratch / "join.log").open("w") as log:
            began = time.monotonic()
            join = subprocess.Popen(
                [*esnode, "join", invite, "--threads", str(threads)], env=surroundings, stdout=log, stderr=log
            )

        def mark(name: str, pattern: str) -> None:
            if name not in found and re.search(pattern, (scratch / "join.log").read_text()):
                found[name] = round(time.monotonic() - began, 1)

        def worked() -> bool:
            assert join.poll() is None, (scratch / "join.log").read_text()
            mark("lock shown", "members per round")
            mark("model loaded", "ready in")
            return units.exists() and units.stat().st_size > before

        until(worked)
        found["first unit"] = round(time.monotonic() - began, 1)
        ticks = Path(f"/proc/{join.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        found["processor seconds"] = round(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), 1)
        join.terminate()
        join.wait(20)
        return found
    finally:
        serve.terminate()
        serve.wait(20)


def until(condition: object, seconds: float = 600.0) -> None:
    """Poll."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit("it took too long")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
