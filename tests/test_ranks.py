"""How many ranks a model can have and gets: sentences and arithmetic, without vLLM and without devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esnode import ranks
from esnode.engines import transformers_engine
from esnode.engines.interface import EngineEnded, MemoryPlan
from esnode.engines.wish import Wish
from esnode.enginethread import Broken, EngineThread
from esnode.ranks import RanksError
from tests import tiny

EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
GB = 10**9


@pytest.mark.parametrize(
    ("config", "count", "devices", "words"),
    [
        (
            EIGHT,
            3,
            8,
            r"--tp 3 cannot be: the model's 8 attention heads .* by 3. Possible here: 1, 2, 4, 8\.",
        ),
        (EIGHT, 16, 4, r"--tp 16 needs 16 GPUs; this process has 4\."),
        (EIGHT | {"intermediate_size": 90}, 4, 4, r"intermediate size 90 .* Possible here: 1, 2\."),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96},
            2,
            4,
            r"3 heads of keys and values .* over 2. Possible here: 1, 3\.",
        ),
    ],
)
def test_what_cannot_be_cut(config: dict[str, Any], count: int, devices: int, words: str) -> None:
    with pytest.raises(RanksError, match=words):
        ranks.require(config, count, devices, "cuda")


def test_what_can_be_cut() -> None:
    for count in (1, 2, 4, 8):  # eight ranks repeat two heads of keys four times
        ranks.require(EIGHT, count, 8, "cuda")


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([80] * 8, 1),
        ([40] * 8, 2),
        ([40, 16, 16, 16], 4),
        ([24] * 8, 4),
        ([10] * 8, 8),
        ([5] * 8, 1),
        ([], 1),
    ],
)
def test_a_model_takes_as_few_gpus_as_hold_it(gpus: list[int], expected: int) -> None:
    """7.6e9 weights: 46 GB and 4 GB for work on each GPU; what fits nowhere is left to the memory check."""
    plan = MemoryPlan(30 * GB, 16 * GB, 4 * GB, 0)
    assert ranks.default(EIGHT, plan, [size * GB for size in gpus]) == expected


def test_mixtures_and_quantised_models_are_refused_by_name(tmp_path: Path) -> None:
    mixture = tiny.lock(tiny.write(tmp_path / "moe", "mixtral"))
    with pytest.raises(RanksError, match=r"mixture of experts \(model\.layers\.0\..*--engine transformers"):
        ranks.require_dense(mixture, {})
    dense = tiny.write(tmp_path / "m")
    with pytest.raises(RanksError, match="m is quantised"):
        ranks.require_dense(tiny.lock(dense), {"quantization_config": {"quant_method": "gptq"}})
    ranks.require_dense(tiny.lock(dense), ranks.read_config(dense))
    with pytest.raises(RanksError, match="--tp 2 needs --engine vllm"):
        transformers_engine.load(tiny.lock(dense), dense, wish=Wish(tp=2))


def test_an_engine_that_ended_is_no_fault_of_the_unit() -> None:
    """It must not be tried again there, nor count against its member: the engine is what failed."""
    ended = EngineEnded("a process of the engine ended")

    def raise_it() -> Any:
        raise ended

    thread = EngineThread(object(), lambda: None)  # type: ignore[arg-type]
    report = thread._ended(object(), raise_it)  # type: ignore[arg-type]
    assert isinstance(report, Broken) and report.sentence == str(ended)
    assert thread.close(5)
