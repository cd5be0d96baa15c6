"""A node that is far behind: what replay costs, what a snapshot costs, which way it goes; own snapshots."""

from __future__ import annotations

import dataclasses
from typing import Any

from msgspec.structs import replace as changed

from esnode import catchup, events, node
from esnode.events import Apply, Rewind
from esnode.snapshotevents import (
    Fetched,
    FetchFailed,
    Fetching,
    FetchSnapshot,
    Moved,
    PeerPoisoned,
    PeerReached,
    Save,
    Saved,
    StopFetch,
)
from protocol.chain import Chain
from protocol.entries import CommitBody, Entry, MemberReward
from protocol.messages import Applied
from protocol.peers import (
    CatchUp,
    Donor,
    Donors,
    DonorsAsk,
    Kept,
    PeerFault,
    PeerWay,
    Reach,
    Snapshots,
    WrongFile,
)
from tests import bench
from tests.bench import ABOUT, LOCK, Bench
from tests.desk import forge, key_of

ROOT = b"R" * 32
ROUNDS = 100
DONOR = Donor(key_of("n"), "n", ("tcp://10.0.0.1:4000",))  # on the roster of `bench.ledger`


def digest_of(round: int) -> int:
    return LOCK.digest if round == 0 else 1000 + round


def long_ledger(rounds: int = ROUNDS, announced: int = 91, root: bytes = ROOT) -> list[Entry]:
    """Lock, roster and many commits; that of round `announced` carries the root."""
    entries = bench.ledger()
    for round in range(rounds):
        rows = tuple(MemberReward(k, 0.25 + k / 2, 0) for k in range(2))
        snapshot = root if round == announced else b""
        body = CommitBody(LOCK.alpha_at(round), LOCK.sigma_at(round), rows, snapshot=snapshot)
        entries.append(forge(body, entries[-1], round=round, digest=digest_of(round)))
    return entries


ENTRIES = long_ledger()


class Late(Bench):
    """A newcomer that has fetched a long ledger."""

    def __init__(self, entries: list[Entry] = ENTRIES, way: str = "auto") -> None:
        super().__init__()
        self.state = changed(self.state, about=dataclasses.replace(ABOUT, catch_up=way))
        self.said: list[Any] = []
        self.welcome(entries)
        self.state = changed(self.state, chain=Chain(entries))
        self.hear(Snapshots(10, 0))

    def step(self, event: events.Event) -> tuple[events.Effect, ...]:
        super().step(event)
        if hasattr(self, "said"):
            self.said += [effect.message for effect in self.all(events.Send)]
        return self.effects

    def applied(self, seconds: float) -> None:
        """The engine ends what it applies, at so many seconds a round."""
        first, count = self.state.applied, self.state.applying
        entries = self.state.chain.entries[first : first + count]
        digests = tuple(digest_of(entry.round + (entry.kind == 1)) for entry in entries)
        commits = sum(entry.kind == 1 for entry in entries)
        self.now += seconds * commits
        self.step(events.EntriesApplied(self.now, digests, int(1000 * seconds * commits)))

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


def offered(seconds: float = 1.0, **changes: Any) -> Late:
    """Behind by 100 rounds of so many seconds, with donors of a snapshot of round 90."""
    late = Late()
    late.applied(seconds)
    late.hear(Donors(**{"round": 90, "root": ROOT, "size": 10**9, "donors": (DONOR,)} | changes))
    return late


def test_a_short_way_is_replayed_and_nobody_is_asked() -> None:
    late = Late()
    assert [entry.kind == 1 for entry in late.all(Apply)[0].entries].count(True) == catchup.FIRST_ROUNDS
    late.applied(0.01)
    assert not late.heard(DonorsAsk)
    assert len(late.all(Apply)[0].entries) == catchup.FUSED, "now in big steps"
    late.applied(0.01)
    late.applied(0.01)
    assert late.state.rounds == ROUNDS and late.heard(Applied)


def test_a_long_way_asks_for_donors_while_it_replays() -> None:
    late = Late()
    late.applied(1.0)
    assert late.heard(DonorsAsk) == [DonorsAsk(2)]
    assert len(late.all(Apply)[0].entries) == 5, "small steps: something better may come"
    late.tick(1.0)
    assert len(late.heard(DonorsAsk)) == 1
    late.tick(catchup.ASK_AGAIN)
    assert len(late.heard(DonorsAsk)) == 2, "asked again when nobody answers"


