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


QWEN7 = {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
QWEN32 = {"num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 27648}
QWEN72 = {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568}


def dealt(
    config: dict[str, Any],
    weights: float,
    gpus: list[int],
    master: str = "auto",
    host: int = 2000,
    work: tuple[int, ...] = (10,),
) -> ranks.Deal:
    """A model of so many billion weights; GPUs of equal size are of one kind; `work`: GB, cache included."""
    plans = [MemoryPlan(int(4 * weights * GB), int(2 * weights * GB), size * GB, 0) for size in work]
    found = [ranks.Gpu(index, f"card of {size}", size * GB) for index, size in enumerate(gpus)]
    return ranks.deal("m", config, plans, found, ranks.Host(host * GB, 0, GB), master)


@pytest.mark.parametrize(
    ("config", "weights", "gpus", "groups"),
    [
        (QWEN7, 7.6, [80] * 2, [(0,), (1,)]),
        (QWEN7, 7.6, [40] * 4, [(0, 1), (2, 3)]),
        (QWEN32, 32.8, [80] * 8, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (QWEN72, 72.7, [80] * 8, [tuple(range(8))]),
        (QWEN72, 72.7, [141] * 8, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (QWEN7, 7.6, [80, 24, 24, 80, 24, 24], [(0,), (3,), (1, 2, 4, 5)]),  # groups of one kind only
        (QWEN7, 7.6, [40] * 3, [(0, 1)]),  # a third would have to be idle or to hold all of it
        (QWEN7, 7.6, [80, 12], [(0,)]),
    ],
)
def test_gpus_are_dealt_out_in_the_smallest_groups_that_hold_the_model(
    config: dict[str, Any], weights: float, gpus: list[int], groups: list[tuple[int, ...]]
) -> None:
    assert dealt(config, weights, gpus).groups == tuple(groups)


def test_the_master_goes_to_the_host_where_no_group_holds_it() -> None:
    found = dealt(QWEN72, 72.7, [80] * 4)
    assert found.groups == ((0, 1, 2, 3),) and "the master in host memory" in found.words[0]
    assert dealt(QWEN7, 7.6, [80] * 2, "host").groups == ((0,), (1,))
    assert dealt(QWEN7, 7.6, [26] * 3, "auto", host=32).groups == ((0,), (1,), (2,)), "they share one"
    assert dealt(QWEN7, 7.6, [18] * 4, "host", host=32).groups == ((0, 1),), "a group has its own"
    assert dealt(QWEN7, 7.6, [26, 27], "host", host=32).groups == ((0,), (1,)), "unlike ones share it too"


def test_a_kind_of_gpu_with_too_little_memory_takes_a_smaller_cache() -> None:
    """7.6e9 weights on cards of 24 GB, one each; the large one beside them keeps the large cache."""
    found = dealt(QWEN7, 7.6, [24, 80, 24], host=64, work=(10, 8, 6))
    assert found.groups == ((0, 2), (1,)), "two hold it with the large cache"
    found = dealt(QWEN7, 7.6, [80, 24], host=64, work=(10, 8, 6))
    assert found.groups == ((0,), (1,))
    assert "55.6 GB of 80.0 GB" in found.words[0] and "23.2 GB of 24.0 GB" in found.words[1]


@pytest.mark.parametrize(
    ("gpus", "master", "host", "words"),
    [
        ([80] * 4, "device", 2000, r"GPUs 0, 1, 2, 3 \(card of 80\): not used, at best 119.0 GB are needed"),
        ([80] * 4, "auto", 200, r"a master of 290.8 GB does not fit into 200.0 GB of free host memory"),
        ([20, 40], "auto", 2000, r"GPU 0 .* 155.4 GB are needed on each and 20.0 .*; GPU 1 .* and 40.0 GB"),
    ],
)
def test_a_model_that_fits_nowhere_is_refused_with_the_sums(
    gpus: list[int], master: str, host: int, words: str
) -> None:
    with pytest.raises(RanksError, match=words):
        dealt(QWEN72, 72.7, gpus, master, host)


def test_what_is_dealt_out_is_said() -> None:
    (line,) = dealt(QWEN7, 7.6, [40] * 5).words
    assert line == (
        "GPUs 0, 1, 2, 3, 4 (card of 40): 2 engines of 2 GPUs each, 32.8 GB of 40.0 GB free needed on each; "
        "GPU 4 left over"
    )


def test_mixtures_latent_attention_and_quantised_models_are_refused_by_name(tmp_path: Path) -> None:
    mixture = tiny.lock(tiny.write(tmp_path / "moe", "mixtral"))
    with pytest.raises(RanksError, match=r"mixture of experts \(model\.layers\.0\..*--engine transformers"):
        ranks.require_dense(mixture, {})
    dense = tiny.write(tmp_path / "m")
    with pytest.raises(RanksError, match="m is quantised"):
        ranks.require_dense(tiny.lock(dense), {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(RanksError, match=r"m compresses its keys and values .*--engine transformers"):
        ranks.require_dense(tiny.lock(dense), {"kv_lora_rank": 512})
    ranks.require_dense(tiny.lock(dense), ranks.read_config(dense))
    with pytest.raises(RanksError, match="--tp 2 needs --engine vllm"):
        transformers_engine.load(tiny.lock(dense), dense, wish=Wish(tp=2))


def test_an_engine_that_ended_is_no_fault_of_the_unit() -> None:
    """It must not be tried again there, nor count against its member: the engine is what failed."""
    ended = EngineEnded("a process of the engine ended")
    ended.rows = 3

    def raise_it() -> Any:
        raise ended

    thread = EngineThread(object(), lambda: None)  # type: ignore[arg-type]
    report = thread._ended(object(), raise_it)  # type: ignore[arg-type]
    assert isinstance(report, Broken) and (report.sentence, report.rows) == (str(ended), 3)
    assert thread.close(5)
