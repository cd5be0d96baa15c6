"""The scoring process: whatever a scorer does, one answer pays and the caller goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esnode import tasks
from esnode.engines.interface import Cancelled
from esnode.scoring import Scorer, ScorerError, Verdict
from esnode.tasks import Score
from tests import kinship
from tests.runs import alive

LIMIT = 0.5
# What each answer's text makes the scorer do; "fine" and "wrong" are ordinary.
NAUGHTY = """
import ctypes, os, re, subprocess, sys, time
from esnode.tasks import Score
LOW, HIGH = -1.0, 1.0
def items():
    return [{"prompt": str(n)} for n in range(8)], [{"prompt": "h"}]
def score(item, text):
    print("noise on stdout, which carries the answers", flush=True)
    if text == "fine": return 1.0
    if text == "wrong": return (0.25, False)
    if text == "raise": raise KeyError("oops")
    if text == "exit": sys.exit(3)
    if text == "die": os._exit(4)
    if text == "segfault": ctypes.string_at(0)
    if text == "sleep": time.sleep(60)
    if text == "spin":
        while True: pass
    if text == "native": return float(bool(re.match("(a+)+$", "a" * 60 + "b")))  # it keeps the GIL
    if text == "nan": return float("nan")
    if text == "inf": return float("inf")
    if text == "high": return 1.5
    if text == "text": return "1.0"
    if text == "none": return None
    if text == "lines": raise ValueError("oh\\n2026-01-01 00:00:00,000 INFO    \\x1b[2Jno")
    if text == "hog": return float(len(bytearray(1 << 34)))
    if text == "deep": return score_deeper(0)
    if text == "long": raise ValueError("x" * 10_000)
    if text == "child":
        child = subprocess.Popen(["sleep", "600"])
        open(item["pid"], "w").write(str(child.pid)) if "pid" in item else None
        time.sleep(60)
    return 0.0
def score_deeper(n):
    return score_deeper(n + 1)
"""
REASONS = {
    "raise": "raised KeyError: 'oops'",
    "exit": "raised SystemExit: 3",
    "die": "ended its process with exit code 4",
    "segfault": "crashed (SIGSEGV)",
    "sleep": "ran over its time limit of 0.5 s",
    "spin": "ran over its time limit of 0.5 s",
    "nan": "the reward is nan, outside the declared -1 to 1",
    "inf": "the reward is inf, outside the declared -1 to 1",
    "high": "the reward is 1.5, outside the declared -1 to 1",
    "text": "the reward is '1.0', not a number",
    "none": "the reward is None, not a number",
    "lines": "raised ValueError: oh 2026-01-01 00:00:00,000 INFO ?[2Jno",
    "hog": "raised MemoryError",
    "deep": "raised RecursionError",
}


def made(folder: Path, source: str, **options: Any) -> Scorer:
    (folder / "task.py").write_text(source)
    data = tasks.materialise("python:task.py", {"time_limit": LIMIT, **options}, code=folder)
    return Scorer("python:task.py", tasks.header(data)[1], data, code=folder)


@pytest.fixture
def naughty(tmp_path: Path) -> Iterator[Scorer]:
    with made(tmp_path, NAUGHTY) as scorer:
        yield scorer


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not alive(pid):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("deed", REASONS)
def test_one_bad_answer_costs_only_itself(naughty: Scorer, deed: str) -> None:
    scores = naughty.score_batch("train", [0, 1, 2], ["fine", deed, "wrong"])
    assert scores == [Score(1.0, True), Score(-1.0, False), Score(0.25, False)]
    (reason,) = naughty.failures.elements()
    assert reason.startswith(REASONS[deed])
    assert naughty.score_batch("heldout", [0], ["fine"]) == [Score(1.0, True)]
    assert naughty.failures.total() == 1


def test_every_answer_may_be_bad(naughty: Scorer) -> None:
    deeds = ["die", "sleep", "raise", "segfault", "nan", "die"]
    assert naughty.score_batch("train", range(6), deeds) == [Score(-1.0, False)] * 6
    assert naughty.failures.total() == 6 and naughty.failures["ended its process with exit code 4"] == 2


def test_reasons_are_short(naughty: Scorer) -> None:
    naughty.score_batch("train", [0], ["long"])
    (reason,) = naughty.failures
    assert len(reason) <= 200


def test_a_worker_that_died_while_idle_is_nobodys_fault(naughty: Scorer) -> None:
    naughty.score_batch("train", [0], ["fine"])
    naughty._child._process.kill()  # type: ignore[union-attr]
    naughty._child._process.wait()  # type: ignore[union-attr]
    assert naughty.score_batch("train", [0], ["fine"]) == [Score(1.0, True)]
    assert not naughty.failures


def test_cancelling_does_not_wait_for_the_limit(tmp_path: Path) -> None:
    with made(tmp_path, NAUGHTY, time_limit=60) as scorer:
        scorer.score_batch("train", [0], ["fine"])
        began = time.monotonic()
        with pytest.raises(Cancelled):
            scorer.score_batch(
                "train", [0, 1], ["sleep", "fine"], stop=lambda: time.monotonic() > began + 0.2
            )
        assert time.monotonic() - began < 2
        assert scorer.score_batch("train", [0], ["fine"]) == [Score(1.0, True)] and not scorer.failures


def test_killing_takes_the_scorers_own_children_along(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    source = NAUGHTY.replace('{"prompt": "h"}', f'{{"prompt": "h", "pid": {str(pid)!r}}}')
    with made(tmp_path, source) as scorer:
        scorer.score_batch("heldout", [0], ["child"])
    assert gone_within(int(pid.read_text()), 2)


def test_close_leaves_no_process(naughty: Scorer) -> None:
    naughty.score_batch("train", [0], ["fine"])
    pid = naughty._child._process.pid  # type: ignore[union-attr]
    naughty.close()
    assert not alive(pid)
    naughty.close()


@pytest.mark.parametrize("deed", ["sleep", "spin", "native", "child"])
def test_no_orphan_when_the_parent_is_killed(tmp_path: Path, deed: str) -> None:
    """The child ends even in the middle of an answer, whatever holds it there, and with what it started."""
    (tmp_path / "task.py").write_text(NAUGHTY)
    program = f"""
