"""Other histories of the run, and the successor of a lost coordinator (docs/succession.md).

Pure. Lives here: what a Hello says about branches (about terms: `terms.py`), the questions to a node whose
ledger is none of mine, adopting what is ahead, sending back what is on a dead branch, and how a successor
begins. Each function takes the `Turn` of the step it is part of. Called by `machine.py`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from coordinator import answers, membership, terms
from coordinator.events import EntryAppended, Recovery
from coordinator.lineage import Orphaned, Question
from coordinator.state import State, adopt
from coordinator.terms import UNCLEAR, Place
from coordinator.turn import Turn
from protocol.chain import BrokenChain, Chain
from protocol.entries import GENESIS, EntryKind, MalformedEntry, parse, public_key, signed_by
from protocol.messages import Commit, Entries, Fetch, Hello, Rehello, Return
from protocol.terms import Claim, common, signed_twice, stronger

FORCED_AFTER = 10.0  # seconds a forced successor gives nodes to show what they hold
SETTLED_AFTER = 3.0  # a successor gives all that are about to connect a moment
TOLD_WITHIN = 10.0  # a node that is ahead has shown its entries by then, or is not waited for
TOLD_AT_ALL = 60.0  # nor is anybody longer: one that claims ever more heights would keep all waiting
ASK_AGAIN = 1.0
ASK_COUNT = 256
KEPT_ORPHANED = 50


def begin(turn: Turn, how: str) -> None:
    """At the start of a process: a successor begins to wait, or goes on waiting. `how`: "wait" or "force"."""
    lineage = turn.lineage
    if how and not lineage.waiting and not lineage.began:
        terms.record(turn, Recovery(False, turn.chain.height, turn.chain.signer))
    if turn.lineage.waiting:
        _set(turn, force=how == "force", since=turn.now)
        turn.note("succession", what="waits", reason=answers.answered(turn.state).reason)


# ---------------------------------------------------------------- a node's Hello


def place(turn: Turn, peer: bytes, name: str, hello: Hello) -> Place:
    """Whether a node's terms and ledger go with mine, after adopting what is ahead."""
    branch = turn.lineage.branches.get(peer)
    heeded = terms.heed(turn, name, hello, branch)
    if heeded is not None:
        return heeded
    answers.hear(turn, peer, hello)
    if holds(turn.chain, hello.height, hello.tip):
        forget(turn, peer)
        verdict = membership.base_fits(hello, turn.chain)
        return Place(verdict.ok, verdict.reason)
    if branch is None or branch.tip != hello.tip:
        ask(turn, peer, hello.height)
        return UNCLEAR
    found = _judge(turn, peer, name, branch)
    if found is UNCLEAR and not turn.stopped:
        answers.hold(turn, peer)
    return found


def holds(chain: Chain, height: int, tip: bytes) -> bool:
    """Whether the first `height` entries end with this hash (or its beginning)."""
    return height == 0 or (height <= chain.height and chain.entries[height - 1].hash.startswith(tip))


# ---------------------------------------------------------------- what a node holds beyond mine


def ask(turn: Turn, peer: bytes, height: int) -> None:
    """Ask a node for the entries by which its ledger of `height` entries differs from mine."""
    question = turn.lineage.questions.get(peer)
    if question is None or height > question.height or question.first > turn.chain.height:
        first = min(turn.chain.height, height - 1)
        question = Question(first, 1, height, turn.now, float("-inf"))
    if turn.now - question.at >= ASK_AGAIN:
        _send_question(turn, peer, question)


def _send_question(turn: Turn, peer: bytes, question: Question) -> None:
    first = question.branch.height if question.branch is not None else question.first
    turn.send(peer, Fetch(first, ASK_COUNT))
    _put(turn, "questions", peer, replace(question, at=turn.now))


