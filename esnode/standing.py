"""Where a run stands, running or not: the coordinator's own status, or what the folder's files say.

Called by `cli/run.py`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from esnode import admin, folder, history, rebuild
from protocol import plan


def of(path: Path) -> dict[str, Any]:
    """The status object of the run in `path`: keys of `coordinator/picture.py`, fewer when nothing runs."""
    place = folder.open_run(path)
    try:
        return admin.ask(path, "status")
    except admin.NoCoordinator:
        pass
    rounds = plan.parse(place.plan.read_text(encoding="utf-8")).ops.rounds
    if not place.ledger.exists():
        state = "locked, not started" if place.lock.exists() else "not locked yet"
        run = folder.lock_of(place).run_id.hex() if place.lock.exists() else None
        return {"state": state, "reason": "", "run": run, "round": 0, "rounds": rounds}
    ledger = rebuild.open_ledger(place.ledger)
    past = history.of_chain(ledger.chain)
    resume = f"continue with `esnode run --resume --out {path}`"
    return {
        "state": "ended" if ledger.ended else "not running",
        "reason": "" if ledger.ended else resume,
        "run": ledger.lock.run_id.hex(),
        "round": ledger.rounds,
        "rounds": rounds,
        "height": ledger.chain.height,
        "tip": ledger.chain.tip.hex(),
        "rewards": [[row.round, row.mean, row.best, row.worst, row.spread] for row in past.rounds],
        "scores": [[score.round, score.mean, score.correct, score.prompts] for score in past.heldout],
        "problem": rebuild.damage_of(ledger),
    }


def words(status: Mapping[str, Any]) -> Table:
    """The same for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("state", ", ".join(word for word in (status["state"], status["reason"]) if word))
    table.add_row("run", (status["run"] or "")[:16])
    table.add_row("rounds", f"{status['round']} of {status['rounds']} closed")
    members = status.get("members")
    if members and members["total"]:
        table.add_row("members", f"{members['done']} of {members['total']} in, {members['void']} void")
    if status.get("rewards"):
        round_, mean, best, *_ = status["rewards"][-1]
        table.add_row("reward", f"mean {mean:.4f}, best {best:.4f} in round {round_}")
    if status.get("scores"):
        round_, mean, correct, prompts = status["scores"][-1]
        table.add_row("held-out", f"{mean:.4f} after {round_} rounds, {correct} of {prompts} correct")
    for node in status.get("nodes", []):
        table.add_row(Text(node["name"]), Text(node_words(node)))
    for name, count in status.get("counters", {}).items():
        table.add_row(name, str(count))
    for refusal in status.get("refusals", []):
        table.add_row("refused", Text(refusal))
    if status.get("problem"):
        table.add_row("problem", status["problem"])
    return table


def node_words(node: Mapping[str, Any]) -> str:
    """What one node does: "member 3 chunks 0-3 41%", or why it does nothing."""
    work = [
        f"{label} {thousandths / 10:.0f}%" if thousandths else label for label, thousandths in node["units"]
    ]
    doing = ", then ".join(work) if work else node["reason"]
    return doing if node["state"] == "ready" else f"{node['state']}: {node['reason']}"
