"""Master and live weights: equal to the slow law, through every way a library may lay them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from esnode import manifest, memory, slicemap, state
from esnode.engines import transformers_engine
from esnode.engines.interface import MemoryPlan
from esnode.kernels.cpu import CpuKernels
from esnode.kernels.reference import ReferenceKernels
from esnode.replica import Replica, memory_plan
from esnode.state import DTYPES, State, StateError
from protocol import noise, seeds
from protocol.lock import Lock, Parent
from tests import tiny

KINDS = ("llama", "qwen2", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("replica")
    return {kind: tiny.write(root / kind, kind) for kind in KINDS}


def build(folder: Path, run: Lock, kernels: Any = None, compute: torch.dtype | None = None) -> Replica:
    model, views = slicemap.build(folder, run.manifest, compute or DTYPES[run.live_dtype])
    return Replica(model, views, run, folder, kernels or CpuKernels())


def live(replica: Replica, name: str, dtype: str) -> np.ndarray:
    """Live weights as flat numpy of the live dtype (bf16 as bits)."""
    tensor = replica.live(name).to(DTYPES[dtype]).reshape(-1).contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else tensor.numpy()


def expect(replica: Replica, run: Lock, wanted: dict[str, np.ndarray]) -> None:
    for name, values in wanted.items():
        assert live(replica, name, run.live_dtype).tobytes() == values.tobytes(), name


def rounded(masters: dict[str, np.ndarray], run: Lock) -> dict[str, np.ndarray]:
    return {name: noise.round_to(values, run.live_dtype) for name, values in masters.items()}


def perturbed(masters: dict[str, np.ndarray], run: Lock, seed: int, sigma: float, sign: int) -> Any:
    return {
        name: noise.perturb(
            values, noise.integers(seed, seeds.tensor_key(name), 0, values.size), sigma, sign, run.live_dtype
        )
        for name, values in masters.items()
    }


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("live_dtype", ["bfloat16", "float16", "float32"])
def test_live_weights_are_the_law(folders: dict[str, Path], kind: str, live_dtype: str) -> None:
    run = tiny.lock(folders[kind], live_dtype=live_dtype)
    masters = tiny.masters(folders[kind], run.manifest)
    replica = build(folders[kind], run)
    assert replica.digest() == run.digest == replica.state.recompute_digest()
    expect(replica, run, rounded(masters, run))
    for seed, sign in ((7, 1), (7, -1), (1 << 63, 1)):
        replica.perturb(seed, 0.0078125, sign)
        expect(replica, run, perturbed(masters, run, seed, 0.0078125, sign))
    replica.restore()
    expect(replica, run, rounded(masters, run))
    assert replica.state.recompute_digest() == run.digest


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", [CpuKernels, ReferenceKernels])
def test_apply_equals_the_slow_law(folders: dict[str, Path], master: str, kernels: Any) -> None:
    folder = folders["mixtral"]
    run = tiny.lock(folder, master=master)
    chain, after = tiny.chain(run, folder, 5)
    replica = build(folder, run, kernels())
    digests = replica.apply(chain.entries[:4]) + replica.apply(chain.entries[4:])
    assert digests[0] == digests[1] == run.digest  # lock and roster move nothing
    stated = [chain.digest_at(round) for round in range(1, 5)]
    assert digests[2:6] == stated and digests[6] == tiny.digest(after) == replica.state.recompute_digest()
    for name, values in after.items():
        assert replica.read(name).tobytes() == values.tobytes(), name
    expect(replica, run, rounded(after, run))


def test_one_pass_or_many_give_the_same(folders: dict[str, Path]) -> None:
    run = tiny.lock(folders["llama"])
    chain, after = tiny.chain(run, folders["llama"], 6)
    at_once = State.load(run, folders["llama"], CpuKernels())
    one_by_one = State.load(run, folders["llama"], ReferenceKernels())
    assert at_once.apply(chain.entries) == [one_by_one.apply([entry])[0] for entry in chain.entries]
    assert at_once.digest() == tiny.digest(after)


def test_many_cycles_change_nothing(folders: dict[str, Path]) -> None:
    run = tiny.lock(folders["llama"])
    replica = build(folders["llama"], run)
    before = rounded(tiny.masters(folders["llama"], run.manifest), run)
    for seed in range(1000):
        replica.perturb(seed, 0.0625, 1 if seed % 2 else -1)
        replica.restore()
    expect(replica, run, before)
    assert replica.state.recompute_digest() == run.digest


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_a_thousand_cycles_on_the_demo_model() -> None:
    from esnode import models

    folder = models.resolve("demo").path
    kernels = CpuKernels()
    specs = manifest.read(folder)
    run = tiny.lock(folder, digest=manifest.state_digest(folder, specs, kernels))
    replica = build(folder, run, kernels)
    assert replica.digest() == run.digest
    before = {spec.name: replica.live(spec.name).clone() for spec in specs}
    for seed in range(1000):
        replica.perturb(seed, 0.001953125, 1)
        replica.restore()
    assert all(torch.equal(replica.live(name), values) for name, values in before.items())
    assert replica.state.recompute_digest() == run.digest


def test_float32_arithmetic_on_the_same_rounded_weights(folders: dict[str, Path]) -> None:
    run = tiny.lock(folders["mixtral"])
    replica = build(folders["mixtral"], run, compute=torch.float32)
    masters = tiny.masters(folders["mixtral"], run.manifest)
    replica.perturb(3, 0.0078125, -1)
    assert replica.live("model.norm.weight").dtype == torch.float32
    expect(replica, run, perturbed(masters, run, 3, 0.0078125, -1))


def test_a_trained_subset(folders: dict[str, Path]) -> None:
    folder = folders["llama"]
    run = tiny.lock(folder, include=("*.layers.1.*",), exclude=("*norm*",))
    replica = build(folder, run)
    masters = tiny.masters(folder, run.manifest)
    every = {spec.name: values for spec, values in manifest.tensors(folder, run.manifest)}
    replica.perturb(3, 0.0625, 1)
    expect(replica, run, rounded(every, run) | perturbed(masters, run, 3, 0.0625, 1))
    assert sum(part.master.numel() for part in replica.state.parts) == sum(v.size for v in masters.values())
    assert (replica.read("model.norm.weight") == every["model.norm.weight"]).all()


def test_tied_weights_are_one_tensor(folders: dict[str, Path]) -> None:
    run = tiny.lock(folders["llama"])
    model, views = slicemap.build(folders["llama"], run.manifest, torch.bfloat16)
    assert "lm_head.weight" not in views
    replica = Replica(model, views, run, folders["llama"], CpuKernels())
    replica.perturb(1, 0.0625, 1)
    head = model.get_output_embeddings().weight
    assert head.data_ptr() == replica.live("model.embed_tokens.weight").data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_what_transformers_would_load(folders: dict[str, Path], kind: str) -> None:
    from transformers import AutoModelForCausalLM

    run = tiny.lock(folders[kind])
    model, views = slicemap.build(folders[kind], run.manifest, torch.bfloat16)
    Replica(model, views, run, folders[kind], CpuKernels())
    ours = model.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ---------------------------------------------------------------- the slice map


def test_fused_experts_are_slices(folders: dict[str, Path]) -> None:
    run = tiny.lock(folders["mixtral"])
    model, views = slicemap.build(folders["mixtral"], run.manifest, torch.bfloat16)
    assert views.keys() == {spec.name for spec in run.manifest}
    names = dict(model.named_parameters())
    fused = [name for name in views if ".experts." in name]
    assert fused and not any(name in names for name in fused)


def tamper(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the library do something else with the tensors that it loads."""
    real = slicemap._load

    def load(*arguments: Any) -> Any:
        model = real(*arguments)
        change(dict(model.named_parameters()))
        return model

    monkeypatch.setattr(slicemap, "_load", load)


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.data.clone()
    a.data.copy_(b.data)
    b.data.copy_(kept)


