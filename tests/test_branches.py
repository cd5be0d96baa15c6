"""A node among several coordinators: whose term it answers, what ends its trust, how it leaves a branch."""

from __future__ import annotations

from pathlib import Path

from esnode import events
from esnode.events import Apply, Evaluate, Orphan, Rewind, Send, Store, StoreTerm
from esnode.notebook import Notebook
from protocol import ledger as ledgers
from protocol.entries import Admission, EndBody, Entry, RosterBody, seal
from protocol.messages import Assign, Commit, Entries, Fetch, Hello, NodeBeat, Return
from tests.bench import LOCK, OUTCOME, Bench, ledger, unit_of, welcome_of, working
from tests.desk import NONCE, SIGNING_KEY, key_of

ENTRIES = ledger(LOCK.digest, 55, 66)  # lock, roster, commits 0, 1, 2
OTHER_KEY, OTHER_NONCE = bytes(32), b"another!"


def later(parent: Entry, term: int = 2, nonce: bytes = OTHER_NONCE) -> Entry:
    """A successor's entry on `parent`, which closed round 0 with D 55."""
    body = RosterBody((Admission(1, key_of("m"), "m"),))
    return seal(body, parent=parent.hash, term=term, nonce=nonce, round=1, digest=55, key=SIGNING_KEY)


def at_the_tip() -> Bench:
    """Joined, with all entries applied."""
    bench = Bench(ENTRIES)
    bench.step(events.EntriesApplied(bench.now, (LOCK.digest, LOCK.digest, 55, 66, 77), 3))
    bench.hear(welcome_of(2, OTHER_NONCE, SIGNING_KEY, 4))
    return bench


# ---------------------------------------------------------------- terms


def test_a_term_is_answered_with_its_key_and_start() -> None:
    bench = Bench()
    bench.hear(welcome_of(3, NONCE, SIGNING_KEY))
    (stored,) = bench.all(StoreTerm)
    assert stored.term == 3 and bench.state.joined
    again = Bench(term=3, proof=stored.proof)
    assert (again.sent(Hello)[0].term, again.sent(Hello)[0].proof) == (3, stored.proof)


def test_the_same_term_of_another_start_or_key_is_refused_and_named() -> None:
    for nonce, seed in ((OTHER_NONCE, SIGNING_KEY), (NONCE, OTHER_KEY)):
        bench = Bench()
        bench.hear(welcome_of(3, NONCE, SIGNING_KEY))
        bench.tick(11)  # the coordinator is silent, and then another one answers
        bench.hear(welcome_of(3, nonce, seed))
        assert not bench.state.joined and not bench.all(StoreTerm)
        (note,) = bench.all(events.Note)
        assert NONCE.hex() in note.fields["reason"] and nonce.hex() in note.fields["reason"]


def test_a_term_that_is_not_proved_is_ignored() -> None:
    bench = Bench()
    real = welcome_of(3, NONCE, SIGNING_KEY)
    forged = type(real)(real.wire, real.run, real.lock, 9, 0, b"", real.proof)
    bench.hear(forged)
    assert not bench.state.joined and not bench.all(StoreTerm)


def test_nothing_is_taken_from_a_coordinator_whose_welcome_was_not() -> None:
    bench = Bench(term=3)
    bench.hear(welcome_of(2, NONCE, SIGNING_KEY))
    bench.hear(Entries(0, tuple(entry.raw for entry in ENTRIES[:2])))
    bench.hear(Commit(0, ENTRIES[0].raw))
    bench.hear(Assign(unit_of(), ENTRIES[0].hash[:8], 15))
    assert not bench.state.chain.height and not bench.state.queue


# ---------------------------------------------------------------- entries for others


def test_a_node_gives_its_entries_to_whoever_asks() -> None:
    bench = Bench(ENTRIES)
    bench.hear(Fetch(1, 2))
    assert bench.sent(Entries) == [Entries(1, (ENTRIES[1].raw, ENTRIES[2].raw))]
    bench.hear(Fetch(5, 9))
    assert not bench.all(Send), "it holds none of those"


# ---------------------------------------------------------------- branches


