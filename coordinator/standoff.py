"""Two digests that replay does not reconcile: who is asked once more, who is put out, and why a run stops.

Pure. A side that one node alone confirms is its word; it is believed against another side only as long as
that has no two witnesses either. Called by `disputes.py`; the values are in `claims.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from coordinator.claims import WITNESS_WAIT, Dispute, there
from coordinator.membership import READY, standing
from coordinator.state import State
from coordinator.turn import Turn
from protocol.pieces import pieces_of

WITNESSES = 2  # distinct nodes whose replays make a side more than a word


class Standoff(msgspec.Struct, frozen=True):
    """What to do about confirmed sides: ask these, put these out, else wait or stop."""

    ask: tuple[bytes, ...] = ()
    out: tuple[bytes, ...] = ()
    wait: bool = False


def weigh(state: State, dispute: Dispute, found: Mapping[int, Sequence[bytes]]) -> Standoff:
    """Two or more sides are confirmed. `found`: D -> who says it.

    Each side gets a second witness where it has another node. Then one that insists alone against two is put
    out; where no side has two, or two sides have, nothing is left but to stop.
    """
    won = [digest for digest in found if digest in dispute.confirmed]
    seen = {digest: witnesses(dispute, digest) for digest in won}
    here = {key for key in state.proof.words if there(state.nodes.get(key), state.now)}
    ask = [
        next((key for key in found[digest] if key in here and key not in seen[digest]), None)
        for digest in won
        if len(seen[digest]) < WITNESSES
    ]
    if any(ask):
        return Standoff(ask=tuple(key for key in ask if key is not None))
    strong = [digest for digest in won if len(seen[digest]) >= WITNESSES]
    if len(strong) == 1:
        return Standoff(out=tuple(key for digest in won if digest not in strong for key in found[digest]))
    undecided = [
        key
        for key, node in state.nodes.items()
        if key not in state.proof.words and standing(node, state.chain.round, state.now)[0] == READY
    ]
    return Standoff(wait=not strong and bool(undecided) and state.now - dispute.opened < WITNESS_WAIT)


def witnesses(dispute: Dispute, digest: int) -> list[bytes]:
    """Whose replay gave this D."""
    return [key for key, answer in dispute.answers.items() if answer.digest == digest]


# ---------------------------------------------------------------- the end of a run


def stop_ledger(turn: Turn, dispute: Dispute, right: int, stated: int) -> None:
    stop_with(
        turn,
        f"the ledger states digest {stated:016x} after {dispute.commits} rounds, replay from the base gives "
        f"{right:016x} ({dispute.confirmed[right]}): a wrong digest was signed. ",
    )


def stop_with(turn: Turn, sentence: str) -> None:
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
        f"two replicas differ after {dispute.commits} rounds and replay confirms both: {'; '.join(lines)}. "
        "Run `esnode doctor` on both machines",
        1,
    )


def names(turn: Turn, keys: Sequence[bytes]) -> list[str]:
    return [turn.nodes[key].name if key in turn.nodes else key.hex()[:8] for key in keys[:4]]