def test_swapped_tensors_are_followed(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    tamper(monkeypatch, lambda names: swap(names[k], names[v]))
    model, views = slicemap.build(folders["llama"], tiny.lock(folders["llama"]).manifest, torch.bfloat16)
    names = dict(model.named_parameters())
    assert views[k].data_ptr() == names[v].data_ptr() and views[v].data_ptr() == names[k].data_ptr()


def test_a_transposed_tensor_is_followed(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"  # square: its shape says nothing
    tamper(monkeypatch, lambda names: names[name].data.copy_(names[name].data.T.clone()))
    run = tiny.lock(folders["llama"])
    model, views = slicemap.build(folders["llama"], run.manifest, torch.bfloat16)
    replica = Replica(model, views, run, folders["llama"], CpuKernels())
    replica.perturb(5, 0.0625, 1)
    expect(replica, run, perturbed(tiny.masters(folders["llama"], run.manifest), run, 5, 0.0625, 1))
    stored = load_file(folders["llama"] / "model.safetensors")[name]
    replica.restore()
    assert torch.equal(dict(model.named_parameters())[name], stored.T)


@pytest.mark.parametrize("what", ["permuted", "scaled", "one element"])
def test_what_cannot_be_followed_is_refused_by_name(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def change(names: dict[str, torch.Tensor]) -> None:
        data = names[name].data
        if what == "permuted":
            data.copy_(data.roll(1, 0).clone())
        elif what == "scaled":
            data.mul_(2)
        else:
            data[3, 3] += 1

    tamper(monkeypatch, change)
    with pytest.raises(slicemap.SliceError, match=r"layers\.1\.mlp\.up_proj"):
        slicemap.build(folders["llama"], tiny.lock(folders["llama"]).manifest, torch.bfloat16)


def test_unused_tensors(folders: dict[str, Path], tmp_path: Path) -> None:
    for path in folders["llama"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(48, 32, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(slicemap.SliceError, match=r"layers\.2\.mlp\.up_proj.*exclude"):
        slicemap.build(tmp_path, manifest.read(tmp_path), torch.bfloat16)
    specs = manifest.read(tmp_path, exclude=["*.layers.2.*"])
    _, views = slicemap.build(tmp_path, specs, torch.bfloat16)
    assert "model.layers.2.mlp.up_proj.weight" not in views


def test_missing_tensors(folders: dict[str, Path], tmp_path: Path) -> None:
    for path in folders["llama"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(slicemap.SliceError, match=r"layers\.1\.mlp\.up_proj.*incomplete"):
        slicemap.build(tmp_path, manifest.read(tmp_path), torch.bfloat16)
    del tensors["model.norm.weight"]
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(slicemap.SliceError, match=r"norm\.weight has shape \(31,\) in the file and"):
        slicemap.build(tmp_path, manifest.read(tmp_path), torch.bfloat16)


def test_equal_tensors_are_told_apart(tmp_path: Path) -> None:
    """Norms of ones and biases of zeros say nothing by their values; the probe does not use them."""
    folder = tiny.write(tmp_path / "same", "qwen2")
    tensors = load_file(folder / "model.safetensors")
    flat = {name: torch.ones_like(t) if t.dim() == 1 else t for name, t in tensors.items()}
    save_file(flat, folder / "model.safetensors", metadata={"format": "pt"})
    run = tiny.lock(folder)
    replica = build(folder, run)
    replica.perturb(9, 0.0625, 1)
    expect(replica, run, perturbed(tiny.masters(folder, run.manifest), run, 9, 0.0625, 1))


# ---------------------------------------------------------------- refusals


def test_fp16_refuses_large_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "large")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 40000
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StateError, match=r"model\.norm\.weight holds 39936"):
        State.load(tiny.lock(folder, live_dtype="float16"), folder, CpuKernels())
    State.load(tiny.lock(folder), folder, CpuKernels())


def test_an_interrupted_update_cannot_be_used(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.lock(folders["llama"])
    chain, _ = tiny.chain(run, folders["llama"], 1)
    kernels = CpuKernels()
    replica = build(folders["llama"], run, kernels)
    calls = []

    def update(*arguments: Any) -> list[int]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return CpuKernels().update(*arguments)

    monkeypatch.setattr(kernels, "update", update)
    with pytest.raises(KeyboardInterrupt):
        replica.apply(chain.entries)
    for use in (replica.digest, replica.restore, lambda: replica.read("model.norm.weight")):
        with pytest.raises(state.TornState):
            use()


def test_a_model_that_does_not_fit(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device="cpu", sharing=1: 1_000_000)
    monkeypatch.setattr(slicemap, "build", lambda *arguments: pytest.fail("allocated before asking"))
    told: list[MemoryPlan] = []
    with pytest.raises(memory.MemoryShort, match=r"needs 0\.5 GB of memory .* 0\.0 GB are free"):
        transformers_engine.load(tiny.lock(folders["llama"]), folders["llama"], report=told.append)
    assert told and told[0].total > told[0].available


def test_memory_plan_counts_what_is_trained(folders: dict[str, Path]) -> None:
    run = tiny.lock(folders["llama"])
    total = sum(int(np.prod(spec.shape)) for spec in run.manifest)
    plan = memory_plan(run, torch.bfloat16, 1000, 10**9)
    assert (plan.master, plan.live) == (4 * total, 2 * total)
    some = tiny.lock(folders["llama"], include=("*.layers.1.*",), master="bfloat16")
    assert memory_plan(some, torch.bfloat16, 1000, 10**9).master < 2 * total


def test_available_memory_respects_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    inner = groups / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_CGROUP", groups)
    monkeypatch.setattr("esnode.reservations._place", lambda: tmp_path / "nobody else's")
    assert memory.available() == memory.UNKNOWN
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    assert memory.available() == 50 * 1024
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("9000\n")
    (inner / "memory.stat").write_text("anon 1\ninactive_file 1000\n")
    for name, text in (("max", "20000"), ("current", "15000"), ("stat", "inactive_file 2000")):
        (groups / "a" / f"memory.{name}").write_text(text)
    assert memory.available() == 7000


# ---------------------------------------------------------------- forks


def test_replay_of_a_parents_ledger(folders: dict[str, Path]) -> None:
    folder = folders["llama"]
    old = tiny.lock(folder)
    chain, _ = tiny.chain(old, folder, 12)
    masters = tiny.masters(folder, old.manifest)
    for entry in chain.commits[:10]:
        tiny.apply_slowly(masters, old, entry)
    parent = Parent(old.run_id.hex(), 10, chain.commits[9].hash.hex(), tiny.digest(masters))
    run = tiny.lock(folder, parent=parent, digest=parent.digest, alpha=(0.03125,))
    replica = build(folder, run)
    assert replica.replay(chain, 10) == run.digest == replica.digest()
    own = tiny.extend(run, masters, 2, luck=5)
    assert replica.apply(own.entries)[-1] == tiny.digest(masters)
    expect(replica, run, rounded(masters, run))


def test_replay_refuses_what_does_not_belong(folders: dict[str, Path]) -> None:
    folder = folders["llama"]
    chain, _ = tiny.chain(tiny.lock(folder), folder, 1)
    with pytest.raises(StateError, match="master dtype"):
        State.load(tiny.lock(folder, master="bfloat16"), folder, CpuKernels()).replay(chain, 1)
    with pytest.raises(StateError, match="trains the tensors"):
        State.load(tiny.lock(folder, exclude=("*norm*",)), folder, CpuKernels()).replay(chain, 1)
    moved = State.load(tiny.lock(folder), folder, CpuKernels())
    moved.replay(chain, 1)
    with pytest.raises(StateError, match="the oldest first"):
        moved.replay(chain, 1)


def test_another_model_is_not_the_base(folders: dict[str, Path], tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other", seed=1)
    with pytest.raises(manifest.WrongBase, match="its digest is"):
        transformers_engine.load(tiny.lock(folders["llama"]), other)
    with pytest.raises(manifest.WrongBase, match=r"it also holds lm_head\.weight"):
        transformers_engine.load(tiny.lock(folders["llama"]), folders["qwen2"])
