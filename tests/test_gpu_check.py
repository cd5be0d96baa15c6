"""`make gpu-check` where no GPU is: what it cuts, what a failure costs, how long it takes, what it writes."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks import gpu, gpu_docs, gpu_kernels, gpu_limits, gpu_part, gpu_round
from esnode import memory
from tests import slow_law  # noqa: F401 - where no GPU is, Triton's kernels are interpreted from then on

CPU = torch.device("cpu")
GB = 10**9


# ---------------------------------------------------------------- what the card allows


@pytest.mark.parametrize(
    ("free", "carried"), [(139, 7_000_000_000), (40, 5_333_333_333), (16, 2_133_333_333)]
)
def test_weights_are_cut_to_what_the_memory_carries(
    free: int, carried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: free * GB)
    assert gpu_limits.carried(torch.device("cuda"), 7 * GB, gpu_kernels.RESIDENT) == carried


def test_the_instruction_floor_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """132 multiprocessors at 1.98 GHz: 7e9 weights, 30 members in 0.17 s at best, one member in 10 ms."""
    told = {"multiprocessor_count": 132, "sm_clock_rate": 1_980_000}
    active = SimpleNamespace(utils=SimpleNamespace(get_device_properties=lambda index: told))
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    rate = gpu_limits.issued(torch.device("cuda:0"))
    update = gpu_limits.instruction_floor("update", 210 * GB, rate)
    assert update["instruction_floor_seconds"] == pytest.approx(0.1695, rel=0.01)
    assert gpu_limits.instruction_floor("perturb", 7 * GB, rate)["instruction_floor_seconds"] < 0.0106
    assert gpu_limits.instruction_floor("digest", 7 * GB, rate) == {}
    monkeypatch.setattr(torch.version, "cuda", None)  # AMD's: other instructions
    assert gpu_limits.instruction_floor("update", 1, gpu_limits.issued(torch.device("cuda:0"))) == {}
    assert gpu_limits.issued(CPU) is None


@pytest.mark.parametrize("shape", gpu_round.SHAPES)
def test_a_shape_has_the_weights_it_is_planned_with(shape: str) -> None:
    config = Qwen2Config(max_position_embeddings=1024, **gpu_round.SHAPES[shape])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert gpu_round.weights(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_a_shape_too_large_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: (24 if device == "cuda" else 500) * GB)
    gpu_round.main("cuda", "7b", "transformers", "60")
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[0] == {"engine": "transformers", "shape": "7b"}
    assert said[1] == {"failed": "left out: 45.7 GB of GPU memory needed, 19.2 GB can be used"}


# ---------------------------------------------------------------- what a failure costs


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in capsys.readouterr().out.splitlines():
        found |= json.loads(line)
    return found


def test_a_row_out_of_memory_costs_that_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")

    monkeypatch.setattr(gpu_kernels.Ours, "restore", full)
    monkeypatch.setattr(gpu_kernels.Peer, "perturb", full)
    gpu_kernels.resident(CPU, 3000, 2, gpu_kernels.Clock(CPU, 1, time.monotonic() + 60, 10))
    found = rows(capsys)
    assert found["restore"] == {"failed": "out of memory"}
    assert found["perturb"]["peer_failed"] == "out of memory" and found["perturb"]["seconds"] > 0
    assert found["update"]["ratio"] > 0 and found["digest"]["seconds_per_1e9"] > 0


def test_rows_for_which_no_time_is_left_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = gpu_kernels.Clock(CPU, 1, time.monotonic() + 60, 10)
    copied = gpu_kernels.copy_rate(CPU, clock)
    late = gpu_kernels.Clock(CPU, 1, time.monotonic() - 1, 10)
    with pytest.raises(TimeoutError, match="no time left"):
        gpu_kernels.copy_rate(CPU, late)
    assert copied > 0
    gpu_kernels.resident(CPU, 3000, 2, gpu_kernels.Clock(CPU, 1, time.monotonic() + 60, 10))
    assert list(gpu.failures(rows(capsys))) == []
    monkeypatch.setattr(gpu_kernels, "copy_rate", lambda device, clock: copied)
    gpu_kernels.resident(CPU, 3000, 2, late)
    found = rows(capsys)
    assert [found[name] for name in gpu.OPERATIONS] == [{"failed": "no time left for it"}] * 4
    assert list(gpu.failures(found)) == [], "a slow card is nobody's fault"
    wrong = {"digest": {"failed": gpu_part.reason(ValueError("no time left"))}}
    assert list(gpu.failures(wrong)) == ["digest: ValueError: no time left"]


def test_a_clock_repeats_less_where_a_call_takes_long() -> None:
    calls = []
    clock = gpu_kernels.Clock(CPU, 50, time.monotonic() + 0.4, 2)
    assert clock.seconds(lambda: calls.append(time.sleep(0.15))) >= 0.15
    assert len(calls) == 2, "one to warm up and one that counts: a row has half of the time"


PROGRAM = """
import json, sys, time
print(json.dumps({"row": 1}), flush=True)
if sys.argv[1] == "hang":
    time.sleep(60)
if sys.argv[1] == "die":
    sys.exit(3)
