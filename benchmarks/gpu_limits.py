"""What a GPU allows: how many weights its free memory carries, and the floors that no kernel gets below.

The memory floor of an operation is the time a device-to-device copy of the same number of bytes takes on this
card. The instruction floor is the time its multiprocessors need to issue the kernel's instructions, at the
highest clock the driver names. Called by `gpu_kernels.py` and `gpu_round.py`.
"""

from __future__ import annotations

import torch

from esnode import memory

SHARE = 0.8  # of free memory, for weights; the rest is for buffers and for what a context takes
# Instructions per noise value of the kernels compiled for sm_90: the loop over members of `update`, 217 for 8
# values, and all of `perturb` (float32 master, bf16 live), 405 for 8 values. Half of them are for the integer
# units, which take 64 a clock, so that either way of counting gives the same floor.
INSTRUCTIONS = {"perturb": 50, "update": 27}
LANES = 128  # instructions that a multiprocessor of NVIDIA's issues a clock, since Volta: 4 warps of 32


def free(device: torch.device) -> int:
    """Bytes."""
    return memory.available(str(device))


def carried(device: torch.device, asked: int, each: int) -> int:
    """How many weights of `each` bytes are measured: those asked for, or as many as the memory carries."""
    return min(asked, int(SHARE * free(device)) // each)


def issued(device: torch.device) -> float | None:
    """Instructions a second of all multiprocessors; None where the card is not one of NVIDIA's."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    from triton.runtime import driver

    index = device.index if device.index is not None else torch.cuda.current_device()
    told = driver.active.utils.get_device_properties(index)
    return float(told["multiprocessor_count"] * 1e3 * told["sm_clock_rate"] * LANES)  # kHz


def instruction_floor(operation: str, values: int, rate: float | None) -> dict[str, float]:
    """`instruction_floor_seconds` of so many noise values and `values_per_second_at_most`; {} if unknown."""
    if rate is None or operation not in INSTRUCTIONS:
        return {}
    most = rate / INSTRUCTIONS[operation]
    return {"instruction_floor_seconds": values / most, "values_per_second_at_most": most}
