"""From ledgers back to weights: the library, verify, export, and forks of forks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from esnode import ancestry, export, history, manifest, rebuild
from esnode.rebuild import DamagedLedger, LedgerMissing, NoSuchRound, WrongWeights
from protocol import ledger
from protocol.chain import Chain
from protocol.entries import EndBody, seal
from protocol.lock import Lock, Parent
from tests import tiny

ROUNDS = 11  # more than are fused into one pass


def save(chain: Chain, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ledger.MAGIC + b"".join(entry.raw for entry in chain.entries))
    return path


def end(chain: Chain, state: dict[str, np.ndarray]) -> None:
    body = EndBody("done")
    chain.append(
        seal(
            body, parent=chain.tip, term=1, nonce=bytes(8), round=chain.round, digest=tiny.digest(state),
            key=tiny.KEY,
        )
    )  # fmt: skip


class Case:
    """A tiny model, a ledger that trains it, and the slow reference's weights at its end."""

    def __init__(self, place: Path) -> None:
        self.model = tiny.write(place / "model")
        self.lock = tiny.lock(self.model)
        self.chain, self.state = tiny.chain(self.lock, self.model, ROUNDS)
        end(self.chain, self.state)
        self.path = save(self.chain, place / "run" / "run.ledger")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"))


# ---------------------------------------------------------------- the library


def test_the_last_round_has_the_references_bits(case: Case) -> None:
    heard: list[tuple[str, int, int]] = []
    rebuilt = rebuild.at(
        case.path, base=str(case.model), runnable=False, tell=lambda *words: heard.append(words)
    )
    assert rebuilt.digest == tiny.digest(case.state)
    assert (rebuilt.round, rebuilt.compared) == (ROUNDS, ROUNDS)
    for name, values in case.state.items():
        assert np.array_equal(rebuilt.weights.read(name).reshape(-1), values), name
    assert heard[-1] == ("replaying rounds", ROUNDS, ROUNDS)


def test_any_round_can_be_had_and_continued(case: Case) -> None:
    opened = rebuild.open_ledger(case.path.parent)
    start = rebuild.start(opened, str(case.model), runnable=False)
    assert start.digest == case.lock.digest
    for round in (3, 4, ROUNDS):
        start = rebuild.advance(start, round)
        assert start.digest == case.chain.digest_at(round)
        alone = rebuild.at(opened, round, str(case.model), runnable=False)
        assert alone.digest == start.digest


def test_an_engine_and_a_bare_state_agree(case: Case) -> None:
    with_model = rebuild.at(case.path, 5, str(case.model), threads=1)
    bare = rebuild.at(case.path, 5, str(case.model), runnable=False, backend="reference")
    assert with_model.digest == bare.digest
    assert with_model.engine.generate([[1, 2, 3]], _greedy(), [0])
    with pytest.raises(AssertionError, match="without a model"):
        _ = bare.engine


def _greedy() -> object:
    from esnode.engines.interface import Sampling

    return Sampling(4, (tiny.END,))


def test_what_does_not_exist_is_named(case: Case, tmp_path: Path) -> None:
    with pytest.raises(LedgerMissing, match=r"run\.ledger in its folder"):
        rebuild.open_ledger(tmp_path)
    for round in (-1, ROUNDS + 1):
        with pytest.raises(NoSuchRound, match=f"weights after 0 to {ROUNDS}, not after"):
            rebuild.at(case.path, round, str(case.model))
    (tmp_path / "run.ledger").write_bytes(ledger.MAGIC)
    with pytest.raises(LedgerMissing, match="holds nothing yet: no coordinator has begun"):
        rebuild.open_ledger(tmp_path)
    (tmp_path / "run.ledger").write_bytes(b"")
    with pytest.raises(DamagedLedger, match="cannot be used: damaged at byte 0"):
        rebuild.open_ledger(tmp_path)


