"""Where a run stands, running or not: the coordinator's own status, or what the folder's files say.

Called by `cli/status.py` and `progress.py`. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from esnode import admin, folder, history, planfile, rebuild
from protocol import keys
from protocol.counting import SHOWN, nth
from protocol.counting import rounds as counted


def of(path: Path) -> dict[str, Any]:
    """The status object of the run in `path`: keys of `coordinator/picture.py`, fewer when nothing runs."""
    place = folder.open_run(path)
    try:
        return admin.ask(path, "status")
    except admin.NoCoordinator:
        pass
    rounds = planfile.read_plan(place.plan).ops.rounds
    if not rebuild.begun(place.ledger):
        state, reason = _beginning(place)
        run = folder.lock_of(place).run_id.hex() if place.lock.exists() else None
        return {"state": state, "reason": reason, "run": run, "round": 0, "rounds": rounds}
    ledger = rebuild.open_ledger(place.ledger)
    past = history.of_chain(ledger.chain)
    resume = f"continue with {_again(place)}"
    return {
        "state": "ended" if ledger.ended else "not running",
        "reason": "" if ledger.ended else resume,
        "run": ledger.lock.run_id.hex(),
        "task": ledger.lock.task,
        "round": ledger.rounds,
        "rounds": rounds,
        "height": ledger.chain.height,
        "tip": ledger.chain.tip.hex(),
        "rewards": [[row.round, row.mean, row.best, row.worst, row.spread] for row in past.rounds[-SHOWN:]],
        "scores": [
            [score.round, score.mean, score.correct, score.prompts] for score in past.heldout[-SHOWN:]
        ],
        "amendments": [body.words() for body in ledger.chain.amendments],
        "problem": rebuild.damage_of(ledger),
    }


def _beginning(place: folder.RunFolder) -> tuple[str, str]:
    """State and reason of a run without an entry. While somebody has the folder, it is on its way."""
    if place.lock.exists():
        if folder.busy(place):
            return "starting", "the coordinator does not answer yet"
        return "locked, not started", f"start it with {_again(place)}"
    if folder.busy(place):
        return "setting up", "the model is being read and the lock made, then the coordinator starts"
    return "not locked yet", f"start it with {_again(place)}"


def _again(place: folder.RunFolder) -> str:
    """The commands that continue it: `esnode run` lists its nodes at the start, a served run need not."""
    serve, listed = f"`esnode coordinator serve --data {place.path}`", place.coordinator / "roster.json"
    if listed.exists() and not keys.read_roster(listed):
        return serve
    return f"`esnode run --resume --out {place.path}`, or {serve} if its nodes are started apart"


AMENDMENTS = 3  # the newest, that the table shows
DECISIONS = 5  # of the coordinator, that the table shows
FAILING = 3  # members that fail, likewise
WIDE = 120  # columns from which a node is one line
STYLES = {
    "ready": "green",
    "suspect": "yellow",
    "stalled": "yellow",
    "lost": "red",
    "left": "dim",
    "paused": "dim",
    "catching up": "cyan",
    "new": "cyan",
}


def plain(text: object) -> str:
    """Words from elsewhere (names, reasons, devices) without anything that could drive a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def words(status: Mapping[str, Any]) -> Group:
    """The same for a terminal."""
    parts: list[RenderableType] = [_head(status)]
    if status.get("nodes"):
        parts += [Text(), Nodes(status)]
    for rows in ([*_peers(status), *_branches(status)], list(_door(status))):
        if rows:
            table = _grid()
            for name, text in rows:
                table.add_row(Text(plain(name)), Text(plain(text)))
            parts += [Text(), table]
    return Group(*parts)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def _head(status: Mapping[str, Any]) -> Table:
    table = _grid()

    def row(name: str, text: object) -> None:
        table.add_row(Text(plain(name)), Text(plain(text)))

    row("state", ", ".join(word for word in (status["state"], status["reason"]) if word))
    if status["run"]:  # known by its lock
        row("run", status["run"][:16] + (f", term {status['term']}" if "term" in status else ""))
    row("rounds", f"{status['round']} of {status['rounds']} closed")
    for words in status.get("amendments", [])[-AMENDMENTS:]:
        row("amended", words)
    members = status.get("members")
    if members and members["total"]:
        row("members", f"{members['done']} of {members['total']} in, {members['void']} void")
    for what, why in status.get("failing", [])[:FAILING]:
        row("failing", f"{what}: {why}")
    if status.get("rewards"):
        round_, mean, best, *_ = status["rewards"][-1]
        row("reward", f"mean {mean:.4f}, best {best:.4f} in {nth(round_)}")
    if status.get("scores"):
        round_, mean, correct, prompts = status["scores"][-1]
        counts = history.answered(status.get("task", ""), f"{correct} of {prompts}")
        row("held-out", f"{mean:.4f} after {counted(round_)}{counts}")
    if status.get("digest", "") is None:
        row("digest", f"not known yet: {status['proof']['reason']}")
    if status.get("address"):
        row("listens", status["address"])
    if status.get("counters"):
        row("counted", ", ".join(f"{name} {count}" for name, count in status["counters"].items()))
    for refusal in status.get("refusals", []):
        row("refused", refusal)
    for age, words in status.get("decisions", [])[-DECISIONS:]:
        row(f"{age:.0f} s ago", words)
    if status.get("problem"):
        row("problem", status["problem"])
    return table


