"""A GGUF file becomes an ordinary Hugging Face folder: bf16 safetensors, configuration, tokenizer.

Uses the reader of transformers (weights are unpacked to float32, then rounded to bf16) and repairs what it
loses. Called by `models.py`, once per file.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from esnode import memory
from protocol.errors import UserError, first_line

STRAY_CONFIG = ("_model_name_or_path",)
STRAY_TOKENIZER = ("is_local", "local_files_only", "name_or_path")
# GGUF names the pre-tokenizer; the reader of transformers knows only the byte-level one these are built on.
SPLITS_DIGITS = ("smollm",)


class ConversionError(UserError):
    """A GGUF file that cannot become a folder."""


def convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an existing empty folder.

    ConversionError when a package is missing, the file is damaged or its architecture is unknown, MemoryShort
    when its weights do not fit as float32; OSError as it comes.
    """
    fields = _fields(source)
    memory.require_bare(4 * fields["weights"], f"unpacking {source.name}")
    _write(source, folder, fields.get("general.architecture", ""))
    _edit(folder / "config.json", STRAY_CONFIG)
    _edit(folder / "tokenizer_config.json", STRAY_TOKENIZER)
    if fields.get("tokenizer.ggml.pre") in SPLITS_DIGITS:
        _split_digits(folder / "tokenizer.json")


def _fields(source: Path) -> dict[str, Any]:
    """The two header fields that matter here, as text, and the number of `weights`."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConversionError(
            "reading GGUF files needs the package gguf: `pip install gguf accelerate`."
        ) from None
    try:
        reader = GGUFReader(source)
    except (ValueError, KeyError, IndexError) as error:
        raise ConversionError(f"{source} is not a readable GGUF file ({error}).") from None
    wanted = ("general.architecture", "tokenizer.ggml.pre")
    found = {name: reader.fields[name].contents() for name in wanted if name in reader.fields}
    return found | {"weights": sum(int(tensor.n_elements) for tensor in reader.tensors)}


def _write(source: Path, folder: Path, architecture: str) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the weights packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with quiet(), redirect_stderr(io.StringIO()):  # the reader's own progress bar ignores every setting
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            model: Any = AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.float32, **options
            )
        except (ValueError, KeyError, NotImplementedError, ImportError) as error:
            raise ConversionError(
                f"{source.name} (architecture {architecture!r}) cannot be converted: {_sentence(error)} "
                "Use the model's original Hugging Face folder."
            ) from None
        tokenizer.save_pretrained(folder)
        model.to(torch.bfloat16).save_pretrained(folder)


def _sentence(error: Exception) -> str:
    return first_line(error).removesuffix(".") + "."


class quiet:
    """Within it transformers draws no progress bars and warns of nothing: they would tear our own display."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._bars = logging.is_progress_bar_enabled()
        self._level = logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()

    def __exit__(self, *error: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self._level)
        if self._bars:
            logging.enable_progress_bar()


def _edit(path: Path, stray: tuple[str, ...]) -> None:
    """Remove fields that describe the file's origin, not the model."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content = {name: value for name, value in content.items() if name not in stray}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _split_digits(path: Path) -> None:
    """Numbers are tokenised digit by digit in SmolLM2: put that step back before the byte-level one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rest = content["pre_tokenizer"]
    steps = rest["pretokenizers"] if rest["type"] == "Sequence" else [rest]
    if not any(step["type"] == "Digits" for step in steps):
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, *steps]}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
