"""What a run achieved, read from its ledger; and what it cost, read from the coordinator's metrics.

Lives here: plain numbers for the reports and views, no drawing. A ledger alone gives rewards and held-out
scores; times, tokens and bytes need the run's folder. Called by `report.py`, `progress.py`, `board.py`,
`finish.py`, `run.py`, `join.py` and `cli/ledger.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from esnode.folder import RunFolder
from protocol.chain import Chain
from protocol.counting import answers
from protocol.entries import AmendBody, CommitBody, Entry, EntryKind, MalformedEntry, ScoreBody, parse, split
from protocol.growing import Growing
from protocol.ledger import MAGIC
from protocol.lock import Lock
from protocol.shaping import mean_and_std


@dataclass(frozen=True, slots=True)
class Round:
    """One commit: extreme and mean rewards of its members, `spread` their population standard deviation."""

    round: int
    members: int
    void: int
    mean: float
    best: float
    worst: float
    spread: float
    alpha: float
    sigma: float


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Score of the unperturbed weights after `round` commits on the held-out prompts."""

    round: int
    mean: float
    correct: int
    prompts: int


@dataclass(frozen=True, slots=True)
class History:
    """A run so far."""

    lock: Lock
    rounds: Growing[Round]
    heldout: Growing[HeldOut]
    ended: bool
    amended: tuple[str, ...] = ()  # changes of the lock's settings, in words

    @property
    def title(self) -> str:
        return title_of(self.lock)

    @property
    def unit(self) -> str:
        """What a reward counts, for axis labels."""
        return reward_unit(self.lock)


def answered(task: str, score: str) -> str:
    """As in "-1.5 after 6 rounds, 3 of 4 correct". Nothing for likelihood tasks, which answer
    nothing: correct is a target above 1/2 a token there (docs/tasks.md), and to have none is no failure.
    """
    return "" if _likelihood(task) else f", {score} correct"


def _likelihood(task: str) -> bool:
    return task == "short-answers" or task.startswith("likelihood:")


def title_of(lock: Lock) -> str:
    """What is trained on what, and with which seed when the plan gave one."""
    return f"{lock.task} on {lock.model}" + f", seed {lock.seed}" * (lock.seed > 0)


def reward_unit(lock: Lock) -> str:
    """Words for the reward's unit: likelihood tasks count nats per token, the others their own range."""
    if _likelihood(lock.task):
        return "mean log-likelihood of the answer, nats per token"
    return f"reward ({lock.reward_low:g} to {lock.reward_high:g})"


def of_chain(chain: Chain) -> History:
    """Every commit and score of a verified chain."""
    history = History(chain.lock, Growing(), Growing(), False)
    for entry in chain.entries:
        history = _with(history, entry)
    return history


def _with(history: History, entry: Entry) -> History:
    body = entry.body
    if isinstance(body, CommitBody):
        return replace(history, rounds=history.rounds.plus(_round(entry.round, body)))
    if isinstance(body, ScoreBody):
        score = HeldOut(body.state_round, body.mean, body.correct, body.prompts)
        return replace(history, heldout=history.heldout.plus(score))
    if isinstance(body, AmendBody):
        return replace(history, amended=(*history.amended, body.words()))
    return replace(history, ended=True) if entry.kind is EntryKind.END else history


def _round(number: int, body: CommitBody) -> Round:
    rewards = [member.reward for member in body.members]
    mean, spread = mean_and_std(rewards)
    return Round(
        number,
        len(rewards),
        len(body.voids),
        mean,
        max(rewards),
        min(rewards),
        spread,
        body.alpha,
        body.sigma,
    )


@dataclass
class Costs:
    """What a run has spent, folded from the rows of units.jsonl and metrics.jsonl. Times in milliseconds."""

    units: int = 0
    tokens: int = 0
    floored: int = 0
    perturb: int = 0
    generate: int = 0
    score: int = 0
    update_each: float = 0.0  # of one node, the median of all
    nodes: set[str] = field(default_factory=set)
    bytes_by_type: Counter[str] = field(default_factory=Counter)
    unit_bytes: int = 0  # Assign, Result and Ack of all units
    round_seconds: dict[int, float] = field(default_factory=dict)  # of the rounds that metrics.jsonl knows
    first_time: float | None = None
    last_time: float | None = None

    def add_unit(self, row: Mapping[str, Any]) -> None:
        """One accepted result."""
        self.units += 1
        self.nodes.add(str(row["node"]))
        self.tokens += row["tokens"]
        self.floored += row["floored"]
        perturb, generate, score = row["times"]
        self.perturb += perturb
        self.generate += generate
        self.score += score
        self.unit_bytes += sum(row.get("bytes", {}).values())
        self._seen(row["time"])

    def add_metric(self, row: Mapping[str, Any]) -> None:
        """One commit (other rows are ignored)."""
        self._seen(row["time"])
        if row["kind"] != "commit":
            return
        for direction in ("bytes_in", "bytes_out"):
            self.bytes_by_type.update(row.get(direction, {}))
        self.round_seconds[row["round"]] = row["seconds"]
        self.update_each += row["update_ms"]

    @property
    def failed_scoring(self) -> str:
        """That answers got the floor, for people; empty when none did."""
        told = f"{answers(self.floored)} got the task's floor: scoring failed, the nodes' logs say why"
        return told if self.floored else ""

    def _seen(self, moment: float) -> None:
        self.first_time = moment if self.first_time is None else min(self.first_time, moment)
        self.last_time = moment if self.last_time is None else max(self.last_time, moment)

    @property
    def update(self) -> float:
        """Of all nodes together: each of them applies every commit."""
        return self.update_each * len(self.nodes)

    @property
    def busy(self) -> float:
        """Milliseconds that nodes worked, all kinds of work together."""
        return self.perturb + self.generate + self.score + self.update

    @property
    def shares(self) -> dict[str, float]:
        """Share of each kind of work in all of it; empty before the first unit."""
        parts = {
            "generate": self.generate,
            "perturb": self.perturb,
            "update": self.update,
            "score": self.score,
        }
        return {name: part / self.busy for name, part in parts.items()} if self.busy else {}


class Tail:
    """Follows a growing .jsonl file: each call gives the complete lines since the last one.

    One after the other: units.jsonl of a long run has a million.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The rows of those lines; none while there is no file."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is still being written
                    return
                self._offset += len(line)
                if line.strip():
                    yield json.loads(line)


class LedgerTail:
    """Follows a growing ledger. Entries are parsed, not verified: this feeds a display, nothing else."""

    def __init__(self, path: Path, lock: Lock) -> None:
        self.path = path
        self.history = History(lock, Growing(), Growing(), False)
        self._offset = len(MAGIC)

    def refresh(self) -> History:
        """The history with whatever entries have come since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.history
        at = 0
        while at < len(data):
            try:
                raw = split(data, at)
            except MalformedEntry:  # half an entry: the rest comes with a later call
                break
            self.history = _with(self.history, parse(raw))
            at += len(raw)
        self._offset += at
        return self.history


def costs_of(folder: RunFolder) -> Costs:
    """Everything the folder's metrics say was spent so far."""
    costs = Costs()
    for row in Tail(folder.units).new():
        costs.add_unit(row)
    for row in Tail(folder.metrics).new():
        costs.add_metric(row)
    return costs
