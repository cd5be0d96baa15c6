"""The port for Prometheus: what it says, against the ledger of a real run; off unless asked for."""

from __future__ import annotations

import contextlib
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from coordinator import machine, metrics
from coordinator.scrape import Scrape, ScrapeError
from tests.desk import Desk
from tests.runs import Processes, make_folder, wait_for

LINE = re.compile(r'^(esnode_[a-z_]+)(\{[a-z_]+="(?:[^"\\]|\\.)*"(?:,[a-z_]+="(?:[^"\\]|\\.)*")*\})? (\S+)$')


def samples(text: str) -> dict[str, float]:
    """Name and labels to value; every line must be right, and every metric announced with its type first."""
    found: dict[str, float] = {}
    typed: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in typed and kind in ("gauge", "counter", "summary")
            typed.add(name)
        elif not line.startswith("# HELP "):
            match = LINE.match(line)
            assert match, line
            assert match[1] in typed or match[1].rpartition("_")[0] in typed, line
            found[match[1] + (match[2] or "")] = float(match[3])
    return found


def page(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def of_desk(desk: Desk, **wire: Any) -> dict[str, float]:
    counts = {"bytes": {"in": {}, "out": {}}, "dropped": {}, "refused": {}} | wire
    return samples(
        metrics.render(machine.status(desk.state) | {"wire": counts, "uptime": 1.5, "closed": (2, 0.75)})
    )


def test_the_picture_of_a_round_in_numbers() -> None:
    desk = Desk(members=4)
    desk.join("a")
    desk.work("a", limit=3)
    found = of_desk(desk, refused={"x": {'with "quotes"\n': 2}, "y": {'with "quotes"\n': 3}})
    assert found["esnode_round"] == 0 and found["esnode_members"] == 4 and found["esnode_members_in"] >= 2
    assert found['esnode_nodes{standing="ready"}'] == 1 and found['esnode_nodes{standing="suspect"}'] == 0
    assert found['esnode_results_total{verdict="accepted"}'] == 3
    assert found["esnode_round_seconds_sum"] == 0.75 and found["esnode_round_seconds_count"] == 2
    assert found['esnode_refused_total{reason="with \\"quotes\\"\\n"}'] == 5


def test_served_by_the_real_coordinator(tmp_path: Path) -> None:
    make_folder(tmp_path, ("n1",), rounds=10**6, task_options={"seconds": 0.02})
    with Processes(tmp_path) as processes:
        processes.coordinator("--metrics", "0")
        processes.node("n1")
        address = wait_for(lambda: re.search(r"http://(127\.0\.0\.1:\d+)/", processes.words("coordinator")))[
            1
        ]
        wait_for(lambda: processes.status().get("round", 0) >= 2)
        before, text, after = processes.status(), page(address), processes.status()
        found = samples(text)
        assert before["round"] <= found["esnode_round"] <= after["round"] and found["esnode_term"] == 1
        assert found["esnode_round_seconds_count"] == found["esnode_round"]
        assert found['esnode_wire_bytes_total{direction="in",message="Result"}'] > 100
        assert f'esnode_info{{run="{before["run"][:16]}",state="running"}} 1' in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            page(address, "/journal")
        host, port = address.split(":")
        with socket.create_connection((host, int(port))):  # says nothing; rounds go on, scrapes soon again
            reached = processes.status()["round"]
            wait_for(lambda: processes.status()["round"] > reached)
            began = time.monotonic()
            assert samples(page(address))["esnode_round"] >= reached
            assert time.monotonic() - began < 8
        processes.running["coordinator"].terminate()
        assert processes.running["coordinator"].wait(10) == 0


def test_a_flood_stops_neither_the_run_nor_the_port(tmp_path: Path) -> None:
    """Connections that say nothing, that trickle, that talk garbage, that never read their answer."""
    make_folder(tmp_path, ("n1",), rounds=10**6, task_options={"seconds": 0.02})
    with Processes(tmp_path) as processes, contextlib.ExitStack() as flood:
        coordinator = processes.coordinator("--metrics", "0")
        processes.node("n1")
        pattern = r"http://(127\.0\.0\.1:\d+)/"
        address = wait_for(lambda: re.search(pattern, processes.words("coordinator")))[1]
        host, port = address.split(":")
        wait_for(lambda: processes.status().get("round", 0) >= 1)

        def connect(*words: bytes) -> socket.socket:
            one = flood.enter_context(socket.create_connection((host, int(port)), timeout=5))
            with contextlib.suppress(OSError):  # the port may have hung up on it already
                for word in words:
                    one.sendall(word)
            return one

        reached = processes.status()["round"]
        for k in range(60):
            connect()
            connect(b"G")
            connect(bytes(range(256)) * 300)
            connect(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 10_000 * (k % 9))
            for _ in range(3):
                connect(b"GET /metrics HTTP/1.0\r\n\r\n")
        trickle = connect(b"GET /")
        began = time.monotonic()
        assert samples(page(address))["esnode_round"] >= reached
        assert time.monotonic() - began < 8, "tricklers and sleepers wait, not those who ask"
        with pytest.raises(OSError):  # hung up on, though it says a byte now and then
            for _ in range(100):
                trickle.sendall(b"m")
                time.sleep(0.2)
        now = processes.status()["round"]
        wait_for(lambda: processes.status()["round"] > now + 2)
        status = Path(f"/proc/{coordinator.pid}/status").read_text()
        assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) < 150 << 10  # type: ignore[index]
        assert int(re.search(r"Threads:\s+(\d+)", status)[1]) < 40  # type: ignore[index]
        assert "Traceback" not in processes.words("coordinator")


def test_a_port_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address in (f"127.0.0.1:{port}", str(port), "metrics", "127.0.0.1:99999"):
            with pytest.raises(ScrapeError, match=r"metrics"):
                Scrape(address)
