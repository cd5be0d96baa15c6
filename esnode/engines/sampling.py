"""The next token of each row: greedy, or drawn from the row's own random stream.

torch's sampler draws for a whole batch from one generator, so a row's draw depends on its neighbours. Here
the draw of step t of a row is word t of the counter-based stream keyed by the row's own u64
(`protocol.noise.words`, tag 5): it depends on nothing else. Called by `decode.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from esnode.engines.interface import Sampling
from protocol import noise

TAG_SAMPLING = 5  # the law's tag for sampled tokens
HEAD = 1024  # likeliest tokens among which the nucleus is looked for first: sorting all takes a step's time


def uniforms(stream: int, count: int) -> np.ndarray:
    """`count` float64 in (0, 1), number t for step t: (word + 1/2) * 2^-32."""
    return (noise.words(stream, 0, TAG_SAMPLING, 0, count).astype(np.float64) + 0.5) * 2.0**-32


class Picker:
    """Chooses tokens for a batch of rows whose streams are known beforehand."""

    def __init__(self, sampling: Sampling, streams: Sequence[int], device: str = "cpu") -> None:
        """`streams[k]` keys row k; unused when greedy. ValueError on a negative temperature or top_p outside
        (0, 1].
        """
        if not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1:
            raise ValueError(
                f"temperature {sampling.temperature} is negative or top_p {sampling.top_p} not in (0, 1]"
            )
        self._sampling = sampling
        self._draws = None
        if sampling.temperature > 0:
            drawn = [uniforms(stream, sampling.max_new_tokens) for stream in streams]
            self._draws = torch.from_numpy(np.stack(drawn)).to(device)

    def pick(self, logits: torch.Tensor, step: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(token per row, whether the row's logits are usable) from logits of shape rows x vocabulary.

        Row i of the logits belongs to row `rows[i]` of the batch. Greedy takes the lowest id among equals. A
        row whose largest logit is NaN or infinite is not usable and its token means nothing.
        """
        largest, tokens = logits.max(-1)
        usable = torch.isfinite(largest)
        if self._draws is not None:
            scaled = (logits.double() - largest.double()[:, None]) / self._sampling.temperature
            tokens = _draw(scaled.exp_(), self._draws[rows, step], self._sampling.top_p)
        return tokens, usable


def _draw(weights: torch.Tensor, uniform: torch.Tensor, top_p: float) -> torch.Tensor:
    """Inverse CDF in order of token ids, so that logits which differ a little move few draws.

    weights: float64, rows x vocabulary, not normalised; those outside the nucleus are set to 0 here.
    """
    if top_p < 1:
        weights[weights < _nucleus_floor(weights, top_p)[:, None]] = 0
    cumulative = weights.cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def _nucleus_floor(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Per row the smallest weight of the nucleus: the fewest likeliest tokens whose share reaches top_p.

    Tokens as likely as the last one belong to it too, so the set does not depend on how a sort orders equals.
    """
    share = top_p * weights.sum(-1, keepdim=True)
    head = weights.topk(min(HEAD, weights.shape[1]), dim=-1).values
    if bool((head.sum(-1, keepdim=True) < share).any()):
        head = weights.sort(-1, descending=True).values
    before = head.cumsum(-1) - head
    inside = before < share
    return torch.where(inside, head, torch.inf).amin(-1)
