"""Plans and locks: every field refused in one line, nothing lost in writing, templates, the command."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import esnode
from esnode import planfile, tasks
from esnode.cli.plan import plan as plan_command
from esnode.tasks import TaskError
from esnode.template import template
from protocol import seeds
from protocol.fields import bf16
from protocol.lock import Lock, LockError, Parent, TensorSpec, lock_from_bytes, resolve_slice
from protocol.messages import Kind
from protocol.plan import Ops, Plan, PlanError, changed, default_of, parse, render
from protocol.plan_fields import FIELDS
from tests.ledgers import HEX, small_lock

ROOT = Path(__file__).parent.parent
PLAN = """
[run]
model = "demo"
task = "short-answers"
[run.es]
members = 32
mirrored = true
sigma = [0.002, 0.001]
alpha = 6e-3
[run.options]
time_limit = 2.5
[ops]
rounds = 15
"""
TASKS = ("short-answers", "conciseness", "countdown", "arithmetic", "gym:chain_sum", "file:a.jsonl",
         "likelihood:b.jsonl", "python:c.py")  # fmt: skip


def test_a_whole_plan_is_read() -> None:
    plan = parse(PLAN)
    assert plan == Plan(
        model="demo",
        task="short-answers",
        ops=Ops(rounds=15),
        members=32,
        mirrored=True,
        sigma=(0.0019989013671875, 0.00099945068359375),
        alpha=(0.006,),
        task_options={"time_limit": 2.5},
    )
    assert parse(PLAN.replace("rounds = 15", "rounds = 15\nquorum = 1")).ops.quorum == 1.0


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        # the cases every user meets
        ("members = 32", "members = 1", "run.es.members = 1: one member has nothing to be compared with"),
        ("members = 32", "members = 31", "= 31: mirrored members come in pairs; write 30 or 32"),
        ("members = 32", "members = 4097", "run.es.members = 4097: must be a whole number from 2 to 4096"),
        ("members = 32", "members = 0", "from 2 to 4096"),
        ("members = 32", "members = 32.0", "from 2 to 4096"),
        ("members = 32", "members = true", "from 2 to 4096"),
        ("members = 32", 'members = "32"', "from 2 to 4096"),
        ("members = 32", "", "run.es.members is missing: write members = ... in [run.es], a whole"),
        ("alpha = 6e-3", "alpha = -0.1", "run.es.alpha = -0.1: must be above 0: to walk down"),
        ("alpha = 6e-3", "alpha = [0.1, -0.1]", "run.es.alpha = [0.1, -0.1]: must be a number"),
        ("alpha = 6e-3", "alpha = 0", "run.es.alpha = 0.0: must be above 0; to measure without moving"),
        ("alpha = 6e-3", "alpha = [0.1, 0]", "run.es.alpha = [0.1, 0.0]: must be above 0"),
        ("alpha = 6e-3", "", "must be above 0"),
        ("alpha = 6e-3", "alpha = inf", "run.es.alpha = inf: must be a number from 0"),
        ("sigma = [0.002, 0.001]", "sigma = -0.001", "run.es.sigma = -0.001: must be a number above 0"),
        ("sigma = [0.002, 0.001]", "sigma = 0", "run.es.sigma = 0: must be a number above 0"),
        ("sigma = [0.002, 0.001]", "sigma = nan", "run.es.sigma = nan: must be a number above 0"),
        ("sigma = [0.002, 0.001]", "sigma = 1e-50", "run.es.sigma = 1e-50: cannot be used as a bf16"),
        ("sigma = [0.002, 0.001]", "sigma = 1e-46", "bf16 noise scale: write a number from"),
        ("sigma = [0.002, 0.001]", "sigma = 1e39", "bf16 noise scale"),
        ("sigma = [0.002, 0.001]", "sigma = []", "a number above 0"),
        ("sigma = [0.002, 0.001]", 'sigma = "small"', "a number above 0"),
        ("sigma = [0.002, 0.001]", "", "run.es.sigma is missing"),
        # unknown words
        ("rounds = 15", "rouds = 15", "ops.rouds is an unknown field: did you mean rounds?"),
        ("[run.es]", "[run.ess]", "run.ess is an unknown field: did you mean [run.es]?"),
        ("[ops]", "[opps]", "opps is an unknown field: did you mean [ops]?"),
        ("rounds = 15", "rounds = 15\nsigma = 1", "ops.sigma is not a field of [ops]: sigma belongs in [run"),
        ("[run]", "rounds = 3\n[run]", "rounds is not a field of the file's top: rounds belongs in [ops]"),
        ("[run]", '[run]\n"es.clip" = 1.0', 'run."es.clip" is an unknown field'),
        ("[run]", "zzz = 3\n[run]", "zzz is an unknown field: remove it"),
        ('task = "short-answers"', "", "run.task is missing"),
        ('task = "short-answers"', 'task = {name = "x"}', "the task's own options go into [run.options]"),
        ("[run.options]\ntime_limit = 2.5", "[run]\nx = 1", "not valid TOML"),
        ("[run.options]\ntime_limit = 2.5", "", ""),
        # every other field
        ('model = "demo"', 'model = ""', "run.model"),
        ('model = "demo"', 'model = "a\\u0000b"', "control characters"),
        ('model = "demo"', 'model = "demo"\nlive_dtype = "bf16"', 'one of "bfloat16", "float16", "float32"'),
        ('model = "demo"', 'model = "demo"\nmaster = "float16"', "run.master"),
        ('model = "demo"', 'model = "demo"\nrepeatable = 1', "true or false"),
        ('model = "demo"', 'model = "demo"\ntrusted = ["ab"]', "64 hex digits"),
        ('model = "demo"', f'model = "demo"\ntrusted = ["{HEX}", "{HEX}"]', "twice"),
        ('model = "demo"', 'model = "demo"\ndate = 2026-01-01', "2026-01-01: must be a quoted date"),
        ('model = "demo"', 'model = "demo"\ndate = "2026-02-31"', "no day of the calendar"),
        ('model = "demo"', 'model = "demo"\nseed = -1', "= -1: must be a whole number from 0 to 2^64 - 1"),
        ('model = "demo"', f'model = "demo"\nseed = {2**64}', "run.seed"),
        ('model = "demo"', 'model = "demo"\nseed = 1.0', "run.seed"),
        ('model = "demo"', f'model = "demo"\nseed = {2**64 - 1}', ""),
        ("mirrored = true", "shaping = 'rank'", "zscore"),
        ("mirrored = true", "clip = -1", "run.es.clip = -1"),
        ("mirrored = true", "std_floor = nan", "run.es.std_floor = nan"),
        ("mirrored = true", "update = 'no'", "true or false"),
        ("[ops]", "[run.train]\ninclude = []\n[ops]", "at least 1 element"),
        ("[ops]", "[run.train]\ninclude = ['a[b']\n[ops]", 'has a "[" without its "]"'),
        ("[ops]", "[run.train]\nexclude = ['a b']\n[ops]", "pattern of tensor names"),
        ("[ops]", "[run.train]\nexclude = '*.bias'\n[ops]", "must be a list"),
        ("[ops]", "[run.prompts]\nper_round = -1\n[ops]", "run.prompts.per_round = -1"),
        ("[ops]", "[run.prompts]\nper_round = 4\nchunk = 5\n[ops]", "chunk = 5: a round has 4 prompts"),
        ("[ops]", "[run.sampling]\nmax_new_tokens = 1.5\n[ops]", "run.sampling.max_new_tokens"),
        ("[ops]", "[run.sampling]\ntemperature = -1\n[ops]", "run.sampling.temperature"),
        ("[ops]", "[run.sampling]\ntop_p = 0\n[ops]", "a number above 0 and at most 1"),
        ("rounds = 15", "rounds = 0", "ops.rounds = 0"),
        ("rounds = 15", "rounds = 15\nquorum = 0", "ops.quorum"),
        ("rounds = 15", "rounds = 15\nquorum = 1.1", "ops.quorum"),
        ("rounds = 15", "rounds = 15\neval_every = -1", "ops.eval_every"),
        ("rounds = 15", "rounds = 15\neval_samples = 2000", "ops.eval_samples"),
        ("rounds = 15", "rounds = 15\nstall_seconds = 0", "ops.stall_seconds"),
        ("time_limit = 2.5", "time_limit = nan", "run.options: holds a value"),
        ("time_limit = 2.5", "time_limit = 2026-01-01", "quote a date"),
        ("time_limit = 2.5", "a = " + "[" * 12 + "]" * 12, "nested too deeply"),
        ("rounds = 15", "rounds = ", "not valid TOML"),
        (PLAN, "run = 3", "run = 3: must be a table, written [run]"),
        (PLAN, "", "run.model is missing"),
        (PLAN, "x = " + "[" * 5000, "plan is n"),
    ],
)  # fmt: skip
def test_refused_in_one_line(old: str, new: str, says: str) -> None:
    assert old in PLAN
    if not says:
        parse(PLAN.replace(old, new))
        return
    with pytest.raises(PlanError) as caught:
        parse(PLAN.replace(old, new))
    message = str(caught.value)
    assert says in message and "\n" not in message and len(message) < 250


def test_measuring_needs_no_alpha() -> None:
    assert parse(PLAN.replace("alpha = 6e-3", "update = false")).alpha == (0.0,)
    assert parse(PLAN.replace("alpha = 6e-3", "update = false\nalpha = 0")).update is False
    with pytest.raises(PlanError, match="alpha"):
        parse(PLAN.replace("alpha = 6e-3", "update = false\nalpha = -1"))


def test_changed_follows_the_same_rules() -> None:
    plan = parse(PLAN)
    assert changed(plan, rounds=3, members=6) == dataclasses.replace(plan, members=6, ops=Ops(rounds=3))
    with pytest.raises(PlanError, match=re.escape("ops.rounds = 0")):
        changed(plan, rounds=0)
    with pytest.raises(PlanError, match="pairs"):
        changed(plan, members=7)
    with pytest.raises(TypeError):
        changed(plan, membres=6)


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_text_is_refused_politely(text: str) -> None:
    with pytest.raises(PlanError):
        parse(text)


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), VALUES, max_size=4),
    st.lists(st.floats(1e-12, 1000.0), min_size=1, max_size=3),
    st.floats(1e-9, 1e5),
)
@settings(max_examples=150, deadline=None)
def test_render_loses_nothing(options: dict[str, Any], sigma: list[float], alpha: float) -> None:
    plan = changed(
        parse(PLAN), task_options=options, sigma=tuple(sigma), alpha=(alpha,), model='a "b" \\ é😀'
    )
    assert parse(render(plan)) == plan
    assert render(parse(render(plan))) == render(plan)


@given(st.integers(0, 2**32 - 1))
def test_bf16_rounding(bits: int) -> None:
    """Against the rule in bits: add half, ties to even, on the float32 pattern."""
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if not math.isfinite(value) or abs(value) > 3.3e38:
        return
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    assert bf16(value) == struct.unpack("<f", struct.pack("<I", rounded))[0]


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize("task", TASKS)
def test_templates_run_as_they_are(task: str) -> None:
    text = template(task, "demo")
    plan = parse(text)
    assert (plan.task, plan.model) == (task, "demo")
    for row in FIELDS:
        assert f"{row.key} = " in text and row.meaning.split("`")[0][:40] in text
    everything = parse(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert everything.task_options == tasks.resolve_options(task, {})
    assert dataclasses.replace(everything, task_options={}) == plan, (
        "what stands in comments are the defaults"
    )


def test_template_values() -> None:
    def es(task: str) -> tuple[Any, ...]:
        plan = parse(template(task, "demo"))
        return plan.members, plan.mirrored, plan.sigma, plan.alpha, plan.per_round, plan.max_new_tokens

    assert es("short-answers") == (32, True, (bf16(0.002),), (0.006,), 48, 0)
    assert es("conciseness") == (16, True, (bf16(0.002),), (0.006,), 16, 24)
    assert es("countdown") == (30, False, (bf16(0.001),), (0.0005,), 200, 1024)


def test_unknown_tasks() -> None:
    for task, says in (
        ("contdown", "did you mean 'countdown'?"),
        ("zzzz", "choose one of short-answers"),
        ("gym", "write 'gym:NAME'"),
        ("gym:", "write 'gym:NAME'"),
        ("countdown:x", "write 'countdown'"),
        ("countdown:", "write 'countdown'"),
        ("", "choose one of"),
    ):
        with pytest.raises(TaskError, match=re.escape(says)):
            template(task, "demo")
    with pytest.raises(PlanError, match=r"run\.model"):
        template("countdown", "")


# ---------------------------------------------------------------- the lock


def test_lock_bytes_are_canonical() -> None:
    lock = small_lock(
        parent=Parent(HEX, 3, HEX, 2**64 - 1),
        task_options={"z": 1, "a": [1.5, "é"]},
        packages={"b": "1", "a": "2"},
    )
    data = lock.to_bytes()
    assert lock_from_bytes(data) == lock and lock_from_bytes(data).to_bytes() == data
    assert (
        data
        == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    )
    assert lock.run_id == hashlib.blake2b(data, digest_size=32).digest()
    assert hash(lock) == hash(lock_from_bytes(data))
    assert small_lock(clip=1).run_id == small_lock(clip=1.0).run_id


def test_golden_run_id() -> None:
    """The lock's encoding is the run's identity: another id here means another format."""
    assert small_lock().run_id.hex() == "816b74546d66525151dad4d5b5644740c998240e129212dba87da9fa201e41ca"


def test_a_seed_makes_another_run_and_none_makes_the_run_of_before() -> None:
    plain, other = small_lock(), small_lock(seed=2**64 - 1)
    assert b"seed" not in plain.to_bytes() and plain.seed == 0
    assert lock_from_bytes(other.to_bytes()) == other and other.run_id != plain.run_id
    streams = [
        (seeds.member_seed(lock.run_id, 0, 0, False), list(seeds.prompts_of_round(lock.run_id, 0, 12, 12)))
        for lock in (plain, other)
    ]
    assert streams[0][0] != streams[1][0] and streams[0][1] != streams[1][1], "other noise, other prompts"


LOCK = json.loads(small_lock().to_bytes())


def packed(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize("name", sorted(LOCK))
def test_lock_fields_are_all_needed_and_typed(name: str) -> None:
    with pytest.raises(LockError, match=name):
        lock_from_bytes(packed({k: v for k, v in LOCK.items() if k != name}))
    legal = {"reward_low": [-1.5], "task_options": [{"x": []}]}.get(name, [])
    for wrong in [value for value in ({"x": []}, [None], -1.5, "\n") if value not in legal]:
        with pytest.raises(LockError, match=name):
            lock_from_bytes(packed(LOCK | {name: wrong}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"unknown": 1}, '"unknown" is unknown'),
        ({"law": 2}, "knows law 1 only"),
        ({"members": 1}, "members = 1"),
        ({"members": 5, "mirrored": True}, "members = 5 must be even"),
        ({"members": 4.0}, "members = 4.0"),
        ({"sigma": [0.001]}, "sigma"),
        ({"sigma": []}, "sigma"),
        ({"alpha": [0.0]}, "alpha must be above 0"),
        ({"alpha": [1]}, "canonical"),
        ({"reward_low": 2.0}, "reward_low must be below"),
        ({"reward_high": 1e300}, "reward_high"),
        ({"per_round": 13}, "per_round = 13"),
        ({"chunk": 13}, "chunk = 13"),
        ({"chunk": 0}, "chunk = 0"),
        ({"digest": 2**64}, "digest"),
        ({"base": HEX.upper()}, "base"),
        ({"manifest": []}, "manifest"),
        ({"manifest": [["b", [1], "F32", True], ["a", [1], "F32", True]]}, "ascending"),
        ({"manifest": [["a", [1], "F32", True], ["a", [1], "F32", True]]}, "ascending"),
        ({"manifest": [["a", [1], "F32", False]]}, "no tensor is trained"),
        ({"manifest": [["a", [-1], "F32", True]]}, "manifest"),
        ({"manifest": [["a", [1], "F32"]]}, "manifest"),
        ({"parent": {"run": HEX}}, "parent"),
        ({"packages": {"a": 1}}, "packages"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 1.0}, "seed = 1.0"),
        ({"seed": 0}, "canonical"),
    ],
)  # fmt: skip
def test_lock_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LockError) as caught:
        lock_from_bytes(packed(LOCK | changes))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"3",
        b"\xff",
        b"[" * 100000,
        b'{"law":1}',
        b'{"law":' + b"9" * 5000 + b"}",
        bytes(2**23),
    ],
    ids=range(9),
)
def test_no_lock(data: bytes) -> None:
    with pytest.raises(LockError):
        lock_from_bytes(data)


def test_not_canonical() -> None:
    data = small_lock().to_bytes()
    for other in (
        json.dumps(LOCK, sort_keys=True).encode(),
        data.replace(b'"alpha":[0.01]', b'"alpha":[0.010]'),
        data.replace(b'"clip":0.0', b'"clip":-0.0'),
        data.replace(b'"clip":0.0', b'"clip":0.0,"clip":0.0'),
        b" " + data,
    ):
        assert other != data
        with pytest.raises(LockError, match="canonical"):
            lock_from_bytes(other)
    with pytest.raises(LockError, match="written down"):
        small_lock(alpha=(math.nan,)).to_bytes()
    with pytest.raises(LockError, match="written down"):
        small_lock(model="\ud800").to_bytes()


def test_schedules_repeat_their_last_value() -> None:
    lock = small_lock(sigma=(0.5, 0.25), alpha=(3.0, 2.0, 1.0))
    assert [lock.sigma_at(r) for r in (0, 1, 2, 100)] == [0.5, 0.25, 0.25, 0.25]
    assert [lock.alpha_at(r) for r in (0, 1, 2, 100)] == [3.0, 2.0, 1.0, 1.0]


def test_chunks() -> None:
    lock = small_lock(per_round=11, chunk=3, heldout_prompts=7)
    assert lock.chunks == ((0, 3), (3, 3), (6, 3), (9, 2))
    assert lock.heldout_chunks == ((0, 3), (3, 3), (6, 1))
    assert (lock.chunk_count(Kind.MEMBER), lock.chunk_count(Kind.PROBE)) == (4, 3)
    assert (lock.chunk_size(Kind.MEMBER, 3), lock.chunk_size(Kind.PROBE, 2)) == (2, 1)
    assert small_lock(heldout_prompts=0).heldout_chunks == ()
    assert resolve_slice(0, 0, 100) == (100, 25)
    assert resolve_slice(3, 0, 100) == (3, 1)
    assert resolve_slice(10, 4, 100) == (10, 4)
    for values, says in (((101, 0, 100), "only 100 training prompts"), ((0, 101, 100), "only 100 prompts")):
        with pytest.raises(LockError, match=says):
            resolve_slice(*values)


# ---------------------------------------------------------------- the command and the page


def test_plan_new_and_show(tmp_path: Path) -> None:
    runner = CliRunner()
    written = runner.invoke(plan_command, ["new", "--task", "countdown", "--model", "some/model"])
    assert written.exit_code == 0 and parse(written.output).task == "countdown"
    path = tmp_path / "plan.toml"
    path.write_text(written.output)
    shown = runner.invoke(plan_command, ["show", str(path)]).output
    assert re.search(r"run.es.sigma +0.0009994506836 \(rounded to bf16\)", shown)
    assert re.search(r"run.prompts.chunk +50\n", shown), "a quarter of 200"
    assert re.search(r"run.sampling.max_new_tokens +1024\n", shown)
    for key, value in tasks.resolve_options("countdown", {}).items():
        assert re.search(rf"run.options.{key} +{re.escape(planfile.render_value(value))}\n", shown), key
    assert json.loads(runner.invoke(plan_command, ["show", "--json", str(path)]).output)["members"] == 30
    path.write_text(PLAN)
    shown = runner.invoke(plan_command, ["show", str(path)]).output
    assert re.search(r"run.prompts.per_round +all of the task's\n", shown)
    assert re.search(r"run.prompts.chunk +a quarter of the round\n", shown)
    assert re.search(r"run.sampling.max_new_tokens +the task's own limit\n", shown)
    assert re.search(r"run.options.time_limit +2.5\n", shown) and re.search(r"run.es.clip +0.0\n", shown)
    path.write_text(PLAN.replace("time_limit", "time_limt"))
    failed = runner.invoke(plan_command, ["show", str(path)])
    assert isinstance(failed.exception, TaskError) and "no option 'time_limt'" in str(failed.exception)
    lock = small_lock(manifest=(TensorSpec("a", (3, 4), "F32", True), TensorSpec("b", (5,), "F32", False)))
    path.write_bytes(lock.to_bytes())
    shown = runner.invoke(plan_command, ["show", str(path)]).output
    assert lock.run_id.hex() in shown and "1 of 2 trained, 12 of 17 weights" in shown
    assert (
        runner.invoke(plan_command, ["show", "--json", str(path)]).output.strip() == lock.to_bytes().decode()
    )


def test_plan_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(planfile.PlanFileError, match="No such file"):
        planfile.read(tmp_path / "none.toml")
    path = tmp_path / "x"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(planfile.PlanFileError, match="neither a plan nor a lock"):
        planfile.read(path)
    path.write_bytes(small_lock().to_bytes())
    with pytest.raises(planfile.PlanFileError, match="a lock already"):
        planfile.read_plan(path)


def test_plan_lock_writes_what_can_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving itself is tested with the models; here a stand-in does it."""
    stand_in = types.ModuleType("esnode.locking")
    monkeypatch.setitem(sys.modules, "esnode.locking", stand_in)
    monkeypatch.setattr(esnode, "locking", stand_in, raising=False)
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    asked: list[Any] = []

    def resolve(plan: Plan, *, trusted: list[str], progress: Any, code: Any) -> tuple[Lock, bytes, None]:
        asked.append((plan, trusted))
        return small_lock(trusted=tuple(trusted), members=plan.members), b"data\n", None

    stand_in.resolve = resolve  # type: ignore[attr-defined]
    path, out, data = tmp_path / "plan.toml", tmp_path / "lock.json", tmp_path / "task.jsonl"
    path.write_text(PLAN)
    arguments = ["lock", str(path), "--out", str(out), "--data", str(data)]
    runner = CliRunner()
    done = runner.invoke(plan_command, arguments)
    lock = lock_from_bytes(out.read_bytes())
    assert done.exit_code == 0 and lock.run_id.hex() in done.output
    assert data.read_bytes() == b"data\n" and asked[0][0].members == lock.members == 32
    assert runner.invoke(plan_command, arguments).exit_code == 0, "the same bytes again are fine"
    out.write_bytes(b"{}")
    failed = runner.invoke(plan_command, arguments)
    assert isinstance(failed.exception, planfile.PlanFileError) and "something else" in str(failed.exception)


def test_plan_lock_without_the_node_extra(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    script = (
        "import sys\nfor name in ('torch', 'transformers', 'numba', 'safetensors', 'tokenizers'): "
        f"sys.modules[name] = None\nfrom esnode.cli.main import main\nmain(['plan', 'lock', {str(path)!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 1 and "pip install '.[node]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_page_lists_every_field() -> None:
    """docs/plan.md is written from the table the parser uses."""
    page = (ROOT / "docs" / "plan.md").read_text()
    for row in FIELDS:
        default = "required" if row.required else f"`{planfile.render_value(default_of(row))}`"
        assert f"| `{row.key}` | {row.rule.expects} | {default} | {row.meaning} |" in page, row.path
