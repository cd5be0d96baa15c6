"""The law, case by case: every golden vector, then the edges where a naive implementation goes wrong."""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

import protocol.noise as noise
import protocol.seeds as seeds
import protocol.shaping as shaping
from protocol.lock import LAW

VECTORS = json.loads((Path(noise.__file__).parent / "vectors.json").read_text())
RUN_ID = bytes.fromhex(VECTORS["seeds"]["run_id"])
NAMES = {"zscore": "zscore", "centered_rank": "ranks"}


def number(value) -> int:
    return int(value, 16) if isinstance(value, str) else value


def hexadecimals(array, digits: int) -> list[str]:
    return [f"{int(x):0{digits}x}" for x in array]


def from_hex(values, dtype):
    return np.array([int(v, 16) for v in values], dtype)


# --- golden vectors ---


def test_law_version_and_table():
    assert VECTORS["law"] == LAW == 1
    data = (Path(noise.__file__).parent / "table_v1.bin").read_bytes()
    assert hashlib.sha256(data).hexdigest() == noise.TABLE_SHA256
    assert noise.TABLE.shape == (1536,) and noise.TABLE.dtype == np.uint32


@pytest.mark.parametrize("case", VECTORS["values"], ids=lambda c: f"{c['seed']}-{c['tensor']}-{c['index']}")
def test_noise_vector(case):
    address = number(case["seed"]), number(case["tensor"])
    word = noise.words(*address, 0, case["index"], 1)
    m = noise.integers(*address, case["index"], 1)
    assert hexadecimals(word, 8) == [case["word"]]
    assert m.dtype == np.int32 and m.tolist() == [case["m"]]
    eps = np.float32(m[0]) * np.float32(2.0**-13)
    assert f"{int(eps.view(np.uint32)):08x}" == case["eps_bits"]


def test_philox_known_answer():
    assert [int(noise.words(0, 0, 0, 32 * w, 1)[0]) for w in range(4)] == [
        0x5F6FB709,
        0x0D893F64,
        0x4F121F81,
        0x4F730A48,
    ]


def test_perturb_vector():
    v = VECTORS["perturb"]
    master = (from_hex(v["base_bf16"], np.uint32) << 16).view(np.float32)
    m = noise.integers(number(v["seed"]), v["tensor"], v["start"], len(master))
    assert m.tolist() == v["m"]
    assert hexadecimals(noise.perturb(master, m, v["sigma"], 1, "bfloat16"), 4) == v["live_bf16"]


def test_update_vector():
    v = VECTORS["update"]
    bits = from_hex(v["base_bf16"], np.uint16)
    master = (bits.astype(np.uint32) << 16).view(np.float32)
    a = noise.weighted_sum(v["seeds"], v["coefficients"], v["tensor"], v["start"], len(bits))
    assert a.tolist() == v["A"]
    assert hexadecimals(noise.round_bf16(noise.update(master, a, v["shift"])), 4) == v["nearest_bf16"]
    seed = number(v["stochastic_seed"])
    moved = noise.update_bf16(bits, a, v["shift"], seed, v["tensor"], v["start"])
    assert hexadecimals(moved, 4) == v["stochastic_bf16"]


@pytest.mark.parametrize("name", VECTORS["tensor_keys"])
def test_tensor_key_vector(name):
    assert seeds.tensor_key(name) == number(VECTORS["tensor_keys"][name])


@pytest.mark.parametrize("case", VECTORS["seeds"]["seed"], ids=lambda c: f"{c['round']}-{c['member']}")
def test_member_seed_vector(case):
    seed = seeds.member_seed(RUN_ID, case["round"], case["member"], case["mirrored"])
    assert seed == number(case["value"])


@pytest.mark.parametrize("case", VECTORS["seeds"]["stochastic"], ids=lambda c: str(c["round"]))
def test_rounding_seed_vector(case):
    assert seeds.rounding_seed(RUN_ID, case["round"]) == number(case["value"])


