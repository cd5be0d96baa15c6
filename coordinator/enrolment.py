"""Who is on the list: keys let in, open invites, keys put out; and the decision about a newcomer's Enrol.

Pure. `Guests` is a fold over journal records and the ledger's roster entries, and at the same time what the
gate needs to know about every key that knocks. Called by `state.py`, `roster.py` and, for the live list,
`gate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from coordinator.events import InviteOpened, KeyAllowed, KeyRevoked
from protocol.entries import MAX_NAME, RosterBody
from protocol.messages import Enrol

MAX_INVITES = 10_000  # ever made in one run; each costs the gate a dictionary entry
IN_THE_LEDGER = "revoked, as the ledger says"

GuestRecord: TypeAlias = InviteOpened | KeyAllowed | KeyRevoked


class Invitation(msgspec.Struct, frozen=True):
    """One invite. Its key stays known when it is used up or over, so that whoever comes late is told why."""

    number: int  # 1, 2, 3, ...: how people speak of it
    key: bytes
    expires: int  # unix seconds
    uses: int
    used: tuple[bytes, ...] = ()  # permanent keys that came by it
    closed: str = ""  # why it was withdrawn


class Guests(msgspec.Struct, frozen=True):
    """Every key the coordinator knows. A key is in at most one of the first three."""

    allowed: Mapping[bytes, str] = msgspec.field(default_factory=dict)  # permanent key -> name
    invites: Mapping[bytes, Invitation] = msgspec.field(default_factory=dict)  # one-time key -> invite
    revoked: Mapping[bytes, str] = msgspec.field(default_factory=dict)  # permanent key -> reason
    former: Mapping[bytes, str] = msgspec.field(default_factory=dict)  # revoked key -> the name it had


class Answer(msgspec.Struct, frozen=True):
    """To an Enrol: refused with a reason; or let in, by `record` unless the key is on the list already."""

    reason: str = ""
    record: KeyAllowed | None = None
    number: int = 0  # of the invite


def judge(guests: Guests, peer: bytes, enrol: Enrol, wall: float) -> Answer:
    """Whether the holder of invite key `peer` may enrol a permanent key; `wall`: unix seconds, 0 unknown."""
    invite = guests.invites.get(peer)
    if invite is None:
        return Answer("an Enrol needs an invite; ask the operator for one (`esnode invite`)")
    if enrol.key in guests.invites:
        return Answer("an invite's key cannot be a node's own key: make a new one")
    if enrol.key in guests.revoked:
        return Answer(
            f"this machine's key was revoked ({guests.revoked[enrol.key]}): ask the operator to allow it "
            "again (`esnode nodes allow`)"
        )
    if enrol.key in guests.allowed:  # the answer was lost, or the operator was faster: nothing is used up
        return Answer(number=invite.number)
    if invite.closed:
        return Answer(f"invite {invite.number} was withdrawn ({invite.closed}): ask for a new one")
    if len(invite.used) >= invite.uses:
        times = "once" if invite.uses == 1 else f"{invite.uses} times"
        return Answer(
            f"invite {invite.number} works {times} and was used by another machine: ask for a new one"
        )
    if 0 < invite.expires <= wall:
        return Answer(f"invite {invite.number} expired {_ago(wall - invite.expires)} ago: ask for a new one")
    record = KeyAllowed(enrol.key, unique(guests, label(enrol.name, enrol.key)), invite.number)
    return Answer(record=record, number=invite.number)


def fold(guests: Guests, record: GuestRecord) -> Guests:
    """The list after one journal record."""
    if isinstance(record, InviteOpened):
        invite = Invitation(record.number, record.key, record.expires, record.uses)
        return replace(guests, invites={**guests.invites, record.key: invite})
    if isinstance(record, KeyAllowed):
        return _let_in(guests, record.key, record.name, record.invite)
    return _put_out(guests, record.key, record.reason)


def adopt(guests: Guests, body: RosterBody, keys: Mapping[int, bytes]) -> Guests:
    """The list after a roster entry; `keys`: roster number -> CURVE key before it.

    In a run that was always this coordinator's own nothing changes. A successor that knows only the ledger
    takes its list from there.
    """
    for number in body.revoked:
        if keys[number] not in guests.revoked:
            guests = _put_out(guests, keys[number], IN_THE_LEDGER)
    for admission in body.admitted:
        if admission.key not in guests.allowed and admission.key not in guests.revoked:
            guests = _let_in(guests, admission.key, admission.name, 0)
    return guests


def _let_in(guests: Guests, key: bytes, name: str, number: int) -> Guests:
    invites = dict(guests.invites)
    for invite in guests.invites.values():
        if invite.number == number:
            invites[invite.key] = replace(invite, used=(*invite.used, key))
    revoked = {other: reason for other, reason in guests.revoked.items() if other != key}
    return replace(guests, allowed={**guests.allowed, key: name}, invites=invites, revoked=revoked)


def _put_out(guests: Guests, key: bytes, reason: str) -> Guests:
    """A node's key; with it the invite it came by, which its holder still has and might use again."""
    if key in guests.invites:
        closed = replace(guests.invites[key], closed=reason)
        return replace(guests, invites={**guests.invites, key: closed})
    invites = {
        invite.key: replace(invite, closed=invite.closed or "its holder was revoked")
        if key in invite.used
        else invite
        for invite in guests.invites.values()
    }
    allowed = {other: name for other, name in guests.allowed.items() if other != key}
    former = {**guests.former, key: guests.allowed.get(key, "")}
    return Guests(allowed, invites, {**guests.revoked, key: reason}, former)


