"""Puts results of `gpu.py` into docs/benchmarks.md, between two marks. Called by `gpu.py --docs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_round import ENGINES, MEASURED

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
FROM, TO = "<!-- gpu results -->\n", "<!-- end of gpu results -->\n"
MISSING, NONE = "has not run on hardware yet", "not measured"
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
        lines.append([label, *([_operation(r.get(key, {})) for r in results] or [MISSING])])
    for key in ("perturb", "update"):
        label = f"{key}, master in host memory"
        lines.append([label, *([_streamed(r.get("streamed", {}), key) for r in results] or [MISSING])])
    for shape, engine in ((shape, engine) for engine in ENGINES for shape in MEASURED):
        label = f"a whole round of the {shape} shape, {engine}"
        lines.append([label, *([_round(r, shape, engine) for r in results] or [MISSING])])
    lines.append(["tests on the GPU", *([_tests(r.get("tests")) for r in results] or [MISSING])])
    lines.append(["torch, triton", *([f"{r['torch']}, {r['triton']}" for r in results] or ["-"])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _operation(row: dict[str, Any]) -> str:
    if "seconds" not in row:
        return str(row.get("failed", NONE))
    peers = f", the usual way {row['peer_seconds']:.3g} s ({row['ratio']:.1f}x)" if "ratio" in row else ""
    issue = row.get("instruction_floor_seconds")
    floors = f"memory alone {1000 * row['floor_seconds']:.3g} ms"
    floors += f", instructions alone {1000 * issue:.3g} ms" if issue is not None else ""
    return f"{1000 * row['seconds']:.3g} ms, {floors}{peers}"


def _streamed(part: dict[str, Any], key: str) -> str:
    if key not in part:
        return str(part.get("failed", NONE))
    row, size = part[key], f"{part['weights'] / 1e9:.3g} G weights"
    return f"{row['seconds']:.3g} s for {size}, the link alone {row['floor_seconds']:.3g} s"


def _round(result: dict[str, Any], shape: str, engine: str) -> str:
    rows = result.get("whole_rounds", [])
    row = next((row for row in rows if (row["shape"], row["engine"]) == (shape, engine)), {})
    if "seconds" not in row:
        return str(row.get("failed", NONE))
    return f"{row['tokens_per_second']:.0f} tokens/s, {row['other_share']:.1%} not generation"


def _tests(found: dict[str, Any] | None) -> str:
    if found is None:
        return NONE
    ended = ", not finished" if "ended" in found else ""
    return "{passed} passed, {failed} failed, {skipped} skipped".format(**found) + ended