def test_every_unit_of_a_round_asks_for_the_order_of_its_epoch_which_is_made_once():
    """A hundred thousand prompts take a tenth of a second to order, and a unit asks twice."""
    seconds = []
    for round in (0, 1, 2, 3):
        began = time.perf_counter()
        first = seeds.prompts_of_round(RUN_ID, round, 200, 50_000)
        seconds.append(time.perf_counter() - began)
        assert len(set(first)) == 200
    assert max(seconds[1:]) < seconds[0] / 5


def test_prompt_order_vector():
    v = VECTORS["seeds"]["prompt_order"]
    assert seeds.prompt_order(RUN_ID, v["epoch"], v["n"]) == v["order"]


@pytest.mark.parametrize("case", VECTORS["coefficients_cases"], ids=lambda c: c["name"])
def test_coefficients_vector(case):
    found = shaping.coefficients(
        case["rewards"],
        case["alpha"],
        NAMES[case["shaping"]],
        case["clip"] or 0.0,
        case.get("std_floor", 0.0),
    )
    if case["coefficients"] is None:
        assert found is None
    else:
        assert found == shaping.Coefficients(tuple(case["coefficients"]), case["shift"])


@pytest.mark.parametrize("case", VECTORS["digests"], ids=lambda c: c["tensor"])
def test_digest_vector(case):
    values = np.array(case["values"], np.float32)
    assert noise.digest(values, seeds.tensor_key(case["tensor"]), case["start"]) == number(case["digest"])


def test_fp32_round_vector():
    v = VECTORS["fp32"]
    run_id, key, n = bytes.fromhex(v["run_id"]), seeds.tensor_key(v["tensor"]), len(v["A"])
    member_seeds = [seeds.member_seed(run_id, v["round"], i, False) for i in range(len(v["rewards"]))]
    assert member_seeds == [number(s) for s in v["seeds"]]
    found = shaping.coefficients(v["rewards"], v["alpha"], "zscore")
    assert found == shaping.Coefficients(tuple(v["coefficients"]), v["shift"])
    a = noise.weighted_sum(member_seeds, found.c, key, v["start"], n)
    assert a.tolist() == v["A"]
    master = from_hex(v["master_bits"], np.uint32).view(np.float32)
    updated = noise.update(master, a, found.shift)
    assert hexadecimals(updated.view(np.uint32), 8) == v["updated_bits"]
    assert noise.digest(master, key, v["start"]) == number(v["digest_before"])
    assert noise.digest(updated, key, v["start"]) == number(v["digest_after"])
    # The live images are of the master before the round.
    m = noise.integers(member_seeds[v["member"]], key, v["start"], n)
    images = {d: noise.perturb(master, m, v["sigma"], 1, d) for d in ("bfloat16", "float16", "float32")}
    assert hexadecimals(images["bfloat16"], 4) == v["live_bf16"]
    assert hexadecimals(images["float16"].view(np.uint16), 4) == v["live_fp16"]
    assert hexadecimals(images["float32"].view(np.uint32), 8) == v["live_fp32_bits"]


# --- an independent reading of the law, in Python integers ---


