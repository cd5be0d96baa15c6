"""Where a replica's master lies: on the device beside the live weights, or in shared host memory.

Decided from the memory plan before anything is allocated. On the GPU if it fits there with everything else,
else in pinned host memory, one for all engines of the machine, streamed through the device; an option
overrules it. Called by the engines' loaders.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from esnode import hostmaster, kernels, memory
from esnode.engines.interface import MemoryPlan
from esnode.engines.wish import Wish
from esnode.hostmaster import HostMaster, Layout
from esnode.kernels.interface import Kernels
from esnode.kernels.streamed import BUFFERS, CHUNK, StreamedKernels
from protocol.lock import Lock

log = logging.getLogger(__name__)


def agree(plan: MemoryPlan, device: str, wish: Wish) -> Wish:
    """The wish of an engine that may share a master, once it is known who leads; may wait for that one.

    Asked before our own host memory is planned, for only the leader needs any.
    """
    if not leads(plan, device, wish):
        return wish
    assert wish.ask is not None
    return replace(wish, attach=wish.ask() or None)


def leads(plan: MemoryPlan, device: str, wish: Wish) -> bool:
    """Whether an engine that `agree` was asked about has to make the host master that others will read."""
    if wish.ask is None or wish.attach is not None or plan.ranks > 1:  # nobody reads a rank's
        return False
    return wish.master == "host" or (wish.master == "auto" and _tight(plan, device))


def settle(plan: MemoryPlan, device: str, wish: Wish) -> MemoryPlan:
    """The plan with its master where it shall be. Nothing is refused here: see `memory.require`."""
    host = replace(
        plan,
        other=plan.other + (0 if device == "cpu" else 4 * BUFFERS * CHUNK),
        host=plan.master,
        host_available=memory.available() - (plan.total - plan.master if device == "cpu" else 0),
    )
    if wish.attach is not None:  # its memory is taken already
        return replace(host, master=0, host=0)
    if wish.master == "host":
        return host
    room = host.host_available - host.ranks * host.host >= hostmaster.SPARE
    fits = room and host.on_device <= host.available
    return host if wish.master == "auto" and _tight(plan, device) and fits else plan


def _tight(plan: MemoryPlan, device: str) -> bool:
    return plan.total > plan.available and device != "cpu"


def open_master(lock: Lock, plan: MemoryPlan, device: str, wish: Wish) -> HostMaster | None:
    """The host memory that a settled plan asks for, new or another process's; None for one on the device.

    HostMasterUnavailable when it cannot be had.
    """
    if wish.attach is None and not plan.host:
        return None
    layout = Layout.of(lock, {spec.name: math.prod(spec.shape) for spec in lock.manifest if spec.trained})
    if wish.attach is None:
        found = HostMaster.create(layout, device)
    else:
        found = HostMaster.attach(wish.attach, layout, device)
    if found.obstacle is not None:
        log.warning(found.obstacle)
    return found


def pick(device: str, backend: str | None, host: HostMaster | None) -> Kernels:
    """The kernels for a master that is there: those of the device, or those that stream through it."""
    chosen = kernels.pick(device, backend)
    if host is None or device == "cpu":
        return chosen
    return StreamedKernels(chosen, kernels.pick("cpu"), device)
