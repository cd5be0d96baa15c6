"""Puts results of `gpu.py` into docs/benchmarks.md, between two marks. Called by `gpu.py --docs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
FROM, TO = "<!-- gpu results -->\n", "<!-- end of gpu results -->\n"
MISSING = "has not run on hardware yet"
ROWS = (
    ("perturb", "perturb, float32 master to bf16"),
    ("restore", "restore"),
    ("update", "update of all members"),
    ("digest", "digest"),
)


def write(results: Sequence[dict[str, Any]], page: Path = PAGE) -> None:
    """Replace the table; a column for each result, in the order given."""
    before, _, rest = page.read_text(encoding="utf-8").partition(FROM)
    _, _, after = rest.partition(TO)
    page.write_text(f"{before}{FROM}{table(results)}{TO}{after}", encoding="utf-8")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: without results the same rows, which say so."""
    heads = [f"{r['device']}, {r['weights'] / 1e9:.3g} G weights, N={r['members']}" for r in results]
    lines = [["measured", *(heads or ["any GPU"])]]
    lines.append(["---"] * len(lines[0]))
    for key, label in ROWS:
        lines.append([label, *([_operation(r[key]) for r in results] or [MISSING])])
    for key in ("perturb", "update"):
        label = f"{key}, master in host memory"
        lines.append([label, *([_streamed(r["streamed"], key) for r in results] or [MISSING])])
    lines.append(["a whole round", *([_round(r.get("whole_round")) for r in results] or [MISSING])])
    lines.append(["torch, triton", *([f"{r['torch']}, {r['triton']}" for r in results] or ["-"])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _operation(row: dict[str, float]) -> str:
    peers = f", the usual way {row['peer_seconds']:.3g} s ({row['ratio']:.1f}x)" if "ratio" in row else ""
    return f"{1000 * row['seconds']:.3g} ms, memory alone {1000 * row['floor_seconds']:.3g} ms{peers}"


def _streamed(part: dict[str, Any], key: str) -> str:
    row = part[key]
    size = f"{part['weights'] / 1e9:.3g} G weights"
    return f"{row['seconds']:.3g} s for {size}, the link alone {row['floor_seconds']:.3g} s"


def _round(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    return (
        f"{found['shape']} on {found['engine']}: {found['tokens_per_second']:.0f} tokens/s, "
        f"{found['other_share']:.1%} not generation"
    )
