"""Batched forward passes of a causal language model: generation and the likelihood of given targets.

A loop of our own over the model's forward, so that the checkpoint's generation_config (whose repetition
penalty would change greedy answers) is ignored, work can be cancelled between steps, and rows do not depend
on their neighbours other than by float rounding. Called by `transformers_engine.py`.

Rules that keep a result repeatable: rows keep the order they are given in; a call is cut into batches by size
alone (`Limits`, a function of the model and the device kind, and the `Room` that a shortage of memory left);
in a batch the tokens that all rows begin with are run once; rows that have ended leave the batch when a
quarter of it has. All of it is a function of the prompts and the answers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from esnode.engines.interface import Cancelled, Sampling, StopCheck, never
from esnode.engines.packing import WORTH, Packing, linears
from esnode.engines.sampling import Picker
from esnode.engines.shortage import OutOfMemory, Room

Result = TypeVar("Result")
SHARED = 8  # a common beginning shorter than this is not worth a pass of its own


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may hold: `per_token` and `per_logit` bytes estimated from the configuration, `total` the
    bound.
    """

    per_token: int
    per_logit: int
    vocabulary: int
    total: int

    def batches(self, lengths: Sequence[int], kept: Sequence[int], rows: int = 0) -> Iterator[slice]:
        """Consecutive runs of rows, `rows` at most (0: any number).

        `lengths`: tokens of a row at its end, `kept`: positions with logits.
        """
        start = 0
        for end in range(1, len(lengths) + 1):
            full = end == len(lengths) or end - start == rows
            if full or self._bytes(lengths[start : end + 1], kept[start : end + 1]) > self.total:
                yield slice(start, end)
                start = end

    def _bytes(self, lengths: Sequence[int], kept: Sequence[int]) -> int:
        logits = max(kept) * self.vocabulary * self.per_logit
        return len(lengths) * (max(lengths) * self.per_token + logits)


