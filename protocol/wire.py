"""Messages to bytes and back. Nothing else parses what comes from the network.

Pure. A frame is one msgpack array `[tag, field, ...]`. `decode` bounds it before it allocates (size, and
lengths of texts, bytes and arrays, per row of the schema table), then checks every type, then every range.
Whatever the bytes are, it returns a message or raises MalformedMessage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, cast, get_args, get_origin

import msgpack
import msgspec

from protocol.entries import HASH, MAX_NAME, MAX_REASON, MalformedEntry, packed, short, unpacked
from protocol.lock import MAX_MEMBERS
from protocol.messages import (
    BLOB_PART,
    SCHEMA,
    AnyMessage,
    Blob,
    Commit,
    Enrol,
    Entries,
    Fetch,
    Hello,
    Kind,
    Message,
    Result,
    Return,
    Rule,
    Unit,
    Welcome,
)
from protocol.peers import GRANT, MOST_ADDRESSES, MOST_DONORS, MOST_NEIGHBOURS, PartAsk, Snapshots
from protocol.peers import SCHEMA as PEER_SCHEMA
from protocol.terms import PROOF

TABLE = (*SCHEMA, *PEER_SCHEMA)
RULE_BY_TAG = {rule.tag: rule for rule in TABLE}
RULE_BY_TYPE = {rule.type: rule for rule in TABLE}
MAX_FRAME = max(rule.limit for rule in TABLE)  # what MAXMSGSIZE must let through
MAX_ENTRIES = 1024  # entries in one Fetch or Entries
MAX_UNITS = 64  # units named in one Hello or heartbeat
MAX_CHUNKS = 4096  # chunk sums in one Result
MAX_LANES = 32  # units a node evaluates at once
MAX_ENGINES = 16  # fingerprints in one Hello; a Result may name one more: it is not known
_EARLY = (Hello, Enrol)
MAX_VALUES = 2048  # digests in one TensorDigests, rewards in one Evidence
MAX_PIECES = 16  # in one Rederive
_U32 = 2**32 - 1
_U64 = 2**64 - 1


class MalformedMessage(Exception):
    """Why a frame was refused, in words for the log. Its sender is at fault, or runs another version."""


class OversizedMessage(MalformedMessage):
    """A frame larger than its row of the schema table allows; nothing of it was parsed."""


def encode(message: Message) -> bytes:
    """One frame. ValueError when the message breaks its own rules: nothing unreadable is ever sent.

    Reasons and verdicts are for people and often hold foreign text: they are cut to length instead.
    """
    rule = RULE_BY_TYPE[type(message)]
    for name in _WORDS[type(message)]:
        given = getattr(message, name)
        words = short(given, _LENGTHS[name])
        if words != given:
            message = msgspec.structs.replace(message, **{name: words})
    reason = _fault(message)
    if reason:
        raise ValueError(f"{rule.type.__name__}: {reason}")
    try:
        fields = msgspec.msgpack.encode(_entries(message, packed))
    except MalformedEntry as error:
        raise ValueError(f"{rule.type.__name__}: {error}") from error
    frame = _tagged(rule.tag, fields)
    if len(frame) > rule.limit:
        raise ValueError(f"{rule.type.__name__} of {len(frame)} bytes, the limit is {rule.limit}")
    return frame


def _tagged(tag: int, fields: bytes) -> bytes:
    """The array of a message's fields with its tag in front of them."""
    if 0x90 <= fields[0] < 0x9F:  # up to 14 fields: one byte says array and length
        return bytes((fields[0] + 1, tag)) + fields[1:]
    count = int.from_bytes(fields[1:3], "big") if fields[0] == 0xDC else fields[0] - 0x90
    body = fields[3:] if fields[0] == 0xDC else fields[1:]
    return b"\xdc" + (count + 1).to_bytes(2, "big") + bytes((tag,)) + body


