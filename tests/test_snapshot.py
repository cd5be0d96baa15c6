"""The snapshot file: canonical, whole or not there, every byte under its root."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esnode import checkpoint, duty, joined, room, slicemap, snapshot
from esnode.checkpoint import Checkpoints, Saved
from esnode.folder import write_file
from esnode.kernels.cpu import CpuKernels
from esnode.replica import Replica
from esnode.room import Room
from esnode.snapshot import Array, Header, Reader, SnapshotError
from esnode.state import DTYPES
from protocol import noise, seeds
from protocol.chain import Chain
from protocol.lock import Lock
from tests import tiny

ARRAYS = (
    Array("a", "master", "float32", (100, 70)),
    Array("b", "master", "float32", (3,)),
    Array("c", "master", "float32", (0,)),
    Array("d", "master", "float32", (9000,)),
)
HEADER = Header(1, b"r" * 32, 20, b"e" * 32, 2**64 - 1, ARRAYS)


def contents(header: Header = HEADER) -> list[bytes]:
    draw = random.Random(3)
    return [draw.randbytes(array.size) for array in header.arrays]


def reading(arrays: list[bytes]) -> Callable[[int, int, int], bytes]:
    return lambda array, first, end: arrays[array][first:end]


def made(folder: Path) -> Path:
    return snapshot.write(folder, HEADER, reading(contents()))[0]


def loaded(path: Path) -> bytes:
    with Reader(path) as reader:
        return b"".join(data for _, data in reader.parts())


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, root = snapshot.write(tmp_path, HEADER, reading(contents()))
    assert path.name == "round-0000000020.snapshot" and path.stat().st_mode & 0o77 == 0
    assert loaded(path) == b"".join(contents())
    with Reader(path) as reader:
        assert reader.header == HEADER and reader.manifest.root == root
        assert HEADER.parts == 4 and HEADER.part_size == 16384
        manifest = reader.manifest
        assert snapshot.manifest_of(HEADER.encode(), manifest.hashes, root) == manifest
        assert path.read_bytes() == manifest.head + b"".join(contents())


def test_the_same_state_is_the_same_file(tmp_path: Path) -> None:
    first = made(tmp_path / "one").read_bytes()
    assert made(tmp_path / "two").read_bytes() == first
    other = replace(HEADER, entry=b"f" * 32)
    _, root = snapshot.write(tmp_path / "three", other, reading(contents()))
    assert root != first[len(first) - HEADER.total - 32 :][:32], "the root covers the header"


def test_part_sizes_follow_from_the_total() -> None:
    sizes = {}
    for count in (0, 1, 4096, 1 << 21, 1 << 27, 1 << 30):
        header = replace(HEADER, arrays=(Array("a", "master", "float32", (count,)),))
        sizes[count] = (header.part_size, header.parts)
    assert sizes == {
        0: (16384, 0), 1: (16384, 1), 4096: (16384, 1), 1 << 21: (32768, 256), 1 << 27: (1 << 21, 256),
        1 << 30: (1 << 22, 1024),
    }  # fmt: skip


def test_any_flipped_byte_is_found(tmp_path: Path) -> None:
    path = made(tmp_path)
    good = path.read_bytes()
    places = {*range(600), *range(len(good) - 40, len(good)), *random.Random(1).sample(range(len(good)), 300)}
    for place in sorted(places):
        data = bytearray(good)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        with pytest.raises(SnapshotError):
            loaded(path)


def test_any_cut_is_found(tmp_path: Path) -> None:
    path = made(tmp_path)
    good = path.read_bytes()
    for length in (0, 5, 11, 12, 60, 400, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(SnapshotError):
            loaded(path)
    path.write_bytes(good + b"x")
    with pytest.raises(SnapshotError):
        loaded(path)


@pytest.mark.parametrize(
    "header",
    [
        replace(HEADER, arrays=(ARRAYS[1], ARRAYS[0])),
        replace(HEADER, arrays=(ARRAYS[0], ARRAYS[0])),
        replace(HEADER, arrays=(replace(ARRAYS[0], role="adam"),)),
        replace(HEADER, arrays=(replace(ARRAYS[0], shape=(1 << 49, 1 << 49)),)),
    ],
)
def test_headers_out_of_form_are_refused(header: Header) -> None:
    with pytest.raises(SnapshotError):
        snapshot.decode_header(header.encode())


def test_random_bytes_are_no_header() -> None:
    draw = random.Random(5)
    good = HEADER.encode()
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            found = snapshot.decode_header(bytes(data))
        except SnapshotError:
            continue
        assert found.encode() == data


# ---------------------------------------------------------------- killed at every stage


class Killed(BaseException):
    """The process ends here: nothing cleans up."""


def test_killed_anywhere_the_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: Any) -> None:
    """Every system call of the writer is the last one once; the older snapshot survives them all."""
    stage = 0
    while True:
        folder = tmp_path / str(stage)
        snapshot.write(folder, replace(HEADER, round=10), reading(contents()))
        finished = _killed_at(stage, folder, monkeypatch)
        names = {path.name for path in snapshot.files(folder)}
        for name in names:
            assert loaded(folder / name) == b"".join(contents())
        assert snapshot.file_name(10) in names
        if finished:
            break
        stage += 1
    assert stage >= 10 and snapshot.file_name(20) in names


def _killed_at(stage: int, folder: Path, monkeypatch: Any) -> bool:
    """Run the writer until the system call number `stage`; whether it came to its end before."""
    calls = iter(range(10**6))

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            if next(calls) < stage:
                return real(*words)
            if real is os.pwrite:  # half of the bytes reach the disk
                real(words[0], bytes(words[1])[: len(words[1]) // 2], words[2])
            raise Killed

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "posix_fallocate", "pwrite", "fsync", "replace"):
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        try:
            snapshot.write(folder, HEADER, reading(contents()))
        except Killed:
            return False
    return True


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        made(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- a node's folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lock, Chain]:
    folder = tiny.write(tmp_path_factory.mktemp("snapshot") / "model")
    run = tiny.lock(folder)
    return folder, run, tiny.chain(run, folder, 6)[0]


class Masters(Replica):
    """With the digest as the law says it, slowly."""

    def digest_of(self, name: str, first: int, data: Any) -> int:
        values = torch.from_numpy(data).view(DTYPES[self.state.lock.master]).float().numpy()
        return noise.digest(values, seeds.tensor_key(name), first)


def replica(folder: Path, run: Lock) -> Masters:
    model, views = slicemap.build(folder, run.manifest, DTYPES[run.live_dtype])
    return Masters(model, views, run, folder, CpuKernels())


def save(target: Checkpoints, made: Masters, chain: Chain, round: int) -> Saved:
    saved: list[Saved] = []
    target.begin(round, chain.commits[round - 1].hash, made.digest(), saved.append)
    target.settle()
    return saved[0]


def height_of(chain: Chain, round: int) -> int:
    return chain.entries.index(chain.commits[round - 1]) + 1


def prepared(
    tmp_path: Path, place: tuple[Path, Lock, Chain], rounds: Iterable[int]
) -> tuple[Checkpoints, Masters, dict[int, Saved]]:
    folder, run, chain = place
    made = replica(folder, run)
    target = Checkpoints(tmp_path, run, made, Room(0))
    saved = {}
    for round in range(1, max(rounds) + 1):
        made.apply(chain.commits[round - 1 : round])
        if round in rounds:
            saved[round] = save(target, made, chain, round)
    return target, made, saved


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_two_nodes_write_one_file_and_a_third_loads_it(tmp_path: Path, master: str) -> None:
    folder = tiny.write(tmp_path / "model")
    run = tiny.lock(folder, master=master)
    chain = tiny.chain(run, folder, 3)[0]
    place = (folder, run, chain)
    _, one, saved = prepared(tmp_path / "one", place, [2])
    prepared(tmp_path / "two", place, [2])
    name = f"checkpoint/{snapshot.file_name(2)}"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert saved[2].root and not saved[2].reason
    fresh = replica(folder, run)
    found = Checkpoints(tmp_path / "one", run, fresh, Room()).load(chain.entries)
    assert found == (height_of(chain, 2), one.digest())
    for spec in run.manifest:
        assert fresh.read(spec.name).tobytes() == one.read(spec.name).tobytes()
        assert fresh.live(spec.name).equal(one.live(spec.name))
    fresh.apply(chain.commits[2:])
    one.apply(chain.commits[2:])
    assert fresh.digest() == one.digest()


def test_two_are_kept_and_a_damaged_one_gives_way_to_the_older(
    tmp_path: Path, place: tuple[Path, Lock, Chain]
) -> None:
    target, made, _ = prepared(tmp_path, place, [2, 4, 6])
    chain = place[2]
    paths = snapshot.files(tmp_path / "checkpoint")
    assert [path.name for path in paths] == [snapshot.file_name(6), snapshot.file_name(4)]
    assert target.load(chain.entries) == (height_of(chain, 6), made.digest())
    data = bytearray(paths[0].read_bytes())
    data[-5] ^= 1  # in the last part: everything before it is in the masters already
    paths[0].write_bytes(data)
    assert target.load(chain.entries) == (height_of(chain, 4), chain.digest_at(4))
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    assert target.load(chain.entries) is None


def test_a_disk_that_fills_up_under_a_checkpoint_is_said_and_the_older_one_stays(
    tmp_path: Path, place: tuple[Path, Lock, Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, made, _ = prepared(tmp_path, place, [2])

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    made.apply(place[2].commits[2:4])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        saved = save(target, made, place[2], 4)
    assert saved.reason == f"No space left on device ({target.folder})" and not saved.root
    assert [path.name for path in target.folder.iterdir()] == [snapshot.file_name(2)]


def test_what_was_not_read_as_the_state_it_should_be_is_never_a_file(
    tmp_path: Path, place: tuple[Path, Lock, Chain]
) -> None:
    """A weight that changed before or while it is written: no file, no root, the older one stays."""
    target, made, _ = prepared(tmp_path, place, [2])
    made.apply(place[2].commits[2:4])
    part = made.state.parts[-1]
    part.master.view(torch.int32)[3] ^= 1 << 9
    saved = save(target, made, place[2], 4)
    assert not saved.root and f"the state {place[2].digest_at(4):016x}" in saved.reason
    assert [path.name for path in target.folder.iterdir()] == [snapshot.file_name(2)]
    part.master.view(torch.int32)[3] ^= 1 << 9
    assert save(target, made, place[2], 4).root


def test_a_file_that_is_not_what_it_says_is_not_kept(tmp_path: Path, place: tuple[Path, Lock, Chain]) -> None:
    """As when two nodes have signed a root together: whole by its hashes, and of other weights."""
    target, made, saved = prepared(tmp_path, place, [2, 4])
    honest = snapshot.header_for(place[1], 4, place[2].commits[3].hash, made.digest())
    made.apply(place[2].commits[4:5])
    _, root = snapshot.write(target.folder, honest, made.chunk)
    assert root != saved[4].root
    assert target.load(place[2].entries) == (height_of(place[2], 2), place[2].digest_at(2))
    assert [path.name for path in snapshot.files(target.folder)] == [snapshot.file_name(2)]


def test_only_a_state_of_this_ledger_is_loaded(tmp_path: Path, place: tuple[Path, Lock, Chain]) -> None:
    target, made, _ = prepared(tmp_path, place, [2, 4])
    folder, run, chain = place
    assert target.load(chain.entries[: height_of(chain, 3)]) == (height_of(chain, 2), chain.digest_at(2))
    assert target.load(chain.entries[:2]) is None
    branch = tiny.chain(run, folder, 6, luck=1)[0]
    assert target.load(branch.entries) is None, "same run, other rewards"
    other = tiny.lock(folder, members=6)
    assert Checkpoints(tmp_path, other, made, Room()).load(tiny.chain(other, folder, 4)[0].entries) is None


def test_without_room_nothing_is_written(
    tmp_path: Path, place: tuple[Path, Lock, Chain], monkeypatch: Any
) -> None:
    target, made, _ = prepared(tmp_path, place, [2, 4])
    size = snapshot.files(tmp_path / "checkpoint")[0].stat().st_size
    monkeypatch.setattr(room, "_free", lambda folder: size * (4 - len(snapshot.files(folder))) // 2 - 1)
    made.apply(place[2].commits[4:5])
    saved = save(target, made, place[2], 5)
    assert not saved.reason, "the older one went for it"
    monkeypatch.setattr(room, "_free", lambda folder: 5)
    made.apply(place[2].commits[5:6])
    saved = save(target, made, place[2], 6)
    assert "are needed" in saved.reason and not saved.root
    assert snapshot.files(tmp_path / "checkpoint")[0].name == snapshot.file_name(5)


def test_a_snapshot_keeps_to_the_policy(
    tmp_path: Path, place: tuple[Path, Lock, Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the policy holds from the next snapshot on; older files make room for a newer one."""
    folder, run, chain = place
    monkeypatch.setenv("ESNODE_CONFIG", str(tmp_path / "config"))
    home, joined_run = tmp_path / "data", tmp_path / "data" / "run"
    joined.write(joined_run, joined.Joined(run.run_id, ("tcp://127.0.0.1:1",), {}))
    assert room.of_run(joined_run).home == home and room.of_run(tmp_path).home is None
    made = replica(folder, run)
    target = Checkpoints(joined_run / "nodes" / "a", run, made, Room(0, home))
    one = snapshot.header_for(run, 1, bytes(32), 0).total
    reasons = []
    for round, files in ((1, 0.5), (2, 1.5), (3, 2.5), (4, 2.5), (5, 0.0)):
        made.apply(chain.commits[round - 1 : round])
        write_file(duty.policy_file(), f"disk_gb = {files * one / 1e9:.9f}".encode())
        reasons.append(save(target, made, chain, round).reason)
    assert "policy allows" in reasons[0] and "(disk_gb)" in reasons[0]
    assert reasons[1:] == [""] * 4
    kept = [path.name for path in snapshot.files(target.folder)]
    assert kept == [snapshot.file_name(5), snapshot.file_name(4)], "3 made room for 4"


