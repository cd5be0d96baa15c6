"""For all tests: nothing they start outlives them, a run started in the background knows Ctrl-C, and of files
side by side those that take longest begin first.

A test run started in the background ignores Ctrl-C, and everything it starts would ignore it too.
"""

from __future__ import annotations

import signal

import pytest

from tests import warden

LONGEST = (
    "test_chaos",  # of `make test-long`
    "test_tiny_run", "test_run", "test_sweep", "test_join_run", "test_loopback", "test_netns", "test_kernels",
)  # fmt: skip

warden.watch()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first: begun last, one would be waited for alone (with `--no-loadscope-reorder`)."""
    if hasattr(config, "workerinput"):  # one of several processes
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
