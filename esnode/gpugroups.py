"""Which GPUs of this machine each vLLM engine gets where nobody said `--tp`: measured, shown, dealt out.

A process of its own measures (`python -m esnode.gpugroups OPTION...`, options as for the daemon), for asking
a GPU for its memory takes half a gigabyte of it for as long as the process lives. The rules are in
`ranks.deal`. Called by `daemon.py`.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from esnode import devices, leash, memory, nodeoptions, ranks
from esnode.nodeoptions import Options
from esnode.ranks import Deal, Gpu, Host
from protocol.errors import UserError
from protocol.lock import Lock

SECONDS = 300.0  # a driver that does not answer by then never does


class GroupsError(UserError):
    """The GPUs of this machine cannot be dealt out; the sentence says why."""


def settle(options: Options, lock: Lock, log: logging.Logger) -> Options:
    """The options with lanes as large as the model needs, each lane one GPU before; shown in the log.

    Options that say how (`--tp`, several engines on a GPU), or other engines than vLLM, stay as they are.
    """
    lanes = [devices.lane(spec) for spec in options.lanes]
    single = [lane.devices[0] for lane in lanes if lane.devices[0] != devices.CPU]
    settled = options.engine != "vllm" or options.wish.tp or len(set(single)) < len(single)
    if settled or len(single) < 2:
        return options
    found = _measure(options, [int(device.partition(":")[2]) for device in single])
    for line in found.words:
        log.info("%s (--tp N overrules)", line)
    grouped = ["+".join(f"cuda:{index}" for index in group) for group in found.groups]
    others = [spec for spec in options.lanes if devices.lane(spec).devices[0] == devices.CPU]
    return replace(options, lanes=(*grouped, *others))


def _measure(options: Options, indices: Sequence[int]) -> Deal:
    words = nodeoptions.lane_words(options, options.threads, None)
    lanes = [word for index in indices for word in ("--lane", f"cuda:{index}")]
    command = [sys.executable, "-m", "esnode.gpugroups", *words, *lanes]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=False)
        said = json.loads(done.stdout or b'{"refused": "the process that measures the GPUs has ended"}')
    except subprocess.TimeoutExpired:
        said = {"refused": f"the driver of the GPUs says nothing for {SECONDS:.0f} s: try `nvidia-smi`"}
    if "refused" in said:
        raise GroupsError(f"{said['refused']}. --tp N says how many GPUs an engine gets")
    return Deal(tuple(map(tuple, said["groups"])), tuple(said["words"]))


def measured(options: Options, lock: Lock, log: logging.Logger) -> Deal:
    """In the process that measures: every GPU's memory, the model's needs, and what follows from both."""
    import torch

    from esnode import models
    from esnode.engines.vllm_start import CACHES
    from esnode.hostmaster import SPARE
    from esnode.kernels.streamed import BUFFERS, CHUNK
    from esnode.replica import memory_plan
    from esnode.state import DTYPES

    folder = models.of_run(options.model, options.run, lock, log.info).path
    gpus = [
        Gpu(int(device.partition(":")[2]), torch.cuda.get_device_name(device), memory.available(device))
        for spec in options.lanes
        for device in devices.lane(spec).devices
    ]
    plans = [memory_plan(lock, DTYPES[lock.live_dtype], cache.work, 0) for cache in CACHES["cuda"]]
    host = Host(memory.available(), 4 * BUFFERS * CHUNK, SPARE)
    config = ranks.read_config(folder)
    ranks.require_dense(lock, config)
    return ranks.deal(lock.model, config, plans, gpus, host, options.wish.master)


def main() -> int:
    """Measure and print what was found, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the node
    leash.die_with_thread()
    options = nodeoptions.parse(sys.argv[1:])
    try:
        found = asdict(measured(options, nodeoptions.read_lock(options.run), logging.getLogger(options.name)))
    except UserError as error:
        found = {"refused": str(error).rstrip(".")}
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
