"""Nodes that go against the replica proof: one insists, one is silent, one takes back what it said.

Functions on a world. Each also says what must come of it, which `World.must` checks after the run. A node
that insists is a machine whose kernel errs at one update, in every replay. Called by cases and `mischief.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from protocol.messages import Applied, Message, Rederived, TensorDigests
from tests.checkers import require
from tests.replica import digest_of
from tests.world import World

LOOK = 0.5  # seconds between the operator's looks
REPLACED = 2.0  # seconds until he has taken a machine away
BOTH = "replay confirms both"
SILENT = "has not answered in a dispute"
SIDE = re.compile(r"([\w-]+) has [^(]*\(D ([0-9a-f]{16});")
LONGEST = 150.0  # seconds a dispute may last with somebody silent in it


def insist(world: World, name: str, at: float) -> None:
    """One update of a node comes out wrong, and so does each of its replays.

    As soon as it has said so, and somebody the contrary, the run stops and names both; its operator takes
    the machine away and goes on. No wrong digest is ever signed (`Checkers.honest`).
    """
    sim = world.nodes[name]
    world.excuse(BOTH)
    world.minded = True
    confirmed: list[bool] = []

    def listen(message: Message) -> None:
        if isinstance(message, Rederived) and message.held and message.held == message.derived:
            if message.since:
                return  # a checkpoint alone stops nothing
            state = sim.state
            known = world.checkers.tree.known[state.chain.entries[state.applied - 1].hash]
            confirmed.append(message.digest != digest_of(known.master))

    def err() -> None:
        sim.insists = True
        sim.miscompute()

    def look() -> None:
        words = world.coordinator.stopped
        if words is not None and BOTH in words[0]:
            _names(world, name, words[0])
            world.lose(name, world.now)
            return world.restart(world.now + REPLACED)
        if not world.checkers.ended:
            world.after(LOOK, look)

    def told() -> None:
        stopped = any(BOTH in words for _, words in world.stops)
        require(stopped == any(confirmed), f"{name} insists: {any(confirmed)}; the run stops: {stopped}")

    sim.ears.append(listen)
    world.at(at, err)
    world.at(at, look)
    world.must.append(told)


def _names(world: World, name: str, words: str) -> None:
    """The last words name who insists, and nobody else with a digest that is not the state's."""
    master = world.checkers.tree.known[world.coordinator.state.chain.tip].master
    right = f"{digest_of(master):016x}"
    sides = dict(SIDE.findall(words))
    wrong = {node for node, digest in sides.items() if digest != right}
    require(wrong == {name} and len(sides) == 2, f"{name} insists, the last words name {sides} for {right}")


def fall_silent(world: World, name: str) -> None:
    """A node answers no question of a dispute: it is sent away, and nothing waits for it any longer."""
    world.nodes[name].mute = (TensorDigests, Rederived)
    world.excuse(SILENT, name=name)

    def bounded() -> None:
        for who, kind, fields in world.notes:
            if kind == "dispute" and fields.get("what") == "settled":
                seconds = fields["seconds"]
                require(seconds < LONGEST, f"{who} settles a dispute after {seconds:.0f} s, {name} is silent")

    world.must.append(bounded)


def recant(world: World, names: Sequence[str], at: float) -> None:
    """Nodes say another digest of a state they told long ago: it is noted by name, that is all."""

    def say(name: str) -> None:
        sim, chain = world.nodes[name], world.nodes[name].state.chain
        if not (sim.up and sim.state.joined and chain.round > 1):
            return None if world.checkers.ended else world.after(LOOK, partial(say, name))
        height = chain.entries.index(chain.commits[0])
        told = chain.digest_at(1)
        assert told is not None
        world.log(name, f"says digest {told ^ 1:016x} after 1 rounds, where the ledger has {told:016x}")
        word = Applied(height + 1, chain.entries[height].hash[:8], told ^ 1, 1)
        world.send(name, sim.key, word)

    def harmless() -> None:
        differ = [f for _, kind, f in world.notes if kind == "dispute" and f.get("what") == "differs"]
        wrong = {fields["node"] for fields in differ} - {*names, *world.checkers.faulty}
        require(not wrong, f"{wrong} are said to differ from the ledger")
        away = [words for name, words in world.stops if name in names and "at fault" in words]
        require(not away or bool(world.checkers.faulty) or world.checkers.flipped, f"sent away: {away}")

    for name in names:
        world.at(at, partial(say, name))
    world.must.append(harmless)
