"""The noise kernels on a GPU against its floors, and against the way other implementations make theirs.

A float32 master and bf16 live weights in the tensor sizes of Qwen2.5-7B, cut to what `--weights` asks for or
to what the free memory carries. The peer's way: `peer.py`, in bf16. A part of `gpu.py`, which starts it as
`python -m benchmarks.gpu_kernels`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from statistics import median
from typing import Any

import click
import torch

from benchmarks import gpu_limits
from benchmarks.gpu_part import reason, say
from benchmarks.peer import Peer
from esnode.hostmaster import HostMaster, Layout
from esnode.kernels import Region, Slice, pick
from esnode.kernels.streamed import StreamedKernels
from protocol.seeds import tensor_key
from protocol.shaping import MAX_SUM, Step

# Qwen2.5-7B: one embedding, 28 layers, an output matrix.
VOCAB, HIDDEN, LAYERS, KEY_VALUE, INNER = 152064, 3584, 28, 512, 18944
SIGMA, SHIFT = 2.0**-10, 45
BYTES = {"perturb": 6, "restore": 6, "update": 8, "digest": 4}  # read and written per weight
RESIDENT = 6  # bytes of the GPU that a weight takes: master and live
STREAMED = 10  # master, buffer and live
MOST_STREAMED = 10**9


def sizes(weights: int) -> Iterator[tuple[str, int]]:
    """Names and element counts that add up to `weights`."""
    layer = [HIDDEN * HIDDEN, HIDDEN * KEY_VALUE, HIDDEN * KEY_VALUE, HIDDEN * HIDDEN]
    layer += [HIDDEN * INNER, HIDDEN * INNER, INNER * HIDDEN, HIDDEN, HIDDEN]
    left, k = weights, 0
    for size in [VOCAB * HIDDEN, *layer * LAYERS, VOCAB * HIDDEN]:
        if left:
            yield f"tensor.{k}", min(size, left)
            left, k = left - min(size, left), k + 1


class Clock:
    """Times calls until a moment (of `time.monotonic`) at most; each row gets its share of what is left."""

    def __init__(self, device: torch.device, repeats: int, until: float, rows: int) -> None:
        self._device, self._repeats, self._until, self._rows = device, repeats, until, rows

    def seconds(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Median of a call, after one to warm up; fewer calls than asked for where each takes long."""
        now = time.monotonic()
        if now > self._until:
            raise TimeoutError("no time left for it")
        end = now + (self._until - now) / max(1, self._rows)
        self._rows -= 1
        taken = [self._once(call)]
        for _ in range(self._repeats if repeats is None else repeats):
            taken.append(self._once(call))
            if time.monotonic() > end:
                break
        return median(taken[1:])

    def _once(self, call: Callable[[], object]) -> float:
        _wait(self._device)
        began = time.perf_counter()
        call()
        _wait(self._device)
        return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device, clock: Clock) -> float:
    """Bytes per second that a copy reads and writes together."""
    count = min(1 << 30, gpu_limits.free(device) // 8) if device.type == "cuda" else 1 << 22
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / clock.seconds(lambda: target.copy_(source), 5)


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


def operation(name: str, ours: Ours, peer: Peer, clock: Clock, copied: float, rate: float | None) -> Any:
    """A row of the table."""
    weights = sum(part.region.count for part in ours.parts)
    seconds = clock.seconds(getattr(ours, name))
    row = {
        "seconds": seconds,
        "seconds_per_1e9": seconds * 1e9 / weights,
        "floor_seconds": weights * BYTES[name] / copied,
        **gpu_limits.instruction_floor(name, weights * (peer.members if name == "update" else 1), rate),
    }
    if hasattr(peer, name):
        try:
            theirs = clock.seconds(getattr(peer, name), 2)
            row |= {"peer_seconds": theirs, "ratio": theirs / seconds}
        except Exception as error:
            row["peer_failed"] = reason(error)
    return row


def streamed(device: torch.device, asked: int, members: int, clock: Clock) -> dict[str, Any]:
    """A master in host memory on its way through the device."""
    count = gpu_limits.carried(device, asked, STREAMED)
    host = HostMaster.create(Layout((("w", count),), torch.float32, bytes(32)), str(device))
    master, live = host.views["w"].fill_(0.02), torch.empty(count, dtype=torch.bfloat16, device=device)
    kernels = StreamedKernels(pick(str(device), "triton"), pick("cpu"), str(device), fold_on_device=True)
    step = Step(tuple(range(members)), (MAX_SUM // members,) * members, SHIFT, 0)
    place = Region.whole(count)
    buffer = torch.empty_like(master, device=device)
    down = clock.seconds(lambda: buffer.copy_(master, non_blocking=True))
    calls: dict[str, Callable[[], object]] = {
        "perturb": lambda: kernels.perturb(master, live, 7, 1, place, SIGMA, 1),
        "update": lambda: kernels.update(master, [step], 1, place),
    }
    timed = {}  # the floor of an update too: a link works both ways at once
    for what, call in calls.items():
        seconds = clock.seconds(call)
        timed[what] = {
            "seconds": seconds, "seconds_per_1e9": seconds * 1e9 / count, "floor_seconds": down,
        }  # fmt: skip
    link = {"pinned": host.obstacle is None, "link_bytes_per_second": 4 * count / down}
    return {"weights": count, **link, **timed}


def resident(device: torch.device, weights: int, members: int, clock: Clock) -> None:
    """The operations on a master on the GPU, each said as soon as it is measured."""
    copied, rate = copy_rate(device, clock), gpu_limits.issued(device)
    say(copy_bytes_per_second=copied, instructions_per_second=rate)
    ours = Ours(device, weights, members)
    peer = Peer([part.live for part in ours.parts], members, SIGMA)
    for name in BYTES:
        try:
            say(**{name: operation(name, ours, peer, clock, copied, rate)})
        except Exception as error:
            say(**{name: {"failed": reason(error)}})


@click.command()
@click.argument("device")
@click.argument("weights", type=int)
@click.argument("members", type=int)
@click.argument("repeats", type=int)
@click.argument("seconds", type=float)
def main(device: str, weights: int, members: int, repeats: int, seconds: float) -> None:
    """Say what `gpu.py` names; what fails costs its own row."""
    place, until = torch.device(device), time.monotonic() + seconds
    clock = Clock(place, repeats, until, rows=10)
    used = gpu_limits.carried(place, weights, RESIDENT)
    say(
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu, interpreted",
        torch=torch.__version__, triton=metadata.version("triton"), members=members,
        weights=used, weights_asked=weights, free_bytes=gpu_limits.free(place),
    )  # fmt: skip
    try:
        resident(place, used, members, clock)
    except Exception as error:
        say(failed=reason(error))
    if place.type == "cuda":
        torch.cuda.empty_cache()
    try:
        say(streamed=streamed(place, min(weights, MOST_STREAMED), members, clock))
    except Exception as error:
        say(streamed={"failed": reason(error)})


if __name__ == "__main__":
    sys.exit(main())
