"""An invite: one line of text that lets one machine into one run, and what is wrong with a text that is none.

Pure. The text is `esnode1-` and base32 letters: only letters and digits, so that no mail client, chat or
terminal changes them; white space and case mean nothing. Behind it: the coordinator's public key, the run id,
a one-time CURVE secret, when it expires, the addresses, and a checksum. Whoever holds the text can use it
once, so it is a password. Made by the coordinator's side, read by `esnode join`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from dataclasses import dataclass, field

from protocol.errors import UserError
from protocol.zmtp import host_and_port

VERSION = 1
MAX_TEXT = 4096  # characters, white space aside
MAX_ADDRESSES = 16
_PREFIX = re.compile(r"esnode(\d{1,6})-")
_FIXED = struct.Struct(">32s32s32sQ")  # coordinator's key, run id, one-time secret, expires
_CHECK = 5  # bytes of checksum: a mistyped text passes once in 10^12
_HOST = re.compile(r"[0-9A-Za-z]([0-9A-Za-z._-]{0,251}[0-9A-Za-z])?|\[[0-9A-Fa-f:.]{2,45}\]")
_ANYWHERE = ("0.0.0.0", "[::]")
_AGAIN = "Copy it again, whole, or ask for a new one"


class InviteError(UserError):
    """The text is no invite that this program can use; the sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class Invite:
    """What a machine needs to join. Every key is 32 bytes."""

    addresses: tuple[str, ...]  # `tcp://HOST:PORT`, tried in this order
    server_key: bytes  # public CURVE key of the coordinator: nobody else is believed
    run: bytes  # run id, the digest of the lock that will be fetched
    secret: bytes = field(repr=False)  # CURVE secret that the coordinator admits for one Enrol
    expires: int  # unix seconds, to be shown; the coordinator decides by its own clock


def encode(invite: Invite) -> str:
    """The text of an invite, one line. InviteError when an address cannot be reached by others."""
    addresses = invite.addresses
    if not 0 < len(addresses) <= MAX_ADDRESSES:
        raise InviteError(f"an invite names 1 to {MAX_ADDRESSES} addresses, not {len(addresses)}")
    for address in addresses:
        check_address(address)
    fixed = _FIXED.pack(invite.server_key, invite.run, invite.secret, invite.expires)
    body = fixed + " ".join(address.removeprefix("tcp://") for address in addresses).encode()
    text = f"esnode{VERSION}-{_letters(body + _checksum(body))}"
    if len(text) > MAX_TEXT:
        raise InviteError(f"the addresses are too long for an invite ({len(text)} characters); name fewer")
    return text


def decode(text: str) -> Invite:
    """The invite of a text, line breaks and all. InviteError with one sentence when it is none."""
    squeezed = "".join(text.split()).strip("\"'`<>").lower()
    if len(squeezed) > MAX_TEXT:
        raise InviteError(f"this is no invite: it has {len(squeezed)} characters. {_AGAIN}.")
    prefix = _PREFIX.match(squeezed)
    if prefix is None:
        raise InviteError(f"this is no invite: one begins with esnode{VERSION}-. {_AGAIN}.")
    if int(prefix[1]) != VERSION:
        side = "this machine" if int(prefix[1]) > VERSION else "the coordinator"
        raise InviteError(
            f"the invite is of version {int(prefix[1])}, this program reads version {VERSION}: install a "
            f"newer esnode on {side}."
        )
    body = _body(squeezed[prefix.end() :])
    server_key, run, secret, expires = _FIXED.unpack_from(body)
    try:
        addresses = tuple(f"tcp://{place}" for place in body[_FIXED.size :].decode("ascii").split(" "))
        if len(addresses) > MAX_ADDRESSES:
            raise InviteError(f"{len(addresses)} addresses")
        for address in addresses:
            check_address(address)
    except (UnicodeDecodeError, InviteError) as error:
        raise InviteError(f"the invite names no address that can be used ({error}). {_AGAIN}.") from error
    return Invite(addresses, server_key, run, secret, expires)


def check_address(address: str) -> None:
    """InviteError when `address` is no `tcp://HOST:PORT` that another machine could dial."""
    try:
        host, port = host_and_port(address)
    except ValueError as error:
        raise InviteError(str(error)) from error
    if not _HOST.fullmatch(host):
        hint = "; IPv6 stands in brackets" if host.count(":") > 1 else ""
        raise InviteError(f"{address!r} names no host{hint}, it should look like tcp://HOST:PORT")
    if host in _ANYWHERE or port == 0:
        raise InviteError(f"{address} is an address to listen on, not one to dial; name a host and a port")


def _body(letters: str) -> bytes:
    """The bytes behind the prefix, checksum verified and removed."""
    try:
        raw = base64.b32decode(letters.upper() + "=" * (-len(letters) % 8))
    except ValueError as error:
        raise InviteError(f"the invite is damaged: a letter is missing or wrong. {_AGAIN}.") from error
    body, check = raw[:-_CHECK], raw[-_CHECK:]
    if len(body) <= _FIXED.size or _checksum(body) != check or _letters(raw) != letters:
        raise InviteError(f"the invite is damaged: its checksum does not fit. {_AGAIN}.")
    return body


def _letters(raw: bytes) -> str:
    return base64.b32encode(raw).decode().rstrip("=").lower()


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK, person=b"esnode%06d" % VERSION).digest()