import sys, threading, time
from pathlib import Path
from esnode import tasks
from esnode.scoring import Scorer
folder = Path({str(tmp_path)!r})
data = tasks.materialise("python:task.py", {{"time_limit": 600}}, code=folder)
scorer = Scorer("python:task.py", tasks.header(data)[1], data, code=folder)
scorer.score_batch("train", [0], ["fine"])
print(scorer._child._process.pid, flush=True)
scorer.score_batch("train", [0], [{deed!r}])
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    group = kinship.group(child)
    assert child in group and (len(group) > 1) == (deed == "child")
    parent.kill()
    parent.wait()
    assert all(gone_within(pid, 5) for pid in group)


def test_the_worker_sees_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    source = (
        "import os, sys\n"
        "def items(): return [{'prompt': 'a'}], [{'prompt': 'b'}]\n"
        "def score(item, text): return float('A_TOKEN' not in os.environ and 'torch' not in sys.modules)\n"
    )
    with made(tmp_path, source) as scorer:
        assert scorer.score_batch("train", [0], ["x"]) == [Score(1.0, True)]


def test_a_scorer_that_cannot_start_says_why(tmp_path: Path) -> None:
    scorer = made(tmp_path, NAUGHTY)
    (tmp_path / "task.py").write_text("changed = True\n")
    with scorer, pytest.raises(ScorerError, match="not the code this plan pins"):
        scorer.score_batch("train", [0], ["fine"])


def test_catastrophic_backtracking_meets_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": r"^(a+)+$"}) + "\n" for n in range(4)))
    data = tasks.materialise(f"file:{path}", {"scoring": "regex", "time_limit": LIMIT})
    with Scorer(f"file:{path}", tasks.header(data)[1], data) as scorer:
        began = time.monotonic()
        scores = scorer.score_batch("train", [0, 1, 2], ["aaa", "a" * 40 + "b", "aa"])
        assert scores == [Score(1.0, True), Score(0.0, False), Score(1.0, True)]
        assert time.monotonic() - began < 5 and scorer.failures.total() == 1


