"""Changed settings of a run that goes on: alpha, sigma, population and trusted keys from a later round.

Pure. An order of the operator is journaled at once and becomes a ledger entry as soon as D of the tip is
known. It never touches the open round, whose members are being measured under the old settings. Called by
`machine.py` and, for the verdict that the operator is told, by `server.py`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from coordinator.events import AmendAsked, AmendOrdered
from coordinator.state import State
from coordinator.turn import Turn
from protocol.chain import BrokenChain
from protocol.counting import nth
from protocol.entries import AmendBody, public_key
from protocol.fields import bf16

SETTINGS = ("alpha", "sigma", "members")
KEY = 32  # bytes of a signing key
MOST_TRUSTED = 64  # as in a lock


def asked(state: State, request: dict[str, Any]) -> tuple[AmendAsked | None, str]:
    """The event of an operator's request (`from_round`, any of `SETTINGS`, `trusted`: the whole new list of
    signing keys in hex), or why it cannot be."""
    given = {name: request[name] for name in SETTINGS if request.get(name) is not None}
    for name, value in given.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and (name == "members" or not isinstance(value, float)):
            return None, f"{name} = {value!r} is no number"
    if "sigma" in given:
        given["sigma"] = bf16(float(given["sigma"]))
    if "alpha" in given:
        given["alpha"] = float(given["alpha"])
    first = request.get("from_round")
    if not isinstance(first, int):
        return None, "from_round is missing: the first round that the change is for"
    keys, reason = _keys(request.get("trusted") or ())
    if reason:
        return None, reason
    event = AmendAsked(state.now, first, given.get("alpha"), given.get("sigma"), given.get("members"), keys)
    reason = refusal(state, event)
    return (None, reason) if reason else (event, "")


def told(event: AmendAsked) -> dict[str, Any]:
    """What an order changes, for the operator."""
    changes = {name: getattr(event, name) for name in SETTINGS}
    return {"from_round": event.from_round, **changes, "trusted": [key.hex() for key in event.trusted]}


def _keys(given: Any) -> tuple[tuple[bytes, ...], str]:
    """Signing keys from a request, or why they are none."""
    if not isinstance(given, list | tuple) or len(given) > MOST_TRUSTED:
        return (), f"trusted is a list of at most {MOST_TRUSTED} signing keys"
    keys = []
    for text in given:
        try:
            keys.append(bytes.fromhex(text))
        except (TypeError, ValueError):
            keys.append(b"")
        if len(keys[-1]) != KEY:
            return (
                (),
                f"{str(text)[:70]!r} is no signing key: 64 hex digits, as `esnode coordinator key` prints",
            )
    return tuple(dict.fromkeys(keys)), ""


def refusal(state: State, event: AmendAsked) -> str:
    """Why this change cannot be; empty when it can."""
    if state.stopped or state.ending is not None:
        return "the run has ended"
    if event.from_round <= state.chain.round:
        now, first = nth(state.chain.round), nth(state.chain.round + 1)
        return f"{now} is being measured: the first one that can change is {first}"
    mine = public_key(state.key)
    if event.trusted and mine not in event.trusted:
        return (
            f"this coordinator's own key {mine.hex()} is not among them, so it could sign nothing from "
            f"{nth(event.from_round)} on: name it too. To take it off, let a successor with another key "
            "take over and amend there"
        )
    try:
        state.chain.check_amend(body(event))
    except BrokenChain as error:
        return error.reason
    return ""


def on_asked(turn: Turn, event: AmendAsked) -> None:
    """Journal the order; it enters the chain at once if it can."""
    if refusal(turn.state, event):
        return
    order = AmendOrdered(event.from_round, event.alpha, event.sigma, event.members, event.trusted)
    turn.persist(order)
    turn.set(orders=(*turn.state.orders, order))
    turn.note("amend", **_words(order), reason="ordered by the operator")
    on_tick(turn)


def on_tick(turn: Turn) -> None:
    """One entry per order, once D of the tip is known."""
    while turn.state.orders and turn.digest is not None and not turn.over:
        order = turn.state.orders[0]
        if order.from_round <= turn.chain.round:  # D was not known in time; the open round keeps its settings
            late, order = order, replace(order, from_round=turn.chain.round + 1)
            turn.note("amend", **_words(order), reason=f"{nth(late.from_round)} had begun")
        turn.append(body(order))  # which takes the order off the list


def body(order: AmendAsked | AmendOrdered) -> AmendBody:
    """What an order says in the ledger."""
    return AmendBody(order.from_round, order.alpha, order.sigma, order.members, order.trusted)


def _words(order: AmendOrdered) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(order, name) for name in SETTINGS}
    found["trusted"] = ", ".join(key.hex()[:16] for key in order.trusted) or None
    return {"round": order.from_round} | {name: value for name, value in found.items() if value is not None}
