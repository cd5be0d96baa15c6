"""Terms: who is the sequencer from when on, and the proof of it that nodes carry around.

Lives here: the signed claim of a term, and what two histories have to do with each other: where they part,
and whether one term signed both. No files, no clock. Called by the cores of coordinator and node.
"""

from __future__ import annotations

from dataclasses import dataclass

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from protocol.chain import Chain
from protocol.counting import rounds
from protocol.entries import SIGNATURE, CommitBody, Entry, public_key, signed_by

EXIT_YIELDED = 3  # of a coordinator: another is at work, and a start of this one would take over from it
_DOMAIN = b"esnode term 1"
_COPIED = "Two coordinators run as one (a copied data folder or key)"
_APART = "Two coordinators of different keys took the same term, neither of which knew of the other"
_KEY, NONCE = 32, 8
PROOF = _KEY + NONCE + SIGNATURE  # bytes of a proof: signing key, start nonce, signature


@dataclass(frozen=True, slots=True)
class Claim:
    """A term as its coordinator claimed it: `number` counts up, `key` signs, `nonce` names one start."""

    number: int
    key: bytes
    nonce: bytes

    def __str__(self) -> str:
        return f"term {self.number} (key {self.key.hex()[:16]}, start {self.nonce.hex()})"


def prove_term(run: bytes, number: int, nonce: bytes, seed: bytes) -> bytes:
    """The proof that the holder of signing seed `seed` took a term of this run: key, nonce, signature."""
    signed = SigningKey(seed).sign(_words(run, number, nonce)).signature
    return public_key(seed) + nonce + signed


def read_proof(run: bytes, number: int, proof: bytes) -> Claim | None:
    """The claim a proof makes, None when its signature does not hold. Whether its key is trusted is open."""
    if len(proof) != PROOF:
        return None
    key, nonce, signature = proof[:_KEY], proof[_KEY : _KEY + NONCE], proof[_KEY + NONCE :]
    try:
        VerifyKey(key).verify(_words(run, number, nonce), signature)
    except BadSignatureError:
        return None
    return Claim(number, key, nonce)


def _words(run: bytes, number: int, nonce: bytes) -> bytes:
    return _DOMAIN + run + number.to_bytes(8, "little") + nonce


# ---------------------------------------------------------------- two histories


def common(one: Chain, other: Chain) -> int:
    """How many entries two chains share from the first on."""
    low, high = 0, min(one.height, other.height)
    while low < high:  # hash-linked: once apart, apart for good
        middle = (low + high + 1) // 2
        if one.entries[middle - 1].hash == other.entries[middle - 1].hash:
            low = middle
        else:
            high = middle - 1
    return low


def stronger(one: Chain, other: Chain) -> bool:
    """Whether a successor goes on from `one` rather than from `other`: the later term, then the longer chain.

    A branch that an earlier succession left behind must not come back because it is long.
    """
    return (one.term, one.height) > (other.term, other.height)


def signed_twice(chain: Chain, entry: Entry) -> str:
    """What to say when one term signed `entry` and also what `chain` holds in its place; "" when it did not.

    One term has one history: two entries on the same parent, or two commits of one round, are the end of it.
    """
    for held in reversed(chain.entries):
        if held.term < entry.term:
            return ""
        if held.term != entry.term or held.hash == entry.hash or not _exclude(held, entry):
            continue
        keys = chain.trusted
        mine, other = signed_by(held, keys), signed_by(entry, keys)
        if other is not None:
            return (
                f"term {entry.term} signed two histories after {rounds(entry.round)}: "
                f"{_signature(held, mine)} and {_signature(entry, other)}. "
                f"{_COPIED if mine == other else _APART}; stop both, then recover from the ledger you keep"
            )
    return ""


def _exclude(one: Entry, other: Entry) -> bool:
    commits = isinstance(one.body, CommitBody) and isinstance(other.body, CommitBody)
    return one.parent == other.parent or (commits and one.round == other.round)


def _signature(entry: Entry, key: bytes | None) -> str:
    return f"{entry.hash.hex()} (key {(key or b'').hex()[:16]}, start {entry.nonce.hex()})"
