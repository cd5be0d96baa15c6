"""The vLLM engine, where vLLM is installed: the same bits, and answers of just the weights that were written.

vLLM pins its own torch, so it usually lives in an environment of its own (docs/vllm.md).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from esnode import accelerators, memory
from esnode.engines import (
    transformers_engine,
    vllm_canary,
    vllm_cpu,
    vllm_engine,
    vllm_start,
    vllm_watch,
)
from esnode.engines.interface import MemoryPlan, never
from esnode.engines.vllm_start import VllmUnavailable
from esnode.engines.wish import DEFAULT
from esnode.memory import MemoryShort
from esnode.slicemap import SliceError
from tests import tiny

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
QUICK = ["llama"]
MORE = ["qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "phi3", "olmo", "olmo2"]
KINDS = [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)]


def check(kind: str, what: str, place: Path) -> Any:
    """One run of `vllm_check`."""
    command = [sys.executable, "-m", "tests.vllm_check", kind, what, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@installed
@pytest.mark.parametrize("kind", KINDS)
def test_beside_transformers(kind: str, tmp_path: Path) -> None:
    found = check(kind, "compare", tmp_path)
    assert found["tokens"] == [True, True] and found["digests"]
    assert found["distance"] < 1e-3


@installed
@pytest.mark.parametrize("kind", KINDS)
def test_written_in_place_equals_a_fresh_load(kind: str, tmp_path: Path) -> None:
    assert check(kind, "perturb", tmp_path) == check(kind, "fresh", tmp_path)


@installed
def test_a_batch_that_does_not_fit_and_weights_that_are_no_numbers(tmp_path: Path) -> None:
    found = check("qwen2", "bad", tmp_path)
    assert found["rows"] == 3 and found["tokens"] and found["distance"] < 1e-3 and found["fingerprint"]
    assert found["broken"] == [[[3], []]] * 3 and found["restored"]


@installed
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("llama", 3),
        pytest.param("llama-one", 3, marks=pytest.mark.slow),
        pytest.param("qwen2", 50, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_hold_and_answer_what_one_does(kind: str, rounds: int, tmp_path: Path) -> None:
    """Keys shared out or replicated, fused and row-cut layers, biases, a padded vocabulary, tied or not."""
    two, one = (check(kind, f"tp{ranks}:{rounds}", tmp_path) for ranks in (2, 1))
    assert "ended by itself" in two.pop("ended")
    for found in (two, one):
        assert found["restored"] and found["reset"] and found["refilled"] and found["mended"]
        assert found["digests"][-rounds:-1] == found["stated"]  # by the slow reference
    sums = [[value for _, values in found.pop("answers") for value in values] for found in (two, one)]
    sums_moved = [found.pop("moved") for found in (two, one)]
    assert sums_moved[0][0] == sums_moved[1][0]
    assert sums[0] == pytest.approx(sums[1], abs=1e-3)  # two halves are added in another order
    assert two == one


@installed
def test_memory_that_one_rank_lacks_ends_all_of_them_soon(tmp_path: Path) -> None:
    """The other rank waits for it in a collective, where only its end can reach it."""
    found = check("llama", "failing2", tmp_path)
    assert all("rank 1 of the vLLM engine ran out of memory" in words for words in found["said"])
    assert len(found["said"]) == 2 and not found["left"]
    assert found["rows"][0] == 3 and found["seconds"] < 100


@installed
@pytest.mark.parametrize(
    ("kind", "ranks", "words"),
    [
        ("eight", 3, "--tp 3"),
        ("eight", 64, "--tp 64 needs 64 cores"),
        ("mixtral", 1, r"mixture of experts \(model.layers.0.*experts.*Use --engine transformers"),
        ("mixtral", 2, "mixture of experts"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_vllm_is_started(
    kind: str, ranks: int, words: str, tmp_path: Path
) -> None:
    said = check(kind, f"refused{ranks}", tmp_path)
    assert said.startswith("False ") and re.search(words, said)


@installed
@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", 1, r"do not fill .* model.layers.1.mlp.gate_up_proj.weight: "),
        ("model.layers.0.self_attn.extra.weight", 1, r"tensor model.layers.0.self_attn.extra.* .There is"),
        pytest.param(
            "model.layers.0.self_attn.k_proj.weight", 2, "layers.0.self_attn.qkv_proj.weight is none of",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_that_lacks_a_tensor_or_has_another_is_refused(
    name: str, ranks: int, words: str, tmp_path: Path
) -> None:
    assert re.search(words, check("llama", f"changed{ranks}:{name}", tmp_path))


@pytest.mark.parametrize("version", ["0.11.2", "0.33.0", "1.0"])
def test_an_untried_release_is_refused_in_a_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)
    with pytest.raises(VllmUnavailable, match=f"vLLM {version} has not been tried"):
        vllm_start.require_supported()


def test_without_vllm_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(VllmUnavailable, match=r"pip install '\.\[vllm\]'"):
        vllm_start.require_supported()


def test_a_model_that_vllm_loads_and_cannot_compute_is_refused_in_a_sentence() -> None:
    with (
        pytest.raises(VllmUnavailable, match=r"head_dim=8\. Use --engine transformers"),
        vllm_start.first_answers(Path("model")),
    ):
        raise RuntimeError("Unsupported CPU attention configuration: head_dim=8")
    with pytest.raises(torch.OutOfMemoryError), vllm_start.first_answers(Path("model")):
        raise torch.OutOfMemoryError("smaller batches may do")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            KeyError("layers.0.odd"),
            r"tensor model.layers.0.odd .'layers.0.odd'.: .*Use --engine transformers",
        ),
        (AssertionError(), r"tensor model.layers.0.odd .AssertionError.: "),
        (
            ValueError("There is no module named 'layers.0.odd' in Model. It has: {'a', 'b'}"),
            r"odd .There is no module named 'layers.0.odd' in Model.: its",
        ),
    ],
)
def test_a_tensor_that_the_loader_does_not_take_is_named(error: Exception, words: str) -> None:
    items = iter([("model.norm", torch.ones(1)), ("model.layers.0.odd", torch.ones(1)), ("z", torch.ones(1))])
    with pytest.raises(SliceError, match=words), vllm_start._named(items) as named:
        for name, _ in named:
            if name.endswith("odd"):
                raise error
    with pytest.raises(torch.OutOfMemoryError), vllm_start._named(items):
        raise torch.OutOfMemoryError("no reason to leave vLLM")


# ---------------------------------------------------------------- vLLM's own failures


class Unsupported(ValueError):
    """As pydantic raises it."""

    def errors(self) -> list[dict[str, str]]:
        return [{"msg": "Value error, Model architectures ['Odd'] are not supported for now. "
                 "Supported architectures: dict_keys(['A', 'B'])"}]  # fmt: skip


def load_failing(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load an engine of a vLLM that fails so when it starts."""

    def failing(arguments: Any) -> Any:
        raise error

    started: Any = ModuleType("vllm.v1.engine.llm_engine")
    started.LLMEngine = SimpleNamespace(from_engine_args=failing)
    vllm: Any = ModuleType("vllm")
    vllm.EngineArgs = dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, started.__name__, started)
    monkeypatch.setattr(metadata, "version", lambda package: "0.32.0")
    monkeypatch.setattr(vllm_cpu, "prepare", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    vllm_engine.load(tiny.lock(folder), folder, device="cpu", threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("vllm") / "llama", "llama")


def test_what_others_hold_of_a_gpu_keeps_vllm_from_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses to start unless its share of all memory is free, though it is told what it may take."""
    given: list[dict[str, Any]] = []
    started: Any = ModuleType("vllm.v1.engine.llm_engine")
    started.LLMEngine = SimpleNamespace(from_engine_args=given.append)
    vllm: Any = ModuleType("vllm")
    vllm.EngineArgs = dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, started.__name__, started)
    monkeypatch.setattr(accelerators, "numbered", lambda: {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    monkeypatch.setattr(os, "environ", dict(os.environ))
    vllm_start.start(tiny.lock(folder), folder, "cuda", 1, 1, vllm_start.CACHES["cuda"][0].size)
    assert given[0]["kv_cache_memory_bytes"] == vllm_start.CACHES["cuda"][0].size
    assert given[0]["gpu_memory_utilization"] <= 0.02
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("free", "cache", "where"),
    [
        (60, 8, "device"),
        (40, 8, "host"),
        (25, 8, "host"),
        (22, 4, "host"),
        (20, 2, "host"),
        (15, 8, "device"),
    ],
)
def test_the_cache_is_the_largest_that_fits(
    free: int, cache: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7.6e9 weights beside 64 GB of host memory; where nothing fits, the plan stays, to be refused."""
    monkeypatch.setattr(memory, "available", lambda: 64 << 30)
    plan = MemoryPlan(28 << 30, 14 << 30, vllm_start.CACHES["cuda"][0].work + (1 << 30), free << 30)
    settled, size = vllm_engine._settled(plan, "cuda:0", DEFAULT)
    assert (size >> 30, "host" if settled.host else "device") == (cache, where)
    assert (settled.on_device <= settled.available) == (free > 15)


def test_who_leads_a_master_in_host_memory_makes_one_with_any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller cache would let the master stay on the GPU, but other engines of the node wait for it."""
    monkeypatch.setattr(memory, "available", lambda: 1 << 30)
    plan = MemoryPlan(2 << 30, 2 << 30, vllm_start.CACHES["cuda"][0].work, 10 << 30)
    settled, size = vllm_engine._settled(plan, "cuda:0", DEFAULT)
    assert (settled.host, size) == (0, 4 << 30)
    settled, size = vllm_engine._settled(plan, "cuda:0", replace(DEFAULT, ask=str))
    assert (settled.host, size) == (0, 8 << 30) and settled.on_device > settled.available
    _, size = vllm_engine._settled(replace(plan, ranks=2), "cuda:0", replace(DEFAULT, ask=str))
    assert size == 4 << 30, "nobody reads the master of a rank"


# ---------------------------------------------------------------- the canary's load


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_canary_loads_the_weights_one_by_one(folder: Path, dtype: str) -> None:
    """A second copy of them would not fit beside master and cache; what goes elsewhere is named."""
    run = tiny.lock(folder, live_dtype=dtype)
    replica: Any = transformers_engine.load(run, folder, compute=dtype)._replica
    held: list[weakref.ref[torch.Tensor]] = []

    def load(items: Iterator[tuple[str, torch.Tensor]], to: Callable[[str], str] = str) -> None:
        for name, tensor in items:
            assert not any(other() is not None for other in held)
            held.append(weakref.ref(tensor))
            replica.live(to(name)).copy_(tensor)
            del tensor

    assert vllm_canary.reloaded(run, replica, load) == []
    keys, values = (f"model.layers.0.self_attn.{which}_proj.weight" for which in "kv")
    swapped = {keys: values, values: keys}
    found = vllm_canary.reloaded(run, replica, partial(load, to=lambda name: swapped.get(name, name)))
    assert set(found) & set(swapped) and set(found) <= set(swapped)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB (capturing CUDA graphs)"),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("CUDA out of memory occurred when warming up sampler with 256 dummy requests."),
    ],
)
def test_memory_that_vllm_lacks_at_its_start_is_one_sentence(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MemoryShort, match=r"memory ran out while the model was loaded \(CUDA") as caught:
        load_failing(error, folder, monkeypatch)
    assert "\n" not in str(caught.value) and caught.value.__context__ is None


def test_what_vllm_cannot_run_is_said_in_its_own_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VllmUnavailable, match=r"Model architectures \['Odd'\] are not supported") as caught:
        load_failing(
            Unsupported("1 validation error for ModelConfig\n  Value error, ..."), folder, monkeypatch
        )
    assert str(caught.value).endswith("are not supported for now. Use --engine transformers")
    with pytest.raises(VllmUnavailable, match=r"llama: no cache fits\. Add memory$"):
        load_failing(ValueError("no cache fits. Add memory\nand more"), folder, monkeypatch)
    with pytest.raises(RuntimeError, match="a fault"):
        load_failing(RuntimeError("a fault"), folder, monkeypatch)


class Queue:
    """The requests of a vLLM that refuses one named token."""

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], setting: Any) -> None:
        if 13 in prompt["prompt_token_ids"]:
            raise ValueError("13 is refused")
        self.waiting.append(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def abort_request(self, names: list[str]) -> None:
        self.waiting = [name for name in self.waiting if name not in names]


def test_a_row_that_vllm_refuses_leaves_no_other_behind() -> None:
    queue: Any = Queue()
    engine: Any = object.__new__(vllm_engine.VllmEngine)
    engine._engine, engine._served, engine._ranks = queue, 0, SimpleNamespace(turn=contextlib.nullcontext)
    with pytest.raises(ValueError, match="13 is refused"):
        engine._batch([[5, 6], [12, 13], [7]], [None] * 3, never)
    assert not queue.waiting


def test_logits_that_are_no_numbers_are_seen_where_they_are_made() -> None:
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    usual = torch.zeros(3, 5).index_fill_(1, torch.tensor([2]), -torch.inf)
    for number, sound in ((0.0, True), (torch.nan, False), (torch.inf, False), (-torch.inf, False)):
        vllm_watch.begin(worker)
        assert vllm_watch.end(worker) == (False, True)
        vllm_watch.begin(worker)
        for _ in range(2):
            assert model.compute_logits(usual) is usual
        odd = usual.clone()
        odd[1] = number
        model.compute_logits(odd)
        assert vllm_watch.end(worker) == (True, sound)
        model.compute_logits(odd)  # nobody wants to know: nothing is kept
