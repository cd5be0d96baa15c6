"""How large each field of a message may be, and the checks made of it.

Pure. Lives here: the tables of limits, `fault`, which says in words what is out of range in a message whose
types are right, and `reader`, the same limits as a typed msgpack decoder, which says no more than yes or no
but costs a tenth. A test holds that both let the same messages pass. Called by `wire.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from protocol.entries import HASH, MAX_NAME, MAX_REASON
from protocol.messages import (
    BLOB_PART,
    LONGEST_FRAME,
    MOST_FRAMES,
    Blob,
    Fetch,
    Hello,
    Kind,
    Message,
    Result,
    Unit,
    Welcome,
)
from protocol.peers import GRANT, MOST_ADDRESSES, MOST_DONORS, MOST_NEIGHBOURS, PartAsk, Snapshots
from protocol.shaping import MAX_MEMBERS
from protocol.terms import PROOF

MAX_ENTRIES = 1024  # entries in one Fetch or Entries
MAX_UNITS = 64  # units named in one Hello or heartbeat
MAX_CHUNKS = 4096  # chunk sums in one Result
MAX_LANES = 32  # units a node evaluates at once
MAX_LOST = 200  # characters about engines that do not work
MAX_ENGINES = 16  # fingerprints in one Hello; a Result may name one more: it is not known
MAX_VALUES = 2048  # digests in one TensorDigests, rewards in one Evidence
MAX_PIECES = 16  # in one Rederive
_U32 = 2**32 - 1
_U64 = 2**64 - 1

_WIDE = dict.fromkeys(
    ("seed", "digest", "digests", "held", "derived", "size"), _U64
)  # any other integer is a u32
_SMALL: dict[type[Message], dict[str, tuple[int, int]]] = {
    Fetch: {"count": (1, MAX_ENTRIES)},
    Snapshots: {"relay": (0, 65535)},
    PartAsk: {"size": (1, GRANT)},
    Hello: {"lanes": (1, MAX_LANES)},
    Result: {"engine": (0, MAX_ENGINES)},
    Unit: {"kind": (0, int(max(Kind))), "member": (0, MAX_MEMBERS - 1)},
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
LENGTHS = {"name": MAX_NAME, "backend": 64, "device": 200, "reason": MAX_REASON, "verdict": 100, "by": 200}
LENGTHS |= {"addresses": 120, "way": 16, "lost": MAX_LOST, "frames": LONGEST_FRAME}
_COUNTS = {"units": MAX_UNITS, "entries": MAX_ENTRIES, "sums": MAX_CHUNKS, "times": 3}
_COUNTS |= dict.fromkeys(("pieces", "held", "derived"), MAX_PIECES)
_COUNTS |= dict.fromkeys(("digests", "scores"), MAX_VALUES)
_COUNTS |= {"fingerprints": MAX_ENGINES, "addresses": MOST_ADDRESSES, "donors": MOST_DONORS}
_COUNTS |= {"peers": MOST_NEIGHBOURS, "frames": MOST_FRAMES}


Check = Callable[[Any], str]


def fault(message: Message) -> str:
    """What is out of its range in a message whose types are right; empty when nothing is."""
    for get, check in _checks(type(message)):
        found = check(get(message))
        if found:
            return found
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
    if kind is bool:
        return lambda value: ""
    if kind is float:
        return lambda value: "" if math.isfinite(value) else f"{name} = {value}, not a finite number"
    if kind is bytes:
        sizes = _SIZES_OF.get(owner, {}).get(name) or _SIZES.get(name)
        if name in LENGTHS:
            longest = LENGTHS[name]
            return lambda value: "" if len(value) <= longest else f"{name} of {len(value)} bytes"
        return lambda value: "" if not sizes or len(value) in sizes else f"{name} of {len(value)} bytes"
    if kind is str:
        longest = LENGTHS[name]
        return lambda value: "" if len(value) <= longest else f"{name} of {len(value)} characters"
    if isinstance(kind, type) and issubclass(kind, Message):
        return fault
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
            found = check(value)
            if found:
                return found
        return ""

    return row


def _each_check(checks: tuple[Check, ...]) -> Check:
    def each(values: tuple[Any, ...]) -> str:
        for check, value in zip(checks, values, strict=True):
            found = check(value)
            if found:
                return found
        return ""

    return each


def _unit_fault(unit: Unit) -> str:
    if unit.first > unit.last or unit.last - unit.first >= MAX_CHUNKS:
        return f"a unit of chunks {unit.first} to {unit.last}"
    if unit.kind and unit.member:  # what is no member is a probe
        return f"a probe of member {unit.member}"
    return ""


# ---------------------------------------------------------------- the same, as a typed decoder


class Reader(NamedTuple):
    """A typed decoder of one message type with its tag, and what no type can say of its fields.

    `parse` raises ValueError for what is out of type or range; `build` makes the message of what it returned;
    `fits` looks at fields that depend on each other. `fault` tells more of what either refuses.
    """

    parse: Callable[[bytes], Sequence[Any]]
    build: Callable[[Sequence[Any]], Message]
    fits: Callable[[Any], bool]


@cache
def reader(owner: type[Message]) -> Reader | None:
    """The reader of a message type. None for types it cannot serve.

    Those are the ones with a list of messages or texts, a field that may be left out, or bytes of several
    lengths.
    """
    rows = msgspec.structs.fields(owner)
    kinds = [_typed(owner, row.name, row.type) for row in rows]
    if None in kinds or any(row.default is not msgspec.NODEFAULT for row in rows):
        return None
    parse = msgspec.msgpack.Decoder(GenericAlias(tuple, (int, *kinds))).decode
    if not rows or rows[0].type is not Unit:
        return Reader(parse, lambda fields: owner(*fields[1:]), lambda message: True)
    floats = [row.name for row in rows if get_args(row.type)[:1] == (float,)]
    fits = _unit_and_floats(floats[0], owner is Result) if floats else _unit_fits
    return Reader(parse, lambda fields: owner(Unit(*fields[1]), *fields[2:]), fits)


def _unit_fits(message: Any) -> bool:
    return not _unit_fault(message.unit)


def _unit_and_floats(name: str, whole: bool) -> Callable[[Any], bool]:
    """`whole`: there is one number for every chunk."""
    get = attrgetter(name)

    def fits(message: Any) -> bool:
        unit, values = message.unit, get(message)
        sized = not whole or len(values) == unit.last - unit.first + 1
        return sized and all(map(math.isfinite, values)) and not _unit_fault(unit)

    return fits


def _typed(owner: type[Message], name: str, kind: Any) -> Any:
    """The field's type with its limits, None where there is none for it."""
    if kind is int:
        low, high = _SMALL.get(owner, {}).get(name, (0, _WIDE.get(name, _U32)))
        most = None if high == _U64 else high  # msgpack itself has no larger integer
        return Annotated[int, msgspec.Meta(ge=low, le=most)]
    if kind is str:
        return Annotated[str, msgspec.Meta(max_length=LENGTHS[name])]
    if kind is bytes:
        sizes = _SIZES_OF.get(owner, {}).get(name) or _SIZES.get(name)
        if name in LENGTHS:
            return Annotated[bytes, msgspec.Meta(max_length=LENGTHS[name])]
        if sizes is None or len(sizes) != 1:
            return None
        return Annotated[bytes, msgspec.Meta(min_length=sizes[0], max_length=sizes[0])]
    if kind is Unit:
        rows = msgspec.structs.fields(Unit)
        return GenericAlias(tuple, tuple(_typed(Unit, row.name, row.type) for row in rows))
    elements = get_args(kind)
    if get_origin(kind) is tuple and elements[-1] is Ellipsis and elements[0] in (int, float, bytes):
        element = float if elements[0] is float else _typed(owner, name, elements[0])
        if element is None:
            return None
        return Annotated[
            GenericAlias(tuple, (element, ...)), msgspec.Meta(max_length=_COUNTS.get(name, MAX_CHUNKS))
        ]
    if get_origin(kind) is tuple and set(elements) == {int}:
        return GenericAlias(tuple, tuple(_typed(owner, name, int) for _ in elements))
    return None
