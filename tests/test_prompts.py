"""Rendering and tokenising: pinned clock, stop ids, digests, refusals."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import struct
import tracemalloc
from pathlib import Path

import pytest

from esnode import prompts, tasks
from esnode.models import ModelError
from esnode.prompts import Prepared, PromptError, pinned_template
from tests import tiny

DATE = "2026-01-01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: tokenizing needs none."""
    path = tmp_path_factory.mktemp("model")
    tiny.tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": [256, 11], "max_position_embeddings": 400}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 12, "repetition_penalty": 2.0}))
    return path


def opened(spec: str, **options: object) -> tasks.Task:
    data = tasks.materialise(spec, options)
    return tasks.open_task(spec, tasks.header(data)[1], data)


@pytest.fixture(scope="module")
def short(folder: Path) -> Prepared:
    return prompts.prepare(folder, opened("short-answers"), DATE)


def test_ids_are_those_of_the_rendered_chat(short: Prepared) -> None:
    ids = short.ids_of("heldout", 3)
    item = short.task.heldout[3]
    system = short.task.start(item)[0]["content"]
    text = f"<|system|>{system}<|end|><|user|>{item['prompt']}<|end|><|assistant|>"
    assert short._tokenizer.decode(ids) == text
    assert ids == short.render(short.task.start(item))
    assert short.decode(short.target_ids("heldout", 3)) == item["target"]
    assert short.target_ids("heldout", 3)[-1] == short.end_of_turn == tiny.END
    assert short.count("train") == len(short.task.train)


def test_tasks_that_generate_have_no_targets(folder: Path) -> None:
    prepared = prompts.prepare(folder, opened("conciseness"), DATE)
    assert prepared.target_ids("train", 0) == ()


def test_stop_ids_of_every_source_and_nothing_else_of_generation_config(short: Prepared) -> None:
    assert short.stop_ids == (11, 12, 256)


def test_digest_by_its_documented_framing(short: Prepared) -> None:
    hashed = hashlib.sha256(b"esnode tokens 1" + struct.pack("<I", short.count("heldout")))
    for index in range(short.count("heldout")):
        for ids in (short.ids_of("heldout", index), short.target_ids("heldout", index)):
            hashed.update(struct.pack("<I", len(ids)))
            hashed.update(b"".join(struct.pack("<I", token) for token in ids))
    assert short.digest("heldout") == hashed.hexdigest()
    assert short.digest("heldout") != short.digest("train")


def test_another_template_or_tokenizer_changes_the_digest(short: Prepared) -> None:
    tokenizer = tiny.tokenizer()
    assert Prepared(tokenizer, short.task, DATE).digest("train") == short.digest("train")
    tokenizer.chat_template = tiny.TEMPLATE.replace("<|assistant|>", "<|assistant|>\n")
    assert Prepared(tokenizer, short.task, DATE).digest("train") != short.digest("train")


