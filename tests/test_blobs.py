"""Lock and task data as blobs: what the coordinator hands out, and to whom."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from coordinator.blobs import Shelf
from protocol.messages import BLOB_PART, WIRE_VERSION, Blob, BlobAsk, Message, Refuse
from tests.runs import toy_lock, wait_for
from tests.test_server import N1, N2, STRANGER, Door

DATA = bytes(range(256)) * 2500  # 640,000 bytes: two parts and a bit
LOCK = replace(toy_lock(), data=hashlib.sha256(DATA).hexdigest())
DIGEST = bytes.fromhex(LOCK.data)
KEY = b"k" * 32


def ask(offset: int = 0, digest: bytes = DIGEST) -> BlobAsk:
    return BlobAsk(WIRE_VERSION, WIRE_VERSION, digest, offset)


def shelf(folder: Path, data: bytes = DATA) -> Shelf:
    (folder / "task.jsonl").write_bytes(data)
    return Shelf(LOCK, folder / "task.jsonl")


def test_parts_make_the_whole(tmp_path: Path) -> None:
    served, found = shelf(tmp_path), b""
    while len(found) < len(DATA):
        blob = served.answer(KEY, ask(len(found)))
        assert isinstance(blob, Blob) and blob.total == len(DATA) and blob.offset == len(found)
        assert 0 < len(blob.data) <= BLOB_PART
        found += blob.data
    assert found == DATA
    end = served.answer(KEY, ask(len(DATA)))
    assert isinstance(end, Blob) and end.data == b""
    lock = served.answer(KEY, ask(digest=LOCK.run_id))
    assert isinstance(lock, Blob) and lock.data == LOCK.to_bytes()


def test_what_is_not_served_is_refused_in_words(tmp_path: Path) -> None:
    served = shelf(tmp_path)
    for question, words in (
        (ask(len(DATA) + 1), "has 640000 bytes"),
        (ask(digest=b"x" * 32), f"serves run {LOCK.run_id.hex()[:16]} and nothing else"),
        (BlobAsk(WIRE_VERSION + 1, WIRE_VERSION + 3, DIGEST, 0), "install the same release"),
    ):
        answer = served.answer(KEY, question)
        assert isinstance(answer, Refuse) and words in answer.reason
    (tmp_path / "task.jsonl").write_bytes(DATA[:-1] + b"?")
    altered = served.answer(KEY, ask())
    assert isinstance(altered, Refuse) and "was altered" in altered.reason
    (tmp_path / "task.jsonl").unlink()
    missing = served.answer(KEY, ask())
    assert isinstance(missing, Refuse) and "cannot read its task.jsonl" in missing.reason


def test_a_key_cannot_ask_for_ever(tmp_path: Path) -> None:
    """Else a member that reads nothing would fill the coordinator's memory with parts on their way."""
    (tmp_path / "task.jsonl").write_bytes(DATA)
    now = [0.0]
    served = Shelf(LOCK, tmp_path / "task.jsonl", lambda: now[0])
    answers = [served.answer(KEY, ask()) for _ in range(100)]
    served_bytes = sum(len(answer.data) for answer in answers if isinstance(answer, Blob))
    assert 4 * len(DATA) <= served_bytes <= 4 * (len(DATA) + len(LOCK.to_bytes()) + 4 * BLOB_PART)
    assert answers[-1] == Refuse(
        "this machine has fetched the run's data several times already; wait ten minutes"
    )
    assert isinstance(served.answer(b"o" * 32, ask()), Blob), "others are not concerned"
    now[0] += 600
    assert isinstance(served.answer(KEY, ask()), Blob)


def test_an_admitted_key_is_answered_before_hello_and_nobody_else(tmp_path: Path) -> None:
    door = Door()
    door.gate.blobs = shelf(tmp_path).answer
    try:
        link = door.link(N1)
        assert door.say(link, ask(BLOB_PART)) == [], "the server never sees it"

        def heard() -> list[Message]:
            door.pump(0.02)
            return link.receive()

        (blob,) = wait_for(heard)
        assert isinstance(blob, Blob) and blob.data == DATA[BLOB_PART : 2 * BLOB_PART]
        assert not door.link(STRANGER).send(ask()) and not door.link(N2).send(ask()), "no connection yet"
        assert door.gate.counts.bytes_out["Blob"] > BLOB_PART
    finally:
        door.close()
