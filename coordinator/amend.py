"""Changed settings of a run that goes on: alpha, sigma and population from a later round.

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
from protocol.entries import AmendBody
from protocol.fields import bf16

SETTINGS = ("alpha", "sigma", "members")


def asked(state: State, request: dict[str, Any]) -> tuple[AmendAsked | None, str]:
    """The event of an operator's request (`from_round`, and any of `SETTINGS`), or why it cannot be."""
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
    event = AmendAsked(state.now, first, given.get("alpha"), given.get("sigma"), given.get("members"))
    reason = refusal(state, event)
    return (None, reason) if reason else (event, "")


def refusal(state: State, event: AmendAsked) -> str:
    """Why this change cannot be; empty when it can."""
    if state.stopped or state.ending is not None:
        return "the run has ended"
    if event.from_round <= state.chain.round:
        open_round = state.chain.round
        return f"round {open_round} is being measured: the first one that can change is {open_round + 1}"
    try:
        state.chain.check_amend(_body(event))
    except BrokenChain as error:
        return error.reason
    return ""


def on_asked(turn: Turn, event: AmendAsked) -> None:
    """Journal the order; it enters the chain at once if it can."""
    if refusal(turn.state, event):
        return
    order = AmendOrdered(event.from_round, event.alpha, event.sigma, event.members)
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
            turn.note("amend", **_words(order), reason=f"round {late.from_round} had begun")
        turn.append(_body(order))  # which takes the order off the list


def _body(order: AmendAsked | AmendOrdered) -> AmendBody:
    return AmendBody(order.from_round, order.alpha, order.sigma, order.members)


def _words(order: AmendOrdered) -> dict[str, Any]:
    found = {name: getattr(order, name) for name in SETTINGS}
    return {"round": order.from_round} | {name: value for name, value in found.items() if value is not None}
