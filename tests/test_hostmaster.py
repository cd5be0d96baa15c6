"""Masters in shared host memory: equal bits to masters on the device, one writer, readers that only read."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esnode import hostmaster, memory
from esnode.engines.wish import HostMasterUnavailable
from esnode.hostmaster import HostMaster, Layout, NotLeader
from esnode.kernels import create
from esnode.kernels.cpu import CpuKernels
from esnode.kernels.interface import Kernels, Region
from esnode.kernels.streamed import StreamedKernels, passes_through
from esnode.state import State, TornState
from protocol.lock import Lock
from tests import tiny

BOTH = pytest.mark.parametrize("master", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("host") / "llama")


def layout(run: Lock) -> Layout:
    sizes = {spec.name: int(np.prod(spec.shape)) for spec in run.manifest if spec.trained}
    return Layout.of(run, sizes)


def leader(run: Lock, folder: Path, kernels: Kernels | None = None) -> State:
    return State.load(run, folder, kernels or CpuKernels(), host=HostMaster.create(layout(run)))


def reader(run: Lock, folder: Path, of: State) -> State:
    assert of.host_path is not None
    return State.load(run, folder, CpuKernels(), host=HostMaster.attach(of.host_path, layout(run)))


def streamed(fold_on_device: bool) -> Kernels:
    return StreamedKernels(
        create("cpu"), create("reference"), "cpu", chunk=777, fold_on_device=fold_on_device
    )


def masters(state: State) -> dict[str, bytes]:
    return {part.spec.name: part.master.view(torch.uint8).numpy().tobytes() for part in state.parts}


# ---------------------------------------------------------------- equal bits


@BOTH
@pytest.mark.parametrize("fold_on_device", [True, False])
def test_fifty_rounds_leave_the_bits_of_a_device_master(
    folder: Path, master: str, fold_on_device: bool
) -> None:
    run = tiny.lock(folder, master=master)
    chain, _ = tiny.chain(run, folder, 50)
    here = State.load(run, folder, CpuKernels())
    there = leader(run, folder, streamed(fold_on_device))
    for first in range(0, len(chain.entries), 7):
        batch = chain.entries[first : first + 7]
        assert here.apply(batch) == there.apply(batch)
    assert masters(here) == masters(there)
    assert here.digest() == there.digest() == there.recompute_digest()


@BOTH
def test_a_reader_sees_what_the_leader_wrote(folder: Path, master: str) -> None:
    run = tiny.lock(folder, master=master)
    chain, _ = tiny.chain(run, folder, 3)
    first = leader(run, folder)
    second = reader(run, folder, first)
    assert not second.leads and second.digest() == run.digest
    first.apply(chain.entries)
    seen: list[str] = []
    assert second.refresh(lambda part: seen.append(part.spec.name)) == first.digest() != run.digest
    assert len(seen) == len(second.parts) and second.damaged() == ()
    assert masters(first) == masters(second)
    late = reader(run, folder, first)
    assert late.digest() == first.digest() == late.recompute_digest()


def test_another_process_reads_the_same_bits(folder: Path, tmp_path: Path) -> None:
    run = tiny.lock(folder)
    chain, _ = tiny.chain(run, folder, 2)
    first = leader(run, folder)
    first.apply(chain.entries)
    (tmp_path / "lock.json").write_bytes(run.to_bytes())
    program = (
        "import sys, pathlib\n"
        "from esnode.kernels.cpu import CpuKernels\n"
        "from protocol.lock import lock_from_bytes\n"
        "from tests.test_hostmaster import HostMaster, State, layout\n"
        "run = lock_from_bytes(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "host = HostMaster.attach(sys.argv[3], layout(run))\n"
        "state = State.load(run, sys.argv[2], CpuKernels(), host=host)\n"
        "print(state.recompute_digest())\n"
        "state.parts[0].master[0] = 1\n"  # the system does not let it
    )
    command = [sys.executable, "-c", program, str(tmp_path / "lock.json"), str(folder), str(first.host_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(first.digest())], done.stderr
    assert done.returncode < 0 and first.damaged() == ()


# ---------------------------------------------------------------- misuse and accidents


def test_a_reader_writes_nothing(folder: Path) -> None:
    run = tiny.lock(folder)
    chain, _ = tiny.chain(run, folder, 1)
    first = leader(run, folder)
    second = reader(run, folder, first)
    for change in (lambda: second.apply(chain.entries), second.reset, lambda: second.refill([])):
        with pytest.raises(NotLeader):
            change()
    assert second.digest() == first.digest() == run.digest


def test_a_reader_waits_for_refresh_after_a_write(folder: Path) -> None:
    run = tiny.lock(folder)
    chain, _ = tiny.chain(run, folder, 1)
    first = leader(run, folder)
    second = reader(run, folder, first)
    first.apply(chain.entries)
    with pytest.raises(TornState, match="refresh first"):
        second.require_whole()
    second.refresh()
    second.require_whole()


def test_what_an_interrupted_leader_leaves_is_not_used(folder: Path) -> None:
    run = tiny.lock(folder)
    chain, _ = tiny.chain(run, folder, 1)
    first = leader(run, folder)
    second = reader(run, folder, first)

    def interrupt(part: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.apply(chain.entries, interrupt)
    late = reader(run, folder, first)  # while a leader writes one may attach, and use nothing yet
    for attempt in (second.require_whole, second.refresh, late.digest, late.refresh):
        with pytest.raises(TornState):
            attempt()
    assert first.reset() == second.refresh() == late.refresh() == run.digest


def test_only_the_same_master_can_be_attached_to(folder: Path, tmp_path: Path) -> None:
    run = tiny.lock(folder)
    first = leader(run, folder)
    with pytest.raises(HostMasterUnavailable, match="not a shared master of this run"):
        HostMaster.attach(str(first.host_path), layout(tiny.lock(folder, master="bfloat16")))
    (tmp_path / "file").write_bytes(bytes(10))
    with pytest.raises(HostMasterUnavailable, match="not a shared master of this run"):
        HostMaster.attach(str(tmp_path / "file"), layout(run))
    gone = str(first.host_path)
    del first
    with pytest.raises(HostMasterUnavailable, match="the process that leads it is gone"):
        HostMaster.attach(gone, layout(run))


def test_too_little_host_memory_is_told_before_any_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device="cpu": hostmaster.SPARE)
    monkeypatch.setattr(hostmaster.os, "memfd_create", lambda *arguments: pytest.fail("taken before asking"))
    with pytest.raises(HostMasterUnavailable, match=r"needs 0\.\d GB of host memory .* --master device"):
        leader(tiny.lock(folder), folder)


class Runtime:
    """CUDA's, which will not pin memory, and tells so to whatever is launched next as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch, "ones", self.launch)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.error = 801
        return self.error

    def launch(self, *sizes: int, device: str) -> None:
        self.error, told = 0, self.error
        if told:
            raise RuntimeError("CUDA error: operation not supported")


