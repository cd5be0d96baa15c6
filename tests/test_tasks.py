"""Tasks: their data, their scores, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from esnode import tasks
from esnode.tasks import Score, TaskError, gym
from esnode.tasks.answers import last_number, tagged
from esnode.tasks.countdown import Expression, NotAnExpression, format_reward, solves
from esnode.tasks.draws import Draws

BUILTIN = ("short-answers", "conciseness", "countdown", "arithmetic")


def opened(spec: str, options: dict[str, Any] | None = None, code: Path | None = None) -> tasks.Task:
    data = tasks.materialise(spec, options or {}, code=code)
    return tasks.open_task(spec, tasks.header(data)[1], data, code=code)


def jsonl(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


# ---------------------------------------------------------------- all tasks


@pytest.mark.parametrize("spec", BUILTIN)
def test_data_is_stable_and_splits_do_not_overlap(spec: str) -> None:
    data = tasks.materialise(spec, {})
    assert data == tasks.materialise(spec, {})
    task = opened(spec)
    chats = {
        split: {json.dumps(task.start(item)) for item in task.items_of(split)}
        for split in ("train", "heldout")
    }
    assert len(chats["train"]) == len(task.train) and len(chats["heldout"]) == len(task.heldout)
    assert not chats["train"] & chats["heldout"]
    assert task.low < task.high and task.low <= task.floor <= task.high
    assert len(tasks.scorer_digest(spec)) == 64


def test_sizes_that_the_demo_relies_on() -> None:
    short, brief = opened("short-answers"), opened("conciseness")
    assert len(short.train) >= 64 and len(short.heldout) == 32
    assert len(brief.train) >= 16 and len(brief.heldout) >= 16
    assert all(1 <= len(item["target"].split()) <= 4 for item in (*short.train, *short.heldout))


def test_seeds_give_other_items() -> None:
    assert opened("countdown").train != opened("countdown", {"seed": 1}).train
    assert len(opened("countdown", {"train": 5, "heldout": 3}).heldout) == 3


def test_draws_are_the_same_on_every_python() -> None:
    draws = Draws(7)
    assert [draws.between(0, 99) for _ in range(6)] == [32, 15, 65, 7, 53, 36]


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("shortanswers", {}, "did you mean 'short-answers'"),
        ("zzz", {}, "choose one of"),
        ("gym", {}, "is incomplete: write 'gym:NAME'"),
        ("countdown:4", {}, "takes no argument"),
        ("countdown", {"sead": 1}, "no option 'sead'"),
        ("countdown", {"seed": "1"}, "expected int"),
        ("countdown", {"seed": True}, "expected int"),
        ("countdown", {"fewest": 5}, "choose 2 <= fewest"),
        ("countdown", {"largest": 5}, "choose 10 to 999"),
        ("countdown", {"train": 0}, "at least 1"),
        ("countdown", {"fewest": 2, "most": 2, "largest": 10, "train": 5000}, "different items exist"),
        ("arithmetic", {"largest": 1}, "different items"),
        ("conciseness", {"scale": 0}, "above 0 characters"),
        ("conciseness", {"time_limit": 0}, "choose 0.1 to 3600 seconds"),
    ],
)
def test_what_is_refused_and_in_which_words(spec: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words) as caught:
        tasks.materialise(spec, options)
    assert "\n" not in str(caught.value)


def test_data_and_task_must_belong_together() -> None:
    data = tasks.materialise("conciseness", {})
    options = tasks.header(data)[1]
    with pytest.raises(TaskError, match="not made for task"):
        tasks.open_task("conciseness", {**options, "scale": 50.0}, data)
    with pytest.raises(TaskError, match="damaged in line 2"):
        tasks.open_task("conciseness", options, data.replace(b'"split":"train"', b'"split":"trian"'))
    with pytest.raises(TaskError, match="no header"):
        tasks.header(b"nonsense\n")


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12), ("it is 12.", 12), ("-3.5", Fraction(-7, 2)), ("1,250 apples", 1250),
        ("3/4", Fraction(3, 4)),
        ("8-3", 3), ("x = -3", -3), ("none", None), ("5/0", None), ("7, and 5/0", 7), ("", None),
    ],
)  # fmt: skip
def test_last_number(text: str, number: Fraction | int | None) -> None:
    assert last_number(text) == number


def test_tagged_takes_the_last_complete_pair() -> None:
    assert tagged("<answer>1</answer> no, <answer>\n 2 </answer> <answer>3") == "2"
    assert tagged("42") is None


# ---------------------------------------------------------------- countdown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2", 3), ("(1 + 2) / 3", 1), ("2 * 3 - 4 / 2", 4), ("10 / 4", Fraction(5, 2)), ("8 - 3 - 2", 3),
        ("-(3) + 5", 2), ("2*-3", -6), (" 7 ", 7),
    ],
)  # fmt: skip
def test_expressions(text: str, value: Fraction | int) -> None:
    assert Expression(text).value == value


@pytest.mark.parametrize(
    "text",
    ["", "1 +", "(1", "1)", "1 2", "1 / 0", "2 ** 3", "1 = 1", "__import__('os')", "1e9", "1.5", "x", "()",
     "1234567", "9" * 201, "(" * 21 + "1" + ")" * 21, "- " * 30 + "1", "1 // 2", "\u0663"],
)  # fmt: skip
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(NotAnExpression):
        Expression(text)


def test_each_number_exactly_once() -> None:
    assert solves("(3 + 4) * 2", [2, 3, 4], 14)
    assert solves("3 * 3", [3, 3], 9)
    assert not solves("3 * 3", [3, 4], 9)
    assert not solves("3 + 4", [2, 3, 4], 7)
    assert not solves("3 + 4 + 2", [2, 3, 4], 14)


def test_countdown_rewards() -> None:
    task = opened("countdown")
    item = {"numbers": [2, 3, 4], "target": 14}
    assert task.score(item, "<think>try</think>\n<answer>(3 + 4) * 2</answer>") == Score(1.1, True)
    assert task.score(item, "<answer>(3 + 4) * 2</answer>") == Score(0.1 * 0.5 + 1, True)
    assert task.score(item, "<think>try</think> <answer>3 + 4</answer>") == Score(0.1, False)
    assert task.score(item, "(3 + 4) * 2") == Score(0.0, False)
    assert format_reward("<think>a</think> so <answer>b</answer>") == 0.6
    assert format_reward("<think>a</think>") == 0.1


def test_every_countdown_target_can_be_reached() -> None:
    def reachable(pool: tuple[Fraction, ...]) -> set[Fraction]:
        if len(pool) == 1:
            return {pool[0]}
        values: set[Fraction] = set()
        for i in range(len(pool)):
            for j in range(len(pool)):
                if i != j:
                    rest = tuple(pool[k] for k in range(len(pool)) if k not in (i, j))
                    a, b = pool[i], pool[j]
                    for c in (a + b, a - b, a * b, *([a / b] if b else [])):
                        values |= reachable((*rest, c))
        return values

    for item in opened("countdown", {"train": 12, "heldout": 4}).train:
        assert item["target"] in reachable(tuple(map(Fraction, item["numbers"])))


# ---------------------------------------------------------------- conciseness, arithmetic, likelihood


def test_conciseness() -> None:
    task = opened("conciseness")
    item = {"reference": "Ice."}
    assert task.score(item, " Ice! ") == Score(0.0, True)
    assert task.score(item, "x" * 79) == Score(-0.5, False)
    assert task.score(item, "x" * 500) == Score(-1.0, False)


def test_arithmetic_rewards_closeness() -> None:
    task = opened("arithmetic")
    item = {"answer": 12}
    assert task.score(item, "12") == Score(1.0, True)
    assert task.score(item, "It is 12.") == Score(1.0, True)
    assert 0.5 > task.score(item, "13").reward > task.score(item, "40").reward > 0
    assert task.score(item, "twelve") == Score(0.0, False)


def test_likelihood_is_clipped_and_never_nan() -> None:
    task = opened("short-answers")
    item = task.train[0]
    assert task.likelihood_score(item, -3.0, 2) == Score(-1.5, False)
    assert task.likelihood_score(item, -0.2, 2) == Score(-0.1, True)
    assert task.likelihood_score(item, float("-inf"), 2).reward == -30.0
    with pytest.raises(ValueError, match="not a number"):
        task.likelihood_score(item, float("nan"), 2)


# ---------------------------------------------------------------- files


def test_file_rules(tmp_path: Path) -> None:
    lines = [{"prompt": f"q{n}", "answer": n} for n in range(10)]
    path = jsonl(tmp_path / "a.jsonl", *lines)
    task = opened(f"file:{path}", {"scoring": "numeric"})
    assert len(task.heldout) == 2 and len(task.train) == 8
    item = {"answer": ["3", "4"]}
    assert task.score(item, "so it is 4").correct and not task.score(item, "five").correct
    assert task.score(item, "5 <answer>3</answer> 5").reward == 1.0
    regex = opened(f"file:{jsonl(tmp_path / 'b.jsonl', *lines)}", {"scoring": "regex"})
    assert regex.score({"answer": ["^a+b$"]}, "aaab").correct
    exact = opened(f"file:{path}")
    assert exact.score({"answer": ["New  York"]}, " New York\n").correct
    assert not exact.score({"answer": ["New York"]}, "new york").correct


def test_math_rule(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": f"q{n}", "answer": "1/2"} for n in range(4)))
    task = opened(f"file:{path}", {"scoring": "math"})
    assert task.packages == ("math-verify", "sympy")
    assert task.score({"answer": [r"$\frac{1}{2}$"]}, "0.5").correct
    assert not task.score({"answer": [r"$\frac{1}{2}$"]}, "2").correct


def test_split_field_and_hash_rule(tmp_path: Path) -> None:
    marked = [
        {"prompt": "a", "answer": "x", "split": "train"},
        {"prompt": "b", "answer": "y", "split": "test"},
    ]
    task = opened(f"file:{jsonl(tmp_path / 'a.jsonl', *marked)}")
    assert [item["prompt"] for item in task.heldout] == ["b"]
    twice = [{"prompt": f"q{n % 10}", "target": str(n)} for n in range(20)]
    task = opened(f"likelihood:{jsonl(tmp_path / 'b.jsonl', *twice)}", {"heldout": 0.3})
    assert {item["prompt"] for item in task.train}.isdisjoint({item["prompt"] for item in task.heldout})
    assert len(task.heldout) == 6 and task.mode == "likelihood"
    turned = opened(f"likelihood:{jsonl(tmp_path / 'c.jsonl', *reversed(twice))}", {"heldout": 0.3})
    assert {item["prompt"] for item in turned.heldout} == {item["prompt"] for item in task.heldout}


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("", {}, "is empty"),
        ("{\n", {}, "line 1: not JSON"),
        ("[1]\n", {}, "expected an object"),
        ('{"question": "a", "answer": 1}\n', {}, "needs a field prompt or messages, it has question, answer"),
        ('{"prompt": "a"}\n', {}, "needs a field answer"),
        ('{"messages": "a", "answer": 1}\n', {}, "line 1: messages must be a list of objects"),
        ('{"messages": [{"role": "user"}], "answer": 1}\n', {}, "with role and content"),
        ('{"prompt": "a", "answer": "x"}\n', {}, "has no train items"),
        ('{"prompt": "a", "answer": "x", "split": "dev"}\n', {}, "split is 'dev'"),
        ('{"prompt": "a", "answer": "x"}\n', {"heldout": 1.5}, "a share between 0 and 1"),
        ('{"prompt": "a", "answer": "x"}\n', {"scoring": "fuzzy"}, "choose one of exact"),
        ('{"prompt": "a", "answer": "x"}\n', {"scoring": "numeric"}, "has no number"),
        ('{"prompt": "a", "answer": "("}\n', {"scoring": "regex"}, "no regular expression"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, options: dict[str, Any], words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(TaskError, match=words):
        tasks.materialise(f"file:{path}", options)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="there is no file"):
        tasks.materialise(f"file:{tmp_path / 'none.jsonl'}", {})


def test_what_has_no_end_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        for kind in ("likelihood", "file"):
            with pytest.raises(TaskError, match="is no regular file"):
                tasks.materialise(f"{kind}:{name}", {})


# ---------------------------------------------------------------- the user's own code

GUESS = """
LOW, HIGH, MAX_NEW_TOKENS = -1, 1, 7
def items():
    return [{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "c"}]
