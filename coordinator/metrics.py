"""The status of a run in Prometheus' text format (version 0.0.4).

Pure: `render` turns what `machine.status` and the gate's counters say into text, nothing else. Served by
`scrape.py`. Nodes are counted by standing and never named: names and keys are labels without bound, and
`esnode status` shows them. Counters begin at 0 with each start of the coordinator, as Prometheus expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.membership import BEHIND, LEFT, LOST, NEW, PAUSED, READY, STALLED, SUSPECT

# Always present: where there is none, 0 is shown and not a gap.
STANDINGS = (READY, SUSPECT, LOST, NEW, BEHIND, STALLED, PAUSED, LEFT)
VERDICTS = ("accepted", "late", "refused", "failed")
Sample = tuple[Mapping[str, str], float]


def render(status: Mapping[str, Any]) -> str:
    """All metrics of a status that also has the server's "wire", "uptime" and "closed" (rounds, seconds)."""
    members, wire, nodes = status["members"], status["wire"], status["nodes"]
    closed, seconds = status["closed"]
    lines: list[str] = []

    def tell(name: str, kind: str, text: str, samples: Iterable[Sample]) -> None:
        lines.append(f"# HELP esnode_{name} {text}")
        lines.append(f"# TYPE esnode_{name} {kind}")
        lines.extend(f"esnode_{name}{_labels(labels)} {_number(value)}" for labels, value in samples)

    def one(name: str, text: str, value: float) -> None:
        tell(name, "gauge", text, [({}, value)])

    tell("info", "gauge", "Which run this is.", [({"run": status["run"][:16], "state": status["state"]}, 1)])
    one("uptime_seconds", "Since this coordinator started.", status["uptime"])
    one("term", "Starts of a coordinator on this run.", status["term"])
    one("round", "Rounds committed.", status["round"])
    one("rounds", "Rounds the plan asks for.", status["rounds"])
    one("height", "Entries of the ledger.", status["height"])
    one("members_in", "Members of the open round that are settled.", members["done"])
    one("members", "Members of the open round.", members["total"])
    one("members_void", "Members of the open round given up after failures.", members["void"])
    standings = Counter(dict.fromkeys(STANDINGS, 0))
    standings.update(node["state"] for node in nodes)
    tell("nodes", "gauge", "Nodes by standing.", _by("standing", standings))
    leases = sum(len(node["units"]) for node in nodes)
    one("units_out", "Units that nodes hold now.", leases)
    results = {verdict: sum(node[verdict] for node in nodes) for verdict in VERDICTS}
    tell("results_total", "counter", "Results by what became of them.", _by("verdict", results))
    if status["reward"]:
        one("reward_mean", "Mean reward of the last committed round.", status["reward"]["mean"])
    lines += [
        "# HELP esnode_round_seconds Seconds from opening to commit of the rounds since the start.",
        "# TYPE esnode_round_seconds summary",
        f"esnode_round_seconds_sum {_number(seconds)}",
        f"esnode_round_seconds_count {_number(closed)}",
    ]
    tell("wire_bytes_total", "counter", "Bytes on the TCP stream by direction and message.", _bytes(wire))
    tell("dropped_total", "counter", "Messages that found a full queue.", _by("message", wire["dropped"]))
    refused: Counter[str] = Counter()
    for reasons in wire["refused"].values():
        refused.update(reasons)
    tell("refused_total", "counter", "Connections and frames refused by reason.", _by("reason", refused))
    return "\n".join(lines) + "\n"


def _by(label: str, counts: Mapping[str, float]) -> list[Sample]:
    return [({label: key}, value) for key, value in sorted(counts.items())]


def _bytes(wire: Mapping[str, Any]) -> list[Sample]:
    return [
        ({"direction": direction, "message": kind}, count)
        for direction in ("in", "out")
        for kind, count in sorted(wire["bytes"][direction].items())
    ]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)
