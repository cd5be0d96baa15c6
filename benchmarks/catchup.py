"""How fast a late node catches up: replay against the kernels alone, snapshots against the link alone.

    python benchmarks/catchup.py [--replay] [--link] [--shaped MBIT] [--mb 300] [--rounds 60] [--json PATH]

`replay`: rounds of N=30 on a random model of `--parameters` weights, in the batches that the node's core asks
for, through the engine's replica (digests, live weights) against `Kernels.update` on the same masters.
`link`: a snapshot of `--mb` megabytes through the real donor and receiver processes on loopback, from one
donor and from three, against the same bytes between two bare CURVE sockets. `shaped`: the same with one donor
behind a veth pair shaped by `tc tbf` (needs root). `donating`: what serving costs a busy core beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout without installing

import zmq

from protocol.keys import curve_public
from protocol.peers import SLICE
from tests.donors import Exchange
from tests.runs import wait_for

SECRETS = (bytes(range(32)), bytes(range(1, 33)))


def bare_sender(port: int, count: int) -> None:
    """The same bytes with nothing around them: a CURVE ROUTER that answers one question with all slices."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, SECRETS[0])
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue waits instead of dropping
    router.setsockopt(zmq.SNDHWM, 64)
    router.bind(f"tcp://127.0.0.1:{port}")
    route, _ = router.recv_multipart()
    data = os.urandom(SLICE)
    for _ in range(count):
        router.send_multipart([route, data])
    router.recv_multipart()


def bare_rate(size: int) -> float:
    """Bytes per second of two bare sockets."""
    port, count = 41777, size // SLICE
    sender = multiprocessing.Process(target=bare_sender, args=(port, count))
    sender.start()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, curve_public(SECRETS[0]))
    dealer.setsockopt(zmq.CURVE_SECRETKEY, SECRETS[1])
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(SECRETS[1]))
    dealer.setsockopt(zmq.RCVHWM, 64)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"go")
    dealer.recv()
    began = time.monotonic()
    for _ in range(count - 1):
        dealer.recv()
    rate = (count - 1) * SLICE / (time.monotonic() - began)
    dealer.send(b"enough")
    sender.join()
    context.destroy(0)
    return rate


def fetched_rate(exchange: Exchange, donors: str) -> dict[str, Any]:
    """One transfer by the real processes: what the receiver says of it, and seconds from start to end."""
    began = time.monotonic()
    child = exchange.receive(donors)
    why = exchange.wait(child, 500)
    assert not why, why
    assert exchange.equal()
    words = child.said("fetched")[0][2]
    rate = float(words.split(" MB/s")[0].split(" ")[-1]) * 1e6
    for path in (exchange.node("j") / "checkpoint").iterdir():
        path.unlink()
    return {"rate": rate, "seconds_with_start": time.monotonic() - began, "words": words}


