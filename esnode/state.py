"""The state of a run: the master of every trained tensor, folded forward by ledger entries. Never perturbed
(law L3).

Needs no model, only the checkpoint's files, so a ledger can be replayed and exported without one.
`replica.py` adds the live weights of a model. "State arrays" are plural in law and format; the master is the
only one so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from esnode import manifest
from esnode.hostmaster import HostMaster
from esnode.kernels.interface import Kernels, Region
from esnode.parts import Part, StateError, master_of, require_small
from esnode.replay import DamagedMaster, fold
from esnode.shards import Shards, cut, runs, slices, window
from protocol.bodies import Entry, step_of
from protocol.lock import Lock, TensorSpec
from protocol.pieces import Piece
from protocol.seeds import U64

if TYPE_CHECKING:
    from protocol.chain import Chain

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Frozen = Callable[[TensorSpec, NDArray[Any]], None]
Visit = Callable[[Part], None]
Put = Callable[[int, int, Any], None]  # one of `Pieces`
Pieces = Iterable[tuple[int, int, memoryview]]  # (array in name order, first byte, bytes)


class TornState(RuntimeError):
    """An update was interrupted half-way: this state is of no round and must be loaded again."""


def ignore(spec: TensorSpec, values: NDArray[Any]) -> None:
    """The taker of frozen tensors of somebody who has no model."""


def nothing(part: Part) -> None:
    """The visitor of somebody who has no live weights to renew."""


class State:
    """The masters of one run in one process, or of one rank's slices. Not thread-safe.

    A rank's D is the sum over the slices that it counts (`Shard.counted`); the sum over ranks is the run's.
    """

    def __init__(
        self,
        lock: Lock,
        folder: str | Path,
        kernels: Kernels,
        parts: list[Part],
        host: HostMaster | None = None,
    ) -> None:
        self.lock = lock
        self.folder = Path(folder)
        self.kernels = kernels
        self.parts = parts
        self._by_tensor: dict[str, list[Part]] = {}
        for part in parts:
            self._by_tensor.setdefault(part.shard.tensor, []).append(part)
        self._trained = sorted(spec.name for spec in lock.manifest if spec.trained)
        self._host = host
        self._seen = 0 if host is None else host.writes()
        self._torn = False
        self._total()

    @classmethod
    def load(
        cls,
        lock: Lock,
        folder: str | Path,
        kernels: Kernels,
        *,
        device: str = "cpu",
        host: HostMaster | None = None,
        frozen: Frozen = ignore,
        visit: Visit = nothing,
        shards: Shards | None = None,
    ) -> State:
        """The base checkpoint's state, read tensor by tensor; each master is handed to `visit`, each other
        tensor to `frozen`, as it comes; with `shards`, of each tensor these slices alone.

        The masters are on `device`, or in `host`, shared memory: that a leader fills, and that anybody else
        finds filled, perhaps many rounds after the base. The digest is that of the base: for a fork, `replay`
        the parents' chains next. manifest.WrongBase when names or shapes are not the lock's, StateError when
        a weight is too large for float16. Shared memory that is being written can be used after `refresh`.
        """
        specs = manifest.check(folder, lock)
        if host is not None and not host.leader:
            return cls._attached(lock, folder, kernels, host, frozen, visit, shards)
        parts = []
        for spec, whole in manifest.tensors(folder, specs):
            if lock.live_dtype == "float16" and whole.dtype == np.float32:
                require_small(spec, whole)
            for shard, local, values in cut(spec, whole, shards):
                if not spec.trained:
                    frozen(local, values)
                    continue
                master = master_of(values, lock.master)
                master = master.to(device) if host is None else host.views[local.name].copy_(master)
                part = Part(local, shard, master)
                part.digest = kernels.digest(part.master, part.key, part.region)
                parts.append(part)
                visit(part)
        made = cls(lock, folder, kernels, parts, host)
        made._publish()
        return made

    @classmethod
    def _attached(
        cls,
        lock: Lock,
        folder: str | Path,
        kernels: Kernels,
        host: HostMaster,
        frozen: Frozen,
        visit: Visit,
        shards: Shards | None,
    ) -> State:
        for spec, whole in manifest.tensors(folder, [spec for spec in lock.manifest if not spec.trained]):
            for _, local, values in cut(spec, whole, shards):
                frozen(local, values)
        parts = [
            Part(local, shard, host.views[local.name])
            for spec in lock.manifest
            for shard, local in slices(spec, shards)
            if spec.trained
        ]
        made = cls(lock, folder, kernels, parts, host)
        with suppress(TornState):  # the leader writes just now; nothing can be used before `refresh`
            made.refresh(visit)
        return made

    @property
    def leads(self) -> bool:
        """Whether the masters are this process's to write."""
        return self._host is None or self._host.leader

    @property
    def host_path(self) -> str | None:
        """What other processes attach to, for masters in shared memory."""
        return None if self._host is None else self._host.path

    def refresh(self, visit: Visit = nothing) -> int:
        """Take over what the leader of shared masters has written since; D. TornState while it writes."""
        if self._host is None:
            return self._digest
        self._seen = self._host.writes()
        digests = self._host.digests()
        if digests is None:
            raise TornState("the leader of the shared master was interrupted, or is still writing")
        for part in self.parts:
            part.digest = digests[part.spec.name]
            visit(part)
        return self._total()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around every change: what raises inside, an interrupt included, leaves a torn state."""
        if self._host is not None:
            self._host.begin()
        self._torn = True
        yield
        self._torn = False
        self._publish()

    def _publish(self) -> None:
        self._total()
        if self._host is not None:
            self._host.publish({part.spec.name: part.digest for part in self.parts})
            self._seen = self._host.writes()

    def _total(self) -> int:
        self._digest = sum(part.digest for part in self.parts if part.shard.counted) % U64
        return self._digest

    def digest(self) -> int:
        """D of the master, kept up to date by every update."""
        self.require_whole()
        return self._digest

    def recompute_digest(self) -> int:
        """D taken afresh from the masters in memory: differs from `digest()` only when memory was damaged."""
        self.require_whole()
        return sum(self._read(part) for part in self.parts if part.shard.counted) % U64

    def shared(self) -> dict[int, int]:
        """Sum of the digests of the slices that several ranks hold, by the bit mask of those ranks."""
        sums: dict[int, int] = {}
        for part in self.parts:
            if part.shard.holders.bit_count() > 1:
                sums[part.shard.holders] = (sums.get(part.shard.holders, 0) + part.digest) % U64
        return sums

    def _read(self, part: Part) -> int:
        return self.kernels.digest(part.master, part.key, part.region)

    def damaged(self) -> tuple[str, ...]:
        """Read every master: tensors that are not what was last written to them. .4 ns a weight on one core.

        Without this a flipped bit would only show in the digest after the next update, when the units of a
        whole round have been measured on it.
        """
        self.require_whole()
        found = (part.shard.tensor for part in self.parts if self._read(part) != part.digest)
        return tuple(dict.fromkeys(found))

    def require_intact(self) -> None:
        """DamagedMaster when a weight has changed by itself."""
        damaged = self.damaged()
        if damaged:
            raise DamagedMaster(damaged)

    def piece_digest(self, piece: Piece) -> int:
        """Digest of a run of elements, read from memory; of what this process counts of it."""
        found = [
            self.kernels.digest(part.master[place : place + region.count], part.key, region)
            for part, place, region in self._runs(piece.tensor, piece.first, piece.first + piece.count)
            if part.shard.counted
        ]
        return sum(found) % U64

    def overwrite(self, piece: Piece, values: torch.Tensor, visit: Visit = nothing) -> None:
        """Write a run of elements that replay has derived."""
        with self._writing():
            touched = self._write(piece.tensor, piece.first, values)
            for part in touched:
                part.digest = self._read(part)
        for part in touched:
            visit(part)

    def _runs(self, tensor: str, first: int, end: int) -> list[tuple[Part, int, Region]]:
        """(part, place in its master, region) of what is held of a run of a tensor's elements."""
        parts = self._by_tensor.get(tensor, ())
        return [(part, *run) for part in parts for run in runs(part.region, first, end)]

    def _write(self, tensor: str, first: int, values: torch.Tensor) -> list[Part]:
        """Put flat values, the first of index `first`, where they belong; the parts they went into."""
        touched: dict[int, Part] = {}
        for part, place, region in self._runs(tensor, first, first + values.numel()):
            target = part.master[place : place + region.count].view(region.rows, region.width)
            target.copy_(window(values, first, region))
            touched[id(part)] = part
        return list(touched.values())

    def apply(self, entries: Sequence[Entry], visit: Visit = nothing, lock: Lock | None = None) -> list[int]:
        """Fold entries into the masters, all of them in one pass over memory; D after each.

        Entries that move nothing repeat the D before them. `visit` sees each tensor right after its update.
        `lock` is the lock of the entries' chain when it is not this run's (a parent's). DamagedMaster, before
        anything is moved, when a weight has changed by itself.
        """
        self.require_whole()
        steps = [step_of(lock or self.lock, entry) for entry in entries]
        moving = [step for step in steps if step is not None]
        if moving:
            self.require_intact()
        now, digests = self._digest, []
        after = iter(self._update(moving, visit) if moving else ())
        for step in steps:
            now = now if step is None else next(after)
            digests.append(now)
        return digests

    def _update(self, steps: Sequence[Any], visit: Visit) -> list[int]:
        totals = [0] * len(steps)
        with self._writing():
            for part in self.parts:
                digests = self.kernels.update(part.master, steps, part.key, part.region)
                part.digest = digests[-1]
                if part.shard.counted:
                    totals = [total + digest for total, digest in zip(totals, digests, strict=True)]
                visit(part)
        return [total % U64 for total in totals]

    def reset(self, visit: Visit = nothing) -> int:
        """Read the base checkpoint again into the masters there are; D of the base.

        Also mends a state whose update was interrupted. For a fork, `replay` the parents' chains next.
        """
        with self._writing():
            held = [spec for spec in self.lock.manifest if spec.name in self._by_tensor]
            for spec, values in manifest.tensors(self.folder, held):
                for part in self._write(spec.name, 0, master_of(values, self.lock.master)):
                    part.digest = self._read(part)
                    visit(part)
        return self._digest

    def chunk(self, array: int, first: int, end: int) -> NDArray[np.uint8]:
        """Bytes of one master, little-endian; arrays count in name order. For `esnode.snapshot`.

        Of a state of whole tensors; ranks answer with `held_bytes`.
        """
        self.require_whole()
        (part,) = self._by_tensor[self._trained[array]]
        return part.master.view(torch.uint8)[first:end].cpu().numpy()

    def held_bytes(self, array: int, first: int, end: int) -> list[tuple[Region, bytes]]:
        """What this process counts of bytes `first` to `end` of one master: elements' regions and bytes."""
        self.require_whole()
        size = DTYPES[self.lock.master].itemsize
        return [
            (region, part.master[place : place + region.count].view(torch.uint8).cpu().numpy().tobytes())
            for part, place, region in self._runs(self._trained[array], first // size, end // size)
            if part.shard.counted
        ]

    def refill(self, pieces: Pieces, visit: Visit = nothing) -> int:
        """Overwrite all masters with (array, first byte, bytes) pieces; D taken afresh from the memory.

        What raises half-way leaves a torn state, to be refilled or `reset`.
        """
        with self.refilling(visit) as put:
            for piece in pieces:
                put(*piece)
        return self._digest

    @contextmanager
    def refilling(self, visit: Visit = nothing) -> Iterator[Put]:
        """`refill` by one who takes the pieces as they come and puts them in one by one."""
        dtype = DTYPES[self.lock.master]

        def put(array: int, first: int, data: Any) -> None:
            values = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype)
            self._write(self._trained[array], first // dtype.itemsize, values)

        with self._writing():
            yield put
            for part in self.parts:
                part.digest = self._read(part)
                visit(part)

    def replay(self, chain: Chain, upto: int, visit: Visit = nothing) -> int:
        """Fold the first `upto` rounds of an ancestor's chain; D after them.

        The state must be the one that chain starts from. StateError when it is not, or when the ancestor
        trained other tensors or in another master dtype; replay.WrongWeights when a stated digest is not met.
        """
        require_parent(chain.lock, self.lock, self.digest())
        fold(lambda batch: self.apply(batch, visit, chain.lock), chain, 0, upto)
        return self.digest()

    def read(self, name: str) -> NDArray[np.float32]:
        """float32 copy of a tensor's master, or of its stored value where it is frozen, in full shape.

        KeyError for a name that is not in the manifest, ValueError for an integer tensor.
        """
        self.require_whole()
        if name in self._by_tensor:
            (part,) = self._by_tensor[name]
            array = part.master.detach().to("cpu", torch.float32, copy=True).numpy()
            return array.reshape(part.spec.shape)
        tensor = manifest.stored(self.folder)[name]
        return manifest.image(tensor).reshape(tensor.shape)

    def require_whole(self) -> None:
        """TornState while the masters are those of no round."""
        if self._torn:
            raise TornState("an update of the weights was interrupted half-way: load the replica again")
        if self._host is not None and not (self._host.whole and self._host.writes() == self._seen):
            raise TornState("the leader of the shared master has begun to write: refresh first")


def require_parent(theirs: Lock, ours: Lock, digest: int) -> None:
    """StateError unless a state of ours with this digest can be folded on with the ledger of that lock."""
    if theirs.master != ours.master:
        raise StateError(
            f"a fork keeps its parent's master dtype: {theirs.master} there, {ours.master} here."
        )
    there, here = ({spec.name for spec in lock.manifest if spec.trained} for lock in (theirs, ours))
    if there != here:
        raise StateError(
            f"a fork trains the tensors its parent trained; {sorted(there ^ here)[0]} is in one only."
        )
    if digest != theirs.digest:
        raise StateError(
            f"the state to replay on has digest {digest:016x}, the parent's ledger starts from "
            f"{theirs.digest:016x}. Give all ancestors, the oldest first."
        )
