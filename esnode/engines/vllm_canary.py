"""The start-up canary: weights written in place must be the weights vLLM decodes with.

Perturbs one member in place and asks for a few answers; sends the same weights through vLLM's own loader and
asks again; restores and asks once more. Whatever copies an engine keeps of its weights (packed matrices,
captured graphs) shows as a difference. Called by `vllm_engine.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from esnode.engines.interface import Sampling
from esnode.replica import Replica
from protocol.errors import UserError
from protocol.lock import Lock

if TYPE_CHECKING:
    from esnode.engines.vllm_engine import VllmEngine

SEED, SIGMA = 0x63616E617279, 2.0**-6  # large enough that answers change
PROMPTS = tuple(tuple((17 * k + 7 * i) % 200 + 3 for i in range(4 + 5 * k)) for k in range(4))
NEW_TOKENS = 8
Named = tuple[str, torch.Tensor]


class CanaryFailed(UserError):
    """vLLM does not see weights that are written in place; nothing it answered could be trusted."""


def check(engine: VllmEngine, reloaded: Callable[[int, float, int], Sequence[str]]) -> None:
    """CanaryFailed when answers differ that must not: after a write in place, after the same weights went
    through vLLM's own loader, after a restore.

    `reloaded` sends a member, whose weights are written already, through that loader and names what changes.
    """
    before = _answers(engine)
    engine.perturb(SEED, SIGMA, 1)
    written = _answers(engine)
    moved = reloaded(SEED, SIGMA, 1)
    loaded = _answers(engine)
    if moved:
        raise CanaryFailed(f"vLLM's loader puts {moved[0]} elsewhere than the map says. {_ADVICE}")
    engine.restore()
    after = _answers(engine)
    if written != loaded:
        raise CanaryFailed(f"vLLM answers differently after a write in place and after a load. {_ADVICE}")
    if before != after:
        raise CanaryFailed(f"vLLM answers differently after perturbing and restoring. {_ADVICE}")
    if before == written:
        raise CanaryFailed(f"vLLM answers as before after its weights were changed. {_ADVICE}")


def reloaded(
    lock: Lock, replica: Replica, load: Callable[[Iterator[Named]], None], *member: object
) -> list[str]:
    """The stored tensors that change when the live weights there are go through `load`, vLLM's own loader."""
    held = [spec.name for spec in lock.manifest if replica.holds(spec.name)]
    before = {name: replica.live_digest(name) for name in held}
    load((name, replica.live(name).clone()) for name in held)  # one at a time: no second copy of the weights
    return [name for name in held if replica.live_digest(name) != before[name]]


_ADVICE = "Use --engine transformers, and report the model and the versions of vLLM and torch"


def _answers(engine: VllmEngine) -> tuple[Any, ...]:
    """Greedy tokens (decode) and log-likelihoods (prefill) of a few fixed prompts."""
    sampling = Sampling(NEW_TOKENS, ())
    tokens = engine.generate(PROMPTS, sampling, [0] * len(PROMPTS))
    return tokens, engine.loglik(PROMPTS, [prompt[::-1] for prompt in PROMPTS])
