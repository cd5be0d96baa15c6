"""Letting keys in and putting them out while a run goes on: newcomers, orders, roster entries.

Pure. What is decided lives in `enrolment.py`; here it becomes journal records, ledger entries and messages.
Called by `machine.py`, which dispatches events by `ORDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from coordinator import enrolment, membership, work
from coordinator.claims import FAULTS_TO_LEAVE
from coordinator.events import (
    Event,
    InviteMade,
    InviteOpened,
    KeyAllowed,
    KeyRevoked,
    NodeAllowed,
    NodeRevoked,
)
from coordinator.state import State, pardon
from coordinator.turn import Turn
from protocol.entries import Admission, RosterBody
from protocol.messages import RUN_ENDED, Bye, Enrol, Enrolled, Refuse

REVOKED = "revoked"


def on_enrol(turn: Turn, peer: bytes, message: Enrol) -> None:
    """A newcomer under the invite key `peer`. Answers go to the key that it names."""
    state = turn.state
    answer = enrolment.judge(state.guests, peer, message, state.wall)
    reason = answer.reason or (RUN_ENDED if turn.over else "")
    if reason:
        name = enrolment.label(message.name, message.key)
        turn.send(message.key, Refuse(reason))
        turn.count("refused enrolments", f"{name}: {reason}")
        turn.note("membership", node=name, what="not enrolled", reason=reason)
        return
    if answer.record is not None:
        _record(turn, answer.record)
        how = f"invite {answer.number}"
        turn.note("membership", node=answer.record.name, what="enrolled", reason=how, key=message.key)
    turn.send(message.key, Enrolled(state.lock.run_id, answer.number))


# ---------------------------------------------------------------- the operator


def on_invite_made(turn: Turn, event: InviteMade) -> None:
    """Open an invite; one whose key is known changes nothing."""
    invites = turn.guests.invites
    if event.key in invites or len(invites) >= enrolment.MAX_INVITES:
        return
    _record(turn, InviteOpened(len(invites) + 1, event.key, event.expires, event.uses))


def on_allowed(turn: Turn, event: NodeAllowed) -> None:
    """Put a key on the list by hand, or let its node out of quarantine, or in after too many faults.

    One that was revoked gets a new roster number when it says Hello.
    """
    guests = turn.guests
    fault = turn.state.faults.get(event.key)
    barred = event.key in turn.state.quarantined or (fault is not None and fault.count >= FAULTS_TO_LEAVE)
    if barred and event.key in guests.allowed:
        return _let_out(turn, event.key, guests.allowed[event.key])
    if event.key in guests.allowed or event.key in guests.invites:
        return
    name = enrolment.unique(guests, enrolment.label(event.name, event.key))
    _record(turn, KeyAllowed(event.key, name, 0))
    turn.state = pardon(turn.state, event.key)
    turn.note("membership", node=name, what="allowed", reason="by the operator", key=event.key)


def _let_out(turn: Turn, key: bytes, name: str) -> None:
    """The same record as for a new key: whoever the operator allows begins without a past."""
    _record(turn, KeyAllowed(key, name, 0))
    turn.state = pardon(turn.state, key)
    turn.note("audit", what="quarantine lifted", node=name, reason="by the operator")
    if not turn.over:
        work.assign(turn)


def on_revoked(turn: Turn, event: NodeRevoked) -> None:
    """Take a key off the list: its work goes to others, it is told, and the ledger will say so."""
    guests, key = turn.guests, event.key
    name = guests.allowed.get(key)
    if name is None:
        if key in guests.invites and not guests.invites[key].closed:
            _record(turn, KeyRevoked(key, event.reason))
        return
    _record(turn, KeyRevoked(key, event.reason))
    words = f"{REVOKED}: {event.reason}"
    turn.send(key, Bye(words))
    turn.note("membership", node=name, what=REVOKED, reason=event.reason, key=key)
    if key in turn.nodes:
        turn.take_all(key)
        turn.set_node(replace(turn.nodes[key], left=words))
    turn.census()
    if turn.over:
        return
    renew(turn)
    work.give_up(turn)
    work.close(turn)
    work.assign(turn)


def _record(turn: Turn, record: enrolment.GuestRecord) -> None:
    turn.persist(record)
    turn.set(guests=enrolment.fold(turn.guests, record))


# ---------------------------------------------------------------- the ledger's roster


def renew(turn: Turn) -> None:
    """One roster entry for all who wait and all who were put out, as soon as D of the tip is known."""
    state = turn.state
    if turn.signable is None:
        return
    waiting = [node for node in state.nodes.values() if node.number is None and not node.left]
    gone = tuple(sorted(state.numbers[key] for key in state.guests.revoked if key in state.numbers))
    if not waiting and not gone:
        return
    first = state.chain.next_number
    admitted = tuple(Admission(first + k, node.key, node.name) for k, node in enumerate(waiting))
    turn.append(RosterBody(admitted, gone))
    turn.census()


def listing(state: State) -> dict[str, Any]:
    """Every key and invite, JSON-able: what `esnode nodes list` shows."""
    guests = state.guests
    origin = {key: invite.number for invite in guests.invites.values() for key in invite.used}
    nodes = []
    for key, name in guests.allowed.items():
        node = state.nodes.get(key)
        word, reason = _absent(state, key)
        if node is not None:
            word, reason = membership.standing(node, state.chain.round, state.now)
        nodes.append(
            {
                "name": name,
                "key": key.hex(),
                "number": state.numbers.get(key),
                "invite": origin.get(key),
                "state": word,
                "reason": reason,
            }
        )
    numbers = {key.hex(): number for number, key in state.chain.numbers.items() if key in guests.revoked}
    return {"nodes": nodes, **enrolment.picture(guests, state.wall), "numbers": numbers}


def _absent(state: State, key: bytes) -> tuple[str, str]:
    """How a node stands that has not said Hello to this coordinator."""
    if key in state.numbers:
        return "away", "has not connected since the coordinator started"
    return "expected", "let in, has not connected yet: it gets the model and loads it first"


ORDERS: dict[type[Event], Callable[[Turn, Any], None]] = {
    InviteMade: on_invite_made,
    NodeAllowed: on_allowed,
    NodeRevoked: on_revoked,
}
