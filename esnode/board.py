"""TensorBoard events of a run, written from its ledger and metrics.

The events are rebuilt from the first round whenever a run starts or resumes, so that they never hold a
round twice. Called by `run.py`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import Any

from esnode.folder import RunFolder
from esnode.history import HeldOut, History, Round


class Board:
    """Writes what is new at each `update`."""

    def __init__(self, folder: RunFolder) -> None:
        # Not SummaryWriter: it writes on a thread of its own, where a full disk ends in a stray traceback.
        from tensorboardX.event_file_writer import EventsWriter

        if folder.tensorboard.exists():
            shutil.rmtree(folder.tensorboard)
        folder.tensorboard.mkdir()
        self._writer = EventsWriter(str(folder.tensorboard / "events"))
        self._rounds = 0
        self._scores = 0

    def update(self, history: History, times: Mapping[int, float]) -> None:
        """Add what came since the last call. `times` maps a round to its commit's unix time."""
        for row in history.rounds[self._rounds :]:
            self._round(row, times.get(row.round))
        for score in history.heldout[self._scores :]:
            self._score(score, times.get(score.round - 1))
        if (len(history.rounds), len(history.heldout)) != (self._rounds, self._scores):
            self._writer.flush()
        self._rounds, self._scores = len(history.rounds), len(history.heldout)

    def _round(self, row: Round, moment: float | None) -> None:
        values = {
            "reward/mean": row.mean,
            "reward/best": row.best,
            "reward/worst": row.worst,
            "reward/spread": row.spread,
            "round/members": row.members,
            "round/void": row.void,
            "round/sigma": row.sigma,
            "round/alpha": row.alpha,
        }
        self._add(values, row.round, moment)

    def _score(self, score: HeldOut, moment: float | None) -> None:
        values = {"heldout/mean": score.mean, "heldout/correct": score.correct / score.prompts}
        self._add(values, score.round, moment)

    def _add(self, values: Mapping[str, Any], step: int, moment: float | None) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in values.items():
            event = Event(wall_time=moment or time.time(), step=step, summary=scalar(name, value))
            self._writer.write_event(event)

    def close(self) -> None:
        self._writer.close()
