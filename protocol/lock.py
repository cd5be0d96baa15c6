"""The lock: what all replicas of a run agree on, as canonical bytes whose digest is the run id.

Pure. Lives here: `Lock` and its parts, the canonical encoding, the strict reader, schedules and chunks.
`plan.py` reads the user's side of it, `esnode.locking` resolves one into the other, who replays a run needs
only a lock.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Any

from protocol.errors import UserError, cut
from protocol.fields import (
    ALPHA,
    DATE,
    EXACT_SIGMA,
    FLAG,
    GLOB,
    SEED,
    TABLE,
    Rule,
    choice,
    distinct,
    hexes,
    many,
    number,
    text,
    whole,
)
from protocol.shaping import MAX_MEMBERS

LAW = 1
LARGEST_REWARD = 1e30  # sums of squares over a population stay finite
MAX_LOCK_BYTES = 8 * 1024 * 1024 - 4096  # a lock is one ledger entry


class Kind(IntEnum):
    """What a unit evaluates: a member of the population, or the unperturbed master on held-out prompts."""

    MEMBER = 0
    PROBE = 1


_PROBE = int(Kind.PROBE)  # a member of an enum takes a while to be looked up


class LockError(UserError):
    """Bytes that are no lock of this version, or fields that contradict each other; the field is named."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor of the base checkpoint: safetensors name, shape, stored dtype, trained or not."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a fork starts: the state of run `run` after `round` commits.

    `entry` is the hash of the commit that closed round `round - 1` (of the lock entry when `round` is 0),
    `digest` the D of that state. `run` and `entry` are 64 hex digits.
    """

    run: str
    round: int
    entry: str
    digest: int


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The resolved plan, immutable; hashes are hex text. Fields: docs/plan.md and docs/ledger-format.md."""

    law: int = LAW
    model: str  # a label, nothing is decided by it
    base: str  # BLAKE2b-256 of the base checkpoint (manifest and fp32 images)
    digest: int  # D of the state the run starts from
    manifest: tuple[TensorSpec, ...]  # in name order
    parent: Parent | None = None

    task: str
    task_options: dict[str, Any] = field(default_factory=dict)
    data: str  # SHA-256 of the task's data blob
    scorer: str  # SHA-256 of the scorer's source
    packages: dict[str, str] = field(default_factory=dict)
    date: str = "2026-01-01"
    seed: int = 0  # decides nothing but the run id; not written down when 0
    train_prompts: int
    heldout_prompts: int
    train_tokens: str  # SHA-256 of all rendered token ids of the split
    heldout_tokens: str
    stop_ids: tuple[int, ...] = ()
    reward_low: float
    reward_high: float

    members: int
    mirrored: bool
    sigma: tuple[float, ...]  # bf16 values; the last one repeats
    alpha: tuple[float, ...]
    shaping: str = "zscore"
    clip: float = 0.0
    std_floor: float = 0.0
    update: bool = True
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    live_dtype: str = "bfloat16"
    master: str = "float32"
    repeatable: bool = False
    per_round: int  # prompts of a round, resolved: 1 .. train_prompts
    chunk: int  # prompts of a chunk, resolved: 1 .. per_round
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    trusted: tuple[str, ...]  # Ed25519 public keys that may sign entries

    def to_bytes(self) -> bytes:
        """Canonical JSON: keys sorted, no spaces, UTF-8, floats by their shortest decimal form."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        plain: dict[str, Any] = {rule.name: getattr(self, rule.name) for rule in fields(self)}
        plain |= {name: float(plain[name]) for name in _FLOATS}
        plain |= {name: [float(value) for value in plain[name]] for name in ("sigma", "alpha")}
        plain["manifest"] = [[t.name, t.shape, t.dtype, t.trained] for t in self.manifest]
        if self.parent is not None:
            p = self.parent
            plain["parent"] = {"run": p.run, "round": p.round, "entry": p.entry, "digest": p.digest}
        for name in [name for name, value in _UNWRITTEN.items() if plain[name] == value]:
            del plain[name]
        try:
            return _canonical(plain)
        except (TypeError, ValueError) as error:  # NaN, broken Unicode, an object JSON has no word for
            raise LockError(f"the lock cannot be written down: {error}") from error

    @cached_property
    def run_id(self) -> bytes:
        """32 bytes: BLAKE2b-256 of the canonical bytes."""
        return hashlib.blake2b(self.to_bytes(), digest_size=32).digest()

    def sigma_at(self, round: int) -> float:
        """The schedule's value; the last one repeats."""
        return self.sigma[min(round, len(self.sigma) - 1)]

    def alpha_at(self, round: int) -> float:
        """The schedule's value; the last one repeats."""
        return self.alpha[min(round, len(self.alpha) - 1)]

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, count) of every chunk over the round's prompts."""
        return _slices(self.per_round, self.chunk)

    @cached_property
    def heldout_chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, count) of every chunk over the held-out prompts."""
        return _slices(self.heldout_prompts, self.chunk)

    def chunks_of(self, kind: int) -> tuple[tuple[int, int], ...]:
        """The chunks a unit of this kind counts in."""
        return self.heldout_chunks if kind == _PROBE else self.chunks

    def chunk_count(self, kind: int) -> int:
        """How many chunks a whole member or probe has."""
        return len(self.chunks_of(kind))

    def chunk_size(self, kind: int, index: int) -> int:
        """Prompts in one chunk."""
        return self.chunks_of(kind)[index][1]

    @cached_property
    def sum_ranges(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """(low, high) of every chunk's sum, by kind of unit: what `reward_ok` lets pass."""
        return tuple(
            tuple(self._range(count, 2.0**-40) for _, count in self.chunks_of(kind)) for kind in Kind
        )

    def reward_ok(self, value: float, prompts: int = 1) -> bool:
        """Whether `value` can be the sum of `prompts` rewards of the declared range.

        Sums round: the range is widened by 2^-40 of its larger bound, so that honest sums of extremes pass.
        """
        return self._within(value, prompts, 2.0**-40)

    def mean_ok(self, value: float) -> bool:
        """Whether `value` can be a mean of sums that passed `reward_ok`: twice its allowance."""
        return self._within(value, 1, 2.0**-39)

    def _within(self, value: float, prompts: int, allowance: float) -> bool:
        low, high = self._range(prompts, allowance)
        return math.isfinite(value) and low <= value <= high

    def _range(self, prompts: int, allowance: float) -> tuple[float, float]:
        slack = max(abs(self.reward_low), abs(self.reward_high)) * allowance
        return (self.reward_low - slack) * prompts, (self.reward_high + slack) * prompts

    def __hash__(self) -> int:
        return int.from_bytes(self.run_id[:8], "little")