def test_memory_that_cannot_be_pinned_fails_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    host = HostMaster.create(Layout((("w", 10),), torch.float32, bytes(32)), "cuda")
    assert "could not be pinned (error 801" in str(host.obstacle)
    assert runtime.error == 0, "the next kernel would have failed with it"


class Halted:
    """Kernels of a device, in the middle of which something happens."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._inner, self._happens = CpuKernels(), happens
        self.name, self.digest = self._inner.name, self._inner.digest

    def perturb(self, *arguments: Any) -> None:
        self._happens()
        self._inner.perturb(*arguments)


def test_a_digest_beside_the_engine_takes_no_buffer_of_it() -> None:
    """A snapshot's writer and the replica proof read masters while a member is written."""
    master, other = torch.randn(50), torch.zeros(400)
    live, wanted = torch.empty(50), torch.empty(50)
    region = Region.whole(50)
    besides = threading.Thread(target=lambda: kernels.digest(other, 2, Region.whole(400)))

    def happens() -> None:
        besides.start()
        besides.join(0.3)

    inner: Any = Halted(happens)
    kernels = StreamedKernels(inner, CpuKernels(), "cpu", chunk=100, fold_on_device=True)
    kernels.perturb(master, live, 3, 1, region, 0.5, 1)
    besides.join(20)
    CpuKernels().perturb(master, wanted, 3, 1, region, 0.5, 1)
    assert torch.equal(live, wanted)


def test_where_rounds_are_folded_follows_threads_and_members() -> None:
    assert passes_through(30, 4, threads=16) and passes_through(30, 2, threads=64)
    assert not passes_through(1, 4, threads=32)  # one member: a few cores are as fast as the link
    assert passes_through(0, 4, threads=1) and not passes_through(0, 4, threads=8)  # a digest
