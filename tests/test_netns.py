"""Runs across network namespaces: slow, lossy and cut links, IPv6, firewalls. Skipped where not allowed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import relay
from esnode import nodeoptions
from protocol import invite, ledger
from protocol.lock import Lock
from tests import chaos, netns, toy_engine
from tests.donors import Exchange
from tests.netns import PORT, Site
from tests.runs import make_folder, wait_for

pytestmark = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "-")

START = 40.0  # for processes to start on a busy machine
RETURN_SECONDS = 5.0  # after a partition heals, until the node works again


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Two nodes and a coordinator; the parameter is the rate of the cables."""
    with netns.Net(("n1", "n2"), getattr(request, "param", None)) as net, Site(tmp_path, net) as site:
        yield site


def check(site: Site) -> None:
    """The ledger is whole and that of a run without faults."""
    path = site.folder / "run.ledger"
    lock = ledger.read(path).chain.lock
    assert chaos.differences(path, toy_engine.ToyWorkshop(lock, "truth", 0.0)) == []


@pytest.mark.parametrize("site", ["10mbit"], indirect=True)
def test_far_slow_and_lossy(site: Site) -> None:
    """200 ms round trip, 10 Mbit/s, 5% of packets lost each way, and a kill -9 in the middle."""
    make_folder(site.folder, rounds=4, task_options={"seconds": 0.2})
    addresses = {}
    for name in ("n1", "n2"):
        site.net.lose(name, 0.05)
        addresses[name] = site.net.delayed(name, PORT, 0.1)
    site.serve()
    for name, address in addresses.items():
        site.join(name, address)
    wait_for(lambda: site.status().get("round", 0) >= 1, START)
    site.kill("n1")
    site.join("n1", addresses["n1"])
    site.wait_end(90)
    check(site)


