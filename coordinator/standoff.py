"""Two digests that replay does not reconcile: why a run stops, in words.

Pure. Called by `disputes.py`; the values are in `claims.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.claims import Dispute
from coordinator.turn import Turn
from protocol.counting import rounds
from protocol.pieces import pieces_of


def stop_ledger(turn: Turn, dispute: Dispute, right: int, stated: int) -> None:
    """Replay from the base contradicts a digest that is signed already."""
    stop_with(
        turn,
        f"the ledger states digest {stated:016x} after {rounds(dispute.commits)}, replay from the base gives "
        f"{right:016x} ({dispute.confirmed[right]}): a wrong digest was signed. ",
    )


def stop_with(turn: Turn, sentence: str) -> None:
    """Stop the run with a sentence and how to go on."""
    turn.stop(sentence + "Go on with `esnode fork` from the last round that `esnode verify` finds right", 1)


def stop_both(turn: Turn, dispute: Dispute, won: Sequence[int]) -> None:
    """Two confirmed sides: nobody can say what the run's state is."""
    lines = []
    for digest in won:
        key = next((k for k, answer in dispute.answers.items() if answer.digest == digest), None)
        if key is None:
            continue
        answer, node = dispute.answers[key], turn.nodes[key]
        where = pieces_of(turn.lock)[answer.pieces[0]] if answer.pieces else "the whole master"
        lines.append(
            f"{node.name} has {answer.derived[0]:016x} for {where} (D {digest:016x}; kernel "
            f"{node.hello.backend} on {node.hello.device}, {answer.by})"
        )
    turn.note("dispute", round=dispute.commits, what="two confirmed sides", sides=lines)
    turn.stop(
        f"two replicas differ after {rounds(dispute.commits)} and replay confirms both: {'; '.join(lines)}. "
        "Run `esnode doctor` on both machines",
        1,
    )


def names(turn: Turn, keys: Sequence[bytes]) -> list[str]:
    """Of the first four nodes; the beginning of the key where one is not on the list."""
    return [turn.allowed.get(key, key.hex()[:8]) for key in keys[:4]]
