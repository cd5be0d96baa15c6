"""What is derived by hashing names and numbers: tensor keys, seeds, prompt orders, sampling streams.

Pure (stdlib only). The rules are law version 1, "Names, seeds": H is BLAKE2b with a 64-byte digest, then cut;
integers enter as u64 little-endian, text as UTF-8. Called by everybody who must agree with everybody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

U64 = 1 << 64
RUN_ID_BYTES = 32
BLOCK = 64  # members whose seeds are derived together


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=64).digest()


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")  # OverflowError outside 0 .. 2^64-1: never wrap silently


def _first_u64(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def _checked(run_id: bytes) -> bytes:
    if len(run_id) != RUN_ID_BYTES:
        raise ValueError(f"a run id is {RUN_ID_BYTES} bytes, not {len(run_id)}")
    return run_id


def tensor_key(name: str) -> int:
    """u32 key of a tensor, from its name in the safetensors files (law: "Names, seeds")."""
    return int.from_bytes(_hash(name.encode("utf-8"))[:4], "little")


def tensor_keys(names: Iterable[str]) -> dict[str, int]:
    """Key per name. ValueError naming both when two names share a key: such a model is refused."""
    owners: dict[int, str] = {}
    for name in names:
        owner = owners.setdefault(tensor_key(name), name)
        if owner != name:
            raise ValueError(f"tensors {owner!r} and {name!r} have the same key {tensor_key(name):#010x}")
    return {name: key for key, name in owners.items()}


def member_seed(run_id: bytes, round: int, member: int, mirrored: bool) -> int:
    """u64 noise seed of a member. Mirrored members 2k and 2k+1 are sides of one noise and share a seed."""
    return _seeds_of(run_id, round, member // BLOCK, mirrored)[member % BLOCK]


@lru_cache(maxsize=8192 // BLOCK)  # two rounds of the largest population: a seed is asked for several times
def _seeds_of(run_id: bytes, round: int, block: int, mirrored: bool) -> tuple[int, ...]:
    """Seeds of a block of members: the hash's code, once it is in the cache, is fast."""
    start = b"seed" + _checked(run_id) + _u64(round)
    noises = (member // 2 if mirrored else member for member in range(block * BLOCK, (block + 1) * BLOCK))
    return tuple(_first_u64(_hash(start, _u64(noise))) for noise in noises)


def member_sign(member: int, mirrored: bool) -> int:
    """-1 for the minus side of a mirrored pair (the odd member), else +1."""
    return -1 if mirrored and member % 2 else 1


def rounding_seed(run_id: bytes, round: int) -> int:
    """u64 seed of the stochastic rounding of a bf16 master in one round."""
    return _first_u64(_hash(b"round", _checked(run_id), _u64(round)))


def prompt_order(run_id: bytes, epoch: int, n: int) -> list[int]:
    """The order in which one epoch walks through `n` prompts: a permutation of range(n)."""
    return [*_order_of(run_id, epoch, n)]


@lru_cache(maxsize=2)  # a round may end one epoch and begin the next; every unit of it asks for them
def _order_of(run_id: bytes, epoch: int, n: int) -> tuple[int, ...]:
    start = hashlib.blake2b(b"prompt" + _checked(run_id) + _u64(epoch), digest_size=64)

    def rank(index: int) -> bytes:
        h = start.copy()
        h.update(_u64(index))
        return h.digest()

    return tuple(sorted(range(n), key=rank))


def prompts_of_round(run_id: bytes, round: int, per_round: int, total: int) -> list[int]:
    """Prompt indices of a round: positions round*per_round .. of all epochs' orders joined end to end.

    All members of a round see these, in this order. `per_round` may exceed `total`; both are at least 1.
    """
    if per_round < 1 or total < 1:
        raise ValueError(f"a round needs prompts: per_round {per_round}, total {total}")
    first = round * per_round
    chosen: list[int] = []
    while len(chosen) < per_round:
        epoch, offset = divmod(first + len(chosen), total)
        order = _order_of(run_id, epoch, total)
        chosen += order[offset : offset + per_round - len(chosen)]
    return chosen


def sample_stream(run_id: bytes, round: int, prompt: int, sample: int) -> int:
    """u64 key of the random stream of one sampled answer; the same for all members of the round."""
    return _first_u64(_hash(b"sample", _checked(run_id), _u64(round), _u64(prompt), _u64(sample)))
