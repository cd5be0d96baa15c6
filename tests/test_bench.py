"""`esnode bench node`: shares that add up, a timeline that Perfetto reads; GPU results for the docs."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import gpu_docs, gpu_round
from esnode.bench import Timeline, round_seconds
from esnode.cli.main import cli
from tests import tiny
from tests.test_workshop import PLAN


def test_shares_and_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    plan, trace = tmp_path / "plan.toml", tmp_path / "trace.json"
    plan.write_text(PLAN.format(model=tiny.write(tmp_path / "model")))
    words = ["bench", "node", "--plan", str(plan), "--members", "3", "--threads", "1", "--trace", str(trace)]
    done = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    shares = json.loads(done.output)["round"]
    parts = [shares[name] for name in ("check", "perturb", "engine", "score", "update")]
    assert sum(parts) == pytest.approx(shares["total"], abs=1e-3)
    assert 0 < shares["other_share"] < 1
    events = json.loads(trace.read_text())["traceEvents"]
    done_in_order = [event["name"] for event in events if event["ph"] == "X"]
    assert done_in_order.count("perturb") == 3 and done_in_order[-1] == "apply"
    assert {event["ph"] for event in events} == {"M", "X"} and not faults(trace.read_text())


def faults(text: str) -> list[str]:
    """What the Trace Event Format does not allow in a trace of complete events and metadata.

    Rules: a "traceEvents" list of objects; name, ph, pid and tid in each; an M event names a process or a
    thread by args.name; an X event has ts and dur in microseconds, not negative; those of one thread lie
    inside one another or apart; every thread has a name.
    """
    trace, found = json.loads(text), []
    events = trace["traceEvents"]
    named, open_ends = set(), {}  # type: ignore[var-annotated]
    for event in events:
        if not (isinstance(event.get("name"), str) and event["name"] and event.get("ph") in ("M", "X")):
            found.append(f"neither metadata nor a complete event: {event}")
        if not all(type(event.get(key)) is int for key in ("pid", "tid")):
            found.append(f"pid and tid are no integers: {event}")
        if event["ph"] == "M":
            kinds = ("process_name", "thread_name")
            if event["name"] not in kinds or not isinstance(event.get("args", {}).get("name"), str):
                found.append(f"metadata that names nothing: {event}")
            named |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
    spans = [event for event in events if event["ph"] == "X"]
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        if not all(type(event.get(key)) in (int, float) and event[key] >= 0 for key in ("ts", "dur")):
            found.append(f"ts or dur is no time: {event}")
        thread = (event["pid"], event["tid"])
        ends = open_ends.setdefault(thread, [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if ends and event["ts"] + event["dur"] > ends[-1]:
            found.append(f"overlaps what began before it: {event}")
        ends.append(event["ts"] + event["dur"])
        if thread not in named:
            found.append(f"a thread without a name: {event}")
    return found


def test_the_timeline_is_a_trace_by_the_rules_of_its_format() -> None:
    timeline = Timeline()
    edges = [0.1 + k / 3e6 for k in range(40)]  # spans that touch within a microsecond
    timeline.spans += [("engine", "generate", a, b) for a, b in pairwise(edges)]
    timeline.spans += [("scoring process", "judge", edges[3], edges[30])]
    assert not faults(timeline.as_trace()) and not faults(Timeline().as_trace())
    assert json.loads(timeline.as_trace())["displayTimeUnit"] in ("ms", "ns")
    wrong = json.loads(timeline.as_trace())
    wrong["traceEvents"].append({**wrong["traceEvents"][-1], "ts": 4, "dur": 99})
    assert "overlaps" in faults(json.dumps(wrong))[0]


SLEEPY = """
import time
def items(): return [{"prompt": str(n)} for n in range(8)], [{"prompt": "h"}]
def score(item, text):
    time.sleep(0.05)
    return len(text) % 7 / 7
"""


def test_scoring_lies_beside_the_next_member_in_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    plan, trace = tmp_path / "plan.toml", tmp_path / "trace.json"
    written = PLAN.format(model=tiny.write(tmp_path / "model"))
    plan.write_text(re.sub(r'task = "[^"]*"', 'task = "python:sleepy.py"', written))
    words = ["bench", "node", "--plan", str(plan), "--members", "3", "--threads", "1", "--trace", str(trace)]
    done = CliRunner().invoke(cli, [*words, "--code", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0 and "beside the engine's work" in done.output
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    judged = [event for event in spans if event["name"] == "judge"]
    perturbed = [event for event in spans if event["name"] == "perturb"]
    assert len(judged) == len(perturbed) == 3
    for scores, following in zip(judged, perturbed[1:], strict=False):
        assert following["ts"] < scores["ts"] + scores["dur"], "the next member waited for scores"


def test_what_a_round_takes_beside_its_scoring() -> None:
    assert round_seconds([(2.0, 0.0)] * 4) == 8
    assert round_seconds([(2.0, 1.0)] * 4) == 9  # only the last unit's scores are waited for
    assert round_seconds([(1.0, 3.0)] * 4) == 13  # the scorer is what takes long
    assert round_seconds([(1.0, 5.0), (1.0, 0.0), (1.0, 0.0)]) == 7  # no third unit before a result


def test_a_timeline_keeps_what_failed() -> None:
    timeline = Timeline()

    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        timeline.timed("engine", "generate", fails)()
    (event,) = [e for e in json.loads(timeline.as_trace())["traceEvents"] if e["ph"] == "X"]
    assert (event["name"], event["ts"]) == ("generate", 0) and event["dur"] >= 0


def result(**changes: object) -> dict[str, object]:
    row = {"seconds": 0.0071, "floor_seconds": 0.0058, "peer_seconds": 0.05, "ratio": 7.0}
    part = {"weights": 10**9, "perturb": row, "update": row}
    found = dict.fromkeys(("perturb", "restore", "update", "digest"), row)
    return {
        "device": "a card", "weights": 7e9, "members": 30, "torch": "2", "triton": "3", "streamed": part,
        **found, **changes,
    }  # fmt: skip


def test_gpu_results_replace_the_table_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(gpu_docs.PAGE.read_text())
    gpu_docs.write([result(), result(device="another")], page)
    text = page.read_text()
    assert "| a card, 7 G weights, N=30 | another, 7 G weights, N=30 |" in text
    assert "7.1 ms, memory alone 5.8 ms, the usual way 0.05 s (7.0x)" in text
    assert gpu_docs.MISSING not in text.partition(gpu_docs.FROM)[2].partition(gpu_docs.TO)[0]
    gpu_docs.write([], page)
    assert page.read_text() == gpu_docs.PAGE.read_text()


def test_a_whole_round_is_measured_with_its_shares() -> None:
    found = gpu_round.measure("cpu", "tiny")
    assert set(found["seconds"]) == {"perturb", "damage", "generate", "apply"}
    assert 0 < found["other_share"] < 1 and found["tokens_per_second"] > 0
    assert "is not generation" in gpu_round.words(found)