def test_two_writers_who_each_have_room_alone_leave_the_disk_its_reserve(
    tmp_path: Path, place: tuple[Path, Lock, Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of one machine look at the disk in the same moment, and coordinator and ledgers lie on it too."""
    folder, run, chain = place
    size = snapshot.header_for(run, 1, bytes(32), 0).total
    rival, real = tmp_path / "rival.new", os.posix_fallocate

    def both(*words: int) -> None:
        """Another node has found room as well, and takes it now."""
        rival.write_bytes(bytes(size))
        real(*words)

    def free(_: Path) -> int:
        """Of a disk that has room for one file and a half."""
        return size * 3 // 2 - sum(draft.stat().st_blocks * 512 for draft in tmp_path.rglob("*.new"))

    made = replica(folder, run)
    made.apply(chain.commits[:1])
    target = Checkpoints(tmp_path, run, made, Room(size // 8))
    monkeypatch.setattr(os, "posix_fallocate", both)
    monkeypatch.setattr(room, "_free", free)
    saved = save(target, made, chain, 1)
    assert "are needed" in saved.reason and not saved.root
    assert list(target.folder.iterdir()) == []


def test_a_node_that_ends_gives_a_long_write_up_and_leaves_no_draft(
    tmp_path: Path, place: tuple[Path, Lock, Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user and the report of the run wait for it; of billions of weights it is minutes."""
    target, made, _ = prepared(tmp_path, place, [1])
    slow, real = threading.Event(), os.pwrite

    def disk(*words: Any) -> int:
        slow.wait(0.2)
        return real(*words)

    monkeypatch.setattr(os, "pwrite", disk)
    monkeypatch.setattr(checkpoint, "LAST_SECONDS", 0.1)
    made.apply(place[2].commits[1:2])
    saved: list[Saved] = []
    target.begin(2, place[2].commits[1].hash, made.digest(), saved.append)
    began = time.monotonic()
    target.close()
    assert time.monotonic() - began < 1.0, "of many parts"
    assert saved[0].reason == "this node is leaving"
    assert [path.name for path in target.folder.iterdir()] == [snapshot.file_name(1)]


def test_a_short_write_is_finished_when_its_node_ends(
    tmp_path: Path, place: tuple[Path, Lock, Chain]
) -> None:
    target, made, _ = prepared(tmp_path, place, [1])
    made.apply(place[2].commits[1:2])
    saved: list[Saved] = []
    target.begin(2, place[2].commits[1].hash, made.digest(), saved.append)
    target.close()
    assert saved[0].root


def test_drafts_of_a_killed_node_are_swept(tmp_path: Path) -> None:
    (tmp_path / "round-0000000002.snapshot.new").write_bytes(b"half")
    (tmp_path / "round-0000000001.snapshot").write_bytes(b"whole")
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["round-0000000001.snapshot"]
    checkpoint.sweep(tmp_path / "never made")


def test_an_apply_waits_for_the_writer(tmp_path: Path, place: tuple[Path, Lock, Chain]) -> None:
    """What is written is the state at the call, however long the disk takes."""
    folder, run, chain = place
    made = replica(folder, run)
    made.apply(chain.commits[:2])
    digest = made.digest()
    target = Checkpoints(tmp_path, run, made, Room(0))
    saved: list[Saved] = []
    target.begin(2, chain.commits[1].hash, digest, saved.append)
    target.settle()
    assert saved[0].root
    made.apply(chain.commits[2:])
    assert target.load(chain.entries) == (height_of(chain, 2), digest)
    assert np.isfinite(made.read(run.manifest[0].name)).all()
