"""Options that several commands have, each written once; how those of an engine reach the daemon.

Called by the commands, as decorators.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number within bounds: NaN is outside of none, and infinity only of some."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """For `--help`, where click would write "x<=None" of a range without bounds."""
        return "" if self.min is None and self.max is None else super()._describe_range()


class NewFile(click.Path):
    """A file to write, looked at before the work that fills it: its folder is there, it is none itself.

    `endings`: those it may have; none: any.
    """

    def __init__(self, *endings: str) -> None:
        super().__init__(path_type=Path, dir_okay=False)
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is no folder, so {path.name} cannot be written there.", param, ctx)
        if self.endings and path.suffix.lower() not in self.endings:
            self.fail(f"{path.name} must end in {', '.join(self.endings)}.", param, ctx)
        return path


code = click.option(
    "--code",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that a python: task's file may come from.",
)

threads = click.option(
    "--threads", type=click.IntRange(min=1), metavar="T", help="CPU threads [default: all]."
)
engine = click.option(
    "--engine", type=click.Choice(["transformers", "vllm"]), help="What decodes [default: transformers]."
)
tp = click.option(
    "--tp",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs (or cores) that share one model, with vllm [default: as few as it fits].",
)
master = click.option(
    "--master",
    type=click.Choice(["auto", "device", "host"]),
    help="Where the master, the float32 weights, lies [default: on the GPU if it fits, else in host memory].",
)
backend = click.option(
    "--backend",
    type=click.Choice(["cpu", "triton", "compiled", "reference"]),
    help="Kernels that perturb and update the weights [default: the fastest].",
)
gpus = click.option("--gpus", metavar="all|INDEX,...", help="Work on these GPUs, an engine on each.")
engines_per_gpu = click.option(
    "--engines-per-gpu",
    type=click.IntRange(1, 8),
    default=1,
    metavar="N",
    help="Engines on each GPU, for small models, each with a master of its own; --master host: one for all "
    "[default: 1].",
)
lanes = click.option(
    "--lanes",
    type=click.IntRange(1, 32),
    metavar="N",
    help="Engines on the CPU, each a process [default: 1, in this one].",
)


def words(
    gpus: str | None, lanes: int | None, tp: int | None, engines_per_gpu: int, rest: Mapping[str, object]
) -> list[str]:
    """Arguments for `esnode.daemon`; `rest` concerns it alone. Raises DeviceError as `devices.lanes_of`, and
    RanksError.
    """
    from esnode import devices

    require(rest.get("engine"), tp)
    own = devices.lanes_of(gpus, lanes, tp or 1, engines_per_gpu) or devices.group_of(tp or 1)
    found = [word for lane in own for word in ("--lane", lane)]
    return found + typed({"tp": tp, **rest})


def require(engine: object, tp: int | None) -> None:
    """RanksError, or the engine's own UserError where vLLM is missing, for what would be refused only once a
    run is made or joined."""
    from esnode.ranks import RanksError

    if engine == "vllm":
        from esnode.engines import vllm_start

        vllm_start.require_supported()
    elif (tp or 1) > 1:
        raise RanksError(f"--tp {tp} needs --engine vllm: transformers runs a model on one device.")


def typed(options: Mapping[str, object]) -> list[str]:
    """Options as they are typed; those that are None are left out."""
    return [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
