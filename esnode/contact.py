"""One conversation with a coordinator before the node exists: connect, ask, hear the answer or the reason.

Shell. Whatever goes wrong is one sentence within ten seconds. Several addresses are tried at the same time;
the first that proves the coordinator's key is used. Called by `enrol.py`, `fetch.py` and `mending.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from esnode import reach
from esnode.link import Health, Link, State
from protocol.errors import UserError
from protocol.messages import Bye, Message, Refuse

RESOLVE_SECONDS = 2.5
CONNECT_SECONDS = 5.3  # more than a silent peer needs to be known as one
EXPLAIN_SECONDS = 1.5  # all three together stay below ten seconds
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
        nameless = reach.unresolved(addresses, RESOLVE_SECONDS)
        links = [Link([address], server_key, secret) for address in addresses if address not in nameless]
        chosen: Link | None = None
        try:
            chosen, healths = _race(links)
        finally:
            for link in links:
                if link is not chosen:
                    link.close(farewell=False)
        if chosen is None:
            raise _explained(healths, addresses, nameless)
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


def _race(links: Sequence[Link]) -> tuple[Link | None, list[Health]]:
    """The first link whose handshake succeeds; None, and how each stands, when none does."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        now = time.monotonic()
        healths = []
        for link in links:
            link.receive()
            healths.append(link.health(now))
            if healths[-1].state == State.CONNECTED:
                return link, healths
        if now > deadline or all(_settled(health, now) for health in healths):
            return None, healths
        time.sleep(0.02)


def _settled(health: Health, now: float) -> bool:
    if health.state == State.REFUSED:
        return True
    return (health.hopeless or health.state == State.UNREACHABLE) and now - health.since > SETTLED_SECONDS


def _explained(healths: Sequence[Health], addresses: Sequence[str], nameless: dict[str, str]) -> ContactError:
    """What says most. A handshake that was cut is a wrong key only where somebody speaks our language."""
    rest = [address for address in addresses if address not in nameless]
    for health in healths:
        if health.state == State.REFUSED:
            return NotAdmitted(health.sentence)
    reasons = nameless | reach.obstacles(rest, EXPLAIN_SECONDS)
    for address, health in zip(rest, healths, strict=True):
        if health.state in (State.WRONG_KEY, State.FOREIGN) and address not in reasons:
            return ContactError(health.sentence)
    told = [f"{a}: {reasons.get(a, 'the handshake does not come to its end')}" for a in addresses]
    return Unreachable("the coordinator cannot be reached. " + "; ".join(told))
