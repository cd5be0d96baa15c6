"""The state of a run: the master of every trained tensor, folded forward by ledger entries. Never perturbed
(law L3).

Needs no model, only the checkpoint's files, so a ledger can be replayed and exported without one.
`replica.py` adds the live weights of a model. "State arrays" are plural in law and format; the master is the
only one so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from esnode import manifest
from esnode.hostmaster import HostMaster
from esnode.kernels.interface import Kernels, Region
from esnode.replay import DamagedMaster, fold
from protocol import noise, seeds
from protocol.bodies import Entry, step_of
from protocol.errors import UserError
from protocol.lock import Lock, TensorSpec
from protocol.pieces import Piece

if TYPE_CHECKING:
    from protocol.ledger import Chain

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FP16_LIMIT = 32768.0  # a perturbed weight must stay below fp16's 65504
U64 = 1 << 64

Frozen = Callable[[TensorSpec, NDArray[Any]], None]
Visit = Callable[["Part"], None]
Pieces = Iterable[tuple[int, int, memoryview]]  # (array in name order, first byte, bytes)


class StateError(UserError):
    """Weights that cannot be trained as asked, or a ledger that does not lead to the state it claims."""


class TornState(RuntimeError):
    """An update was interrupted half-way: this state is of no round and must be loaded again."""


@dataclass(slots=True)
class Part:
    """One trained tensor: `master` is 1-D fp32 or bf16, `region` its place in the full tensor.

    `digest` is what was written last; what is read later must have it too.
    """

    spec: TensorSpec
    key: int
    region: Region
    master: torch.Tensor
    digest: int = 0


def ignore(spec: TensorSpec, values: NDArray[Any]) -> None:
    """The taker of frozen tensors of somebody who has no model."""


def nothing(part: Part) -> None:
    """The visitor of somebody who has no live weights to renew."""


class State:
    """The masters of one run in one process. Not thread-safe."""

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
        self._by_name = {part.spec.name: part for part in parts}
        self._in_name_order = sorted(range(len(parts)), key=lambda k: parts[k].spec.name)
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
    ) -> State:
        """The base checkpoint's state, read tensor by tensor; each master is handed to `visit`, each other
        tensor to `frozen`, as it comes.

        The masters are on `device`, or in `host`, shared memory: that a leader fills, and that anybody else
        finds filled, perhaps many rounds after the base. The digest is that of the base: for a fork, `replay`
        the parents' chains next. manifest.WrongBase when names or shapes are not the lock's, StateError when
        a weight is too large for float16, TornState when shared memory was left half-written.
        """
        specs = manifest.check(folder, lock)
        if host is not None and not host.leader:
            return cls._attached(lock, folder, kernels, host, frozen, visit)
        parts = []
        for spec, values in manifest.tensors(folder, specs):
            if lock.live_dtype == "float16" and values.dtype == np.float32:
                _require_small(spec, values)
            if not spec.trained:
                frozen(spec, values)
                continue
            master = master_of(values, lock.master)
            master = master.to(device) if host is None else host.views[spec.name].copy_(master)
            part = Part(spec, seeds.tensor_key(spec.name), Region.whole(values.size), master)
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
    ) -> State:
        for spec, values in manifest.tensors(folder, [spec for spec in lock.manifest if not spec.trained]):
            frozen(spec, values)
        parts = [
            Part(spec, seeds.tensor_key(spec.name), Region.whole(master.numel()), master)
            for spec, master in ((spec, host.views[spec.name]) for spec in lock.manifest if spec.trained)
        ]
        made = cls(lock, folder, kernels, parts, host)
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
        self._digest = sum(part.digest for part in self.parts) % U64
        return self._digest

    def digest(self) -> int:
        """D of the master, kept up to date by every update."""
        self.require_whole()
        return self._digest

    def recompute_digest(self) -> int:
        """D taken afresh from the masters in memory: differs from `digest()` only when memory was damaged."""
        self.require_whole()
        return sum(map(self._read, self.parts)) % U64

    def _read(self, part: Part) -> int:
        return self.kernels.digest(part.master, part.key, part.region)

    def damaged(self) -> tuple[str, ...]:
        """Read every master: tensors that are not what was last written to them. .4 ns a weight on one core.

        Without this a flipped bit would only show in the digest after the next update, when the units of a
        whole round have been measured on it.
        """
        self.require_whole()
        return tuple(part.spec.name for part in self.parts if self._read(part) != part.digest)

    def require_intact(self) -> None:
        """DamagedMaster when a weight has changed by itself."""
        damaged = self.damaged()
        if damaged:
            raise DamagedMaster(damaged)

    def piece_digest(self, piece: Piece) -> int:
        """Digest of a run of elements, read from memory."""
        part = self._by_name[piece.tensor]
        values = part.master[piece.first : piece.first + piece.count]
        return self.kernels.digest(values, part.key, Region.whole(piece.count, piece.first))

    def overwrite(self, piece: Piece, values: torch.Tensor, visit: Visit = nothing) -> None:
        """Write a run of elements that replay has derived."""
        part = self._by_name[piece.tensor]
        with self._writing():
            part.master[piece.first : piece.first + piece.count].copy_(values)
            part.digest = self._read(part)
        visit(part)

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
                totals = [total + digest for total, digest in zip(totals, digests, strict=True)]
                visit(part)
        return [total % U64 for total in totals]

    def reset(self, visit: Visit = nothing) -> int:
        """Read the base checkpoint again into the masters there are; D of the base.

        Also mends a state whose update was interrupted. For a fork, `replay` the parents' chains next.
        """
        with self._writing():
            for spec, values in manifest.tensors(self.folder, [part.spec for part in self.parts]):
                part = self._by_name[spec.name]
                part.master.copy_(master_of(values, self.lock.master))
                part.digest = self._read(part)
                visit(part)
        return self._digest

    def chunk(self, array: int, first: int, end: int) -> NDArray[np.uint8]:
        """Bytes of one master, little-endian; arrays count in name order. For `esnode.snapshot`."""
        self.require_whole()
        return self._bytes(array)[first:end].cpu().numpy()

    def refill(self, pieces: Pieces, visit: Visit = nothing) -> int:
        """Overwrite all masters with (array, first byte, bytes) pieces; D taken afresh from the memory.

        What raises half-way leaves a torn state, to be refilled or `reset`.
        """
        with self._writing():
            for array, first, data in pieces:
                target = self._bytes(array)[first : first + len(data)]
                target.copy_(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))
            for part in self.parts:
                part.digest = self._read(part)
                visit(part)
        return self._digest

    def _bytes(self, array: int) -> torch.Tensor:
        part = self.parts[self._in_name_order[array]]
        return part.master.view(torch.uint8)

    def replay(self, chain: Chain, upto: int, visit: Visit = nothing) -> int:
        """Fold the first `upto` rounds of an ancestor's chain; D after them.

        The state must be the one that chain starts from. StateError when it is not, or when the ancestor
        trained other tensors or in another master dtype; replay.WrongWeights when a stated digest is not met.
        """
        theirs, ours = chain.lock, self.lock
        if theirs.master != ours.master:
            raise StateError(
                f"a fork keeps its parent's master dtype: {theirs.master} there, {ours.master} here."
            )
        trained = {spec.name for spec in theirs.manifest if spec.trained} ^ set(self._by_name)
        if trained:
            raise StateError(
                f"a fork trains the tensors its parent trained; {sorted(trained)[0]} is in one only."
            )
        if self.digest() != theirs.digest:
            raise StateError(
                f"the state to replay on has digest {self.digest():016x}, the parent's ledger starts from "
                f"{theirs.digest:016x}. Give all ancestors, the oldest first."
            )
        fold(lambda batch: self.apply(batch, visit, theirs), chain, 0, upto)
        return self.digest()

    def read(self, name: str) -> NDArray[np.float32]:
        """float32 copy of a tensor's master, or of its stored value where it is frozen, in full shape.

        KeyError for a name that is not in the manifest, ValueError for an integer tensor.
        """
        self.require_whole()
        part = self._by_name.get(name)
        if part is not None:
            array = part.master.detach().to("cpu", torch.float32, copy=True).numpy()
            return array.reshape(part.spec.shape)
        tensor = manifest.stored(self.folder)[name]
        return manifest.image(tensor).reshape(tensor.shape)

    def require_whole(self) -> None:
        if self._torn:
            raise TornState("an update of the weights was interrupted half-way: load the replica again")
        if self._host is not None and not (self._host.whole and self._host.writes() == self._seen):
            raise TornState("the leader of the shared master has begun to write: refresh first")


def master_of(values: NDArray[np.float32], dtype: str) -> torch.Tensor:
    """The master of a float32 image; it takes over the array's memory when it is float32 too."""
    if dtype == "float32":
        return torch.from_numpy(values)
    return torch.from_numpy(noise.round_bf16(values).view(np.int16)).view(torch.bfloat16)


def _require_small(spec: TensorSpec, values: NDArray[np.float32]) -> None:
    largest = float(np.abs(values).max(initial=0.0))
    if largest > FP16_LIMIT:
        raise StateError(
            f'{spec.name} holds {largest:.0f}, too large for live_dtype = "float16" (limit '
            f"{FP16_LIMIT:.0f}). Use "
            '"bfloat16".'
        )