def decode(frame: bytes, sender: str) -> AnyMessage:
    """The message of one frame from a "node" or the "coordinator"; raises MalformedMessage, nothing else."""
    rule = _rule(frame, sender)
    name = rule.type.__name__
    try:
        plain = msgpack.unpackb(
            frame,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=rule.limit,
            max_bin_len=rule.limit,
            max_array_len=min(rule.limit, MAX_CHUNKS),
            max_map_len=0,
            max_ext_len=0,
        )
        fields = plain[1:]
        if rule.type in _EARLY:  # sent before a version is agreed: what later versions append is theirs
            fields = fields[: len(rule.type.__struct_fields__)]
        # bytes are named as a plain type: otherwise msgspec would take base64 text for them
        found = msgspec.convert(fields, rule.type, strict=True, builtin_types=(bytes,))
        message = _entries(found, unpacked)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, MalformedEntry) as error:
        raise MalformedMessage(f"{name}: {str(error) or type(error).__name__}") from error
    reason = _fault(message)
    if reason:
        raise MalformedMessage(f"{name}: {reason}")
    return cast(AnyMessage, message)


def _entries(message: Message, change: Callable[[bytes], bytes]) -> Message:
    """The message with its ledger entries packed or unpacked; their hashes need not travel."""
    if isinstance(message, Commit | Return):
        return msgspec.structs.replace(message, entry=change(message.entry))
    if isinstance(message, Entries):
        return msgspec.structs.replace(message, entries=tuple(map(change, message.entries)))
    return message


def _rule(frame: bytes, sender: str) -> Rule:
    """The schema row of a frame, from its first bytes; sender and size are checked before parsing."""
    tag = -1
    if len(frame) >= 2 and 0x91 <= frame[0] <= 0x9F:  # every message has 1 to 15 elements
        tag = frame[1]
    elif len(frame) >= 4 and frame[0] == 0xDC:  # a longer array: a later version with more fields
        tag = frame[3]
    rule = RULE_BY_TAG.get(tag)
    if rule is None:
        raise MalformedMessage("no message of this wire version: unknown tag or no array")
    if rule.sender != "any" and sender not in rule.sender.split(", "):
        raise MalformedMessage(f"{rule.type.__name__} does not come from a {sender}")
    if len(frame) > rule.limit:
        raise OversizedMessage(f"{rule.type.__name__} of {len(frame)} bytes, the limit is {rule.limit}")
    return rule


# ---------------------------------------------------------------- ranges

_WIDE = dict.fromkeys(
    ("seed", "digest", "digests", "held", "derived", "size"), _U64
)  # any other integer is a u32
_SMALL: dict[type[Message], dict[str, tuple[int, int]]] = {
    Fetch: {"count": (1, MAX_ENTRIES)},
    Snapshots: {"relay": (0, 65535)},
    PartAsk: {"size": (1, GRANT)},
    Hello: {"lanes": (1, MAX_LANES)},
    Result: {"engine": (0, MAX_ENGINES)},
    Unit: {"kind": (0, max(Kind)), "member": (0, MAX_MEMBERS - 1)},
}
_SIZES: dict[str, tuple[int, ...]] = {
    "run": (HASH,),
    "tip": (8,),
    "parent": (8,),
    "selftest": (8,),
    "fingerprints": (8,),
    "evidence": (8,),
    "root": (HASH,),
    "key": (HASH,),
    "proof": (0, PROOF),
    "digest": (HASH,),  # of a blob; the digests of masters are numbers
}
_SIZES_OF: dict[type[Message], dict[str, tuple[int, ...]]] = {
    Hello: {"run": (0, HASH), "tip": (0, HASH)},  # a newcomer knows neither run nor chain
    Welcome: {"tip": (0, HASH), "proof": (PROOF,)},
}
_LENGTHS = {"name": MAX_NAME, "backend": 64, "device": 200, "reason": MAX_REASON, "verdict": 100, "by": 200}
_LENGTHS |= {"addresses": 120, "way": 16}
_COUNTS = {"units": MAX_UNITS, "entries": MAX_ENTRIES, "sums": MAX_CHUNKS, "times": 3}
_COUNTS |= dict.fromkeys(("pieces", "held", "derived"), MAX_PIECES)
_COUNTS |= dict.fromkeys(("digests", "scores"), MAX_VALUES)
_COUNTS |= {"fingerprints": MAX_ENGINES, "addresses": MOST_ADDRESSES, "donors": MOST_DONORS}
_COUNTS |= {"peers": MOST_NEIGHBOURS}


_WORDS = {
    rule.type: [name for name in ("reason", "verdict") if name in rule.type.__struct_fields__]
    for rule in TABLE
}
Check = Callable[[Any], str]


