"""What the replica proof asks of a node's engine, and what it answers.

Pure: protocol types only. Part of `events.py`, which says in which order things happen; used by `proof.py`
and the shells.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.entries import Entry
from protocol.messages import Unit

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Damaged:
    """The master is not what was last written to it. Nothing was done: no unit measured, no entry applied.

    Answers `Evaluate` (with its unit) or `Apply` (None).
    """

    now: float
    unit: Unit | None
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mended:
    """`Heal` or `Mend` is done; D of the master."""

    now: float
    digest: int


@dataclass(frozen=True, slots=True)
class Digested:
    """Digests of all pieces, read from memory; tensors that are not what was last written to them."""

    now: float
    digests: tuple[int, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Proved:
    """What the pieces of a `Prove` held when it was asked, and what replay with the reference gives.

    `since`: rounds of the state that it began from, 0 for the base.
    """

    now: float
    pieces: tuple[int, ...]
    held: tuple[int, ...]
    derived: tuple[int, ...]
    since: int = 0


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Heal:
    """Derive these tensors again from the base and these entries. The engine is idle."""

    entries: tuple[Entry, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mend:
    """Write what the last `Prove` derived for these pieces. The engine is idle."""

    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeDigests:
    """Read the digests of all pieces, beside a running evaluation; nothing changes the master meanwhile."""


@dataclass(frozen=True, slots=True)
class Prove:
    """Note the digests of these pieces now, then derive them by replay of these entries.

    With the `reference` kernel, beside whatever else the node does; from the newest checkpoint whose D the
    entries state, or from the base where there is none or `base` says so.
    """

    entries: tuple[Entry, ...]
    pieces: tuple[int, ...]
    base: bool