def test_of_a_damaged_ledger_the_sound_rounds_can_be_had(case: Case, tmp_path: Path) -> None:
    data = bytearray(case.path.read_bytes())
    at = len(ledger.MAGIC) + sum(len(entry.raw) for entry in case.chain.entries[:6])
    data[at + 50] ^= 4
    (tmp_path / "run.ledger").write_bytes(data)
    opened = rebuild.open_ledger(tmp_path)
    assert opened.damage is not None and opened.damage.offset == at
    with pytest.raises(DamagedLedger, match=f"byte {at}.*--round {opened.rounds}"):
        rebuild.at(opened, base=str(case.model), runnable=False)
    rebuilt = rebuild.at(opened, opened.rounds, str(case.model), runnable=False)
    assert rebuilt.digest == case.chain.digest_at(opened.rounds)


# ---------------------------------------------------------------- verify


def test_verify_says_what_it_compared(case: Case) -> None:
    verdict = rebuild.verify(case.path, str(case.model))
    assert verdict.fault is None
    assert (verdict.rounds, verdict.compared, verdict.ended) == (ROUNDS, ROUNDS, True)
    assert verdict.digest == f"{tiny.digest(case.state):016x}"
    assert f"{ROUNDS} of {ROUNDS} rounds compared, all equal" in verdict.words()
    assert json.loads(json.dumps(verdict.as_json()))["fault"] is None


def test_verify_of_an_unfinished_ledger_admits_what_it_could_not_compare(case: Case, tmp_path: Path) -> None:
    unfinished = Chain(case.chain.entries[:-1])
    verdict = rebuild.verify(save(unfinished, tmp_path / "run.ledger"), str(case.model))
    assert verdict.fault is None and not verdict.ended
    assert verdict.compared == ROUNDS - 1
    assert f"{ROUNDS - 1} of {ROUNDS} rounds compared" in verdict.words()
    assert "could not be compared" in verdict.words()


@pytest.mark.parametrize(
    ("rounds", "words"), [(0, "no round is committed yet"), (1, "no round was compared;")]
)
def test_verify_calls_it_no_success_that_nothing_was_compared(
    case: Case, tmp_path: Path, rounds: int, words: str
) -> None:
    entries = case.chain.entries
    end = entries.index(case.chain.commits[0]) + rounds
    verdict = rebuild.verify(save(Chain(entries[:end]), tmp_path / "run.ledger"), str(case.model))
    assert (verdict.fault, verdict.rounds, verdict.compared) == (None, rounds, 0)
    assert words in verdict.words() and "all equal" not in verdict.words()


def test_verify_finds_another_base(case: Case, tmp_path: Path) -> None:
    same_shapes = tiny.write(tmp_path / "other", seed=1)
    verdict = rebuild.verify(case.path, str(same_shapes))
    assert verdict.fault is not None and "is not the base model" in verdict.fault
    other_shapes = tiny.write(tmp_path / "larger", num_hidden_layers=3)
    assert "is not the base model" in (rebuild.verify(case.path, str(other_shapes)).fault or "")


def test_verify_finds_rewards_that_do_not_lead_to_the_stated_weights(case: Case, tmp_path: Path) -> None:
    """A ledger signed in full by its own key, whose digests belong to other rewards."""
    state = tiny.masters(case.model, case.lock.manifest)
    honest = tiny.extend(case.lock, state, 3, luck=1)
    forged = Chain()
    other = tiny.extend(case.lock, tiny.masters(case.model, case.lock.manifest), 3, luck=2)
    for true, false in zip(honest.entries, other.entries, strict=True):
        forged.append(
            seal(
                false.body, parent=forged.tip, term=1, nonce=bytes(8), round=true.round, digest=true.digest,
                key=tiny.KEY,
            )
        )  # fmt: skip
    path = save(forged, tmp_path / "run.ledger")
    with pytest.raises(WrongWeights, match="after 1 of 3 rounds"):
        rebuild.at(path, base=str(case.model), runnable=False)
    assert "after 1 of 3 rounds" in (rebuild.verify(path, str(case.model)).fault or "")


