"""What is known of the lanes of a node, and one step of it in the making.

Pure: the node's events only. Called by `lanes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from esnode import events as ne
from esnode.laneevents import Answer, Effect, Tidings
from protocol.messages import Unit

STARTING, READY, BEHIND, BUILDING, DOWN, GONE = (
    "starting",
    "ready",
    "behind",
    "catching up",
    "down",
    "given up",
)
WAITS, FOLLOWS = "waits for a master", "reads a master"  # roles; "": has or leads one
Moved: TypeAlias = ne.EntriesApplied | ne.Rewound


@dataclass(frozen=True, slots=True)
class Job:
    """A unit to be evaluated. `deaths`: lanes that ended over it; `cancelled`: when it was."""

    what: ne.Evaluate
    deaths: int = 0
    scoring: bool = False
    began: float = 0.0
    moved: float = 0.0  # when it was last heard of
    height: int = 0  # entries reflected by the weights it is about
    cancelled: float | None = None

    @property
    def unit(self) -> Unit:
        return self.what.unit


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine. READY: its master is the node's. BEHIND: it must come there; BUILDING: it is on its way."""

    devices: tuple[str, ...]
    phase: str = STARTING
    height: int | None = None  # entries its master reflects while it is behind; None: of no use
    digest: int = 0  # D of it then
    far: bool = False  # no snapshot is trusted: from the base
    stale: bool = False  # what it is building is of no use any more
    odd: str = ""  # why it is rebuilt, to be told when it was
    why: str = ""  # it does not work since this befell it
    jobs: tuple[Job, ...] = ()
    crashes: int = 0  # in a row
    retry: float = 0.0
    pace: float = 0.0  # seconds its last unit took
    heard: float = 0.0  # when its process last said anything
    role: str = ""
    pulled: bool = False  # ended because its leader did, which is no crash
    since: float = 0.0  # when it began to read its leader's master

    @property
    def evaluates(self) -> bool:
        return any(not job.scoring for job in self.jobs)

    @property
    def free(self) -> bool:
        return self.phase == READY and not self.evaluates


@dataclass(frozen=True, slots=True)
class State:
    """All that is known; a value."""

    lanes: tuple[Lane, ...]
    digest: int  # D of the node's master
    height: int = 0  # entries it reflects
    now: float = 0.0
    waiting: tuple[Job, ...] = ()
    order: ne.Apply | ne.Rewind | None = None  # what all lanes do now,
    upto: int = 0  # the height after it,
    asked: frozenset[int] = frozenset()  # who does it,
    answers: dict[int, Moved] = field(default_factory=dict)  # and who has;
    ordered: float = 0.0  # when it was asked for,
    answered: float = 0.0  # and when the first had done it
    errands: tuple[tuple[int, ne.Effect], ...] = ()  # what one lane does for the node; -1: nobody yet
    prover: int = -1  # who derived pieces last
    leader: int = -1  # who writes the shared master, if there is one
    offered: int = 1
    lost: str = ""  # what was told of lanes that do not work
    doubts: int = 0  # in a row
    failed: bool = False


def name_of(state: State, number: int) -> str:
    """A lane in words: "lane 1 (cuda:1)"."""
    return f"lane {number} ({'+'.join(state.lanes[number].devices)})"


def lost(state: State) -> str:
    """Lanes that do not work, and what befell them."""
    found = ((k, lane) for k, lane in enumerate(state.lanes) if lane.why and lane.phase != READY)
    return "; ".join(f"{name_of(state, k)} {lane.why}" for k, lane in found)


class Turn:
    """One step in the making."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.effects: list[Effect] = []

    def do(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def answer(self, event: Any) -> None:
        self.do(Answer(replace(event, now=self.state.now)))

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def change(self, number: int, **changes: Any) -> None:
        lanes = self.state.lanes
        self.set(lanes=(*lanes[:number], replace(lanes[number], **changes), *lanes[number + 1 :]))

    def change_job(self, number: int, unit: Unit, **changes: Any) -> None:
        jobs = self.state.lanes[number].jobs
        self.change(number, jobs=tuple(replace(job, **changes) if job.unit == unit else job for job in jobs))

    def name(self, number: int) -> str:
        return name_of(self.state, number)

    def suspect(self, number: int, why: str) -> None:
        """The master of a lane, which may be its leader's, is not what it should be."""
        lane = self.state.lanes[number]
        if lane.pulled:
            return  # of a master that nobody leads any more
        if lane.role == FOLLOWS:
            number = self.state.leader
        self.do(Tidings(f"{self.name(number)}: {why}; it is rebuilt by replay"))
        self.change(number, phase=BEHIND, height=None, odd=why, why=why)

    def phase(self, *phases: str) -> list[int]:
        """Lanes in one of these phases."""
        return [k for k, lane in enumerate(self.state.lanes) if lane.phase in phases]


def digest_of(said: Moved) -> int:
    """D of the state an answer stands for."""
    return said.digests[-1] if isinstance(said, ne.EntriesApplied) else said.digest
