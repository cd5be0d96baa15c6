"""Reports from files alone: history of a ledger, costs of a folder, plots, the live view, TensorBoard."""

from __future__ import annotations

import io
import json
import os
import re
import textwrap
import tracemalloc
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.outputs import UnitLine
from esnode import finish, history, progress, report, run, sketch, standing
from esnode.board import Board, crc32c, record, scalars
from esnode.folder import RunFolder, occupy
from esnode.history import Costs, LedgerTail, Tail
from esnode.progress import Snapshot
from esnode.template import template
from protocol import keys
from protocol.entries import AmendBody, EndBody, MemberReward, ScoreBody
from tests.ledgers import KEY, Writer, small_ledger, small_lock

MEMBERS = 4
RESULTS = Path(__file__).parent.parent / "docs" / "results.md"


class Scribe(Writer):
    """A ledger of a likelihood task whose rewards and scores are given as plain numbers."""

    def __init__(self) -> None:
        fields = {"reward_low": -20.0, "reward_high": 0.0, "train_prompts": 4, "heldout_prompts": 4}
        super().__init__(small_lock(task="likelihood:pairs.jsonl", per_round=4, chunk=1, **fields))
        self.start()

    def round(self, rewards: list[float]) -> None:
        self.add(self.commit(members=tuple(MemberReward(k, reward, 1) for k, reward in enumerate(rewards))))

    def scored(self, value: float, correct: int) -> None:
        self.add(ScoreBody(self.chain.round, 4, value, correct, (4 * value,)))


@pytest.fixture
def scribe() -> Scribe:
    made = Scribe()
    made.scored(-7.5, 0)
    for number in range(6):
        made.round([-7.0 + number + 0.25 * k for k in range(MEMBERS)])
    made.scored(-1.5, 3)
    made.add(EndBody("all rounds are done"))
    return made


def unit_row(**changes: Any) -> dict[str, Any]:
    row = {"time": 10.0, "tokens": 100, "floored": 0, "times": [50, 900, 10], "node": "node-1"}
    return {**row, "bytes": {"Assign": 90, "Result": 100, "Ack": 30}, **changes}


def commit_row(number: int, **changes: Any) -> dict[str, Any]:
    row = {"kind": "commit", "time": 20.0 + number, "round": number, "seconds": 2.0, "update_ms": 20}
    return {**row, "bytes_in": {"Result": 400}, "bytes_out": {"Commit": 200}, **changes}


