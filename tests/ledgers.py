"""Small locks and ledgers to test with: really sealed, over a made-up state whose digest is a counter."""

from __future__ import annotations

import math
from typing import Any

from protocol.chain import Chain
from protocol.entries import (
    Admission,
    Body,
    CommitBody,
    EndBody,
    Entry,
    LockBody,
    MemberReward,
    RosterBody,
    ScoreBody,
    public_key,
    seal,
)
from protocol.fields import bf16
from protocol.ledger import MAGIC
from protocol.lock import Lock, TensorSpec

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
NODE = b"n" * 32
HEX = "5a" * 32


def small_lock(**changes: Any) -> Lock:
    """A lock of a tiny model; every field can be overridden."""
    values: dict[str, Any] = {
        "model": "tiny",
        "base": HEX,
        "digest": 1000,
        "manifest": (TensorSpec("a.weight", (8, 8), "bfloat16", True),),
        "task": "countdown",
        "data": HEX,
        "scorer": HEX,
        "train_prompts": 12,
        "heldout_prompts": 8,
        "train_tokens": HEX,
        "heldout_tokens": HEX,
        "reward_low": -1.0,
        "reward_high": 1.0,
        "members": 4,
        "mirrored": False,
        "sigma": (bf16(0.002), bf16(0.001)),
        "alpha": (0.01,),
        "per_round": 12,
        "chunk": 3,
        "max_new_tokens": 16,
        "trusted": (public_key(KEY).hex(),),
    }
    return Lock(**(values | changes))


class Writer:
    """Seals entries onto a chain of its own. `digest` is D of the present state; a commit moves it by one."""

    def __init__(self, lock: Lock, *, key: bytes = KEY, term: int = 1) -> None:
        self.lock = lock
        self.chain = Chain()
        self.key, self.term, self.nonce = key, term, b"nonce---"
        self.digest = lock.digest

    def seal(self, body: Body, **changes: Any) -> Entry:
        """Sealed but not appended, so that tests can hand in what a chain must refuse."""
        values: dict[str, Any] = {
            "parent": self.chain.tip,
            "term": self.term,
            "nonce": self.nonce,
            "round": self.chain.round,
            "digest": self.digest,
            "key": self.key,
        }
        return seal(body, **(values | changes))

    def add(self, body: Body, **changes: Any) -> Entry:
        """Seal and append."""
        entry = self.chain.append(self.seal(body, **changes))
        if isinstance(body, CommitBody) and self.chain.digest is None:
            self.digest += 1
        return entry

    def start(self) -> Writer:
        """Lock and roster."""
        self.add(LockBody(self.lock.to_bytes()))
        self.add(RosterBody((Admission(1, NODE, "ada"),)))
        return self

    def commit(self, **changes: Any) -> CommitBody:
        """A commit the chain accepts now, with rewards that spread; fields can be overridden."""
        round = self.chain.round
        members = tuple(
            MemberReward(i, (i * 7 % 5) / 5 - 0.4, 1) for i in range(self.chain.members_at(round))
        )
        values: dict[str, Any] = {
            "alpha": self.chain.alpha_at(round),
            "sigma": self.chain.sigma_at(round),
            "members": members,
        }
        return CommitBody(**(values | changes))

    def score(self, **changes: Any) -> ScoreBody:
        """A held-out result of the present state."""
        sums = (0.5, -0.25)
        values: dict[str, Any] = {
            "state_round": self.chain.round,
            "prompts": 8,
            "mean": math.fsum(sums) / 8,
            "correct": 3,
            "sums": sums,
        }
        return ScoreBody(**(values | changes))

    @property
    def data(self) -> bytes:
        """The ledger file so far."""
        return MAGIC + b"".join(entry.raw for entry in self.chain.entries)


def small_ledger(rounds: int = 3, end: bool = True, **changes: Any) -> Writer:
    """Lock, roster, score, `rounds` commits, another score, and an END."""
    writer = Writer(small_lock(**changes)).start()
    writer.add(writer.score())
    for _ in range(rounds):
        writer.add(writer.commit())
    writer.add(writer.score())
    if end:
        writer.add(EndBody("done"))
    return writer
