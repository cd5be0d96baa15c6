"""The simulated network: who hears whom, after how long, and what is lost on the way.

Lives here: `Faults`, how bad the world is while it is bad, and `Network`, the questions the world asks about
each frame. Called by `world.py` only; cases speak to the world.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from protocol.messages import Message

LOST = float("inf")


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the world is until it heals. Chances are per message or per step."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.005  # mean seconds
    straggle: float = 0.0  # chance of a delay of up to 4 s, so that messages overtake each other
    crash_node: float = 0.0
    crash_coordinator: float = 0.0
    torn: float = 0.0  # chance that a killed node's ledger file has lost or damaged its end
    down: float = 3.0  # mean seconds until a killed process is started again
    until: float = 0.0  # when the world heals


QUIET = Faults()
Rule = Callable[[str, str, Message], float]  # (sender, receiver, message) -> extra seconds, or LOST


class Network:
    """Delays and losses between named processes."""

    def __init__(self, faults: Faults, rng: random.Random, clock: Callable[[], float]) -> None:
        """`clock`: the world's time."""
        self.faults = faults
        self.random = rng
        self.clock = clock
        self.rules: list[Rule] = []
        self.loss: dict[tuple[str, str], float] = {}  # (sender, receiver) -> chance, until the world heals

    def journeys(self, sender: str, receiver: str, message: Message) -> list[float]:
        """Seconds on the way for each copy that arrives; empty when the frame is lost."""
        extra = sum(rule(sender, receiver, message) for rule in self.rules)
        if extra == LOST:
            return []
        if self.clock() >= self.faults.until:
            return [extra + self.random.expovariate(1 / QUIET.delay)]
        if self._chance(self.faults.drop) or self._chance(self.loss.get((sender, receiver), 0.0)):
            return []
        copies = 1 + self._chance(self.faults.duplicate)
        return [extra + self._delay() for _ in range(copies)]

    def _delay(self) -> float:
        if self._chance(self.faults.straggle):
            return self.random.uniform(0, 4)
        return self.random.expovariate(1 / self.faults.delay)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    # ------------------------------------------------------------ rules of a case

    def cut(self, name: str, start: float, end: float, way: str = "both") -> None:
        """A process's links carry nothing for a while: "in" to it, "out" of it, or "both" ways."""

        def rule(sender: str, receiver: str, _: Message) -> float:
            hit = (receiver == name and way != "out") or (sender == name and way != "in")
            return LOST if hit and start <= self.clock() < end else 0.0

        self.rules.append(rule)

    def part(self, side: set[str], start: float, end: float) -> None:
        """The processes of one side and all others do not hear each other for a while."""

        def rule(sender: str, receiver: str, _: Message) -> float:
            apart = (sender in side) != (receiver in side)
            return LOST if apart and start <= self.clock() < end else 0.0

        self.rules.append(rule)

    def lag(self, name: str, seconds: float, start: float = 0.0, end: float = LOST) -> None:
        """Everything from or to a process takes this much longer."""

        def rule(sender: str, receiver: str, _: Message) -> float:
            return seconds if name in (sender, receiver) and start <= self.clock() < end else 0.0

        self.rules.append(rule)

    def hold(self, name: str, kind: type[Message], seconds: float, times: int = 1) -> None:
        """Delay (or lose) the next messages of a kind from or to a process."""
        left = itertools.count(times, -1)

        def rule(sender: str, receiver: str, message: Message) -> float:
            here = name in (sender, receiver) and type(message) is kind
            return seconds if here and next(left) > 0 else 0.0

        self.rules.append(rule)
