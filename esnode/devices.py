"""Which GPUs a node works on, and that no other node of this user does.

Lives here: `--gpus` and `--lanes` as a list of lanes, and a lock file per device. Imports torch only to
count. Called by `cli/options.py`, `cli/run.py`, `daemon.py`, `fleet.py`, `gpugroups.py` and `workshop.py`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from esnode import accelerators, joined
from protocol.errors import UserError

CPU = "cpu"
FOLDER = ".devices"


@dataclass(frozen=True, slots=True)
class Lane:
    """Where an engine of its own works. `backend`, `threads`: None and 0 for those of the node."""

    devices: tuple[str, ...]
    backend: str | None = None
    threads: int = 0


class DeviceError(UserError):
    """A device cannot be used; the sentence says why."""


def lanes_of(gpus: str | None, lanes: int | None, group: int = 1, per_gpu: int = 1) -> tuple[str, ...]:
    """The lanes that `--gpus` and `--lanes` ask for: GPUs, `group` of them together or each `per_gpu` times,
    then lanes on the CPU.

    Empty: one engine in the node's own process.
    """
    found: list[str] = []
    if per_gpu > 1 and (gpus is None or group > 1):
        which = "leave --tp out" if group > 1 else "say which with --gpus"
        raise DeviceError(f"--engines-per-gpu {per_gpu}: several engines share one GPU each; {which}")
    if gpus is not None:
        indices = _indices(gpus, count(gpus))
        if len(indices) % group:
            raise DeviceError(f"--gpus {gpus}: {len(indices)} GPUs cannot be shared out in groups of {group}")
        cut = (indices[k : k + group] for k in range(0, len(indices), group))
        found = ["+".join(f"cuda:{index}" for index in part) for part in cut for _ in range(per_gpu)]
    return (*found, *_on_cpu(lanes, bool(found)))


def _on_cpu(lanes: int | None, beside: bool) -> tuple[str, ...]:
    """Lanes on the CPU. A single one without any `beside` it is the engine in the node's own process, unless
    that would go to a GPU."""
    alone = lanes == 1 and not beside and not accelerators.plausible()
    return () if alone else (CPU,) * (lanes or 0)


def group_of(ranks: int) -> tuple[str, ...]:
    """The lane of one model in several ranks where nobody named devices; () for a single rank.

    A rank may die, and only an engine outside of the node's process can be started again without the node.
    """
    if ranks < 2:
        return ()
    here = int(accelerators.plausible() and accelerators.device() != CPU and count("all"))
    return ("+".join(f"cuda:{index}" for index in range(min(ranks, here))) or CPU,)


def of_nodes(
    gpus: str | None, lanes: int | None, group: int, per_gpu: int, nodes: int | None
) -> tuple[tuple[str, ...], ...]:
    """The lanes of each node of one machine, as `lanes_of`: the nodes share out the GPUs in their order, and
    each has `lanes` on the CPU, or one group of ranks. Without `nodes` it is one, with lanes, else two.

    Nobody said GPUs or lanes: all GPUs that there are.
    """
    if gpus is None and lanes is None and accelerators.plausible() and accelerators.device() != CPU:
        gpus = "all"
    found = lanes_of(gpus, None, group, per_gpu)
    own = _on_cpu(lanes, bool(found)) or (() if found else group_of(group))
    nodes = nodes or (1 if found or own else 2)
    if found and nodes > len(found):
        what = f"{len(found)} engine{'s' * (len(found) > 1)} on GPUs cannot be shared out"
        raise DeviceError(f"--nodes {nodes}: {what} among {nodes} nodes; leave --nodes out for one node")
    cuts = [len(found) * k // nodes for k in range(nodes + 1)]
    return tuple((*found[first:end], *own) for first, end in pairwise(cuts))


def count(gpus: str) -> int:
    """How many GPUs torch can use here; DeviceError when none."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        none = "torch finds no CUDA device on this machine; leave --gpus out"
        raise DeviceError(f"--gpus {gpus}: {accelerators.obstacle() or none}")
    return found


def _indices(gpus: str, here: int) -> list[int]:
    if gpus == "all":
        return list(range(here))
    if not all(part.isdecimal() for part in gpus.split(",")):
        raise DeviceError(f"--gpus {gpus!r}: write `all` or indices such as 0,1")
    indices = [int(part) for part in gpus.split(",")]
    missing = [index for index in indices if index >= here]
    if missing:
        known = f"the GPUs of this machine are 0 to {here - 1}" if here > 1 else "this machine has GPU 0 only"
        raise DeviceError(f"--gpus {gpus}: there is no GPU {missing[0]}, {known}")
    if len(set(indices)) < len(indices):
        raise DeviceError(f"--gpus {gpus} names a GPU twice")
    return indices


def lane(words: str) -> Lane:
    """A lane as `--lane` of the daemon has it: DEVICE[+DEVICE...][/BACKEND[/THREADS]]."""
    devices, *rest = words.split("/")
    backend, threads = (*rest, "", "")[:2]
    if not devices or len(rest) > 2 or not (threads or "0").isdecimal():
        raise DeviceError(f"--lane {words!r}: write DEVICE[+DEVICE...][/BACKEND[/THREADS]]")
    return Lane(tuple(devices.split("+")), backend or None, int(threads or 0))


def surroundings(lane: Lane, threads: int) -> dict[str, str]:
    """Environment of a lane's process: it sees its own GPUs only, and computes with so many threads."""
    indices = [int(device.partition(":")[2]) for device in lane.devices if device.startswith("cuda:")]
    seen = dict.fromkeys(_choices(), ",".join(map(visible, indices)))
    return {**seen, **thread_limits(threads)}


def _choices() -> tuple[str, ...]:
    """The variables that say which GPUs a process sees, the one that counts first: ROCm has its own."""
    if os.environ.get("HIP_VISIBLE_DEVICES") and accelerators.rocm():
        return "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
    return ("CUDA_VISIBLE_DEVICES",)


def thread_limits(threads: int) -> dict[str, str]:
    """What torch, numba and numpy read once, when they are imported."""
    names = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
    return {**names, "TOKENIZERS_PARALLELISM": "false"}


def visible(index: int) -> str:
    """What CUDA_VISIBLE_DEVICES has to say so that a process sees this GPU only: one of those we see."""
    ours = os.environ.get(_choices()[0])
    return ours.split(",")[index].strip() if ours else str(index)


def who(name: str, run: Path) -> str:
    """This process as the user of a device, for others that want it."""
    return f"node {name} of the run in {run.resolve()} (process {os.getpid()})"


def claim(devices: Sequence[str], who: str) -> list[IO[str]]:
    """Take devices for this process, as long as it holds what is returned. The CPU is anybody's.

    `who`: the node in words. DeviceError, naming the other node, for one that is taken.
    """
    held: list[IO[str]] = []
    for device in devices:
        if device == CPU:
            continue
        path = _place() / f"{_name(device)}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "another node"
            file.close()
            raise DeviceError(
                f"{device} is used by {other}: give this node another GPU with --gpus, or stop that one"
            ) from None
        file.truncate(0)
        file.write(who)
        file.flush()
        held.append(file)
    return held


def _place() -> Path:
    return joined.root() / FOLDER


def _name(device: str) -> str:
    """Of the lock file: one for a GPU, however each node's CUDA_VISIBLE_DEVICES calls it."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        return device.replace(":", "-")
    return f"{kind}-{accelerators.identity(int(index), visible(int(index))).replace('/', '-')}"
