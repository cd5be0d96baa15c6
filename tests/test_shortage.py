"""Memory that runs out in the middle of a unit: smaller batches, the same answers, another fingerprint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from esnode import workshop
from esnode.engines import shortage, transformers_engine
from esnode.engines.interface import EngineEnded, Sampling
from esnode.engines.shortage import OutOfMemory, patiently
from esnode.engines.transformers_engine import TransformersEngine
from esnode.memory import MemoryShort
from esnode.nodeoptions import Options
from esnode.workshop import Workshop
from protocol import ledger
from protocol.lock import Lock
from tests import tiny
from tests.runs import Processes, wait_for
from tests.test_workshop import made

CPU = "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError(CPU),
    MemoryError(),
]
SAMPLING = Sampling(6, ())
ROWS = [[5 + k, 6, 7 + k % 3, 8] for k in range(12)]
TARGETS = [[9, 10 + k % 4] for k in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("shortage") / "llama", "llama")


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    """In float32, where batching changes no answer of a random model."""
    return transformers_engine.load(tiny.lock(folder, live_dtype="float32"), folder)


def fits(engine: TransformersEngine, most: int, error: Exception) -> list[int]:
    """From now on no more than `most` rows fit; the sizes tried are added to what is returned."""
    tried: list[int] = []

    def allocate(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        rows = options["input_ids"].shape[0]
        tried.append(rows)
        if rows > most:
            raise error

    engine.model.register_forward_pre_hook(allocate, with_kwargs=True)
    return tried


@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu", "python"])
def test_a_batch_that_does_not_fit_is_measured_again_in_halves(
    engine: TransformersEngine, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    whole = engine.generate(ROWS, SAMPLING, []), engine.loglik(ROWS, TARGETS)
    before = engine.fingerprint
    tried = fits(engine, 4, error)
    assert patiently(lambda: engine.generate(ROWS, SAMPLING, [])) == whole[0]
    assert engine.room.rows == 3 and engine.fingerprint != before and len(engine.fingerprint) == 8
    assert tried[:2] == [12, 6] and set(tried[2:]) == {3}
    lowered = engine.fingerprint
    assert engine.loglik(ROWS, TARGETS) == pytest.approx(whole[1], abs=1e-5)
    assert engine.fingerprint == lowered
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "12 prompts at once do not fit" in said[0] and "at most 3" in said[1]


def test_the_bound_decides_the_fingerprint(folder: Path) -> None:
    def lowered(most: int) -> bytes:
        engine = transformers_engine.load(tiny.lock(folder, live_dtype="float32"), folder)
        fits(engine, most, ERRORS[0])
        patiently(lambda: engine.generate(ROWS, SAMPLING, []))
        return engine.fingerprint

    assert lowered(6) == lowered(7) != lowered(3)


def test_one_row_that_does_not_fit_is_a_sentence(engine: TransformersEngine) -> None:
    fits(engine, 0, ERRORS[0])
    with pytest.raises(OutOfMemory, match="one prompt alone does not fit into memory") as caught:
        patiently(lambda: engine.generate(ROWS, SAMPLING, []))
    assert "\n" not in str(caught.value) and caught.value.__context__ is None


def test_broken_rows_keep_their_numbers_in_smaller_batches(engine: TransformersEngine) -> None:
    engine.room.rows = 5
    engine._replica.live("model.embed_tokens.weight")[9] = torch.nan
    engine.loglik([[1, 2], [1, 9]] * 4, [[3]] * 8)
    assert set(engine.broken) >= {1, 3, 5, 7}


@pytest.mark.parametrize("error", [ValueError("not enough memory"), RuntimeError("shape mismatch")])
def test_other_errors_stay_what_they_are(engine: TransformersEngine, error: Exception) -> None:
    fits(engine, 0, error)
    with pytest.raises(type(error), match=str(error)):
        engine.generate(ROWS, SAMPLING, [])
    assert engine.room.rows == 0


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later",
        "Triton Error [CUDA]: unspecified launch failure",
        "HIP error: uncorrectable ECC error encountered",
    ],
)
def test_a_gpu_that_has_failed_ends_the_engine(words: str) -> None:
    """In that process it fails for good: units would come back at once, until their members are void."""

    def failing() -> None:
        raise RuntimeError(words)

    parts: list[Any] = [SimpleNamespace(damaged=failing), *[None] * 5]
    unit: Any = None
    with pytest.raises(EngineEnded, match=r"the GPU has failed .*has to be started again"):
        Workshop(*parts).evaluate(unit, 0.5, lambda: False, lambda thousandths: None)
    for other in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")):
        with pytest.raises(type(other)), shortage.alive():
            raise other


def test_what_a_failed_batch_held_is_free_before_the_next(engine: TransformersEngine) -> None:
    """Frames of a traceback would hold the tensors that did not fit."""
    import weakref

    class Held:
        pass

    held: list[Any] = []

    def work() -> None:
        big = Held()
        held.append(weakref.ref(big))
        raise MemoryError

    with pytest.raises(OutOfMemory):
        engine.room.batch(8, work)
    assert held[0]() is None


@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu", "python"])
def test_memory_that_runs_out_in_loading_is_one_sentence(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(transformers_engine.slicemap, "build", build)
    with pytest.raises(MemoryShort, match="memory ran out while the model was loaded") as caught:
        transformers_engine.load(tiny.lock(folder), folder)
    assert "\n" not in str(caught.value) and caught.value.__context__ is None


def test_packed_copies_go_first(engine: TransformersEngine) -> None:
    fits(engine, 8, ERRORS[1])
    given_up: list[Callable[[], None]] = []
    engine._decoder.packing.give_up = lambda: given_up.append(engine.forget)  # type: ignore[method-assign]
    patiently(lambda: engine.generate(ROWS, SAMPLING, []))
    assert len(given_up) == 1
    assert shortage.is_shortage(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))


# ---------------------------------------------------------------- a whole node

FITS = 2  # rows; a probe has 32, a member 8


def cramped(options: Options, lock: Lock) -> Workshop:
    """The loader of a node whose memory holds two rows."""
    loaded = workshop.load(options, lock)
    fits(cast(TransformersEngine, loaded._engine), FITS, ERRORS[1])
    return loaded


def test_a_node_goes_on_with_smaller_batches_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, monkeypatch)
    with Processes(folder.path) as processes:
        processes.coordinator()
        processes.node("cpu", loader="tests.test_shortage:cramped")
        told = wait_for(
            lambda: [n for n in processes.status().get("nodes", []) if len(n["fingerprints"]) == 2]
        )
        decisions = [words for _, words in processes.status()["decisions"]]
        processes.wait_end()
        assert processes.running["cpu"].wait(20) == 0, processes.words("cpu")
    assert told[0]["name"] == "cpu"
    assert any("cpu returned (an engine of its answers otherwise" in words for words in decisions)
    lines = (folder.path / "logs" / "cpu.log").read_text().splitlines()
    assert sum("do not fit into memory" in line for line in lines) == 4, "32 rows of the probe, 16, 8, 4"
    rows = [json.loads(line) for line in (folder.path / "units.jsonl").read_text().splitlines()]
    assert all(row["floored"] == 0 for row in rows) and ledger.read(folder.ledger).ended
