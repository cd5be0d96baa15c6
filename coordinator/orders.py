"""What the operator may ask through the administration socket: invite, nodes, allow, revoke.

Shell (makes the one-time key of an invite, reads the clock). An order becomes an event of the core, is
journaled and flushed like any other, and only then answered. Called by `server.py`; the asking side is
`esnode/cli/nodes.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from coordinator import enrolment, roster
from coordinator.events import Event, InviteMade, NodeAllowed, NodeRevoked
from coordinator.state import State
from protocol import invite, keys
from protocol.entries import MAX_REASON
from protocol.errors import UserError

LONGEST = 366 * 86400  # seconds an invite may last
SHORTEST = 60
MOST_USES = 10_000
DAY = 86400


class OrderError(UserError):
    """An order that cannot be carried out; the sentence says why."""


class Orders:
    """Carries orders out. `perform(event)` steps the core, flushes and speaks before it returns."""

    def __init__(
        self,
        state: Callable[[], State],
        perform: Callable[[Event], None],
        server_key: bytes,
        addresses: Callable[[], tuple[str, ...]],
    ) -> None:
        """`server_key`: the coordinator's public CURVE key, b"" when nothing is encrypted."""
        self._state = state
        self._perform = perform
        self._server_key = server_key
        self._addresses = addresses

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to one request, {"error": sentence} when it is refused; None when it is no order."""
        orders: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "invite": self._invite,
            "nodes": lambda _: roster.listing(self._state()),
            "allow": self._allow,
            "revoke": self._revoke,
        }
        order = orders.get(str(request.get("op")))
        if order is None:
            return None
        try:
            return order(request)
        except UserError as error:
            return {"error": str(error)}

    def invite(self, seconds: int = DAY, uses: int = 1) -> dict[str, Any]:
        """A new invite: its text, number, uses, addresses, and when it expires (unix seconds)."""
        if not self._server_key:
            raise OrderError("this coordinator does not encrypt (--plain), so it invites nobody")
        if not (SHORTEST <= seconds <= LONGEST and 1 <= uses <= MOST_USES):
            raise OrderError(f"an invite lasts 1 minute to 366 days and is for 1 to {MOST_USES} machines")
        if len(self._state().guests.invites) >= enrolment.MAX_INVITES:
            raise OrderError(f"this run has had {enrolment.MAX_INVITES} invites; allow nodes by their keys")
        secret, expires = os.urandom(keys.KEY_BYTES), int(time.time()) + seconds
        key, state = keys.curve_public(secret), self._state()
        made = invite.Invite(self._addresses(), self._server_key, state.lock.run_id, secret, expires)
        text = invite.encode(made)  # before anything is journaled: the addresses may be refused
        self._perform(InviteMade(state.now, key, expires, uses))
        number = self._state().guests.invites[key].number
        return {
            "invite": text,
            "number": number,
            "expires": expires,
            "uses": uses,
            "addresses": list(made.addresses),
        }

    def _invite(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self.invite(_whole(request, "seconds", DAY), _whole(request, "uses", 1))

    def _allow(self, request: Mapping[str, Any]) -> dict[str, Any]:
        guests = self._state().guests
        words = _text(request, "key")
        known = [key for key in guests.revoked if len(words) >= 8 and key.hex().startswith(words.lower())]
        key = known[0] if len(known) == 1 else keys.parse_public(words, "nodes allow")
        if key in guests.invites:
            raise OrderError("this is the key of an invite, not of a node")
        self._perform(NodeAllowed(self._state().now, key, _text(request, "name")))
        return {"key": key.hex(), "name": self._state().allowed[key]}

    def _revoke(self, request: Mapping[str, Any]) -> dict[str, Any]:
        guests = self._state().guests
        words = _text(request, "who")
        found = enrolment.find(guests, words)
        if not found:
            raise OrderError(f"there is no node or invite {words!r} here; `esnode nodes list` shows them")
        if len(found) > 1:
            shown = ", ".join(key.hex()[:16] for key in found)
            raise OrderError(f"{words!r} may be any of the keys {shown}; write more digits")
        key = found[0]
        if key in guests.revoked:
            raise OrderError(f"this key is revoked already ({guests.revoked[key]})")
        reason = _text(request, "reason").strip()[:MAX_REASON] or "by the operator"
        self._perform(NodeRevoked(self._state().now, key, reason))
        return {"key": key.hex(), "name": guests.allowed.get(key, words), "reason": reason}


def _whole(request: Mapping[str, Any], name: str, default: int) -> int:
    value = request.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise OrderError(f"{name} has to be a whole number, not {value!r}")
    return value


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name, "")
    if not isinstance(value, str):
        raise OrderError(f"{name} has to be a text, not {value!r}")
    return value