def _canonical(plain: Any) -> bytes:
    """Keys sorted, no spaces, UTF-8, no NaN; floats in their shortest decimal form."""
    return json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode("utf-8")


def _slices(total: int, size: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(size, total - start)) for start in range(0, total, size))


# ---------------------------------------------------------------- strict reading

_UNWRITTEN = {"seed": 0}  # left out at these values: locks from before the field keep their bytes
_FLOATS = ("reward_low", "reward_high", "clip", "std_floor", "temperature", "top_p")
_SHA256 = hexes(32, "a SHA-256")


def _words(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError
    word = text(200)
    return {word.read(key): word.read(version) for key, version in value.items()}


def _tensor(value: Any) -> TensorSpec:
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError
    name, shape, dtype, trained = value
    return TensorSpec(text().read(name), _SHAPE.read(shape), text(32).read(dtype), FLAG.read(trained))


def _parent(value: Any) -> Parent | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != {"run", "round", "entry", "digest"}:
        raise ValueError
    return Parent(
        _SHA256.read(value["run"]),
        whole(0, 2**32 - 1).read(value["round"]),
        _SHA256.read(value["entry"]),
        whole(0).read(value["digest"]),
    )


_SHAPE = many(whole(0), at_most=16)
_RULES: dict[str, Rule] = {
    "law": whole(1),
    "model": text(),
    "base": hexes(32, "a BLAKE2b-256"),
    "digest": whole(0),
    "manifest": many(Rule("[name, shape, stored dtype, trained]", _tensor), at_least=1),
    "parent": Rule("null or a table of run, round, entry and digest", _parent),
    "task": text(),
    "task_options": TABLE,
    "data": _SHA256,
    "scorer": _SHA256,
    "packages": Rule("a table of package names and versions", _words),
    "date": DATE,
    "seed": SEED,
    "train_prompts": whole(1, 2**32 - 1),
    "heldout_prompts": whole(0, 2**32 - 1),
    "train_tokens": _SHA256,
    "heldout_tokens": _SHA256,
    "stop_ids": many(whole(0, 2**32 - 1), at_most=1024),
    "reward_low": number(-LARGEST_REWARD, LARGEST_REWARD),
    "reward_high": number(-LARGEST_REWARD, LARGEST_REWARD),
    "members": whole(2, MAX_MEMBERS),
    "mirrored": FLAG,
    "sigma": many(EXACT_SIGMA, at_least=1),
    "alpha": many(ALPHA, at_least=1),
    "shaping": choice("zscore", "ranks"),
    "clip": number(0.0, LARGEST_REWARD),
    "std_floor": number(0.0, LARGEST_REWARD),
    "update": FLAG,
    "include": many(GLOB, at_least=1),
    "exclude": many(GLOB),
    "live_dtype": choice("bfloat16", "float16", "float32"),
    "master": choice("float32", "bfloat16"),
    "repeatable": FLAG,
    "per_round": whole(1, 2**32 - 1),
    "chunk": whole(1, 2**32 - 1),
    "max_new_tokens": whole(0, 2**20),
    "temperature": number(0.0, 100.0),
    "top_p": number(0.0, 1.0, above=True),
    "trusted": distinct(many(hexes(32, "an Ed25519 public key"), at_most=64)),
}


def lock_from_bytes(data: bytes) -> Lock:
    """The lock of exactly these canonical bytes; LockError names a field that is unknown, missing or bad."""
    if len(data) > MAX_LOCK_BYTES:
        raise LockError(f"a lock of {len(data)} bytes is larger than the limit of {MAX_LOCK_BYTES}")
    try:
        plain = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LockError(f"no lock: the bytes are not JSON ({error})") from error
    if not isinstance(plain, dict):
        raise LockError("no lock: the JSON is not an object")
    if plain.get("law") != LAW:
        raise LockError(f"lock field law = {_shown(plain.get('law'))}: this version knows law {LAW} only")
    found = _UNWRITTEN | plain
    for name in sorted(found.keys() ^ _RULES.keys()):
        what = "unknown: written by a newer version?" if name in plain else "missing"
        raise LockError(f"lock field {_shown(name)} is {what}")
    lock = Lock(**{name: _read(name, rule, found[name]) for name, rule in _RULES.items()})
    check(lock)
    if lock.to_bytes() != data:
        raise LockError("the lock is not in canonical form (sorted keys, no spaces, shortest floats)")
    return lock


def _read(name: str, rule: Rule, value: Any) -> Any:
    try:
        return rule.read(value)
    except ValueError as error:
        raise LockError(
            f"lock field {name} = {_shown(value)}: {str(error) or 'must be ' + rule.expects}"
        ) from error


def _shown(value: Any) -> str:
    """A value in an error line, cut to a readable length."""
    try:
        shown = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        shown = repr(value)
    return cut(shown)


def check(lock: Lock) -> None:
    """What fields must hold between each other. LockError names them."""
    names = [tensor.name for tensor in lock.manifest]
    for wrong, reason in (
        (names != sorted(set(names)), "manifest: tensor names must be in ascending order, each once"),
        (not any(t.trained for t in lock.manifest), "manifest: no tensor is trained"),
        (lock.mirrored and lock.members % 2, f"members = {lock.members} must be even when mirrored"),
        (lock.update and min(lock.alpha) == 0, "alpha must be above 0 unless update is false"),
        (lock.reward_low >= lock.reward_high, "reward_low must be below reward_high"),
        (lock.per_round > lock.train_prompts, f"per_round = {lock.per_round} exceeds the training prompts"),
        (lock.chunk > lock.per_round, f"chunk = {lock.chunk} exceeds per_round = {lock.per_round}"),
    ):
        if wrong:
            raise LockError(f"lock field {reason}")


def resolve_slice(per_round: int, chunk: int, train_prompts: int) -> tuple[int, int]:
    """Concrete (per_round, chunk) from the plan's values: 0 means all prompts, and a quarter of the round.

    LockError when the task has fewer training prompts than a round wants, or a round fewer than a chunk.
    """
    if per_round > train_prompts:
        raise LockError(
            f"run.prompts.per_round = {per_round}: the task has only {train_prompts} training prompts; "
            "write 0 to use all of them every round"
        )
    prompts = per_round or train_prompts
    if chunk > prompts:
        raise LockError(
            f"run.prompts.chunk = {chunk}: a round has only {prompts} prompts; write 0 for a quarter of them"
        )
    return prompts, chunk or max(1, prompts // 4)
