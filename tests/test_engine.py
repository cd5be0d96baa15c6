"""Generation and likelihood: independent of batching, padding and neighbours, and what plain transformers
gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from esnode.engines import transformers_engine
from esnode.engines.decode import Decoder, Limits, limits
from esnode.engines.interface import Cancelled, Sampling
from esnode.engines.sampling import Picker, uniforms
from esnode.engines.transformers_engine import TransformersEngine
from protocol import noise
from tests import tiny

KINDS = ("llama", "qwen2", "mixtral")
BEGINNING = tuple(range(40, 60))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engine")
    found = {kind: tiny.write(root / kind, kind) for kind in KINDS}
    found["window"] = tiny.write(
        root / "window", "qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0
    )
    return found


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, TransformersEngine]:
    """In float32, where batching changes no answer of a random model."""
    return {
        kind: transformers_engine.load(tiny.lock(folder, live_dtype="float32"), folder)
        for kind, folder in folders.items()
    }


def prompts(count: int, shared: bool, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    begin = list(BEGINNING) if shared else []
    return [begin + draw.integers(0, 256, int(draw.integers(1, 24))).tolist() for _ in range(count)]


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# ---------------------------------------------------------------- generation


@pytest.mark.parametrize("kind", [*KINDS, "window"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_answers_like_single_rows(
    engines: dict[str, TransformersEngine], kind: str, shared: bool
) -> None:
    rows = prompts(9, shared)
    free = engines[kind].generate(rows, Sampling(20, ()), [])
    sampling = Sampling(20, tuple(answer[2 * k] for k, answer in enumerate(free)))
    together = engines[kind].generate(rows, sampling, [])
    assert together == [engines[kind].generate([row], sampling, [])[0] for row in rows]
    assert len({len(answer) for answer in together}) > 1  # rows left the batch at different times


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_what_transformers_generates(
    engines: dict[str, TransformersEngine], folders: dict[str, Path], kind: str
) -> None:
    model = plain_model(folders[kind])
    model.generation_config.repetition_penalty = 1.7  # ours must ignore it
    rows = prompts(5, True)
    ours = engines[kind].generate(rows, Sampling(12, (tiny.END,)), [])
    for row, answer in zip(rows, ours, strict=True):
        ids = torch.tensor([row])
        theirs = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
            repetition_penalty=1.0, eos_token_id=tiny.END, pad_token_id=tiny.END,
        )[0, len(row) :].tolist()  # fmt: skip
        assert answer == theirs[: theirs.index(tiny.END) if tiny.END in theirs else None]


def test_stop_ids_end_an_answer_and_are_not_in_it(engines: dict[str, TransformersEngine]) -> None:
    rows = prompts(6, True)
    free = engines["llama"].generate(rows, Sampling(10, ()), [])
    assert all(len(answer) == 10 for answer in free)
    ends = (free[0][4], free[1][0])
    stopped = engines["llama"].generate(rows, Sampling(10, ends), [])
    for whole, cut in zip(free, stopped, strict=True):
        first = next((k for k, token in enumerate(whole) if token in ends), 10)
        assert cut == whole[:first]
    assert engines["llama"].generate(rows, Sampling(0, ()), []) == [[]] * 6
    assert engines["llama"].generate([], Sampling(5, ()), []) == []


def test_all_rows_ended_ends_the_batch(engines: dict[str, TransformersEngine]) -> None:
    engine = engines["llama"]
    rows = prompts(4, True)
    everything = tuple(range(tiny.VOCABULARY))
    steps = count_passes(engine, lambda: engine.generate(rows, Sampling(50, everything), []))
    assert steps == 2  # the shared beginning and the rest of the prompts


def count_passes(engine: TransformersEngine, work: Callable[[], Any]) -> int:
    model = engine.model
    passes = []
    hook = model.register_forward_hook(lambda *arguments: passes.append(1))
    try:
        work()
    finally:
        hook.remove()
    return len(passes)


def test_cancelled_between_two_steps(engines: dict[str, TransformersEngine]) -> None:
    engine = engines["llama"]
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 5

    with pytest.raises(Cancelled):
        engine.generate(prompts(3, False), Sampling(100, ()), [], stop)
    assert len(asked) == 6
    with pytest.raises(Cancelled):
        engine.loglik(prompts(3, False), [[1]] * 3, lambda: True)
    rows = prompts(3, False)
    assert engine.generate(rows, Sampling(4, ()), []) == engine.generate(rows, Sampling(4, ()), [])


def test_batches_are_cut_by_size_and_keep_their_order(engines: dict[str, TransformersEngine]) -> None:
    bound = Limits(per_token=10, per_logit=1, vocabulary=5, total=1000)
    assert list(bound.batches([10] * 5, [0] * 5)) == [slice(0, 5)]
    assert list(bound.batches([10, 10, 40, 40, 40], [0] * 5)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(bound.batches([500, 1], [0, 0])) == [slice(0, 1), slice(1, 2)]  # too large still runs, alone
    assert list(bound.batches([10] * 4, [60] * 4)) == [slice(0, 2), slice(2, 4)]
    assert list(bound.batches([], [])) == []
    engine = engines["llama"]
    rows, sampling = prompts(9, True), Sampling(6, (tiny.END,))
    model = engine.model
    small = Decoder(model, limits(model, 60_000))
    assert small.generate(rows, sampling, []) == engine.generate(rows, sampling, [])
    targets = prompts(9, False, seed=4)
    assert small.loglik(rows, targets) == pytest.approx(engine.loglik(rows, targets), abs=1e-4)


def test_packed_weights_give_the_same_answers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.lock(folders["qwen2"])
    engine = transformers_engine.load(run, folders["qwen2"], compute="bfloat16")
    packing = engine._decoder.packing
    if not packing._linears:
        pytest.skip("this torch has no oneDNN")
    rows = prompts(9, True)
    monkeypatch.setattr(packing, "_linears", [])
    free = engine.generate(rows, Sampling(20, ()), [])
    sampling = Sampling(20, tuple(answer[2 * k] for k, answer in enumerate(free)))
    plain = {}
    for sign in (1, -1):
        engine.perturb(3, 0.0625, sign)
        plain[sign] = engine.generate(rows, sampling, [])
    monkeypatch.undo()
    for sign in (1, -1):
        engine.perturb(3, 0.0625, sign)
        assert engine.generate(rows, sampling, []) == plain[sign] and packing._packed
        assert engine.generate(rows, sampling, []) == plain[sign]
    engine.restore()
    assert not packing._packed and engine.generate(rows, Sampling(20, ()), []) == free
    assert packing.size > 0


def test_packed_copies_behind_another_attribute_are_gone_after_a_change() -> None:
    """As vLLM's layers multiply: by a function that is handed weight and bias."""
    from esnode.engines import packing

    layer: Any = torch.nn.Linear(48, 64).bfloat16().requires_grad_(False)
    layer.cpu_linear = packing.functional.linear
    packed = packing.Packing([layer], "cpu_linear")
    packed.use(4)
    if layer.cpu_linear is packing.functional.linear:
        pytest.skip("nothing is packed on this machine")
    values = torch.randn(4, 48).bfloat16()
    for bias in (layer.bias, None):
        assert torch.equal(
            layer.cpu_linear(values, layer.weight, bias),
            packing.functional.linear(values, layer.weight, bias),
        )
    packed.drop()
    assert layer.cpu_linear is packing.functional.linear


