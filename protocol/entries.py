"""Ledger entries: their bytes, types and signatures, as docs/ledger-format.md describes them.

Lives here: `seal` (payload to signed bytes) and `parse` (bytes to a checked entry); what they say is in
`bodies.py`, whose names are found here too. What an entry means in its chain is `chain.py`'s business.
Entries are hashed, signed and stored as bytes and never re-encoded: `Entry.raw` is what travels and what lies
in the file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from protocol.bodies import (
    COMPLETE,
    HASH,
    QUORUM,
    ROW,
    SIGNATURE,
    Admission,
    AmendBody,
    Body,
    CommitBody,
    EndBody,
    Entry,
    EntryKind,
    LockBody,
    MemberReward,
    RosterBody,
    Rows,
    ScoreBody,
)
from protocol.errors import UserError, cut
from protocol.shaping import MAX_MEMBERS

__all__ = [
    "COMPLETE",
    "GENESIS",
    "HASH",
    "MAX_BODY",
    "MAX_NAME",
    "MAX_REASON",
    "OVERHEAD",
    "QUORUM",
    "SIGNATURE",
    "Admission",
    "AmendBody",
    "Body",
    "CommitBody",
    "EndBody",
    "Entry",
    "EntryKind",
    "LockBody",
    "MalformedEntry",
    "MemberReward",
    "RosterBody",
    "Rows",
    "ScoreBody",
    "hash_of",
    "packed",
    "parse",
    "public_key",
    "seal",
    "short",
    "signed_by",
    "split",
    "unpacked",
]

MAX_BODY = 8 * 1024 * 1024 - 1024  # an entry must fit the wire's largest message
OVERHEAD = 4 + HASH + SIGNATURE  # length, hash, signature
GENESIS = bytes(HASH)  # the parent of the first entry
MAX_REASON = 500  # characters
MAX_NAME = 64


class MalformedEntry(UserError):
    """Bytes that are no entry: cut, altered, of an unknown kind, or with a field out of its type."""


# ---------------------------------------------------------------- typed layout of each kind

_U16 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
_U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack itself has no larger integer
_Hash = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]
_Key = _Hash
_Nonce = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]

_Roots = Annotated[bytes, msgspec.Meta(max_length=HASH)]
_Rows = Annotated[memoryview, msgspec.Meta(max_length=MAX_MEMBERS * ROW.size)]  # of the entry itself: no copy
_LAYOUT: dict[EntryKind, Any] = {
    EntryKind.LOCK: tuple[_U16, _Hash, _U32, _Nonce, _U32, _U64, bytes],
    EntryKind.COMMIT: tuple[
        _U16, _Hash, _U32, _Nonce, _U32, _U64,
        float, float, _Rows, tuple[tuple[_U16, _Reason], ...], _U16, _Roots,
    ],
    EntryKind.ROSTER: tuple[
        _U16, _Hash, _U32, _Nonce, _U32, _U64, tuple[tuple[_U16, _Key, _Name], ...], tuple[_U16, ...]
    ],
    EntryKind.AMEND: tuple[
        _U16, _Hash, _U32, _Nonce, _U32, _U64,
        _U32, float | None, float | None, _U16 | None, tuple[_Key, ...],
    ],
    EntryKind.SCORE: tuple[_U16, _Hash, _U32, _Nonce, _U32, _U64, _U32, _U32, float, _U32, tuple[float, ...]],
    EntryKind.END: tuple[_U16, _Hash, _U32, _Nonce, _U32, _U64, _Reason],
}  # fmt: skip
_DECODERS = {kind: msgspec.msgpack.Decoder(layout) for kind, layout in _LAYOUT.items()}
_KIND_OF: dict[type[Body], EntryKind] = {
    LockBody: EntryKind.LOCK,
    CommitBody: EntryKind.COMMIT,
    RosterBody: EntryKind.ROSTER,
    AmendBody: EntryKind.AMEND,
    ScoreBody: EntryKind.SCORE,
    EndBody: EntryKind.END,
}


def short(words: str, longest: int = MAX_REASON) -> str:
    """Words for people, cut to a length, with what UTF-8 cannot carry replaced."""
    return cut(words.encode("utf-8", "replace").decode("utf-8"), longest)


def _payload(body: Body) -> list[Any]:
    """The body's own fields, as they follow the six common ones."""
    if isinstance(body, LockBody):
        return [body.lock]
    if isinstance(body, CommitBody):
        rows = Rows.of(body.members).packed
        voids = tuple((index, short(reason)) for index, reason in body.voids)
        return [body.alpha, body.sigma, rows, voids, body.closed, body.snapshot]
    if isinstance(body, RosterBody):
        return [[(a.number, a.key, short(a.name, MAX_NAME)) for a in body.admitted], body.revoked]
    if isinstance(body, AmendBody):
        return [body.from_round, body.alpha, body.sigma, body.members, body.trusted]
    if isinstance(body, ScoreBody):
        return [body.state_round, body.prompts, body.mean, body.correct, body.sums]
    return [short(body.reason)]


