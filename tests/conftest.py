"""For all tests: nothing they start outlives them, a run started in the background knows Ctrl-C, and of files
side by side those that take longest begin first.

A test run started in the background ignores Ctrl-C, and everything it starts would ignore it too.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import warden

LONGEST = (  # half of all the time; chaos is the longest of `make test-long`
    "chaos", "tiny_run", "join_run", "run", "sweep", "loopback", "netns", "peers", "fleet", "kernels",
    "moments", "hard_cases", "pool", "attacks", "kernels_volume", "triton", "late_join", "workshop",
    "full_disk", "shortage",
)  # fmt: skip

warden.watch()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first: begun last, one would be waited for alone (with `--no-loadscope-reorder`)."""
    places = {Path(__file__).with_name(f"test_{name}.py"): place for place, name in enumerate(LONGEST)}
    for path in places:
        assert path.exists(), f"LONGEST names {path.name}, which is not there"
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=lambda item: places.get(item.path, len(places)))