def test_a_batch_that_fails_is_tried_answer_by_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = NAUGHTY + (
        "\nfrom esnode.tasks.python import PythonTask\n"
        "PythonTask.batched = True\n"  # in the child as in the parent: both load this file
    )
    with made(tmp_path, source) as scorer:
        assert scorer.task.batched
        assert scorer.score_batch("train", [0, 1], ["fine", "wrong"]) == [
            Score(1.0, True),
            Score(0.25, False),
        ]
        verdicts = scorer.judge("train", [0, 1, 2, 3], ["fine", "raise", "die", "wrong"])
        assert [verdict.score.reward for verdict in verdicts if verdict.score] == [1.0, -1.0, -1.0, 0.25]
        assert [bool(verdict.failure) for verdict in verdicts] == [False, True, True, False]
    from esnode.tasks.python import PythonTask

    monkeypatch.delattr(PythonTask, "batched", raising=False)


def test_several_turns(tmp_path: Path) -> None:
    source = """
def items(): return [{"prompt": "guess"}], [{"prompt": "guess"}]
def reply(item, messages, text):
    if text == "up": return [{"role": "user", "content": f"turn {len(messages)}"}]
    return 1.0 if messages[-1]["content"] == "turn 1" else 0.5
"""
    with made(tmp_path, source) as scorer:
        chat = [{"role": "user", "content": "guess"}]
        (verdict,) = scorer.judge("train", [0], ["up"], [chat])
        assert verdict == Verdict(more=({"role": "user", "content": "turn 1"},))
        longer = [*chat, {"role": "assistant", "content": "up"}, *verdict.more]
        assert scorer.judge("train", [0], ["done"], [longer]) == [Verdict(Score(1.0, True))]
        with pytest.raises(ValueError, match="several turns"):
            scorer.score_batch("train", [0], ["up"])


def test_odd_text_and_cheap_batches() -> None:
    data = tasks.materialise("countdown", {})
    with Scorer("countdown", tasks.header(data)[1], data) as scorer:
        texts = ["<answer>\ud800 \x00 \U0001f600</answer>"] * 32
        scorer.score_batch("train", range(32), texts)
        took = []
        for _ in range(5):
            began = time.perf_counter()
            assert len(scorer.score_batch("train", range(32), texts)) == 32
            took.append(time.perf_counter() - began)
        assert min(took) < 0.05 and not scorer.failures  # 2 ms on a quiet machine
        large = "x" * 1_000_000
        assert scorer.score_batch("train", range(4), [large] * 4) == [Score(0.0, False)] * 4


# ---------------------------------------------------------------- the fence

DEEDS = [
    "__import__('os').system('touch {path}')",
    "__import__('subprocess').run(['touch', '{path}'])",
    "open('{path}', 'w')",
    "__import__('os').open('{path}', 65)",
    "__import__('pathlib').Path('{path}').touch()",
    "__import__('os').fork()",
    "__import__('socket').create_connection(('127.0.0.1', 9))",
    "__import__('ctypes').CDLL(None)",
    "__import__('os').remove('{victim}')",
    "__import__('os').rename('{victim}', '{path}')",
    "__import__('shutil').rmtree('{folder}')",
]


def test_text_that_a_third_party_scorer_evaluates_cannot_act(tmp_path: Path) -> None:
    """reasoning-gym's spiral_matrix scorer calls eval on whatever looks like a list."""
    data = tasks.materialise("gym:spiral_matrix", {"train": len(DEEDS), "heldout": 1})
    victim = tmp_path / "folder" / "victim"
    victim.parent.mkdir()
    victim.write_text("here")
    path = tmp_path / "trace"
    texts = [
        f"<answer>[{deed.format(path=path, victim=victim, folder=victim.parent)}]</answer>" for deed in DEEDS
    ]
    with Scorer("gym:spiral_matrix", tasks.header(data)[1], data) as scorer:
        entry = scorer.task.train[0]["entry"]
        fine = scorer.score_batch("train", [0], [f"<answer>{entry['answer']}</answer>"])
        assert fine == [Score(1.0, True)]
        scores = scorer.score_batch("train", range(len(DEEDS)), texts)
        assert scorer.score_batch("train", [0], [f"<answer>{entry['answer']}</answer>"]) == fine
    assert all(score.reward < 0.1 for score in scores)
    assert not path.exists() and victim.read_text() == "here"


def test_the_fence_names_what_was_tried() -> None:
    program = (
        "from esnode import fence; fence.close(); import json, decimal\n"
        "try: open('/tmp/x', 'w')\n"
        "except PermissionError as error: print(error)\n"
        "print(len(open('/etc/passwd').read()) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "writing '/tmp/x' is not for a scorer\nTrue\n"
