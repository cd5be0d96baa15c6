"""Messages to bytes and back. Nothing else parses what comes from the network.

Pure. A frame is one msgpack array `[tag, field, ...]`. `decode` bounds it before it allocates (size, and
lengths of texts, bytes and arrays, per row of the schema table), then checks every type, then every range
(`ranges.py`).
Whatever the bytes are, it returns a message or raises MalformedMessage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import msgpack
import msgspec

from protocol.entries import MalformedEntry, packed, short, unpacked
from protocol.messages import (
    LONGEST_FRAME,
    MOST_FRAMES,
    SCHEMA,
    AnyMessage,
    Bundle,
    Commit,
    Enrol,
    Entries,
    Hello,
    Message,
    Return,
    Rule,
)
from protocol.peers import SCHEMA as PEER_SCHEMA
from protocol.ranges import LENGTHS, MAX_CHUNKS, MAX_ENTRIES, fault, reader

TABLE = (*SCHEMA, *PEER_SCHEMA)
RULE_BY_TAG = {rule.tag: rule for rule in TABLE}
RULE_BY_TYPE = {rule.type: rule for rule in TABLE}
NAMES = {rule.tag: rule.type.__name__ for rule in TABLE}  # by the second byte of a frame that `encode` made
_SENDERS = {rule.tag: rule.sender.split(", ") for rule in TABLE}
_READERS = {rule.type: reader(rule.type) for rule in TABLE}
_PACK = msgspec.msgpack.Encoder().encode
_BUNDLE = RULE_BY_TYPE[Bundle].tag
MAX_FRAME = max(rule.limit for rule in TABLE)  # what MAXMSGSIZE must let through
_EARLY = (Hello, Enrol)
_WORDS = {
    rule.type: [name for name in ("reason", "verdict") if name in rule.type.__struct_fields__]
    for rule in TABLE
}


class MalformedMessage(Exception):
    """Why a frame was refused, in words for the log. Its sender is at fault, or runs another version."""


class OversizedMessage(MalformedMessage):
    """A frame larger than its row of the schema table allows; nothing of it was parsed."""


def encode(message: Message) -> bytes:
    """One frame. ValueError when the message breaks its own rules: nothing unreadable is ever sent.

    Reasons and verdicts are for people and often hold foreign text: they are cut to length instead.
    """
    rule = RULE_BY_TYPE[type(message)]
    read = _READERS[rule.type]
    if read is not None:
        try:
            frame = _PACK((rule.tag, *msgspec.structs.astuple(message)))
            read.parse(frame)
            if len(frame) <= rule.limit and read.fits(message):
                return frame
        except (ValueError, OverflowError, TypeError):
            pass  # cut to length, or refused in words
    return _encoded(rule, message)


def _encoded(rule: Rule, message: Message) -> bytes:
    """`encode` for every message, the plain way."""
    for name in _WORDS[type(message)]:
        given = getattr(message, name)
        words = short(given, LENGTHS[name])
        if words != given:
            message = msgspec.structs.replace(message, **{name: words})
    reason = fault(message)
    if reason:
        raise ValueError(f"{rule.type.__name__}: {reason}")
    try:
        frame = _PACK((rule.tag, *msgspec.structs.astuple(_entries(message, packed))))
    except MalformedEntry as error:
        raise ValueError(f"{rule.type.__name__}: {error}") from error
    if len(frame) > rule.limit:
        raise ValueError(f"{rule.type.__name__} of {len(frame)} bytes, the limit is {rule.limit}")
    return frame


def decode(frame: bytes, sender: str) -> AnyMessage:
    """The message of one frame from a "node" or the "coordinator"; raises MalformedMessage, nothing else."""
    rule = _rule(frame, sender)
    read = _READERS[rule.type]
    if read is not None and frame[0] != 0xDC:
        try:
            found = read.build(read.parse(frame))
            if read.fits(found):
                return cast(AnyMessage, found)
        except ValueError:
            pass  # what is wrong is said below
    return _decoded(rule, frame)


def _decoded(rule: Rule, frame: bytes) -> AnyMessage:
    """`decode` for every message, the plain way: whatever a reader lets pass, this does too."""
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
    reason = fault(message)
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
    if rule.sender != "any" and sender not in _SENDERS[tag]:
        raise MalformedMessage(f"{rule.type.__name__} does not come from a {sender}")
    if len(frame) > rule.limit:
        raise OversizedMessage(f"{rule.type.__name__} of {len(frame)} bytes, the limit is {rule.limit}")
    return rule


def bundles(frames: Sequence[bytes]) -> list[tuple[Sequence[bytes], bytes]]:
    """Frames that `encode` made, in order: groups that travel as one, each with the frame that carries it.

    A frame by itself needs no Bundle, and what is large goes by itself.
    """
    if len(frames) == 1:
        return [(frames, frames[0])]
    bundle = _PACK((_BUNDLE, frames))
    if 0 < len(frames) <= MOST_FRAMES and len(bundle) <= LONGEST_FRAME:
        return [(frames, bundle)]
    return [(group, group[0] if len(group) == 1 else _PACK((_BUNDLE, group))) for group in _groups(frames)]


def _groups(frames: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    first = 0
    for k, frame in enumerate(frames):
        large = len(frame) > LONGEST_FRAME
        if k > first and (large or k - first == MOST_FRAMES):
            yield frames[first:k]
            first = k
        if large:
            yield frames[k : k + 1]
            first = k + 1
    if first < len(frames):
        yield frames[first:]


def decode_all(frame: bytes) -> list[AnyMessage]:
    """The message of a coordinator's frame, or those of its Bundle; MalformedMessage when one of them is."""
    message = decode(frame, "coordinator")
    if not isinstance(message, Bundle):
        return [message]
    found = [decode(inner, "coordinator") for inner in message.frames]
    if any(isinstance(inner, Bundle) for inner in found):
        raise MalformedMessage("a Bundle in a Bundle")
    return found


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
