"""Starting vLLM: which releases, with which settings, in this process or with a process for each rank.

vLLM's engine core always runs in this process. Called by `vllm_engine.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import torch
from torch import nn

from esnode import accelerators
from esnode.engines import vllm_cpu
from esnode.engines.shortage import is_shortage
from esnode.engines.wish import DEFAULT, Wish
from esnode.slicemap import Modules, SliceError
from protocol.errors import UserError, first_line
from protocol.lock import Lock

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

SUPPORTED = ("0.32",)  # releases this was tried with
MOST_SEQUENCES = 256  # decoded at once
MOST_BATCHED_TOKENS = 4096  # of one step, so that every machine of a kind cuts prompts alike
EXIT_FAULT, EXIT_MEMORY = 70, 71  # of a rank's process that failed in a step, there for want of memory
_STALE = 86400.0  # seconds after which no start can still need its meeting point


class Cache(NamedTuple):
    """What an engine may keep of keys and values, in bytes. `work`: what is planned for that and the rest."""

    size: int
    work: int


# The largest that fits is taken; a smaller one leaves room for activations and CUDA graphs. There are few, so
# that machines of a kind cut prompts alike.
CACHES = {
    "cpu": (Cache(2 << 30, 2 << 30),),
    "cuda": (Cache(8 << 30, 8 << 30), *(Cache(k << 30, (k + 2) << 30) for k in (5, 4, 3, 2))),
}


class VllmUnavailable(UserError):
    """vLLM is missing, of an untried release, or cannot run this model."""


def require_supported() -> str:
    """The release of vLLM that is installed; VllmUnavailable when it is none that was tried."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package)
            break
        except metadata.PackageNotFoundError:
            continue
    else:
        raise VllmUnavailable(
            "vLLM is not installed here: pip install '.[vllm]' in esnode's folder beside a GPU, else as "
            "docs/vllm.md says; or use --engine transformers"
        )
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise VllmUnavailable(
            f"vLLM {version} has not been tried with esnode; install one of {', '.join(SUPPORTED)}.x, or use "
            "--engine transformers"
        )
    return version


def start(
    lock: Lock,
    folder: Path,
    kind: str,
    threads: int | None,
    ranks: int,
    cache: int,
    wish: Wish = DEFAULT,
) -> LLMEngine:
    """vLLM's engine with dummy weights: the real ones are written through the map.

    `cache`: bytes for keys and values on each rank, see `CACHES`.
    """
    with _aside(wish.chatter):
        return _started(lock, folder, kind, threads, ranks, cache, wish)


def _started(
    lock: Lock, folder: Path, kind: str, threads: int | None, ranks: int, cache: int, wish: Wish
) -> LLMEngine:
    _sweep()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the core in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if _shown() else "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # before its own settings count
    if not _shown():  # pages of its configuration, when an engine fails that we tell of in a sentence
        logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would tell its makers about this machine
    if kind == "cuda":
        os.environ.update(accelerators.numbered())  # vLLM asks NVIDIA's tools what its GPU is
    if kind == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache >> 30)
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if kind == "cpu":
        vllm_cpu.prepare()
    if threads and ranks == 1:
        torch.set_num_threads(threads)
    settings: dict[str, Any] = {
        "model": str(folder),
        "dtype": lock.live_dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "enable_prefix_caching": False,  # its keys and values would be those of other weights
        "max_model_len": -1,  # the model's context, or as much of it as the cache holds
        "max_num_seqs": MOST_SEQUENCES,
        "max_num_batched_tokens": MOST_BATCHED_TOKENS,
        "async_scheduling": False,
        "seed": 0,
        "disable_log_stats": True,
        "enforce_eager": kind == "cpu",  # compiling takes a minute and a half there
    }
    if kind == "cpu":
        settings["ir_op_priority"] = vllm_cpu.NORMS
    else:
        settings["kv_cache_memory_bytes"] = cache
        settings["gpu_memory_utilization"] = 0.01  # must be free when it starts: the plan has seen to memory
    if ranks > 1:
        settings |= {
            "tensor_parallel_size": ranks,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": "esnode.engines.vllm_worker.RankWorker",
        }
    try:
        with _hidden("llvmlite.binding.ffi"), _environment(kind, threads, ranks):
            return LLMEngine.from_engine_args(EngineArgs(**settings))
    except ValueError as error:
        raise VllmUnavailable(f"vLLM cannot run the model in {folder}: {_reason(error)}") from None
    except Exception as error:  # of a rank's process vLLM says no more than that it failed
        if ranks == 1 or is_shortage(error):
            raise
        where = "above" if wish.chatter is None or _shown() else f"in {wish.chatter}"
        raise VllmUnavailable(
            f"a process of the vLLM engine with {ranks} ranks did not start; its own words are {where}. Free "
            "memory, check the GPUs, or use --tp 1"
        ) from error


