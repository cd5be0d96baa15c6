"""What a coordinator knows of other histories of its run: terms, branches of nodes, what was left behind.

Pure values. Decided over in `succession.py`, kept in the state by `state.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from protocol.chain import Chain


class Question(msgspec.Struct, frozen=True):
    """Entries asked of a node whose ledger is none of mine: from `first` on, to `height` in the end."""

    first: int
    back: int  # how far to step back when `first` does not continue mine
    height: int
    since: float
    at: float  # when the last Fetch left
    branch: Chain | None = None  # what came so far, verified, behind the common beginning


class Orphaned(msgspec.Struct, frozen=True):
    """Entries that some node held and that this run went on without."""

    name: str
    first: int
    last: int
    rounds: tuple[int, ...]
    term: int
    tip: bytes


class Lineage(msgspec.Struct, frozen=True):
    """Other histories, as far as this coordinator has met them."""

    seen: int = 0  # the highest term anybody proved
    waiting: bool = False  # a successor that has not opened its first round
    force: bool = False  # it does not count who has answered
    since: float = 0.0  # when it began to wait, in this process
    given: int = 0  # entries of the ledger that its operator chose, as far as they are still held
    began: int = 0  # the term in which this coordinator began as a successor, 0: it is none that has begun
    roots: int = 0  # the height it went on from: a branch of others may part from mine up to there
    before: bytes = b""  # whose signing key stood under the last of these entries
    promised: Mapping[bytes, int] = {}  # CURVE key -> the term it answered and keeps on its disk
    questions: Mapping[bytes, Question] = {}  # CURVE key -> what is asked of it
    branches: Mapping[bytes, Chain] = {}  # CURVE key -> its ledger, where that is no beginning of mine
    orphaned: tuple[Orphaned, ...] = ()