def _fault(message: Message) -> str:
    """What is out of its range in a message whose types are right; empty when nothing is."""
    for get, check in _checks(type(message)):
        fault = check(get(message))
        if fault:
            return fault
    if isinstance(message, Unit):
        return _unit_fault(message)
    if isinstance(message, Result) and len(message.sums) != message.unit.last - message.unit.first + 1:
        return f"{len(message.sums)} sums for chunks {message.unit.first} to {message.unit.last}"
    if isinstance(message, Blob):
        return _blob_fault(message)
    return ""


def _blob_fault(blob: Blob) -> str:
    end = blob.offset + len(blob.data)
    if len(blob.data) > BLOB_PART or end > blob.total or (not blob.data and blob.offset < blob.total):
        return f"{len(blob.data)} bytes from {blob.offset} on of {blob.total}"
    return ""


@cache
def _checks(owner: type[Message]) -> tuple[tuple[Callable[[Message], Any], Check], ...]:
    """How each field of a message type is read and checked: the tables above, looked up once per type."""
    rows = msgspec.structs.fields(owner)
    return tuple((attrgetter(row.name), _check(owner, row.name, row.type)) for row in rows)


def _check(owner: type[Message], name: str, kind: Any) -> Check:
    """The check of one field, or of a tuple's element, by its declared type."""
    if kind is int:
        return _whole_check(name, *_SMALL.get(owner, {}).get(name, (0, _WIDE.get(name, _U32))))
    if kind is float:
        return lambda value: "" if math.isfinite(value) else f"{name} = {value}, not a finite number"
    if kind is bytes:
        sizes = _SIZES_OF.get(owner, {}).get(name) or _SIZES.get(name)
        return lambda value: "" if not sizes or len(value) in sizes else f"{name} of {len(value)} bytes"
    if kind is str:
        longest = _LENGTHS[name]
        return lambda value: "" if len(value) <= longest else f"{name} of {len(value)} characters"
    if isinstance(kind, type) and issubclass(kind, Message):
        return _known_unit if kind is Unit else _fault
    elements = get_args(kind)
    if get_origin(kind) is not tuple:
        raise TypeError(f"{owner.__name__}.{name}: no check for {kind}")
    if elements[-1] is Ellipsis:
        return _row_check(name, _COUNTS.get(name, MAX_CHUNKS), _check(owner, name, elements[0]))
    return _each_check(tuple(_check(owner, name, element) for element in elements))


def _whole_check(name: str, low: int, high: int) -> Check:
    return lambda value: "" if low <= value <= high else f"{name} = {value}, outside {low} .. {high}"


def _row_check(name: str, longest: int, check: Check) -> Check:
    def row(values: tuple[Any, ...]) -> str:
        if len(values) > longest:
            return f"{name} with {len(values)} elements"
        for value in values:
            fault = check(value)
            if fault:
                return fault
        return ""

    return row


def _each_check(checks: tuple[Check, ...]) -> Check:
    def each(values: tuple[Any, ...]) -> str:
        for check, value in zip(checks, values, strict=True):
            fault = check(value)
            if fault:
                return fault
        return ""

    return each


@lru_cache(maxsize=16384)
def _known_unit(unit: Unit) -> str:
    """`_fault` of a unit: the same one passes by several times, in Assign, Result and Ack."""
    return _fault(unit)


def _unit_fault(unit: Unit) -> str:
    if unit.first > unit.last or unit.last - unit.first >= MAX_CHUNKS:
        return f"a unit of chunks {unit.first} to {unit.last}"
    if unit.kind == Kind.PROBE and unit.member:
        return f"a probe of member {unit.member}"
    return ""


def fitting(raws: Sequence[bytes]) -> tuple[bytes, ...]:
    """As many of the first entries as one Entries message can carry (at least one, if there is one)."""
    room = RULE_BY_TYPE[Entries].limit - 64
    taken: list[bytes] = []
    for raw in raws[:MAX_ENTRIES]:
        room -= len(raw) + 5
        if room < 0:
            break
        taken.append(raw)
    return tuple(taken)


def schema_table() -> str:
    """The schema table as the Markdown of docs/wire.md: one row per message."""
    rows = ["| tag | message | sent by | at most bytes | answered by | fields |", "|---|---|---|---|---|---|"]
    for rule in TABLE:
        fields = ", ".join(rule.type.__struct_fields__) or "none"
        rows.append(
            f"| {rule.tag} | {rule.type.__name__} | {rule.sender} | {rule.limit:,} | {rule.answer or '-'} "
            f"| {fields} |"
        )
    return "\n".join(rows) + "\n"
