"""The journal: what was appended comes back, whatever happened, and every trouble is one sentence."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.events import (
    EntryAppended,
    InviteOpened,
    KeyAllowed,
    KeyRevoked,
    Record,
    ResultAccepted,
    TermTaken,
    UnitFailed,
)
from coordinator.journal import VERSION, Journal, JournalError, entries_of
from protocol.messages import Result, Unit

RUN = bytes(range(32))
TOP = 2**64 - 1


def result(round: int, member: int = 0) -> ResultAccepted:
    unit = Unit(round, 0, member, 0, 3)
    return ResultAccepted(
        2, Result(unit, TOP, (0.5, -0.0, 1e-310, 3.0), b"parent__", TOP, 3, 0, TOP, (1, 2, 3), b"evidence", 1)
    )


def some_records() -> list[Record]:
    return [
        TermTaken(1, b"nonce___"),
        EntryAppended(0, b"\x00\xff" * 700),
        result(0),
        UnitFailed(1, Unit(0, 0, 5, 0, 0), "out of memory: 1 GB\u2014sorry"),
        result(TOP, TOP),
        EntryAppended(1, b""),
        InviteOpened(1, RUN, 1_900_000_000, 3),
        KeyAllowed(RUN[::-1], "gpu \u2014 1", 1),
        KeyRevoked(RUN[::-1], "sold"),
    ]


def test_round_trip_and_order(tmp_path: Path) -> None:
    path = tmp_path / "coordinator" / "journal.sqlite"
    journal = Journal(path, RUN)
    records = some_records()
    journal.append(records[:4])
    journal.append([])
    journal.append(records[4:])
    assert list(journal.replay()) == records
    journal.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Journal(path, RUN)
    assert list(again.replay()) == records
    assert entries_of(again.replay()) == [b"\x00\xff" * 700, b""]
    again.close()


def test_results_of_one_round_share_a_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", RUN)
    failed = UnitFailed(1, Unit(0, 0, 5, 0, 0), "x")
    records = [result(0), result(0, 1), failed, result(0, 2), EntryAppended(0, b"a"), result(1), result(1, 1)]
    journal.append(records)
    assert list(journal.replay()) == records
    journal.close()
    with closing(sqlite3.connect(tmp_path / "j")) as database:
        rounds = [row[0] for row in database.execute("SELECT round FROM record ORDER BY seq")]
    assert rounds == [0, 0, 0, None, 1]


def test_prune_keeps_entries_terms_and_open_rounds(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", RUN)
    journal.append([TermTaken(1, b""), EntryAppended(0, b"a"), result(0), result(1), result(2), result(TOP)])
    journal.append([UnitFailed(1, Unit(1, 0, 0, 0, 0), "x"), EntryAppended(1, b"b")])
    journal.prune(1)
    assert list(journal.replay()) == [
        TermTaken(1, b""), EntryAppended(0, b"a"), result(2), result(TOP), EntryAppended(1, b"b"),
    ]  # fmt: skip
    journal.append([result(3)])
    assert list(journal.replay())[-1] == result(3)


def test_second_coordinator_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.journal._BUSY_SECONDS", 0.05)
    first = Journal(tmp_path / "j", RUN)
    with pytest.raises(JournalError, match="another coordinator runs on this folder"):
        Journal(tmp_path / "j", RUN)
    first.close()
    Journal(tmp_path / "j", RUN).close()


def test_other_run_other_version_other_file(tmp_path: Path) -> None:
    Journal(tmp_path / "j", RUN).close()
    with pytest.raises(JournalError, match="belongs to run 00010203"):
        Journal(tmp_path / "j", bytes(32))
    with closing(sqlite3.connect(tmp_path / "j")) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(JournalError, match=f"version {VERSION + 1}, this program writes version {VERSION}"):
        Journal(tmp_path / "j", RUN)
    with closing(sqlite3.connect(tmp_path / "foreign")) as database:
        database.execute("CREATE TABLE t (x)")
    with pytest.raises(JournalError, match="no journal of esnode"):
        Journal(tmp_path / "foreign", RUN)
    (tmp_path / "text").write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    with pytest.raises(JournalError, match="damaged"):
        Journal(tmp_path / "text", RUN)


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    with pytest.raises(JournalError, match="cannot use the journal"):
        Journal(tmp_path / "j", RUN)


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", RUN)
    journal.append([result(round) for round in range(200)])
    journal.close()
    clean = (tmp_path / "j").read_bytes()
    at = clean.rindex(b"evidence")
    (tmp_path / "j").write_bytes(clean[:at] + b"E" + clean[at + 1 :])
    journal = Journal(tmp_path / "j", RUN)
    with pytest.raises(JournalError, match=r"damaged at record \d+ \(checksum\)"):
        list(journal.replay())
    journal.close()


def test_disk_full_stores_nothing_of_the_batch(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the write fails in the same place."""
    script = f"""
import resource, signal, sys
from pathlib import Path
from coordinator.events import EntryAppended, TermTaken
from coordinator.journal import Journal, JournalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path({str(tmp_path / "j")!r}), bytes(32))
journal.append([TermTaken(1, b"n")])
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    journal.append([TermTaken(2, b"n"), EntryAppended(0, bytes(1_000_000))])
except JournalError as error:
    print(error)
    print([record.term for record in journal.replay()])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20
    )
    sentence, terms = done.stdout.splitlines()
    assert str(tmp_path / "j") in sentence and ("full" in sentence or "I/O" in sentence)
    assert terms == "[1]"
    journal = Journal(tmp_path / "j", bytes(32))
    assert list(journal.replay()) == [TermTaken(1, b"n")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write read-only files")
def test_a_read_only_journal_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j", RUN).close()
    (tmp_path / "j").chmod(0o400)
    with pytest.raises(JournalError, match=r"Permission|cannot be written"):
        Journal(tmp_path / "j", RUN)


def test_kill_at_any_moment_keeps_whole_batches(tmp_path: Path) -> None:
    """SIGKILL while appending: whole batches are there, at least everything that was reported flushed."""
    script = f"""
from pathlib import Path
from coordinator.events import EntryAppended
from coordinator.journal import Journal
journal = Journal(Path({str(tmp_path / "j")!r}), bytes(32))
height = len(list(journal.replay()))
while True:
    journal.append([EntryAppended(height + k, bytes(500)) for k in range(7)])
    height += 7
    print(height, flush=True)
"""
    chance = random.Random(5)
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            time.sleep(chance.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            told = process.stdout.read().split()
        journal = Journal(tmp_path / "j", bytes(32))
        heights = [record.height for record in journal.replay() if isinstance(record, EntryAppended)]
        journal.close()
        assert heights == list(range(len(heights))) and len(heights) % 7 == 0
        assert len(heights) >= (int(told[-1]) if told else 7)


def test_memory_is_modest(tmp_path: Path) -> None:
    """Replay streams: a long journal is never held as a whole."""
    journal = Journal(tmp_path / "j", RUN)
    for start in range(0, 40_000, 10_000):
        journal.append([result(start + k) for k in range(10_000)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in journal.replay()) == 40_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8_000
