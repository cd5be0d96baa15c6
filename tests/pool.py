"""A pool of scoring nodes on a desk: honest ones on unlike hardware, and liars. No engine, no network.

Scores follow what was measured on real engines: the same member on the same prompt agrees at .90 between
unlike engines, the base model's rewards agree with a member's at .82, and with each prompt's mean over
members taken off honest engines agree at about .57 and everything else at 0. `graded` scores lie in 0 .. 1,
others are 0 or 1. Engines may also be off by up to a hundredth of the range.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coordinator.events as ce
from protocol.messages import Applied, Commit, Evidence, EvidenceAsk, Kind, Unit
from tests.desk import Desk, hello, key_of
from tests.replica import evidence_of

Scores = NDArray[np.float64]
GRADED = (0.7674, 0.1326, 0.1)  # variances of prompt, member on the prompt, engine
BINARY = (0.9277, 0.06, 0.0123)
SECRET = bytes(range(32))


class Model:
    """What members are worth on prompts."""

    def __init__(self, prompts: int, graded: bool, seed: int) -> None:
        self.prompts, self.graded, self.seed = prompts, graded, seed
        self.v = GRADED if graded else BINARY
        self.latent = lru_cache(maxsize=512)(self._latent)

    def draw(self, *what: Any) -> np.random.Generator:
        digest = hashlib.blake2b(repr((self.seed, *what)).encode(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))

    def _latent(self, round: int, member: int | None) -> Scores:
        """What a member answers, before any engine's noise; the base model for None."""
        prompt = self.draw("prompt", round).normal(0, self.v[0] ** 0.5, self.prompts)
        if member is None:
            return prompt
        return prompt + self.draw("member", round, member).normal(0, self.v[1] ** 0.5, self.prompts)

    def scores(self, latent: Scores, noise: np.random.Generator) -> Scores:
        seen = latent + noise.normal(0, self.v[2] ** 0.5, self.prompts)
        return np.clip(0.5 + 0.18 * seen, 0, 1) if self.graded else (seen > 0).astype(np.float64)


Strategy = Callable[[Model, int, int, np.random.Generator], Scores]


def honest(model: Model, round: int, member: int, noise: np.random.Generator) -> Scores:
    return model.scores(model.latent(round, member), noise)


def base_model(model: Model, round: int, member: int, noise: np.random.Generator) -> Scores:
    return model.scores(model.latent(round, None), noise)


def constant(model: Model, round: int, member: int, noise: np.random.Generator) -> Scores:
    return np.full(model.prompts, 0.5 if model.graded else 1.0)


def another_member(model: Model, round: int, member: int, noise: np.random.Generator) -> Scores:
    return model.scores(model.latent(round, member + 1000), noise)


def noise_of_the_right_spread(model: Model, round: int, member: int, noise: np.random.Generator) -> Scores:
    return model.scores(noise.normal(0, (model.v[0] + model.v[1]) ** 0.5, model.prompts), noise)


def bias_of_a_tenth(model: Model, round: int, member: int, noise: np.random.Generator) -> Scores:
    right = honest(model, round, member, noise)
    if model.graded:
        return np.minimum(right + 0.1, 1.0)
    return np.where(noise.random(model.prompts) < 0.2, 1.0, right)  # half of them are 1 anyway


LIARS: dict[str, Strategy] = {
    "base model's rewards": base_model,
    "a constant": constant,
    "another member's": another_member,
    "noise of the right spread": noise_of_the_right_spread,
    "a bias of a tenth": bias_of_a_tenth,
}


class Pool:
    """A desk and the nodes that answer it."""

    def __init__(
        self,
        seed: int,
        nodes: int = 5,
        *,
        graded: bool = True,
        prompts: int = 25,
        members: int = 20,
        share: float = 0.2,
        **ops: Any,
    ) -> None:
        names = "".join(chr(ord("a") + k) for k in range(nodes + 1))
        self.model = Model(prompts, graded, seed)
        self.random = np.random.default_rng(seed)
        self.desk = Desk(
            ops={"rounds": 10**6, "audit_share": share, **ops}, names=names,
            secret=SECRET + bytes([seed % 251]), members=members, per_round=prompts, chunk=prompts,
            repeatable=False,
        )  # fmt: skip
        self.strategies: dict[str, Strategy] = {}
        self.offsets = {n: self.random.uniform(-0.01, 0.01) if graded else 0.0 for n in names}
        self.kept: dict[tuple[str, Unit], tuple[float, ...]] = {}
        self.forge: set[str] = set()  # nodes whose evidence is not what they committed to
        for name in names[:nodes]:
            self.join(name)

    def join(self, name: str, strategy: Strategy = honest) -> None:
        self.strategies[name] = strategy
        own = hashlib.blake2b(name.encode(), digest_size=8).digest()
        chain = self.desk.state.chain
        if chain.round:
            at = {"height": chain.height, "tip": chain.tip, "digest": chain.digest or 77}
        else:
            at = {}
        self.desk.say(name, hello(self.desk.lock, fingerprints=(own,), **at))
        self.desk.tick()
        self._answer()

    def rounds(self, count: int) -> None:
        """Let so many rounds pass, or until somebody is in quarantine."""
        goal = self.desk.state.chain.round + count
        while self.desk.state.chain.round < goal and not self.quarantined:
            self.turn()

    def turn(self) -> None:
        """Every node that has a unit ends it, in a random order; time passes."""
        desk = self.desk
        order = [name for name in self.strategies if desk.assigned(name)]
        self.random.shuffle(order)
        for name in order:
            held = desk.assigned(name)
            if held:
                self._measure(name, held[0])
                self._answer()
        desk.tick(1.0)
        self._answer()
        for name in self.strategies:
            desk.beat(name, *((unit, 0) for unit in desk.assigned(name)))

    def _measure(self, name: str, unit: Unit) -> None:
        assert unit.kind == Kind.MEMBER
        noise = self.model.draw("engine", name, unit.round, unit.member)
        scores = self.strategies[name](self.model, unit.round, unit.member, noise)
        values = tuple(float(v) for v in np.clip(scores + self.offsets[name], 0, 1))
        self.kept = {key: kept for key, kept in self.kept.items() if key[1].round >= unit.round - 2}
        self.kept[name, unit] = values
        self.desk.result(name, unit, sums=(math.fsum(values),), evidence=evidence_of(values))

    def _answer(self) -> None:
        """Digests after commits, and evidence."""
        todo = [effect for effect in self.desk.effects if isinstance(effect, ce.Send)]
        while todo:
            send = todo.pop(0)
            name = self.desk.allowed[send.peer]
            if isinstance(send.message, Commit):
                chain = self.desk.state.chain
                self.desk.say(name, Applied(chain.height, chain.tip[:8], self._digest(), 12))
            elif isinstance(send.message, EvidenceAsk):
                values = self.kept.get((name, send.message.unit), ())
                if name in self.forge:
                    values = tuple(reversed(values))
                self.desk.say(name, Evidence(send.message.unit, 0, len(values), values))
            else:
                continue
            todo += [effect for effect in self.desk.effects if isinstance(effect, ce.Send)]

    def _digest(self) -> int:
        return self.desk.state.chain.digest or 77

    @property
    def quarantined(self) -> dict[str, str]:
        state = self.desk.state
        return {self.desk.allowed[key]: reason for key, reason in state.quarantined.items()}

    def prompts_of(self, name: str) -> int:
        """Prompts compared so far with a node in them."""
        return int(sum(sums.pairs for pair, sums in self.desk.state.evidence.items() if key_of(name) in pair))
