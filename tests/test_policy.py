"""The node policy file: what it allows, what it refuses in words, when it lets a machine work, how fast."""

from __future__ import annotations

import pytest

from esnode import policy
from esnode.policy import Pace, Policy, PolicyError, Unwelcome
from protocol.lock import TensorSpec
from tests.runs import toy_lock

LOCK = toy_lock(
    model="HuggingFaceTB/SmolLM2-135M",
    manifest=(TensorSpec("a", (1000, 1000, 100), "bfloat16", True), TensorSpec("b", (8,), "int64", False)),
    live_dtype="bfloat16",
)
MIDNIGHT, NOON = 0, 12 * 60


def read(text: str) -> Policy:
    return policy.parse(text, "node.toml")


def test_the_template_is_a_policy_that_allows_everything() -> None:
    assert read(policy.template()) == read("") == Policy()
    assert all(key in policy.template() for key in policy.FIELDS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models = []", "models = [] must be a list with at least 1 element"),
        ("memory_gb = -1", "memory_gb = -1 must be a number from 0"),
        ('disk_gb = "much"', "disk_gb = 'much' must be"),
        ("bandwith_mbit = 3", "'bandwith_mbit' is unknown; there are models,"),
        ('hours = ["25:00-26:00"]', "hours = ['25:00-26:00'] must be a list, each a text like"),
        ('hours = ["07:00-07:00"]', "must be a list"),
        ('hours = ["noday 07:00-08:00"]', "must be a list"),
        ("models = ", "is no TOML"),
    ],
)
def test_a_field_that_cannot_work_is_named(text: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        read(text)
    assert str(caught.value).startswith("node.toml") and words in str(caught.value)


def test_models_memory_and_disk() -> None:
    read('models = ["demo", "HuggingFaceTB/*"]\nmemory_gb = 0.61\ndisk_gb = 0.5').admit(LOCK, used=0)
    for text, used, words in (
        ('models = ["demo"]', 0, "does not allow the model 'HuggingFaceTB/SmolLM2-135M'"),
        ("memory_gb = 0.5", 0, "needs at least 0.60 GB of memory and this machine's policy allows 0.5"),
        ("disk_gb = 0.5", 200_000_000, "needs at least 0.60 GB of disk"),
    ):
        with pytest.raises(Unwelcome, match=words):
            read(text).admit(LOCK, used)


def test_needs_follow_from_the_lock() -> None:
    needs = policy.needs(LOCK)
    assert needs.parameters == 100_000_008 and needs.download == 200_000_064
    assert needs.memory == 400_000_000 + 200_000_016 and needs.disk == 400_000_000


@pytest.mark.parametrize(
    ("hours", "day", "minute", "working"),
    [
        ("[]", 0, 0, True),
        ('["22:00-07:00"]', 0, MIDNIGHT, True),
        ('["22:00-07:00"]', 0, 7 * 60, False),
        ('["22:00-07:00"]', 0, 22 * 60, True),
        ('["mon-fri 18:00-08:00"]', 5, 7 * 60, True),  # Friday's night reaches into Saturday
        ('["mon-fri 18:00-08:00"]', 6, 7 * 60, False),
        ('["mon-fri 18:00-08:00"]', 5, 19 * 60, False),
        ('["sat,sun 00:00-24:00", "mon 1:30-2:00"]', 6, 1439, True),
        ('["sat,sun 00:00-24:00", "mon 1:30-2:00"]', 0, 95, True),
        ('["sat,sun 00:00-24:00", "mon 1:30-2:00"]', 0, NOON, False),
        ('["fri-mon 12:00-13:00"]', 0, NOON, True),
        ('["fri-mon 12:00-13:00"]', 3, NOON, False),
    ],
)
def test_hours(hours: str, day: int, minute: int, working: bool) -> None:
    assert read(f"hours = {hours}").working(day, minute) is working


def test_pace_keeps_the_rate_over_any_time() -> None:
    assert Pace(0).spend(5.0, 10**9) == 0.0
    pace, now = read("bandwidth_mbit = 8").pace(), 100.0  # a megabyte a second
    for _ in range(40):
        now += pace.spend(now, 250_000)
    assert now == pytest.approx(110.0)
    assert pace.spend(500.0, 1_000_000) == pytest.approx(1.0), "time that went by unused is not saved up"
