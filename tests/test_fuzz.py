"""Mutated bytes against everything that reads bytes of others: no crash, no memory, no second meaning.

20,000 mutants by default, a million among the slow ones. A mutant is a valid example with bits flipped, parts
cut, doubled, exchanged with other examples, or lengths made huge. A decoder may refuse it with its own error
or accept it; anything else is a crash.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from esnode import snapshot
from protocol import invite, wire
from protocol.chain import BrokenChain, Chain
from protocol.entries import MalformedEntry, parse
from protocol.lock import LockError, lock_from_bytes
from tests import chaos, runs, toy_engine
from tests.test_wire import EXAMPLES, sender_of

MEMORY = 96 << 20  # bytes the process may grow by over a million mutants
SLOWEST = 1.0  # seconds of processor time for one mutant
LENGTHS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdf\xff",
)


@dataclass(frozen=True)
class Target:
    """A decoder, valid inputs for it, and how it refuses."""

    name: str
    examples: tuple[bytes, ...]
    decode: Callable[[bytes], Any]
    refusal: type[Exception] | tuple[type[Exception], ...]


def targets() -> Iterator[Target]:
    """Everything a peer's bytes reach."""
    frames = [(wire.encode(message), sender_of(message)) for message in EXAMPLES]
    for sender in sorted({who for _, who in frames}):
        mine = tuple(frame for frame, who in frames if who == sender)
        yield Target(sender, mine, lambda frame, who=sender: wire.decode(frame, who), wire.MalformedMessage)
    lock = runs.toy_lock()
    chain = chaos.fault_free(toy_engine.ToyWorkshop(lock, "fuzz", 0.0), lock, 2)
    raws = tuple(entry.raw for entry in chain.entries)
    yield Target("entry", raws, parse, MalformedEntry)
    yield Target("chain", raws, Follower(raws).append, (MalformedEntry, BrokenChain))
    yield Target("lock", (lock.to_bytes(),), lock_from_bytes, LockError)
    header = snapshot.header_for(lock, 2, chain.tip, 7)
    yield Target("snapshot", (header.encode(),), snapshot.decode_header, snapshot.SnapshotError)
    text = invite.encode(invite.Invite(("tcp://10.0.0.1:7700", "tcp://[fd77::1]:1"), *[b"k" * 32] * 3, 99))
    yield Target(
        "invite",
        (text.encode(), text.upper().encode() + b"\n"),
        lambda data: invite.decode(data.decode("latin-1")),
        invite.InviteError,
    )


class Follower:
    """A chain that an entry is appended to after each of its beginnings, as a node does with what comes."""

    def __init__(self, raws: tuple[bytes, ...]) -> None:
        self._chains = [Chain()]
        for raw in raws:
            chain = self._chains[-1].copy()
            chain.append(raw)
            self._chains.append(chain)
        self._turn = 0

    def append(self, raw: bytes) -> None:
        self._turn = (self._turn + 1) % len(self._chains)
        self._chains[self._turn].copy().append(raw)


def mutants(examples: tuple[bytes, ...], chance: random.Random) -> Iterator[bytes]:
    """Endless damaged examples."""
    while True:
        frame = bytearray(chance.choice(examples))
        for _ in range(chance.randint(1, 4)):
            _damage(frame, examples, chance)
        yield bytes(frame)


def _damage(frame: bytearray, examples: tuple[bytes, ...], chance: random.Random) -> None:
    at, length = chance.randint(0, len(frame)), chance.randint(0, 12)
    match chance.randrange(7):
        case 0 if frame:
            frame[at % len(frame)] ^= 1 << chance.randrange(8)
        case 1 if frame:
            frame[at % len(frame)] = chance.randrange(256)
        case 2:
            del frame[at : at + length]
        case 3:
            frame[at:at] = chance.randbytes(length)
        case 4:
            frame[at:at] = frame[at : at + length]
        case 5:
            frame[at : at + length] = chance.choice(LENGTHS)
        case _:
            other = chance.choice(examples)
            start = chance.randint(0, len(other))
            frame[at : at + length] = other[start : start + length]


def assault(target: Target, count: int, seed: int) -> tuple[int, float]:
    """Try `count` mutants; how many were accepted, and the slowest one's seconds."""
    chance = random.Random(f"{target.name} {seed}")
    accepted, slowest = 0, 0.0
    for number, frame in zip(range(count), mutants(target.examples, chance), strict=False):
        began = time.process_time()
        try:
            target.decode(frame)
            accepted += 1
        except target.refusal as error:
            assert str(error)
        except Exception as error:
            error.add_note(f"mutant {number} of {target.name}, seed {seed}: {frame[:2000].hex()}")
            raise
        slowest = max(slowest, time.process_time() - began)
    return accepted, slowest


def peak() -> int:
    """The most memory this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_mutants_do_no_harm(count: int) -> None:
    aims = list(targets())
    for target in aims:  # caches and lazy imports fill up first
        assault(target, 200, seed=1)
    before, began = peak(), time.perf_counter()
    for target in aims:
        accepted, slowest = assault(target, count // len(aims) + 1, seed=count)
        grown = peak() - before
        print(
            f"{target.name}: {accepted} accepted, slowest {1000 * slowest:.1f} ms, memory +{grown >> 20} MB"
        )
        assert grown < MEMORY and slowest < SLOWEST
    print(f"{count} mutants in {time.perf_counter() - began:.0f} s")


def test_whole_examples_are_accepted() -> None:
    """Else the mutants would be mutants of nothing."""
    for target in targets():
        if target.name != "chain":
            for example in target.examples:
                target.decode(example)


def test_a_header_of_a_million_dimensions_takes_no_time() -> None:
    """Their product would have a million bits: a legal message of a peer kept a node busy for minutes."""
    rows = (("w", "master", "float32", (2,) * 1_000_000),)
    frame = msgspec.msgpack.encode((1, b"r" * 32, 1, b"e" * 32, 5, 1 << 14, rows))
    began = time.process_time()
    with pytest.raises(snapshot.SnapshotError):
        snapshot.decode_header(frame)
    assert time.process_time() - began < SLOWEST
