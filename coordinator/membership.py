"""Who is in the pool: node records, whether a Hello is accepted, how a node stands, when a lease ends.

Pure. Every decision is a function that returns the verdict and the reason in words. Called by `leases.py` and
`machine.py`.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from coordinator.cells import MEMBER
from protocol.chain import Chain
from protocol.counting import rounds
from protocol.entries import EntryKind
from protocol.lock import Lock
from protocol.messages import WIRE_VERSION, Hello, Unit

SUSPECT_AFTER = 6.0  # seconds of silence: three missed heartbeats
LOST_AFTER = 15.0  # a lease ends
RESEND_AFTER = 3.0  # an Assign the node's beats do not confirm is sent again
STALL_FACTOR = 5.0  # a unit may stand still for this many usual units
LONGEST_FACTOR = 4.0  # and take this many stall limits in all, whatever progress is told
TELLING = 100  # per mille of a unit from which its progress tells how long the rest takes
PACE_WEIGHT = 0.3  # of the newest unit in a node's average

READY, SUSPECT, LOST, NEW, BEHIND, STALLED, LEFT, PAUSED, QUARANTINED = (
    "ready",
    "suspect",
    "lost",
    "new",
    "catching up",
    "stalled",
    "left",
    "paused",
    "quarantined",
)


class Lease(msgspec.Struct, frozen=True):
    """A unit a node is believed to hold. The first of a node's leases, one per lane, are those it runs.

    `sent`: assigned by this process; otherwise learned from the node, which ran it already.
    """

    unit: Unit
    since: float
    asked: float  # when the Assign left last
    moved: float  # when its progress last changed
    progress: int = 0  # thousandths
    sent: bool = True
    began: float | None = None  # when a lane was free for it; None while it waits


class Node(msgspec.Struct):
    """One key of the pool, as far as this process has seen it.

    A value, like all that a state holds: only a turn changes in place what it has taken for its own.
    """

    key: bytes
    name: str
    number: int | None  # in the roster; None until an entry admits it
    hello: Hello
    heard: float
    height: int  # entries it holds
    tip: bytes = b""  # first 8 bytes of the last of them
    applied: int = -1  # commits its master reflects, -1 unknown
    ms: int = 0  # its last apply
    leases: tuple[Lease, ...] = ()
    pace: float | None = None  # seconds per chunk of a member, in one lane
    stalled: tuple[Unit, int] | None = None  # the unit that stood still, at this progress
    overdue: tuple[Unit, float] | None = None  # the unit that lost its lease to a limit, and when it began
    left: str = ""  # the reason it gave for leaving
    paused: str = ""  # why it takes no work; it has left, and is connected
    astray: int | None = None  # entries its ledger shares with the chain before leaving it; None: all
    quarantined: str = ""  # why it gets no units, by the audits
    accepted: int = 0  # what became of its work, counted since this process started
    late: int = 0
    refused: int = 0
    failed: int = 0
    why: str = ""  # the last decision about its work


TALLY = ("accepted", "late", "refused", "failed")


def tally(node: Node) -> dict[str, int]:
    """What became of its work."""
    return {what: getattr(node, what) for what in TALLY}


class Verdict(msgspec.Struct, frozen=True):
    """A decision and why."""

    ok: bool
    reason: str


# ---------------------------------------------------------------- admission


def admit(hello: Hello, lock: Lock, allowed: bool, selftest: bytes) -> Verdict:
    """Whether a Hello is welcome, its ledger apart. `selftest`: what the pool's kernels answer, if known."""
    if not allowed:
        return Verdict(False, "this key is not on the coordinator's list: ask its operator to allow it")
    if not hello.wire_min <= WIRE_VERSION <= hello.wire_max:
        return Verdict(
            False,
            f"the coordinator speaks wire version {WIRE_VERSION}, this node {hello.wire_min} to "
            f"{hello.wire_max}: install the same release of esnode on both",
        )
    if hello.law != lock.law:
        return Verdict(False, f"the run follows noise law {lock.law}, this node law {hello.law}")
    if hello.run not in (b"", lock.run_id):
        return Verdict(
            False, f"this node works for run {hello.run.hex()[:16]}, this is {lock.run_id.hex()[:16]}"
        )
    if selftest and hello.selftest != selftest:
        return Verdict(
            False,
            f"kernel {hello.backend!r} computes other bits than the pool (self-test {hello.selftest.hex()}, "
            f"the pool's is {selftest.hex()}): run `esnode doctor` there",
        )
    return Verdict(True, "welcome")


def changed(before: Hello, now: Hello) -> str:
    """What a node says of itself anew, in words; "" for nothing that matters to its results."""
    if set(now.fingerprints) <= set(before.fingerprints):
        return ""
    return "an engine of its answers otherwise than before: another batch, device or version"


def base_fits(hello: Hello, chain: Chain) -> Verdict:
    """Whether a node at the start of the run has its base model. Its ledger is a beginning of `chain`."""
    known = chain.digest_at(commits_below(chain, hello.height))
    if hello.digest and commits_below(chain, hello.height) == 0 and hello.digest != known:
        return Verdict(
            False,
            f"this node's base model has digest {hello.digest:016x}, the run starts from {known or 0:016x}: "
            "it is another model or another revision",
        )
    return Verdict(True, "welcome")


def commits_below(chain: Chain, height: int) -> int:
    """How many commits the first `height` entries hold."""
    if height == 0:
        return 0
    last = chain.entries[height - 1]
    return last.round + (last.kind is EntryKind.COMMIT)


# ---------------------------------------------------------------- standing