def test_the_quicker_way_is_taken() -> None:
    late = offered()
    assert late.all(FetchSnapshot) == [FetchSnapshot(90, ROOT, 10**9, (DONOR,), 0)]
    late.step(Fetching(late.now, 10**7, 10**9, 50e6))  # 20 s and 10 rounds against 98 rounds
    (choice,) = late.heard(CatchUp)
    assert choice.way == "snapshot" and "98 rounds at 1.00 s takes 98 s" in choice.reason, choice
    assert "snapshot after 90 rounds, " in choice.reason
    assert "1000 MB at 50.0 MB/s" in choice.reason
    late.applied(1.0)
    assert not late.all(Apply), "nothing more is replayed meanwhile"
    late.step(Fetched(late.now, 90, ENTRIES[91].hash, ROOT, 10**9, "20 s"))
    (rewind,) = late.all(Rewind)
    late.step(events.Rewound(late.now, 92, digest_of(90), 900))
    assert late.state.rounds == 90 and late.all(Apply)
    assert late.heard(Kept) == [Kept(90, ROOT, 10**9)], "it is a donor now"
    assert rewind.entries[-1] == ENTRIES[-1]


def test_a_fetched_file_that_is_not_loaded_is_given_to_nobody() -> None:
    """Two nodes can sign a root together; the joiner finds by D that the weights under it are others."""
    late = offered()
    late.step(Fetching(late.now, 10**7, 10**9, 50e6))
    late.applied(1.0)
    late.step(Fetched(late.now, 90, ENTRIES[91].hash, ROOT, 10**9, "20 s"))
    late.step(events.Rewound(late.now, 0, digest_of(0), 900))
    assert late.state.rounds == 0 and not late.state.held_snapshots


def test_a_slow_link_is_not_worth_it() -> None:
    late = offered()
    late.step(Fetching(late.now, 10**6, 10**9, 1e6))  # 1,000 s
    assert late.all(StopFetch) and late.heard(CatchUp)[0].way == "replay"
    late.applied(1.0)
    assert late.all(Apply)
    late.state = changed(late.state, heard=late.now + catchup.LATER)
    late.tick(catchup.LATER + 1)
    assert len(late.heard(DonorsAsk)) == 2, "it is thought of again, much later"


def test_a_link_that_breaks_down_is_repented() -> None:
    late = offered()
    late.step(Fetching(late.now, 10**7, 10**9, 50e6))
    late.applied(1.0)
    late.step(Fetching(late.now, 2 * 10**7, 10**9, 2e6))
    assert late.all(StopFetch) and late.all(Apply)
    assert [choice.way for choice in late.heard(CatchUp)] == ["snapshot", "replay"]


def test_a_transfer_that_fails_leaves_the_replay() -> None:
    late = offered()
    late.step(Fetching(late.now, 10**7, 10**9, 50e6))
    late.applied(1.0)
    late.step(FetchFailed(late.now, "no donor can be reached"))
    assert late.all(Apply) and "no donor can be reached" in late.heard(CatchUp)[-1].reason


def test_only_roots_of_the_signed_chain_and_donors_of_the_roster() -> None:
    assert not offered(root=b"X" * 32).all(FetchSnapshot)
    assert not offered(donors=(changed_key(DONOR),)).all(FetchSnapshot)
    assert not offered(round=92).all(FetchSnapshot), "the root was signed before this round"
    assert not offered(donors=()).all(FetchSnapshot)


def changed_key(donor: Donor) -> Donor:
    return Donor(b"?" * 32, donor.name, donor.addresses)


def test_the_owner_may_choose() -> None:
    late = Late(way="snapshot")
    late.tick()
    assert late.heard(DonorsAsk) == [DonorsAsk(0)], "before anything is replayed"
    late = Late(way="replay")
    late.applied(10.0)
    late.tick(1.0)
    assert not late.heard(DonorsAsk)


# ---------------------------------------------------------------- snapshots of one's own