def on_entries(turn: Turn, peer: bytes, message: Entries) -> str:
    """Part of a node's ledger. Returns why the node is refused, "" if it is not."""
    question = turn.lineage.questions.get(peer)
    if question is None or not message.entries:
        return ""
    try:
        entries = [parse(raw) for raw in message.entries]
        branch = question.branch
        if branch is None:
            if message.first != question.first or question.first > turn.chain.height:
                return ""
            before = turn.chain.entries[question.first - 1].hash if question.first else GENESIS
            if entries[0].parent != before:
                _step_back(turn, peer, question)
                return ""
            branch = turn.chain.prefix(question.first)
        elif message.first != branch.height:
            return ""
        else:
            branch = branch.copy()
        for entry in entries:
            branch.append(entry)
    except (MalformedEntry, BrokenChain) as error:
        _put(turn, "questions", peer, None)
        return f"this node's ledger holds an entry that may not follow the others: {error}"
    if branch.height < question.height:
        _send_question(turn, peer, replace(question, branch=branch))
        return ""
    _put(turn, "questions", peer, None)
    _put(turn, "branches", peer, branch)
    if turn.lineage.waiting:
        _judge(turn, peer, turn.allowed[peer], branch)  # now: this successor may begin any moment
    turn.send(peer, Rehello())  # its next Hello is judged by what it holds
    return ""


def _step_back(turn: Turn, peer: bytes, question: Question) -> None:
    if question.first:
        first = max(0, question.first - question.back)
        _send_question(turn, peer, replace(question, first=first, back=4 * question.back))


def _judge(turn: Turn, peer: bytes, name: str, branch: Chain) -> Place:
    """A verified ledger that is no beginning of mine: ahead of it, or parted from it."""
    chain = turn.chain
    shared = common(chain, branch)
    twice = next(filter(None, (signed_twice(chain, entry) for entry in branch.entries[shared:])), "")
    if twice and shared >= turn.lineage.given:  # else the operator chose between the two
        turn.stop(f"{name}: {twice}", 1)
        return UNCLEAR
    if turn.lineage.waiting:
        return UNCLEAR if twice else _weigh(turn, peer, name, branch, shared)
    if shared == chain.height:
        return _extend(turn, peer, name, branch, shared)
    if _decided(turn, branch, shared):
        _name_orphans(turn, name, branch, shared)
        return Place(True, f"its ledger leaves the run's at entry {shared}: it goes back there", shared)
    ours, theirs = chain.entries[shared], branch.entries[shared]
    turn.stop(
        f"two copies of this coordinator went separate ways at entry {shared}: {theirs.hash.hex()[:16]} of "
        f"term {theirs.term}, held by {name}, and {ours.hash.hex()[:16]} of term {ours.term} here. Choose by "
        "starting a successor on an empty folder: `esnode coordinator serve --recover-from LEDGER`",
        1,
    )
    return UNCLEAR


def _decided(turn: Turn, branch: Chain, shared: int) -> bool:
    """Whether my succession decided about a branch that parts from mine here: at my beginning or before it.

    What I adopted since was signed before me, too, until I signed an entry. Behind one of mine, or where the
    branch goes on with one, a copy of me is at work.
    """
    lineage, me = turn.lineage, (public_key(turn.state.key),)
    if shared <= lineage.roots:
        return True
    since = (entry for entry in branch.entries[lineage.roots : shared + 1] if entry.term >= lineage.began)
    return bool(lineage.began) and not any(signed_by(entry, me) for entry in since)


def _extend(turn: Turn, peer: bytes, name: str, branch: Chain, shared: int) -> Place:
    """The node is ahead of me: adopt it, unless it was led on by a key that is neither mine nor before me."""
    signer = branch.signer
    if not terms.follows(turn, signer, branch.term):
        terms.yield_to(turn, Claim(branch.term, signer, branch.entries[-1].nonce), name)
        return UNCLEAR
    _adopt(turn, name, branch, shared)
    forget(turn, peer)
    return Place(True, "welcome")


def _adopt(turn: Turn, name: str, branch: Chain, start: int) -> None:
    """Take a node's entries from `start` on into my chain, dropping the open round if one closes it."""
    if branch.term >= turn.term:
        terms.take_above(turn, branch.term, branch.signer)
    for height, entry in enumerate(branch.entries[start:], start):
        turn.persist(EntryAppended(height, entry.raw))
        turn.state = adopt(turn.state, entry)
        turn.broadcast(Commit(height, entry.raw))
    turn.round = replace(turn.round, opened=turn.now)
    turn.note("succession", what="adopted", node=name, first=start, last=branch.height - 1, term=branch.term)
    if turn.chain.ended:
        turn.set(ending=turn.now)


def forget(turn: Turn, peer: bytes) -> None:
    """The node's ledger is a beginning of mine again."""
    for what in ("questions", "branches"):
        if peer in getattr(turn.lineage, what):
            _put(turn, what, peer, None)


