"""Folding the rounds of a chain into weights, every digest that the chain states compared.

Lives here: the one loop behind verifying, exporting, resuming from an ancestor and joining late. Needs no
torch: weights are whatever `apply` moves. Called by `rebuild.py` and `state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from esnode.tell import Tell, silent
from protocol.bodies import Entry
from protocol.counting import rounds
from protocol.errors import UserError

if TYPE_CHECKING:
    from protocol.chain import Chain

FUSED = 8  # commits per pass over the weights: enough to be limited by noise, few enough for a progress bar

Apply = Callable[[Sequence[Entry]], Sequence[int]]  # D after each entry


class WrongWeights(UserError):
    """Replay gave other weights than the ledger records."""


class DamagedMaster(UserError):
    """Weights are not what was last written to them: memory changed by itself. `tensors` names them."""

    def __init__(self, tensors: tuple[str, ...]) -> None:
        super().__init__(
            f"{tensors[0]} changed in this machine's memory by itself ({len(tensors)} tensors did). Test its "
            "memory, then start again"
        )
        self.tensors = tensors


def fold(apply: Apply, chain: Chain, first: int, last: int, tell: Tell = silent) -> int:
    """Apply the rounds `first` to `last` of the chain; returns how many stated digests were met.

    Only commits move weights, so only they are folded. WrongWeights at the first round after which the
    weights are not those the chain records.
    """
    compared = 0
    for start in range(first, last, FUSED):
        batch = chain.commits[start : min(start + FUSED, last)]
        for state, digest in enumerate(apply(batch), start=start + 1):
            stated = chain.digest_at(state)
            if stated is not None and stated != digest:
                raise WrongWeights(
                    f"after {state} of {rounds(last)} replay gives digest {digest:016x}, the ledger "
                    f"states {stated:016x}. This machine's arithmetic differs (see `esnode doctor`), or the "
                    "ledger was made by other code."
                )
            compared += stated is not None
        tell("replaying rounds", start + len(batch), last)
    return compared
