"""`esnode bench node`: shares that add up, a timeline that Perfetto reads; GPU results for the docs."""

from __future__ import annotations

import json
import re
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
    assert {event["ph"] for event in events} == {"M", "X"}


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
