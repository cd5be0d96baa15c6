"""What `make gpu-check` runs: the tests on the GPU, then its figures, as a table and as JSON.

    python benchmarks/gpu.py [--tests] [--json FILE] [--weights 7e9] [--device cuda] [--shape 0.5b ...]
    python benchmarks/gpu.py --docs FILE.json ...       put results into docs/benchmarks.md; measures nothing

Each part is a process with a time of its own, together less than 8 minutes: one that hangs or runs out of
memory costs its own rows, which say so. `--device cpu` with TRITON_INTERPRET=1 (and ESNODE_GPU=cpu for the
tests) tries the program itself on a machine without a GPU; its figures mean nothing.

Keys of the JSON: `tests` (`passed`, `failed`, `skipped`, `names` of those that failed, `ended` when they were
not finished); `device`, `torch`, `triton`, `members`; `weights` measured of `weights_asked`, as many as
`free_bytes` carry; per operation (`perturb`, `restore`, `update`, `digest`) the median `seconds`,
`seconds_per_1e9` weights, `floor_seconds` (of memory), `instruction_floor_seconds` with
`values_per_second_at_most` (of a card whose rate is known), and `peer_seconds` with `ratio` (peer / ours)
where peers have such an operation; `streamed` with the same of a float32 master in pinned host memory, its
floor being the link's; `round` with the share that is not generation in a round of `members` members of 200
prompts times 512 tokens at `tokens_per_second`, which is given, not measured here; `whole_rounds`: see
`gpu_round.py`. A row that is missing has `failed` with the reason instead.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

from benchmarks import gpu_docs, gpu_part, gpu_round

PROMPTS, TOKENS = 200, 512
OPERATIONS = ("perturb", "restore", "update", "digest")
TOTAL = 470.0  # seconds for everything; each part has at most its own, and what the parts before it have left
SECONDS = {"tests": 200.0, "kernels": 80.0, "tiny": 60.0, "0.5b": 40.0, "1.5b": 45.0, "7b": 100.0}
VLLM = 120.0  # for a round of any shape
LEAST = 15.0  # a part with less than that does not begin
EXPECTED = ("out of memory", "left out", "no time left")  # reasons for a missing row that are nobody's fault


def share(found: dict[str, Any], rate: float) -> dict[str, Any]:
    """`round` of the JSON, from the rows of the kernels."""
    if any("seconds" not in found.get(name, {}) for name in ("perturb", "update", "restore")):
        return {"failed": "a row it needs is missing"}
    members = found["members"]
    generation = members * PROMPTS * TOKENS / rate
    once = found["update"]["seconds"] + found["restore"]["seconds"]
    other = members * found["perturb"]["seconds"] + once
    times = {"tokens_per_second": rate, "generation_seconds": generation, "other_seconds": other}
    return {**times, "other_share": other / (other + generation)}


def failures(found: dict[str, Any]) -> Iterator[str]:
    """Sentences about what went wrong, for the end and for the exit code."""
    tests = found.get("tests", {})
    if tests.get("failed"):
        yield f"{tests['failed']} tests failed: {', '.join(tests['names'])}"
    if "ended" in tests:
        yield f"the tests were not finished: {tests['ended']}"
    rows = {name: found.get(name, {}) for name in (*OPERATIONS, "streamed")} | {"the kernels": found}
    rows |= {f"{row['shape']} on {row['engine']}": row for row in found.get("whole_rounds", [])}
    for name, row in rows.items():
        for reason in (row.get("failed"), row.get("peer_failed")):
            if reason and not reason.startswith(EXPECTED):
                yield f"{name}: {reason}"


def show(found: dict[str, Any]) -> None:
    """The same for people."""
    if "tests" in found:
        tests = found["tests"]
        ended = f"; not finished: {tests['ended']}" if "ended" in tests else ""
        print("tests: {passed} passed, {failed} failed, {skipped} skipped".format(**tests) + ended)
    if "device" in found:
        used, asked = found["weights"], found["weights_asked"]
        why = f" (of {asked / 1e9:.3g} G, cut to what {found['free_bytes'] / 1e9:.1f} GB free carry)"
        cut = "" if used == asked else why
        print(f"{found['device']}, {used / 1e9:.3g} G weights{cut}, {found['members']} members")
        print("memory floor: a copy of as many bytes. instruction floor: what the multiprocessors can issue.")
    for name in OPERATIONS:
        print(f"{name:8} {_row(found.get(name, {}), found)}")
    part = found.get("streamed", {})
    for name in ("perturb", "update"):
        if name in part:
            row, size = part[name], f"{part['weights'] / 1e9:.3g} G"
            floor = f"(the link alone {row['floor_seconds']:.3g} s)"
            print(f"streamed {name:8} of {size}: {row['seconds']:.3g} s {floor}")
    if "failed" in part:
        print(f"streamed: {part['failed']}")
    whole = found.get("round", {})
    if "other_share" in whole:
        work = f"{PROMPTS} prompts x {TOKENS} tokens at {whole['tokens_per_second']:.0f} tokens/s (given)"
        print(f"a round of {work}: {whole['other_share']:.1%} is not generation")
    for row in found.get("whole_rounds", []):
        print(gpu_round.words(row))


def _row(row: dict[str, Any], found: dict[str, Any]) -> str:
    if "seconds" not in row:
        return str(row.get("failed") or found.get("failed") or "not measured")
    floors = f"memory floor {row['floor_seconds']:.3g} s"
    if "instruction_floor_seconds" in row:
        floors += f", instruction floor {row['instruction_floor_seconds']:.3g} s"
    peers = f"  peer {row['peer_seconds']:.3g} s, {row['ratio']:.1f}x" if "ratio" in row else ""
    peers = f"  peer: {row['peer_failed']}" if "peer_failed" in row else peers
    return f"{row['seconds']:.4g} s, {row['seconds_per_1e9']:.3g} s per 1e9 weights ({floors}){peers}"


class Check:
    """The parts, one after another, and what they have found so far."""

    def __init__(self, device: str, to: Path | None) -> None:
        self.found: dict[str, Any] = {}
        self._device, self._to, self._end = device, to, time.monotonic() + TOTAL

    def tests(self) -> None:
        arguments = ["-m", "gpu", "-rs", "tests/test_gpu.py"]
        self._add(tests=gpu_part.tests(arguments, self._left(SECONDS["tests"])))

    def kernels(self, weights: int, members: int, repeats: int, rate: float) -> None:
        seconds = self._left(SECONDS["kernels"])
        numbers = map(str, (weights, members, repeats, seconds / 2))  # half: compiling and loading are in it
        self._add(**gpu_part.run("benchmarks.gpu_kernels", [self._device, *numbers], seconds))
        self._add(round=share(self.found, rate))

    def whole_round(self, shape: str, engine: str) -> None:
        seconds = self._left(VLLM if engine == "vllm" else SECONDS[shape])
        row: dict[str, Any] = {"failed": "no time left for it"}
        if seconds >= LEAST:
            arguments = [self._device, shape, engine, str(seconds)]
            row = gpu_part.run("benchmarks.gpu_round", arguments, seconds)
        row |= {"shape": shape, "engine": engine}  # also of one that ended before it said so
        self._add(whole_rounds=[*self.found.get("whole_rounds", []), row])

    def _left(self, most: float) -> float:
        return min(most, self._end - time.monotonic())

    def _add(self, **found: Any) -> None:
        self.found |= found
        if self._to is not None:  # at once: whatever ends us later, this is kept
            self._to.write_text(json.dumps(self.found, indent=2) + "\n")


@click.command(help="Test and measure the noise kernels on a GPU.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--tests", is_flag=True, help="First the tests on the GPU.")
@click.option("--weights", type=float, help="At most [default: 7e9; 2e5 with --device cpu].")
@click.option("--members", type=click.IntRange(1, 900), default=30, show_default=True)
@click.option(
    "--rate", type=float, default=20_000, show_default=True, help="Tokens/s of the engine, for the share."
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice(["none", *gpu_round.SHAPES]),
    default=gpu_round.MEASURED, show_default=True, help="Models of whole rounds.",
)  # fmt: skip
@click.option(
    "--docs", multiple=True, type=click.Path(path_type=Path, exists=True), help="Put this JSON into the docs."
)
@click.option("--json", "to", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON there.")
def main(
    device: str,
    tests: bool,
    weights: float | None,
    members: int,
    rate: float,
    repeats: int,
    shapes: tuple[str, ...],
    docs: tuple[Path, ...],
    to: Path | None,
) -> None:
    if docs:
        return gpu_docs.write([json.loads(path.read_text()) for path in docs])
    _require(device)
    check = Check(device, to)
    if tests:
        check.tests()
    check.kernels(int(weights or (2e5 if device == "cpu" else 7e9)), members, repeats, rate)
    wanted = [shape for shape in shapes if shape != "none"]
    for engine in gpu_round.ENGINES:
        for shape in wanted[: 1 if engine == "vllm" else None]:  # its start takes a minute
            check.whole_round(shape, engine)
    show(check.found)
    wrong = list(failures(check.found))
    if wrong:
        raise click.ClickException("; ".join(wrong))


def _require(device: str) -> None:
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.ClickException("no CUDA or ROCm GPU in this machine; there is nothing to measure")


if __name__ == "__main__":
    main()
