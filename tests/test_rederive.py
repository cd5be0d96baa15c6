"""A real engine on a tiny model: a bit flips in its master, and replay of that piece alone mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from esnode import snapshot
from esnode.checkpoint import Checkpoints
from esnode.engines import transformers_engine
from esnode.engines.transformers_engine import TransformersEngine
from esnode.rederive import Rederiver
from esnode.replay import DamagedMaster
from esnode.room import Room
from esnode.snapshot import SnapshotError
from protocol import ledger, pieces
from protocol.entries import EntryKind
from protocol.lock import Parent
from protocol.pieces import pieces_of
from tests import tiny, toy_engine
from tests.runs import PLAN, Processes, make_folder, wait_for

ROUNDS = 4


class Bench:
    """A trained engine, its ledger, and what holds it against replay."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self.lock = tiny.lock(folder, **changes)
        self.chain, self.after = tiny.chain(self.lock, folder, ROUNDS)
        self.engine: TransformersEngine = transformers_engine.load(self.lock, folder, threads=1)
        self.engine.apply(self.chain.entries)
        self.rederiver = Rederiver(self.lock, folder, self.engine, ())
        self.right = tiny.digest(self.after)

    def flip(self, name: str, index: int = 7, bit: int = 12) -> None:
        """One bit in memory."""
        part = next(part for part in self.engine._replica.state.parts if part.spec.name == name)
        wide = part.master.dtype == torch.float32
        words = part.master.view(torch.int32 if wide else torch.int16)
        words[index] ^= 1 << bit

    @property
    def tensors(self) -> list[str]:
        return [spec.name for spec in self.lock.manifest if spec.trained]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tiny.write(tmp_path / "model"))