def test_one_is_written_where_it_is_due() -> None:
    late = Late(long_ledger(9))
    late.applied(0.1)
    late.applied(0.1)
    assert late.state.rounds == 9 and not late.all(Save)
    entries = long_ledger(10)
    late.step(events.Received(late.now, bench.Entries(len(entries) - 1, (entries[-1].raw,))))
    late.applied(0.1)
    assert late.all(Save) == [Save(10, entries[-1].hash, digest_of(10))]
    late.step(Saved(late.now, 10, entries[-1].hash, ROOT, 777, "", 5))
    assert late.sent(Kept) == [Kept(10, ROOT, 777)]


def test_a_file_with_another_root_than_the_signed_one_is_written_again_while_that_can_be() -> None:
    late = Late(long_ledger(9))
    late.applied(0.1)
    late.applied(0.1)
    entries = long_ledger(11)

    def receive(height: int) -> None:
        late.step(events.Received(late.now, bench.Entries(height, (entries[height].raw,))))
        late.applied(0.1)

    receive(len(entries) - 2)
    told = WrongFile(10, ROOT, "the signed root is another")
    late.hear(told)
    assert not late.all(Save), "its own is not written yet"
    late.step(Saved(late.now, 10, entries[-2].hash, ROOT, 777, "", 5))
    late.hear(told)
    assert late.all(Save) == [Save(10, entries[-2].hash, digest_of(10))] and not late.state.held_snapshots
    late.step(Saved(late.now, 10, entries[-2].hash, b"S" * 32, 777, "", 5))
    assert late.sent(Kept) == [Kept(10, b"S" * 32, 777)]
    receive(len(entries) - 1)
    late.hear(WrongFile(10, b"S" * 32, "wrong once more"))
    assert not late.all(Save) and not late.state.held_snapshots, "the master has moved on"


def test_what_lies_here_is_told_at_every_welcome_and_until_it_is_announced() -> None:
    late = Late(long_ledger(95))
    hash90 = late.state.chain.commits[89].hash
    late.state = changed(late.state, held_snapshots=(catchup.Held(90, ROOT, 5, hash90),))
    late.welcome(long_ledger(95), term=1)
    assert late.sent(Reach) == [Reach(())] and late.sent(Kept) == [Kept(90, ROOT, 5)]
    late.state = changed(late.state, held_snapshots=(catchup.Held(90, b"S" * 32, 5, hash90),))
    assert late_beats(late)[Kept] == 1, "not announced"
    late.state = changed(late.state, held_snapshots=(catchup.Held(90, ROOT, 5, hash90),))
    assert late_beats(late)[Kept] == 0, "the chain has it"
    late.state = changed(late.state, held_snapshots=(catchup.Held(90, b"S" * 32, 5, b"another branch"),))
    assert late_beats(late)[Kept] == 0, "of a dead branch"
    assert late_beats(late)[Reach] == 1
    late.hear(Snapshots(10, 0))
    assert late_beats(late)[Reach] == 0, "answered"


def test_a_node_that_has_moved_says_so_at_once_and_at_every_welcome() -> None:
    late = Late(long_ledger(95))
    late.welcome(long_ledger(95), term=1)
    late.step(Moved(late.now, ("tcp://10.0.0.9:4100",)))
    assert late.heard(Reach)[-1] == Reach(("tcp://10.0.0.9:4100",))
    late.welcome(long_ledger(95), term=1)
    assert late.sent(Reach) == [Reach(("tcp://10.0.0.9:4100",))]


def late_beats(late: Late) -> dict[type, int]:
    """Messages said at the beat that repeats things."""
    late.said.clear()
    for _ in range(node.TELL_EVERY):
        late.state = changed(late.state, heard=late.now)
        late.tick(node.BEAT_EVERY + 0.1)
    return {kind: len(late.heard(kind)) for kind in (Kept, Reach)}


def test_peers_are_reported() -> None:
    late = offered()
    late.step(PeerReached(late.now, DONOR.key, "relay", "nothing answers"))
    late.step(PeerPoisoned(late.now, DONOR.key, ROOT, 4, "its hash does not fit"))
    assert late.heard(PeerWay) == [PeerWay(DONOR.key, "relay", "nothing answers")]
    assert late.heard(PeerFault) == [PeerFault(DONOR.key, ROOT, 4, "its hash does not fit")]
