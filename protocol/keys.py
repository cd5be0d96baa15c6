"""Key files: CURVE keys for sockets, Ed25519 seeds that sign ledger entries, and the list of admitted nodes.

Lives here because coordinator and node read the same files. A key file is one line, `curve <64 hex digits>`
or `sign <64 hex digits>`, mode 0600; the word in front keeps the two kinds from being mixed up. Public keys
are written as hex everywhere (file names, JSON, command lines); libzmq takes the same 32 bytes in binary.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from nacl.bindings import (
    crypto_scalarmult_base,
    crypto_sign_ed25519_pk_to_curve25519,
    crypto_sign_ed25519_sk_to_curve25519,
    crypto_sign_seed_keypair,
)
from nacl.exceptions import RuntimeError as SodiumError

from protocol.errors import UserError

KEY_BYTES = 32
_NEW_ROSTER = (
    "Remove it and start with --allow NAME for each node of this folder: their keys are kept in nodes/NAME"
)


class KeyFileError(UserError):
    """A key file or roster that is missing, readable by others, or not what it should be."""


class KeyDamaged(KeyFileError):
    """A key file without a key in it."""


def new_curve_file(path: Path) -> bytes:
    """Make a CURVE key at `path` unless one is there; returns the 32-byte secret either way."""
    return _make(path, "curve")


def new_signing_file(path: Path) -> bytes:
    """Make an Ed25519 seed at `path` unless one is there; returns the 32-byte seed either way."""
    return _make(path, "sign")


def read_curve(path: Path) -> bytes:
    """The 32-byte CURVE secret key. KeyFileError when missing, readable by group or others, or malformed."""
    return _read(path, "curve")


def read_signing(path: Path) -> bytes:
    """The 32-byte Ed25519 seed. KeyFileError as for `read_curve`."""
    return _read(path, "sign")


def write_signing(path: Path, seed: bytes) -> None:
    """Place a copy of a signing seed at `path` (the user's, in a run's folder); an equal one may be there."""
    _write_new(path, f"sign {seed.hex()}\n")
    if read_signing(path) != seed:
        raise KeyFileError(f"{path} holds another signing key than yours; move it away or use another folder")


def curve_public(secret: bytes) -> bytes:
    """The 32-byte public half of a CURVE secret key; it is a node's identity."""
    return bytes(crypto_scalarmult_base(secret))


def heir_secret(seed: bytes) -> bytes:
    """The CURVE secret by which the holder of a signing seed reads a ledger at a node's peer socket.

    The same secret number on the curve's other form (libsodium's conversion), so its public half follows from
    the signing key that a lock names, and nobody has to be told another key.
    """
    return bytes(crypto_sign_ed25519_sk_to_curve25519(crypto_sign_seed_keypair(seed)[1]))


def heir_public(signing: bytes) -> bytes:
    """The CURVE public key that follows from a public signing key; b"" when that is no point of the curve."""
    try:
        return bytes(crypto_sign_ed25519_pk_to_curve25519(signing))
    except SodiumError:
        return b""


def user_signing_file() -> Path:
    """Where this user's own signing key lives: $ESNODE_CONFIG or ~/.config/esnode, file coordinator.key."""
    config = os.environ.get("ESNODE_CONFIG")
    return (Path(config) if config else Path.home() / ".config" / "esnode") / "coordinator.key"


def parse_public(text: str, where: str) -> bytes:
    """32 bytes from 64 hex digits; `where` names the source in the error."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise KeyFileError(f"{where}: {text.strip()[:70]!r} is no key; it should be 64 hex digits")
    return key


def write_roster(path: Path, names: Mapping[bytes, str]) -> None:
    """Write the admitted node keys, {public key: name}, replacing the file in one step."""
    text = json.dumps({key.hex(): name for key, name in names.items()}, indent=1, ensure_ascii=False)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_roster(path: Path) -> dict[bytes, str]:
    """{32-byte public key: name}. A missing file admits nobody."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise KeyFileError(
            f"cannot read the list of admitted nodes {path} ({error}). {_NEW_ROSTER}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded.values()):
        raise KeyFileError(f"{path} should be one JSON object of public keys (hex) and names. {_NEW_ROSTER}")
    try:
        return {parse_public(key, str(path)): name for key, name in loaded.items()}
    except KeyFileError as error:
        raise KeyFileError(f"{error}. {_NEW_ROSTER}") from error


def _make(path: Path, kind: str) -> bytes:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_new(path, f"{kind} {os.urandom(KEY_BYTES).hex()}\n")
    return _read(path, kind)


def _write_new(path: Path, line: str) -> None:
    """Create `path` with its whole content or not at all; leave an existing file alone."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # somebody was faster: the file that is there counts
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _read(path: Path, kind: str) -> bytes:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            words = file.read(200).split()
    except FileNotFoundError:
        raise KeyFileError(f"there is no key file {path}") from None
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise KeyFileError(f"{path} can be read by others (mode {mode:04o}); run: chmod 600 {path}")
    if len(words) != 2 or words[0] != kind:
        raise KeyDamaged(f"{path} is damaged: it should hold the line '{kind} <64 hex digits>'")
    try:
        return parse_public(words[1], str(path))
    except KeyFileError as error:
        raise KeyDamaged(f"{path} is damaged: it should hold the line '{kind} <64 hex digits>'") from error
