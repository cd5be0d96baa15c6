"""Whether the state that a fork starts from is one of its parent's.

Pure. The fork's ledger starts anew: the parent's is another file. Called by `esnode/ancestry.py`.
"""

from __future__ import annotations

from protocol.chain import BrokenChain, Chain
from protocol.counting import rounds
from protocol.lock import Lock


def check_fork(lock: Lock, parent: Chain) -> None:
    """Whether `lock.parent` really names a state of `parent`; BrokenChain with the reason if not."""
    claim = lock.parent
    if claim is None:
        raise BrokenChain("the lock names no parent run", 0)
    if claim.run != parent.lock.run_id.hex():
        raise BrokenChain(
            f"the lock forks run {claim.run[:16]}, this is {parent.lock.run_id.hex()[:16]}", claim.round
        )
    if claim.round > parent.round:
        raise BrokenChain(f"the parent ledger ends after {rounds(parent.round)}", claim.round)
    closing = parent.commits[claim.round - 1] if claim.round else parent.entries[0]
    if claim.entry != closing.hash.hex():
        raise BrokenChain("the parent ledger has another entry at the fork", claim.round)
    known = parent.digest_at(claim.round)
    if known is not None and known != claim.digest:
        raise BrokenChain(
            f"the fork starts from digest {claim.digest:016x}, the parent ledger states {known:016x}",
            claim.round,
        )
    same_state = (lock.manifest, lock.master) == (parent.lock.manifest, parent.lock.master)
    if same_state and lock.digest != claim.digest:
        raise BrokenChain("the lock's start digest is not that of the parent's state", claim.round)
