"""A snapshot from several donors, without sockets: credit, resuming, slow, silent and poisoned donors."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from coordinator.relay import HIGH_WATER
from esnode import transfer
from esnode.transferevents import (
    Ask,
    AskHead,
    Banned,
    Began,
    Came,
    Checked,
    Drop,
    Event,
    Finish,
    Lost,
    Opened,
    Report,
    Tick,
)
from protocol.peers import GRANT, MOST_OWED, SLICE

PART = 1 << 20
A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


class Hall:
    """A receiver and donors of given speeds (bytes per second), on virtual time."""

    def __init__(self, speeds: dict[bytes, float], parts: int = 40, have: int = 0, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.speeds = speeds
        self.now = 100.0
        self.total = parts * PART - 777
        self.have = have
        self.state = transfer.new(tuple(speeds), self.now)
        self.owed: dict[bytes, list[Ask]] = {key: [] for key in speeds}
        self.came: dict[tuple[bytes, int], int] = {}
        self.sent: Counter[bytes] = Counter()
        self.poison: set[bytes] = set()
        self.silent: set[bytes] = set()
        self.reports: list[bytes] = []
        self.stored: set[int] = set()
        self.finished: str | None = None
        self.deepest = 0  # messages in one line's queue
        self.disk: list[tuple[bytes, int]] | None = None  # whole parts that wait for it; None: it keeps up

    def feed(self, event: Event) -> None:
        self.state, actions = transfer.step(self.state, event)
        for action in actions:
            if isinstance(action, AskHead):
                if action.key not in self.silent:
                    self.feed(Began(self.now, self.total, PART, self.have))
            elif isinstance(action, Ask):
                assert action.size <= GRANT and self.state.sources[action.key].status == transfer.OPEN
                self.owed[action.key].append(action)
                assert sum(ask.size for ask in self.owed[action.key]) <= MOST_OWED, "a donor says Sorry"
                self.came.setdefault((action.key, action.part), 0)
            elif isinstance(action, Drop):
                self.came.pop((action.key, action.part), None)
                self.owed[action.key] = [ask for ask in self.owed[action.key] if ask.part != action.part]
            elif isinstance(action, Report):
                self.reports.append(action.key)
            elif isinstance(action, Finish):
                self.finished = action.reason

    def open(self, *keys: bytes, way: str = "direct") -> None:
        for key in keys:
            self.feed(Opened(self.now, key, way))

    def one_line(self, rate: float, message: int) -> None:
        """From now on until it is over everybody's messages stand in one queue before a line of this rate."""
        queue: list[tuple[bytes, int, int]] = []
        budget = 0.0
        while self.finished is None:
            for key, asks in self.owed.items():
                for ask in asks:
                    sizes = [min(message, ask.size - k) for k in range(0, ask.size, message)]
                    queue += [(key, ask.part, size) for size in sizes]
                asks.clear()
            self.now += 0.05
            budget += 0.05 * rate
            while queue and budget >= queue[0][2] and self.finished is None:
                budget -= queue[0][2]
                self._arrive(*queue.pop(0))
            self.feed(Tick(self.now))
            self.deepest = max(self.deepest, len(queue))

    def tick(self, seconds: float = 0.05) -> None:
        """Every donor sends what its speed allows of what it was asked for."""
        self.now += seconds
        for key, speed in self.speeds.items():
            budget = 0 if key in self.silent else int(speed * seconds * self.random.uniform(0.8, 1.2))
            while budget > 0 and self.owed[key] and self.finished is None:
                ask = self.owed[key].pop(0)
                size = min(ask.size, budget)
                budget -= size
                if size < ask.size:
                    rest = Ask(key, ask.part, ask.offset + size, ask.size - size)
                    self.owed[key].insert(0, rest)
                self._arrive(key, ask.part, size)
        self.feed(Tick(self.now))

    def _arrive(self, key: bytes, part: int, size: int) -> None:
        self.sent[key] += size
        if (key, part) not in self.came:
            return self.feed(Came(self.now, key, part, size))
        self.came[key, part] += size
        self.feed(Came(self.now, key, part, size))
        if self.came.get((key, part)) == self.state.size_of(part):
            del self.came[key, part]
            if self.disk is not None:
                return self.disk.append((key, part))
            good = key not in self.poison
            if good:
                self.stored.add(part)
            self.feed(Checked(self.now, key, part, good))

    def run(self, limit: float = 300.0) -> float:
        """Until it is over; seconds it took."""
        began = self.now
        while self.finished is None:
            self.tick()
            assert self.now - began < limit
        return self.now - began

    def whole(self) -> bool:
        return self.finished == "" and self.stored | {
            k for k in range(self.state.parts) if self.have >> k & 1
        } == set(range(self.state.parts))


