"""What this machine is and whether it can take part: hardware, versions, kernels with self-test and speed.

Also the probe: noise values straight from a kernel. Torch and numba are imported only inside functions, so
that a coordinator's machine, which has neither, gets an answer too. Called by `esnode.cli.doctor`.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import esnode
from esnode.nodeoptions import cores
from protocol import noise
from protocol.errors import UserError
from protocol.lock import LAW
from protocol.messages import WIRE_VERSION

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from esnode.kernels import Kernels

_PACKAGES = ("torch", "numba", "transformers", "safetensors", "vllm", "numpy", "msgspec", "pyzmq", "pynacl")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "bf16")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,32}|[0-9]{1,32}")
MOST_PROBED = 10_000_000  # values of one probe: about 60 MB of text
_PROBE_CHUNK = 1 << 20
_SIZES = {"reference": 1 << 19}  # elements a speed is measured on; the slow kernel gets fewer
_USUAL_SIZE = 1 << 22
_MEMBERS = 8


class BadProbe(UserError):
    """The text after --probe does not name noise values."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """`count` noise values of one tensor from row-major index `start`."""

    seed: int
    tensor: int
    start: int
    count: int


def parse_probe(text: str) -> Probe:
    """SEED:TENSOR:START:COUNT, decimal or 0x hexadecimal. BadProbe says in one line what is wrong."""
    fields = text.split(":")
    names = ("SEED", "TENSOR", "START", "COUNT")
    if len(fields) != len(names):
        raise BadProbe(f"--probe {text!r}: expected SEED:TENSOR:START:COUNT, four numbers")
    values = []
    for name, field in zip(names, fields, strict=True):
        if not _NUMBER.fullmatch(field):
            raise BadProbe(f"--probe {text!r}: {name} {field!r} is not a decimal or 0x number")
        values.append(int(field, 16 if field[:2] in ("0x", "0X") else 10))
    seed, tensor, start, count = values
    limits = (("SEED", seed, 64), ("TENSOR", tensor, 32), ("START", start, 62))
    for name, value, bits in limits:
        if value >= 1 << bits:
            raise BadProbe(f"--probe {text!r}: {name} {value} is not below 2^{bits}")
    if count > MOST_PROBED:
        raise BadProbe(f"--probe {text!r}: COUNT {count} is more than {MOST_PROBED}: ask for less at a time")
    if count < 1 or start + count > noise.MAX_INDEX:
        raise BadProbe(f"--probe {text!r}: COUNT {count} must be at least 1 and stay below index 2^62")
    return Probe(seed, tensor, start, count)


def probe(request: Probe, kernel: str | None = None) -> Iterator[np.ndarray]:
    """m of the requested elements, a part at a time, by a self-tested kernel (the best one if unnamed)."""
    import torch

    from esnode.kernels import Region, pick

    kernels = pick("cpu", kernel)
    for first in range(request.start, request.start + request.count, _PROBE_CHUNK):
        count = min(_PROBE_CHUNK, request.start + request.count - first)
        out = torch.empty(count, dtype=torch.int32)
        kernels.fill(request.seed, request.tensor, Region.whole(count, first), out)
        yield out.numpy()


def examine(kernel: str | None = None) -> dict[str, Any]:
    """Everything doctor reports, JSON-able. `kernel` limits it to one; KernelUnavailable if unknown."""
    report = {
        "esnode": esnode.__version__,
        "law": LAW,
        "wire": WIRE_VERSION,
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
        "kernels": _kernels(kernel) if util.find_spec("torch") else {},
    }
    report["verdict"], report["ready"] = _verdict(report)
    return report


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def hardware() -> dict[str, Any]:
    """This machine, JSON-able: processor, usable cores, features that decide speed, memory, accelerators."""
    name, flags = platform.processor() or platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        told = {key.strip(): value.strip() for key, _, value in reversed(lines)}
        name = told.get("model name", name)
        flags = set((told.get("flags") or told.get("Features") or "").split())
    found: dict[str, Any] = {
        "processor": name,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": cores(),
        "features": [f for f in _FEATURES if f in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": [],
        "obstacle": None,
    }
    if util.find_spec("torch"):
        import torch

        from esnode import accelerators

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(count)]
        found["obstacle"] = accelerators.obstacle()
    return found


def _kernels(only: str | None) -> dict[str, dict[str, Any]]:
    """Per kernel: why it cannot be used, or self-test, start time and speeds. A failure is reported."""
    from esnode import accelerators
    from esnode.kernels import SelftestFailed, available, create, selftest

    found: dict[str, dict[str, Any]] = {}
    obstacles = available("cpu")
    best = accelerators.device()
    for name in obstacles if only is None else [only]:
        device = "cpu" if not obstacles.get(name) else best
        obstacle = available(device).get(name)
        if obstacle:
            found[name] = {"usable": False, "selftest": f"not run: {obstacle}"}
            continue
        kernels = create(name, device)
        started = time.perf_counter()
        try:
            report = selftest(kernels, device)
        except SelftestFailed as error:
            found[name] = {"usable": False, "selftest": str(error)}
            continue
        found[name] = {
            "usable": True,
            "selftest": f"passed, {report.checked} vectors",
            "selftest_digest": report.digest.hex(),
            "start_seconds": round(time.perf_counter() - started, 3),
            "speeds": {
                device if device != "cpu" else str(threads): _speeds(kernels, threads, device)
                for threads in _thread_counts(name, device)
            },
        }
    return found


def _thread_counts(name: str, device: str) -> list[int]:
    import torch

    if name == "reference" or device != "cpu":  # its threads are torch's
        return [torch.get_num_threads()]
    return sorted({1, cores()})


def _speeds(kernels: Kernels, threads: int, device: str) -> dict[str, float]:
    """Million weights per second: perturb to bf16, restore, and update per member of a round."""
    import torch

    from esnode.kernels import Region
    from protocol.shaping import Step

    kernels.threads = threads
    count = _SIZES.get(kernels.name, _USUAL_SIZE)
    master = torch.full((count,), 0.03, device=device)
    live = torch.empty(count, dtype=torch.bfloat16, device=device)
    region = Region.whole(count)
    step = Step(tuple(range(_MEMBERS)), (1000,) * _MEMBERS, 40, 0)
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "perturb": (count, lambda: kernels.perturb(master, live, 1, 2, region, 2.0**-9, 1)),
        "restore": (count, lambda: kernels.restore(master, live)),
        "update_per_member": (count * _MEMBERS, lambda: kernels.update(master, [step], 2, region)),
    }
    return {what: _rate(elements, call, wait) for what, (elements, call) in calls.items()}


def _rate(elements: int, call: Callable[[], object], wait: Callable[[], object]) -> float:
    """Millions of elements per second, best of three."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - started)
    return round(elements / min(seconds) / 1e6, 1)


