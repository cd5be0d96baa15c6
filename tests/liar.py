"""Messages of an admitted node that lies: well-formed, near the truth, about everything a node may speak of.

`Liar(desk, name, seed).words()` draws one message a call from what the coordinator's state makes plausible:
the open round and its neighbours, units that exist and that do not, digests that others said, numbers at
every edge of their ranges. Used by `test_liars.py`.
"""

from __future__ import annotations

import random

from protocol import seeds
from protocol.messages import (
    Applied,
    Entries,
    Evidence,
    Failed,
    Fetch,
    Hello,
    Kind,
    Message,
    NodeBeat,
    Rederived,
    Result,
    TensorDigests,
    Unit,
)
from protocol.peers import CatchUp, DonorsAsk, Kept, PeerFault, PeerWay, Reach
from protocol.pieces import pieces_of
from tests.desk import Desk, hello, key_of
from tests.replica import evidence_of

U32, U64 = 2**32 - 1, 2**64 - 1
HUGE = 1.7e308


class Liar:
    """One node's lies; the same seed lies alike."""

    def __init__(self, desk: Desk, name: str, seed: int) -> None:
        self.desk, self.name = desk, name
        self.pick = random.Random(seed)
        self.said: list[tuple[Unit, tuple[float, ...]]] = []  # scores whose hash stands in a result

    def words(self) -> Message:
        """One message that the wire lets pass."""
        kind = self.pick.choice((
            self._hello, self._fetch, self._entries, self._result, self._result, self._failed, self._applied,
            self._beat, self._beat, self._digests, self._rederived, self._rederived, self._evidence,
            self._evidence, self._about_peers,
        ))  # fmt: skip
        return kind()

    # ------------------------------------------------------------ values

    def _u32(self) -> int:
        chain = self.desk.state.chain
        near = (chain.height, chain.round, chain.height - 1, chain.round - 1, chain.round + 1)
        return max(0, self.pick.choice((*near, *near, 0, 1, self.pick.randrange(64), U32)))

    def _digest(self) -> int:
        state = self.desk.state
        known = [d for d in (state.digest, state.chain.digest, *state.proof.words.values()) if d is not None]
        return self.pick.choice([*known, *known, 5, self.pick.getrandbits(64), U64])

    def _tip(self) -> bytes:
        chain = self.desk.state.chain
        return self.pick.choice((chain.tip[:8], chain.tip[:8], chain.entries[0].hash[:8], bytes(8)))

    def _float(self) -> float:
        return self.pick.choice((0.5, 0.5, 0.0, -0.0, 1.0, HUGE, -HUGE, 5e-324, self.pick.gauss(0, 1)))

    def _unit(self) -> Unit:
        state, lock = self.desk.state, self.desk.lock
        held = [lease.unit for node in state.nodes.values() for lease in node.leases]
        held += [half.unit for case in state.audits.cases for half in case.halves]
        if held and self.pick.random() < 0.7:
            return self.pick.choice(held)
        kind = self.pick.choice((Kind.MEMBER, Kind.MEMBER, Kind.PROBE))
        chunks = lock.chunk_count(kind)
        first = self.pick.choice((0, chunks - 1, chunks, self.pick.randrange(chunks)))
        last = first + self.pick.choice((0, 0, 1, chunks - 1))
        member = 0 if kind == Kind.PROBE else self.pick.choice((0, 1, lock.members - 1, lock.members))
        return Unit(self._u32(), kind, member, first, last)

    def _reason(self) -> str:
        return self.pick.choice(("", "because", "\x1b[2J" * 9, "x" * 300, "\u202e"))

    # ------------------------------------------------------------ messages

    def _hello(self) -> Hello:
        chain = self.desk.state.chain
        height, tip = self.pick.choice(
            ((chain.height, chain.tip), (0, b""), (self._u32(), b""), (self._u32(), bytes(32)))
        )
        term = self.pick.choice((0, self.desk.state.term, self._u32()))
        units = tuple(self._unit() for _ in range(self.pick.randrange(4)))
        return hello(
            self.desk.lock, height=height, tip=tip, digest=self._digest(), term=term, units=units,
            proof=self.pick.choice((b"", bytes(104))),
        )  # fmt: skip

    def _fetch(self) -> Fetch:
        return Fetch(self._u32(), self.pick.choice((1, 1024)))

    def _entries(self) -> Entries:
        raws = [entry.raw for entry in self.desk.state.chain.entries[-3:]]
        return Entries(self._u32(), tuple(self.pick.sample(raws, self.pick.randrange(len(raws) + 1))))

    def _result(self) -> Result:
        """Of a unit it holds or does not; now and then its evidence is what it will show later."""
        unit, lock, round = self._unit(), self.desk.lock, self.desk.state.round
        assert round is not None
        scores = tuple(self._float() for _ in range(lock.chunk))
        self.said = [*self.said, (unit, scores)][-8:]
        sums = tuple(self.pick.choice((self._float(), 1.0)) for _ in range(unit.last - unit.first + 1))
        seed = seeds.member_seed(lock.run_id, unit.round, unit.member, lock.mirrored)
        right = (0 if unit.kind else seed, sums, round.parent[:8], self._digest())
        return Result(unit, *right, self._u32(), 0, 0, (1, 2, 3), evidence_of(scores), 0)

    def _failed(self) -> Failed:
        return Failed(self._unit(), self._reason())

    def _applied(self) -> Applied:
        return Applied(self._u32(), self._tip(), self._digest(), self._u32())

    def _beat(self) -> NodeBeat:
        units = tuple((self._unit(), self._u32()) for _ in range(self.pick.choice((0, 1, 3, 20))))
        return NodeBeat(self._u32(), self._tip(), units)

    def _digests(self) -> TensorDigests:
        total = len(pieces_of(self.desk.lock))
        count = self.pick.choice((0, 1, total, total + 1))
        digests = tuple(self._digest() for _ in range(count))
        return TensorDigests(
            self._u32(), self.pick.choice((0, 1, U32)), self.pick.choice((total, 1)), digests
        )

    def _rederived(self) -> Rederived:
        pieces = tuple(self.pick.choice((0, 1, 7, U32)) for _ in range(self.pick.randrange(3)))
        held = tuple(self._digest() for _ in range(self.pick.randrange(4)))
        derived = self.pick.choice((held, held[:1], tuple(self._digest() for _ in held)))
        contradicted = self.pick.choice((0, 0, self._u32()))
        words = (self._u32(), pieces, held, derived, self._digest(), contradicted, "liar", self._reason())
        return Rederived(*words, self.pick.choice((0, 1, U32)))

    def _evidence(self) -> Evidence:
        if self.said and self.pick.random() < 0.6:
            unit, scores = self.pick.choice(self.said)
            return Evidence(unit, 0, len(scores), scores)
        scores = tuple(self._float() for _ in range(self.pick.randrange(9)))
        return Evidence(self._unit(), self.pick.choice((0, 1, U32)), self._u32(), scores)

    def _about_peers(self) -> Message:
        key = self.pick.choice([*self.desk.state.nodes, key_of(self.name), bytes(32)])
        root = self.pick.choice((bytes(32), b"\xff" * 32, self.pick.randbytes(32)))
        return self.pick.choice((
            Reach(self.pick.choice((("tcp://[::1]:1", "x"), ("ipc:///x",), ()))),
            Kept(self._u32(), root, self.pick.choice((0, U64))),
            DonorsAsk(self._u32()),
            CatchUp(self.pick.choice(("snapshot", "replay", "\x1b[2J")), self._reason()),
            PeerWay(key, "direct", self._reason()),
            PeerFault(key, root, self._u32(), self._reason()),
        ))  # fmt: skip