def test_the_pieces_are_the_whole_state(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 64)
    small = Rederiver(bench.lock, bench.folder, bench.engine, ())
    count = len(pieces_of(bench.lock))
    assert len(bench.tensors) < count <= 4096
    assert sum(small.all_held()) % 2**64 == bench.right == sum(bench.rederiver.all_held()) % 2**64
    some = (0, count // 2, count - 1)
    assert small.derive(bench.chain.entries, some) == small.held(some)


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_a_flipped_bit_is_seen_before_the_next_unit_and_the_next_update(tmp_path: Path, master: str) -> None:
    bench = Bench(tiny.write(tmp_path / "model", "qwen2"), master=master)
    assert bench.engine.damaged() == () and bench.engine.digest() == bench.right
    for name in bench.tensors[::5]:
        bench.flip(name, bit=3)
        assert bench.engine.digest() == bench.right, "the digest kept does not know"
        assert bench.engine.damaged() == (name,)
        with pytest.raises(DamagedMaster, match=name):
            bench.engine.apply(bench.chain.commits[:1])
        assert bench.rederiver.heal(bench.chain.entries, (name,)) == bench.right
    assert bench.engine.damaged() == ()
    for name, values in bench.after.items():
        assert bench.engine.read(name).tobytes() == values.tobytes(), name


def test_the_reference_kernel_finds_and_mends_the_piece(bench: Bench) -> None:
    name = bench.tensors[3]
    number = next(k for k, piece in enumerate(pieces_of(bench.lock)) if piece.tensor == name)
    whole = bench.rederiver.held((number,))
    bench.flip(name)
    held = bench.rederiver.held((number,))
    assert held != whole
    assert bench.rederiver.derive(bench.chain.entries, (number,)) == whole
    assert bench.rederiver.mend((number,)) == bench.right
    live = bench.engine._replica.live(name)
    assert torch.equal(live, torch.from_numpy(bench.engine.read(name)).to(live.dtype)), "live weights too"


def test_a_piece_is_rederived_from_a_checkpoint_whose_digest_the_ledger_states(
    bench: Bench, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, bench.lock, bench.engine, Room(0))
    for round in range(ROUNDS - 1, ROUNDS + 1):
        bench.engine.reset()
        bench.engine.apply(bench.chain.commits[:round])
        entry = bench.chain.commits[round - 1]
        checkpoints.begin(round, entry.hash, bench.engine.digest(), lambda saved: None)
        checkpoints.settle()
    found = checkpoints.stated(bench.chain.entries)
    assert found is not None and found[0].name == snapshot.file_name(ROUNDS - 1), "nothing states the last"
    everything = tuple(range(len(pieces_of(bench.lock))))
    right = bench.rederiver.held(everything)
    bench.flip(bench.tensors[3])
    assert bench.rederiver.held(everything) != right
    assert bench.rederiver.derive_from(*found, bench.chain.entries, everything) == (right, ROUNDS - 1)
    assert bench.rederiver.mend(everything) == bench.right
    data = bytearray(found[0].read_bytes())
    data[-3] ^= 1
    found[0].write_bytes(data)
    with pytest.raises(SnapshotError, match="damaged"):
        bench.rederiver.derive_from(*found, bench.chain.entries, everything)


def test_a_fork_is_rederived_through_its_parents(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    first = tiny.lock(folder)
    parent, after = tiny.chain(first, folder, 3)
    claim = Parent(first.run_id.hex(), 3, parent.commits[-1].hash.hex(), tiny.digest(after))
    lock = tiny.lock(folder, parent=claim, digest=tiny.digest(after))
    chain = tiny.extend(lock, after, 2)
    engine = transformers_engine.load(lock, folder, threads=1)
    engine.replay(parent, 3)
    engine.apply(chain.entries)
    rederiver = Rederiver(lock, folder, engine, ((parent, 3),))
    everything = tuple(range(len(pieces_of(lock))))
    assert rederiver.derive(chain.entries, everything) == rederiver.all_held()


# ---------------------------------------------------------------- real processes


def faults(folder: Path) -> str:
    return (folder / "logs" / "coordinator.log").read_text()


@pytest.mark.parametrize("names", [("n1",), ("n1", "n2"), tuple(f"n{k}" for k in range(1, 11))])
def test_a_flipped_bit_in_a_real_run_is_mended_and_the_run_goes_on(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """1, 2 and 10 node processes: the final state is the replay's."""
    make_folder(tmp_path, names, 6, task_options={"seconds": 0.02, "flip": ["n1", 3]})
    with Processes(tmp_path) as processes:
        for name in names:
            processes.node(name)
        wait_for(lambda: all("ready" in processes.words(name) for name in names))
        processes.coordinator()
        processes.wait_end()
        for name in names:
            assert processes.running[name].wait(10) == 0, processes.words(name)
    assert "w changed in memory between two reads" in faults(tmp_path), faults(tmp_path)
    check(tmp_path)


def check(folder: Path) -> None:
    """Every D that was signed is that of the replay."""
    chain = ledger.read(folder / "run.ledger").chain
    workshop = toy_engine.ToyWorkshop(chain.lock, "replay")
    digests = [workshop.digest(), *workshop.apply(chain.commits)]
    assert chain.entries[-1].kind is EntryKind.END and chain.entries[-1].digest == digests[-1]
    assert [chain.digest_at(k) for k in range(len(digests))] == digests


@pytest.mark.parametrize("every", [0, 1])
def test_an_update_gone_wrong_in_a_real_run_is_settled_by_replay(tmp_path: Path, every: int) -> None:
    """From the base, or from a checkpoint where there is one."""
    names = ("n1", "n2")
    make_folder(tmp_path, names, 6, task_options={"seconds": 0.02, "wrong": ["n2", 3]})
    (tmp_path / "plan.toml").write_text(PLAN.format(rounds=6) + f"snapshot_every = {every}\n")
    with Processes(tmp_path) as processes:
        for name in names:
            processes.node(name)
        wait_for(lambda: all("ready" in processes.words(name) for name in names))
        processes.coordinator()
        processes.wait_end()
    said = faults(tmp_path)
    assert "at fault" in said and "n2" in said and "kernel reference" in said, said
    mended = next(
        line for line in (tmp_path / "logs" / "n2.log").read_text().splitlines() if "mended" in line
    )
    assert f"since {every and 3}" in mended, mended
    check(tmp_path)
