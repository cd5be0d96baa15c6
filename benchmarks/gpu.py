"""Noise kernels on a GPU: against its memory, and against the way other implementations make theirs.

    python benchmarks/gpu.py [--json FILE] [--weights 7e9] [--device cuda] [--shape 0.5b]
    python benchmarks/gpu.py --docs FILE.json ...       put results into docs/benchmarks.md; measures nothing

A float32 master and bf16 live weights in the tensor sizes of Qwen2.5-7B, cut to `--weights`. The floor of an
operation is the time a device-to-device copy of the same number of bytes takes here. The peer's way: per
tensor `Generator.manual_seed`, `torch.randn` in bf16, in-place `add_`; for the update once per member.
`--device cpu` with TRITON_INTERPRET=1 tries the program itself on a machine without a GPU; its figures mean
nothing.

Keys of the JSON: `device`, `torch`, `triton`, `weights`, `members`; per operation (`perturb`, `restore`,
`update`, `digest`) the median `seconds`, `floor_seconds`, and `peer_seconds` with `ratio` (peer / ours) where
peers have such an operation; `streamed` with the same of a float32 master in pinned host memory, its floor
being the link's; `round` with the share that is not generation in a round of `members` members of 200 prompts
times 512 tokens at `tokens_per_second`, which is given, not measured here; `whole_round`: see `gpu_round.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

from benchmarks import gpu_docs, gpu_round
from esnode.hostmaster import HostMaster, Layout
from esnode.kernels import Region, Slice, pick
from esnode.kernels.streamed import StreamedKernels
from protocol.seeds import tensor_key
from protocol.shaping import MAX_SUM, Step

# Qwen2.5-7B: one embedding, 28 layers, an output matrix.
VOCAB, HIDDEN, LAYERS, KEY_VALUE, INNER = 152064, 3584, 28, 512, 18944
SIGMA, SHIFT = 2.0**-10, 45
PROMPTS, TOKENS = 200, 512


def sizes(weights: int) -> Iterator[tuple[str, int]]:
    """Names and element counts that add up to `weights`."""
    layer = [HIDDEN * HIDDEN, HIDDEN * KEY_VALUE, HIDDEN * KEY_VALUE, HIDDEN * HIDDEN]
    layer += [HIDDEN * INNER, HIDDEN * INNER, INNER * HIDDEN, HIDDEN, HIDDEN]
    left, k = weights, 0
    for size in [VOCAB * HIDDEN, *layer * LAYERS, VOCAB * HIDDEN]:
        if left:
            yield f"tensor.{k}", min(size, left)
            left, k = left - min(size, left), k + 1


def clock(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one to warm up."""
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes together."""
    count = 1 << (30 if device.type == "cuda" else 22)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / clock(device, lambda: target.copy_(source), 5)


class Ours:
    """The master and the live weights of the whole model."""

    def __init__(self, device: torch.device, weights: int, members: int) -> None:
        self.kernels = pick(str(device), "triton")
        self.parts = []
        for name, count in sizes(weights):
            master = torch.randn(count, device=device).mul_(0.02)
            live = torch.empty(count, dtype=torch.bfloat16, device=device)
            self.parts.append(Slice(master, live, tensor_key(name), Region.whole(count)))
        coefficients = tuple((-1) ** i * (MAX_SUM // members) for i in range(members))
        self.step = Step(tuple(range(members)), coefficients, SHIFT, 0)

    def perturb(self) -> None:
        self.kernels.perturb_many(self.parts, 7, SIGMA, 1)

    def restore(self) -> None:
        self.kernels.restore_many(self.parts)

    def update(self) -> None:
        for part in self.parts:
            self.kernels.update(part.master, [self.step], part.tid, part.region)

    def digest(self) -> None:
        for part in self.parts:
            self.kernels.digest(part.master, part.tid, part.region)


class Peer:
    """The live weights alone, perturbed in place tensor by tensor."""

    def __init__(self, ours: Ours, members: int) -> None:
        self.weights = [part.live for part in ours.parts]
        self.members = members
        self.generator = torch.Generator(self.weights[0].device)

    def perturb(self) -> None:
        for weight in self.weights:
            self._add(weight, 7, SIGMA)

    def update(self) -> None:
        for weight in self.weights:
            for seed in range(self.members):
                self._add(weight, seed, (-1) ** seed * 1e-5)

    def _add(self, weight: torch.Tensor, seed: int, factor: float) -> None:
        self.generator.manual_seed(seed)
        noise = torch.randn(weight.shape, dtype=weight.dtype, device=weight.device, generator=self.generator)
        weight.add_(noise, alpha=factor)


BYTES = {"perturb": 6, "restore": 6, "update": 8, "digest": 4}  # read and written per weight


def streamed(device: torch.device, count: int, members: int, repeats: int) -> dict[str, Any]:
    """A master in host memory on its way through the device."""
    host = HostMaster.create(Layout((("w", count),), torch.float32, bytes(32)), str(device))
    master, live = host.views["w"].fill_(0.02), torch.empty(count, dtype=torch.bfloat16, device=device)
    kernels = StreamedKernels(pick(str(device), "triton"), pick("cpu"), str(device), fold_on_device=True)
    step = Step(tuple(range(members)), (1000,) * members, SHIFT, 0)
    place = Region.whole(count)
    buffer = torch.empty_like(master, device=device)
    down = clock(device, lambda: buffer.copy_(master, non_blocking=True), repeats)
    calls: dict[str, Callable[[], object]] = {
        "perturb": lambda: kernels.perturb(master, live, 7, 1, place, SIGMA, 1),
        "update": lambda: kernels.update(master, [step], 1, place),
    }
    timed = {  # the floor of an update too: a link works both ways at once
        what: {"seconds": clock(device, call, repeats), "floor_seconds": down} for what, call in calls.items()
    }
    link = {"pinned": host.obstacle is None, "link_bytes_per_second": 4 * count / down}
    return {"weights": count, **link, **timed}


def measure(device: torch.device, weights: int, members: int, rate: float, repeats: int) -> dict[str, Any]:
    """Everything, as the JSON has it."""
    copied = copy_rate(device)
    ours = Ours(device, weights, members)
    peer = Peer(ours, members)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, interpreted",
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "weights": weights,
        "members": members,
        "copy_bytes_per_second": copied,
    }
    for operation, size in BYTES.items():
        seconds = clock(device, getattr(ours, operation), repeats)
        found[operation] = {"seconds": seconds, "floor_seconds": weights * size / copied}
        if hasattr(peer, operation):
            theirs = clock(device, getattr(peer, operation), max(1, repeats // 2))
            found[operation] |= {"peer_seconds": theirs, "ratio": theirs / seconds}
    generation = members * PROMPTS * TOKENS / rate
    other = members * found["perturb"]["seconds"] + found["update"]["seconds"] + found["restore"]["seconds"]
    found["round"] = {"tokens_per_second": rate, "generation_seconds": generation, "other_seconds": other}
    found["round"]["other_share"] = other / (other + generation)
    found["streamed"] = streamed(device, min(weights, 10**9), members, repeats)
    return found


def show(found: dict[str, Any]) -> None:
    """The same for people."""
    print(f"{found['device']}, {found['weights'] / 1e9:.2f} G weights, {found['members']} members")
    print(f"copy: {found['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    for operation in BYTES:
        row = found[operation]
        peers = f"  peer {row['peer_seconds']:.4f} s, {row['ratio']:.1f}x" if "ratio" in row else ""
        print(f"{operation:8} {row['seconds']:.4f} s  (memory floor {row['floor_seconds']:.4f} s){peers}")
    share = found["round"]
    work = f"{PROMPTS} prompts x {TOKENS} tokens at {share['tokens_per_second']:.0f} tokens/s (given)"
    print(f"a round of {work}: {share['other_share']:.1%} is not generation")
    part = found["streamed"]
    for operation in ("perturb", "update"):
        row = part[operation]
        floor = f"(the link alone {row['floor_seconds']:.3f} s)"
        print(f"streamed {operation:8} of {part['weights'] / 1e9:.2f} G: {row['seconds']:.3f} s  {floor}")
    if "whole_round" in found:
        print(gpu_round.words(found["whole_round"]))


@click.command(help="Measure the noise kernels on a GPU.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--weights", type=float, default=7e9, show_default=True)
@click.option("--members", type=click.IntRange(1, 900), default=30, show_default=True)
@click.option(
    "--rate", type=float, default=20_000, show_default=True, help="Tokens/s of the engine, for the share."
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--shape", type=click.Choice(["none", *gpu_round.SHAPES]), default="0.5b", show_default=True)
@click.option(
    "--docs", multiple=True, type=click.Path(path_type=Path, exists=True), help="Put this JSON into the docs."
)
@click.option("--json", "to", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON there.")
def main(
    device: str,
    weights: float,
    members: int,
    rate: float,
    repeats: int,
    shape: str,
    docs: tuple[Path, ...],
    to: Path | None,
) -> None:
    if docs:
        return gpu_docs.write([json.loads(path.read_text()) for path in docs])
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.ClickException("no CUDA or ROCm GPU in this machine; there is nothing to measure")
    found = measure(torch.device(device), int(weights), members, rate, repeats)
    torch.cuda.empty_cache()
    if shape != "none":
        found["whole_round"] = gpu_round.measure(device, shape)
    show(found)
    if to is not None:
        to.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
