"""One conversation with a coordinator before the node exists: connect, ask, hear the answer or the reason.

Shell. Whatever goes wrong is one sentence within ten seconds. Several addresses are tried at the same time;
the first that proves the coordinator's key is used. Where nobody did and somebody greets by then, it has just
started, and is tried once more. Called by `enrol.py`, `fetch.py` and `mending.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import zmq

from esnode import reach
from esnode.link import Health, Link, State
from protocol.errors import UserError
from protocol.messages import Bye, Message, Refuse

CONTACT_SECONDS = 9.5  # for all of it
RESOLVE_SECONDS = 2.5
CONNECT_SECONDS = 5.3  # more than a silent peer needs to be known as one
EXPLAIN_SECONDS = 1.5  # these three together leave a moment for another try
ANSWER_SECONDS = 8.0
ASK_AGAIN = 2.0
SETTLED_SECONDS = 1.5  # a coordinator that is just starting gets this long

M = TypeVar("M", bound=Message)


class ContactError(UserError):
    """Nothing there, the wrong thing there, or no answer; the sentence says what to do."""


class Unreachable(ContactError):
    """Nothing answers at any address."""


class NotAdmitted(ContactError):
    """The coordinator does not let this key in."""


class Refused(ContactError):
    """The coordinator answered, and the answer is no."""


class Contact:
    """A connection that stands. A context manager; `address` is the one that answered."""

    def __init__(self, addresses: Sequence[str], server_key: bytes, secret: bytes) -> None:
        """Connect. ContactError, NotAdmitted with a sentence when that cannot be."""
        deadline = time.monotonic() + CONTACT_SECONDS

        def race(to: Sequence[str], seconds: float) -> tuple[Link | None, dict[str, Health]]:
            return _race([Link([address], server_key, secret) for address in to], seconds)

        reasons = reach.unresolved(addresses, RESOLVE_SECONDS)
        named = [address for address in addresses if address not in reasons]
        chosen, healths = race(named, CONNECT_SECONDS)
        if chosen is None:
            _require_admission(healths)
            reasons |= reach.obstacles(named, EXPLAIN_SECONDS)
            if started := [a for a in named if a not in reasons and not healths[a].hopeless]:
                chosen, again = race(started, deadline - time.monotonic())
                healths |= again
        if chosen is None:
            _require_admission(healths)
            raise _explained(healths, addresses, reasons)
        self._link = chosen
        self.address = chosen.address

    def ask(self, question: Message, kind: type[M], fits: Callable[[M], bool]) -> M:
        """The first message of this kind that fits, asking again while nothing comes.

        Refused when the coordinator says no, ContactError when nothing comes at all.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        again = 0.0
        while (now := time.monotonic()) < deadline:
            if now >= again and self._link.send(question):
                again = now + ASK_AGAIN
            _wait(self._link, 0.05)
            for message in self._link.receive():
                if isinstance(message, kind) and fits(message):
                    return message
                if isinstance(message, Refuse | Bye):
                    raise Refused(f"the coordinator refuses: {message.reason}")
            health = self._link.health(now)
            if health.state == State.REFUSED:
                raise NotAdmitted(health.sentence)
        if self._link.health(time.monotonic()).state != State.CONNECTED:
            raise ContactError(
                f"the connection to {self.address} was lost; the same command goes on where it stopped"
            )
        raise ContactError(
            f"{self.address} is the coordinator but does not answer: it runs another release of esnode, or "
            "is overloaded"
        )

    def __enter__(self) -> Contact:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close(farewell=False)


def _wait(link: Link, seconds: float) -> None:
    """Until something happens on the link, or the time is over."""
    poller = zmq.Poller()
    for socket in link.sockets:
        poller.register(socket, zmq.POLLIN)
    poller.poll(int(seconds * 1000))


def _race(links: Sequence[Link], seconds: float) -> tuple[Link | None, dict[str, Health]]:
    """The first link whose handshake succeeds, None when none does; and how each address stands.

    The others are closed.
    """
    deadline = time.monotonic() + seconds
    chosen: Link | None = None
    healths: dict[str, Health] = {}
    try:
        while chosen is None:
            now = time.monotonic()
            for link in links:
                link.receive()
                link.refresh(now)
            healths = {link.address: link.health(now) for link in links}
            chosen = next((k for k in links if healths[k.address].state == State.CONNECTED), None)
            if now > deadline or all(_settled(health, now) for health in healths.values()):
                break
            time.sleep(0.02)
    finally:
        for link in links:
            if link is not chosen:
                link.close(farewell=False)
    return chosen, healths


def _settled(health: Health, now: float) -> bool:
    if health.state == State.REFUSED:
        return True
    return (health.hopeless or health.state == State.UNREACHABLE) and now - health.since > SETTLED_SECONDS


def _require_admission(healths: Mapping[str, Health]) -> None:
    for health in healths.values():
        if health.state == State.REFUSED:
            raise NotAdmitted(health.sentence)


def _explained(
    healths: Mapping[str, Health], addresses: Sequence[str], reasons: Mapping[str, str]
) -> ContactError:
    """What says most. A handshake that was cut is a wrong key only where somebody speaks our language."""
    for address, health in healths.items():
        if health.hopeless and address not in reasons:
            return ContactError(health.sentence)
    told = [f"{a}: {reasons.get(a, 'the handshake does not come to its end')}" for a in addresses]
    return Unreachable("the coordinator cannot be reached. " + "; ".join(told))
