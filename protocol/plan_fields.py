"""Every key of a plan file: where it stands, what it may hold, what it means. The list code and docs share.

Pure. Called by `plan.py` (validation and writing), `esnode/planfile.py` and `esnode/template.py` (comments).
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.fields import (
    ALPHA,
    DATE,
    FLAG,
    GLOB,
    SEED,
    SIGMA,
    Rule,
    choice,
    distinct,
    hexes,
    many,
    number,
    schedule,
    text,
    whole,
)
from protocol.lock import LARGEST_REWARD
from protocol.shaping import MAX_MEMBERS

# The one free table. Not [run.task]: `task` is a key of [run], and TOML has no room for both.
OPTIONS = "run.options"
TABLES = ("run", "ops", "run.es", "run.train", "run.prompts", "run.sampling", OPTIONS)
REQUIRED = ("run.model", "run.task", "run.es.members", "run.es.sigma", "ops.rounds")


@dataclass(frozen=True, slots=True)
class PlanField:
    """One key of the file: `[table] key`, its rule, and what it means in one sentence."""

    table: str
    key: str
    rule: Rule
    meaning: str

    @property
    def path(self) -> str:
        """As error lines name it."""
        return f"{self.table}.{self.key}"

    @property
    def required(self) -> bool:
        """Whether a plan must state it."""
        return self.path in REQUIRED


MEMBERS = whole(2, MAX_MEMBERS)
SCHEDULES = SIGMAS, ALPHAS = schedule(SIGMA), schedule(ALPHA)
_KEYS = distinct(many(hexes(32, "an Ed25519 public key"), at_most=64))
_COUNT = whole(0, 2**32 - 1)

# fmt: off
FIELDS: tuple[PlanField, ...] = (
    PlanField("run", "model", text(),
              "what to train: `demo`, a Hugging Face folder, a .gguf file or a hub id"),
    PlanField("run", "task", text(),
              "what to train on: a built-in name, `gym:NAME`, `file:PATH`, `likelihood:PATH`, `python:PATH`"),
    PlanField("run", "live_dtype", choice("bfloat16", "float16", "float32"),
              "dtype the model runs in"),
    PlanField("run", "master", choice("float32", "bfloat16"),
              "dtype of the kept weights; `bfloat16` rounds stochastically and saves memory"),
    PlanField("run", "repeatable", FLAG,
              "every node batches exactly one chunk, so that equal engines give equal answers"),
    PlanField("run", "trusted", _KEYS,
              "Ed25519 public keys of coordinators; empty: the key of whoever runs the plan"),
    PlanField("run", "date", DATE,
              "the date a chat template that reads the clock is told"),
    PlanField("run", "seed", SEED,
              "another number is another run of the same plan: other noise, other order of prompts"),
    PlanField("run.es", "members", MEMBERS,
              "population size N"),
    PlanField("run.es", "mirrored", FLAG,
              "members 2k and 2k+1 are the plus and the minus side of one noise; N must be even"),
    PlanField("run.es", "sigma", SIGMAS,
              "noise scale, one number or one per round; rounded to bf16"),
    PlanField("run.es", "alpha", ALPHAS,
              "step size, one number or one per round; above 0 unless `update = false`"),
    PlanField("run.es", "shaping", choice("zscore", "ranks"),
              "how rewards become weights: z-scores, or centred ranks times sqrt(12)"),
    PlanField("run.es", "clip", number(0.0, LARGEST_REWARD),
              "largest magnitude of a shaped reward; 0: no limit"),
    PlanField("run.es", "std_floor", number(0.0, LARGEST_REWARD),
              "a smaller spread of rewards counts as this, so that one flipped answer is no full step"),
    PlanField("run.es", "update", FLAG,
              "false: members are measured and the weights never move"),
    PlanField("run.train", "include", many(GLOB, at_least=1),
              "patterns of tensor names to train"),
    PlanField("run.train", "exclude", many(GLOB),
              "patterns of tensor names to leave frozen, stronger than `include`"),
    PlanField("run.prompts", "per_round", _COUNT,
              "training prompts of a round; 0: all"),
    PlanField("run.prompts", "chunk", _COUNT,
              "prompts in the smallest piece of work; 0: a quarter of the round"),
    PlanField("run.sampling", "max_new_tokens", whole(0, 2**20),
              "longest answer in tokens; 0: the task's own limit"),
    PlanField("run.sampling", "temperature", number(0.0, 100.0),
              "0: greedy"),
    PlanField("run.sampling", "top_p", number(0.0, 1.0, above=True),
              "nucleus sampling; 1: off"),
    PlanField("ops", "rounds", whole(1, 2**31),
              "rounds to train"),
    PlanField("ops", "quorum", number(0.0, 1.0, above=True),
              "share of members that closes a round; below 1 slow members are dropped: it trains brevity"),
    PlanField("ops", "eval_every", whole(0, 2**31),
              "rounds between held-out evaluations; 0: none at all"),
    PlanField("ops", "snapshot_every", whole(0, 2**31),
              "rounds between the snapshots each node writes (resume, late joiners); 0: none"),
    PlanField("ops", "max_share", number(0.0, 1.0, above=True),
              "largest part of a round for one node when three or more are ready; 1: no limit"),
    PlanField("ops", "stall_seconds", number(1.0, 86400.0),
              "work that stands still for this long goes to another node"),
    PlanField("ops", "audit_share", number(0.0, 1.0),
              "share of units, chosen secretly, that a second node measures as well; 0: none"),
)
# fmt: on
