"""Noise kernels against the way other implementations make theirs, side by side in one process.

    python benchmarks/noise.py [--json] [--quick] [--threads 1 --threads 2]

Peer: `peer.py`, in bf16. Ours: `kernels.perturb_many` from a float32 master to bf16 live weights, and one
fused `kernels.update` of all members, digest included. Weights have the shapes of SmolLM2-135M; repetitions
of both sides alternate, and medians are compared.

Keys of the JSON: `threads` maps each thread count (as text) to `perturb_ratio` and `update_ratio` (peer
seconds / our seconds: how many times faster ours is) and, per operation and side, `perturb_peer`,
`perturb_ours`, `update_peer`, `update_ours` as {"median", "samples"} in seconds; besides `weights`,
`members`, `kernel`, `processor`, `torch`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout without installing

from benchmarks.peer import Peer
from esnode.doctor import hardware
from esnode.kernels import Kernels, Region, Slice, pick
from protocol.seeds import tensor_key
from protocol.shaping import MAX_SUM, Step

# SmolLM2-135M: embeddings tied, 9 query and 3 key/value heads of 64.
VOCAB, HIDDEN, LAYERS, QUERY, KEY_VALUE, INNER = 49152, 576, 30, 576, 192, 1536
SIGMA = 2.0**-9
SHIFT = 45


def shapes(quick: bool) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of the model; `quick` keeps two layers and a small vocabulary."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (4096 if quick else VOCAB, HIDDEN)}
    for layer in range(2 if quick else LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            f"{at}self_attn.q_proj.weight": (QUERY, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KEY_VALUE, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KEY_VALUE, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, QUERY),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
        }
    return found | {"model.norm.weight": (HIDDEN,)}


class Ours:
    """A float32 master and bf16 live weights, moved by our kernels."""

    def __init__(self, kernels: Kernels, sizes: dict[str, tuple[int, ...]], members: int) -> None:
        self.kernels = kernels
        self.parts = []
        for name, shape in sizes.items():
            master = torch.randn(shape) * 0.02
            live = torch.empty(shape, dtype=torch.bfloat16)
            self.parts.append(Slice(master, live, tensor_key(name), Region.whole(master.numel())))
        coefficients = tuple((-1) ** i * (MAX_SUM // members) for i in range(members))
        self.step = Step(tuple(range(members)), coefficients, SHIFT, 0)
        self.digest = 0

    def perturb(self) -> None:
        self.kernels.perturb_many(self.parts, 7, SIGMA, 1)

    def update(self) -> None:
        self.digest = 0
        for part in self.parts:
            self.digest += self.kernels.update(part.master, [self.step], part.tid, part.region)[0]


def clock(call: Callable[[], None]) -> float:
    """Seconds one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(operation: str, peer: Peer, ours: Ours, repeats: int) -> dict[str, Any]:
    """Both sides of one operation, alternating."""
    samples: dict[str, list[float]] = {"peer": [], "ours": []}
    for _ in range(repeats):
        samples["peer"].append(clock(getattr(peer, operation)))
        samples["ours"].append(clock(getattr(ours, operation)))
    found: dict[str, Any] = {
        f"{operation}_{side}": {"median": median(taken), "samples": taken} for side, taken in samples.items()
    }
    found[f"{operation}_ratio"] = median(samples["peer"]) / median(samples["ours"])
    return found


def measure(
    threads: tuple[int, ...], quick: bool, members: int, repeats: tuple[int, int], kernel: str | None
) -> dict[str, Any]:
    """The whole comparison; `repeats` are those of perturb and of update."""
    kernels = pick("cpu", kernel)
    sizes = shapes(quick)
    weights = [(torch.randn(shape) * 0.02).to(torch.bfloat16) for shape in sizes.values()]
    peer, ours = Peer(weights, members, SIGMA), Ours(kernels, sizes, members)
    results: dict[str, Any] = {}
    for count in threads:
        torch.set_num_threads(count)
        kernels.threads = count
        for side in (peer, ours):
            side.perturb()  # touch all memory, compile
        results[str(count)] = {
            **compare("perturb", peer, ours, repeats[0]),
            **compare("update", peer, ours, repeats[1]),
        }
    return {
        "threads": results,
        "weights": sum(part.region.count for part in ours.parts),
        "members": members,
        "kernel": kernels.name,
        "processor": hardware()["processor"],
        "torch": torch.__version__,
    }


def show(found: dict[str, Any]) -> None:
    """The comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    title = f"{found['weights'] / 1e6:.1f} M weights, {found['members']} members, kernel {found['kernel']}"
    table = Table(title=title, title_justify="left")
    for column in ("operation", "threads", "peer", "ours", "times faster"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for operation in ("perturb", "update"):
        for threads, r in found["threads"].items():
            sides = (f"{r[f'{operation}_{side}']['median']:.3f} s" for side in ("peer", "ours"))
            table.add_row(operation, threads, *sides, f"{r[f'{operation}_ratio']:.1f}")
    Console().print(table)


@click.command(help="Compare noise kernels with per-tensor torch.randn on SmolLM2-135M's shapes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quick", is_flag=True, help="A small model, few repetitions: a smoke test.")
@click.option("--threads", multiple=True, type=click.IntRange(min=1), default=(1, 2), show_default=True)
@click.option("--members", type=click.IntRange(1, 900), default=30, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Of perturb.")
@click.option("--update-repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--kernel", metavar="NAME", help="[default: the best]")
def main(
    as_json: bool,
    quick: bool,
    threads: tuple[int, ...],
    members: int,
    repeats: int,
    update_repeats: int,
    kernel: str | None,
) -> None:
    found = measure(threads, quick, members, (3, 1) if quick else (repeats, update_repeats), kernel)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
