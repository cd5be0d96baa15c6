"""Which number a term takes, and what follows from those that nodes have answered (docs/adr/0009-terms.md).

Pure. Lives here: the number of a new start, going above somebody else's term, and yielding to it. Called by
`machine.py` and `succession.py`.
"""

from __future__ import annotations

import msgspec

from coordinator.events import Recovery, Stop, TermSeen, TermTaken
from coordinator.state import State, recall
from coordinator.turn import Turn
from protocol.chain import Chain
from protocol.entries import public_key
from protocol.messages import Hello
from protocol.terms import EXIT_YIELDED, Claim, read_proof

# Terms of one coordinator and its restarts: a successor begins the next era, for the lost one may have taken
# more terms than anybody has shown. Started anew every five seconds it would fill an era in six days.
ERA = 100_000


class Place(msgspec.Struct, frozen=True):
    """Where a node's ledger stands. `astray`: entries it shares with mine before it leaves it; None: all."""

    ok: bool
    reason: str  # "" for a node that is neither welcome nor refused yet
    astray: int | None = None


UNCLEAR = Place(False, "")


# ---------------------------------------------------------------- numbers


def next_term(state: State) -> int:
    """The number a start takes: the next one of this folder, or, where another has been met in its era or
    above it, the first of an era above both.
    """
    others = max(state.chain.term, state.lineage.seen)
    met = state.lineage.seen and _era(state.lineage.seen) >= _era(state.term)
    return next_era(max(others, state.term)) if met or others > state.term else state.term + 1


def _era(number: int) -> int:
    return number // ERA


def next_era(number: int) -> int:
    """The first number of the era behind that of `number`: all who succeed to one coordinator take it."""
    return (_era(number) + 1) * ERA


def take_above(turn: Turn, number: int, key: bytes) -> None:
    """Take a term above `number` of `key`: of an older or newer copy of my folder, or of one before me."""
    copy = key == public_key(turn.state.key) and not turn.lineage.waiting
    term = number + 1 if copy else next_era(number)
    record(turn, TermTaken(term, turn.state.nonce))
    turn.note("succession", what="takes a term", term=term, reason=f"term {number} was answered before")


# ---------------------------------------------------------------- other coordinators


def heed(turn: Turn, name: str, hello: Hello, branch: Chain | None) -> Place | None:
    """None when the highest term this node answered lies below mine, is mine, or mine now lies above it.

    In one era it is not the number that counts, which grows with every start: who waits yields to whoever was
    answered, who has signed goes on.
    """
    state, chain = turn.state, turn.chain
    if hello.term < (_era(state.term) * ERA if state.lineage.waiting else state.term):
        return None
    claim = read_proof(state.lock.run_id, hello.term, hello.proof)
    mine = Claim(state.term, public_key(state.key), state.nonce)
    if claim == mine or (claim is not None and claim.key == mine.key and claim.number < mine.number):
        return None
    trusted = {*chain.trusted, *(branch.trusted if branch is not None else ())}
    if claim is None or claim.key not in trusted:
        if hello.height > chain.height and branch is None:
            return None  # its ledger may tell why that key is trusted
        return Place(
            False,
            f"this node has answered a coordinator of term {hello.term}, this one is of term {state.term}, "
            "and it cannot prove that the run trusts that one",
        )
    # That one has signed nothing then, or both must stop.
    signed = chain.signer == mine.key and _era(claim.number) == _era(chain.term) == _era(state.term)
    if signed or follows(turn, claim.key, claim.number):
        take_above(turn, claim.number, claim.key)
        return None
    yield_to(turn, claim, name)
    return UNCLEAR


def follows(turn: Turn, key: bytes, number: int) -> bool:
    """Whether this coordinator goes on above a term: of its own key, or of the one it comes after.

    Not above those of a later era. Those of its own key are a copy's: another successor's, to one that waits
    itself; to one at work, its successor's. And the one it comes after has been started anew, to take over.
    """
    mine, waiting = key == public_key(turn.state.key), turn.lineage.waiting
    if not mine and key != _predecessor(turn.state):
        return False
    era = turn.chain.term if waiting else turn.term
    return number < next_era(era)


def outdone(turn: Turn, branch: Chain) -> bool:
    """Whether a ledger shows to one that waits that another successor works in its era or in a later one."""
    return (
        branch.signer != public_key(turn.state.key)
        and _era(branch.term) >= _era(turn.term)
        and not branch.ended
    )


def _predecessor(state: State) -> bytes:
    """Signing key of the coordinator this one comes after and whose later terms it takes over; b"": none."""
    return state.chain.signer if state.lineage.waiting else state.lineage.before


def yield_to(turn: Turn, claim: Claim, name: str) -> None:
    """Stop, without a Bye: the nodes go on looking for the other one.

    The next start takes over, but not where this one was at work and the other has its key: a lost folder
    that a service starts again and again must not come between its successor and the nodes.
    """
    mine = claim.key == public_key(turn.state.key)
    how, rest = (
        " with this one's signing key" * mine,
        "to take over from it, stop it and start this one again",
    )
    if mine and not turn.lineage.waiting:
        rest = "retire this folder, or recover from a ledger into an empty one"
    else:
        record(turn, TermSeen(claim.number))
    reason = (
        f"another coordinator has taken {claim}{how}: {name} answered it, this one is of term {turn.term}. "
        f"Let that one work; {rest}"
    )
    turn.effects.append(Stop(reason, EXIT_YIELDED))
    turn.set(stopped=reason)


def record(turn: Turn, made: Recovery | TermSeen | TermTaken) -> None:
    """Journal a record and fold it in."""
    turn.persist(made)
    turn.state = recall(turn.state, made)
