"""The coordinator's command line.

Shell. Called by `server.py`; `esnode coordinator serve` writes these words.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; on wrong usage it exits with code 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="coordinator.server", description="Serve the run of a folder to its nodes."
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="the run's folder (lock.json, plan.toml, coordinator/)"
    )
    parser.add_argument(
        "--bind", default="tcp://127.0.0.1:0", help="address to listen on; port 0 means any free port"
    )
    parser.add_argument(
        "--advertise", action="append", default=[], help="address that invites name (may be repeated)"
    )
    parser.add_argument("--invites", type=int, default=0, help="how many invites to print when listening")
    parser.add_argument("--plain", action="store_true", help="no encryption: tests on loopback only")
    parser.add_argument(
        "--relay",
        metavar="tcp://HOST:PORT",
        help="where nodes that cannot dial each other exchange snapshots; off: nowhere; "
        "default: any port of --bind's host, unless that is loopback",
    )
    parser.add_argument(
        "--relay-mbit", type=float, default=0.0, metavar="MBIT", help="limit of all it carries; 0: none"
    )
    parser.add_argument(
        "--recover-from",
        type=Path,
        metavar="LEDGER",
        help="be the successor of a coordinator that is lost, from this ledger file",
    )
    parser.add_argument("--force", action="store_true", help="a successor does not count who has answered")
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="serve numbers for Prometheus there")
    return parser.parse_args(arguments)