def score(item, text):
    return (0.5, True) if item["prompt"] in text else -1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ESNODE_TASK_DIR", raising=False)
    (tmp_path / "guess.py").write_text(GUESS)
    return tmp_path


def test_python_task(folder: Path) -> None:
    task = opened("python:guess.py", code=folder)
    assert (task.low, task.high, task.max_new_tokens, len(task.train)) == (-1.0, 1.0, 7, 2)
    task.warm_up()
    assert task.score({"prompt": "a"}, "abc") == Score(0.5, True)
    assert task.score({"prompt": "z"}, "abc") == Score(-1, False)


def test_python_code_is_pinned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tasks.materialise("python:guess.py", {}, code=folder)
    options = tasks.header(data)[1]
    before = tasks.scorer_digest("python:guess.py", folder)
    (folder / "guess.py").write_text(GUESS + "# changed\n")
    assert tasks.scorer_digest("python:guess.py", folder) != before
    with pytest.raises(TaskError, match="not the code this plan pins"):
        tasks.open_task("python:guess.py", options, data, code=folder)
    with pytest.raises(TaskError, match="not the code this plan pins"):
        tasks.materialise("python:guess.py", {"code": options["code"]}, code=folder)
    monkeypatch.setenv("ESNODE_TASK_DIR", str(folder))
    assert tasks.materialise("python:guess.py", {})


