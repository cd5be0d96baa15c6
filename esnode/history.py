"""What a run achieved, read from its ledger; and what it cost, read from the coordinator's metrics.

Lives here: plain numbers for the reports and views, no drawing. A ledger alone gives rewards and held-out
scores; times, tokens and bytes need the run's folder. Called by `report.py`, `progress.py`, `run.py` and
`cli/ledger.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.chain import Chain
from protocol.entries import CommitBody, ScoreBody
from protocol.lock import Lock


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
    rounds: tuple[Round, ...]
    heldout: tuple[HeldOut, ...]
    ended: bool

    @property
    def title(self) -> str:
        return f"{self.lock.task} on {self.lock.model}"

    @property
    def unit(self) -> str:
        """What a reward counts, for axis labels."""
        return reward_unit(self.lock)


def reward_unit(lock: Lock) -> str:
    """Words for the reward's unit: likelihood tasks count nats per token, the others their own range."""
    if lock.task == "short-answers" or lock.task.startswith("likelihood:"):
        return "mean log-likelihood of the answer, nats per token"
    return f"reward ({lock.reward_low:g} to {lock.reward_high:g})"


def of_chain(chain: Chain) -> History:
    """Every commit and score of a verified chain."""
    rounds = [
        _round(entry.round, entry.body) for entry in chain.commits if isinstance(entry.body, CommitBody)
    ]
    heldout = [
        HeldOut(body.state_round, body.mean, body.correct, body.prompts)
        for body in (entry.body for entry in chain.entries)
        if isinstance(body, ScoreBody)
    ]
    return History(chain.lock, tuple(rounds), tuple(heldout), chain.ended)


def _round(number: int, body: CommitBody) -> Round:
    rewards = [member.reward for member in body.members]
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
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


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a .jsonl file; nothing when it is missing. A last line cut by a crash is left out."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    for line in text.split(b"\n")[:-1]:  # what follows the last newline is still being written
        if line.strip():
            yield json.loads(line)
