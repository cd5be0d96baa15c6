"""The vLLM engine, where vLLM is installed: the same bits, and answers of just the weights that were written.

vLLM pins its own torch, so it usually lives in an environment of its own (docs/vllm.md).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from esnode.engines import vllm_engine
from esnode.engines.vllm_engine import VllmUnavailable

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
QUICK = ["llama"]
MORE = ["qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "olmo2"]
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


@pytest.mark.parametrize("version", ["0.11.2", "0.33.0", "1.0"])
def test_an_untried_release_is_refused_in_a_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)
    with pytest.raises(VllmUnavailable, match=f"vLLM {version} has not been tried"):
        vllm_engine._require_supported()


def test_without_vllm_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(VllmUnavailable, match=r"pip install 'esnode\[vllm\]'"):
        vllm_engine._require_supported()
