"""Who has answered: a successor that waits for the recent workers, D a second word, the END all who worked.

Pure. A node has answered a term once it keeps it on its disk, which its next Hello shows: until then it may
go to another successor and answer there, and two of them would begin. Called by `succession.py`,
`disputes.py`, `machine.py` and `picture.py`.
"""

from __future__ import annotations

from msgspec.structs import replace

from coordinator import claims
from coordinator.membership import Verdict
from coordinator.state import State
from coordinator.turn import Turn
from protocol.counting import rounds
from protocol.entries import CommitBody
from protocol.messages import RELEASED, RUN_ENDED, WIRE_VERSION, Hello, Rehello, Welcome

LAST_COMMITS = 8  # the recent work whose evaluators a successor waits for


def hear(turn: Turn, peer: bytes, hello: Hello) -> None:
    """A Hello proves that its node keeps this successor's term."""
    if turn.lineage.waiting and hello.proof == turn.state.term_proof:
        promised = {**turn.lineage.promised, peer: turn.term}
        turn.set(lineage=replace(turn.lineage, promised=promised))


def unsure(turn: Turn, peer: bytes) -> bool:
    """Whether this coordinator waits for a node to keep its term."""
    return turn.lineage.waiting and turn.lineage.promised.get(peer) != turn.term


def greet(turn: Turn, peer: bytes) -> None:
    """Welcome a node; one whose answer is waited for says Hello once more."""
    state, chain = turn.state, turn.chain
    run, lock = state.lock.run_id, state.lock.to_bytes()
    turn.send(peer, Welcome(WIRE_VERSION, run, lock, turn.term, chain.height, chain.tip, state.term_proof))
    if unsure(turn, peer):
        turn.send(peer, Rehello())


def hold(turn: Turn, peer: bytes) -> None:
    """A node on another branch waits for this successor's choice: it is welcomed for its answer only."""
    if unsure(turn, peer):
        greet(turn, peer)
    else:
        turn.send(peer, Rehello())  # that it is heard


def answered(state: State) -> Verdict:
    """Whether those who evaluated more than half of the members of the last commits have answered.

    What revoked nodes evaluated is left out: they cannot answer, and nobody may wait for them.
    """
    chain, lineage = state.chain, state.lineage
    there = {key for key in (*state.nodes, *lineage.branches) if lineage.promised.get(key) == state.term}
    numbers = {number for key, number in state.numbers.items() if key in there}
    recent = _recent(state)
    rows, what = recent, f"members of the last {len(chain.commits[-LAST_COMMITS:])} commits"
    if not rows:
        rows, what = sorted(_staying(state)), "nodes of the roster"
    if not rows:
        return Verdict(bool(there), "nobody has worked for this run yet" if there else "no node has answered")
    known = sum(number in numbers for number in rows)
    missing = sorted({_name(state, number) for number in {*rows} - numbers})
    words = f"nodes that answered stand for {known} of {len(rows)} {what}, more than half is needed"
    return Verdict(2 * known > len(rows), words + (f"; not heard: {', '.join(missing)}" if missing else ""))


def inherited(state: State) -> bool:
    """Whether this coordinator succeeded to a run that had ended, and only tells of it."""
    return state.lineage.roots == state.chain.height


def last_words(state: State) -> str:
    """A coordinator leaves an ended run: who worked lately or is connected, and may lack its END."""
    left = {key for key, node in state.nodes.items() if node.left.startswith((RUN_ENDED, RELEASED))}
    gone = {number for key, number in state.numbers.items() if key in left}
    names = {_name(state, number) for number in _recent(state) if number not in gone}
    names |= {node.name for key, node in state.nodes.items() if key not in left}
    words = f"{RUN_ENDED} after {rounds(state.chain.round)}"
    if not names:
        return words
    known = state.chain.entries[-1].nonce == state.nonce or inherited(state)
    how = "not confirmed by" if known else "not heard since this start:"  # others may have confirmed before
    return f"{words}; {how} {', '.join(sorted(names))}"


def unheard(state: State) -> list[str]:
    """Who worked lately and has not come back to a coordinator that was started again, until it commits."""
    commits = state.chain.commits
    if not commits or commits[-1].nonce == state.nonce:
        return []
    heard = {state.numbers.get(key) for key in state.nodes}
    return [_name(state, number) for number in sorted(set(_recent(state)) - heard)]


def witnessed(state: State) -> Verdict:
    """Whether D of the open round's state may be signed, and why (not)."""
    if (dispute := state.proof.dispute) is not None:
        return Verdict(False, claims.pending(state.proof, dispute, state.nodes, state.now))
    if state.digest is not None:
        return Verdict(True, state.witness)
    late = unheard(state) if len(state.proof.words) == 1 else []
    return claims.witnessed(state.proof, state.nodes, state.chain.round, state.now, late)


def _staying(state: State) -> set[int]:
    """Roster numbers, without revoked nodes."""
    gone = {number for key, number in state.numbers.items() if key in state.guests.revoked}
    return state.chain.roster.keys() - gone


def _recent(state: State) -> list[int]:
    """Who evaluated each member of the last commits."""
    staying = _staying(state)
    bodies = [entry.body for entry in state.chain.commits[-LAST_COMMITS:]]
    rows = [row.evaluator for body in bodies if isinstance(body, CommitBody) for row in body.members]
    return [number for number in rows if number in staying]


def _name(state: State, number: int) -> str:
    roster = state.chain.roster
    return roster[number][1] if number in roster else f"number {number}"
