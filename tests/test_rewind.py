"""A replica that goes back: to a checkpoint or the base, and forward again by the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from esnode import events
from esnode.engines import transformers_engine
from esnode.events import Apply, CancelUnit, Evaluate, Rewind, Stop
from esnode.nodestate import Turn
from esnode.state import TornState
from protocol.messages import Applied, Assign, Hello
from tests import tiny
from tests.bench import LOCK, OUTCOME, Bench, ledger, unit_of, working

ENTRIES = ledger(LOCK.digest, 55, 66)  # lock, roster, commits 0, 1, 2


def test_a_checkpoint_that_fits_is_gone_on_from() -> None:
    bench = Bench(ENTRIES, height=4, digest=66)
    assert bench.all(Apply)[0].entries == tuple(ENTRIES[4:])


def test_a_checkpoint_at_the_tip_is_taken_at_its_word() -> None:
    bench = Bench(ENTRIES, height=5, digest=77)
    assert bench.sent(Hello)[0].digest == 77 and not bench.all(Rewind)


@pytest.mark.parametrize(("height", "digest"), [(4, 67), (3, 56), (9, 66)])
def test_a_checkpoint_that_does_not_fit_is_rebuilt_from_the_base(height: int, digest: int) -> None:
    bench = Bench(ENTRIES, height=height, digest=digest)
    assert bench.all(Rewind) == [Rewind(())], "no checkpoint is tried again"
    assert bench.sent(Hello)[0].digest == 0 and not bench.all(Stop)
    bench.step(events.Rewound(bench.now, 0, LOCK.digest, 3))
    assert bench.all(Apply)[0].entries == tuple(ENTRIES)


def test_a_rewind_to_a_checkpoint_that_does_not_fit_goes_on_to_the_base() -> None:
    bench = Bench(ENTRIES)
    bench.step(events.EntriesApplied(bench.now, (LOCK.digest, LOCK.digest, 55, 66, 77), 3))
    turn = Turn(bench.state)
    turn.rewind()
    bench.state = turn.state
    bench.tick()
    assert bench.all(Rewind) == [Rewind(tuple(ENTRIES))]
    bench.step(events.Rewound(bench.now, 4, 1234, 3))
    assert bench.all(Rewind) == [Rewind(())]
    bench.step(events.Rewound(bench.now, 0, LOCK.digest, 3))
    assert len(bench.all(Apply)[0].entries) == 5


def test_a_base_that_is_another_model_stops_the_node() -> None:
    bench = Bench(ENTRIES, height=4, digest=67)
    bench.step(events.Rewound(bench.now, 0, 1, 3))
    assert bench.stop is not None and "not the run's base model" in bench.stop.reason


def test_the_running_unit_ends_before_the_master_goes_back() -> None:
    bench = working()
    turn = Turn(bench.state)
    turn.rewind()
    bench.state, bench.effects = turn.state, tuple(turn.effects)
    assert bench.all(CancelUnit) == [CancelUnit(unit_of())]
    bench.hear(Assign(unit_of(0, 1), bench.state.parent, 15))
    assert not bench.all(Evaluate) and not bench.all(Rewind), "the engine is busy"
    bench.step(events.Evaluated(bench.now, unit_of(), OUTCOME))
    assert len(bench.all(Rewind)) == 1 and not bench.state.unacked
    bench.step(events.Rewound(bench.now, 2, LOCK.digest, 3))
    assert bench.sent(Applied)[0].height == 2
    assert [effect.unit for effect in bench.all(Evaluate)] == [unit_of(0, 1)]


def test_an_apply_on_its_way_counts_for_nothing() -> None:
    bench = Bench(ENTRIES)
    turn = Turn(bench.state)
    turn.rewind()
    bench.state = turn.state
    bench.step(events.EntriesApplied(bench.now, (1, 2, 3, 4, 5), 3))
    assert len(bench.all(Rewind)) == 1 and not bench.sent(Applied)


# ---------------------------------------------------------------- the engine


def test_an_engine_goes_back_to_its_base(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    lock = tiny.lock(folder)
    chain, _ = tiny.chain(lock, folder, 3)
    engine = transformers_engine.load(lock, folder)
    live = {spec.name: engine.model.state_dict()[spec.name].clone() for spec in lock.manifest}
    after = engine.apply(chain.commits)
    assert engine.reset() == lock.digest == engine.digest()
    state = engine.model.state_dict()
    assert all(bool((state[name] == values).all()) for name, values in live.items())
    assert engine.apply(chain.commits) == after


def test_a_torn_replica_is_mended_by_reading_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write(tmp_path / "model")
    lock = tiny.lock(folder)
    chain, _ = tiny.chain(lock, folder, 1)
    engine = transformers_engine.load(lock, folder)
    kernels = engine._replica.state.kernels
    with monkeypatch.context() as broken:
        broken.setattr(kernels, "update", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.apply(chain.commits)
    with pytest.raises(TornState):
        engine.digest()
    assert engine.reset() == lock.digest
    assert len(engine.apply(chain.commits)) == 1
