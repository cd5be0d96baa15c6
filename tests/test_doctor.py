"""`esnode doctor`: the report, the probe and what malformed probes get."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from esnode import doctor as examination
from esnode.cli.doctor import doctor
from protocol import noise

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def small_speeds(monkeypatch):
    monkeypatch.setattr(examination, "_SIZES", {"reference": 1 << 12, "cpu": 1 << 14})


def run(*arguments: str):
    return CliRunner().invoke(doctor, list(arguments))


@pytest.mark.parametrize("kernel", [[], ["--kernel", "reference"], ["--kernel", "cpu"]])
def test_probe_prints_the_law(kernel):
    outcome = run("--probe", "0x0123456789abcdef:7:1000:8", *kernel)
    assert outcome.exit_code == 0
    assert outcome.output.split("\n") == [
        *("-12435", "-1527", "4809", "5503", "7049", "-14031", "11547", "6717"),
        "",
    ]


def test_probe_of_the_last_element_and_of_several_parts(monkeypatch):
    last = noise.MAX_INDEX - 1
    assert run("--probe", f"0xFFFFFFFFFFFFFFFF:0xffffffff:{last}:1").output == "2181\n"
    monkeypatch.setattr(examination, "_PROBE_CHUNK", 10)
    values = run("--probe", "3:4:5:25").output.split()
    assert [int(v) for v in values] == noise.integers(3, 4, 5, 25).tolist()


def test_probe_as_json():
    told = json.loads(run("--probe", "3:4:5:6", "--json").output)
    assert told["m"] == noise.integers(3, 4, 5, 6).tolist()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected SEED:TENSOR:START:COUNT"),
        ("1:2:3", "expected SEED:TENSOR:START:COUNT"),
        ("1:2:3:4:5", "expected SEED:TENSOR:START:COUNT"),
        ("1:2:3:x", "COUNT 'x' is not"),
        ("-1:2:3:4", "SEED '-1' is not"),
        ("1: 2:3:4", "TENSOR ' 2' is not"),
        ("1:2:0x:4", "START '0x' is not"),
        ("1_0:2:3:4", "SEED '1_0' is not"),
        ("1:2:3:0", "COUNT 0 must be at least 1"),
        ("1:2:3:10000001", "COUNT 10000001 is more than 10000000: ask for less"),
        (f"{2**64}:2:3:4", "not below 2^64"),
        (f"1:{2**32}:3:4", "not below 2^32"),
        (f"1:2:{2**62}:4", "not below 2^62"),
        (f"1:2:{2**62 - 1}:2", "below index 2^62"),
        ("9" * 5000 + ":2:3:4", "SEED"),
    ],
)
def test_malformed_probes(text, complaint):
    with pytest.raises(examination.BadProbe) as refusal:
        examination.parse_probe(text)
    message = str(refusal.value)
    assert complaint in message and "\n" not in message
    assert refusal.value.exit_code == 2


def test_the_command_exits_with_2_and_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "esnode.cli.main", "doctor", "--probe", "1:2:three:4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "START 'three'" in done.stderr


def test_json_says_what_this_machine_can_do():
    outcome = run("--json")
    report = json.loads(outcome.output)
    assert outcome.exit_code == 0 and report["ready"] and report["law"] == 1
    usable = {name: kernel for name, kernel in report["kernels"].items() if kernel["usable"]}
    assert {"cpu", "reference"} <= set(usable)
    digests = {kernel["selftest_digest"] for kernel in usable.values()}
    assert len(digests) == 1
    for kernel in usable.values():
        for speeds in kernel["speeds"].values():
            assert set(speeds) == {"perturb", "restore", "update_per_member"}
            assert all(rate > 0 for rate in speeds.values())


def test_report_as_tables():
    outcome = run("--kernel", "reference")
    assert outcome.exit_code == 0
    assert "reference" in outcome.output and "Ready:" in outcome.output


def test_a_failing_kernel_is_reported_with_exit_code_1(monkeypatch):
    import esnode.kernels as registry

    def fails(kernels, device="cpu"):
        raise registry.SelftestFailed("vector values[0] differs")

    monkeypatch.setattr(registry, "selftest", fails)
    outcome = run("--kernel", "cpu", "--json")
    report = json.loads(outcome.output)
    assert outcome.exit_code == 1 and not report["ready"]
    assert "values[0]" in report["kernels"]["cpu"]["selftest"]


def test_without_torch_a_machine_can_still_coordinate(monkeypatch):
    find = examination.util.find_spec
    version = examination._version
    monkeypatch.setattr(examination.util, "find_spec", lambda n: None if n == "torch" else find(n))
    monkeypatch.setattr(examination, "_version", lambda p: None if p == "torch" else version(p))
    outcome = run()
    assert outcome.exit_code == 1 and "coordinate" in outcome.output
    assert "pip install '.[node]'" in outcome.output


def test_the_benchmark_reports_its_ratios():
    done = subprocess.run(
        [sys.executable, "benchmarks/noise.py", "--quick", "--members", "2", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for threads in ("1", "2"):
        ratios = found["threads"][threads]
        assert ratios["perturb_ratio"] > 0 and ratios["update_ratio"] > 0