def test_packing_that_changes_bits_is_not_used(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from esnode.engines import packing

    engine = transformers_engine.load(tiny.lock(folders["qwen2"]), folders["qwen2"], compute="bfloat16")
    plain = packing.functional.linear
    monkeypatch.setattr(packing.functional, "linear", lambda *arguments: plain(*arguments) + 1)
    found = packing.Packing(packing.linears(engine.model))
    found.use(4)
    assert not found._packed


def test_an_empty_prompt_is_an_error(engines: dict[str, TransformersEngine]) -> None:
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        engines["llama"].generate([[1], []], Sampling(3, ()), [])


# ---------------------------------------------------------------- sampling


def test_a_rows_draws_do_not_depend_on_its_neighbours(engines: dict[str, TransformersEngine]) -> None:
    engine = engines["llama"]
    rows = prompts(8, True)
    for sampling in (Sampling(12, (tiny.END,), 1.0), Sampling(12, (tiny.END,), 0.7, 0.9)):
        streams = [1000 + k for k in range(8)]
        together = engine.generate(rows, sampling, streams)
        assert together == [
            engine.generate([row], sampling, [stream])[0] for row, stream in zip(rows, streams, strict=True)
        ]
        assert engine.generate(rows[::-1], sampling, streams[::-1]) == together[::-1]
        assert engine.generate(rows, sampling, [stream + 1 for stream in streams]) != together
    with pytest.raises(ValueError, match="random streams"):
        engine.generate(rows, Sampling(3, (), 1.0), [1])


def test_draws_are_the_laws_words() -> None:
    words = noise.words(1 << 63, 0, 5, 0, 6)
    assert uniforms(1 << 63, 6).tolist() == [(int(word) + 0.5) / 2**32 for word in words]


def drawn(logits: torch.Tensor, count: int, **options: float) -> np.ndarray:
    """Share of each token among draws of `count` streams from one distribution."""
    picker = Picker(Sampling(1, (), **options), range(count))
    tokens, usable = picker.pick(logits.expand(count, -1), 0, torch.arange(count))
    assert bool(usable.all())
    return np.bincount(tokens.numpy(), minlength=logits.numel()) / count


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, -torch.inf, 1.0, 0.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits.double() / temperature, 0).numpy()
        assert np.abs(drawn(logits, 5000, temperature=temperature) - expected).max() < 0.03
    weights = torch.softmax(logits.double(), 0).numpy()
    order = np.argsort(-weights)
    kept = order[: int(np.searchsorted(weights[order].cumsum(), 0.8)) + 1]
    nucleus = np.zeros(6)
    nucleus[kept] = weights[kept] / weights[kept].sum()
    found = drawn(logits, 5000, temperature=1.0, top_p=0.8)
    assert np.abs(found - nucleus).max() < 0.03 and (found[nucleus == 0] == 0).all()