def text_of(renderable: Any, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


# ---------------------------------------------------------------- history


def test_history_of_a_ledger(scribe: Scribe) -> None:
    past = history.of_chain(scribe.chain)
    assert past.ended
    assert [row.round for row in past.rounds] == list(range(6))
    first = past.rounds[0]
    assert (first.mean, first.best, first.worst, first.members) == (-6.625, -6.25, -7.0, 4)
    assert first.spread == pytest.approx(0.2795, abs=1e-4)
    assert [(score.round, score.mean, score.correct) for score in past.heldout] == [
        (0, -7.5, 0),
        (6, -1.5, 3),
    ]
    assert "nats per token" in past.unit


def test_a_growing_ledger_is_followed_entry_by_entry(scribe: Scribe, tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    tail = LedgerTail(path, scribe.lock)
    assert tail.refresh().rounds == ()
    data = scribe.data
    for cut in range(0, len(data) + 1, 37):
        path.write_bytes(data[:cut])
        tail.refresh()
    path.write_bytes(data)
    assert tail.refresh() == history.of_chain(scribe.chain)


def test_a_growing_jsonl_file_never_gives_half_a_line(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "units.jsonl")
    assert [*tail.new()] == []
    tail.path.write_bytes(b'{"a": 1}\n{"a": ')
    assert [*tail.new()] == [{"a": 1}]
    with tail.path.open("ab") as file:
        file.write(b"2}\n")
    assert [*tail.new()] == [{"a": 2}]
    assert [*tail.new()] == []


def test_a_long_file_is_read_line_by_line(tmp_path: Path) -> None:
    """units.jsonl of 10,000 rounds has 300,000 lines; as objects they were 783 MB."""
    tail = Tail(tmp_path / "units.jsonl")
    tail.path.write_bytes(b"".join(json.dumps(unit_row(member=k)).encode() + b"\n" for k in range(5000)))
    tracemalloc.start()
    last = deque(tail.new(), maxlen=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert last[0]["member"] == 4999 and peak < tail.path.stat().st_size / 4


def test_following_a_long_ledger_costs_what_is_new(tmp_path: Path) -> None:
    taken = []
    for rounds in (50, 800):
        writer = small_ledger(rounds, end=False)
        tail = LedgerTail(tmp_path / "run.ledger", writer.lock)
        tail.path.write_bytes(writer.data)
        tail.refresh()
        writer.add(writer.commit())
        tail.path.write_bytes(writer.data)
        tracemalloc.start()
        assert len(tail.refresh().rounds) == rounds + 1
        taken.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert taken[1] < 1.5 * taken[0]


def test_costs_add_up() -> None:
    costs = Costs()
    costs.add_unit(unit_row())
    costs.add_unit(unit_row(node="node-2", time=14.0, floored=2))
    costs.add_metric(commit_row(0))
    costs.add_metric({"kind": "score", "time": 30.0})
    assert (costs.tokens, costs.floored, costs.unit_bytes) == (200, 2, 440)
    assert costs.update == 40, "two nodes, each of which applied the commit"
    assert sum(costs.shares.values()) == pytest.approx(1.0)
    assert costs.shares["generate"] == pytest.approx(1800 / 1960)
    assert costs.bytes_by_type == {"Result": 400, "Commit": 200}
    assert Costs().shares == {}


# ---------------------------------------------------------------- pictures


def test_the_picture_is_a_png_and_replaces_the_old_one(scribe: Scribe, tmp_path: Path) -> None:
    to = tmp_path / "reward.png"
    to.write_text("old")
    report.picture(history.of_chain(scribe.chain), to)
    assert to.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [path.name for path in tmp_path.iterdir()] == ["reward.png"]


@pytest.mark.parametrize(("ending", "first"), [("PNG", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_of_a_picture_is_its_format(
    scribe: Scribe, tmp_path: Path, ending: str, first: bytes
) -> None:
    to = tmp_path / f"reward.{ending}"
    report.picture(history.of_chain(scribe.chain), to)
    assert to.read_bytes().startswith(first)


def test_the_example_that_compares_runs(
    scribe: Scribe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/results.md, its Python as it stands; its sed changes one line of a plan."""
    lines = RESULTS.read_text().splitlines()
    code = "\n".join(lines[lines.index("    from esnode import history, rebuild") :]).partition(
        "\nThe noise"
    )[0]
    names = re.findall(r'"(runs/[^"]+)"', code)
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.ledger").write_bytes(scribe.data)
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent(code), {})
    assert capsys.readouterr().out.splitlines() == [f"{name} -1.625 [-7.5, -1.5]" for name in names]
    each = "\n".join(lines[lines.index("    from esnode import rebuild") :]).partition("\n## The")[0]
    exec(textwrap.dedent(each).replace("runs/mine", names[0]), {})
    first = capsys.readouterr().out.splitlines()[0]
    assert first == str([(k, -7.0 + 0.25 * k) for k in range(MEMBERS)])
    assert len(re.findall(r"^sigma = .*", template("conciseness"), re.MULTILINE)) == 1


def test_every_field_of_a_units_line_is_explained() -> None:
    named = set(re.findall(r"`(\w+)`", RESULTS.read_text()))
    assert set(UnitLine.__struct_fields__) <= named


def test_a_run_without_rounds_can_be_drawn_too(tmp_path: Path) -> None:
    empty = history.of_chain(Scribe().chain)
    report.picture(empty, tmp_path / "reward.png")
    assert "nothing to plot" in report.sketch(empty).plain
    assert text_of(report.rounds_table(empty))


def test_the_sketch_shows_range_axes_and_legend(scribe: Scribe) -> None:
    shown = report.sketch(history.of_chain(scribe.chain), width=40, height=8).plain
    lines = shown.splitlines()
    assert "-7.50" in shown and "-1.25" in shown
    assert "held-out" in lines[-1] and "mean of the members" in lines[-1]
    assert lines[-2].strip().startswith("0") and lines[-2].strip().endswith("6") and "round" in lines[-2]
    assert all(len(line) <= 40 + 12 for line in lines[1:-1])


def test_one_point_and_a_flat_line_do_not_divide_by_zero() -> None:
    for points in (((3.0, 2.0),), ((0.0, 1.0), (1.0, 1.0))):
        assert sketch.plot([sketch.Series("x", points, "cyan")], "title", "round").plain
    assert sketch.sparkline([1, 1, 1], 8) == "▁▁▁"
    assert sketch.sparkline([], 8) == ""
    assert sketch.sparkline([0, 1, 2, 3], 2) == "▁█"


def test_the_title_tells_runs_of_one_plan_apart() -> None:
    lock = small_lock(seed=3)
    assert history.title_of(lock) == f"{lock.task} on {lock.model}, seed 3"
    assert "seed" not in history.title_of(small_lock())


def test_rounds_table_and_json(scribe: Scribe) -> None:
    past = history.of_chain(scribe.chain)
    shown = text_of(report.rounds_table(past))
    first, *_, last = [line.split() for line in shown.splitlines() if line[:8].strip().isdigit()]
    assert first == ["0", "-7.5000", "0/4"], "the score of the start, before any round"
    assert (last[0], last[-2:]) == ("6", ["-1.5000", "3/4"]), "round 6 leads to the score after 6 rounds"
    assert "-6.6250" in shown
    data = json.loads(json.dumps(report.as_json(past)))
    assert data["rounds"][5]["best"] == -1.25 and data["heldout"][1]["correct"] == 3 and data["ended"]


# ---------------------------------------------------------------- the live view


STATUS: dict[str, Any] = {
    "state": "running",
    "reason": "2 of 4 members are in",
    "run": "ab" * 32,
    "round": 6,
    "rounds": 10,
    "members": {"done": 2, "total": 4, "void": 0},
    "rewards": [[5, -1.6, -1.25, -2.0, 0.2]],
    "scores": [[6, -1.5, 3, 4]],
    "nodes": [
        {
            "name": "node-1",
            "state": "ready",
            "reason": "after 6 rounds",
            "units": [["member 2 chunks 0-3", 410]],
        },
        {"name": "node-2", "state": "behind", "reason": "applies round 5", "units": []},
    ],
    "counters": {"late": 1},
    "refusals": ["node-3: another law"],
}


def snapshot(scribe: Scribe, status: dict[str, Any]) -> Snapshot:
    costs = Costs()
    costs.add_unit(unit_row())
    costs.add_unit(unit_row(time=30.0))
    for number in range(6):
        costs.add_metric(commit_row(number))
    return Snapshot(history.of_chain(scribe.chain), costs, status, 10, 75.0)


def test_the_view_shows_what_a_watcher_wants_to_know(scribe: Scribe) -> None:
    shown = text_of(progress.view(snapshot(scribe, STATUS)))
    for words in (
        "6 of 10, 1:15 gone, 0:08 to go",
        "2 of 4",
        "mean -1.6250, best -1.2500",
        "-1.5000 after 6 rounds ",
        "+6.0000 in 6 rounds",
        "600 B per round",
        "generate 88%",
        "member 2 chunks 0-3 41%",
        "behind: applies round 5",
    ):
        assert words in shown, words


def test_the_view_of_a_run_that_has_not_begun() -> None:
    empty = history.of_chain(Scribe().chain)
    shown = text_of(progress.view(Snapshot(empty, Costs(), {}, 10, 0.0)))
    assert "first round is being measured" in shown and "does not answer yet" in shown
    over = Snapshot(replace(empty, ended=True), Costs(), {}, 10, 0.0)
    assert "training has ended" in text_of(progress.view(over))
    paused = {**STATUS, "state": "paused", "reason": "no node has joined yet", "nodes": []}
    assert "paused: no node has joined yet" in text_of(
        progress.view(Snapshot(empty, Costs(), paused, 10, 0.0))
    )


def test_the_line_of_a_round(scribe: Scribe) -> None:
    now = snapshot(scribe, STATUS)
    past = now.history
    assert progress.score_line(past.heldout[0]) == "held-out -7.5000 after 0 rounds"
    assert progress.score_line(replace(past.heldout[0], round=1)) == "held-out -7.5000 after 1 round"
    line = progress.line(past.rounds[0], now.costs, 10)
    assert line == "round 1/10  reward -6.6250 (best -6.2500)  2.0 s"
    alike = progress.line(replace(past.rounds[0], worst=past.rounds[0].best), now.costs, 10)
    assert "(best -6.2500)  all members alike  2.0 s" in alike, "such a round moves nothing"


def test_a_scorer_that_fails_is_told_while_the_run_lasts(scribe: Scribe) -> None:
    """A whole run at the floor may be one wrong line in the user's scorer."""
    now = snapshot(scribe, STATUS)
    assert "floor" not in text_of(progress.view(now))
    now.costs.add_unit(unit_row(floored=3))
    told = "3 answers got the task's floor: scoring failed, the nodes' logs say why"
    assert told in text_of(progress.view(now))
    assert progress.line(now.history.rounds[0], now.costs, 10).endswith(f"so far {told}")
    assert dict(finish.summary(now.history, now.costs))["scorer"] == told


def test_a_held_out_score_is_printed_when_it_comes_not_with_the_next_round(scribe) -> None:
    """Where no terminal is; with rounds of an hour nobody would know it for so long."""
    made, costs, printed = Scribe(), Costs(), (0, 0)

    def look() -> list[str]:
        nonlocal printed
        console = Console(file=io.StringIO(), width=100)
        now = Snapshot(history.of_chain(made.chain), costs, {}, 10, 0.0)
        printed = run._print_news(now, printed, console)
        return console.file.getvalue().splitlines()  # type: ignore[attr-defined]

    made.scored(-7.5, 0)
    assert look() == ["held-out -7.5000 after 0 rounds"] and look() == []
    made.round([-7.0 + k for k in range(MEMBERS)])
    made.scored(-6.5, 0)
    assert look() == [], "its seconds are not known yet, and what follows it waits"
    costs.add_metric(commit_row(0))
    assert look() == ["round 1/10  reward -5.5000 (best -4.0000)  2.0 s", "held-out -6.5000 after 1 round"]
    assert look() == []


def test_standing_in_words() -> None:
    shown = text_of(standing.words(STATUS))
    assert "2 of 4 in, 0 void" in shown and "another law" in shown and "6 of 10 closed" in shown


def test_the_status_table_says_who_does_what_and_why() -> None:
    node = {
        "name": "gpu\x1b[2J-7",
        "key": "aa",
        "state": "ready",
        "reason": "after 6 rounds",
        "units": [["member 2 chunks 0-3", 410]],
        "seconds_per_chunk": 2.345,
        "accepted": 17,
        "late": 3,
        "refused": 2,
        "failed": 1,
    }
    status = {
        **STATUS,
        "nodes": [node, {**node, "name": "n2", "key": "bb", "state": "left", "reason": "revoked: \x07sold"}],
        "places": {"aa": "192.0.2.9"},
        "decisions": [[9.0, "n2 lost its lease"], [2.0, "member 3 goes\x1b[2J to n1"]],
        "snapshots": {
            "peers": {
                "n3": {
                    "addresses": ["tcp://192.0.2.9:1"],
                    "reached": "direct by 1",
                    "kept": [4, 6],
                    "serving": 0,
                    "donor": "yes",
                    "catching_up": "",
                    "faults": {"n1": "a wrong part"},
                }
            }
        },
        "failing": [["member 3", "1 failure, 3 make it void; the last: out of \x07memory"]],
        "digest": None,
        "proof": {
            "reason": "n2 not yet",
            "dispute": {"rounds": 5, "sides": {"aa": ["n1"], "bb": ["n2", "n3"]}},
        },
        "wire": {"refused": {"unknown": {"not encrypted": 4}}, "strangers": {"4f1c": 2}},
        "guests": {"invites": [{"state": "open"}, {"state": "withdrawn: lost"}, {"state": "open"}]},
    }
    shown = text_of(standing.words(status), width=160)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "gpu?[2J-7 ready 2.35 s 17 3 2 1 member 2 chunks 0-3 41% after 6 rounds 192.0.2.9" in lines
    for words in (
        "reached direct by 1; snapshots after 4, 6 rounds; n1 complains: a wrong part",
        "member 3: 1 failure, 3 make it void; the last: out of ?memory",
        "not known yet: n2 not yet",
        "replicas differ after 5 rounds: aa: n1; bb: n2, n3",
        "member 3 goes?[2J to n1",
        "revoked: ?sold",
        "unknown: not encrypted 4",
        "4f1c knocked 2 times",
        "2 open, 1 withdrawn",
    ):
        assert words in shown, words
    assert "\x1b" not in shown and "\x07" not in shown


def test_a_node_stays_readable_on_80_columns() -> None:
    node = {
        "name": "gpu-1",
        "key": "aa",
        "state": "catching up",
        "reason": "after 3 rounds",
        "why": "a member",
        "units": [["member 4 chunks 0-1", 0], ["member 5 chunk 1", 0]],
        "seconds_per_chunk": 0.593,
    }
    places = {"aa": "192.0.2.117"}
    shown = text_of(standing.words({**STATUS, "nodes": [node], "places": places}), width=80)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "gpu-1 catching up 0.593 s 0 0 0 0 192.0.2.117" in lines
    assert "gpu-1 member 4 chunks 0-1, then member 5 chunk 1; after 3 rounds; a member" in lines


def test_what_several_lanes_evaluate_at_once_is_told_from_what_waits() -> None:
    units = [["member 4 chunk 0", 0], ["member 5 chunk 0", 410], ["member 6 chunk 0", 0]]
    node = {"name": "n", "state": "ready", "reason": "", "units": units, "lanes": 2}
    assert standing.node_words(node) == "member 4 chunk 0 and member 5 chunk 0 41%, then member 6 chunk 0"


def reaches(**reached: str) -> dict[str, Any]:
    """Peers that hold a snapshot, and how each is reached."""
    peer = {
        "addresses": ["tcp://192.0.2.9:1"],
        "kept": [4],
        "serving": 0,
        "donor": "yes",
        "catching_up": "",
        "faults": {},
    }
    return {"peers": {name: {**peer, "reached": words} for name, words in reached.items()}}


def test_a_revoked_peer_is_not_shown_and_one_that_has_left_is_not_reached() -> None:
    peers = reaches(left="direct by 1", gone="direct by 1")
    node = {"key": "aa", "units": [], "seconds_per_chunk": None, "state": "left"}
    standings = {"left": "after 3 rounds", "gone": "revoked: sold"}
    nodes = [{**node, "name": name, "reason": reason} for name, reason in standings.items()]
    shown = text_of(standing.words({**STATUS, "nodes": nodes, "snapshots": peers}))
    assert "peer left  snapshots after 4 rounds" in shown and "gone  snap" not in shown
    assert "reached" not in shown


def test_where_no_node_serves_nobody_is_called_unreachable() -> None:
    """As in every `esnode run`, whose nodes share the coordinator's folder."""
    peers = reaches(**{"node-1": "not at all (it serves nobody)"})
    peers["peers"]["node-1"]["addresses"] = []
    shown = text_of(standing.words({**STATUS, "snapshots": peers}))
    assert "peer node-1  snapshots after 4 rounds" in shown


@pytest.mark.parametrize("width", [80, 120])
def test_every_peer_is_shown_with_how_it_is_reached_and_why_not(width: int) -> None:
    """Nodes of which the same is said share a line."""
    untried, nobody = "by nobody yet (not tried)", "not at all (it serves nobody)"
    peers = reaches(**{"node-1": untried, "n2": nobody, "node-2": untried, "n3": "relay by 1 (timed out)"})
    shown = " ".join(text_of(standing.words({**STATUS, "snapshots": peers}), width).split())
    assert shown.endswith(
        f"peers node-1, node-2: reached {untried}; snapshots after 4 rounds "
        f"peer n2 reached {nobody}; snapshots after 4 rounds "
        "peer n3 reached relay by 1 (timed out); snapshots after 4 rounds"
    )


@pytest.mark.parametrize(
    ("roster", "alone"),
    [(None, True), ({}, False), ({KEY: "a"}, True)],
)
def test_how_a_stopped_run_goes_on(tmp_path: Path, roster: dict[bytes, str] | None, alone: bool) -> None:
    """A run that was served is served again; one whose nodes are listed may have been either."""
    place = RunFolder(tmp_path)
    place.coordinator.mkdir()
    if roster is not None:
        keys.write_roster(place.coordinator / "roster.json", roster)
    assert f"`esnode coordinator serve --data {tmp_path}`" in standing._again(place)
    assert (f"`esnode run --resume --out {tmp_path}`" in standing._again(place)) == alone


def test_where_a_run_stands_while_its_lock_is_made(tmp_path: Path) -> None:
    place = RunFolder(tmp_path)
    place.plan.write_text(template())
    assert standing.of(tmp_path)["state"] == "not locked yet"
    assert f"esnode run --resume --out {tmp_path}" in standing.of(tmp_path)["reason"]
    descriptor = occupy(place)
    try:
        shown = text_of(standing.words(standing.of(tmp_path)))
        assert "setting up, the model is being read" in shown and "run " not in shown
        place.lock.write_bytes(small_lock().to_bytes())
        assert standing.of(tmp_path)["state"] == "starting"
    finally:
        os.close(descriptor)
    assert standing.of(tmp_path)["state"] == "locked, not started"


def test_amendments_are_shown() -> None:
    made = Scribe()
    made.add(AmendBody(6, alpha=0.0005, trusted=(bytes(32),)))
    said = "alpha 0.0005, trusted keys 0000000000000000 from round 7 on"
    assert history.of_chain(made.chain).amended == (said,)
    assert report.as_json(history.of_chain(made.chain))["amended"] == [said]
    words = ["alpha 0.0005 from round 6 on", "members 8 from round 9 on (not in the ledger yet)"]
    lines = [
        " ".join(line.split())
        for line in text_of(standing.words({**STATUS, "amendments": words})).splitlines()
    ]
    assert [f"amended {line}" for line in words] == [line for line in lines if "amended" in line]


def test_status_says_what_was_decided_last_and_why_a_node_has_its_work() -> None:
    nodes = [{**STATUS["nodes"][0], "why": "its slice of every member"}, *STATUS["nodes"][1:]]
    decisions = [[9.0 - k, f"lease: a duplicate member {k} (b seems to need 7 s more)"] for k in range(9)]
    shown = text_of(standing.words({**STATUS, "nodes": nodes, "decisions": decisions}), width=200)
    assert "its slice of every member" in shown
    assert "1 s ago" in shown and "duplicate member 8" in shown and "member 3 (b" not in shown


def test_sizes_and_clocks() -> None:
    assert [progress.size(count) for count in (0, 812, 1234, 3_400_000, 2e9)] == [
        "0 B",
        "812 B",
        "1.2 KB",
        "3.4 MB",
        "2.0 GB",
    ]
    assert [progress.clock(seconds) for seconds in (5, 75.9, 3700)] == ["0:05", "1:15", "1:01:40"]


# ---------------------------------------------------------------- a finished folder


def test_summary_of_a_finished_folder(scribe: Scribe, tmp_path: Path) -> None:
    place = RunFolder(tmp_path)
    place.units.write_text("".join(json.dumps(unit_row(time=float(k))) + "\n" for k in range(24)))
    place.metrics.write_text("".join(json.dumps(commit_row(k)) + "\n" for k in range(6)) + '{"cut')
    rows = dict(finish.summary(history.of_chain(scribe.chain), history.costs_of(place)))
    assert rows["rounds"] == "6, with 4 members each"
    assert rows["held-out"].startswith("-7.5000 to -1.5000") and "correct" not in rows["held-out"]
    assert rows["traffic"] == "3.6 KB in all, 220 B for a unit; no weights"
    assert "generate" in rows["shares"] and rows["time"].startswith("0:12")


def test_a_likelihood_is_not_said_to_be_correct(scribe: Scribe) -> None:
    """Nothing is answered there, so that "0 of 32 correct" would read like a failure."""
    past = history.of_chain(scribe.chain)
    assert "correct" not in dict(finish.summary(past, Costs()))["held-out"]
    other = replace(past, lock=replace(past.lock, task="countdown"))
    assert dict(finish.summary(other, Costs()))["held-out"].endswith(", 0 to 3 of 4 correct")
    status = {**STATUS, "scores": [[6, 0.5, 3, 4]]}
    assert "3 of 4 correct" in text_of(standing.words({**status, "task": "countdown"}))
    assert "correct" not in text_of(standing.words({**status, "task": "short-answers"}))


def test_a_ledger_alone_has_a_summary(scribe: Scribe) -> None:
    rows = dict(finish.summary(history.of_chain(scribe.chain), Costs()))
    assert "held-out" in rows and "traffic" not in rows


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def events(path: Path) -> list[Any]:
    """Read an event file with TensorFlow's own message definitions, checksums compared."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        whole = data[at : at + 16 + length]
        assert record(whole[12:-4]) == whole
        found.append(Event.FromString(whole[12:-4]))
        at += len(whole)
    return found


def test_tensorboard_holds_every_round_once(scribe: Scribe, tmp_path: Path) -> None:
    past = history.of_chain(scribe.chain)
    place = RunFolder(tmp_path)
    for _resumed in range(2):
        board = Board(place)
        board.update(history.History(past.lock, past.rounds[:2], past.heldout[:1], False), {0: 5.0, 1: 6.0})
        board.update(past, {2: 7.0})
        board.update(past, {})
        board.close()
    files = list(place.tensorboard.iterdir())
    assert len(files) == 1 and ".tfevents." in files[0].name
    version, *rest = events(files[0])
    assert version.file_version == "brain.Event:2"
    seen = [
        (value.tag, event.step, value.simple_value, event.wall_time)
        for event in rest
        for value in event.summary.value
    ]
    means = [(step, value) for tag, step, value, _ in seen if tag == "reward/mean"]
    assert means == [(k, pytest.approx(-6.625 + k)) for k in range(6)]
    assert [(step, value) for tag, step, value, _ in seen if tag == "heldout/mean"] == [(0, -7.5), (6, -1.5)]
    assert [moment for tag, _, _, moment in seen if tag == "reward/best"][:3] == [5.0, 6.0, 7.0]


def test_large_steps_and_long_names_are_encoded(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(record(scalars({"x" * 300: 0.5}, 1_000_000, 2.0)))
    (event,) = events(path)
    assert (event.step, event.summary.value[0].tag, event.summary.value[0].simple_value) == (
        10**6,
        "x" * 300,
        0.5,
    )


def test_a_step_that_lasts_has_a_line_every_few_seconds_where_there_is_no_terminal() -> None:
    said, now = io.StringIO(), [0.0]
    with progress.bars(Console(file=said, width=80), lines=False, clock=lambda: now[0]) as tell:
        for done in range(11):
            tell("replaying", done, 10)
            now[0] += 1.5
    assert said.getvalue().splitlines() == [
        "replaying: 30%, about 0:10 to go",
        "replaying: 60%, about 0:06 to go",
        "replaying: 90%",
    ]