def standing(node: Node, round: int, now: float) -> tuple[str, str]:
    """How a node stands while `round` is open: its standing and the reason. Only READY gets new units."""
    return hindrance(node, round, now) or (READY, f"after {rounds(node.applied)}")


def hindrance(node: Node, round: int, now: float) -> tuple[str, str] | None:
    """What keeps a node from new units, as `standing` says it; None for nothing."""
    silent = now - node.heard
    if node.paused and silent > LOST_AFTER:  # it would say again and again that it is there
        return LOST, f"{node.paused}, and silent for {silent:.0f} s"
    if node.paused:
        return PAUSED, node.paused
    if node.left:
        return LEFT, node.left
    if silent > LOST_AFTER:
        return LOST, f"silent for {silent:.0f} s"
    if silent > SUSPECT_AFTER:
        return SUSPECT, f"silent for {silent:.0f} s"
    if node.quarantined:
        return QUARANTINED, node.quarantined
    if node.number is None:
        return NEW, "waits for its roster entry"
    if node.astray is not None:
        return BEHIND, f"its ledger leaves the run's at entry {node.astray}: it goes back there"
    if node.applied < round - 1:
        if node.applied < 0:
            return BEHIND, f"it has not rebuilt its replica after {rounds(round)} yet"
        return BEHIND, f"it has applied {node.applied} of {rounds(round)}"
    if node.stalled:
        return STALLED, f"member {node.stalled[0].member} stands still at {node.stalled[1] / 10:.0f}%"
    return None


def alive(node: Node, now: float) -> bool:
    """Whether the node counts as being there at all."""
    return not node.left and node.number is not None and now - node.heard <= LOST_AFTER


# ---------------------------------------------------------------- leases


def usual_seconds(node: Node, unit: Unit, pool: float | None) -> float | None:
    """How long this node usually takes for such a unit; `pool`: the pool's median pace, for newcomers."""
    pace = node.pace or pool
    return None if pace is None else pace * (unit.last - unit.first + 1)


def expiry(node: Node, running: Lease, stall: float, pool: float | None, now: float) -> Verdict:
    """Whether a node's leases end: it is lost, or its running unit stands still for max(stall, 5x usual).

    Or takes for ever, where anybody's pace is known: how long the first unit of a run takes nobody can say.
    """
    silent = now - node.heard
    if silent > LOST_AFTER:
        return Verdict(True, f"silent for {silent:.0f} s")
    usual = usual_seconds(node, running.unit, pool)
    limit = max(stall, STALL_FACTOR * (usual or 0.0))
    began = now if running.began is None else running.began
    still = now - max(running.moved, began)
    if still > limit:
        return Verdict(True, f"no progress for {still:.0f} s, the limit is {limit:.0f} s")
    taken = now - began
    if usual is not None and taken > LONGEST_FACTOR * limit:
        return Verdict(True, f"no result for {taken:.0f} s, the limit is {LONGEST_FACTOR * limit:.0f} s")
    return Verdict(False, "")


def depth(node: Node) -> int:
    """Units a node holds: one running in each lane, and one that waits."""
    return node.hello.lanes + 1


def running(node: Node) -> tuple[Lease, ...]:
    """The leases a node is believed to run."""
    return node.leases[: node.hello.lanes]


def placed(lanes: int, leases: tuple[Lease, ...], now: float) -> tuple[Lease, ...]:
    """These leases of a node; those that came to have a lane free for them begin."""
    for k, lease in enumerate(leases):
        if (lease.began is None) == (k < lanes):
            leases = (*leases[:k], replace(lease, began=now if k < lanes else None), *leases[k + 1 :])
    return leases


def without(leases: tuple[Lease, ...], unit: Unit) -> tuple[Lease | None, tuple[Lease, ...]]:
    """The lease on exactly this unit, None for none, and the others."""
    for k, lease in enumerate(leases):
        if lease.unit == unit:
            return lease, leases[:k] + leases[k + 1 :]
    return None, leases


def overdue(node: Node, running: Lease, now: float) -> tuple[Unit, float]:
    """The unit whose lease ends now, and when it began here, perhaps under a lease that has ended already."""
    if node.overdue is not None and node.overdue[0] == running.unit:
        return node.overdue
    return running.unit, now if running.began is None else running.began


def pace_after(node: Node, unit: Unit, lease: Lease | None, now: float) -> float | None:
    """The node's pace after its result of a unit, leased then or not. Only whole observations of members
    count: also of a unit that was slower than the limits, from which they learn what is usual here.
    """
    began = lease.began if lease is not None and lease.sent else None
    if node.overdue is not None and node.overdue[0] == unit:
        began = node.overdue[1]
    if began is None or unit.kind != MEMBER:
        return node.pace
    return _blended(node.pace, (now - began) / (unit.last - unit.first + 1))


def pace_so_far(node: Node, lease: Lease) -> float | None:
    """The node's pace after a unit that is taken back: from what it said of it, where that is enough.

    A slow node whose units others end first would never be known to be slow.
    """
    began, unit = lease.began, lease.unit
    if began is None or not lease.sent or unit.kind != MEMBER or lease.progress < TELLING:
        return node.pace
    done = lease.progress / 1000 * (unit.last - unit.first + 1)
    return _blended(node.pace, (lease.moved - began) / done) if lease.moved > began else node.pace


def _blended(pace: float | None, seconds: float) -> float:
    return seconds if pace is None else (1 - PACE_WEIGHT) * pace + PACE_WEIGHT * seconds


def median_pace(nodes: list[Node]) -> float | None:
    """The pool's median seconds per chunk, None while nobody has finished a member."""
    paces = sorted(node.pace for node in nodes if node.pace is not None)
    return paces[len(paces) // 2] if paces else None
