"""Invites: whatever people do to the text on its way, it is read rightly or refused in one sentence."""

from __future__ import annotations

import random
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.invite import MAX_ADDRESSES, MAX_TEXT, Invite, InviteError, check_address, decode, encode

KEY, RUN, SECRET = (bytes([k]) * 32 for k in (1, 2, 3))
PLACES = ("tcp://192.0.2.7:5555", "tcp://[2001:db8::7]:5555", "tcp://train.example.org:443")


def invite(*addresses: str) -> Invite:
    return Invite(addresses or PLACES[:1], KEY, RUN, SECRET, 1_900_000_000)


TEXT = encode(invite())


def refused(text: str) -> str:
    with pytest.raises(InviteError) as caught:
        decode(text)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 250
    return sentence


@pytest.mark.parametrize("addresses", [PLACES[:1], PLACES[1:2], PLACES[2:], PLACES], ids=len)
def test_ipv4_ipv6_names_and_several(addresses: tuple[str, ...]) -> None:
    assert decode(encode(invite(*addresses))) == invite(*addresses)


def test_the_text_is_one_word_of_letters_and_digits() -> None:
    assert TEXT.startswith("esnode1-") and TEXT.removeprefix("esnode1-").isalnum() and TEXT.isascii()
    assert TEXT.lower() == TEXT and len(TEXT) < 230


@pytest.mark.parametrize(
    "pasted",
    [
        "\n".join(textwrap.wrap(TEXT, 40, break_on_hyphens=False)),
        "\r\n  ".join(textwrap.wrap(TEXT, 61)),
        f"  {TEXT}\n\n",
        TEXT.upper(),
        f'"{TEXT}"',
        f"`{TEXT[:9]}\u00a0{TEXT[9:]}`",
        " ".join(TEXT),
    ],
)
def test_line_breaks_and_the_like_mean_nothing(pasted: str) -> None:
    assert decode(pasted) == invite()


def test_no_mistake_of_one_letter_passes() -> None:
    chance = random.Random(5)
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    for position in range(len("esnode1-"), len(TEXT)):
        letter = chance.choice(letters.replace(TEXT[position], ""))
        assert "damaged" in refused(TEXT[:position] + letter + TEXT[position + 1 :])
        assert "damaged" in refused(TEXT[:position] + TEXT[position + 1 :])
        assert "damaged" in refused(TEXT[:position])


@pytest.mark.parametrize(
    "text", ["", "esnode", "hello", "tcp://127.0.0.1:5", "esnode1", "\x1b[31mred", "-" * 50]
)
def test_no_invite(text: str) -> None:
    sentence = refused(text)
    assert "this is no invite" in sentence and "\x1b" not in sentence


def test_other_versions_say_who_has_to_upgrade() -> None:
    assert "newer esnode on this machine" in refused(TEXT.replace("esnode1", "esnode2"))
    assert "newer esnode on the coordinator" in refused(TEXT.replace("esnode1", "esnode0"))


def test_too_long() -> None:
    assert "characters" in refused(TEXT + "a" * MAX_TEXT)
    with pytest.raises(InviteError, match="1 to 16 addresses"):
        encode(invite(*PLACES[:1] * (MAX_ADDRESSES + 1)))
    with pytest.raises(InviteError, match="too long"):
        encode(invite(*[f"tcp://{'a' * 250}:1"] * MAX_ADDRESSES))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://0.0.0.0:5555", "to listen on"),
        ("tcp://[::]:5555", "to listen on"),
        ("tcp://host:0", "to listen on"),
        ("tcp://*:5555", "names no host"),
        ("tcp://2001:db8::7:5555", "IPv6 stands in brackets"),
        ("tcp://a b:5555", "is no address"),
        ("tcp://\x1b[31m:5555", "is no address"),
        ("tcp://-rf:5555", "names no host"),
        ("ipc://x", "should look like"),
        ("tcp://host", "should look like"),
        ("tcp://host:99999", "should look like"),
    ],
)
def test_addresses_nobody_can_dial(address: str, why: str) -> None:
    with pytest.raises(InviteError, match=why) as caught:
        check_address(address)
    assert "\x1b" not in str(caught.value)
    with pytest.raises(InviteError):
        encode(invite(address))


def test_the_secret_stays_out_of_logs() -> None:
    assert SECRET.hex() not in repr(invite()) and repr(SECRET) not in repr(invite())


@given(st.text(max_size=300))
def test_any_text_is_refused_in_words(text: str) -> None:
    refused("esnode1-" + text)
