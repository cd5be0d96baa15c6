"""Network namespaces as a small internet: one for the coordinator, one per node, a cable between each pair.

Rate by `tc tbf`, loss and partitions by iptables; delay by `relay.py`, since the kernel may lack netem. All
interfaces are born inside the namespaces, so that deleting those leaves nothing behind. Their names carry the
process id: what a killed test left is removed by the next one.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.runs import ROOT, Processes, wait_for

PREFIX = "esnode"
NAMES = Path("/etc/netns")  # where `ip netns exec` looks for a namespace's own /etc
TOOLS = ("ip", "tc", "iptables", "ip6tables")
COORDINATOR = "coordinator"
PORT = 7700


@functools.cache
def why_not() -> str:
    """Why namespaces cannot be used here, in words; empty when they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    for words in (
        ["ip", "netns", "add", probe],
        ["ip", "netns", "exec", probe, "iptables", "-L"],
    ):
        done = _try(*words)
        if done.returncode:
            _try("ip", "netns", "del", probe)
            return f"network namespaces are not allowed here: {done.stderr.strip().splitlines()[-1]}"
    _try("ip", "netns", "del", probe)
    return ""


def sweep() -> None:
    """Remove the namespaces of test processes that are no more."""
    for line in _try("ip", "netns", "list").stdout.splitlines():
        name = line.split()[0]
        owner = name.split("-")[1] if name.startswith(f"{PREFIX}-") else ""
        if owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            _try("ip", "netns", "del", name)
            shutil.rmtree(NAMES / name, ignore_errors=True)