def link(size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Exchange(Path(folder), size=size) as exchange:
        exchange.keep("a", "b", "c")
        for name in "abc":
            exchange.donor(name)
        bare = bare_rate(size)
        one, three = fetched_rate(exchange, "a"), fetched_rate(exchange, "abc")
    return {"bytes": size, "bare": bare, "one": one, "three": three, "share": one["rate"] / bare}


def donating(size: int) -> dict[str, Any]:
    """A loop on one core, in turns with a donor on the same core stopped and serving as fast as it may."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    counts: dict[str, list[float]] = {"stopped": [], "serving": []}
    with tempfile.TemporaryDirectory() as folder, Exchange(Path(folder), size=size) as exchange:
        exchange.keep("a")
        donor = exchange.donor("a")
        receiver = exchange.receive("a")
        os.sched_setaffinity(donor.process.pid, {core})
        os.sched_setaffinity(receiver.process.pid, cores - {core} or {core})
        wait_for(lambda: receiver.said("fetching"), 60)
        os.sched_setaffinity(0, {core})
        while not receiver.said("fetched") and len(counts["serving"]) < 10:
            donor.process.send_signal(signal.SIGSTOP)
            counts["stopped"].append(_spins(0.5))
            donor.process.send_signal(signal.SIGCONT)
            counts["serving"].append(_spins(0.5))
        os.sched_setaffinity(0, cores)
        done = receiver.said("fetching")[-1][0]
    mean = {name: sum(rows) / len(rows) for name, rows in counts.items()}
    return {"turns": len(counts["serving"]), "fetched": done, "share": mean["serving"] / mean["stopped"]}


def _spins(seconds: float) -> float:
    """Rounds of fixed work per second of wall time."""
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        sum(range(20000))
        count += 1
    return count / (time.monotonic() - began)


def shaped(size: int, mbit: float) -> dict[str, Any]:
    """One donor in a network namespace behind `tc tbf`."""
    run = lambda words: subprocess.run(words.split(), check=True)  # noqa: E731
    name = f"es{os.getpid() % 10000}"
    run(f"ip netns add {name}")
    try:
        run(f"ip link add {name}a type veth peer name {name}b netns {name}")
        run(f"ip addr add 10.213.7.1/24 dev {name}a")
        run(f"ip link set {name}a up")
        run(f"ip -n {name} addr add 10.213.7.2/24 dev {name}b")
        run(f"ip -n {name} link set {name}b up")
        run(f"ip -n {name} link set lo up")
        shape = f"tc qdisc add dev {name}b root tbf rate {mbit}mbit burst 64kb latency 100ms"
        run(f"ip netns exec {name} {shape}")
        with tempfile.TemporaryDirectory() as folder, Exchange(Path(folder), size=size) as exchange:
            exchange.keep("a")
            exchange.prefix = ("ip", "netns", "exec", name)
            exchange.donor("a", bind="tcp://10.213.7.2:0")
            exchange.prefix = ()
            found = fetched_rate(exchange, "a")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
    wanted = mbit * 1e6 / 8
    return {"bytes": size, "mbit": mbit, **found, "share": found["rate"] / wanted}


def replay(parameters: int, rounds: int) -> dict[str, Any]:
    """Seconds for the rounds by the kernels alone and through the replica."""
    import torch

    from esnode import catchup
    from esnode.kernels.cpu import CpuKernels
    from esnode.replica import Replica
    from esnode.slicemap import build
    from esnode.state import DTYPES
    from protocol.bodies import step_of
    from tests import tiny

    with tempfile.TemporaryDirectory() as folder:
        width = 64
        while 9 * width * width * 2 < parameters:
            width += 64
        model_folder = tiny.write(
            Path(folder) / "model", hidden_size=width, intermediate_size=2 * width, num_attention_heads=4
        )
        lock = tiny.lock(model_folder, members=30, mirrored=False)
        chain = _long_chain(lock, rounds)
        kernels = CpuKernels(torch.get_num_threads())
        model, views = build(model_folder, lock.manifest, DTYPES[lock.live_dtype])
        replica = Replica(model, views, lock, model_folder, kernels)
        replica.apply(chain[:1])  # compiled now
        masters = [(p.master.clone(), p.key, p.region) for p in replica.state.parts]
        weights = sum(int(m.numel()) for m, _, _ in masters)
        spent = {"replica": 0.0, "kernels": 0.0}
        done, size = 1, catchup.FIRST_ROUNDS
        while done < len(chain):  # in turns, so that a busy machine is busy for both
            entries = chain[done : done + size]
            steps = [step for step in (step_of(lock, entry) for entry in entries) if step]
            began = time.monotonic()
            replica.apply(entries)
            spent["replica"] += time.monotonic() - began
            if done == 1:
                pace = spent["replica"] / len(entries)
                size = max(catchup.FIRST_ROUNDS, min(catchup.FUSED, int(catchup.BATCH_SECONDS / pace)))
            began = time.monotonic()
            for master, key, region in masters:
                kernels.update(master, steps, key, region)
            spent["kernels"] += time.monotonic() - began
            done += len(entries)
    ratio = spent["replica"] / spent["kernels"]
    return {"weights": weights, "rounds": rounds, "batch": size, **spent, "ratio": ratio}


def _long_chain(lock: Any, rounds: int) -> list[Any]:
    """Commits with random rewards; their D is made up, nobody compares it here."""
    import random

    from protocol.entries import CommitBody, MemberReward, seal
    from tests import tiny

    draw = random.Random(0)
    entries = []
    for round in range(rounds + 1):
        rows = tuple(MemberReward(k, draw.random(), 1) for k in range(lock.members))
        body = CommitBody(lock.alpha_at(0), lock.sigma_at(0), rows)
        entries.append(
            seal(body, parent=bytes(32), term=1, nonce=bytes(8), round=round, digest=0, key=tiny.KEY)
        )
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--link", action="store_true")
    parser.add_argument("--donating", action="store_true")
    parser.add_argument("--shaped", type=float, metavar="MBIT")
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--parameters", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    size = options.mb * 10**6 // 4 * 4
    if options.replay:
        found["replay"] = replay(options.parameters, options.rounds)
    if options.link:
        found["link"] = link(size)
    if options.donating:
        found["donating"] = donating(size)
    if options.shaped:
        found["shaped"] = shaped(size, options.shaped)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
