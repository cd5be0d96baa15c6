"""Where a node's ledger stands among others: what it gives away of it, and how it leaves a dead branch.

Pure: protocol and the node's pure modules only. Lives here: the answer to Fetch, the look at a second entry
for a height it holds, and the return to the last entry shared with a successor's ledger. Called by `inbox.py`
and `sources.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from esnode.events import Orphan, Store
from esnode.nodestate import State, Turn
from protocol.chain import BrokenChain, Chain
from protocol.entries import EntryKind, MalformedEntry, parse
from protocol.messages import Entries, Fetch, Message, Return
from protocol.terms import signed_twice
from protocol.wire import fitting


def on_fetch(turn: Turn, message: Fetch) -> None:
    """Give what was asked for: entries are signed, so any node is as good a source as the coordinator."""
    held = turn.state.chain.entries[message.first : message.first + message.count]
    if held:
        turn.send(Entries(message.first, fitting([entry.raw for entry in held])))


def look(turn: Turn, chain: Chain, height: int, raw: bytes) -> None:
    """Another entry for a height this node holds: signed in the same term, it ends all trust in this run.

    Of another term it is some branch's; only `Return` makes a node leave its own.
    """
    if raw == chain.entries[height].raw:
        return
    try:
        twice = signed_twice(chain, parse(raw))
    except MalformedEntry:
        return
    if twice:
        turn.stop(twice, 1)


def elsewhere(state: State, chain: Chain, raw: bytes) -> bool:
    """Whether an entry that does not follow mine is that of a coordinator with a later term, on its branch.

    It will say with `Return` where I have to go back to.
    """
    try:
        return state.term > chain.term and parse(raw).parent != chain.tip
    except MalformedEntry:
        return False


def on_return(turn: Turn, message: Return) -> None:
    """Go back to the last common entry, if the asker took a later term than this branch has.

    The entries left behind are kept in a file; the master is rewound when it reflects one of them. That one
    term signed both branches does not stop it here: the later coordinator was started from one of them to end
    the matter.
    """
    state, height = turn.state, message.height
    chain = state.chain
    if not state.joined or message.term != state.term or not 0 < height < chain.height:
        return
    if message.entry == chain.entries[height].raw:
        return
    if state.term <= chain.term:
        return turn.note("orphans", reason=f"term {state.term} is none to leave a branch of {chain.term} for")
    kept = chain.prefix(height)
    try:
        kept.append(message.entry)
    except BrokenChain as error:
        return turn.note("orphans", reason=f"the other branch does not continue mine: {error.reason}")
    _leave_branch(turn, chain, height)
    turn.do(Store(height, (message.entry,)))
    turn.set(chain=kept)
    reflected = chain.entries[height : state.applied + state.applying]
    if any(entry.kind is EntryKind.COMMIT for entry in reflected):
        turn.rewind()
    else:
        turn.cancel_running()
        turn.set(applied=min(state.applied, height), queue=(), unacked=())


def _leave_branch(turn: Turn, chain: Chain, height: int) -> None:
    left = chain.entries[height:]
    turn.do(Orphan(height, tuple(entry.raw for entry in left)))
    turn.note(
        "orphans",
        first=height,
        last=chain.height - 1,
        rounds=[entry.round for entry in left if entry.kind is EntryKind.COMMIT],
        term=chain.term,
        tip=chain.tip.hex(),
    )


HANDLERS: dict[type[Message], Callable[[Turn, Any], None]] = {Fetch: on_fetch, Return: on_return}