class Net:
    """The namespaces and cables of a coordinator and some nodes. A context manager that removes them.

    Node k reaches the coordinator at 10.77.k.1 and [fd77:k::1]; `rate` shapes both directions of each cable.
    """

    def __init__(self, nodes: Sequence[str], rate: str | None = None) -> None:
        sweep()
        self._nodes = tuple(nodes)
        self._cut: set[str] = set()
        self._relays: list[subprocess.Popen[bytes]] = []
        try:
            for name in (COORDINATOR, *nodes):
                _run("ip", "netns", "add", self.space(name))
                self.within(name, "ip", "link", "set", "lo", "up")
            for number, name in enumerate(nodes, 1):
                self._lay_cable(number, name, rate)
        except BaseException:
            self.close()
            raise

    def space(self, name: str) -> str:
        """The namespace's own name."""
        return f"{PREFIX}-{os.getpid()}-{name}"

    def command(self, name: str) -> tuple[str, ...]:
        """The words before a command that is to run in a namespace."""
        return ("ip", "netns", "exec", self.space(name))

    def within(self, name: str, *words: str) -> None:
        """Run a command in a namespace; CalledProcessError carries what it said."""
        _run(*self.command(name), *words)

    def address(self, name: str, port: int, v6: bool = False) -> str:
        """Where the coordinator's `port` is, seen from a node."""
        number = self._nodes.index(name) + 1
        return f"tcp://[fd77:{number}::1]:{port}" if v6 else f"tcp://10.77.{number}.1:{port}"

    def delayed(self, name: str, port: int, delay: float) -> str:
        """The same through a relay in the node's namespace that adds `delay` seconds each way."""
        near = f"tcp://127.0.0.1:{port}"
        command = [*self.command(name), sys.executable, "-m", "tests.relay"]
        options = ["--listen", near, "--target", self.address(name, port), "--delay", str(delay)]
        self._relays.append(subprocess.Popen([*command, *options], cwd=ROOT))
        knock = [*self.command(name), "ss", "-ltn"]
        wait_for(lambda: f":{port}" in _try(*knock).stdout)
        return near

    def lose(self, name: str, share: float) -> None:
        """From now on this share of packets is lost, in both directions of one node's cable."""
        chance = ("-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        self.within(name, "iptables", "-A", "INPUT", "!", "-i", "lo", *chance)
        self.within(COORDINATOR, "iptables", "-A", "INPUT", "-i", f"to-{name}", *chance)

    def cut(self, name: str) -> None:
        """Drop every packet between a node and the coordinator; of the coordinator: with all nodes."""
        if name not in self._cut:
            self._cut.add(name)
            self._drop("-I", name)

    def heal(self, name: str) -> None:
        """End what `cut` began."""
        if name in self._cut:
            self._cut.discard(name)
            self._drop("-D", name)

    def mute(self, name: str, mute: bool = True) -> None:
        """Packets of a node vanish; it gets those of others."""
        self.within(name, "iptables", "-I" if mute else "-D", "OUTPUT", "!", "-o", "lo", "-j", "DROP")

    def move(self, name: str) -> None:
        """Another IPv4 address for a node; connections from the old one get nowhere from now on."""
        number = self._nodes.index(name) + 1
        self.within(name, "ip", "addr", "del", f"10.77.{number}.2/24", "dev", "uplink")
        self.within(name, "ip", "addr", "add", f"10.77.{number}.3/24", "dev", "uplink")

    def hosts(self, name: str, lines: str) -> None:
        """What names mean in a namespace, as in /etc/hosts."""
        folder = NAMES / self.space(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(lines)

    def refuse_silently(self, name: str, port: int) -> None:
        """A firewall in front of the coordinator: packets of this node to `port` vanish."""
        for tool in ("iptables", "ip6tables"):
            self.within(name, tool, "-A", "OUTPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP")

    def close(self) -> None:
        """End the relays, delete the namespaces and with them all interfaces and rules."""
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for name in (COORDINATOR, *self._nodes):
            _try("ip", "netns", "del", self.space(name))
            shutil.rmtree(NAMES / self.space(name), ignore_errors=True)

    def __enter__(self) -> Net:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lay_cable(self, number: int, name: str, rate: str | None) -> None:
        ends = ((COORDINATOR, f"to-{name}", 1), (name, "uplink", 2))
        first, second = (["name", device, "netns", self.space(space)] for space, device, _ in ends)
        _run("ip", "link", "add", *first, "type", "veth", "peer", *second)
        for space, device, host in ends:
            self.within(space, "ip", "addr", "add", f"10.77.{number}.{host}/24", "dev", device)
            self.within(space, "ip", "addr", "add", f"fd77:{number}::{host}/64", "dev", device, "nodad")
            self.within(space, "ip", "link", "set", device, "up")
            if rate:
                shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "200ms")
                self.within(space, "tc", "qdisc", "add", "dev", device, *shape)

    def _drop(self, how: str, name: str) -> None:
        for tool in ("iptables", "ip6tables"):
            self.within(name, tool, how, "INPUT", "!", "-i", "lo", "-j", "DROP")
            self.within(name, tool, how, "OUTPUT", "!", "-o", "lo", "-j", "DROP")


class Site(Processes):
    """Processes spread over a `Net`: the coordinator listens on all its cables."""

    def __init__(self, folder: Path, net: Net) -> None:
        super().__init__(folder)
        self.net = net
        self.v6 = False

    def serve(self) -> Any:
        """The coordinator, in its namespace."""
        bind = f"tcp://[::]:{PORT}" if self.v6 else f"tcp://0.0.0.0:{PORT}"
        words = ("--data", str(self.folder), "--bind", bind)
        return self.start("coordinator", "coordinator.server", *words, NETNS=self.net.space(COORDINATOR))

    def join(self, name: str, address: str = "", *extra: str) -> Any:
        """A toy node, in its namespace."""
        words = ("--run", str(self.folder), "--name", name, "--threads", "1")
        where = ("--coordinator", address or self.net.address(name, PORT, self.v6))
        loader = ("--loader", "tests.toy_engine:load")
        return self.start(name, "esnode.daemon", *words, *where, *loader, *extra, NETNS=self.net.space(name))

    def node_state(self, name: str) -> dict[str, Any]:
        """A node in the coordinator's eyes, {} when unknown."""
        return next((node for node in self.status().get("nodes", []) if node["name"] == name), {})


def _try(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=False, capture_output=True, text=True)


def _run(*words: str) -> None:
    done = _try(*words)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
