"""TensorBoard events of a run, written from its ledger and metrics.

The events are rebuilt from the first round whenever a run starts or resumes, so that they never hold a round
twice. The file format (records of length, checksum, protobuf message) is one page of code here; the packages
that write it bring torch along and write on threads of their own. Called by `run.py`.
"""

from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Mapping

from esnode.folder import RunFolder
from esnode.history import HeldOut, History, Round


class Board:
    """Writes what is new at each `update`."""

    def __init__(self, folder: RunFolder) -> None:
        if folder.tensorboard.exists():
            shutil.rmtree(folder.tensorboard)
        folder.tensorboard.mkdir()
        now = time.time()
        path = folder.tensorboard / f"events.out.tfevents.{now:.0f}.esnode"
        self._file = open(path, "wb")  # noqa: SIM115 - lives as long as the run
        self._file.write(record(_wall_time(now) + _bytes(3, b"brain.Event:2")))
        self._rounds = 0
        self._scores = 0

    def update(self, history: History, times: Mapping[int, float]) -> None:
        """Add what came since the last call. `times` maps a round to its commit's unix time."""
        for row in history.rounds[self._rounds :]:
            self._round(row, times.get(row.round))
        for score in history.heldout[self._scores :]:
            self._score(score, times.get(score.round - 1))
        self._rounds, self._scores = len(history.rounds), len(history.heldout)
        self._file.flush()

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

    def _add(self, values: Mapping[str, float], step: int, moment: float | None) -> None:
        self._file.write(record(scalars(values, step, time.time() if moment is None else moment)))

    def close(self) -> None:
        self._file.close()


# ---------------------------------------------------------------- the format


def scalars(values: Mapping[str, float], step: int, moment: float) -> bytes:
    """One Event message of tensorflow/core/util/event.proto with a simple value per name."""
    summary = b"".join(
        _bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in values.items()
    )
    return _wall_time(moment) + _varint(2 << 3) + _varint(step) + _bytes(5, summary)


def record(message: bytes) -> bytes:
    """A message as a TFRecord: length, its masked CRC-32C, the message, its masked CRC-32C."""
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", _masked(length)) + message + struct.pack("<I", _masked(message))


def crc32c(data: bytes) -> int:
    """CRC-32 with Castagnoli's polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_row(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


_CRC = tuple(map(_crc_row, range(256)))


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _wall_time(moment: float) -> bytes:
    return _varint(1 << 3 | 1) + struct.pack("<d", moment)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
