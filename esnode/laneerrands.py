"""What one lane does for its node: snapshots, digests read, pieces replayed for the proof.

Pure: the node's events only. Part of the core of lanes; called by `lanes.py`.
"""

from __future__ import annotations

from esnode import events as ne
from esnode import laneshare
from esnode import proofevents as pe
from esnode import snapshotevents as se
from esnode.laneevents import Tell
from esnode.lanestate import Turn


def answered(turn: Turn, number: int, said: ne.Event) -> None:
    """A lane has done it. What replay mended there is what the others have to hold from now on."""
    kind = {pe.Digested: pe.TakeDigests, pe.Proved: pe.Prove, pe.Mended: pe.Mend, se.Saved: se.Save}[
        type(said)
    ]
    done = next((e for e in turn.state.errands if e[0] == number and isinstance(e[1], kind)), None)
    if done is None:
        return
    turn.set(errands=tuple(errand for errand in turn.state.errands if errand is not done))
    if isinstance(said, pe.Digested) and said.damaged:  # read again, once it is rebuilt or by a sibling
        turn.suspect(number, f"{', '.join(said.damaged[:3])} changed in memory")
        return turn.set(errands=((-1, done[1]), *turn.state.errands))
    if isinstance(said, pe.Proved):
        turn.set(prover=number)
    if isinstance(said, pe.Mended) and said.digest != turn.state.digest:
        turn.set(digest=said.digest)
        for other in laneshare.writers(turn.state):
            if other != number:
                turn.suspect(other, "a dispute was decided against it")
    turn.answer(said)


def drop(turn: Turn, number: int) -> None:
    """What the lane was doing for the node is begun again elsewhere, where that can be."""
    mine = [what for owner, what in turn.state.errands if owner == number]
    turn.set(errands=tuple(errand for errand in turn.state.errands if errand[0] != number))
    for what in mine:
        if isinstance(what, se.Save):
            turn.answer(
                se.Saved(0.0, what.round, what.entry, b"", 0, "the engine that wrote it has ended", 0)
            )
        elif isinstance(what, pe.TakeDigests):
            turn.set(errands=((-1, what), *turn.state.errands))
        else:
            lose_proof(turn, what, f"{turn.name(number)} ended during a replay for the proof")


def lose_proof(turn: Turn, what: ne.Effect, why: str) -> None:
    turn.answer(ne.LanesDiffer(0.0, why, far=True))
    if isinstance(what, pe.Mend):
        turn.answer(pe.Mended(0.0, turn.state.digest))


def run(turn: Turn) -> None:
    """What one lane does for the node goes to the first that is ready, a Mend to the one that replayed."""
    ready = laneshare.writers(turn.state)
    if not ready:
        return
    for errand in [errand for errand in turn.state.errands if errand[0] < 0]:
        if isinstance(errand[1], pe.Mend) and not laneshare.quiet(turn):
            continue
        owner = turn.state.prover if isinstance(errand[1], pe.Mend) else ready[0]
        changed = (owner, errand[1])
        turn.set(errands=tuple(changed if e is errand else e for e in turn.state.errands))
        turn.do(Tell(owner, errand[1]))
