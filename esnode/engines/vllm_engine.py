"""The engine on vLLM: a replica whose live weights are the parameters vLLM decodes with.

vLLM's engine core runs in this process, so that a unit's requests are all queued before the first step and
batches repeat. With one rank the model is here too and kernels write straight into its parameters; with
several (`--tp`) each has a process, and the replica is theirs (`vllm_ranks`). Where a stored tensor lies in
vLLM's fused and cut parameters is found with a probe through vLLM's own loader (`slicemap`, `shardmap`).
Called by `workshop.py` through `engines/interface.py`; only `load` is specific.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from esnode import accelerators, memory, placement, slicemap
from esnode import kernels as kernel_registry
from esnode import ranks as cutting
from esnode.engines import vllm_canary, vllm_cpu, vllm_start, vllm_watch
from esnode.engines.interface import Cancelled, EngineEnded, MemoryPlan, Sampling, StopCheck, never
from esnode.engines.packing import WORTH, Packing
from esnode.engines.replica_engine import ReplicaEngine, require_base
from esnode.engines.shortage import OutOfMemory, loading
from esnode.engines.vllm_ranks import RankedReplica, Ranks
from esnode.engines.vllm_start import CACHES, MOST_BATCHED_TOKENS, MOST_SEQUENCES
from esnode.engines.wish import DEFAULT, Wish
from esnode.kernels.interface import Kernels
from esnode.manifest import check
from esnode.nodeoptions import cores
from esnode.replica import Replica, memory_plan
from esnode.state import DTYPES
from protocol.lock import Lock

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

Report = Callable[[MemoryPlan], None]


class VllmEngine(ReplicaEngine):
    """One replica in vLLM's own parameters. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        lock: Lock,
        replica: Replica | RankedReplica,
        engine: LLMEngine,
        kernels: Kernels,
        fingerprint: bytes,
        ranks: Ranks,
        packing: Packing | None = None,
        rows: int = 0,
    ) -> None:
        """`rows`: prompts at once at most, 0 for any number."""
        super().__init__(lock, replica, kernels, fingerprint)
        self._packing = packing or Packing(())
        self._broken: tuple[int, ...] = ()
        self._engine = engine
        self._ranks = ranks
        self._served = 0
        self.room.rows = rows

    def forget(self) -> None:
        """Packed copies of the weights are those of other weights from now on."""
        self._packing.drop()

    @property
    def broken(self) -> tuple[int, ...]:
        """Rows of the last call whose logits were NaN or infinite."""
        return self._broken

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        stop: StopCheck = never,
    ) -> list[list[int]]:
        """New token ids per prompt, stop id excluded. `streams[k]` (u64) seeds row k's sampling."""
        if prompts and sampling.max_new_tokens >= WORTH:
            self._packing.use(len(prompts))
        self._ranks.call(vllm_watch.begin)
        outputs = self._run(prompts, _settings(sampling, streams, None), stop)
        looks = self._ranks.call(vllm_watch.end)
        self._broken = ()
        if prompts and not any(seen for seen, _ in looks):
            raise RuntimeError("vLLM computes logits where they are not seen")
        if not all(sound for _, sound in looks):
            self._ranks.call(_empty_cache)
            outputs = self._settled(prompts, _settings(sampling, streams, 0), _chosen, stop)
        answers = []
        for row, output in enumerate(outputs):
            tokens = [] if row in self._broken else list(output.outputs[0].token_ids)
            answers.append(tokens[:-1] if tokens and tokens[-1] in sampling.stop_ids else tokens)
        return answers

    def loglik(
        self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], stop: StopCheck = never
    ) -> list[float]:
        """Sum of log p(target tokens | prompt) per row, teacher-forced, in nats; -inf for a broken row.

        vLLM always draws a token: here it stands where a target's last one would, so that a row takes no more
        room than it has tokens.
        """
        rows = [[*prompt, *target] for prompt, target in zip(prompts, targets, strict=True)]
        settings = [_asking(row[-1]) for row in rows]
        sums = []
        for row, output in enumerate(self._settled([row[:-1] for row in rows], settings, _asked, stop)):
            found = _asked(output)[len(prompts[row]) - 1 :]
            sums.append(-math.inf if row in self._broken else math.fsum(found))
        return sums

    @property
    def context(self) -> int:
        """Tokens of the longest sequence vLLM takes: the model's context, or less for want of cache."""
        return int(self._engine.vllm_config.model_config.max_model_len)

    @property
    def backend(self) -> str:
        """Name of the kernel implementation in use."""
        return self._replica.backend

    def close(self) -> None:
        """End the ranks' processes."""
        self._ranks.close()

    def _settled(
        self,
        rows: Sequence[Sequence[int]],
        settings: Sequence[Any],
        logprobs: Callable[[Any], list[float]],
        stop: StopCheck,
    ) -> list[Any]:
        """The outputs of all rows; `broken` are then those whose `logprobs` are not all numbers.

        What is no number stays in the cache of keys and values, where attention multiplies even what it
        masks: the cache is emptied then, and rows that may have met a neighbour's remains run once more.
        """
        outputs = self._run(rows, settings, stop)
        broken = _unsound(outputs, range(len(rows)), logprobs)
        if broken:
            self._ranks.call(_empty_cache)
        if 0 < len(broken) < len(rows):
            again = self._run([rows[row] for row in broken], [settings[row] for row in broken], stop)
            for row, output in zip(broken, again, strict=True):
                outputs[row] = output
            broken = _unsound(outputs, broken, logprobs)
            self._ranks.call(_empty_cache)
        self._broken = tuple(broken)
        return outputs

    def _run(self, rows: Sequence[Sequence[int]], settings: Sequence[Any], stop: StopCheck) -> list[Any]:
        """The outputs of all rows in order, which are queued together unless memory ran out earlier."""
        outputs: list[Any] = []
        size = self.room.rows or len(rows)
        for start in range(0, len(rows), size or 1):
            part = slice(start, start + size)
            decoded = min(len(rows[part]), MOST_SEQUENCES)
            try:
                outputs += self.room.batch(decoded, partial(self._batch, rows[part], settings[part], stop))
            except OutOfMemory:
                self._packing.give_up()
                raise
            except EngineEnded as error:
                error.rows = max(1, decoded // 2) if self._ranks.short else 0
                raise
        return outputs

    def _batch(self, rows: Sequence[Sequence[int]], settings: Sequence[Any], stop: StopCheck) -> list[Any]:
        """All rows as one batch of requests; their outputs in order. Cancelled between two steps."""
        names = [f"{self._served}-{k}" for k in range(len(rows))]
        self._served += 1
        finished: dict[str, Any] = {}
        try:
            for name, row, setting in zip(names, rows, settings, strict=True):
                self._engine.add_request(name, {"prompt_token_ids": list(row)}, setting)
            while self._engine.has_unfinished_requests():
                if stop():
                    raise Cancelled
                with self._ranks.turn():
                    stepped = self._engine.step()
                finished |= {output.request_id: output for output in stepped if output.finished}
        finally:  # whatever failed: nothing of this batch may be left for the next one
            if len(finished) < len(names):
                self._engine.abort_request(names)
            while self._engine.has_unfinished_requests():
                with self._ranks.turn():
                    self._engine.step()
        return [finished[name] for name in names]


def _settings(sampling: Sampling, streams: Sequence[int], logprobs: int | None) -> list[Any]:
    """vLLM's settings of each row. `logprobs` 0: also the log-probability of the chosen tokens."""
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=stream >> 1 if sampling.temperature else None,  # vLLM's seeds are signed
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # the lock names the stop ids
            logprobs=logprobs,
            detokenize=False,
        )
        for stream in streams
    ]