def plain_m(seed: int, tensor: int, i: int) -> int:
    counter = ((i >> 7) << 5) | (i & 31)
    x = [counter & 0xFFFFFFFF, counter >> 32, tensor, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [p1 >> 32 ^ x[1] ^ k[0], p1 & 0xFFFFFFFF, p0 >> 32 ^ x[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    w = x[(i >> 5) & 3]
    u = 2 * (w & 0x7FFFFF) + 1  # the uniform times 2^24: its leading bit is the float's exponent
    top = u.bit_length() - 1
    segment, fraction = divmod((u << (23 - top)) & 0x7FFFFF, 1 << 17)
    entry = int(noise.TABLE[top * 64 + segment])
    z = entry - ((entry & 0xFFF) * fraction >> 7)
    q = z >> 16
    return 2 * q + 1 if w < 2**31 else -(2 * q + 1)


def test_every_word_gives_an_odd_bounded_m():
    largest = 0
    for top in range(0, 1 << 24, 1 << 20):
        low = np.arange(top, top + (1 << 20), dtype=np.uint32)
        w = (low & np.uint32(0x7FFFFF)) | ((low >> np.uint32(23)) << np.uint32(31))
        m = noise.gaussian(w)
        assert (m & 1).all() and ((m < 0) == (w >= 2**31)).all()
        largest = max(largest, int(np.abs(m).max()))
    assert largest == noise.LARGEST_M


def test_addresses_outside_the_law_are_refused():
    for address in [(2**64, 0, 0, 1), (-1, 0, 0, 1), (0, 2**32, 0, 1), (0, 0, 2**62, 1), (0, 0, -1, 1)]:
        with pytest.raises(ValueError):
            noise.integers(*address)
    assert len(noise.integers(0, 0, 2**62, 0)) == 0


# --- rounding ---

# Ties, near ties, subnormals and overflows of both narrow types, as float32 bits.
EDGES = np.array(
    [
        *(0x00000000, 0x80000000, 0x3F808000, 0x3F818000, 0x3F808001, 0x477FE000, 0x477FEFFF, 0x477FF000),
        *(0x47800000, 0x387FC000, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x32FFFFFF, 0x33800000),
        *(0x33C00000, 0x34200000, 0x00000001, 0x007FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0xC77FEFFF),
    ],
    np.uint32,
)


def test_fp16_rounding_is_ieee():
    bits = np.concatenate([EDGES, np.random.default_rng(1).integers(0, 2**32, 10**6, dtype=np.uint32)])
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    # numpy's own conversion is IEEE nearest-even; ours is spelled out in integers.
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert (noise.round_fp16(values).view(np.uint16) == expected.view(np.uint16)).all()


def test_fp16_rounding_at_every_tie():
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    ties = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    for values in (ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9)), -ties):
        expected = values.astype(np.float16).view(np.uint16)
        assert (noise.round_fp16(values).view(np.uint16) == expected).all()


def test_bf16_rounding_is_nearest_even():
    values = EDGES.view(np.float32)
    for value, got in zip(values, noise.round_bf16(values), strict=True):
        below = int(value.view(np.uint32)) >> 16
        if np.isinf(value):
            assert got == below
            continue
        rest = int(value.view(np.uint32)) & 0xFFFF
        assert int(got) == below + (rest > 0x8000 or (rest == 0x8000 and below % 2 == 1))


@pytest.mark.parametrize("sigma", [0.0, -0.5, 0.001, math.nan, math.inf, 1 + 2.0**-8, 1e300])
def test_sigma_must_be_a_positive_bf16(sigma):
    with pytest.raises(ValueError):
        noise.perturb(np.zeros(1, np.float32), np.ones(1, np.int32), sigma, 1, "float32")


def test_the_minus_side_negates_m():
    master = np.linspace(-1, 1, 1000, dtype=np.float32)
    m = noise.integers(5, 6, 7, 1000)
    for dtype in ("bfloat16", "float16", "float32"):
        minus = noise.perturb(master, m, 0.5, -1, dtype)
        assert minus.tobytes() == noise.perturb(master, -m, 0.5, 1, dtype).tobytes()


def test_an_update_of_nothing_clears_the_sign_of_zero():
    zeros = np.array([-0.0], np.float32)
    assert noise.update(zeros, np.zeros(1, np.int32), 40).view(np.uint32).tolist() == [0]


# --- coefficients ---


def test_thirty_rewards_of_three_in_two_hundred():
    rewards = [3 / 200] * 30
    assert sum(rewards) / 30 != 3 / 200  # what makes naive code see a spread and take a step of full size
    assert shaping.coefficients(rewards, 5e-4, "zscore") is None
    assert shaping.coefficients(rewards, 5e-4, "ranks") is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["zscore", "ranks"])
def test_rewards_that_are_not_finite_are_refused(bad, kind):
    with pytest.raises(ValueError, match="finite"):
        shaping.coefficients([0.0, 1.0, bad], 1e-3, kind)
    with pytest.raises(ValueError, match="alpha"):
        shaping.coefficients([0.0, 1.0], bad, kind)


def test_member_counts_and_names_are_checked():
    for rewards in ([], [1.0], [float(i) for i in range(4097)]):
        with pytest.raises(ValueError, match="members"):
            shaping.coefficients(rewards, 1e-3, "zscore")
    with pytest.raises(ValueError, match="shaping"):
        shaping.coefficients([0.0, 1.0], 1e-3, "softmax")