def limits(model: nn.Module, total: int) -> Limits:
    """Bytes per token: keys and values of all layers, and the widest activations of one."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    heads = int(getattr(config, "num_attention_heads", None) or 1)  # a model without attention keeps less
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or hidden // heads)
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    size = next(model.parameters()).element_size()
    cache = 2 * layers * kv_heads * head * size
    return Limits(cache + (2 * wide + 4 * hidden) * size, 4 + size, int(config.vocab_size), total)


@dataclass(slots=True)
class _Rows:
    """A batch between two forward passes: its cache, attention mask, next positions and last logits."""

    cache: Any
    # rows x slots, 1 where a slot holds a real token; slots beyond `filled` are 1 beforehand
    mask: torch.Tensor
    filled: int
    positions: torch.Tensor  # rows: position of the next token
    logits: torch.Tensor  # rows x kept x vocabulary


class Decoder:
    """Runs one model. `broken` holds the rows of the last call whose logits were NaN or infinite."""

    def __init__(self, model: nn.Module, limits: Limits, device: str = "cpu", pack: bool = False) -> None:
        self.model = model
        self.packing = Packing(linears(model) if pack else ())
        self.room = Room()
        self._limits = limits
        self._device = device
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._keeps = "logits_to_keep" in known
        self._positions = "position_ids" in known
        self.broken: tuple[int, ...] = ()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        stop: StopCheck = never,
    ) -> list[list[int]]:
        """New token ids per prompt, the stop id excluded. A row with unusable logits is cut to an empty
        answer. Raises OutOfMemory, Cancelled.
        """
        _require_prompts(prompts)
        if sampling.temperature > 0 and len(streams) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(streams)} random streams")
        answers: list[list[int]] = []
        broken: list[int] = []
        lengths = [len(prompt) + sampling.max_new_tokens for prompt in prompts]
        for part in self._limits.batches(lengths, [1] * len(prompts), self.room.rows):
            picker = Picker(sampling, streams[part], self._device)
            work = partial(self._generate, prompts[part], sampling, picker, stop)
            found, bad = self._batch(part, work)
            broken += [len(answers) + row for row in bad]
            answers += found
        self.broken = tuple(broken)
        return answers

    def _batch(self, part: slice, work: Callable[[], Result]) -> Result:
        """What `work` on these rows gives; where memory runs out, packed copies are the first to go."""
        try:
            return self.room.batch(part.stop - part.start, work)
        except OutOfMemory:
            self.packing.give_up()
            raise

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, picker: Picker, stop: StopCheck
    ) -> tuple[list[list[int]], list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        broken: list[int] = []
        if sampling.max_new_tokens < 1:
            return answers, broken
        if sampling.max_new_tokens >= WORTH:
            self.packing.use(len(prompts))
        ends = frozenset(sampling.stop_ids)
        batch = self._prefill(prompts, 1, sampling.max_new_tokens, stop)
        rows = list(range(len(prompts)))  # which prompt each row of the batch is
        running = set(rows)
        for step in range(sampling.max_new_tokens):
            picked, usable = picker.pick(batch.logits[:, -1], step, torch.tensor(rows, device=self._device))
            tokens = picked.tolist()
            for row, token, good in zip(rows, tokens, usable.tolist(), strict=True):
                if row not in running:
                    continue
                if not good:
                    answers[row] = []
                    broken.append(row)
                if not good or token in ends:
                    running.discard(row)
                else:
                    answers[row].append(token)
            if not running or step + 1 == sampling.max_new_tokens:
                break
            if 4 * len(running) <= 3 * len(rows) and self._leave(batch, [row in running for row in rows]):
                picked = picked[torch.tensor([row in running for row in rows], device=self._device)]
                rows = [row for row in rows if row in running]
            self._step(batch, picked, stop)
        return answers, sorted(broken)

    def loglik(
        self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], stop: StopCheck = never
    ) -> list[float]:
        """Sum of log p(target tokens | prompt) per row, in nats; -inf for a row with unusable logits.

        Logits are computed at the positions that predict a target token only, their softmax in float32.
        """
        _require_prompts(prompts)
        sums: list[float] = []
        broken: list[int] = []
        kept = [len(target) for target in targets]
        lengths = [len(prompt) + count for prompt, count in zip(prompts, kept, strict=True)]
        for part in self._limits.batches(lengths, kept, self.room.rows):
            work = partial(self._loglik, prompts[part], targets[part], stop)
            for value in self._batch(part, work):
                if not math.isfinite(value):
                    broken.append(len(sums))
                sums.append(value if math.isfinite(value) else -math.inf)
        self.broken = tuple(broken)
        return sums

    @torch.inference_mode()
    def _loglik(
        self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], stop: StopCheck
    ) -> list[float]:
        keep = max(len(target) for target in targets)
        if keep == 0:
            return [0.0] * len(prompts)
        # The last token of a target predicts nothing that is asked for. Rows end together (left padding), so
        # the positions that predict targets are the last ones of every row.
        rows = [[*prompt, *target[:-1]] for prompt, target in zip(prompts, targets, strict=True)]
        most = min(len(prompt) for prompt in prompts) - 1
        batch = self._prefill(rows, keep, 0, stop, most)
        wanted = torch.zeros(len(rows), keep, dtype=torch.long)
        counted = torch.zeros(len(rows), keep, dtype=torch.bool)
        for row, target in enumerate(targets):
            wanted[row, keep - len(target) :] = torch.tensor(target, dtype=torch.long)
            counted[row, keep - len(target) :] = True
        logits = batch.logits.float()
        chosen = logits.gather(-1, wanted.to(self._device)[..., None])[..., 0]
        values = (chosen - logits.logsumexp(-1)).cpu()
        return [math.fsum(row[mask].tolist()) for row, mask in zip(values, counted, strict=True)]

    def _prefill(
        self, rows: Sequence[Sequence[int]], keep: int, room: int, stop: StopCheck, most: int | None = None
    ) -> _Rows:
        """Run the given tokens of all rows, left-padded; logits of the last `keep` positions.

        `room`: tokens that will be appended; `most`: how many of the first tokens may be shared at most.
        """
        longest = max(len(row) for row in rows)
        shared = self._shared(rows, longest + room, most)
        cache = self._new_cache()
        if shared:
            self._run(
                cache, torch.tensor([list(rows[0][:shared])]), None, torch.arange(shared)[None], 1, stop
            )
            if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
                cache.batch_repeat_interleave(len(rows))
            else:  # a state that cannot be repeated row by row: run every row whole
                shared, cache = 0, self._new_cache()
        width = longest - shared
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.ones(len(rows), shared + width + room, dtype=torch.long)
        positions = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            own = len(row) - shared
            ids[place, width - own :] = torch.tensor(list(row[shared:]))
            mask[place, shared : shared + width - own] = 0
            positions[place, width - own :] = torch.arange(shared, len(row))
        mask = mask.to(self._device)
        logits = self._run(cache, ids, mask[:, : shared + width], positions, keep, stop)
        ends = torch.tensor([len(row) for row in rows], device=self._device)
        return _Rows(cache, mask, shared + width, ends, logits)

    def _shared(self, rows: Sequence[Sequence[int]], total: int, most: int | None) -> int:
        """How many first tokens are run once for all rows; 0 where padding in the middle would be misread."""
        config: Any = self.model.config.get_text_config()  # type: ignore[operator, union-attr]
        window = getattr(config, "sliding_window", None)
        if len(rows) < 2 or not self._positions or (window and total > window):
            return 0
        count = min(len(row) for row in rows) - 1
        count = count if most is None else min(count, most)
        first = rows[0]
        for row in rows[1:]:
            same = 0
            while same < count and row[same] == first[same]:
                same += 1
            count = same
        return count if count >= SHARED else 0

    def _new_cache(self) -> Any:
        config: Any = self.model.config
        return DynamicCache(config=config)

    def _run(
        self,
        cache: Any,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        keep: int,
        stop: StopCheck,
    ) -> torch.Tensor:
        """One forward pass; logits of the last `keep` positions."""
        if stop():
            raise Cancelled
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if mask is not None:
            arguments["attention_mask"] = mask
        if self._positions:
            arguments["position_ids"] = positions.to(self._device)
        if self._keeps:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = self.model(input_ids=ids.to(self._device), **arguments).logits
        return logits[:, -keep:]

    def _step(self, batch: _Rows, tokens: torch.Tensor, stop: StopCheck) -> None:
        """Append one token to every row."""
        batch.filled += 1
        batch.logits = self._run(
            batch.cache, tokens[:, None], batch.mask[:, : batch.filled], batch.positions[:, None], 1, stop
        )
        batch.positions = batch.positions + 1

    def _leave(self, batch: _Rows, stay: Sequence[bool]) -> bool:
        """Take the rows that have ended out of the batch, where its cache allows that."""
        layers = batch.cache.layers
        if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
            return False
        kept = torch.tensor([place for place, stays in enumerate(stay) if stays], device=self._device)
        batch.cache.batch_select_indices(kept)
        batch.mask = batch.mask[kept]
        batch.positions = batch.positions[kept]
        return True


def _require_prompts(prompts: Sequence[Sequence[int]]) -> None:
    for place, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {place} has no tokens: the model has nothing to continue")