def _chosen(output: Any) -> list[float]:
    """Log-probabilities of the chosen tokens."""
    chosen = output.outputs[0]
    pairs = zip(chosen.logprobs, chosen.token_ids, strict=True)
    return [choices[token].logprob for choices, token in pairs]


def _asking(last: int) -> Any:
    """vLLM's settings of a row that is only scored: its own tokens, and `last` behind them."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, logprob_token_ids=[last], detokenize=False
    )


def _asked(output: Any) -> list[float]:
    """Log-probabilities of a scored row's tokens from the second on (nothing predicts the first), then of the
    one behind them.
    """
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    found = [choices[token].logprob for choices, token in pairs]
    (behind,) = output.outputs[0].logprobs
    *_, last = behind.values()  # the one that was drawn comes first, and is the same or of no interest
    return [*found, last.logprob]


def _unsound(
    outputs: Sequence[Any], rows: Sequence[int], logprobs: Callable[[Any], list[float]]
) -> list[int]:
    """Those of the rows with a log-probability that is no number."""
    return [row for row in rows if not all(map(math.isfinite, logprobs(outputs[row])))]


def _empty_cache(worker: Any) -> None:
    """On a vLLM worker: no remains in the memory of keys and values."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


# ---------------------------------------------------------------- loading


@loading
def load(
    lock: Lock,
    folder: str | Path,
    *,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    report: Report = lambda plan: None,
    wish: Wish = DEFAULT,
) -> VllmEngine:
    """The lock's base model in a ready engine, whose canary passed. For a fork, `replay` the parents next.

    Arguments as of `transformers_engine.load`. Raises VllmUnavailable, manifest.WrongBase,
    memory.MemoryShort, ranks.RanksError, slicemap.SliceError, shards.ShardError, vllm_ranks.RanksDiffer,
    vllm_canary.CanaryFailed.
    """
    folder, device = Path(folder), device or accelerators.device()
    kind = device.partition(":")[0]
    version = vllm_start.require_supported()
    specs = check(folder, lock)
    live = DTYPES[lock.live_dtype]
    free = memory.available(device, wish.sharing)
    plan = memory_plan(lock, live, CACHES[kind][0].work, free)
    count = _ranks(lock, folder, kind, plan, wish)
    if kind == "cuda":
        plan = cutting.share(plan, count)  # of one rank, on its own GPU
    else:
        plan = replace(plan, other=plan.other + (count - 1) * CACHES[kind][0].work)
    if count == 1:  # a rank's master is that of its slices, which no other engine can use
        wish = placement.agree(plan, device, wish)
    plan, cache = _settled(plan, device, wish)
    report(plan)
    memory.require(plan, lock.model)
    engine = vllm_start.start(lock, folder, kind, threads, count, cache, wish)
    ranks = Ranks(engine)
    fingerprint = _fingerprint(lock, device, version, count, cache)
    if count > 1:
        ranked = RankedReplica(ranks.ask, lock, folder, backend, bool(plan.host))
        require_base(lock, ranked, folder)
        kernels = kernel_registry.pick("cpu", None, threads)
        made = VllmEngine(lock, ranked, engine, kernels, fingerprint, ranks, rows=wish.rows)
        with vllm_start.first_answers(folder):
            vllm_canary.check(made, ranked.reloaded)
        return made
    host = placement.open_master(lock, plan, device, wish)
    kernels = placement.pick(device, backend, host)
    model = _model_of(engine)
    through = partial(vllm_start.through_loader, engine.vllm_config, model)
    views = slicemap.probe(model, folder, specs, through, live, vllm_start.padded())
    replica = Replica(model, views, lock, folder, kernels, device=device, host=host)
    require_base(lock, replica, folder)
    room = plan.on_device + plan.live <= plan.available // wish.sharing
    packing = vllm_cpu.packing(model) if kind == "cpu" and room else None
    made = VllmEngine(lock, replica, engine, kernels, fingerprint, ranks, packing, wish.rows)
    with vllm_start.first_answers(folder):
        vllm_canary.check(made, partial(vllm_canary.reloaded, lock, replica, through))
    return made


