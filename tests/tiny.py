"""Tiny Hugging Face folders with random weights, locks for them and signed ledgers that train them. Offline,
fast.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from esnode import manifest
from protocol import noise, seeds
from protocol.bodies import Admission, CommitBody, LockBody, MemberReward, RosterBody, step_of
from protocol.lock import Lock

if TYPE_CHECKING:
    from protocol.chain import Chain

SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCABULARY = 256 + len(SPECIALS)
END = 256
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "eos_token_id": END, "bos_token_id": END, "pad_token_id": END,
}  # fmt: skip
KEY = bytes(range(32))  # signs the test ledgers
TRUSTED = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"  # the public half of KEY


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(BPE({letter: place for place, letter in enumerate(letters)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token=SPECIALS[0], pad_token=SPECIALS[0], chat_template=TEMPLATE
    )


def config(kind: str = "llama", **changes: Any) -> Any:
    """Configurations: "llama", "qwen2" (biases), "mixtral" (experts that transformers 5 fuses on load)."""
    fields = SHAPE | {"tie_word_embeddings": kind == "llama"} | changes
    if kind == "mixtral":
        return MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **fields)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**fields)


def write(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any
) -> Path:
    """A whole model folder of one of the kinds of `config`."""
    return write_model(folder, config(kind, **changes), dtype, seed)


def write_model(folder: Path, settings: Any, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Random weights (norms and biases too, so that none are alike), tokenizer, template."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings)
    for name, parameter in model.named_parameters():
        scale = (
            0.1 if parameter.dim() == 1 or "embed" in name else 0.3
        )  # layers that outweigh the residual path
        parameter.data = torch.randn_like(parameter) * scale + (1.0 if parameter.dim() == 1 else 0.0)
    model.to(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def masters(folder: Path, specs: Sequence[Any], dtype: str = "float32") -> dict[str, np.ndarray]:
    """The slow reference's masters: flat float32 per trained tensor, already rounded where the master is
    bf16.
    """
    found = {}
    for spec, values in manifest.tensors(folder, [spec for spec in specs if spec.trained]):
        found[spec.name] = from_bf16(noise.round_bf16(values)) if dtype == "bfloat16" else values.copy()
    return found


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def digest(state: dict[str, np.ndarray]) -> int:
    return sum(noise.digest(values, seeds.tensor_key(name)) for name, values in state.items()) % (1 << 64)


def lock(folder: Path, **changes: Any) -> Lock:
    """A lock of four mirrored members whose digests are taken by the slow reference."""
    include, exclude = changes.get("include", ("*",)), changes.get("exclude", ())
    specs = manifest.read(folder, include, exclude)
    fields: dict[str, Any] = {
        "model": folder.name,
        "base": manifest.base_digest(folder, specs),
        "digest": digest(masters(folder, specs, changes.get("master", "float32"))),
        "manifest": tuple(specs),
        "task": "toy",
        "data": "00" * 32,
        "scorer": "00" * 32,
        "train_prompts": 8,
        "heldout_prompts": 4,
        "train_tokens": "00" * 32,
        "heldout_tokens": "00" * 32,
        "stop_ids": (END,),
        "reward_low": 0.0,
        "reward_high": 1.0,
        "members": 4,
        "mirrored": True,
        "sigma": (0.0078125,),
        "alpha": (0.0078125,),
        "per_round": 4,
        "chunk": 2,
        "max_new_tokens": 8,
        "trusted": (TRUSTED,),
    }
    return Lock(**(fields | changes))


def apply_slowly(state: dict[str, np.ndarray], run: Lock, entry: Any) -> None:
    """One entry on the slow reference's masters, in place."""
    step = step_of(run, entry)
    if step is None:
        return
    for name, values in state.items():
        key = seeds.tensor_key(name)
        total = noise.weighted_sum(step.seeds, step.c, key, 0, values.size)
        if run.master == "bfloat16":
            bits = noise.round_bf16(values)
            state[name] = from_bf16(noise.update_bf16(bits, total, step.shift, step.rounding_seed, key, 0))
        else:
            state[name] = noise.update(values, total, step.shift)


def chain(run: Lock, folder: Path, rounds: int, luck: int = 0) -> tuple[Chain, dict[str, np.ndarray]]:
    """A signed ledger with random rewards, and the masters after it by the slow reference."""
    state = masters(folder, run.manifest, run.master)
    return extend(run, state, rounds, luck), state


def extend(run: Lock, state: dict[str, np.ndarray], rounds: int, luck: int = 0) -> Chain:
    """A ledger that starts from `state`, which is moved along. Skips the test where nothing that signs is
    installed.
    """
    for package in ("msgspec", "nacl"):
        pytest.importorskip(package, reason=f"a signed ledger needs {package}")
    from protocol.chain import Chain
    from protocol.entries import seal

    draw = random.Random(luck)
    built = Chain()

    def add(body: Any) -> Any:
        return built.append(
            seal(
                body, parent=built.tip, term=1, nonce=bytes(8), round=built.round if built.height else 0,
                digest=digest(state), key=KEY,
            )
        )  # fmt: skip

    add(LockBody(run.to_bytes()))
    add(RosterBody((Admission(1, bytes(32), "one"),)))
    for round in range(rounds):
        members = tuple(MemberReward(k, draw.random(), 1) for k in range(run.members))
        entry = add(CommitBody(run.alpha_at(round), run.sigma_at(round), members))
        apply_slowly(state, run, entry)
    return built