@pytest.mark.parametrize("seconds", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_a_partition_heals(site: Site, seconds: float) -> None:
    """The other node works on meanwhile; the one cut off is back within seconds and nothing differs."""
    make_folder(site.folder, rounds=10**6, task_options={"seconds": 0.1})
    site.serve()
    for name in ("n1", "n2"):
        site.join(name)
    wait_for(lambda: {site.node_state(name).get("state") for name in ("n1", "n2")} == {"ready"}, START)
    site.net.cut("n1")
    before = site.status()["round"]
    time.sleep(seconds)
    assert site.status()["round"] > before + 2
    assert site.node_state("n1")["state"] != "ready"
    site.net.heal("n1")
    healed = time.monotonic()
    wait_for(lambda: site.node_state("n1")["state"] == "ready" and site.node_state("n1")["units"])
    back = time.monotonic() - healed
    print(f"work again {back:.1f} s after a partition of {seconds} s")
    assert back <= RETURN_SECONDS
    plan = site.folder / "plan.toml"
    plan.write_text(plan.read_text().replace("1000000", str(site.status()["round"] + 1)))
    site.wait_end(30)
    check(site)


def test_a_node_that_is_not_heard_for_a_while_is_back(site: Site) -> None:
    """It hears and is not heard: what it said on the old connection arrives after it is back on a new one."""
    make_folder(site.folder, rounds=10**6, task_options={"seconds": 0.1})
    site.serve()
    node = site.join("n1")
    site.join("n2")
    wait_for(lambda: {site.node_state(name).get("state") for name in ("n1", "n2")} == {"ready"}, START)
    site.net.mute("n1")
    time.sleep(20)
    site.net.mute("n1", False)
    wait_for(lambda: node.poll() is not None or site.node_state("n1")["state"] == "ready")
    time.sleep(20)  # the kernel tries again after ever longer pauses
    assert node.poll() is None, site.words("n1")
    assert site.node_state("n1")["state"] == "ready"
    site.end_after(2)
    site.wait_end(30)
    check(site)


def test_a_node_that_gets_another_address_works_on_and_tells_peers(site: Site) -> None:
    make_folder(site.folder, rounds=10**6, task_options={"seconds": 0.1})
    site.serve()
    for name in ("n1", "n2"):
        site.join(name, "", "--peer-port", "0")
    wait_for(lambda: {site.node_state(name).get("state") for name in ("n1", "n2")} == {"ready"}, START)
    site.net.move("n1")
    wait_for(lambda: "peers may dial tcp://10.77.1.3:" in site.words("n1"), START)
    wait_for(lambda: site.words("n1").count("connected to") == 2, START)
    wait_for(lambda: site.node_state("n1")["state"] == "ready" and site.node_state("n1")["units"])
    site.end_after(2)
    site.wait_end(30)
    check(site)


def test_an_isolated_coordinator_waits_and_goes_on(site: Site) -> None:
    make_folder(site.folder, rounds=40, task_options={"seconds": 0.1})
    site.serve()
    for name in ("n1", "n2"):
        site.join(name)
    wait_for(lambda: site.status().get("round", 0) >= 1, START)
    site.net.cut(netns.COORDINATOR)
    wait_for(lambda: site.status()["state"] == "paused")
    stood = site.status()["round"]
    site.net.heal(netns.COORDINATOR)
    healed = time.monotonic()
    wait_for(lambda: site.status()["round"] > stood)
    assert time.monotonic() - healed <= RETURN_SECONDS
    site.wait_end(60)
    check(site)


def test_ipv6(site: Site) -> None:
    make_folder(site.folder, rounds=3)
    site.v6 = True
    site.serve()
    site.join("n1")
    wait_for(lambda: "connected to tcp://[fd77:" in site.words("n1"))
    site.join("n2")
    site.wait_end(30)
    check(site)


def test_a_name_with_an_address_that_gets_nowhere(site: Site) -> None:
    """Nothing listens at the name's IPv6 address, as with a coordinator that binds 0.0.0.0."""
    make_folder(site.folder, rounds=3)
    site.net.hosts("n1", "fd77:1::1 coordinator.test\n10.77.1.1 coordinator.test\n")
    site.serve()
    site.join("n1", f"tcp://coordinator.test:{PORT}")
    wait_for(lambda: "connected to tcp://coordinator.test:" in site.words("n1"), START, site.words("n1"))
    site.join("n2")
    site.wait_end(30)
    check(site)


def test_a_firewall_that_drops_packets(site: Site) -> None:
    """One sentence within ten seconds, whatever silence is on the line; the other node is not disturbed."""
    make_folder(site.folder, rounds=10**6, task_options={"seconds": 0.05})
    site.serve()
    site.join("n2")
    site.net.refuse_silently("n1", PORT)
    node = site.join("n1", "", "--wait", "8")
    wait_for(lambda: "connecting" in site.words("n1"))
    began = time.monotonic()
    assert node.wait(START) == 1
    assert time.monotonic() - began < 12
    assert site.words("n1").splitlines()[-1].startswith("esnode: the coordinator cannot be reached")
    assert "tcp://10.77.1.1:7700: no answer at all" in site.words("n1")
    reached = site.status()["round"]
    wait_for(lambda: site.status()["round"] > reached)


def test_many_donors_behind_a_relay_and_a_slow_line(tmp_path: Path) -> None:
    """The line carries everything about once, and nobody is given up because its turn comes late."""
    names = "abcdefgh"
    with (
        netns.Net((*names, "j"), "3mbit") as net,
        Exchange(tmp_path, names + "j", size=6_000_000) as exchange,
    ):
        exchange.keep(*names)
        exchange.prefix = net.command(netns.COORDINATOR)
        exchange.start_relay("--bind", f"tcp://0.0.0.0:{PORT}")
        assert exchange.relay is not None
        for name in (*names, "j"):
            exchange.prefix = net.command(name)
            exchange.relay["address"] = net.address(name, PORT)
            if name != "j":
                exchange.donor(name)
                exchange.children[name].tell(
                    {"relay": exchange.relay["address"], "key": exchange.relay["key"]}
                )
        exchange.addresses = {}
        time.sleep(3)  # until all have greeted the relay
        child = exchange.receive(names)
        assert exchange.wait(child) == "" and exchange.equal()
        assert len([way for _, way, _ in child.said("reached") if way == "relay"]) == len(names)
        time.sleep(1.2)
        shown = relay.read_status(tmp_path)
        assert shown is not None and not any(meter["dropped"] for meter in shown["peers"].values()), shown
        got = shown["peers"][exchange.keys["j"].hex()]["got"]
        print(f"{got / 1e6:.1f} MB for 6 MB: {child.said('fetched')[0][2]}")
        assert got < 7_000_000


def invite_to(site: Site, name: str, lock: Lock, port: int = PORT) -> tuple[str, ...]:
    """Words of `esnode join` with an invite that names both addresses of the coordinator."""
    addresses = (site.net.address(name, port), site.net.address(name, port, v6=True))
    made = invite.Invite(addresses, nodeoptions.pinned_key(site.folder), lock.run_id, b"s" * 32, 1)
    return ("join", invite.encode(made), "--name", name)


def test_join_meets_a_firewall_and_a_closed_port(site: Site) -> None:
    """One sentence in time that tells the two apart; the invite's address is the only thing tried."""
    lock = make_folder(site.folder, rounds=10**6)
    site.serve()
    wait_for(site.status, START)
    site.net.refuse_silently("n1", PORT)
    data = {"ESNODE_DATA": str(site.folder / "joined"), "NETNS": site.net.space("n1")}
    for port, words in ((PORT, "no answer at all"), (PORT + 1, "")):
        began = time.monotonic()
        process = site.start("n1", "esnode.cli.main", *invite_to(site, "n1", lock, port), **data)
        assert process.wait(30) == 1
        took = time.monotonic() - began
        line = site.words("n1").splitlines()[-1]
        print(f"{took:.1f} s: {line}")
        assert line.startswith("esnode: ") and words in line and took < 15  # ten, and Python's start
