"""More coordinators than one: successors side by side, a copied data folder, a lost one that comes back.

Functions on a world, and the `Operator` who has to sort it out: nodes wander between the coordinators until
he notices, then he keeps the one with the strongest chain, retires the others and sends all nodes to it. When
that one stops because two histories were signed, he does what its last words say: recovers from the ledger he
keeps. Called by `sweep.py` and by cases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import coordinator.events as ce
import esnode.events as ne
from protocol.entries import parse, public_key
from protocol.messages import Rehello
from tests import people
from tests.actors import COORDINATOR, SimCoordinator
from tests.larder import entries_held
from tests.world import World

LOOK = 0.5  # seconds between the operator's looks
KEYS = tuple(hashlib.blake2b(word.encode(), digest_size=32).digest() for word in ("heir", "other", "third"))
HEIRS = tuple(public_key(key) for key in KEYS)  # for the lock of such a world
# With what a coordinator may stop while there are several, and with it its nodes.
TWICE = ("signed two histories", "two copies of this coordinator")
YIELDS = "another coordinator has taken"


def rank(actor: SimCoordinator) -> tuple[int, int]:
    """Term and height of what its journal holds."""
    chain = actor.recall().chain
    return chain.term, chain.height


class Operator:
    """Sends nodes about, and decides at last who rules."""

    def __init__(self, world: World, notices: float, own: bool = False) -> None:
        """`notices`: when he sees that there is more than one. `own`: he has a copy of the first key."""
        self.world = world
        self.keys = [world.signing_key] * own + list(KEYS)
        self.ruler: SimCoordinator | None = None  # the one he decided for
        self.successors = 0
        world.minded = True
        world.excuse(*people.LOST_WITH_THE_JOURNAL, *TWICE)
        world.at(notices, self._decide)

    def admit(self, actor: SimCoordinator) -> None:
        """One more coordinator."""
        world = self.world
        world.coordinators[actor.name] = actor
        for name in (actor.name, COORDINATOR):
            world.excuse(YIELDS, name=name)

    def successor(self, raws: Sequence[bytes], how: str) -> SimCoordinator:
        """`--recover-from` on a ledger, with a signing key that no successor used yet."""
        self.successors += 1
        name = f"heir-{self.successors}"
        heir = SimCoordinator(self.world, name, self.keys.pop(0))
        heir.recover = how
        heir.journal = [ce.EntryAppended(height, raw) for height, raw in enumerate(raws)]
        self.world.checkers.journal_lost(name)
        self.admit(heir)
        self.world.start(heir, 0.0)
        return heir

    def retire(self, actor: SimCoordinator) -> None:
        actor.kill()
        actor.stopped = actor.stopped or ("retired", 0)
        self.world.gone.add(actor.name)

    def wander(self, begin: float, end: float, names: Sequence[str]) -> None:
        """Now and then each node connects to another coordinator: its address leads there, or its cache."""
        chance = self.world.random

        def move(node: str) -> None:
            if self.ruler is None:
                self.send(node, chance.choice(list(names)))
                self.world.after(chance.uniform(1, 12), partial(move, node))

        for node in list(self.world.nodes):
            self.world.at(chance.uniform(begin, end), partial(move, node))

    def send(self, node: str, home: str) -> None:
        """A node connects to this coordinator, who does not know it yet."""
        sim = self.world.nodes[node]
        if sim.home != home:
            sim.home = home
            if sim.up and sim.state.now:
                sim.step(ne.Received(sim.clock, Rehello()))

    def _decide(self) -> None:
        world = self.world
        everybody = [actor for name, actor in world.coordinators.items() if name not in world.gone]
        living = [actor for actor in everybody if not (actor.stopped and actor.stopped[1])]
        begun = [actor for actor in living if not actor.state.lineage.waiting]
        if all(world.checkers.over(sim.disk.raws) for sim in world.nodes.values()):
            # nobody works for another any more
            begun = [actor for actor in begun if actor.recall().chain.ended] or begun
        twice = any(actor.stopped and "two histories" in actor.stopped[0] for actor in everybody)
        if begun and not twice:
            self._crown(max(begun, key=rank))
        elif living and not twice:
            self._crown(living[0])
        else:
            self._recover()
        world.after(LOOK, self._mind)

    def _crown(self, ruler: SimCoordinator) -> None:
        world = self.world
        world.log("operator", f"{ruler.name} rules")
        self.ruler = world.coordinator = ruler
        for actor in list(world.coordinators.values()):
            if actor is not ruler and actor.name not in world.gone:
                self.retire(actor)
        for name, sim in world.nodes.items():
            world.after(world.random.uniform(0, 1), partial(self.send, name, ruler.name))
            if not sim.up:
                world.start(sim, 1.0)
        world.start(ruler, 0.0)

    def _recover(self) -> None:
        """From the ledger that is kept: the strongest of any node's. Without any the ruler starts again."""
        world = self.world
        ledgers = [[entry.raw for entry in entries_held(sim)] for sim in world.nodes.values()]
        kept = max(ledgers, key=lambda raws: (parse(raws[-1]).term if raws else -1, len(raws)))
        if not kept:
            return self._crown(self.ruler or world.coordinator)
        for actor in list(world.coordinators.values()):
            if actor.name not in world.gone:
                self.retire(actor)
        self._crown(self.successor(kept, "wait"))

    def _mind(self) -> None:
        """As long as the run goes on: a ruler who stopped is followed, one that waits in vain is forced."""
        world, ruler = self.world, self.ruler
        if ruler is None or world.finished:
            return
        if ruler.stopped and ruler.stopped[1]:
            if self.keys:
                self._recover()
            elif not world.coming:
                world.start(ruler, 1.0)  # as its last words say: once more, it takes a higher term then
        elif world.now > world.faults.until + people.PATIENCE and ruler.state.lineage.waiting:
            if ruler.recover != "force":
                ruler.recover = "force"
                ruler.kill()
                world.start(ruler, 0.5)
        elif not ruler.up and not ruler.stopped and not world.coming:
            world.start(ruler, 0.0)
        for name, sim in world.nodes.items():
            if sim.home != ruler.name:
                self.send(name, ruler.name)
            if sim.stopped and any(words in sim.stopped[0] for words in TWICE) and not world.coming:
                world.start(sim, 1.0)  # the last words of one who rules no more came after the decision
        world.after(LOOK, self._mind)


