"""Kernels and replicas on a real GPU (`make gpu-check`). Skipped, with the reason, where there is none.

Needs torch, triton, numba, numpy, safetensors, transformers and pytest only, so that it runs in a bare
environment. ESNODE_GPU=cpu tries the tests themselves on a machine without a GPU, in Triton's interpreter.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esnode import placement
from esnode.engines import transformers_engine
from esnode.engines.wish import Wish
from esnode.hostmaster import HostMaster, Layout
from esnode.kernels import create, pick, selftest
from esnode.kernels.interface import Region
from esnode.kernels.streamed import StreamedKernels
from esnode.state import State
from tests import bare
from tests.slow_law import LIVE, SIGMA, STARTS, TOP, bits, steps_for, weights

DEVICE = os.environ.get("ESNODE_GPU", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA or ROCm GPU in this machine"
    ),
]
BOTH = pytest.mark.parametrize("narrow", [False, True], ids=["fp32 master", "bf16 master"])
INTERPRETED = DEVICE == "cpu"
SIZES = {
    "a.weight": (30, 257),
    "b.bias": (5,),
    "c.weight": (300 if INTERPRETED else 1 << 18, 3),
    "d.weight": (1,),
}


@pytest.fixture(scope="module", params=["triton", "compiled", "reference"])
def kernels(request):
    return create(request.param, DEVICE)


def same(kernels, values: torch.Tensor, region: Region, seed: int, narrow: bool) -> None:
    """Every operation on the GPU against numba on the CPU, bit for bit."""
    cpu, steps, tid = create("cpu"), steps_for(3, seed), seed * 0x9E3779B1 & 0xFFFFFFFF
    ours = values.to(torch.bfloat16) if narrow else values.clone()
    theirs = ours.to(DEVICE, copy=True)
    noise_here = torch.empty(region.count, dtype=torch.int32)
    noise_there = noise_here.to(DEVICE)
    cpu.fill(seed, tid, region, noise_here)
    kernels.fill(seed, tid, region, noise_there)
    assert torch.equal(noise_here, noise_there.cpu())
    for live in LIVE.values():
        here, there = (
            torch.empty(region.count, dtype=live),
            torch.empty(region.count, dtype=live, device=DEVICE),
        )
        for sign in (1, -1):
            cpu.perturb(ours, here, seed, tid, region, SIGMA, sign)
            kernels.perturb(theirs, there, seed, tid, region, SIGMA, sign)
            assert (bits(here) == bits(there.cpu())).all()
        cpu.restore(ours, here)
        kernels.restore(theirs, there)
        assert (bits(here) == bits(there.cpu())).all()
    assert cpu.digest(ours, tid, region) == kernels.digest(theirs, tid, region)
    assert cpu.update(ours, steps, tid, region) == kernels.update(theirs, steps, tid, region)
    assert (bits(ours) == bits(theirs.cpu())).all()


def test_the_self_test_has_the_digest_of_the_cpu(kernels):
    assert selftest(kernels, DEVICE).digest == selftest(create("cpu")).digest


@BOTH
@pytest.mark.parametrize("start", STARTS)
def test_runs_at_every_kind_of_index(kernels, start, narrow):
    count = min(5003, TOP - start)
    same(kernels, torch.from_numpy(weights(count, start % 97)), Region.whole(count, start), 17, narrow)


@pytest.mark.parametrize("case", range(20))
def test_any_slice_has_the_bits_of_the_cpu(kernels, case):
    draw = random.Random(case)
    rows, width = draw.randint(1, 60), draw.randint(1, 900)
    stride = width + draw.choice([0, 0, 1, 31, 576])
    region = Region(draw.choice(STARTS[:-1]), rows, width, stride)
    same(kernels, torch.from_numpy(weights(rows * width, case)), region, case, bool(case % 2))


@BOTH
def test_ten_million_elements(narrow):
    count = 10**7
    same(
        create("triton", DEVICE), torch.from_numpy(weights(count)), Region.whole(count, 2**33 - 5), 5, narrow
    )


def test_fifty_rounds_leave_equal_bits_everywhere():
    region, cpu, gpu = Region.whole(100_003, 12345), create("cpu"), create("triton", DEVICE)
    here = torch.from_numpy(weights(region.count))
    there = here.to(DEVICE, copy=True)
    for first in range(0, 50, 5):
        steps = steps_for(5, first)
        assert cpu.update(here, steps, 3, region) == gpu.update(there, steps, 3, region)
    assert (bits(here) == bits(there.cpu())).all()


# ---------------------------------------------------------------- masters in host memory


def host_master(count: int, dtype: torch.dtype) -> HostMaster:
    return HostMaster.create(Layout((("w", count),), dtype, bytes(32)), DEVICE)


def test_host_memory_is_pinned():
    host = host_master(1000, torch.float32)
    assert host.obstacle is None
    assert DEVICE == "cpu" or host.views["w"].is_pinned()


@BOTH
@pytest.mark.parametrize("fold_on_device", [True, False])
def test_streamed_masters_have_the_bits_of_device_masters(narrow, fold_on_device):
    count, chunk = (9_001, 1 << 12) if INTERPRETED else (3_000_017, 1 << 18)
    dtype = torch.bfloat16 if narrow else torch.float32
    cpu, inner = create("cpu"), create("triton", DEVICE)
    streamed = StreamedKernels(inner, create("cpu"), DEVICE, chunk=chunk, fold_on_device=fold_on_device)
    host = host_master(count, dtype).views["w"]
    host.copy_(torch.from_numpy(weights(count)))
    ours, region = host.clone(), Region.whole(count, 2**34 - count // 3)
    for first in range(0, 6, 2):
        steps = steps_for(2, first)
        assert cpu.update(ours, steps, 3, region) == streamed.update(host, steps, 3, region)
        assert cpu.digest(ours, 3, region) == streamed.digest(host, 3, region)
        for live in LIVE.values():
            here = torch.empty(count, dtype=live)
            there = torch.empty(count, dtype=live, device=DEVICE)
            cpu.perturb(ours, here, first, 3, region, SIGMA, -1)
            streamed.perturb(host, there, first, 3, region, SIGMA, -1)
            assert (bits(here) == bits(there.cpu())).all()
            cpu.restore(ours, here)
            streamed.restore(host, there)
            assert (bits(here) == bits(there.cpu())).all()
    assert (bits(ours) == bits(host)).all()


def test_streamed_slices_of_rows():
    region = Region(2**33, 40 if INTERPRETED else 900, 700, 1000)
    master, live = torch.from_numpy(weights(region.count)), torch.empty(region.count, dtype=torch.bfloat16)
    here = live.clone()
    streamed = StreamedKernels(create("triton", DEVICE), create("cpu"), DEVICE, chunk=1 << 14)
    there = live.to(DEVICE)
    streamed.perturb(master, there, 9, 8, region, SIGMA, 1)  # from memory that is not pinned
    create("cpu").perturb(master, here, 9, 8, region, SIGMA, 1)
    assert (bits(here) == bits(there.cpu())).all()


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_fifty_rounds_of_a_state_wherever_its_master_lies(tmp_path: Path, master):
    folder = bare.checkpoint(tmp_path, SIZES)
    run = bare.lock(folder, create("cpu"), master=master)
    layout = Layout.of(run, {name: torch.Size(shape).numel() for name, shape in SIZES.items()})
    host = HostMaster.create(layout, DEVICE)
    inner = pick(DEVICE, "triton")
    streaming = StreamedKernels(inner, create("cpu"), DEVICE, chunk=5000, fold_on_device=True)
    states = [
        State.load(run, folder, create("cpu")),
        State.load(run, folder, pick(DEVICE, "triton"), device=DEVICE),
        State.load(run, folder, streaming, host=host),
    ]
    rounds = 4 if INTERPRETED else 50
    for first in range(0, rounds, 10):
        batch = bare.commits(run, rounds)[first : first + 10]
        digests = [state.apply(batch) for state in states]
        assert digests[0] == digests[1] == digests[2]
    for name in SIZES:
        values = [state.read(name).tobytes() for state in states]
        assert values[0] == values[1] == values[2]
    assert all(state.damaged() == () for state in states)


def test_a_second_process_reads_the_same_master():
    host = host_master(100_000, torch.float32)
    host.views["w"].copy_(torch.from_numpy(weights(100_000)))
    host.publish({"w": 1})
    program = (
        "import sys, torch\n"
        "from esnode.hostmaster import HostMaster, Layout\n"
        "from esnode.kernels import Region, create\n"
        "from esnode.kernels.streamed import StreamedKernels\n"
        "path, device = sys.argv[1:]\n"
        "host = HostMaster.attach(path, Layout((('w', 100_000),), torch.float32, bytes(32)), device)\n"
        "assert host.obstacle is None, host.obstacle\n"
        "kernels = StreamedKernels(create('triton', device), create('cpu'), device, fold_on_device=True)\n"
        "print(kernels.digest(host.views['w'], 3, Region.whole(100_000)))\n"
    )
    command = [sys.executable, "-c", program, host.path, DEVICE]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    assert int(done.stdout) == create("cpu").digest(host.views["w"], 3, Region.whole(100_000))


# ---------------------------------------------------------------- a model


def tiny_model(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_engines_on_the_gpu_and_the_cpu_stay_one_replica(tmp_path: Path):
    folder = tiny_model(tmp_path)
    run = bare.lock(folder, create("cpu"))
    engines = [
        transformers_engine.load(run, folder, device=device, wish=Wish(master))
        for device, master in (("cpu", "device"), (DEVICE, "device"), (DEVICE, "host"))
    ]
    follower = transformers_engine.load(run, folder, device=DEVICE, wish=Wish(attach=engines[2].host_path))
    entries = bare.commits(run, 5)
    digests = [engine.apply(entries) for engine in engines]
    assert digests[0] == digests[1] == digests[2] and follower.refresh() == digests[0][-1]
    for engine in (*engines, follower):
        engine.perturb(2**63, 0.0078125, -1)
    for spec in run.manifest:
        live = [engine.live(spec.name).cpu().to(torch.bfloat16) for engine in (*engines, follower)]
        assert all(torch.equal(live[0], other) for other in live[1:]), spec.name
    prompts, targets = [[3, 4, 5, 6], [9, 8, 7]], [[5, 6, 7], [1, 2]]
    assert engines[1].loglik(prompts, targets) == engines[2].loglik(prompts, targets)
    assert engines[1].loglik(prompts, targets) == follower.loglik(prompts, targets)
    assert placement.pick(DEVICE, None, None).name == engines[1].backend
