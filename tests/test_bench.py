"""`esnode bench node`: shares that add up, and a timeline in the format that Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from esnode.bench import Timeline
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
    parts = [shares[name] for name in ("perturb", "engine", "score", "update")]
    assert sum(parts) == pytest.approx(shares["total"], abs=1e-3)
    assert 0 < shares["other_share"] < 1
    events = json.loads(trace.read_text())["traceEvents"]
    done_in_order = [event["name"] for event in events if event["ph"] == "X"]
    assert done_in_order.count("perturb") == 3 and done_in_order[-1] == "apply"
    assert {event["ph"] for event in events} == {"M", "X"}


def test_a_timeline_keeps_what_failed() -> None:
    timeline = Timeline()

    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        timeline.timed("engine", "generate", fails)()
    (event,) = [e for e in json.loads(timeline.as_trace())["traceEvents"] if e["ph"] == "X"]
    assert (event["name"], event["ts"]) == ("generate", 0) and event["dur"] >= 0