@pytest.mark.parametrize(
    ("argument", "content", "words"),
    [
        ("../guess.py", "", "outside the task folder"),
        ("none.py", "", "there is no file"),
        ("bad.py", "import nothing_like_this", "cannot be loaded: ModuleNotFoundError"),
        ("bad.py", "def items(): return [], []", "defines no function score"),
        ("bad.py", "def items(): return []\ndef score(i, t): return 0", "must return .train, heldout."),
        ("bad.py", "def items(): return [], []\ndef score(i, t): return 0", "no train items"),
        ("bad.py", "LOW, HIGH = 1, 0", "must be below HIGH"),
        ("bad.py", "LOW = 'x'", "LOW = 'x' must be a finite number"),
        ("bad.py", "HIGH = float('inf')", "HIGH = inf must be a finite number"),
        ("bad.py", "MAX_NEW_TOKENS = 'many'", "MAX_NEW_TOKENS = 'many' must be a finite number"),
        ("bad.py", "import sys; sys.exit(0)", "cannot be loaded: SystemExit"),
        ("bad.py", "def items(): 1/0\ndef score(i, t): return 0", "items.. failed: ZeroDivisionError"),
        (
            "bad.py",
            "def items(): return [{'prompt': '', 'a': {1}}], [{'prompt': ''}]\ndef score(i, t): return 0",
            "plain JSON",
        ),
        ("bad.py", "def items(): return 1, 2\ndef score(i, t): return 0", "items.. failed: TypeError"),
        (
            "bad.py",
            "def items(): return ['a'], ['b']\ndef score(i, t): return 0",
            "train item 0 is 'a', expected",
        ),
        (
            "bad.py",
            "def items(): return [{'prompt': 'a'}], [{'q': 'b'}]\ndef score(i, t): return 0",
            "heldout item 0 needs a field prompt or messages, .*; it has q",
        ),
        (
            "bad.py",
            "def items(): return [{'messages': 'a'}], []\ndef score(i, t): return 0",
            "train item 0: messages must be a list of objects with role and content",
        ),
        (
            "bad.py",
            "def items(): return [{'q': 'a'}], []\ndef start(i): return i['x']\ndef score(i, t): return 0",
            "start.. failed: KeyError",
        ),
        (
            "bad.py",
            "def items(): return [{'q': 'a'}], []\ndef start(i): return i['q']\ndef score(i, t): return 0",
            "train item 0: messages must be",
        ),
    ],
)
def test_bad_python_tasks(folder: Path, argument: str, content: str, words: str) -> None:
    (folder / "bad.py").write_text(content)
    with pytest.raises(TaskError, match=words):
        tasks.materialise(f"python:{argument}", {}, code=folder)


