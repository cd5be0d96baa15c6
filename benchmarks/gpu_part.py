"""A part of `gpu.py` in a process of its own, with an end in time: what it finds comes as lines of JSON, so
that a part that is ended, or runs out of memory, costs what it had not said yet. Called by `gpu.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
GRACE = 10.0  # seconds between asking a process to end and ending it


def say(**found: Any) -> None:
    """Of a part: hand this over now."""
    print(json.dumps(found), flush=True)


def reason(error: BaseException) -> str:
    """Why a row is missing, in a line: of what is nobody's fault in the words of `gpu.EXPECTED`."""
    words = str(error).splitlines()[0] if str(error) else "no reason given"
    if "out of memory" in str(error).lower():
        return "out of memory"
    return words if isinstance(error, TimeoutError) else f"{type(error).__name__}: {words}"


def run(module: str, arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """What the part said; with `failed` when it did not end well."""
    command = [sys.executable, "-m", module, *arguments]
    code, output = _ended(command, seconds, subprocess.PIPE)
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):  # cut off
                found |= json.loads(line)
    if code is None:
        return found | {"failed": f"ended after {seconds:.0f} s, the time it has"}
    return found if code == 0 else found | {"failed": found.get("failed", f"ended with code {code}")}


def tests(arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """Outcome of a pytest run, whose output goes to the terminal: counts, and the names of what failed."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "tests.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        code, _ = _ended(command, seconds, None)
        found = outcome(report, code not in (0, 1))
    if code is None:
        return found | {"ended": f"after {seconds:.0f} s, the time they have"}
    return found if code in (0, 1) else found | {"ended": f"pytest ended with code {code}"}


def outcome(report: Path, ended: bool) -> dict[str, Any]:
    """Counts and names of a JUnit file, if there is one. `ended`: amid a test, which it has last."""
    names, counts = [], {"passed": 0, "failed": 0, "skipped": 0}
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if ended and cases and not len(cases[-1]):
        cases.pop()
    for case in cases:
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        if kind == "failed":
            names.append(str(case.get("name")))
    return {**counts, "names": names}


def _ended(command: Sequence[str], seconds: float, output: int | None) -> tuple[int | None, str]:
    """Exit code, None for one that took too long, and what it wrote. All it started ends with it."""
    process = subprocess.Popen(command, stdout=output, text=True, cwd=ROOT, start_new_session=True)
    late = False
    try:
        said, _ = process.communicate(timeout=max(seconds - GRACE, 1))
    except subprocess.TimeoutExpired:
        late = True
        process.send_signal(signal.SIGINT)  # pytest writes its report then
        try:
            said, _ = process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            _kill(process)
            said, _ = process.communicate()
    finally:
        _kill(process)
    return None if late else process.returncode, said or ""


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
