"""Who this machine is in a run: its name, its permanent key, and how the coordinator comes to know it.

Shell. The key is made once and kept (0600); an invite lets it in, and from then on it is enough by itself.
Called by `join.py`.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

from esnode import joined
from esnode.contact import Contact, NotAdmitted, Unreachable
from esnode.folder import write_file
from esnode.joined import Joined, JoinedError
from esnode.nodeoptions import own_key, pinned_key
from protocol import keys
from protocol.entries import MAX_NAME
from protocol.errors import UserError
from protocol.invite import Invite
from protocol.messages import Enrol, Enrolled


class EnrolError(UserError):
    """The coordinator does not let this machine in; the sentence says why and who can change it."""


def name_in(folder: Path, wanted: str | None) -> str:
    """This node's name: the one wanted, else the one it has here, else the machine's."""
    if wanted is not None:
        if not wanted or wanted != _file_name(wanted):
            raise EnrolError(f"--name {wanted!r} cannot name a folder: use letters, digits, dots and dashes")
        return wanted
    known = joined.read(folder)
    usual = _file_name(platform.node()) or "node"
    names = list(known.nodes) if known else []
    if not names or usual in names:
        return usual
    if len(names) == 1:
        return names[0]
    raise JoinedError(
        f"this machine has several nodes in the run: say which with --name ({', '.join(names)})"
    )


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "", text).lstrip(".-")[:MAX_NAME]


def enter(folder: Path, name: str, given: Invite | None) -> Contact:
    """A conversation under this node's own key; with an invite, enrolled first when it has to be."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = own_key(folder / "nodes" / name)
    known = joined.read(folder)
    if given is not None:
        known = known or Joined(given.run, given.addresses, {})
        write_file(folder / "coordinator" / "curve.pub", (given.server_key.hex() + "\n").encode())
    if known is None:
        raise JoinedError(f"no run was joined in {folder}: `esnode join INVITE` joins one")
    addresses = tuple(dict.fromkeys((*(given.addresses if given else ()), *known.addresses)))
    if given is None or known.nodes.get(name):
        try:
            return _remembered(folder, known, name, Contact(addresses, pinned_key(folder), secret))
        except Unreachable as error:
            raise Unreachable(f"{error} (for the run in {folder}, which may have ended meanwhile)") from error
        except NotAdmitted as error:
            if given is None:
                raise EnrolError(
                    f"{error}. With a new invite, `esnode join INVITE` enrols it again"
                ) from error
    _enrol(given, name, keys.curve_public(secret))
    return _remembered(folder, known, name, Contact(addresses, given.server_key, secret))


def _enrol(given: Invite, name: str, key: bytes) -> None:
    """Hand in the permanent key under the invite's one-time key."""
    try:
        with Contact(given.addresses, given.server_key, given.secret) as contact:
            answer = contact.ask(Enrol(key, name), Enrolled, lambda _: True)
    except NotAdmitted as error:
        raise EnrolError(
            f"the coordinator at {', '.join(given.addresses)} does not know this invite: ask its operator "
            "for a new one (`esnode invite`)"
        ) from error
    if answer.run != given.run:
        raise EnrolError(
            f"the invite is for run {given.run.hex()[: joined.SHORT]}, the coordinator at {contact.address} "
            f"serves run {answer.run.hex()[: joined.SHORT]}: ask for a new invite"
        )


def _remembered(folder: Path, known: Joined, name: str, contact: Contact) -> Contact:
    """Note that the coordinator takes this key; the address that answered is tried first from now on."""
    joined.write(folder, known.enrolled(name, (contact.address,)))
    return contact
