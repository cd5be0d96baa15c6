"""Key files: made once, private, never mixed up; the list of nodes reads back."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from protocol import keys
from protocol.keys import KeyFileError


def test_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.key"
    secret = keys.new_curve_file(path)
    assert keys.new_curve_file(path) == keys.read_curve(path) == secret and len(secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["curve.key"]


def test_public_half_is_libzmqs(tmp_path: Path) -> None:
    public, secret = (z85.decode(text) for text in zmq.curve_keypair())
    assert keys.curve_public(secret) == public


def test_others_may_not_read(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    keys.new_signing_file(path)
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match=r"mode 0640.*chmod 600"):
        keys.read_signing(path)


@pytest.mark.parametrize(
    "text", ["", "curve", "sign 00", "curve " + "0" * 64, "sign " + "g" * 64, "\xff" * 80]
)
def test_no_signing_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "signing.key"
    path.write_text(text, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(KeyFileError):
        keys.read_signing(path)


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="there is no key file"):
        keys.read_curve(tmp_path / "none")
    with pytest.raises(KeyFileError, match="cannot read"):
        keys.read_curve(tmp_path)


def test_signing_copy(tmp_path: Path) -> None:
    keys.write_signing(tmp_path / "copy", bytes(range(32)))
    keys.write_signing(tmp_path / "copy", bytes(range(32)))
    with pytest.raises(KeyFileError, match="another signing key"):
        keys.write_signing(tmp_path / "copy", bytes(32))


def test_a_roster_file_is_read_back_or_refused(tmp_path: Path) -> None:
    names = {bytes(32): "n1", bytes(range(32)): "na\u00efve"}
    keys.write_roster(tmp_path / "roster.json", names)
    assert keys.read_roster(tmp_path / "roster.json") == names
    assert keys.read_roster(tmp_path / "none") == {}
    for text in ("[]", '{"00": "x"}', '{"' + "0" * 64 + '": 1}', "{"):
        (tmp_path / "roster.json").write_text(text)
        with pytest.raises(KeyFileError):
            keys.read_roster(tmp_path / "roster.json")