def test_a_nucleus_wider_than_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from esnode.engines import sampling

    logits = torch.randn(3, 500)
    options = Sampling(1, (), 1.0, 0.95)
    wide = Picker(options, [1, 2, 3]).pick(logits, 0, torch.arange(3))[0]
    monkeypatch.setattr(sampling, "HEAD", 4)
    assert torch.equal(Picker(options, [1, 2, 3]).pick(logits, 0, torch.arange(3))[0], wide)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 300, dtype=torch.bfloat16)
    logits[0, [17, 250]] = 3
    assert Picker(Sampling(1, ()), []).pick(logits, 0, torch.arange(2))[0].tolist() == [17, 0]


# ---------------------------------------------------------------- likelihood


def full_forward(model: Any, prompt: Sequence[int], target: Sequence[int]) -> float:
    logits = model(input_ids=torch.tensor([[*prompt, *target]])).logits[0].double()
    chosen = logits.log_softmax(-1)[range(len(prompt) - 1, len(prompt) + len(target) - 1), list(target)]
    return float(chosen.detach().sum())


@pytest.mark.parametrize("kind", [*KINDS, "window"])
@pytest.mark.parametrize("shared", [False, True])
def test_loglik_equals_the_plain_computation(
    engines: dict[str, TransformersEngine], folders: dict[str, Path], kind: str, shared: bool
) -> None:
    model = plain_model(folders[kind])
    rows, targets = prompts(7, shared), prompts(7, False, seed=3)
    found = engines[kind].loglik(rows, targets)
    expected = [full_forward(model, *pair) for pair in zip(rows, targets, strict=True)]
    assert found == pytest.approx(expected, abs=2e-4)
    alone = [engines[kind].loglik([row], [target])[0] for row, target in zip(rows, targets, strict=True)]
    assert found == pytest.approx(alone, abs=2e-4)


def test_loglik_of_odd_targets(engines: dict[str, TransformersEngine], folders: dict[str, Path]) -> None:
    model = plain_model(folders["llama"])
    row = list(BEGINNING)
    found = engines["llama"].loglik([row, row, row], [[], [5], [5, 6, 7]])
    assert found[0] == 0.0
    assert found[1:] == pytest.approx(
        [full_forward(model, row, [5]), full_forward(model, row, [5, 6, 7])], abs=1e-4
    )
    assert engines["llama"].loglik([row], [[]]) == [0.0] and engines["llama"].loglik([], []) == []


