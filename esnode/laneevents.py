"""What can happen to the lanes of a node and what they can cause; `lanes.py` decides.

Pure: `esnode.events` only. The node's core asks and hears what it asks and hears of a single engine; what is
told to one lane and what it answers are the same effects and events. Called by `lanes.py` and `fleet.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from esnode import events as ne

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Asked:
    """The node's core wants this of its engine. `upto`: entries the master reflects after an Apply."""

    now: float
    effect: ne.Effect
    upto: int = 0


@dataclass(frozen=True, slots=True)
class Up:
    """A lane's process has loaded the run's base model."""

    now: float
    lane: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A lane's process is alive, whatever its engine does; said at least every 10 s."""

    now: float
    lane: int


@dataclass(frozen=True, slots=True)
class Said:
    """A lane answers what it was told; the event's own time counts for nothing."""

    now: float
    lane: int
    event: ne.Event


@dataclass(frozen=True, slots=True)
class Died:
    """A lane's process has ended. `refused`: by a sentence of its own, so trying again cannot mend it.

    `jitter` in 0 .. 1 spreads the restarts.
    """

    now: float
    lane: int
    reason: str
    jitter: float = 0.5
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Wants:
    """A lane that loads needs a master in host memory; `Place` answers, perhaps once another has loaded."""

    now: float
    lane: int


@dataclass(frozen=True, slots=True)
class Refreshed:
    """A lane has reread the master that another one leads: its D."""

    now: float
    lane: int
    digest: int


@dataclass(frozen=True, slots=True)
class Clock:
    """Time passes; at least once a second."""

    now: float


Event: TypeAlias = Asked | Up | Heard | Said | Died | Wants | Refreshed | Clock

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Start:
    """Start a lane's process; `Up` or `Died` follows."""

    lane: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End a lane's process, if there is one; `Died` follows."""

    lane: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand this to one lane, which answers like a node's engine."""

    lane: int
    effect: ne.Effect


@dataclass(frozen=True, slots=True)
class Place:
    """Tell a lane whose master in host memory it reads; `leader` -1: it makes and leads one."""

    lane: int
    leader: int


@dataclass(frozen=True, slots=True)
class Reread:
    """Have a lane take over what its leader has written; `Refreshed` follows."""

    lane: int


@dataclass(frozen=True, slots=True)
class GoBack:
    """Tell a lane `Rewind` with the first `upto` entries of the ledger."""

    lane: int
    upto: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Tell a lane `Apply` with the ledger's entries from `since` to `upto`."""

    lane: int
    since: int
    upto: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the node's core hears."""

    event: ne.Event


@dataclass(frozen=True, slots=True)
class Tidings:
    """A line for the node's log."""

    words: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The node cannot go on; the sentence says why."""

    sentence: str


Effect: TypeAlias = Start | Kill | Tell | Place | Reread | GoBack | Advance | Answer | Tidings | Fail