def test_donors_share_by_their_speed() -> None:
    hall = Hall({A: 4e6, B: 2e6, C: 1e6})
    hall.open(A, B, C)
    took = hall.run()
    assert hall.whole() and hall.state.done == hall.total
    assert took < 1.35 * hall.total / 7e6, "all of them are kept busy"
    assert 1.2 < hall.sent[A] / hall.sent[B] < 3 and hall.sent[B] > hall.sent[C]


def test_never_more_in_flight_than_the_window() -> None:
    hall = Hall({A: 1e5, B: 2e7})
    hall.open(A, B)
    while hall.finished is None:
        hall.tick()
        for source in hall.state.sources.values():
            assert source.flying < max(source.window, transfer.FIRST_WINDOW) + GRANT
            assert source.window <= transfer.LARGEST_WINDOW
    assert hall.state.sources[A].window == transfer.SMALLEST_WINDOW
    assert hall.whole()


def test_a_fast_link_asks_for_no_more_than_a_donor_lets_be_asked_for() -> None:
    hall = Hall({A: 2e8, B: 5e7}, parts=400)
    hall.open(A, B)
    widest = 0
    while hall.finished is None:
        hall.tick()
        widest = max(widest, hall.state.sources[A].flying)
    assert hall.whole() and widest >= transfer.LARGEST_WINDOW


def test_a_slow_disk_sets_the_pace() -> None:
    hall = Hall({A: 2e8, B: 2e8}, parts=400)
    hall.open(A, B)
    hall.disk, most = [], transfer.MOST_UNCHECKED + 2 * (transfer.LARGEST_WINDOW + GRANT)
    for _ in range(40):
        hall.tick()
        assert transfer.MOST_UNCHECKED <= PART * len(hall.disk) <= most or _ < 20
    waiting, hall.disk = hall.disk, None
    for key, part in waiting:
        hall.stored.add(part)
        hall.feed(Checked(hall.now, key, part, True))
    assert hall.run() < 10 and hall.whole()
    assert all(source.status == transfer.OPEN for source in hall.state.sources.values())


def test_resumed_parts_are_not_asked_for_again() -> None:
    have = sum(1 << k for k in range(40) if k % 3)
    hall = Hall({A: 1e7}, have=have)
    hall.open(A)
    hall.run()
    assert hall.whole() and hall.stored == {k for k in range(40) if k % 3 == 0}
    nothing = Hall({A: 1e7}, have=(1 << 40) - 1)
    nothing.open(A)
    assert nothing.finished == "" and not nothing.sent


def test_a_poisoned_part_is_thrown_away_and_its_donor_never_asked_again() -> None:
    hall = Hall({A: 2e6, B: 2e6})
    hall.poison = {A}
    hall.open(A, B)
    hall.run()
    assert hall.whole() and hall.reports == [A]
    assert hall.state.sources[A].status == transfer.BANNED
    hall.feed(Opened(hall.now, A, "direct"))
    assert hall.state.sources[A].status == transfer.BANNED


def test_a_silent_donor_loses_its_parts_to_another() -> None:
    hall = Hall({A: 2e6, B: 2e6})
    hall.open(A, B)
    for _ in range(20):
        hall.tick()
    hall.silent = {A}
    took = hall.run()
    assert hall.whole() and took < 60
    assert "silent" in hall.state.sources[A].reason


