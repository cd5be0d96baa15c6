"""What the owner of a machine allows it to do: the node policy file, its template, and what follows from it.

Pure. Lives here: the fields and their rules, the strict reader, whether a lock is welcome, whether it is time
to work, and the pace of bulk transfers. `duty.py` reads the file and the clock; `join.py` asks before
anything is downloaded, the daemon before and during work, whoever moves bulk data about its pace.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from protocol.errors import UserError
from protocol.fields import GLOB, Rule, many, number
from protocol.lock import Lock

GB = 1e9
MBIT = 1e6 / 8
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_SPAN = re.compile(r"(?:([a-z,\- ]+) )?(\d{1,2}):(\d\d) ?- ?(\d{1,2}):(\d\d)")


class PolicyError(UserError):
    """A policy file that cannot be followed: the sentence names the line's key and what it may hold."""


class Unwelcome(UserError):
    """A run that this machine's owner does not allow; the sentence names the rule."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of local time on some days; it belongs to the day on which it begins."""

    days: frozenset[int]  # 0 is Monday
    start: int  # minutes after midnight
    end: int  # not later than the start: it ends on the next day
    text: str

    def covers(self, day: int, minute: int) -> bool:
        """Whether this minute of this day lies in it."""
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        return (day in self.days and minute >= self.start) or (
            (day - 1) % 7 in self.days and minute < self.end
        )


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run asks of a machine, in bytes, from its lock alone."""

    parameters: int
    download: int  # the base model as stored, when it has to be fetched
    memory: int  # master and live weights; caches of generation come on top
    disk: int  # a checkpoint of the master, task data and ledger


@dataclass(frozen=True, slots=True)
class Policy:
    """The file's values; the defaults allow everything."""

    models: tuple[str, ...] = ("*",)
    memory_gb: float = 0.0
    disk_gb: float = 0.0
    bandwidth_mbit: float = 0.0
    hours: tuple[Span, ...] = field(default=())

    def admit(self, lock: Lock, used: int) -> None:
        """Unwelcome when the run breaks a rule. `used`: bytes that joined runs take on this disk already."""
        wants = needs(lock)
        if not any(fnmatchcase(lock.model, glob) for glob in self.models):
            raise Unwelcome(
                f"this machine's policy does not allow the model {lock.model!r} "
                f"(models = {list(self.models)}); change it in the policy file (`esnode policy`) or stay out"
            )
        self.admit_memory(wants.memory)
        what = "disk, with the runs that are here already,"
        _bound("disk_gb", self.disk_gb, wants.disk + used, what)

    def admit_memory(self, wanted: int) -> None:
        """Unwelcome when so many bytes are more than a run may ask for."""
        _bound("memory_gb", self.memory_gb, wanted, "memory")

    def working(self, day: int, minute: int) -> bool:
        """Whether it is time to work. `day`: 0 is Monday; `minute` after local midnight."""
        return not self.hours or any(span.covers(day, minute) for span in self.hours)

    @property
    def schedule(self) -> str:
        """The hours in words."""
        return ", ".join(span.text for span in self.hours) or "always"

    def pace(self) -> Pace:
        """A pace for one bulk transfer under this policy."""
        return Pace(self.bandwidth_mbit * MBIT)


def _bound(name: str, limit: float, wanted: int, what: str) -> None:
    if limit and wanted > limit * GB:
        raise Unwelcome(
            f"the run needs at least {wanted / GB:.2f} GB of {what} and this machine's policy allows "
            f"{limit:g} ({name}); raise it in the policy file (`esnode policy`) or stay out"
        )


class Pace:
    """How fast bulk data may move: after each part, how long to wait before the next."""

    def __init__(self, rate: float) -> None:
        """`rate`: bytes per second, 0 for no limit. Several transfers that share one pace share the rate."""
        self._rate = rate
        self._free = 0.0  # when all that was moved so far is paid for

    def spend(self, now: float, size: int) -> float:
        """Account for `size` bytes moved by `now` (monotonic seconds); the seconds to wait, 0.0 for none."""
        if not self._rate:
            return 0.0
        self._free = max(self._free, now) + size / self._rate
        return self._free - now


def needs(lock: Lock) -> Needs:
    """What the run asks of a machine."""
    stored = {"bfloat16": 2, "float16": 2, "float32": 4}
    total = trained = download = 0
    for tensor in lock.manifest:
        size = math.prod(tensor.shape)
        total += size
        trained += size if tensor.trained else 0
        download += size * stored.get(tensor.dtype, 8)
    master = trained * stored[lock.master]
    return Needs(total, download, master + total * stored[lock.live_dtype], master)


# ---------------------------------------------------------------- reading


def _span(value: Any) -> Span:
    match = _SPAN.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    names, *clock = match.groups()
    first, second, third, fourth = map(int, clock)
    start, end = first * 60 + second, third * 60 + fourth
    if max(second, fourth) > 59 or start >= _DAY_MINUTES or end > _DAY_MINUTES or start == end:
        raise ValueError
    return Span(_days(names), start, end, value.strip())


def _days(names: str | None) -> frozenset[int]:
    found: set[int] = set()
    for part in names.replace(" ", "").split(",") if names else ["mon-sun"]:
        first, _, last = part.partition("-")
        if first not in DAYS or (last or first) not in DAYS:
            raise ValueError
        start, length = DAYS.index(first), (DAYS.index(last or first) - DAYS.index(first)) % 7
        found.update((start + k) % 7 for k in range(length + 1))
    return frozenset(found)


HOURS = Rule('a text like "22:00-07:00", "mon-fri 18:00-08:00" or "sat,sun 00:00-24:00"', _span)
LIMIT = number(0.0, 1e9)
FIELDS: dict[str, tuple[Rule, str, str]] = {  # rule, default as TOML, meaning
    "models": (many(GLOB, at_least=1), '["*"]', "models to work for, as runs name them; * and ? match"),
    "memory_gb": (LIMIT, "0", "most memory that a run may ask for; 0: whatever is free"),
    "disk_gb": (LIMIT, "0", "most disk that all joined runs may take together; 0: whatever is free"),
    "bandwidth_mbit": (LIMIT, "0", "pace of bulk transfers (task data, snapshots), Mbit/s; 0: no limit"),
    "hours": (
        many(HOURS),
        "[]",
        "local time to work in, e.g. [\"22:00-07:00\", \"sat,sun 00:00-24:00\"]; outside it the node pauses; "
        "empty: always",
    ),
}  # fmt: skip


def parse(text: str, where: str) -> Policy:
    """The policy of a file's text; `where` names the file in a PolicyError."""
    try:
        table: Mapping[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{where} is no TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in FIELDS:
            raise PolicyError(f"{where}: {key!r} is unknown; there are {', '.join(FIELDS)}")
        rule = FIELDS[key][0]
        try:
            values[key] = rule.read(value)
        except ValueError as error:
            raise PolicyError(
                f"{where}: {key} = {value!r} {str(error) or 'must be ' + rule.expects}"
            ) from error
    return Policy(**values)


def template() -> str:
    """A commented policy file that changes nothing."""
    lines = ["# What this machine does for the runs it has joined. These are the defaults."]
    for key, (_, default, meaning) in FIELDS.items():
        lines += ["", f"# {meaning}", f"{key} = {default}"]
    return "\n".join(lines) + "\n"
