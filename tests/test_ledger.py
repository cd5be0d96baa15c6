"""The ledger: what a chain takes and refuses, damage found wherever it is, files that survive a crash."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import math
import pickle
import random
import resource
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esnode.notebook import refuse_if_over
from protocol import chain as chain_module
from protocol import shaping
from protocol.bodies import step_of
from protocol.chain import BrokenChain, Chain
from protocol.counting import rounds
from protocol.entries import (
    MAX_BODY,
    QUORUM,
    Admission,
    AmendBody,
    Body,
    CommitBody,
    EndBody,
    Entry,
    EntryKind,
    LockBody,
    MalformedEntry,
    MemberReward,
    RosterBody,
    ScoreBody,
    parse,
    public_key,
    seal,
    signed_by,
    unpacked,
)
from protocol.forks import check_fork
from protocol.ledger import MAGIC, LedgerError, LedgerFile, ends, read, read_bytes
from protocol.lock import Parent, TensorSpec
from protocol.seeds import member_seed, rounding_seed
from tests.ledgers import KEY, NODE, OTHER_KEY, Writer, small_ledger, small_lock

HEAD = {"parent": bytes(32), "term": 1, "nonce": b"nonce---", "round": 0, "digest": 5, "key": KEY}


def refused(writer: Writer, item: Body | Entry | bytes, **changes: Any) -> str:
    """The reason why the chain does not take it; the chain must be left as it was."""
    entry = item if isinstance(item, Entry | bytes) else writer.seal(item, **changes)
    before = {name: repr(value) for name, value in vars(writer.chain).items()}
    with pytest.raises(BrokenChain) as caught:
        writer.chain.append(entry)
    assert {name: repr(value) for name, value in vars(writer.chain).items()} == before
    assert caught.value.round == writer.chain.round
    return caught.value.reason


@pytest.fixture
def running() -> Writer:
    """Two commits in, D of the tip known through a score."""
    return small_ledger(rounds=2, end=False)


# ---------------------------------------------------------------- entries

SMALL = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=32, max_size=32)
FLOATS = st.floats(allow_nan=False)
WORDS = st.text(max_size=30)
BODIES = st.one_of(
    st.builds(LockBody, st.binary(max_size=200)),
    st.builds(
        CommitBody, FLOATS, FLOATS,
        st.lists(st.builds(MemberReward, SMALL, FLOATS, SMALL), max_size=5).map(tuple),
        st.lists(st.tuples(SMALL, WORDS), max_size=3).map(tuple),
        st.sampled_from([0, 1]), st.sampled_from([b"", b"s" * 32]),
    ),
    st.builds(
        RosterBody, st.lists(st.builds(Admission, SMALL, KEYS, WORDS), max_size=3).map(tuple),
        st.lists(SMALL, max_size=3).map(tuple),
    ),
    st.builds(
        AmendBody, U32, st.none() | FLOATS, st.none() | FLOATS, st.none() | SMALL,
        st.lists(KEYS, max_size=2).map(tuple),
    ),
    st.builds(ScoreBody, U32, U32, FLOATS, U32, st.lists(FLOATS, max_size=4).map(tuple)),
    st.builds(EndBody, WORDS),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(BODIES, U32, U32, U64)
def test_sealed_entries_read_back(body: Body, term: int, round: int, digest: int) -> None:
    entry = seal(body, parent=b"p" * 32, term=term, nonce=b"12345678", round=round, digest=digest, key=KEY)
    assert parse(entry.raw) == entry
    assert entry.body == body
    assert (entry.term, entry.round, entry.digest, entry.parent) == (term, round, digest, b"p" * 32)


def test_the_bytes_are_the_documented_ones() -> None:
    """docs/ledger-format.md, read by hand: a stranger's reader must come to the same."""
    body = CommitBody(0.5, 0.25, (MemberReward(0, -1.5, 2), MemberReward(1, 1.0, 2)), ((2, "no"),), 1, b"")
    raw = seal(body, **HEAD).raw
    length = int.from_bytes(raw[:4], "little")
    packed, digest, signature = raw[4 : 4 + length], raw[4 + length : 36 + length], raw[36 + length :]
    rows = bytes.fromhex("0000 000000000000f8bf 0200 0100 000000000000f03f 0200")
    assert packed == msgpack.packb(
        [1, bytes(32), 1, b"nonce---", 0, 5, 0.5, 0.25, rows, [[2, "no"]], 1, b""], use_bin_type=True
    )
    assert digest == hashlib.blake2b(packed, digest_size=32).digest()
    assert len(signature) == 64 and len(raw) == 4 + length + 32 + 64
    assert seal(body, **HEAD).raw == raw, "Ed25519 signatures repeat"