# ---------------------------------------------------------------- names


def label(name: str, key: bytes) -> str:
    """A name that is safe on any terminal: printable, cut, never empty."""
    shown = "".join(letter for letter in name if letter.isprintable()).strip()[:MAX_NAME]
    return shown or f"node-{key.hex()[:8]}"


def unique(guests: Guests, name: str) -> str:
    """The name, with a number behind it when another key bears it: people must tell nodes apart."""
    taken = set(guests.allowed.values())
    if name not in taken:
        return name
    number = 2
    while f"{name[: MAX_NAME - 6]}-{number}" in taken:
        number += 1
    return f"{name[: MAX_NAME - 6]}-{number}"


def find(guests: Guests, words: str) -> list[bytes]:
    """Keys the operator may mean: a name, a key or its beginning (8 digits or more), or `invite-N`."""
    keys = [*guests.allowed, *guests.revoked]
    if words.startswith("invite-"):
        return [invite.key for invite in guests.invites.values() if f"invite-{invite.number}" == words]
    named = [key for key, name in guests.allowed.items() if name == words]
    named = named or [key for key in guests.revoked if guests.former.get(key) == words]
    if named or len(words) < 8:
        return named
    return [key for key in keys if key.hex().startswith(words.lower())]


# ---------------------------------------------------------------- to be shown


def picture(guests: Guests, wall: float) -> dict[str, Any]:
    """JSON-able: invites and revoked keys, with the state of each in words."""
    return {
        "invites": [
            {
                "number": invite.number,
                "expires": invite.expires,
                "uses": invite.uses,
                "used": len(invite.used),
                "state": standing(invite, wall),
            }
            for invite in guests.invites.values()
        ],
        "revoked": {key.hex(): reason for key, reason in guests.revoked.items()},
        "former": {key.hex(): guests.former.get(key, "") for key in guests.revoked},
    }


def standing(invite: Invitation, wall: float) -> str:
    """One or a few words: "open", "used", "expired", "withdrawn: ..."."""
    if invite.closed:
        return f"withdrawn: {invite.closed}"
    if len(invite.used) >= invite.uses:
        return "used"
    return "expired" if 0 < invite.expires <= wall else "open"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} seconds"