def stray(turn: Turn, peer: bytes, height: int) -> None:
    """A node at work here names a tip that is not in my chain: tell it the way back, or ask."""
    node = turn.nodes[peer]
    if node.astray is None or node.astray >= turn.chain.height:
        return ask(turn, peer, height)
    turn.send(peer, Return(turn.term, node.astray, turn.chain.entries[node.astray].raw))


# ---------------------------------------------------------------- a successor


def _weigh(turn: Turn, peer: bytes, name: str, branch: Chain, shared: int) -> Place:
    """A successor goes on from the strongest chain that anybody showed; the others wait until it begins."""
    if not stronger(branch, turn.chain):
        return UNCLEAR  # it has answered; where it goes is decided at the beginning
    if terms.outdone(turn, branch):
        terms.yield_to(turn, Claim(branch.term, branch.signer, branch.entries[-1].nonce), name)
        return UNCLEAR
    if shared < turn.chain.height:
        _name_orphans(turn, "the ledger held so far", turn.chain, shared)
        turn.state = replace(turn.state, nodes={})  # where they stand has to be found out again
        terms.record(turn, Recovery(False, shared, turn.chain.signer))
    _adopt(turn, name, branch, shared)
    forget(turn, peer)
    return Place(True, "welcome")


def on_tick(turn: Turn) -> None:
    """Begin as soon as those who did more than half of the recent work have answered."""
    verdict, lineage = answers.answered(turn.state), turn.lineage
    waited = turn.now - lineage.since
    forced = lineage.force and waited >= FORCED_AFTER
    telling = any(turn.now - question.since < TOLD_WITHIN for question in lineage.questions.values())
    telling = telling and waited < TOLD_AT_ALL
    enough = verdict.ok or turn.chain.ended  # nobody works on behind an END: it is only told
    if not forced and (not enough or telling or waited < SETTLED_AFTER):
        return
    terms.record(turn, Recovery(True, turn.chain.height, turn.chain.signer))
    turn.round = replace(turn.round, opened=turn.now)
    if turn.chain.ended:
        turn.set(ending=turn.now)
    turn.note("succession", what="begins", height=turn.chain.height, reason=verdict.reason, forced=forced)
    for key, branch in turn.lineage.branches.items():
        name = turn.state.allowed.get(key, key.hex()[:8])
        _name_orphans(turn, name, branch, common(turn.chain, branch))


def weigh_shown(turn: Turn) -> None:
    """A ledger that was shown counts, whether or not its node has said Hello again."""
    for peer, branch in turn.lineage.branches.items():
        if not turn.stopped and stronger(branch, turn.chain):
            _judge(turn, peer, turn.state.allowed.get(peer, peer.hex()[:8]), branch)


# ---------------------------------------------------------------- words


def _name_orphans(turn: Turn, name: str, branch: Chain, shared: int) -> None:
    """Say, once, which entries this run goes on without."""
    left = branch.entries[shared:]
    if not left or any(o.tip == branch.tip and o.name == name for o in turn.lineage.orphaned):
        return
    rounds = tuple(entry.round for entry in left if entry.kind is EntryKind.COMMIT)
    found = Orphaned(name, shared, branch.height - 1, rounds, branch.term, branch.tip)
    _set(turn, orphaned=(*turn.lineage.orphaned, found)[-KEPT_ORPHANED:])
    turn.note(
        "succession",
        what="leaves behind",
        node=name,
        first=shared,
        last=found.last,
        rounds=list(rounds),
        term=branch.term,
        tip=branch.tip.hex(),
    )


def picture(state: State) -> dict[str, Any]:
    """The section of the status."""
    lineage = state.lineage
    names = state.allowed
    return {
        "key": public_key(state.key).hex(),
        "waiting": answers.answered(state).reason if lineage.waiting else "",
        "recovered_at": lineage.roots,
        "other_branches": {names.get(key, key.hex()[:8]): c.height for key, c in lineage.branches.items()},
        "left_behind": [
            {"node": o.name, "first": o.first, "last": o.last, "rounds": list(o.rounds), "term": o.term}
            for o in lineage.orphaned
        ],
    }


# ---------------------------------------------------------------- small parts


def _set(turn: Turn, **changes: Any) -> None:
    turn.set(lineage=replace(turn.lineage, **changes))


def _put(turn: Turn, what: str, peer: bytes, value: Question | Chain | None) -> None:
    held = {key: kept for key, kept in getattr(turn.lineage, what).items() if key != peer}
    _set(turn, **{what: held if value is None else {**held, peer: value}})
