"""The wire: every message round-trips, golden bytes hold, and no bytes whatever do harm."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol import peers, wire
from protocol.entries import EndBody, seal
from protocol.messages import (
    BLOB_PART,
    LONGEST_FRAME,
    MOST_FRAMES,
    Ack,
    Applied,
    Assign,
    Blob,
    BlobAsk,
    Bundle,
    Bye,
    Cancel,
    Commit,
    CoordBeat,
    DigestAsk,
    Enrol,
    Enrolled,
    Entries,
    Evidence,
    EvidenceAsk,
    Failed,
    Fetch,
    Hello,
    Kind,
    Message,
    NodeBeat,
    Rederive,
    Rederived,
    Refuse,
    Rehello,
    Release,
    Result,
    Return,
    TensorDigests,
    Unit,
    Welcome,
)
from protocol.ranges import (
    MAX_CHUNKS,
    MAX_ENGINES,
    MAX_ENTRIES,
    MAX_LANES,
    MAX_LOST,
    MAX_PIECES,
    MAX_UNITS,
    reader,
)
from protocol.wire import (
    MAX_FRAME,
    RULE_BY_TAG,
    RULE_BY_TYPE,
    TABLE,
    MalformedMessage,
    decode,
    encode,
    fitting,
    schema_table,
)
from protocol.zmtp import wire_size

GOLDEN = Path(__file__).parent / "golden" / "wire.json"
KEY = bytes(range(32))
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def entry(reason: str = "done") -> bytes:
    return seal(
        EndBody(reason), parent=bytes(32), term=1, nonce=b"8 bytes!", round=2, digest=2**64 - 1, key=KEY
    ).raw


PROOF = bytes(range(104))
UNIT = Unit(12, Kind.MEMBER, 30, 0, 3)
EXAMPLES: tuple[Message, ...] = (
    Hello(1, 1, 1, b"r" * 32, "a", "cpu", "E", b"selftest", (b"finger__",), 9, b"t" * 32, 2**64 - 1, 3,
          (UNIT,), PROOF, 8, "lane 1"),
    Welcome(1, b"r" * 32, b"{}", 3, 9, b"t" * 32, PROOF),
    Refuse("two machines use one key"),
    Rehello(),
    Fetch(4, 100),
    Entries(4, (entry(), entry("or not"))),
    Assign(UNIT, b"parent__", 15),
    Result(UNIT, 2**63, (1.5, -2.0, 0.0, 1e-300), b"parent__", 2**63, 12, 1, 99, (1, 70000, 9),
           b"evidence", 1),
    Ack(UNIT, "ok"),
    Failed(UNIT, "out of memory"),
    Release("leaving", True),
    Cancel(UNIT),
    Commit(9, entry()),
    Applied(10, b"tip_____", 2**64 - 1, 250),
    NodeBeat(10, b"tip_____", ((UNIT, 512), (Unit(12, Kind.PROBE, 0, 0, 1), 0))),
    CoordBeat(3, 10, b"tip_____", (UNIT,)),
    Bye("the run ended"),
    Enrol(b"k" * 32, "a"),
    Enrolled(b"r" * 32, 7),
    BlobAsk(1, 1, b"d" * 32, 2**18),
    Blob(b"d" * 32, 2**18, 2**18 + 3, b"end"),
    DigestAsk(12, 0, "node-b has another digest"),
    TensorDigests(12, 0, 2, (2**64 - 1, 7)),
    Rederive(12, (0, 5), "node-b has another digest", 1),
    Rederived(12, (0, 5), (1, 2**64 - 1), (1, 2), 2**63, 0, "reference", "as asked", 10),
    EvidenceAsk(UNIT, 0),
    Evidence(UNIT, 0, 2, (0.25, 1.0)),
    Bundle((encode(Ack(UNIT, "ok")), encode(Rehello()))),
    peers.Reach(("tcp://10.0.0.7:4100", "tcp://[fd00::7]:4100")),
    peers.Snapshots(10, 4200),
    peers.Kept(20, b"R" * 32, 2**40),
    peers.DonorsAsk(3),
    peers.Donors(20, b"R" * 32, 2**40, (peers.Donor(b"k" * 32, "b", ("tcp://10.0.0.7:4100",)),)),
    peers.CatchUp("snapshot", "20 s by snapshot, 90 s by replay"),
    peers.PeerWay(b"k" * 32, "relay", "no answer at tcp://10.0.0.7:4100"),
    peers.PeerFault(b"k" * 32, b"R" * 32, 7, "its hash does not fit"),
    peers.HeadAsk(b"R" * 32, 0),
    peers.Head(b"R" * 32, 0, 3, b"end"),
    peers.PartAsk(b"R" * 32, 7, 2**18, 2**18),
    peers.PartData(b"R" * 32, 7, 2**18, b"weights"),
    peers.Sorry(b"R" * 32, "it is gone"),
    peers.WrongFile(20, b"R" * 32, "the signed root is another"),
    peers.Neighbours((peers.Donor(b"k" * 32, "b", ("tcp://10.0.0.7:4100",)),)),
    Return(3, 7, entry()),
)  # fmt: skip


def sender_of(message: Message) -> str:
    sender = RULE_BY_TYPE[type(message)].sender
    return "node" if sender == "any" else sender.split(", ")[0]


# ---------------------------------------------------------------- round trips

UNITS = st.builds(
    lambda round, kind, member, first, span: Unit(round, kind, 0 if kind else member, first, first + span),
    U32, st.sampled_from([0, 1]), st.integers(0, 4095), st.integers(0, 2**31), st.integers(0, 9),
)  # fmt: skip
TEXT = st.text(max_size=60)
B8 = st.binary(min_size=8, max_size=8)
B32 = st.binary(min_size=32, max_size=32)
RAW = st.text(max_size=40).map(entry)
SUMS = st.floats(allow_nan=False, allow_infinity=False)
RESULTS = UNITS.flatmap(
    lambda unit: st.builds(
        Result,
        st.just(unit),
        U64,
        st.tuples(*[SUMS] * (unit.last - unit.first + 1)),
        B8, U64, U32, U32, U32, st.tuples(U32, U32, U32), B8,
        st.integers(0, MAX_ENGINES),
    )
)  # fmt: skip
PIECES = st.lists(U32, max_size=MAX_PIECES).map(tuple)
DIGESTS = st.lists(U64, max_size=MAX_PIECES).map(tuple)
STRATEGIES: dict[type[Message], st.SearchStrategy[Any]] = {
    Hello: st.builds(
        Hello, U32, U32, U32, st.one_of(B32, st.just(b"")), TEXT, TEXT, TEXT, B8,
        st.lists(B8, max_size=MAX_ENGINES).map(tuple), U32,
        st.one_of(B32, st.just(b"")), U64, U32, st.lists(UNITS, max_size=4).map(tuple),
        st.sampled_from([b"", PROOF]), st.integers(1, MAX_LANES), TEXT,
    ),
    Welcome: st.builds(Welcome, U32, B32, st.binary(max_size=99), U32, U32, B32, st.just(PROOF)),
    Return: st.builds(Return, U32, U32, RAW),
    Refuse: st.builds(Refuse, TEXT),
    Rehello: st.just(Rehello()),
    Fetch: st.builds(Fetch, U32, st.integers(1, MAX_ENTRIES)),
    Entries: st.builds(Entries, U32, st.lists(RAW, max_size=3).map(tuple)),
    Assign: st.builds(Assign, UNITS, B8, U32),
    Result: RESULTS,
    Ack: st.builds(Ack, UNITS, TEXT),
    Failed: st.builds(Failed, UNITS, TEXT),
    Release: st.builds(Release, TEXT, st.booleans()),
    Cancel: st.builds(Cancel, UNITS),
    Commit: st.builds(Commit, U32, RAW),
    Applied: st.builds(Applied, U32, B8, U64, U32),
    NodeBeat: st.builds(
        NodeBeat, U32, B8, st.lists(st.tuples(UNITS, st.integers(0, 1000)), max_size=4).map(tuple)
    ),
    CoordBeat: st.builds(CoordBeat, U32, U32, B8, st.lists(UNITS, max_size=4).map(tuple)),
    Bye: st.builds(Bye, TEXT),
    Enrol: st.builds(Enrol, B32, TEXT),
    Enrolled: st.builds(Enrolled, B32, U32),
    BlobAsk: st.builds(BlobAsk, U32, U32, B32, U32),
    Blob: st.builds(
        lambda digest, offset, data, rest: Blob(digest, offset, offset + len(data) + rest, data),
        B32, st.integers(0, 2**31), st.binary(min_size=1, max_size=99), st.integers(0, 2**30),
    ),
    DigestAsk: st.builds(DigestAsk, U32, U32, TEXT),
    TensorDigests: st.builds(TensorDigests, U32, U32, U32, st.lists(U64, max_size=9).map(tuple)),
    Rederive: st.builds(Rederive, U32, PIECES, TEXT, U32),
    Rederived: st.builds(Rederived, U32, PIECES, DIGESTS, DIGESTS, U64, U32, TEXT, TEXT, U32),
    EvidenceAsk: st.builds(EvidenceAsk, UNITS, U32),
    peers.Reach: st.builds(peers.Reach, st.lists(TEXT, max_size=peers.MOST_ADDRESSES).map(tuple)),
    peers.Snapshots: st.builds(peers.Snapshots, U32, st.integers(0, 65535)),
    peers.Kept: st.builds(peers.Kept, U32, B32, U64),
    peers.DonorsAsk: st.builds(peers.DonorsAsk, U32),
    peers.Donors: st.builds(
        peers.Donors, U32, B32, U64,
        st.lists(
            st.builds(peers.Donor, B32, TEXT, st.lists(TEXT, max_size=2).map(tuple)), max_size=3
        ).map(tuple),
    ),
    peers.CatchUp: st.builds(peers.CatchUp, st.text(max_size=16), TEXT),
    peers.PeerWay: st.builds(peers.PeerWay, B32, st.text(max_size=16), TEXT),
    peers.PeerFault: st.builds(peers.PeerFault, B32, B32, U32, TEXT),
    peers.HeadAsk: st.builds(peers.HeadAsk, B32, U32),
    peers.Head: st.builds(peers.Head, B32, U32, U32, st.binary(max_size=99)),
    peers.PartAsk: st.builds(peers.PartAsk, B32, U32, U32, st.integers(1, peers.GRANT)),
    peers.PartData: st.builds(peers.PartData, B32, U32, U32, st.binary(max_size=99)),
    peers.Sorry: st.builds(peers.Sorry, B32, TEXT),
    peers.WrongFile: st.builds(peers.WrongFile, U32, B32, TEXT),
    peers.Neighbours: st.builds(
        peers.Neighbours,
        st.lists(
            st.builds(peers.Donor, B32, TEXT, st.lists(TEXT, max_size=2).map(tuple)), max_size=3
        ).map(tuple),
    ),
    Evidence: st.builds(Evidence, UNITS, U32, U32, st.lists(SUMS, max_size=9).map(tuple)),
    Bundle: st.builds(Bundle, st.lists(st.binary(max_size=40), max_size=5).map(tuple)),
}  # fmt: skip


def test_every_message_is_covered() -> None:
    types = [rule.type for rule in TABLE]
    assert set(STRATEGIES) == set(types) == {type(message) for message in EXAMPLES}
    assert len({rule.tag for rule in TABLE}) == len(TABLE) and max(rule.tag for rule in TABLE) < 128


@settings(max_examples=400, deadline=None)
@given(st.one_of(*STRATEGIES.values()))
def test_round_trip(message: Message) -> None:
    frame = encode(message)
    assert decode(frame, sender_of(message)) == message
    assert len(frame) <= RULE_BY_TYPE[type(message)].limit


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_golden_bytes(message: Message) -> None:
    """These bytes are wire version 1. A change here is a new wire version."""
    golden = json.loads(GOLDEN.read_text())
    name = type(message).__name__
    assert encode(message).hex() == golden[name]
    assert decode(bytes.fromhex(golden[name]), sender_of(message)) == message


def test_the_page_holds_the_schema() -> None:
    """docs/wire.md is generated from SCHEMA."""
    assert schema_table() in (Path(__file__).parent.parent / "docs" / "wire.md").read_text()


# ---------------------------------------------------------------- sizes


def test_a_unit_costs_little() -> None:
    """Assign + Result + Ack of one unit of four chunks, on the socket, plain."""
    unit = Unit(2**31, Kind.MEMBER, 4095, 100, 103)
    spoken = (
        Assign(unit, b"parent__", 3600),
        Result(
            unit, 2**64 - 1, (1.25,) * 4, b"parent__", 2**64 - 1, 999, 99, 10**6, (10**6,) * 3, b"evidence", 0
        ),
        Ack(unit, "ok"),
    )
    assert sum(wire_size(len(encode(message)), encrypted=False) for message in spoken) <= 220


def test_small_messages_share_a_frame() -> None:
    ack, large = encode(Ack(UNIT, "ok")), bytes(LONGEST_FRAME + 1)
    assert [group for group, _ in wire.bundles([ack, large, ack, ack])] == [[ack], [large], [ack, ack]]
    assert [len(group) for group, _ in wire.bundles([ack] * 130)] == [64, 64, 2] and not wire.bundles([])
    [(_, both)] = wire.bundles([ack, encode(Rehello())])
    assert both == encode(Bundle((ack, encode(Rehello()))))
    assert wire.decode_all(both) == [Ack(UNIT, "ok"), Rehello()]
    assert wire.decode_all(ack) == [Ack(UNIT, "ok")]
    for inner in (both, encode(Release("a node's word")), b"\x91\x09", b""):
        with pytest.raises(MalformedMessage):
            wire.decode_all(encode(Bundle((ack, inner))))


def test_limits_fit_the_largest_legal_messages() -> None:
    unit = Unit(2**32 - 1, Kind.MEMBER, 4095, 2**31, 2**31 + MAX_CHUNKS - 1)
    small = Unit(2**32 - 1, Kind.MEMBER, 4095, 2**32 - 1, 2**32 - 1)
    result = Result(
        unit,
        2**64 - 1,
        (0.5,) * MAX_CHUNKS,
        b"p" * 8,
        2**64 - 1,
        *[2**32 - 1] * 3,
        (2**32 - 1,) * 3,
        b"e" * 8,
        MAX_ENGINES,
    )
    for message in (
        result,
        Hello(*[2**32 - 1] * 3, b"r" * 32, "é" * 64, "é" * 64, "é" * 200, b"s" * 8, (b"f" * 8,) * MAX_ENGINES,
              2**32 - 1, b"t" * 32, 2**64 - 1, 2**32 - 1, (small,) * MAX_UNITS, PROOF, MAX_LANES,
              "é" * MAX_LOST),
        NodeBeat(2**32 - 1, b"t" * 8, ((small, 1000),) * MAX_UNITS),
        CoordBeat(2**32 - 1, 2**32 - 1, b"t" * 8, (small,) * MAX_UNITS),
        Assign(small, b"p" * 8, 2**32 - 1),
        Applied(2**32 - 1, b"t" * 8, 2**64 - 1, 2**32 - 1),
        Cancel(small),
        *(type(m)("\U0001f600" * 1000) for m in (Refuse(""), Release(""), Bye(""))),
        Failed(small, "\U0001f600" * 1000),
        BlobAsk(2**32 - 1, 2**32 - 1, b"d" * 32, 2**32 - 1),
        Blob(b"d" * 32, 2**31, 2**32 - 1, bytes(BLOB_PART)),
        Ack(small, "\U0001f600" * 1000),
        Bundle((bytes(LONGEST_FRAME),) * MOST_FRAMES),
        peers.Reach(("a" * 120,) * peers.MOST_ADDRESSES),
        peers.Donors(
            2**32 - 1, b"R" * 32, 2**64 - 1,
            (peers.Donor(b"k" * 32, "é" * 64, ("a" * 120,) * peers.MOST_ADDRESSES),) * peers.MOST_DONORS,
        ),
        peers.Head(b"R" * 32, 2**32 - 1, 2**32 - 1, bytes(peers.SLICE)),
        peers.PartData(b"R" * 32, 2**32 - 1, 2**32 - 1, bytes(peers.SLICE)),
        peers.PartAsk(b"R" * 32, 2**32 - 1, 2**32 - 1, peers.GRANT),
        peers.Kept(2**32 - 1, b"R" * 32, 2**64 - 1),
        peers.Snapshots(2**32 - 1, 65535),
        *(m(b"k" * 32, b"R" * 32, 2**32 - 1, "\U0001f600" * 1000) for m in (peers.PeerFault,)),
        peers.PeerWay(b"k" * 32, "é" * 16, "\U0001f600" * 1000),
    ):  # fmt: skip
        assert decode(encode(message), sender_of(message))


def test_reasons_are_cut_and_everything_else_is_refused() -> None:
    cut = decode(encode(Refuse("x" * 3000 + "\ud800")), "coordinator")
    assert isinstance(cut, Refuse) and len(cut.reason) == 500 and cut.reason.endswith("...")
    for wrong in (
        Fetch(0, MAX_ENTRIES + 1),
        Applied(-1, b"12345678", 0, 0),
        Cancel(Unit(0, 0, 0, 3, 2)),
        Commit(1, b"no entry"),
        Blob(b"d" * 32, 0, 2, b"123"),
        Blob(b"d" * 32, 0, 2, b""),
        Blob(b"d" * 32, 0, 2**20, bytes(BLOB_PART + 1)),
        Commit(1, entry()[:-1] + b"x" + b"y"),
        Entries(0, (entry()[:-70] + bytes(70),)),
    ):
        with pytest.raises(ValueError):
            encode(wrong)


def test_fitting_fills_a_message_and_no_more() -> None:
    raws = [entry("x" * 400)] * 3000
    taken = fitting(raws)
    assert len(taken) == MAX_ENTRIES and encode(Entries(0, taken))
    assert fitting([]) == ()


# ---------------------------------------------------------------- refusals


def refused(frame: bytes, sender: str) -> str:
    with pytest.raises(MalformedMessage) as caught:
        decode(frame, sender)
    return str(caught.value)


def pack(*values: Any) -> bytes:
    return msgpack.packb(list(values))


RESULT = [8, [1, 0, 2, 0, 1], 7, [1.0, 2.0], b"p" * 8, 5, 0, 0, 9, [1, 2, 3], b"e" * 8, 0]


def result_with(position: int, value: Any) -> bytes:
    return pack(*RESULT[:position], value, *RESULT[position + 1 :])


def test_the_plain_result_is_fine() -> None:
    assert isinstance(decode(pack(*RESULT), "node"), Result)


@pytest.mark.parametrize(
    ("frame", "sender", "says"),
    [
        (b"", "node", "no message"),
        (b"\x80", "node", "no message"),
        (pack(), "node", "no message"),
        (pack(99), "node", "unknown tag"),
        (pack(True), "node", "unknown tag"),
        (pack("8"), "node", "unknown tag"),
        (encode(EXAMPLES[7]), "coordinator", "does not come from"),
        (encode(EXAMPLES[6]), "node", "does not come from"),
        (encode(EXAMPLES[6]), "stranger", "does not come from"),
        (encode(EXAMPLES[2]) + b"\0", "coordinator", "extra data"),
        (encode(EXAMPLES[2])[:-1], "coordinator", "incomplete"),
        (pack(4, 0), "coordinator", "Rehello"),
        (pack(4) + bytes(16), "coordinator", "limit is 16"),
        (result_with(3, [1.0, float("nan")]), "node", "finite"),
        (result_with(3, [1.0, float("inf")]), "node", "finite"),
        (result_with(3, [1.0]), "node", "1 sums"),
        (result_with(3, [1.0] * 3), "node", "3 sums"),
        (result_with(3, [1.0, "2"]), "node", "float"),
        (result_with(2, -1), "node", "outside"),
        (result_with(6, 2**32), "node", "outside"),
        (result_with(4, b"p" * 7), "node", "7 bytes"),
        (result_with(4, "AAAAAAAAAAA="), "node", "bytes"),
        (result_with(5, 5.0), "node", "int"),
        (result_with(5, True), "node", "int"),
        (result_with(1, [1, 0, 2, 1, 0]), "node", "chunks"),
        (result_with(1, [1, 2, 2, 0, 1]), "node", "kind"),
        (result_with(1, [1, 0, 4096, 0, 1]), "node", "member"),
        (result_with(1, [1, 1, 3, 0, 1]), "node", "probe of member"),
        (result_with(1, [1, 0, 2, 0]), "node", "length"),
        (result_with(1, [1, 0, 2, 0, 1, 9]), "node", "length"),
        (result_with(9, [1, 2]), "node", "length"),
        (result_with(9, {}), "node", "Result"),
        (result_with(9, {1: 2}), "node", "Result"),
        (pack(*RESULT, 0), "node", "length"),
        (result_with(11, MAX_ENGINES + 1), "node", "engine"),
        (pack(*RESULT[:-1]), "node", "length"),
        (pack(5, 0, 0), "node", "count"),
        (pack(13, 1, b"x" * 64), "coordinator", "entry"),
        (pack(10, [1, 0, 2, 0, 1], "x" * 501), "node", "501 characters"),
        (pack(10, [1, 0, 2, 0, 1], msgpack.ExtType(1, b"x")), "node", "Failed"),
        (pack(10, [1, 0, 2, 0, 1], msgpack.Timestamp(1)), "node", "Failed"),
        (b"\x92\x0b\xa2\xff\xfe", "node", "utf-8"),
        (b"\x92\x0b\xc1", "node", "Release"),
        (b"\x92\x0b\xdd\xff\xff\xff\xff", "node", "Release"),
        (b"\x92\x0b\xdb\xff\xff\xff\xff", "node", "Release"),
        (b"\x92\x0b" + b"\x91" * 2000, "node", "Release"),
    ],
)  # fmt: skip
def test_refused(frame: bytes, sender: str, says: str) -> None:
    assert says in refused(frame, sender)


def test_a_later_hello_is_still_read() -> None:
    """Versions are agreed in Hello, so what later ones append to it and to Enrol is skipped, there only."""
    for early in (EXAMPLES[0], Enrol(KEY, "a")):
        fields = msgpack.unpackb(encode(early))
        assert decode(pack(*fields, 7, "new"), "node") == early
    assert "length" in refused(pack(*msgpack.unpackb(encode(EXAMPLES[13])), 7), "node")


# ---------------------------------------------------------------- the quick reader and the plain one

READ_QUICKLY = [m for m in EXAMPLES if reader(type(m)) is not None and not isinstance(m, Enrol)]
ODD = [None, True, -1, 0, 1, 127, 2**31, 2**32, 2**64 - 1, 1.5, float("nan"), float("inf"), "x", "x" * 501]
ODD += [b"x", b"12345678", bytes(32), [], [1], [1.0, 2], {}, [1, 0, 2, 0, 1], [1, 1, 3, 0, 1]]


def quickly(frame: bytes) -> Message | None:
    quick = reader(RULE_BY_TAG[frame[1]].type)
    assert quick is not None
    try:
        message = quick.build(quick.parse(frame))
    except ValueError:
        return None
    return message if quick.fits(message) else None


def plainly(frame: bytes) -> Message | None:
    try:
        return wire._decoded(RULE_BY_TAG[frame[1]], frame)
    except MalformedMessage:
        return None


def test_what_passes_by_the_thousand_is_read_quickly() -> None:
    assert {Assign, Result, Ack, Applied, Cancel, EvidenceAsk, Evidence} <= {type(m) for m in READ_QUICKLY}


@pytest.mark.parametrize("message", READ_QUICKLY, ids=lambda m: type(m).__name__)
def test_both_readers_let_the_same_frames_pass(message: Message) -> None:
    """Every field in turn is another value, and every byte another byte: one verdict, one message."""
    frame = encode(message)
    assert frame == wire._encoded(RULE_BY_TYPE[type(message)], message)
    tag, *fields = msgpack.unpackb(frame)
    frames = [pack(tag, *fields[:k], odd, *fields[k + 1 :]) for k in range(len(fields)) for odd in ODD]
    if fields and isinstance(fields[0], list):
        inner = [[*fields[0][:k], odd, *fields[0][k + 1 :]] for k in range(len(fields[0])) for odd in ODD]
        frames += [pack(tag, unit, *fields[1:]) for unit in inner]
    dice = random.Random(type(message).__name__)
    for _ in range(2000):
        place = dice.randrange(2, len(frame)) if len(frame) > 2 else 0
        frames.append(frame[:place] + bytes((dice.randrange(256),)) + frame[place + 1 :])
    frames += [frame[:place] for place in range(2, len(frame))] + [frame + b"\0", pack(tag, *fields, 7)]
    passed = 0
    for other in frames:
        if len(other) > 1 and other[1] == tag and len(other) <= RULE_BY_TAG[tag].limit:
            found = quickly(other)
            assert found == plainly(other), other.hex()
            passed += found is not None
    assert passed or not fields


# ---------------------------------------------------------------- any bytes whatever


def survive(frame: bytes) -> None:
    for sender in ("node", "coordinator", "peer", ""):
        try:
            message = decode(frame, sender)
        except MalformedMessage:
            continue
        assert decode(encode(message), sender_of(message)) == message


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
@example(b"\xdc\xff\xff" * 100)
def test_random_bytes(frame: bytes) -> None:
    survive(frame)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=16) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([rule.tag for rule in TABLE]), st.lists(TREES, max_size=15))
def test_well_formed_msgpack_of_any_shape(tag: int, fields: list[Any]) -> None:
    survive(pack(tag, *fields))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_mutated_frames(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(frame) - 1))
        action = data.draw(st.sampled_from(["set", "drop", "insert"]))
        if action == "set":
            frame[position] = data.draw(st.integers(0, 255))
        elif action == "insert":
            frame.insert(position, data.draw(st.integers(0, 255)))
        elif len(frame) > 1:
            del frame[position]
    survive(bytes(frame))


def test_every_single_bit_of_every_example() -> None:
    for message in EXAMPLES:
        frame = encode(message)
        for bit in range(8 * len(frame)):
            flipped = bytearray(frame)
            flipped[bit // 8] ^= 1 << bit % 8
            survive(bytes(flipped))


def test_claims_of_huge_arrays_allocate_nothing() -> None:
    """A few bytes that announce gigabytes, and nests of arrays, must cost no memory worth the name."""
    chance = random.Random(1)
    frames = [bytes([0x92, rule.tag]) + b"\xdd\x7f\xff\xff\xff" * 4 for rule in TABLE]
    frames += [
        bytes([0x92, rule.tag]) + b"\xdc\x10\x00" * (rule.limit // 3 - 1)
        for rule in TABLE
        if rule.limit < 10**5
    ]
    frames += [bytes([0x92, 13]) + chance.randbytes(1000) for _ in range(50)]
    tracemalloc.start()
    for frame in frames:
        survive(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


def test_an_oversized_frame_is_refused_before_it_is_parsed() -> None:
    assert max(rule.limit for rule in TABLE) == MAX_FRAME
    assert "limit" in refused(bytes([0x92, 13]) + bytes(MAX_FRAME), "coordinator")