def test_an_option_that_the_file_contradicts_is_refused(folder: Path) -> None:
    for option, value in (("low", -2.0), ("max_new_tokens", 9)):
        with pytest.raises(TaskError, match=f"declares {option.upper()} = .*drop one of them"):
            tasks.materialise("python:guess.py", {option: value}, code=folder)
    (folder / "bare.py").write_text(
        "def items(): return [{'prompt': 'a'}], [{'prompt': 'b'}]\ndef score(i, t): return 0"
    )
    assert opened("python:bare.py", {"low": -2.0, "max_new_tokens": 9}, code=folder).low == -2.0
    settled = tasks.header(tasks.materialise("python:guess.py", {}, code=folder))[1]
    assert tasks.materialise("python:guess.py", settled, code=folder)  # as a fork or an evaluation says them


def test_python_task_needs_a_named_folder(folder: Path) -> None:
    with pytest.raises(TaskError, match="--code or ESNODE_TASK_DIR"):
        tasks.materialise("python:guess.py", {})


def block(text: str, first: str) -> str:
    """The indented block of docs/tasks.md that begins with this line."""
    lines = text[text.index(f"    {first}") :].splitlines()
    inside = itertools.takewhile(lambda line: not line or line.startswith("    "), lines)
    return textwrap.dedent("\n".join(inside)).strip() + "\n"