def test_golden_entry() -> None:
    """Chain format 1. Another hash means another format."""
    entry = seal(EndBody("done"), **HEAD)
    assert entry.hash.hex() == "2c81edcf2e868b2878a8469c152d5e6f35f6a308d001d2d8625ab3eeba785ac6"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ([9, bytes(32), 1, b"nonce---", 0, 5, "x"], "unknown entry kind 9"),
        ([5, bytes(31), 1, b"nonce---", 0, 5, "x"], "out of its type"),
        ([5, bytes(32), 1, b"nonce---", 0, 5], "out of its type"),
        ([5, bytes(32), 1, b"nonce---", 0, 5, "x", 0], "out of its type"),
        ([5, bytes(32), -1, b"nonce---", 0, 5, "x"], "out of its type"),
        ([5, bytes(32), 1, b"nonce---", 2**32, 5, "x"], "out of its type"),
        ([5, bytes(32), 1, b"nonce---", 0, 5, b"x"], "out of its type"),
        ([5, bytes(32), 1, b"nonce---", 0, 5, "x" * 501], "out of its type"),
        ([1, bytes(32), 1, b"nonce---", 0, 5, 1, 0.5, b"", [], 0, b""], "canonical"),
        ([1, bytes(32), 1, b"nonce---", 0, 5, 0.5, 0.5, b"x" * 21, [], 0, b""], "member table"),
        ([1, bytes(32), 1, b"nonce---", 0, 5, 0.5, 0.5, b"", [], 2, b""], "closing code"),
        ([1, bytes(32), 1, b"nonce---", 0, 5, 0.5, 0.5, b"", [], 0, b"x"], "snapshot root"),
        ({}, "unknown entry kind"),
        ([True, bytes(32)], "unknown entry kind"),
    ],
)  # fmt: skip
def test_malformed_bodies(fields: Any, says: str) -> None:
    raw = unpacked(msgpack.packb(fields) + bytes(64))
    with pytest.raises(MalformedEntry, match=says):
        parse(raw)


def test_long_words_are_cut_and_wrong_fields_never_signed() -> None:
    entry = seal(EndBody("x" * 900 + "\udc00"), **HEAD)
    assert isinstance(entry.body, EndBody) and len(entry.body.reason) == 500
    row = MemberReward(0, 0.0, 1)
    for body in (
        CommitBody(0.1, 0.1, (row._replace(index=2**16),)),
        CommitBody(0.1, 0.1, (row._replace(evaluator=-1),)),
        CommitBody(0.1, 0.1, (row,), snapshot=b"short"),
        RosterBody((Admission(1, b"short", "x"),)),
        LockBody(bytes(MAX_BODY)),
    ):
        with pytest.raises(MalformedEntry):
            seal(body, **HEAD)


# ---------------------------------------------------------------- the chain


def test_a_whole_run(running: Writer) -> None:
    chain = running.chain
    assert (chain.round, chain.height, chain.ended, chain.term) == (2, 6, False, 1)
    assert chain.roster == {1: (NODE, "ada")}
    assert [chain.digest_at(k) for k in range(4)] == [1000, 1001, 1002, None]
    assert chain.tip == chain.entries[-1].hash and chain.lock == running.lock
    running.add(EndBody("done"))
    assert chain.ended
    assert "follows the END" in refused(running, running.score())
    again = Chain(entry.raw for entry in chain.entries)
    assert again.tip == chain.tip and again.digest == 1002


def test_copy_is_independent(running: Writer) -> None:
    copy = running.chain.copy()
    tip = running.chain.tip
    copy.append(running.seal(running.commit()))
    bob = RosterBody((Admission(2, b"m" * 32, "bob"),))
    copy.append(running.seal(bob, parent=copy.tip, round=3, digest=77))
    assert (running.chain.tip, running.chain.round, running.chain.digest) == (tip, 2, 1002)
    assert (copy.round, copy.digest, len(copy.roster), len(running.chain.roster)) == (3, 77, 2, 1)


