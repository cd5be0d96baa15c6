"""torch.compile of the reference kernels: the law's bits, or the reference in their place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import esnode.kernels as registry
from esnode.kernels import KernelUnavailable, SelftestFailed, available, create, pick, selftest
from esnode.kernels.interface import Region
from tests.slow_law import SIGMA, bits, law_update, steps_for, weights

compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)


@compiler
@pytest.mark.slow
def test_compiled_kernels_are_the_law() -> None:
    kernels = create("compiled")
    assert selftest(kernels).digest == selftest(create("cpu")).digest
    start, steps = 2**34 - 900, steps_for(3)
    master = torch.from_numpy(weights(2111))
    expected, digests = law_update(weights(2111), steps, 77, start)
    region = Region.whole(2111, start)
    assert kernels.update(master, steps, 77, region) == digests
    assert (bits(master) == expected).all()
    here, there = torch.empty(2111, dtype=torch.bfloat16), torch.empty(2111, dtype=torch.bfloat16)
    kernels.perturb(master, here, 2**64 - 1, 77, region, SIGMA, -1)
    create("cpu").perturb(master, there, 2**64 - 1, 77, region, SIGMA, -1)
    assert torch.equal(here, there)


def test_what_is_compiled_is_the_law_without_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert selftest(create("compiled")).digest == selftest(create("cpu")).digest


def _cannot(*arguments: Any, **options: Any) -> Any:
    def call(*arguments: Any) -> Any:
        raise RuntimeError("InvalidCxxCompiler: no C++ compiler\nand a page of advice")

    return call


def _wrong(function: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    return lambda *arguments: function(*arguments) + 1


@pytest.mark.parametrize(
    ("compile", "reason"),
    [(_cannot, "InvalidCxxCompiler: no C"), (_wrong, "fails its self-test: vector values")],
)
def test_the_reference_takes_the_place_of_what_compiles_not_or_wrongly(
    compile: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", compile)
    assert pick("cpu", "compiled").name == "reference"
    (record,) = caplog.records
    assert reason in record.message and "trying 'reference'" in record.message
    assert "page of advice" not in record.message


def test_triton_gives_way_when_it_cannot_compile_but_not_when_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {name: None if name != "cpu" else "not here" for name in available("cuda")}
    monkeypatch.setattr(registry, "available", lambda device: names)
    told: list[str] = []

    def tested(name: str, device: str, threads: int | None) -> str:
        told.append(name)
        if name == "triton":
            raise fault
        return name

    monkeypatch.setattr(registry, "_tested", tested)
    fault: Exception = AttributeError("module 'triton.language' has no attribute 'range'")
    assert pick("cuda") == "compiled"  # type: ignore[comparison-overlap]
    assert told == ["triton", "compiled"] and "trying 'compiled'" in caplog.text
    for fault in (SelftestFailed("a vector differs"), KernelUnavailable("no")):
        with pytest.raises(type(fault)):
            pick("cuda")


def test_compiled_kernels_are_for_gpus_and_for_who_asks() -> None:
    assert "it runs on cuda" in str(available("cpu")["compiled"])
    assert list(available("cuda")) == ["cpu", "triton", "compiled", "reference"]
