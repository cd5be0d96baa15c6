"""What tests start does not outlive them, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import warden
from tests.runs import ROOT, alive, wait_for

# A test's process: loops in a session of their own, a forked worker that waits for work.
TESTS = """
import os, subprocess, sys, time
from tests import warden
print(warden.watch(), flush=True)
loop = "while true; do sleep 0.1; done"
subprocess.Popen(["bash", "-c", f"({loop}) & ({loop}) & {loop}"], start_new_session=True)
tests = os.getpid()
worker = os.fork()
if worker == 0:
    warden.leave_with_parent(tests)
    time.sleep(600)
print(worker, flush=True)
time.sleep(600)
"""


def carriers(mark: str) -> list[int]:
    return [process for process in warden.marked(mark) if alive(process)]


@pytest.fixture
def tests() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TESTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc shows an environment")
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_tests_that_are_killed(tests: subprocess.Popen[str], way: signal.Signals) -> None:
    assert tests.stdout is not None
    mark, worker = tests.stdout.readline().strip(), int(tests.stdout.readline())
    wait_for(lambda: len(carriers(mark)) >= 3)
    assert alive(worker)
    tests.send_signal(way)
    wait_for(lambda: not carriers(mark) and not alive(worker), what="for the loops to end")


def test_all_tests_have_a_warden() -> None:
    assert os.environ["ESNODE_TESTS"].partition("-")[0] == str(os.getpid())