def test_copies_go_on_apart_and_share_what_they_have(running: Writer) -> None:
    """A ledger is copied for every entry: what that costs must not grow with its length."""
    first, other = running.chain.copy(), running.chain.copy()
    before = [*running.chain.entries]
    mine = first.append(running.seal(running.commit()))
    theirs = other.append(running.seal(running.commit(), term=2))
    assert running.chain.entries == before and len(running.chain.commits) == 2
    assert (first.entries[-1], other.entries[-1]) == (mine, theirs)
    assert (
        first.entries[:-1] == other.entries[:-1] == before and [*reversed(first.entries)][1:] == before[::-1]
    )
    long = small_ledger(400, end=False).chain
    tracemalloc.start()
    twin = long.copy()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert twin.height == long.height > 400 and held < 2_500


def test_a_beginning_of_a_chain_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is taken for each node that comes from another branch: verified, 6 s of 30,000 rounds."""
    writer = small_ledger(rounds=3, end=False)
    writer.add(AmendBody(4, alpha=0.5, members=6, trusted=(public_key(OTHER_KEY),)))
    writer.add(writer.commit())
    writer.key, writer.term, writer.nonce = OTHER_KEY, 2, b"another-"
    writer.add(RosterBody((Admission(2, b"b" * 32, "bob"),), (1,)))
    writer.add(writer.commit(members=tuple(MemberReward(k, k / 10, 2) for k in range(6))))
    writer.add(writer.score())
    checked: list[Entry] = []

    def counted(entry: Entry, keys: Sequence[bytes]) -> bytes | None:
        checked.append(entry)
        return signed_by(entry, keys)

    monkeypatch.setattr(chain_module, "signed_by", counted)
    for height in range(writer.chain.height + 1):
        again = Chain(writer.chain.entries[:height])
        checked.clear()
        assert vars(writer.chain.prefix(height)) == vars(again) and len(checked) <= 1


def test_digest_is_unknown_right_after_a_commit(running: Writer) -> None:
    running.add(running.commit())
    assert running.chain.digest is None
    running.add(running.score())
    assert running.chain.digest == 1003


def test_an_entry_that_does_not_continue_the_chain_is_refused(running: Writer) -> None:
    fresh = Writer(small_lock())
    assert "must be the lock" in refused(fresh, EndBody("x"))
    assert "must be the lock" in refused(running, LockBody(running.lock.to_bytes()))
    assert "parent" in refused(running, running.score(), parent=bytes(32))
    assert "after 1 round" in refused(running, running.score(), round=1)
    assert "after 3 rounds" in refused(running, running.commit(), round=3)
    assert "altered" in refused(running, running.seal(running.score()).raw[:-65] + bytes(65))


def test_terms_only_grow(running: Writer) -> None:
    assert "terms only grow" in refused(running, running.score(), term=0)
    assert "started twice" in refused(running, running.score(), nonce=b"another-")
    running.term, running.nonce = 3, b"restart-"
    running.add(running.score())
    assert "terms only grow" in refused(running, running.score(), term=2)


def test_trusted_keys_sign_and_one_of_them_a_term() -> None:
    both = (public_key(KEY).hex(), public_key(OTHER_KEY).hex())
    writer = small_ledger(rounds=1, end=False, trusted=both)
    assert "two signing keys" in refused(writer, writer.score(), key=OTHER_KEY)
    assert "not signed by a key" in refused(writer, writer.score(), key=b"x" * 32)
    forged = writer.seal(writer.score())
    assert "not signed" in refused(writer, forged.raw[:-1] + bytes([forged.raw[-1] ^ 1]))
    writer.add(writer.score(), term=2, key=OTHER_KEY)
    stranger = Writer(small_lock(), key=OTHER_KEY)
    assert "not signed" in refused(stranger, LockBody(stranger.lock.to_bytes()))
    nobody = Writer(small_lock(trusted=()))
    assert "trusts no coordinator" in refused(nobody, LockBody(nobody.lock.to_bytes()))


def test_lock_entry() -> None:
    writer = Writer(small_lock())
    assert "digest" in refused(writer, LockBody(writer.lock.to_bytes()), digest=1001)
    assert "not JSON" in refused(writer, LockBody(b"nonsense"))
    assert "members" in refused(
        writer, LockBody(writer.lock.to_bytes().replace(b'"members":4', b'"members":1'))
    )
    assert "law" in refused(writer, LockBody(writer.lock.to_bytes().replace(b'"law":1', b'"law":2')))


def test_a_stated_digest_is_that_of_the_state(running: Writer) -> None:
    """Without a commit between them entries state one D; after a commit that moves nothing too."""
    assert "digest" in refused(running, running.score(), digest=1003)
    assert "digest" in refused(running, running.commit(), digest=1)
    still = tuple(m._replace(reward=0.25) for m in running.commit().members)
    running.add(running.commit(members=still))
    assert running.chain.digest == 1002
    assert "digest" in refused(running, running.score(), digest=1003)
    running.add(running.score())


def test_measuring_without_update() -> None:
    writer = small_ledger(rounds=2, end=False, update=False, alpha=(0.0,))
    assert [writer.chain.digest_at(k) for k in range(3)] == [1000, 1000, 1000]
    assert step_of(writer.lock, writer.chain.commits[0]) is None
    assert "digest" in refused(writer, writer.commit(), digest=1001)


def with_row(body: CommitBody, position: int, **changes: Any) -> tuple[MemberReward, ...]:
    rows = list(body.members)
    rows[position] = rows[position]._replace(**changes)
    return tuple(rows)


def test_commits_that_break_a_rule_are_refused(running: Writer) -> None:
    good = running.commit()
    for changes, says in (
        ({"alpha": 0.02}, "schedule"),
        ({"sigma": 0.002}, "schedule"),
        ({"members": good.members[:1]}, "at least 2"),
        ({"members": ()}, "at least 2"),
        ({"members": good.members[:3]}, "member 3 is missing"),
        ({"members": good.members[::-1]}, "ascending"),
        ({"members": (*good.members, good.members[-1])}, "ascending"),
        ({"members": with_row(good, 3, index=4)}, "below 4"),
        ({"members": with_row(good, 1, reward=1.5)}, "outside"),
        ({"members": with_row(good, 1, reward=math.nan)}, "outside"),
        ({"members": with_row(good, 1, reward=-math.inf)}, "outside"),
        ({"members": with_row(good, 1, evaluator=2)}, "roster"),
        ({"voids": ((1, "x"),)}, "both counted and void"),
        ({"members": good.members[:2], "voids": ((3, "x"), (2, "x"))}, "ascending"),
        ({"members": good.members[:2], "voids": ((2, "x"),)}, "member 3 is missing"),
        ({"members": good.members[:2], "voids": ((2, "x"), (4, "x"))}, "below 4"),
    ):
        assert says in refused(running, dataclasses.replace(good, **changes)), changes
    running.add(running.commit(members=good.members[:2], voids=((2, "x"), (3, "y"))))
    rest = running.commit()
    running.add(running.commit(members=rest.members[1:3], closed=QUORUM))


def test_rewards_at_the_edge_of_the_range_pass(running: Writer) -> None:
    """Twelve rewards of .1 in chunks of three sum to a mean just above .1."""
    writer = small_ledger(rounds=0, end=False, reward_low=0.0, reward_high=0.1)
    mean = math.fsum([0.1 + 0.1 + 0.1] * 4) / 12
    assert mean > 0.1
    writer.add(writer.commit(members=tuple(m._replace(reward=mean) for m in writer.commit().members)))
    top = writer.lock.reward_high + writer.lock.reward_high * 2.0**-40
    assert writer.lock.reward_ok(top * 3, 3) and not writer.lock.reward_ok(0.3000001, 3)
    assert writer.lock.mean_ok(math.fsum([top * 3] * 4) / 12), (
        "sums that pass one by one have a mean that passes"
    )


def test_mirrored_pairs_stay_whole() -> None:
    writer = small_ledger(rounds=1, end=False, mirrored=True)
    good = writer.commit()
    assert "pair" in refused(writer, writer.commit(members=good.members[:3], voids=((3, "x"),)))
    assert "pair" in refused(writer, writer.commit(members=good.members[1:3], closed=QUORUM))
    assert "missing" in refused(writer, writer.commit(members=good.members[:2]))
    writer.add(writer.commit(members=good.members[:2], voids=((3, "its partner goes with it"),)))


def test_roster_entries_that_break_a_rule_are_refused(running: Writer) -> None:
    bob = Admission(2, b"b" * 32, "bob")
    for body, says in (
        (RosterBody(), "changes nothing"),
        (RosterBody((dataclasses.replace(bob, number=1),)), "number is given twice"),
        (RosterBody((bob, dataclasses.replace(bob, key=b"c" * 32))), "number is given twice"),
        (RosterBody((bob, dataclasses.replace(bob, number=3))), "key is admitted twice"),
        (RosterBody((dataclasses.replace(bob, key=NODE),)), "key is admitted twice"),
        (RosterBody(revoked=(2,)), "not admitted"),
        (RosterBody(revoked=(1, 1)), "not admitted"),
    ):
        assert says in refused(running, body)
    running.add(RosterBody((bob,), (1,)))
    assert running.chain.roster == {2: (b"b" * 32, "bob")}
    assert "given twice" in refused(running, RosterBody((Admission(1, b"d" * 32, "x"),))), (
        "numbers never return"
    )
    running.add(RosterBody((Admission(3, NODE, "ada again"),)))
    running.add(running.commit())  # evaluated by number 1 before it was revoked


def test_amendments_that_break_a_rule_are_refused(running: Writer) -> None:
    half = 2.0**-11
    for body, says in (
        (AmendBody(1, alpha=0.1), "closed"),
        (AmendBody(2), "changes nothing"),
        (AmendBody(2, alpha=-0.1), "alpha"),
        (AmendBody(2, alpha=math.inf), "alpha"),
        (AmendBody(2, alpha=0.0), "alpha"),
        (AmendBody(2, sigma=0.001), "bf16"),
        (AmendBody(2, sigma=0.0), "bf16"),
        (AmendBody(2, members=1), "members"),
        (AmendBody(2, members=4097), "members"),
    ):
        assert says in refused(running, body)
    running.add(AmendBody(3, alpha=0.5, members=6))
    running.add(AmendBody(2, sigma=half))
    chain = running.chain
    assert [chain.alpha_at(k) for k in (1, 2, 3, 9)] == [0.01, 0.01, 0.5, 0.5]
    assert [chain.sigma_at(k) == half for k in (1, 2, 3)] == [False, True, True]
    assert [chain.members_at(k) for k in (2, 3)] == [4, 6]
    running.add(running.commit())
    running.add(running.commit())
    assert len(chain.commits[-1].body.members) == 6  # type: ignore[union-attr]
    assert chain.commits[-1].body.alpha == 0.5  # type: ignore[union-attr]


def test_amended_keys_sign_from_their_round_on(running: Writer) -> None:
    running.add(AmendBody(3, trusted=(public_key(OTHER_KEY),)))
    assert "not signed" in refused(running, running.score(), term=2, key=OTHER_KEY)
    running.add(running.commit())
    assert "not signed" in refused(running, running.score())
    running.add(running.score(), term=2, key=OTHER_KEY)


def test_scores_that_break_a_rule_are_refused(running: Writer) -> None:
    for changes, says in (
        ({"state_round": 3}, "not reached"),
        ({"prompts": 0}, "without prompts"),
        ({"sums": ()}, "without"),
        ({"correct": 9}, "more correct"),
        ({"mean": 0.5}, "mean"),
        ({"sums": (math.nan,)}, "mean"),
        ({"sums": (80.0,), "mean": 10.0}, "outside"),
    ):
        assert says in refused(running, running.score(**changes)), changes
    before = running.chain.digest
    running.add(running.score(state_round=0))
    assert running.chain.digest == before


def test_an_update_that_overflows_is_refused() -> None:
    """Rewards of a legal range always make a legal step."""
    writer = small_ledger(rounds=0, end=False, reward_low=-1e30, reward_high=1e30, alpha=(1e6,))
    members = tuple(m._replace(reward=1e30 * (1 - 2 * (m.index % 2))) for m in writer.commit().members)
    entry = writer.add(writer.commit(members=members))
    assert step_of(writer.lock, entry) is not None


def test_a_commit_becomes_the_step_of_the_law() -> None:
    for mirrored in (False, True):
        writer = small_ledger(rounds=1, end=False, mirrored=mirrored, shaping="ranks", clip=1.0)
        entry, lock = writer.chain.commits[0], writer.lock
        body = entry.body
        assert isinstance(body, CommitBody)
        found = shaping.coefficients([m.reward for m in body.members], body.alpha, "ranks", 1.0)
        assert found is not None
        step = step_of(lock, entry)
        c = shaping.merge_pairs(found.c) if mirrored else found.c
        noises = [member_seed(lock.run_id, 0, i, mirrored) for i in range(0, 4, 2 if mirrored else 1)]
        kept = [(seed, weight) for seed, weight in zip(noises, c, strict=True) if weight]
        assert step == shaping.Step(
            tuple(s for s, _ in kept), tuple(w for _, w in kept), found.shift, rounding_seed(lock.run_id, 0)
        )
        assert step_of(lock, writer.chain.entries[0]) is None


def test_a_fork_starts_from_a_state_of_its_parent() -> None:
    parent = small_ledger(rounds=3).chain
    claim = Parent(parent.lock.run_id.hex(), 2, parent.commits[1].hash.hex(), 1002)
    fork = small_lock(parent=claim, digest=1002, sigma=(2.0**-10,))
    check_fork(fork, parent)
    writer = Writer(fork).start()
    writer.add(writer.commit())
    assert writer.chain.round == 1 and writer.chain.lock.parent == claim
    at_start = Parent(claim.run, 0, parent.entries[0].hash.hex(), 1000)
    check_fork(small_lock(parent=at_start), parent)
    for changes, says in (
        ({"run": "00" * 32}, "forks run"),
        ({"round": 4}, "ends after 3 rounds"),
        ({"entry": "00" * 32}, "another entry"),
        ({"digest": 1001}, "digest"),
    ):
        with pytest.raises(BrokenChain, match=says):
            check_fork(small_lock(parent=dataclasses.replace(claim, **changes), digest=1002), parent)
    with pytest.raises(BrokenChain, match="start digest"):
        check_fork(small_lock(parent=claim, digest=5), parent)
    with pytest.raises(BrokenChain, match="no parent"):
        check_fork(small_lock(), parent)
    frozen = (
        TensorSpec("a.weight", (8, 8), "bfloat16", True),
        TensorSpec("b.weight", (8, 8), "bfloat16", False),
    )
    check_fork(small_lock(parent=claim, digest=5, manifest=frozen), parent)


# ---------------------------------------------------------------- damage


def offsets(writer: Writer) -> list[int]:
    """Where each entry starts, and the end."""
    found = [len(MAGIC)]
    for entry in writer.chain.entries:
        found.append(found[-1] + len(entry.raw))
    return found


def test_whole_unfinished_and_empty() -> None:
    writer = small_ledger()
    whole = read_bytes(writer.data)
    assert (whole.ended, whole.problem, str(whole)) == (True, None, "whole, ended after 3 rounds")
    commits = 0
    for entry, edge in zip(writer.chain.entries, offsets(writer)[1:], strict=True):
        commits += entry.kind is EntryKind.COMMIT
        reading = read_bytes(writer.data[:edge])
        assert reading.problem is None and reading.ended is (entry.kind is EntryKind.END)
        if not reading.ended:
            assert str(reading) == f"unfinished after {rounds(commits)}"
    for data in (b"", b"ESLE", b"ESLEDG02" + writer.data[8:], b"\x7fELF" + bytes(100), MAGIC):
        reading = read_bytes(data)
        assert reading.problem is not None and reading.problem.round == 0 and not reading.chain.height


def test_an_end_is_seen_without_verifying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A join looks for it before anything else: 6 s at 30,000 rounds, verified."""
    whole, unfinished = small_ledger().data, small_ledger(end=False).data
    monkeypatch.setattr(Chain, "append", None)
    assert ends(whole) and not ends(unfinished)
    for cut in (0, 3, len(MAGIC), len(whole) // 2, len(whole) - 1):
        assert not ends(whole[:cut])
    assert not ends(whole + b"x") and not ends(whole[:-1] + b"x\0")
    (tmp_path / "node.ledger").write_bytes(unfinished)
    refuse_if_over(tmp_path)


def test_cut_at_every_byte() -> None:
    """Cut inside an entry: the entry's offset and the round reached before it are named."""
    writer = small_ledger(rounds=1)
    edges = offsets(writer)
    for length in range(edges[1], len(writer.data)):
        reading = read_bytes(writer.data[:length])
        start = max(edge for edge in edges if edge <= length)
        if start == length:
            assert reading.problem is None
            continue
        assert reading.problem is not None
        assert reading.problem.offset == start
        assert (
            reading.problem.round
            == reading.chain.round
            == sum(e.kind is EntryKind.COMMIT for e in writer.chain.entries[: edges.index(start)])
        )
        assert not reading.ended


def test_one_bit_flipped_anywhere() -> None:
    """Every byte of a small ledger, one random bit of each: found, and located at the entry it is in."""
    writer = small_ledger(rounds=2)
    edges = offsets(writer)
    chance = random.Random(7)
    for position in range(len(writer.data)):
        altered = bytearray(writer.data)
        altered[position] ^= 1 << chance.randrange(8)
        reading = read_bytes(bytes(altered))
        assert reading.problem is not None, position
        expected = 0 if position < len(MAGIC) else max(edge for edge in edges if edge <= position)
        assert reading.problem.offset == expected
        assert reading.problem.round == sum(
            e.kind is EntryKind.COMMIT for e in writer.chain.entries[: edges.index(max(expected, edges[0]))]
        )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_are_read_without_a_crash(data: st.DataObject) -> None:
    writer = small_ledger(rounds=1)
    start = data.draw(st.integers(0, len(writer.data)))
    given = writer.data[:start] + data.draw(st.binary(max_size=200))
    raws = [entry.raw for entry in writer.chain.entries]
    sound = [MAGIC + b"".join(raws[:height]) for height in range(1, len(raws) + 1)]
    assert (read_bytes(given).problem is None) == (given in sound)


def test_entries_left_out_swapped_or_doubled() -> None:
    writer = small_ledger(rounds=3)
    raws = [entry.raw for entry in writer.chain.entries]
    for k in range(len(raws) - 1):
        for wrong in (
            raws[:k] + raws[k + 1 :],
            [*raws[:k], raws[k + 1], raws[k], *raws[k + 2 :]],
            [*raws, raws[k]],
        ):
            assert read_bytes(MAGIC + b"".join(wrong)).problem is not None
    other = small_ledger(rounds=3, alpha=(0.02,))
    mixed = raws[:3] + [entry.raw for entry in other.chain.entries][3:]
    assert read_bytes(MAGIC + b"".join(mixed)).problem is not None


def test_files_are_read_or_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    path.write_bytes(small_ledger().data)
    assert read(path).ended
    with pytest.raises(LedgerError, match="No such file"):
        read(tmp_path / "none")
    with pytest.raises(LedgerError, match="no regular file"):
        read(tmp_path)


# ---------------------------------------------------------------- the file


def test_append_and_reopen(tmp_path: Path) -> None:
    writer = small_ledger()
    path = tmp_path / "run.ledger"
    with LedgerFile(path) as file:
        assert path.read_bytes() == MAGIC
        for entry in writer.chain.entries[:4]:
            file.append(entry.raw)
    with LedgerFile(path) as file:
        assert file.cut is None and len(file.entries) == 4
        file.append(*(entry.raw for entry in writer.chain.entries[4:]))
    assert path.read_bytes() == writer.data


def test_a_torn_tail_is_cut_back_and_completed(tmp_path: Path) -> None:
    """Power lost at any byte of the last append: the file is the journal's again, no byte is lost."""
    writer = small_ledger(rounds=1)
    raws = [entry.raw for entry in writer.chain.entries]
    path = tmp_path / "run.ledger"
    for length in [*range(len(MAGIC) + 1), *range(offsets(writer)[-2], len(writer.data) + 1)]:
        path.write_bytes(writer.data[:length])
        with LedgerFile(path) as file:
            kept = sum(edge <= length for edge in offsets(writer)[1:])
            assert len(file.entries) == kept
            assert file.repair_from(raws) == len(raws) - kept
            torn = length > len(MAGIC) and length not in offsets(writer)
            assert (file.cut is not None) == torn
            if file.cut:
                saved = tmp_path / f"run.ledger.cut-{file.cut.offset}"
                assert saved.read_bytes() == writer.data[file.cut.offset : length]
        assert path.read_bytes() == writer.data


def test_damage_in_the_middle_is_repaired_from_the_journal(tmp_path: Path) -> None:
    writer = small_ledger()
    raws = [entry.raw for entry in writer.chain.entries]
    path = tmp_path / "run.ledger"
    altered = bytearray(writer.data)
    altered[offsets(writer)[3] + 50] ^= 1
    path.write_bytes(altered)
    with LedgerFile(path) as file:
        assert file.cut is not None and file.cut.offset == offsets(writer)[3] and file.cut.round == 0
        file.repair_from(raws)
    assert read(path).ended


def test_a_journal_that_lacks_entries_is_refused(tmp_path: Path) -> None:
    writer = small_ledger()
    raws = [entry.raw for entry in writer.chain.entries]
    path = tmp_path / "run.ledger"
    path.write_bytes(writer.data)
    for journal in (raws[:-1], [], [*raws[:-1], small_ledger(rounds=1).chain.entries[-1].raw]):
        with LedgerFile(path) as file, pytest.raises(LedgerError, match="journal lacks"):
            file.repair_from(journal)
    assert path.read_bytes() == writer.data
    foreign = tmp_path / "notes.txt"
    foreign.write_text("something else entirely")
    with pytest.raises(LedgerError, match="no ledger"):
        LedgerFile(foreign)
    assert foreign.read_text() == "something else entirely"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """The system refuses bytes in the middle of an entry, as a full disk does."""
    writer = small_ledger()
    path = tmp_path / "run.ledger"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LedgerFile(path) as file:
        file.append(writer.chain.entries[0].raw)
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                file.append(writer.chain.entries[1].raw)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        file.append(*(entry.raw for entry in writer.chain.entries[1:]))
    assert read(path).ended


# ---------------------------------------------------------------- size and speed


def test_a_long_run_is_small_and_quickly_verified() -> None:
    """300 rounds of N=30, a lock of 272 tensors, 8-chunk scores every 5 rounds: really sealed entries."""
    manifest = tuple(
        TensorSpec(f"model.layers.{k:03d}.self_attn.q_proj.weight", (576, 576), "bfloat16", True)
        for k in range(272)
    )
    writer = Writer(small_lock(members=30, manifest=manifest)).start()
    for round in range(300):
        if round % 5 == 0:
            writer.add(writer.score(sums=(0.1,) * 8, mean=math.fsum((0.1,) * 8) / 8))
        writer.add(writer.commit())
    writer.add(EndBody("done"))
    data = writer.data
    started = time.process_time()  # what others do on the machine is no matter
    reading = read_bytes(data)
    seconds = time.process_time() - started
    print(f"{len(data)} bytes, verified in {seconds:.3f} s")
    assert reading.ended and len(data) <= 400_000
    assert seconds < 1.0


def test_commits_cost_little_on_the_wire() -> None:
    from protocol.messages import Commit
    from protocol.wire import encode
    from protocol.zmtp import wire_size

    for members in (16, 30, 64):
        writer = Writer(small_lock(members=members)).start()
        entry = writer.seal(writer.commit(), term=2**31, round=2**31, digest=2**64 - 1)
        assert wire_size(len(encode(Commit(2**31, entry.raw))), encrypted=False) <= 32 * members


def test_a_long_run_costs_the_memory_of_its_bytes() -> None:
    """Chain and file together hold each commit once, as it travels: 12 bytes a member, no objects."""
    writer = Writer(small_lock(members=1024)).start()
    tracemalloc.start()
    for _ in range(9):  # the cache of seeds is full then
        writer.add(writer.commit())
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    objects, height = len(gc.get_objects()), writer.chain.height
    for _ in range(30):
        writer.add(writer.commit())
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    size = sum(len(entry.raw) for entry in writer.chain.entries[height:])
    assert grown < 1.5 * size and len(gc.get_objects()) - objects < 30 * 20


def test_rows_are_a_sequence_of_rewards(tmp_path: Path) -> None:
    writer = small_ledger(1)
    rows = writer.commit().members
    body = parse(writer.chain.commits[0].raw).body
    assert isinstance(body, CommitBody) and body.members == rows and rows == body.members
    assert (body.members[0], body.members[-1], len(body.members)) == (rows[0], rows[-1], len(rows))
    assert body.members[1:3] == rows[1:3] and rows[2] in body.members and hash(body.members) == hash(rows)
    assert pickle.loads(pickle.dumps(body)) == body
    with pytest.raises(IndexError):
        body.members[len(rows)]
    path = tmp_path / "run.ledger"
    path.write_bytes(writer.data)
    raws = [entry.raw for entry in writer.chain.entries]
    with LedgerFile(path) as file:
        assert not file.repair_from(raws) and all(a is b for a, b in zip(file.entries, raws, strict=True))