def _reason(error: ValueError) -> str:
    """vLLM's own words: of a configuration's error, whose first line only counts, and without the list of all
    architectures that it knows.
    """
    told: list[dict[str, Any]] = error.errors() if hasattr(error, "errors") else []  # pydantic's
    words = told[0]["msg"].removeprefix("Value error, ") if told else str(error)
    words, listed, _ = words.partition(" Supported architectures")
    reason = first_line(ValueError(words))
    return f"{reason} Use --engine transformers" if listed else reason


def _shown() -> bool:
    return bool(os.environ.get("ESNODE_DEBUG"))


@contextlib.contextmanager
def _aside(path: str | None) -> Iterator[None]:
    """What vLLM says meanwhile, and its processes as long as they live, is added to a file."""
    if path is None or _shown():
        yield
        return
    streams = (sys.stdout, sys.stderr)
    kept = [os.dup(number) for number in (1, 2)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        _point(streams, (file, file))
        yield
    finally:
        _point(streams, kept)
        for number in (file, *kept):
            os.close(number)


def _point(streams: Sequence[TextIO], to: Sequence[int]) -> None:
    """Let file descriptors 1 and 2 be others, also for processes that start now."""
    for stream, number, target in zip(streams, (1, 2), to, strict=True):
        stream.flush()
        os.dup2(target, number)


@contextlib.contextmanager
def first_answers(folder: Path) -> Iterator[None]:
    """VllmUnavailable where vLLM loads a model that its kernels cannot compute (a head of 8 on a CPU)."""
    try:
        yield
    except RuntimeError as error:
        if is_shortage(error):
            raise
        raise VllmUnavailable(
            f"vLLM cannot compute the model in {folder} here: {first_line(error)}. Use --engine transformers"
        ) from error


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Keep a module out of sight: vLLM looks into every loaded one, and llvmlite has an object that minds."""
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


@contextlib.contextmanager
def _named(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """The same tensors; what a loader has against one is a SliceError. Loaders take them one by one."""
    last = ""

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in items:
            last = name
            yield name, tensor

    try:
        yield named()
    except (AssertionError, LookupError, RuntimeError, ValueError) as error:
        if is_shortage(error):
            raise
        words = first_line(error).partition(". ")[0]  # the names that it does know may follow
        raise SliceError(
            f"vLLM's loader does not take the stored tensor {last} ({words}): its model has none of that "
            "name, or of another shape. Use --engine transformers."
        ) from error


def padded() -> Modules:
    """The modules whose parameters vLLM makes longer than a checkpoint's: embeddings and output heads."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return (VocabParallelEmbedding,)  # output heads derive from it


def through_loader(config: Any, model: nn.Module, items: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Stored tensors by name into the parameters, the way vLLM itself loads a checkpoint.

    Memory that held a parameter holds it afterwards too: some loaders replace the bias of an output layer.
    SliceError, naming the tensor, when vLLM does not know one or expects another shape.
    """
    from vllm.config import set_current_vllm_config

    before = {name: parameter.data for name, parameter in model.named_parameters()}
    with set_current_vllm_config(config), _named(items) as named:
        model.load_weights(named)  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        held = before.get(name)
        if held is not None and held.data_ptr() != parameter.data_ptr():
            parameter.data = held.copy_(parameter.data)


@contextlib.contextmanager
def _environment(kind: str, threads: int | None, ranks: int) -> Iterator[None]:
    """What the ranks' processes inherit: threads share the node's, and are not bound to cores of their own,
    which other nodes of the machine would be bound to as well.
    """
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork would copy locks that threads here hold
    if kind == "cpu":
        each = max(1, (threads or len(os.sched_getaffinity(0))) // ranks)
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(each)}
    before = {name: os.environ.get(name) for name in wanted}
    try:
        if ranks > 1:
            os.environ.update(wanted)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _sweep() -> None:
    """Remove the meeting points of ranks that were killed; vLLM leaves them in the temporary folder."""
    for path in Path(tempfile.gettempdir()).glob("vllm_dist_*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and time.time() - path.stat().st_mtime > _STALE:
                path.unlink()
