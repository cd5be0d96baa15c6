"""How much memory there is, and whether a replica fits: told before anything is allocated.

Called by the engines' loaders, `rebuild.py`, `gguf_conversion.py`, `placement.py`, `hostmaster.py`,
`fleet.py`, `gpugroups.py` and `engines/packing.py`. Linux: /proc and cgroup limits; elsewhere unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from esnode import reservations
from esnode.engines.interface import MemoryPlan
from protocol.errors import UserError

UNKNOWN = 1 << 62  # where the system does not say, nothing is refused
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


class MemoryShort(UserError):
    """A model that does not fit into the memory there is."""


def available(device: str = "cpu", sharing: int = 1) -> int:
    """Bytes that can be allocated now: the least of the system's and the control groups' free memory, less
    what other engines of this machine are about to take.

    Of a GPU that several engines share, each may take its part.
    """
    if device != "cpu":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return int(min(free, total // sharing))
    free = min([_system(), *_control_groups()])
    return free if free == UNKNOWN else max(0, free - reservations.outstanding())


def _system() -> int:
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
    except OSError:
        return UNKNOWN
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else UNKNOWN


def _control_groups() -> list[int]:
    """Room left in every group this process is in, version 2 and 1; page cache counts as room, as it is given
    up.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUP / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            rooms.append(_room(group, *names))
            if group == root:
                break
    return rooms


def _room(group: Path, limit: str, used: str, cache: str) -> int:
    try:
        most = (group / limit).read_text().strip()
        now = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return UNKNOWN
    return UNKNOWN if most == "max" else max(0, int(most) - now + int(stat.get(cache, 0)))


def require(plan: MemoryPlan, model: str) -> None:
    """MemoryShort, with the sums, when the plan needs more than is available."""
    if plan.on_device > plan.available:
        host = " Where the host has room, --master host keeps the master there." if not plan.host else ""
        raise MemoryShort(
            f"{model} needs {gb(plan.on_device)} of memory (master {gb(plan.master - plan.host)}, live "
            f"weights {gb(plan.live)}, work {gb(plan.other)}) and {gb(plan.available)} are free. Use a "
            f'smaller model, master = "bfloat16", or train fewer tensors ([run.train]).{host}'
        )


def require_bare(size: int, what: str) -> int:
    """The bytes that are free; MemoryShort when weights of `size` bytes, without a model, do not fit.

    Nothing in a plan could help: what is rebuilt or converted is there already.
    """
    free = available()
    if size > free:
        raise MemoryShort(
            f"{what} needs {gb(size)} of memory and {gb(free)} are free. Free some, or do it on a machine "
            "with more."
        )
    return free


def words(plan: MemoryPlan, sharing: int = 1) -> str:
    """The plan in a line, for the log. `sharing`: engines with such a plan on the same GPU."""
    parts = f"live weights {gb(plan.live)}, work {gb(plan.other)}"
    if not plan.host:
        parts = f"master {gb(plan.master)}, {parts}" if plan.master else f"{parts}; shared master"
    else:
        parts += f"; master {gb(plan.host)} in host memory of {gb(plan.host_available)} free"
    each = f" on each of {plan.ranks} GPUs" if plan.ranks > 1 else ""
    if sharing > 1:
        each = f" for each of {sharing} engines on one GPU, {gb(sharing * plan.on_device)} in all"
    return f"{gb(plan.on_device)} needed, {gb(plan.available)} free{each} ({parts})"


def in_host(plan: MemoryPlan, device: str) -> int:
    """Bytes of the plan that lie in host memory."""
    return plan.total if device == "cpu" else plan.ranks * plan.host


def together(needs: Sequence[int], free: int) -> str:
    """Why engines of one node that need so many bytes of host memory cannot all be; "" when they can."""
    if sum(needs) <= free:
        return ""
    each = ", ".join(gb(size) for size in needs)
    return (
        f"{len(needs)} engines of this node need {gb(sum(needs))} of host memory together ({each}) and "
        f"{gb(free)} are free: take fewer (--lanes), or, where each has a master of its own, --master host"
    )


def gb(size: int) -> str:
    """Bytes as errors and logs of memory write them."""
    return f"{size / 1e9:.1f} GB"