def _ranks(lock: Lock, folder: Path, kind: str, plan: MemoryPlan, wish: Wish) -> int:
    """How many ranks: as wished, else by the model's size and the memory of the GPUs; RanksError if not."""
    config = cutting.read_config(folder)
    cutting.require_dense(lock, config)
    gpus = range(torch.cuda.device_count() if kind == "cuda" else 0)
    if wish.tp:
        cutting.require(config, wish.tp, len(gpus) if kind == "cuda" else cores(), kind)
        return wish.tp
    if len(gpus) < 2 or wish.attach is not None or wish.sharing > 1:
        return 1
    return cutting.default(config, plan, [memory.available(f"cuda:{k}") for k in gpus])


def _settled(plan: MemoryPlan, device: str, wish: Wish) -> tuple[MemoryPlan, int]:
    """The plan, made for the largest cache, with its master where it shall be, and the bytes of the largest
    cache that fits. Where none does it stays as it is, and `memory.require` refuses it.
    """
    caches, leads = CACHES[device.partition(":")[0]], placement.leads(plan, device, wish)
    for cache in caches:
        less = replace(plan, other=plan.other - caches[0].work + cache.work)
        settled = placement.settle(less, device, wish)
        if settled.on_device <= settled.available and (settled.host or not leads):
            return settled, cache.size
    return placement.settle(plan, device, wish), caches[0].size


def _model_of(engine: LLMEngine) -> nn.Module:
    models: list[nn.Module] = engine.apply_model(lambda model: model)
    return models[0]


def _fingerprint(lock: Lock, device: str, version: str, ranks: int, cache: int) -> bytes:
    kind = device.partition(":")[0]
    name = torch.cuda.get_device_name(device) if kind == "cuda" else torch.backends.cpu.get_cpu_capability()
    parts = (
        "vllm engine 2", version, torch.__version__, lock.live_dtype, kind, name,
        "chunk" if lock.repeatable else "unit", str(MOST_SEQUENCES), str(MOST_BATCHED_TOKENS),
        f"tp {ranks}", f"cache {cache >> 30}",
    )  # fmt: skip
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).digest()