def _verdict(report: dict[str, Any]) -> tuple[str, bool]:
    """One line on what this machine can do, and whether it can be a node."""
    missing = [p for p in ("torch", "transformers", "safetensors") if report["versions"][p] is None]
    if missing:
        extra = f"a node also needs {', '.join(missing)}: pip install '.[node]' in esnode's folder"
        return f"it can coordinate runs; {extra}", False
    usable = [name for name, kernel in report["kernels"].items() if kernel["usable"]]
    if not usable:
        return "no kernel passed its self-test: this machine must not train", False
    failed = [n for n, k in report["kernels"].items() if not k["usable"] and "not run" not in k["selftest"]]
    if failed:
        return f"kernel {failed[0]} fails its self-test; use --kernel {usable[0]} and report it", False
    obstacle = report["hardware"]["obstacle"]
    place = f", on the CPU, for {obstacle}" if obstacle else ""
    return f"ready: it can coordinate and train, with kernel {usable[0]}{place}", True


def show(report: dict[str, Any], console: Console) -> None:
    """Print an examination as tables."""
    from rich.table import Table

    hardware = report["hardware"]
    machine = Table(title="Machine", show_header=False, title_justify="left")
    machine.add_row("processor", f"{hardware['processor']}, {hardware['cores']} cores")
    machine.add_row("vector units", ", ".join(hardware["features"]) or "none that matter here")
    machine.add_row("memory", f"{hardware['memory_bytes'] / 2**30:.1f} GiB")
    machine.add_row("accelerators", ", ".join(hardware["devices"]) or hardware["obstacle"] or "none")
    machine.add_row("system", hardware["system"])
    ours = f"esnode {report['esnode']}, noise law {report['law']}, wire {report['wire']}"
    machine.add_row("software", ours)
    packages = [f"{name} {version}" for name, version in report["versions"].items() if version]
    machine.add_row("packages", ", ".join(packages))
    console.print(machine)
    kernels = Table(title="Kernels (million weights per second)", title_justify="left")
    for column in ("kernel", "self-test"):
        kernels.add_column(column)
    for column in ("compiled in", "threads", "perturb", "restore", "update, per member"):
        kernels.add_column(column, justify="right")
    for name, kernel in report["kernels"].items():
        if not kernel["usable"]:
            continue
        first = [name, kernel["selftest"], f"{kernel['start_seconds']:.1f} s"]
        for threads, speeds in kernel["speeds"].items():
            kernels.add_row(
                *first,
                threads,
                *(f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in speeds.values()),
            )
            first = ["", "", ""]
    if report["kernels"]:
        console.print(kernels)
    for name, kernel in report["kernels"].items():
        if not kernel["usable"]:
            console.print(f"{name}: {kernel['selftest']}", markup=False)
    console.print(report["verdict"][0].upper() + report["verdict"][1:] + ".", markup=False)
