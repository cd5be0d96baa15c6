"""Named cases whose transcripts are kept: each returns its world after the run, its docstring is the title.

Called by `transcripts.py`. A case that needs assertions is a test in `test_simulation*.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.events import EntryAppended
from protocol.entries import EntryKind, parse
from protocol.messages import Enrolled
from tests import people, rogues, rulers
from tests.actors import CrashPoint
from tests.network import LOST
from tests.world import World


def quiet_run() -> World:
    """Three nodes, three rounds, nothing happens."""
    world = World(seed=1, nodes=3, rounds=3)
    world.run()
    return world


def commit_flushed_and_not_sent() -> World:
    """The coordinator dies after the flush of a commit, before anybody hears of it: the commit counts."""
    world = World(seed=4, nodes=2, rounds=2)
    died = []

    def crash(records: object) -> CrashPoint | None:
        assert isinstance(records, list)
        entries = [parse(record.raw) for record in records if isinstance(record, EntryAppended)]
        if died or not any(entry.kind is EntryKind.COMMIT for entry in entries):
            return None
        died.append(True)
        world.start(world.coordinator, 1.0)
        return CrashPoint(None, sends=0)

    world.coordinator.crash_when = crash
    world.run()
    return world


def node_killed() -> World:
    """A node is killed in the middle of a round and never returns: its unit runs elsewhere."""
    world = World(seed=7, nodes=2, rounds=2, paces=(0.1, 0.1))
    world.lose("node-1", at=1.0)
    world.run()
    return world


def partition() -> World:
    """Half of the pool is cut off for half a minute: the rest goes on, then all are there again."""
    world = World(seed=30, nodes=4, rounds=9)
    world.network.part({"node-0", "node-1"}, 1.0, 31.0)
    world.run()
    return world


def all_gone() -> World:
    """Every node is gone for a while: the round waits, paused, and goes on."""
    world = World(seed=8, nodes=2, rounds=2)
    for name in world.nodes:
        world.crash(name, at=1.0, down=40.0)
    world.run()
    return world


def disk_full() -> World:
    """The coordinator's disk is full for ten seconds, then the node's."""
    world = World(seed=37, nodes=2, rounds=6)
    world.fill("coordinator", 1.0, 11.0)
    world.fill("node-0", 13.0, 23.0)
    world.run()
    return world


def clocks() -> World:
    """The coordinator's clock goes back a day, a node's jumps forward a day: it costs seconds."""
    world = World(seed=34, nodes=2, rounds=3)
    world.jump("coordinator", at=1.5, seconds=-86_400.0)
    world.jump("node-1", at=2.5, seconds=86_400.0)
    world.run()
    return world


def torn_ledger() -> World:
    """A node comes back with the end of its ledger file cut off and damaged: it fetches the rest again."""
    world = World(seed=39, nodes=2, rounds=5)
    world.crash("node-0", at=4.0, down=1.0)
    world.at(4.5, lambda: world.nodes["node-0"].tear(3, True))
    world.run()
    return world


def one_invite_two_machines() -> World:
    """Two machines use one invite, answers are lost: one is let in, once; the other is told why not."""
    world = World(seed=43, nodes=1, rounds=4)
    key = people.invite(world, at=1.0)
    world.network.hold("new-0", Enrolled, LOST, times=2)
    for name, at in (("new-0", 1.5), ("new-1", 1.6)):
        people.newcomer(world, name, key, at=at, excuses=(people.USED,))
    world.run()
    return world


def revoked_and_back() -> World:
    """A key is put out in the middle of a round and put back later, under a new number."""
    world = World(seed=45, nodes=2, rounds=6)
    people.revoke(world, "node-1", at=2.0)
    people.readmit(world, "node-1", at=6.0)
    world.run()
    return world


def flipped_bit() -> World:
    """A bit turns over in the memory of the only node: found before the next unit, mended by replay."""
    world = World(seed=46, nodes=1, rounds=3)
    world.at(3.0, world.nodes["node-0"].flip)
    world.run()
    return world


def wrong_update() -> World:
    """One node of three computes an update wrongly: replay, not the majority, finds who is at fault."""
    world = World(seed=47, nodes=3, rounds=3)
    world.at(2.0, world.nodes["node-1"].miscompute)
    world.run()
    return world


def two_successors() -> World:
    """Two people start a successor each: the one whom the recent workers answer begins, the other stops."""
    world = World(seed=300, nodes=3, rounds=5, heirs=rulers.HEIRS)
    rulers.two_successors(world, 6.0, ("node-0", "node-1"), ("wait", "wait"), notices=30.0)
    world.run()
    return world


def an_answer_that_is_not_kept() -> World:
    """Of two successors one is answered by a node whose disk is full: that answer counts for neither."""
    world = World(seed=54, nodes=3, rounds=4, paces=(0.1,), heirs=rulers.HEIRS)
    rulers.two_successors(world, 4.0, ("node-0", "node-1"), ("wait", "wait"), notices=20.0)
    world.fill("node-1", 4.0, 14.0)
    world.run()
    return world


def two_ends() -> World:
    """Two forced successors bring the run to two ends: the last words of each name the other's nodes."""
    world = World(seed=55, nodes=4, rounds=4, paces=(0.1,), heirs=rulers.HEIRS)
    rulers.two_successors(world, 4.0, ("node-0", "node-1"), ("force", "force"), notices=100.0, wanders=False)
    world.run()
    return world