@pytest.mark.parametrize("way", ["direct", "relay"])
def test_many_donors_on_one_slow_line_are_all_kept(way: str) -> None:
    """Each one's turn comes late; whoever is given up for that has sent in vain."""
    hall = Hall({bytes([k]) * 32: 1.0 for k in range(16)}, parts=80)
    hall.open(*hall.speeds, way=way)
    began = hall.now
    hall.one_line(250_000, SLICE)
    assert hall.whole() and hall.now - began < 1.1 * hall.total / 250_000
    assert all(source.lost < 0 for source in hall.state.sources.values())


@pytest.mark.parametrize("parts", [16, 300])
def test_a_relay_is_asked_for_no_more_than_it_queues(parts: int) -> None:
    hall = Hall({bytes([k]) * 32: 1.0 for k in range(16)}, parts=parts)
    hall.open(*hall.speeds, way="relay")
    hall.one_line(1e8 if parts > 16 else 1e6, SLICE)
    assert hall.whole() and hall.deepest <= HIGH_WATER / 2


def test_a_killed_donor_and_one_that_comes_back() -> None:
    hall = Hall({A: 2e6, B: 2e6})
    hall.open(A, B)
    for _ in range(20):
        hall.tick()
    hall.feed(Lost(hall.now, A, "cut"))
    assert not hall.state.sources[A].jobs and not hall.owed[A]
    hall.open(A)
    assert hall.state.sources[A].status == transfer.GONE, "not at once"
    hall.now += transfer.RETRY_SECONDS
    hall.open(A)
    hall.run()
    assert hall.whole() and hall.sent[A] > hall.total / 4


def test_a_process_that_was_stopped_blames_nobody() -> None:
    hall = Hall({A: 2e6, B: 2e6})
    hall.open(A, B)
    for _ in range(20):
        hall.tick()
    hall.now += 10 * transfer.STANDSTILL
    hall.feed(Tick(hall.now))
    assert hall.finished is None
    assert {source.status for source in hall.state.sources.values()} == {transfer.OPEN}
    hall.run()
    assert hall.whole()


def test_the_head_is_asked_of_another_when_one_does_not_answer() -> None:
    hall = Hall({A: 2e6, B: 2e6})
    hall.silent = {A}
    hall.open(A, B)
    while not hall.state.part_size:
        hall.tick()
    hall.run()
    assert hall.whole()


def test_a_slow_donor_does_not_hold_the_end_up() -> None:
    hall = Hall({A: 2e7, B: 3e4}, parts=20)
    hall.open(A, B)
    assert hall.run() < 8, "its last part is fetched from the quick one too"
    assert hall.whole()


def test_without_any_donor_it_fails_in_words() -> None:
    hall = Hall({A: 1e6, B: 1e6})
    hall.feed(Lost(hall.now, A, "nothing answers"))
    while hall.finished is None:
        hall.tick(1.0)
    assert "no donor can be reached" in hall.finished and "nothing answers" in hall.finished
    liars = Hall({A: 1e6})
    liars.open(A)
    liars.feed(Banned(liars.now, A, "head and root differ"))
    assert liars.finished and "head and root differ" in liars.finished


@pytest.mark.parametrize("seed", range(40))
def test_any_luck(seed: int) -> None:
    """Donors open, vanish, fall silent and poison at random; one honest donor is enough in the end."""
    chance = random.Random(seed)
    hall = Hall({bytes([k]) * 32: chance.uniform(2e5, 8e6) for k in range(5)}, parts=12, seed=seed)
    keys = list(hall.speeds)
    honest = keys[0]
    hall.poison = {key for key in keys[1:] if chance.random() < 0.3}
    hall.open(*keys)
    for _ in range(100000):
        if hall.finished is not None:
            break
        hall.tick()
        if chance.random() < 0.03:
            hall.feed(Lost(hall.now, chance.choice(keys), "cut"))
        if chance.random() < 0.03:
            hall.silent ^= {chance.choice(keys[1:])}
        hall.open(*keys) if chance.random() < 0.1 else hall.open(honest)
        asked = [job.part for s in hall.state.sources.values() for job in s.jobs]
        assert not set(hall.state.back) & set(asked), "a part is given back or asked for, not both"
    assert hall.whole(), hall.finished
    assert set(hall.reports) <= hall.poison and len(hall.reports) == len(set(hall.reports))