def test_the_examples_of_the_docs(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text()
    (tmp_path / "rhyme.py").write_text(block(text, "# tasks/rhyme.py").partition("\nesnode run")[0])
    rhyme = opened("python:rhyme.py", code=tmp_path)
    rhyme.warm_up()
    assert rhyme.score(rhyme.train[0], "It sat on a MAT ") == Score(1.0, True)
    assert rhyme.score(rhyme.train[0], "a dog") == Score(0.0, False)

    space: dict[str, Any] = {}
    exec(block(text, "from esnode.tasks.draws"), space)
    train, heldout = space["Letters"].items("", {"train": 5, "heldout": 2, "seed": 0})
    letters = space["Letters"](train, heldout)
    assert letters.score({"letters": "abca"}, "cab") == Score(1.0, True) and len(train) == 5

    (tmp_path / "questions.jsonl").write_text(block(text, '{"prompt": "Capital of France?"'))
    assert len(opened(f"file:{tmp_path / 'questions.jsonl'}").train) == 1


# ---------------------------------------------------------------- reasoning-gym


@pytest.mark.parametrize("name", ["chain_sum", "graph_color", "ransom_note"])
def test_gym_items_score_their_own_answer(name: str) -> None:
    """Plain; several right answers and keys that are no strings; a generator that walks over a set."""
    spec, options = f"gym:{name}", {"train": 6, "heldout": 3, "seed": 5}
    data = tasks.materialise(spec, options)
    if name == "ransom_note":
        assert tasks.materialise(spec, options) == data
    task = tasks.open_task(spec, tasks.header(data)[1], data)
    assert (len(task.train), len(task.heldout)) == (6, 3)
    task.warm_up()
    for item in task.train:
        entry = gym.restored(item["entry"])
        gold = entry["metadata"][gym.EXAMPLE_ANSWER[name]] if name in gym.EXAMPLE_ANSWER else entry["answer"]
        text = gold if isinstance(gold, str) else json.dumps(gold)
        assert task.score(item, f"So: <answer>{text}</answer>") == Score(1.0, True)
        assert task.score(item, f"So: {text}") == Score(0.0, False)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("rush_hour", {}, "is refused: it publishes no answer"),
        ("chain_summ", {}, "try chain_sum"),
        ("chain_sum", {"parameters": {"wrong": 1}}, "does not take these parameters"),
        ("coin_flip", {"train": 0}, "at least 1 item"),
    ],
)
def test_gym_refusals(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        tasks.materialise(f"gym:{name}", options)


def test_odd_entries_survive_json() -> None:
    entry = {"a": (1, [2, (3,)]), "b": {1: "x", (2, 3): None}, "!tuple": [1], "c": {"d": 1.5}}
    assert gym.restored(json.loads(json.dumps(gym.plain(entry)))) == entry


EVERY_DATASET = """
from reasoning_gym.factory import DATASETS
from esnode import fence
from esnode.tasks import gym

options = {"train": 4, "heldout": 2, "seed": 1, "parameters": {}}
names = sorted(set(DATASETS) - set(gym.REFUSED))
made = {name: gym.generate(name, options) for name in names}
sets = {name: gym._dataset(name, options, 6) for name in names}
fence.close()
for name in names:
    gym.verify(name, sets[name], [item["entry"] for item in made[name]])
"""


@pytest.mark.slow
def test_every_gym_dataset_but_the_refused_ones() -> None:
    """Their own answers get full marks and prose does not, inside the fence too."""
    program = [sys.executable, "-c", EVERY_DATASET]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_unfit_dataset_is_refused_by_name() -> None:
    class Stingy:
        score_answer: Callable[..., float] = staticmethod(lambda answer, entry: 0.9)

    class Broken:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            raise KeyError("board")

    class Blind:
        score_answer: Callable[..., float] = staticmethod(lambda answer, entry: 1.0)

    entry = gym.plain({"question": "q", "answer": "a", "metadata": {}})
    with pytest.raises(TaskError, match=r"gym:blind is refused: its scorer gives 'I do not know\.' full"):
        gym.verify("blind", Blind(), [entry])
    with pytest.raises(TaskError, match=r"gym:stingy is refused: its own answer 'a' scores 0\.9"):
        gym.verify("stingy", Stingy(), [entry])
    with pytest.raises(TaskError, match="gym:broken is refused: scoring its own answer raised KeyError"):
        gym.verify("broken", Broken(), [entry])