def test_a_step_of_no_size_is_no_step():
    assert shaping.coefficients([0.0, 1.0], 0.0, "zscore") is None
    assert shaping.coefficients([0.0, 1.0], 2.0**-80, "zscore") is None
    tiny = shaping.coefficients([-1.0, 1.0], 2.0**-66, "zscore")
    assert tiny is not None and tiny.shift <= shaping.MAX_SHIFT


def test_ranks_of_ties_are_their_mean():
    found = shaping.coefficients([5.0, 1.0, 5.0, 9.0], 0.01, "ranks")
    assert found.c[0] == found.c[2] and found.c[1] == -found.c[3]


def test_ranks_do_not_see_the_scale():
    rewards = [0.1, 0.7, 0.2, 0.2, 0.9]
    assert shaping.coefficients(rewards, 0.01, "ranks") == shaping.coefficients(
        [1000 * r - 3 for r in rewards], 0.01, "ranks"
    )


def test_clip_bounds_an_outlier_only():
    rewards = [0.0] * 15 + [1.0]
    free = shaping.coefficients(rewards, 0.01, "zscore")
    clipped = shaping.coefficients(rewards, 0.01, "zscore", clip=2.0)
    assert clipped.c[0] / 2.0**clipped.shift == pytest.approx(free.c[0] / 2.0**free.shift, rel=1e-3)
    assert clipped.c[15] / 2.0**clipped.shift == pytest.approx(0.01 * 2 / 16 / 8192, rel=1e-3)


def test_a_floor_shrinks_the_step_of_one_flipped_answer():
    rewards = [0.5] * 15 + [0.505]
    free = shaping.coefficients(rewards, 0.01, "zscore")
    floored = shaping.coefficients(rewards, 0.01, "zscore", std_floor=0.05)
    assert floored.c[15] / 2.0**floored.shift < 0.05 * free.c[15] / 2.0**free.shift


def test_steps_check_what_they_hold():
    found = shaping.Coefficients((5, -5, 0, 7), 40)
    step = shaping.make_step(found, [1, 2, 3, 4], mirrored=False, rounding_seed=9)
    assert step == shaping.Step(seeds=(1, 2, 4), c=(5, -5, 7), shift=40, rounding_seed=9)
    with pytest.raises(ValueError, match="share a seed"):
        shaping.make_step(found, [1, 2, 3, 3], mirrored=True, rounding_seed=9)
    with pytest.raises(ValueError, match="whole pairs"):
        shaping.merge_pairs([1, 2, 3])
    for bad in [((1,), (1, 2), 3, 0), ((1,), (48049,), 3, 0), ((1,), (1,), 97, 0), ((2**64,), (1,), 3, 0)]:
        with pytest.raises(ValueError):
            shaping.Step(*bad)


# --- seeds ---


def test_mirrored_members_share_a_seed_and_differ_in_sign():
    assert seeds.member_seed(RUN_ID, 4, 10, True) == seeds.member_seed(RUN_ID, 4, 11, True)
    assert seeds.member_seed(RUN_ID, 4, 10, False) != seeds.member_seed(RUN_ID, 4, 11, False)
    assert [seeds.member_sign(i, True) for i in range(4)] == [1, -1, 1, -1]
    assert [seeds.member_sign(i, False) for i in range(4)] == [1, 1, 1, 1]


def test_two_names_with_one_key_are_refused(monkeypatch):
    names = ["model.a", "model.b"]
    assert set(seeds.tensor_keys(names)) == set(names)
    monkeypatch.setattr(seeds, "tensor_key", lambda name: 7)
    with pytest.raises(ValueError, match="same key"):
        seeds.tensor_keys(names)


def test_sample_streams_differ():
    streams = {seeds.sample_stream(RUN_ID, r, p, s) for r in range(3) for p in range(3) for s in range(3)}
    assert len(streams) == 27
    with pytest.raises(ValueError, match="32 bytes"):
        seeds.sample_stream(b"short", 0, 0, 0)
