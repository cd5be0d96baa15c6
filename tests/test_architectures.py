"""Many architectures of transformers at tiny sizes: mapped, filled and run like the library's own loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from esnode import slicemap
from esnode.engines import transformers_engine
from esnode.engines.interface import Sampling
from esnode.kernels.cpu import CpuKernels
from esnode.replica import Replica
from tests import tiny

GPT2 = {"vocab_size": tiny.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MIXED = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
# Fused projections, other names, biases, experts of several layouts, windows, state-space and linear
# attention.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neox": tiny.SHAPE,
    "opt": tiny.SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": tiny.SHAPE,
    "phi3": tiny.SHAPE,
    "gemma2": tiny.SHAPE | {"head_dim": 8, "sliding_window": 16},
    "gemma3_text": tiny.SHAPE | {"head_dim": 8, "sliding_window": 16},
    "qwen3_moe": tiny.SHAPE | EXPERTS | {"head_dim": 8},
    "granitemoe": tiny.SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": tiny.SHAPE | LATENT,
    "qwen3_next": tiny.SHAPE | EXPERTS | MIXED,
    "mamba": {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


@pytest.fixture(params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    settings = AutoConfig.for_model(request.param, **ARCHITECTURES[request.param])
    return tiny.write_model(tmp_path / request.param, settings)


@pytest.mark.slow
def test_an_architecture(folder: Path) -> None:
    run = tiny.lock(folder)
    model, views = slicemap.build(folder, run.manifest, torch.bfloat16)
    Replica(model, views, run, folder, CpuKernels())
    ours = model.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    engine = transformers_engine.load(tiny.lock(folder, live_dtype="float32"), folder)
    draw = np.random.default_rng(0)
    prompts = [[*range(40, 60), *draw.integers(0, 250, k).tolist()] for k in (1, 19, 7, 3, 12)]
    free = engine.generate(prompts, Sampling(12, ()), [])
    sampling = Sampling(12, tuple(answer[k + 2] for k, answer in enumerate(free)))
    together = engine.generate(prompts, sampling, [])
    assert together == [engine.generate([prompt], sampling, [])[0] for prompt in prompts]
    targets = [[5, 6], [7], [8, 9, 10], [11], [12]]
    alone = [engine.loglik([p], [t])[0] for p, t in zip(prompts, targets, strict=True)]
    assert engine.loglik(prompts, targets) == pytest.approx(alone, abs=1e-3)


def test_capped_attention_is_computed_as_such(tmp_path: Path) -> None:
    """Some releases of transformers compute Gemma 2 with an attention that leaves the cap out, silently."""
    settings = AutoConfig.for_model("gemma2", **tiny.SHAPE, head_dim=8)
    assert settings.attn_logit_softcapping
    folder = tiny.write_model(tmp_path / "m", settings)
    model, _ = slicemap.build(folder, tiny.lock(folder).manifest, torch.float32)
    assert model.config._attn_implementation == "eager"  # type: ignore[union-attr]