def test_one_flipped_bit_anywhere_is_found(case: Case, tmp_path: Path) -> None:
    data = case.path.read_bytes()
    path = tmp_path / "run.ledger"
    lock_end = len(ledger.MAGIC) + len(case.chain.entries[0].raw)
    for offset in range(0, len(data), max(1, len(data) // 150)):
        altered = bytearray(data)
        altered[offset] ^= 1 << (offset % 8)
        path.write_bytes(altered)
        try:
            verdict = rebuild.verify(path, str(tmp_path / "never loaded"))
        except DamagedLedger:
            assert offset < lock_end, "only without its lock a ledger is of no use at all"
            continue
        assert verdict.fault is not None and "damaged at byte" in verdict.fault, offset


# ---------------------------------------------------------------- export


def test_an_exported_round_is_what_the_nodes_ran(case: Case, tmp_path: Path) -> None:
    rebuilt = rebuild.at(case.path, 4, str(case.model), threads=1)
    export.write(rebuilt.weights, rebuilt.lock, case.model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    values = loaded.state_dict()
    for spec in rebuilt.lock.manifest:
        exact = torch.from_numpy(rebuilt.weights.read(spec.name)).to(torch.bfloat16)
        assert torch.equal(values[spec.name], exact), spec.name


# ---------------------------------------------------------------- forks


def fork_of(parent: Chain, round: int, lock: Lock, state_digest: int) -> Lock:
    """A lock that starts from a round of `parent`."""
    from dataclasses import replace

    entry = parent.commits[round - 1] if round else parent.entries[0]
    claim = Parent(parent.lock.run_id.hex(), round, entry.hash.hex(), state_digest)
    return replace(lock, parent=claim, digest=state_digest)


def test_a_fork_of_a_fork_is_rebuilt_from_the_base(case: Case, tmp_path: Path) -> None:
    state = tiny.masters(case.model, case.lock.manifest)
    for entry in case.chain.commits[:7]:
        tiny.apply_slowly(state, case.lock, entry)
    child_lock = fork_of(case.chain, 7, tiny.lock(case.model, members=6), tiny.digest(state))
    child = tiny.extend(child_lock, state, 3, luck=5)
    end(child, state)
    grandchild_lock = fork_of(child, 3, tiny.lock(case.model, shaping="ranks"), tiny.digest(state))
    grandchild = tiny.extend(grandchild_lock, state, 2, luck=6)
    end(grandchild, state)

    path = save(grandchild, tmp_path / "run.ledger")
    parents = tmp_path / "parents"
    with pytest.raises(ancestry.NoParent, match="was forked from run"):
        rebuild.at(path, 0, str(case.model))
    save(child, ancestry.file_of(child.lock.run_id.hex(), parents))
    save(case.chain, ancestry.file_of(case.lock.run_id.hex(), parents))
    verdict = rebuild.verify(path, str(case.model))
    assert verdict.fault is None and verdict.digest == f"{tiny.digest(state):016x}"

    save(child, ancestry.file_of(case.lock.run_id.hex(), parents))
    with pytest.raises(ancestry.NoParent, match="is not the ledger this run was forked from"):
        rebuild.at(path, 0, str(case.model))


def test_the_history_of_a_rebuilt_ledger(case: Case) -> None:
    past = history.of_chain(rebuild.open_ledger(case.path).chain)
    assert len(past.rounds) == ROUNDS and past.ended


def test_the_base_is_found_by_its_label(case: Case, tmp_path: Path) -> None:
    """A lock made by `esnode run` calls a local model by its path."""
    lock = tiny.lock(case.model, model=str(case.model))
    chain, _ = tiny.chain(lock, case.model, 1)
    path = save(chain, tmp_path / "run.ledger")
    assert rebuild.verify(path).fault is None
    with pytest.raises(manifest.WrongBase):
        moved = tiny.lock(case.model, model=str(tiny.write(tmp_path / "other", seed=3)))
        rebuild.at(save(tiny.chain(moved, case.model, 1)[0], tmp_path / "2" / "run.ledger"))