class Nodes:
    """A line per node: who, how it stands, how fast, what became of its work, what it does and why.

    On a narrow terminal the last two follow in a list of their own, so that they stay whole lines.
    """

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        yield _nodes(self._status, wide)
        if not wide:
            table = _grid()
            for node in self._status["nodes"]:
                words = "; ".join(filter(None, (_work(node), _why(node))))
                table.add_row(Text(plain(node["name"])), Text(plain(words)))
            yield Text()
            yield table


def _nodes(status: Mapping[str, Any], wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("node", "state"):
        table.add_column(name, overflow="fold")
    for name in ("pace", "ok", "late", "refused", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("working on", overflow="fold", ratio=2)
        table.add_column("why", overflow="fold", ratio=2)
    table.add_column("from", overflow="fold")
    for node in status["nodes"]:
        pace = node.get("seconds_per_chunk")
        counts = [str(node.get(name, 0)) for name in ("accepted", "late", "refused", "failed")]
        state = Text(plain(node["state"]), style=STYLES.get(node["state"], ""))
        cells = [
            "-" if pace is None else f"{pace:.3g} s",
            *counts,
            *((_work(node) or "-", _why(node)) if wide else ()),
            status.get("places", {}).get(node.get("key")) or "-",
        ]
        table.add_row(Text(plain(_name(node))), state, *(Text(plain(cell)) for cell in cells))
    return table


def _name(node: Mapping[str, Any]) -> str:
    """The node, and how many units it evaluates at once."""
    lanes = node.get("lanes", 1)
    return f"{node['name']}, {lanes} lanes" if lanes > 1 else str(node["name"])


def _peers(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How nodes reach each other for snapshots and why not directly, who serves and who catches up.

    Nodes of which the same is to be said share a line.
    """
    snapshots = status.get("snapshots", {})
    nodes = {node["name"]: node for node in status.get("nodes", [])}
    told: dict[str, list[str]] = {}
    dialled = any(peer["addresses"] for peer in snapshots.get("peers", {}).values())
    for name, peer in snapshots.get("peers", {}).items():
        node = nodes.get(name, {"state": "", "reason": ""})
        if not node["reason"].startswith("revoked"):
            told.setdefault(_peer(peer, dialled and node["state"] != "left"), []).append(name)
    for line, names in told.items():
        if line and len(names) == 1:
            yield f"peer {names[0]}", line
        elif line:
            yield "peers", f"{', '.join(names)}: {line}"
    for line in snapshots.get("disagreements", []):
        yield "differ", line
    relay = status.get("relay")
    if relay:
        carried = sum(peer["sent"] for peer in relay["peers"].values())
        dropped = sum(sum(peer["dropped"].values()) for peer in relay["peers"].values())
        text = f"{relay['address']}, {relay['connected']} connected, {carried / 1e6:.1f} MB carried"
        yield "relay", text + f", {dropped} frames refused" * bool(dropped)


def _peer(peer: Mapping[str, Any], dialled: bool) -> str:
    """What is to be said of a node as others' peer; how it is reached only where one could be dialled."""
    said = [
        f"reached {peer['reached']}" if dialled else "",
        "snapshots after " + ", ".join(map(str, peer["kept"])) + " rounds" if peer["kept"] else "",
        f"serving {peer['serving']}" if peer["serving"] else "",
        f"no donor: {peer['donor']}" if peer["donor"] != "yes" else "",
        f"catching up by {peer['catching_up']}" if peer["catching_up"] else "",
        *(f"{by} complains: {fault}" for by, fault in peer["faults"].items()),
    ]
    return "; ".join(filter(None, said))


def _branches(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Replicas that differ, ledgers that differ, what a successor left behind."""
    dispute = (status.get("proof") or {}).get("dispute")
    if dispute:
        sides = "; ".join(f"{digest}: {', '.join(names)}" for digest, names in dispute["sides"].items())
        yield "dispute", f"replicas differ after {counted(dispute['rounds'])}: {sides}"
    succession = status.get("succession") or {}
    for name, height in succession.get("other_branches", {}).items():
        yield "other branch", f"{name}, which holds {height} entries"
    for left in succession.get("left_behind", []):
        yield (
            "left behind",
            f"entries {left['first']} to {left['last']} of term {left['term']}, by {left['node']}",
        )


def _door(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the gate refused, by whom and why; keys that knock; invites."""
    wire = status.get("wire", {})
    for peer, reasons in wire.get("refused", {}).items():
        counted = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        yield "turned away", f"{peer}: {counted}"
    for key, count in wire.get("strangers", {}).items():
        yield "unknown key", f"{key} knocked {count} times (let it in: esnode nodes allow)"
    invites = status.get("guests", {}).get("invites", [])
    if invites:
        states = Counter(invite["state"].partition(":")[0] for invite in invites)
        counted = ", ".join(f"{count} {state}" for state, count in states.items())
        yield "invites", f"{counted} (esnode nodes list)"


def _why(node: Mapping[str, Any]) -> str:
    """Why a node stands as it does, what it was given and why, and what was once wrong with it."""
    words = [node["reason"], node.get("why"), node.get("lost"), node.get("fault")]
    return "; ".join(filter(None, words))


def _work(node: Mapping[str, Any]) -> str:
    """The units a node holds: those its lanes evaluate at once, then those that wait."""
    units = [f"{label} {done / 10:.0f}%" if done else label for label, done in node["units"]]
    lanes = node.get("lanes", 1)
    return ", then ".join([" and ".join(units[:lanes]), *units[lanes:]])


def node_words(node: Mapping[str, Any]) -> str:
    """What one node does: "member 3 chunks 0-3 41%", or why it does nothing."""
    doing = _work(node) or node["reason"]
    return plain(doing if node["state"] == "ready" else f"{node['state']}: {node['reason']}")