def test_logits_are_made_at_target_positions_only(engines: dict[str, TransformersEngine]) -> None:
    engine = engines["llama"]
    shapes: list[torch.Size] = []
    head = engine.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    engine.loglik(prompts(4, True), [[1], [2, 3], [4], [5]])
    hook.remove()
    assert [shape[1] for shape in shapes] == [1, 2]


def test_the_output_head_is_not_multiplied_row_by_row(engines: dict[str, TransformersEngine]) -> None:
    """torch copies the whole matrix once per row where its weight requires no gradient."""
    from torch.profiler import ProfilerActivity, profile

    engine = engines["llama"]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        engine.loglik(prompts(4, True), [[1], [2, 3], [4], [5]])
    assert "aten::bmm" not in {event.key for event in seen.key_averages()}


# ---------------------------------------------------------------- weights and numbers


def test_answers_follow_the_weights(folders: dict[str, Path]) -> None:
    engine = transformers_engine.load(tiny.lock(folders["llama"]), folders["llama"])
    rows, targets = prompts(4, True), prompts(4, False, seed=2)
    before = engine.loglik(rows, targets)
    engine.perturb(5, 0.0625, 1)
    plus = engine.loglik(rows, targets)
    engine.perturb(5, 0.0625, -1)
    minus = engine.loglik(rows, targets)
    assert len({tuple(before), tuple(plus), tuple(minus)}) == 3
    engine.restore()
    assert engine.loglik(rows, targets) == before


def test_unusable_logits(folders: dict[str, Path]) -> None:
    engine = transformers_engine.load(tiny.lock(folders["llama"], live_dtype="float32"), folders["llama"])
    rows = [[1, 2, 3], [9, 2, 3], [4, 5, 6]]
    whole = engine.generate(rows, Sampling(5, ()), [])
    engine._replica.live("model.embed_tokens.weight")[9] = torch.inf
    assert engine.generate(rows, Sampling(5, ()), []) == [[]] * 3 and engine.broken == (0, 1, 2)
    engine.restore()
    assert engine.generate(rows, Sampling(5, ()), []) == whole and engine.broken == ()
    untied = transformers_engine.load(tiny.lock(folders["qwen2"], live_dtype="float32"), folders["qwen2"])
    untied._replica.live("model.embed_tokens.weight")[9] = torch.nan
    answers = untied.generate(rows, Sampling(5, ()), [])
    assert answers[1] == [] and untied.broken == (1,) and len(answers[0]) == len(answers[2]) == 5
    values = untied.loglik(rows, [[3]] * 3)
    assert (
        values[1] == -math.inf and untied.broken == (1,) and all(map(math.isfinite, (values[0], values[2])))
    )


def test_arithmetic_falls_back_to_float32(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_engine, "_cpu_flags", lambda: {"avx2"})
    run = tiny.lock(folders["llama"])
    slow = transformers_engine.load(run, folders["llama"])
    assert slow._replica.live("model.norm.weight").dtype == torch.float32
    monkeypatch.setattr(transformers_engine, "_cpu_flags", lambda: {"avx512_bf16"})
    fast = transformers_engine.load(run, folders["llama"])
    assert fast._replica.live("model.norm.weight").dtype == torch.bfloat16
    assert fast.digest() == slow.digest() and fast.fingerprint != slow.fingerprint
    again = transformers_engine.load(run, folders["llama"])
    assert len(again.fingerprint) == 8 and again.fingerprint == fast.fingerprint
    rows, targets = prompts(4, True), prompts(4, False, seed=2)
    assert fast.loglik(rows, targets) == pytest.approx(slow.loglik(rows, targets), abs=1.0)


def test_backends_are_named(folders: dict[str, Path]) -> None:
    run = tiny.lock(folders["llama"])
    found = transformers_engine.load(run, folders["llama"], backend="reference", threads=1)
    assert found.backend == "reference" and found.digest() == run.digest
