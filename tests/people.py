"""What the simulator's operator and newcomers do: invites, machines that join a run, keys put out.

Functions on a world. An order reaches the coordinator over its administration socket; whoever gets no answer
tries again. Called by cases and by `sweep.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import coordinator.events as ce
from coordinator.state import State
from protocol.messages import RUN_ENDED
from tests.actors import SimCoordinator
from tests.larder import entries_held
from tests.simnode import SimNode
from tests.world import World

AGAIN = 0.7  # seconds between attempts
HOUR = 3600.0
PATIENCE = 20.0  # seconds until the operator forces a successor
REVOKED = "revoked"
LOST_WITH_THE_JOURNAL = ("needs an invite", "not on the coordinator's list")
USED = "was used by another machine"


def order(
    world: World, at: float, done: Callable[[State], bool], make: type[ce.Event], *fields: object
) -> None:
    """Give the coordinator an order until it is done or the run is over."""

    def give() -> None:
        actor = world.coordinator
        if actor.up and not done(actor.state):
            actor.order(make(actor.clock, *fields))
        if not world.checkers.ended and not (actor.up and done(actor.state)):
            world.after(AGAIN, give)

    world.at(at, give)


def invite(world: World, at: float, *, uses: int = 1, hours: float = 24.0) -> bytes:
    """Make an invite; the public half of its one-time key stands for its text."""
    count = len(world.invites)
    key = hashlib.blake2b(f"invite {count}".encode(), digest_size=32).digest()
    world.invites.append(key)
    expires = int(world.wall_at(at) + hours * HOUR)
    order(world, at, lambda state: key in state.guests.invites, ce.InviteMade, key, expires, uses)
    return key


def newcomer(
    world: World, name: str, invite: bytes, at: float, pace: float = 0.1, excuses: tuple[str, ...] = ()
) -> None:
    """A machine with a key of its own joins by an invite, once there is one.

    `excuses`: what it may be refused with, beside the run's end.
    """

    def come() -> None:
        if world.checkers.ended:
            return
        if not (world.coordinator.up and invite in world.coordinator.state.guests.invites):
            return world.after(AGAIN, come)
        key = hashlib.blake2b(name.encode(), digest_size=32).digest()
        sim = SimNode(world, name, key, pace)
        sim.invite = invite
        world.excuse(RUN_ENDED, "its holder was revoked", *excuses, name=name)
        world.enter(sim)

    world.at(at, come)


def recover(
    world: World,
    at: float,
    source: str,
    *,
    name: str = "heir",
    force: bool = False,
    moving: float = 1.0,
    own: bool = False,
) -> None:
    """The coordinator's machine is lost; somebody starts a successor from a node's ledger file.

    Nodes find it one after the other, within `moving` seconds (the name in their invite points there). `own`:
    it signs with the lost coordinator's key, of which there was a copy.
    """

    def begin() -> None:
        raws = [entry.raw for entry in entries_held(world.nodes[source])]
        if not raws or world.checkers.ended:
            return world.log("world", f"{source} holds no ledger that can go on") if not raws else None
        old = world.coordinator
        old.kill()
        old.stopped = ("its machine is lost", 0)
        world.gone.add(old.name)
        world.checkers.journal_lost(name)
        world.excuse(*LOST_WITH_THE_JOURNAL)
        heir = SimCoordinator(world, name, world.signing_key if own else world.heir_key)
        heir.recover = "force" if force else "wait"
        heir.journal = [ce.EntryAppended(height, raw) for height, raw in enumerate(raws)]
        world.coordinator = world.coordinators[name] = heir
        world.start(heir, 0.0)
        for node in world.nodes.values():
            world.after(world.random.uniform(0, moving), partial(setattr, node, "home", name))

    def insist() -> None:
        """Whoever evaluated most is not coming back: the operator says so."""
        heir = world.coordinators.get(name)
        if heir is not None and heir.state.lineage.waiting:
            heir.recover = "force"
            heir.kill()
            world.start(heir, 0.5)

    world.at(at, begin)
    if world.faults.until:
        world.at(world.faults.until + PATIENCE, insist)


def revoke(world: World, name: str, at: float, reason: str = "sold") -> None:
    """Take a node's key off the list: whatever it does afterwards, it does not belong any more."""
    world.excuse(REVOKED, name=name)

    def put_out() -> None:
        if name in world.nodes:
            key = world.nodes[name].key
            gone = lambda state: key not in state.allowed  # noqa: E731
            order(world, at, gone, ce.NodeRevoked, key, reason)

    world.at(at, put_out)


def readmit(world: World, name: str, at: float) -> None:
    """Put a revoked key back on the list; somebody starts the node again."""

    def put_back() -> None:
        sim = world.nodes[name]
        order(world, at, lambda state: sim.key in state.allowed, ce.NodeAllowed, sim.key, name)
        world.start(sim, 2 * AGAIN)

    world.at(at, put_back)


def amend(world: World, at: float, from_round: int, **settings: float | int | None) -> None:
    """Ask for other settings from a round on; an order that comes too late is refused."""
    fields = [settings.get(name) for name in ("alpha", "sigma", "members")]

    def give() -> None:
        actor = world.coordinator
        if actor.up:
            actor.order(ce.AmendAsked(actor.clock, from_round, *fields))  # type: ignore[arg-type]
        elif not world.checkers.ended:
            world.after(AGAIN, give)

    world.at(at, give)