def two_successors(
    world: World,
    at: float,
    sources: Sequence[str],
    hows: Sequence[str],
    notices: float,
    wanders: bool = True,
    own: bool = False,
) -> None:
    """The coordinator's machine is lost; two people start a successor each, from these nodes' ledgers.

    Nodes wander between the two, or each stays with one of them.
    """
    operator = Operator(world, notices, own)

    def begin() -> None:
        ledgers = [[entry.raw for entry in entries_held(world.nodes[name])] for name in sources]
        if world.checkers.ended or not all(ledgers):
            return
        operator.retire(world.coordinator)
        heirs = [operator.successor(raws, how) for raws, how in zip(ledgers, hows, strict=True)]
        world.coordinator = heirs[0]
        if wanders:
            return operator.wander(at, at + 3.0, [heir.name for heir in heirs])
        for k, name in enumerate(world.nodes):
            operator.send(name, heirs[k % 2].name)

    world.at(at, begin)


def old_one_returns(
    world: World, at: float, source: str, back: float, notices: float, own: bool = False
) -> None:
    """A successor has taken over, then the lost coordinator's machine is found and started again."""
    operator = Operator(world, notices, own)
    old = world.coordinator

    def begin() -> None:
        raws = [entry.raw for entry in entries_held(world.nodes[source])]
        if world.checkers.ended or not raws:
            return
        operator.retire(old)
        world.coordinator = heir = operator.successor(raws, "wait")
        for name in world.nodes:
            world.after(world.random.uniform(0, 2), partial(operator.send, name, heir.name))
        world.at(back, partial(come, heir))

    def come(heir: SimCoordinator) -> None:
        if operator.ruler is None and not world.checkers.ended:
            world.gone.discard(old.name)
            world.start(old, 0.0)
            operator.wander(back, back + 5.0, [heir.name, old.name])

    world.at(at, begin)


def cloned_folder(world: World, at: float, notices: float) -> None:
    """The data folder is copied while it is in use, and the copy is started, too."""
    operator = Operator(world, notices)
    first = world.coordinator

    def begin() -> None:
        if world.checkers.ended:
            return
        twin = SimCoordinator(world, "clone", first.key)
        twin.journal = list(first.journal)
        world.checkers.journal_copied(first.name, twin.name)
        operator.admit(twin)
        world.start(twin, 0.0)
        operator.wander(at, at + 8.0, [first.name, twin.name])

    world.at(at, begin)


def sybils(world: World, at: float, names: Sequence[str], source: str, own: bool = False) -> None:
    """Nodes of one owner claim to hold an old beginning only, as the coordinator's machine is lost."""

    def hide() -> None:
        for name in names:
            sim = world.nodes[name]
            sim.kill()
            sim.tear(world.random.randint(1, max(1, len(sim.disk.raws))), False)
            world.start(sim, world.random.uniform(0.2, 2.0))

    world.at(at - 0.01, hide)
    people.recover(world, at, source, moving=2.0, own=own)
