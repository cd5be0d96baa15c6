"""The GPU of this machine: whether torch can use it, and if not, why, in one sentence.

Called by the engines' loaders, `devices.py`, `workshop.py` and `doctor.py`. Imports torch only inside
functions.
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAY, _COMPUTE = "0x03", "0x12"  # PCI classes of GPUs, with and without an output
_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of drivers, in containers that see no PCI bus too
_LISTED = re.compile(r"UUID: ((?:GPU|MIG)-[^)\s]+)")  # `nvidia-smi -L`: a GPU, its MIG slices, the next GPU
_SECONDS = 30.0  # for nvidia-smi
_TOO_OLD = re.compile(r"driver on your system is too old \(found version (\d+)\)")


def device() -> str:
    """Where an engine works unless it is told: "cuda" (ROCm's too) where torch can use a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def plausible() -> bool:
    """Whether it is worth asking torch for a GPU, which takes seconds."""
    return _vendor() is not None or any(Path(node).exists() for node in _NODES)


def obstacle() -> str | None:
    """Why torch cannot use the GPU that is in this machine; None when it can, or when there is none."""
    import torch

    vendor = _vendor()
    if vendor is None or torch.cuda.is_available():
        return None
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return (
            f"an {vendor} GPU is here, but torch {torch.__version__} is built for CPUs only: install the "
            "build of torch for this GPU"
        )
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return explain(vendor, str(error), built)
    return f"an {vendor} GPU is here, but none is visible to this process: see CUDA_VISIBLE_DEVICES"


def rocm() -> bool:
    """Whether torch is built for AMD's GPUs."""
    import torch

    return torch.version.hip is not None


def numbered() -> dict[str, str]:
    """The environment in which NVIDIA's tools number the GPUs that torch sees as this process does.

    CUDA counts the fastest first unless told, they count by places on the bus: between unlike GPUs a library
    that asks them would take one card for the other. {} for one GPU, slices, and where too little is known.
    """
    import torch

    cards = _listed()
    if torch.version.cuda is None or len(cards) < 2 or any(len(card) > 1 for card in cards):
        return {}
    places = {card[0].removeprefix("GPU-"): str(place) for place, card in enumerate(cards)}
    seen = [places.get(_uuid(index) or "") for index in range(torch.cuda.device_count())]
    if not seen or None in seen:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(filter(None, seen))}


def identity(index: int, named: str) -> str:
    """What tells the GPU that torch has as `index` from every other: its UUID; of a MIG slice, its own.

    `named`: what CUDA_VISIBLE_DEVICES calls it, an index of the driver's or (the beginning of) a UUID; it is
    the answer where neither torch nor nvidia-smi knows more.
    """
    cards = _listed()
    uuid = None if named.startswith("MIG-") else _uuid(index)
    found = _match(named, cards)
    if uuid is not None:
        found = next((known for card in cards for known in card if known.endswith(uuid)), f"GPU-{uuid}")
    slices = next((slices for card, *slices in cards if card == found), [])
    return slices[0] if slices else found  # of a GPU that is cut up, CUDA takes the first slice


def _uuid(index: int) -> str | None:
    """Of torch, which alone knows in what order CUDA counts; None where it has none to tell."""
    import torch

    try:
        return str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
    except (AssertionError, AttributeError, RuntimeError):  # no CUDA in this build, too old, no such device
        return None


@functools.cache
def _listed() -> list[list[str]]:
    """UUIDs by nvidia-smi: of each GPU, then of its MIG slices; [] without nvidia-smi."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    cards: list[list[str]] = []
    for uuid in _LISTED.findall(done.stdout):
        if uuid.startswith("GPU-"):
            cards.append([uuid])
        elif cards:
            cards[-1].append(uuid)
    return cards


def _match(named: str, cards: list[list[str]]) -> str:
    if named.isdecimal():
        return cards[int(named)][0] if int(named) < len(cards) else named
    found = [uuid for card in cards for uuid in card if uuid.startswith(named)]
    return found[0] if len(found) == 1 else named


def explain(vendor: str, error: str, built: str) -> str:
    """What torch says when it cannot start a GPU, in a sentence. `built`: the CUDA or ROCm it is made for."""
    old = _TOO_OLD.search(error)
    if old:
        found = int(old[1])
        return (
            f"the {vendor} driver is too old for this torch: it knows CUDA {found // 1000}."
            f"{found % 1000 // 10}, torch needs {built}; update the driver, or install a torch for "
            "that CUDA"
        )
    if "no NVIDIA driver" in error:
        return f"an {vendor} GPU is here, but no driver for it: install the {vendor} driver"
    reason = (error.splitlines() or ["no reason given"])[0].strip().rstrip(".")
    return f"an {vendor} GPU is here, but torch cannot use it: {reason}"


def _vendor() -> str | None:
    """Who made a GPU of this machine, by what is plugged in: a driver is not needed to see that."""
    for card in sorted(_PCI.glob("*")):
        try:
            kind, vendor = (card / "class").read_text(), (card / "vendor").read_text().strip()
        except OSError:
            continue
        if kind.startswith((_DISPLAY, _COMPUTE)) and vendor in _VENDORS:
            return _VENDORS[vendor]
    return None