@pytest.mark.parametrize(("written", "context"), [("400.0", 400), ("4e2", 400), ("400", 400), ("null", 0)])
def test_a_whole_number_may_be_written_with_a_point(
    written: str, context: int, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = f'{{"eos_token_id": [256.0, 11], "max_position_embeddings": {written}}}'
    (tmp_path / "config.json").write_text(config)
    prepared = prompts.prepare(tmp_path, opened("short-answers"), DATE)
    assert prepared.context == context and prepared.stop_ids == (11, 12, 256)
    assert {type(number) for number in (prepared.context, *prepared.stop_ids)} == {int}


@pytest.mark.parametrize("written", ["2048.5", "1e400", "NaN", "true", '"2048"'])
def test_a_context_that_is_no_whole_number_is_named(written: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(f'{{"max_position_embeddings": {written}}}')
    with pytest.raises(ModelError, match=r"max_position_embeddings is .*, which is no whole number"):
        prompts.prepare(tmp_path, opened("short-answers"), DATE)


# ---------------------------------------------------------------- the clock

CLOCKS = [
    "{{ strftime_now('%d %b %Y') }}",
    '{% set today = strftime_now( "%d %b %Y" ) %}{{ today }}',
    "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}",
    "{% if not date_string is defined %}{% set date_string = 0 %}{% endif %}{{ date_string }}",
]


@pytest.mark.parametrize("clock", CLOCKS)
def test_templates_that_read_the_clock_get_the_plans_date(short: Prepared, clock: str) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = clock + tiny.TEMPLATE
    prepared = Prepared(tokenizer, short.task, "2024-02-29")
    assert tokenizer.decode(prepared.ids_of("train", 0)).startswith("29 Feb 2024<|system|>")


@pytest.mark.parametrize("clock", ["{{ strftime_now(format) }}", "{% set f = strftime_now %}{{ f('%Y') }}"])
def test_a_clock_that_cannot_be_pinned_is_refused(clock: str) -> None:
    with pytest.raises(PromptError, match="cannot be pinned"):
        pinned_template(clock, datetime.date(2026, 1, 1))


# ---------------------------------------------------------------- refusals


def test_no_chat_template(short: Prepared) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="has no chat template"):
        Prepared(tokenizer, short.task, DATE)


def test_a_template_that_knows_no_system_message(short: Prepared) -> None:
    tokenizer = tiny.tokenizer()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refusal + tiny.TEMPLATE
    with pytest.raises(PromptError, match=r"refuses train item 0 of task 'short-answers' .no system role."):
        Prepared(tokenizer, short.task, DATE)


def test_prompts_too_long_for_the_model_are_named(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "a" * (300 if n == 5 else 3), "answer": "x", "split": "train"} for n in range(8)]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "split": "test"}]))
    task = opened(f"file:{path}")
    with pytest.raises(PromptError, match="train prompt 5 of task 'file' has 303 tokens, with 128 more"):
        prompts.prepare(folder, task, DATE)
    assert prompts.prepare(folder, task, DATE, max_new_tokens=97)
    with pytest.raises(PromptError, match="train prompt 5"):
        prompts.prepare(folder, task, DATE, max_new_tokens=98)
    prepared = prompts.prepare(folder, task, DATE, max_new_tokens=97)
    prepared.require_room(97, engine=0)
    with pytest.raises(PromptError, match=r"train prompt 5 .* exceeds the engine's context of 380"):
        prepared.require_room(97, engine=380)
    assert prepared.context == 380  # for conversations


def test_an_empty_target_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "target": ""}) + "\n" for n in range(5)))
    with pytest.raises(PromptError, match="item 0 of task 'likelihood' has an empty target"):
        prompts.prepare(folder, opened(f"likelihood:{path}"), DATE)


def test_many_prompts_take_four_bytes_an_id(folder: Path, tmp_path: Path) -> None:
    """100,000 prompts of a `file:` task took 1.9 GB while they were tokenised, and 8 bytes an id after."""
    lines = (
        {"prompt": f"{k} " * 40, "answer": "a", "split": "heldout" if k < 9 else "train"} for k in range(4000)
    )
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = opened(f"file:{tmp_path / 'many.jsonl'}")
    (tokenizer, rendered) = tiny.tokenizer(), sum(len(item["prompt"]) for item in task.train)
    tracemalloc.start()
    prepared = Prepared(tokenizer, task, DATE)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    count = sum(len(prepared.ids_of("train", k)) for k in range(prepared.count("train")))
    assert count > rendered > 500_000
    assert kept < 6 * count and peak < 16 * count


def test_no_tokenizer(tmp_path: Path, short: Prepared) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PromptError, match=r"the tokenizer of .* cannot be loaded"):
        prompts.prepare(tmp_path, short.task, DATE)


# ---------------------------------------------------------------- the demo model


@pytest.mark.model
def test_the_demo_models_prompts_are_short() -> None:
    from esnode import models

    try:
        model = models.resolve("demo").path
    except models.ModelError as error:
        pytest.skip(str(error))
    prepared = prompts.prepare(model, opened("short-answers"), DATE)
    lengths = [len(prepared.ids_of("train", index)) for index in range(prepared.count("train"))]
    assert max(lengths) <= 32 and prepared.stop_ids == (2,) and prepared.end_of_turn == 2
    assert prepared.decode(prepared.ids_of("train", 0)).endswith(
        "What is the capital of France?\nassistant\n"
    )
