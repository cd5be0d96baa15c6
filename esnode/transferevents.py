"""What can happen to a snapshot transfer, and what it wants done. Pure; see `transfer.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Opened:
    """A donor can be talked to ("direct", "relay")."""

    now: float
    key: bytes
    way: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A donor cannot be talked to any more, or says it does not serve this snapshot."""

    now: float
    key: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Banned:
    """A donor sent what cannot be of this snapshot: it is not asked again."""

    now: float
    key: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Began:
    """The head is here and checked against the root. `have`: bit k set when part k lies on the disk."""

    now: float
    total: int
    part_size: int
    have: int


@dataclass(frozen=True, slots=True)
class Came:
    """So many further bytes of a part from a donor, which may be one that was dropped."""

    now: float
    key: bytes
    part: int
    size: int


@dataclass(frozen=True, slots=True)
class Checked:
    """A whole part from a donor was hashed; a good one is on the disk."""

    now: float
    key: bytes
    part: int
    good: bool


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


Event: TypeAlias = Opened | Lost | Banned | Began | Came | Checked | Tick

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class AskHead:
    """Fetch the head from this donor."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """Grant a donor credit for these bytes of a part."""

    key: bytes
    part: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw away what has come of this part from this donor; more may still come and is ignored."""

    key: bytes
    part: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the coordinator: this donor sent a poisoned part."""

    key: bytes
    part: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Over: every part is on the disk (`reason` is empty), or it cannot go on."""

    reason: str


Action: TypeAlias = AskHead | Ask | Drop | Report | Finish