def test_one_term_that_signs_two_histories_stops_the_node_with_both() -> None:
    bench = at_the_tip()
    twin = later(ENTRIES[2], term=1, nonce=OTHER_NONCE)
    bench.hear(Commit(3, twin.raw))
    assert bench.stop is not None and bench.stop.code == 1
    for part in (twin.hash, ENTRIES[3].hash, OTHER_NONCE, NONCE):
        assert part.hex() in bench.stop.reason


def test_an_entry_of_another_term_makes_nobody_leave() -> None:
    bench = at_the_tip()
    bench.hear(Commit(3, later(ENTRIES[2]).raw))
    assert bench.state.chain.tip == ENTRIES[-1].hash and not bench.stop


def test_a_node_goes_back_to_the_last_common_entry_and_keeps_what_it_leaves() -> None:
    bench = at_the_tip()
    new = later(ENTRIES[2])
    bench.hear(Return(2, 3, new.raw))
    assert [type(effect) for effect in bench.effects] == [Orphan, events.Note, Store, Rewind]
    assert bench.all(Orphan) == [Orphan(3, (ENTRIES[3].raw, ENTRIES[4].raw))]
    assert bench.all(events.Note)[0].fields["rounds"] == [1, 2]
    bench.step(events.Rewound(bench.now, 0, LOCK.digest, 3))
    assert bench.all(Apply)[0].entries == tuple(ENTRIES[:3])
    assert bench.state.chain.tip == new.hash
    bench.tick(3)
    assert bench.sent(NodeBeat)[0].tip == new.hash[:8]


def test_a_replica_that_reflects_no_orphan_stays() -> None:
    bench = working(ENTRIES[:2])
    bench.step(events.Evaluated(bench.now, unit_of(), OUTCOME))
    bench.hear(Commit(2, ENTRIES[2].raw))
    bench.step(events.EntriesApplied(bench.now, (55,), 3))
    bench.hear(welcome_of(2, OTHER_NONCE, SIGNING_KEY))
    roster = later(ENTRIES[2], term=1, nonce=NONCE)
    bench.hear(Commit(3, roster.raw))
    end = seal(
        EndBody("done"),
        parent=ENTRIES[2].hash,
        term=2,
        nonce=OTHER_NONCE,
        round=1,
        digest=55,
        key=SIGNING_KEY,
    )
    bench.hear(Return(2, 3, end.raw))
    assert bench.all(Orphan) == [Orphan(3, (roster.raw,))] and not bench.all(Rewind)
    assert bench.state.chain.ended and not bench.all(Evaluate)


def test_no_branch_is_left_for_an_older_term_or_a_false_entry() -> None:
    bench = at_the_tip()
    bench.hear(Return(1, 3, later(ENTRIES[2]).raw))
    stranger = seal(
        EndBody("x"), parent=ENTRIES[2].hash, term=2, nonce=NONCE, round=1, digest=55, key=OTHER_KEY
    )
    bench.hear(Return(2, 3, stranger.raw))
    bench.hear(Return(2, 2, later(ENTRIES[2]).raw))
    assert bench.state.chain.tip == ENTRIES[-1].hash and not bench.stop
    same = Bench(ENTRIES)
    same.hear(welcome_of(1, NONCE, SIGNING_KEY))
    same.hear(Return(1, 3, later(ENTRIES[2]).raw))
    assert same.state.chain.tip == ENTRIES[-1].hash, "its own coordinator's branch"


# ---------------------------------------------------------------- the disk


def test_orphans_are_a_ledger_of_their_own(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path / "n", LOCK.run_id)
    notebook.store(0, [entry.raw for entry in ENTRIES])
    kept = notebook.orphan(3, [entry.raw for entry in ENTRIES[3:]])
    notebook.store(3, [later(ENTRIES[2]).raw])
    notebook.store_term(7, bytes(104))
    notebook.close()
    assert ledgers.read(kept).chain.tip == ENTRIES[-1].hash
    again = Notebook(tmp_path / "n", LOCK.run_id)
    assert len(again.raws) == 4 and (again.term, again.proof) == (7, bytes(104))
    again.close()