def old_coordinator_returns() -> World:
    """A successor has taken over, and the lost coordinator's machine comes back: it meets the new term."""
    world = World(seed=151, nodes=3, rounds=8, heirs=rulers.HEIRS)
    rulers.old_one_returns(world, 6.0, "node-0", back=14.0, notices=40.0)
    world.run()
    return world


def cloned_folder() -> World:
    """Two copies of one data folder sign the same term: found out, then recovered from one of the ledgers."""
    world = World(seed=335, nodes=4, rounds=12, paces=(0.1,), heirs=rulers.HEIRS)
    rulers.cloned_folder(world, 6.0, notices=25.0)
    world.crash("coordinator", at=6.1, down=0.5)
    world.run()
    return world


def sybils_hide_commits() -> World:
    """Two nodes of three claim an old beginning only: without the third they stand for too little work."""
    world = World(seed=51, nodes=3, rounds=6, paces=(0.04, 2.0, 2.0))
    rulers.sybils(world, 9.0, ("node-1", "node-2"), "node-1")
    world.run()
    return world


def false_replay() -> World:
    """A machine's kernel errs in every replay: both sides are confirmed, the run stops and names them.

    The operator takes the machine away and starts again.
    """
    world = World(seed=56, nodes=3, rounds=3)
    rogues.insist(world, "node-1", 2.0)
    world.run()
    return world


def silent_in_a_dispute() -> World:
    """The node whose replica is wrong answers no question about it: it is sent away, the others go on."""
    world = World(seed=57, nodes=3, rounds=3)
    rogues.fall_silent(world, "node-1")
    world.at(2.0, world.nodes["node-1"].miscompute)
    world.run()
    return world


def word_taken_back() -> World:
    """A node says another digest of a state it told long ago: the ledger has the right one, it is noted."""
    world = World(seed=58, nodes=2, rounds=4)
    rogues.recant(world, ["node-1"], 7.0)
    world.run()
    return world


def reward_measured_again() -> World:
    """A node at fault loses its rewards of the open round: they are measured, and audited, again."""
    world = World(seed=52, nodes=2, rounds=3, ops={"audit_share": 1.0})
    for at in (2.0, 4.0):
        world.at(at, world.nodes["node-1"].flip)
    world.run()
    return world


def paused_node() -> World:
    """The owner pauses a node in the middle of a round: its unit goes elsewhere, later it is back."""
    world = World(seed=53, nodes=2, rounds=4)
    world.pause("node-1", at=1.5, seconds=6.0)
    world.run()
    return world


CASES: dict[str, Callable[[], World]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        quiet_run,
        commit_flushed_and_not_sent,
        node_killed,
        partition,
        all_gone,
        disk_full,
        clocks,
        torn_ledger,
        one_invite_two_machines,
        revoked_and_back,
        flipped_bit,
        wrong_update,
        two_successors,
        an_answer_that_is_not_kept,
        two_ends,
        old_coordinator_returns,
        cloned_folder,
        sybils_hide_commits,
        false_replay,
        silent_in_a_dispute,
        word_taken_back,
        reward_measured_again,
        paused_node,
    )
}