print("no json")
print(json.dumps({"other": 2}))
"""


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("end", {"row": 1, "other": 2}),
        ("die", {"row": 1, "failed": "ended with code 3"}),
        ("hang", {"row": 1, "failed": "ended after 4 s, the time it has"}),
    ],
)
def test_a_part_that_does_not_end_well_keeps_its_rows(
    how: str, found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_part.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_part, "GRACE", 1.0)
    began = time.monotonic()
    assert gpu_part.run("some_part", [how], 4) == found
    assert time.monotonic() - began < 20


def test_the_outcome_of_tests_is_kept_also_of_those_that_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(
        "import pytest, time\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_not_here(): pytest.skip('why')\n"
    )
    quiet = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(path)]
    found = gpu_part.tests(quiet, 100)
    assert found == {"passed": 1, "failed": 1, "skipped": 1, "names": ["test_bad"]}
    assert list(gpu.failures({"tests": found})) == ["1 tests failed: test_bad"]
    path.write_text("import time\ndef test_good(): pass\ndef test_long(): time.sleep(200)\n")
    late = gpu_part.tests(quiet, 20)
    assert late["passed"] == 1 and late["ended"] == "after 20 s, the time they have"
    assert list(gpu.failures({"tests": late}))[-1].startswith("the tests were not finished")


# ---------------------------------------------------------------- the whole of it


ROW = {"seconds": 0.01, "seconds_per_1e9": 0.002, "floor_seconds": 0.008}
KERNELS = {
    "device": "a card", "torch": "2", "triton": "3", "members": 30, "weights": 4 * GB,
    "weights_asked": 7 * GB, "free_bytes": 30 * GB,
    "perturb": {**ROW, "instruction_floor_seconds": 0.009}, "restore": ROW,
    "update": {"failed": "out of memory"}, "digest": ROW, "streamed": {"failed": "out of memory"},
}  # fmt: skip
PASSED = {"passed": 9, "failed": 0, "skipped": 0, "names": []}


def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tests: dict[str, Any], **more: Any
) -> tuple[Any, dict[str, Any]]:
    """A whole run with these results of its parts: what the command said, and its JSON."""

    def part(module: str, arguments: list[str], seconds: float) -> dict[str, Any]:
        if module == "benchmarks.gpu_kernels":
            return KERNELS | more
        return {"failed": "left out: too large"}

    monkeypatch.setattr(gpu_part, "run", part)
    monkeypatch.setattr(gpu_part, "tests", lambda arguments, seconds: tests)
    to = tmp_path / "gpu.json"
    result = CliRunner().invoke(gpu.main, ["--device", "cpu", "--tests", "--json", str(to)])
    return result, json.loads(to.read_text())


def test_rows_that_do_not_fit_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, found = check(tmp_path, monkeypatch, PASSED)
    assert result.exit_code == 0, result.output
    assert "tests: 9 passed, 0 failed, 0 skipped" in result.output
    assert "4 G weights (of 7 G, cut to what 30.0 GB free carry)" in result.output
    assert (
        "perturb  0.01 s, 0.002 s per 1e9 weights (memory floor 0.008 s, instruction floor 0.009 s)"
        in result.output
    )
    assert "update   out of memory" in result.output and "streamed: out of memory" in result.output
    assert "a round of the 7b shape on transformers: left out: too large" in result.output
    assert [row["engine"] for row in found["whole_rounds"]] == ["transformers"] * 3 + ["vllm"]
    assert found["tests"] == PASSED and found["update"] == {"failed": "out of memory"}


@pytest.mark.parametrize(
    ("tests", "more", "words"),
    [
        ({**PASSED, "failed": 1, "names": ["test_x"]}, {}, "1 tests failed: test_x"),
        ({**PASSED, "ended": "after 200 s, the time they have"}, {}, "the tests were not finished"),
        (PASSED, {"digest": {"failed": "ValueError: wrong"}}, "digest: ValueError: wrong"),
        (PASSED, {"failed": "ended with code -11"}, "the kernels: ended with code -11"),
    ],
)
def test_what_went_wrong_is_the_exit_code_and_costs_no_row(
    tests: dict[str, Any], more: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, found = check(tmp_path, monkeypatch, tests, **more)
    assert result.exit_code == 1 and words in result.stderr
    assert found["tests"] == tests and found["perturb"]["seconds"] == 0.01 and len(found["whole_rounds"]) == 4


def test_its_parts_have_less_than_eight_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.TOTAL <= 8 * 60 - gpu_part.GRACE
    assert sum(seconds for part, seconds in gpu.SECONDS.items() if part != "tiny") <= gpu.TOTAL
    asked: list[float] = []
    monkeypatch.setattr(gpu_part, "run", lambda module, arguments, seconds: asked.append(seconds) or {})
    late = gpu.Check("cpu", None)
    late._end = time.monotonic() + gpu.LEAST + 5
    late.whole_round("7b", "transformers")
    late._end = time.monotonic() + gpu.LEAST - 5
    late.whole_round("0.5b", "vllm")
    assert len(asked) == 1 and asked[0] <= gpu.LEAST + 5, "what is left, and nothing where that is little"
    assert late.found["whole_rounds"][1]["failed"] == "no time left for it"


def test_the_target_runs_both_in_one_command() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "gpu-check"], cwd=gpu_part.ROOT, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if "make" not in line]
    assert line.split(maxsplit=1)[1].strip() == "benchmarks/gpu.py --tests --json gpu.json"


def test_the_page_says_what_is_missing_and_which_floor_is_which() -> None:
    whole = [{"shape": "7b", "engine": "transformers", "failed": "left out: too large"}]
    text = gpu_docs.table([KERNELS | {"tests": PASSED, "whole_rounds": whole}])
    assert "| perturb, float32 master to bf16 | 10 ms, memory alone 8 ms, instructions alone 9 ms |" in text
    assert "| update of all members | out of memory |" in text
    assert "| a whole round of the 7b shape, transformers | left out: too large |" in text
    assert "| a whole round of the 0.5b shape, vllm | not measured |" in text
    assert "| tests on the GPU | 9 passed, 0 failed, 0 skipped |" in text