def _body(kind: EntryKind, fields: Sequence[Any]) -> Body:
    """The inverse of `_payload`, on fields whose types are already checked."""
    if kind is EntryKind.LOCK:
        return LockBody(fields[0])
    if kind is EntryKind.COMMIT:
        alpha, sigma, rows, voids, closed, snapshot = fields
        try:
            members = Rows(rows)
        except ValueError as error:
            raise MalformedEntry(str(error)) from error
        if len(snapshot) not in (0, HASH):
            raise MalformedEntry(f"the snapshot root has {len(snapshot)} bytes instead of none or {HASH}")
        if closed not in (COMPLETE, QUORUM):
            raise MalformedEntry(f"unknown closing code {closed}")
        return CommitBody(alpha, sigma, members, voids, closed, snapshot)
    if kind is EntryKind.ROSTER:
        return RosterBody(tuple(Admission(*row) for row in fields[0]), fields[1])
    if kind is EntryKind.AMEND:
        return AmendBody(*fields)
    if kind is EntryKind.SCORE:
        return ScoreBody(*fields)
    return EndBody(fields[0])


# ---------------------------------------------------------------- bytes


def public_key(seed: bytes) -> bytes:
    """The 32-byte Ed25519 public key of a 32-byte secret seed."""
    return bytes(SigningKey(seed).verify_key)


def seal(body: Body, *, parent: bytes, term: int, nonce: bytes, round: int, digest: int, key: bytes) -> Entry:
    """Encode, hash and sign one entry. `key` is the 32-byte Ed25519 seed.

    Raises MalformedEntry when a field does not fit the format, so that nothing unreadable is ever signed.
    """
    kind = _KIND_OF[type(body)]
    try:
        data = msgspec.msgpack.encode([int(kind), parent, term, nonce, round, digest, *_payload(body)])
    except (struct.error, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise MalformedEntry(f"a field of this {kind.name} entry does not fit its format: {error}") from error
    if len(data) > MAX_BODY:
        raise MalformedEntry(
            f"a {kind.name} entry of {len(data)} bytes is larger than the limit of {MAX_BODY}"
        )
    digest32 = hash_of(data)
    signature = SigningKey(key).sign(digest32).signature
    return parse(len(data).to_bytes(4, "little") + data + digest32 + signature)


def hash_of(body: bytes | memoryview) -> bytes:
    """BLAKE2b-256 of an entry's body: its name in the chain."""
    return hashlib.blake2b(body, digest_size=HASH).digest()


def split(data: bytes, offset: int = 0) -> bytes:
    """The raw bytes of the entry at `offset`, its hash checked; MalformedEntry when cut or altered."""
    left = len(data) - offset
    if left < 4:
        raise MalformedEntry(f"cut inside the length field, {left} of 4 bytes are left")
    length = int.from_bytes(data[offset : offset + 4], "little")
    if length > MAX_BODY:
        raise MalformedEntry(
            f"the length field says {length} bytes, more than an entry may have: it was altered"
        )
    if left < OVERHEAD + length:
        raise MalformedEntry(
            f"cut: {left} bytes are left of an entry of {OVERHEAD + length} (or its length is altered)"
        )
    raw = data[offset : offset + OVERHEAD + length]
    if hash_of(raw[4 : 4 + length]) != raw[4 + length : 4 + length + HASH]:
        raise MalformedEntry("body and hash do not fit each other: bytes were altered")
    return raw


def packed(raw: bytes) -> bytes:
    """An entry as it travels: body and signature, without what follows from them. MalformedEntry if none."""
    if split(raw) != raw:
        raise MalformedEntry("bytes follow the entry")
    return raw[4 : -HASH - SIGNATURE] + raw[-SIGNATURE:]


def unpacked(data: bytes) -> bytes:
    """The inverse of `packed`: the raw bytes. MalformedEntry when there is no room for a body."""
    body, signature = data[:-SIGNATURE], data[-SIGNATURE:]
    if not body or len(body) > MAX_BODY:
        raise MalformedEntry(f"an entry of {len(data)} bytes")
    return len(body).to_bytes(4, "little") + body + hash_of(body) + signature


def _fields(kind: EntryKind, body: memoryview) -> tuple[Any, ...]:
    """The body's elements, typed. One value has one encoding: what differs was not written by these rules."""
    try:
        fields: tuple[Any, ...] = _DECODERS[kind].decode(body)
        canonical = msgspec.msgpack.encode(fields) == body and fields[0] == kind
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedEntry(f"a {kind.name} entry with a field out of its type: {error}") from error
    if not canonical:
        raise MalformedEntry(f"a {kind.name} entry that is not in canonical encoding")
    return fields


def parse(raw: bytes) -> Entry:
    """One entry from its exact bytes: structure, hash and types checked, not signatures. MalformedEntry."""
    if len(split(raw)) != len(raw):
        raise MalformedEntry("bytes follow the entry")
    body = memoryview(raw)[4 : -HASH - SIGNATURE]
    kind = body[1] if len(body) > 1 else -1
    if kind not in _KIND_OF.values():
        raise MalformedEntry(f"unknown entry kind {kind}: written by a newer version, or no entry at all")
    fields = _fields(EntryKind(kind), body)
    _, parent, term, nonce, round, digest = fields[:6]
    said, name = _body(EntryKind(kind), fields[6:]), raw[-HASH - SIGNATURE : -SIGNATURE]
    return Entry(EntryKind(kind), parent, term, nonce, round, digest, said, raw, name)


def signed_by(entry: Entry, keys: Sequence[bytes]) -> bytes | None:
    """The first of `keys` (32-byte public keys) that signed the entry, or None."""
    for key in keys:
        try:
            VerifyKey(key).verify(entry.hash, entry.signature)
        except BadSignatureError:
            continue
        return key
    return None
