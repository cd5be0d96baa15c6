"""What an engine is told of its place: its master, its neighbours. No torch: the command line may import it.

Called by `nodeoptions.py`, `placement.py` and the engines' loaders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import UserError

MASTERS = ("auto", "device", "host")


@dataclass(frozen=True, slots=True)
class Wish:
    """`attach`: the path of a master that another process leads, to be read only; `sharing`: how many engines
    this one's GPU, or the CPU, is shared by; `tp`: ranks of the vLLM engine, 0 for as many as it takes;
    `ask`: where the master that another engine of this node leads is, called once ours belongs in host
    memory, and answered with its path once it is whole, or with "" by who is to lead;
    `chatter`: the file for what a library and its processes say while they start, and these later; `rows`: at
    once at most, which an engine before this one has learnt, 0 for any number.
    """

    master: str = "auto"
    attach: str | None = None
    sharing: int = 1
    tp: int = 0
    ask: Callable[[], str] | None = None
    chatter: str | None = None
    rows: int = 0


DEFAULT = Wish()


class HostMasterUnavailable(UserError):
    """Host memory for a master that cannot be had, or that is not what it was taken for."""


class LeaderGone(HostMasterUnavailable):
    """The process that led the master has ended."""
