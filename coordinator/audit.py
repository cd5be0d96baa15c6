"""What audits show of a node: evidence by pairs of nodes, and the three tests that judge it.

Pure arithmetic, no state of the run. An audit is one unit measured by two nodes; its prompts are the pairs.
Differences are in units of the task's reward range. Bias: whether a node's rewards are higher or lower than
everybody else's. Contradiction: whether it says high where all others, of all members, say low, or the other
way round. Laziness: whether its rewards follow the member at all, or only the prompt: each score has its
prompt's mean over other members taken off, and what is left must agree with what is left of the second
node's. Called by `auditing.py`; docs/trust.md says what this can and cannot show, docs/adr/0011 why so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import fsum, log1p, sqrt
from operator import add

import msgspec

ALLOWANCE = 0.02  # mean difference that honest hardware may have, in units of the range
SIGMAS = 6.0  # of the bias test
GUARD_SIGMAS = 3.0  # without the partner that speaks most against it
ERRORS = 4.0  # standard errors of the laziness test
ENOUGH = 100  # pairs the laziness test needs, of the node
SETTLED = 60  # prompts that carry the others' correlation it is held against
NATS = 10.0  # of the contradiction test: odds of e^10
GUARD_NATS = 4.5  # without the partner that speaks most against it: 3 standard deviations
STAKE = 5.0  # how much one contradiction tells
MARGIN = 3  # contradictions that the others are allowed beyond those they had
FEW = 3  # measurements by others, of a prompt, that can be contradicted
MISSES = 3  # times evidence could not be produced

MIRRORED = ("low", "over", "up", "high", "under", "down")
Pair = tuple[bytes, bytes]  # CURVE keys, the smaller first


Scores = Sequence[float]


class Sums(msgspec.Struct, frozen=True):
    """Evidence gathered between two nodes; additive."""

    pairs: float = 0.0  # prompts compared
    d: float = 0.0  # sum of differences, the first node's minus the second's
    dd: float = 0.0  # and of their squares
    deep: float = 0.0  # pairs with references: those of the laziness test
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    x4: float = 0.0  # fourth moments: how much the correlation hangs on few prompts
    x3y: float = 0.0
    x2y2: float = 0.0
    xy3: float = 0.0
    y4: float = 0.0
    low: float = 0.0  # prompts on which all others are in the lower half of the range
    over: float = 0.0  # share of the first node's scores above all of those by half the range, summed
    up: float = 0.0  # nats against it from those prompts
    high: float = 0.0  # likewise the upper half
    under: float = 0.0
    down: float = 0.0
    low_: float = 0.0  # the same six of the second node
    over_: float = 0.0
    up_: float = 0.0
    high_: float = 0.0
    under_: float = 0.0
    down_: float = 0.0
    same: float = 0.0  # audits of engines with equal fingerprints that were equal
    other: float = 0.0  # and those that were not

    def __add__(self, more: Sums) -> Sums:
        return Sums(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(more)))

    @property
    def turned(self) -> Sums:
        """The same seen from the second node."""
        return msgspec.structs.replace(
            self,
            d=-self.d,
            xx=self.yy,
            yy=self.xx,
            x4=self.y4,
            x3y=self.xy3,
            xy3=self.x3y,
            y4=self.x4,
            **{name: getattr(self, name + "_") for name in MIRRORED},
            **{name + "_": getattr(self, name) for name in MIRRORED},
        )

    @property
    def r(self) -> float:
        """Correlation of what the two say of members, their prompts' means taken off."""
        size = self.xx * self.yy
        return self.xy / sqrt(size) if size > 0 else 0.0

    @property
    def error(self) -> float:
        """Standard error of `r`, by the delta method: scores are often 0 or 1 and few prompts decide."""
        size = self.xx * self.yy
        plain = (1 - self.r**2) / sqrt(max(self.deep, 1))
        if size <= 0:  # one of them never leaves the prompts' means: what the other's few exceptions tell
            spread, fourth = max((self.xx, self.x4), (self.yy, self.y4))
            return max(plain, sqrt(fourth) / spread) if spread > 0 else 1.0
        r, a = self.r, sqrt(self.yy / self.xx)
        cross = r * (a * self.x3y + self.xy3 / a)
        own = r * r / 4 * (a * a * self.x4 + 2 * self.x2y2 + self.y4 / (a * a))
        return max(plain, sqrt(max(self.x2y2 - cross + own, 0.0) / size))

    @property
    def excess(self) -> float:
        """How far the bias test is exceeded; above 0 it fails."""
        return abs(self.d) - ALLOWANCE * self.pairs - SIGMAS * sqrt(self.dd + 1)

    @property
    def weight(self) -> float:
        """How many prompts the correlation rests on: of 0 or 1 rewards most say nothing about members."""
        return min(self.xx**2 / self.x4, self.yy**2 / self.y4) if self.x4 and self.y4 else 0.0

    @property
    def floored(self) -> Sums:
        """What speaks for a node is forgotten: it may begin to lie late."""
        names = ("up", "down", "up_", "down_")
        return msgspec.structs.replace(self, **{name: max(getattr(self, name), 0.0) for name in names})


Evidence = Mapping[Pair, Sums]


def compare(
    first: Sequence[float],
    second: Sequence[float],
    first_others: Sequence[Sequence[float]],
    second_others: Sequence[Sequence[float]],
    third_others: Sequence[Sequence[float]],
    low: float,
    high: float,
    *,
    first_rates: tuple[float, float] = (1.0, 1.0),
    second_rates: tuple[float, float] = (1.0, 1.0),
    alike: bool,
) -> Sums:
    """One audit: per-prompt scores of both nodes, and of other members on the same prompts, by whom.

    No member is measured by two of them, so that a prompt's mean is estimated twice, independently: otherwise
    its error would look like agreement. `alike`: equal fingerprints; equal scores then only count as such,
    they say nothing about engines that differ. `low`, `high`: the reward range; `first_rates`: see `rates`.
    """
    if alike and tuple(first) == tuple(second):
        return Sums(same=1)
    span = (high - low) or 1.0
    mine, seconds, thirds = (
        [[(score - low) / span for score in scores] for scores in others]
        for others in (first_others, second_others, third_others)
    )
    a, b = ([(score - low) / span for score in scores] for scores in (first, second))
    differences = [p - q for p, q in zip(a, b, strict=True)]
    sums = Sums(
        pairs=len(differences),
        d=sum(differences),
        dd=sum(d * d for d in differences),
        other=int(alike),
    )
    sums += _opposed([a, *mine], [b, *seconds, *thirds], first_rates)
    sums += _opposed([b, *seconds], [a, *mine, *thirds], second_rates).turned
    return sums + _followed(a, b, mine, [*seconds, *thirds])


def _followed(
    a: Sequence[float], b: Sequence[float], mine: Sequence[Scores], theirs: Sequence[Scores]
) -> Sums:
    """What is left of both sides when their prompts' means are taken off, and how it goes together."""
    if not mine or not theirs:
        return Sums()
    x = [score - _mean(column) for score, column in zip(a, zip(*mine, strict=True), strict=True)]
    y = [score - _mean(column) for score, column in zip(b, zip(*theirs, strict=True), strict=True)]
    return Sums(
        deep=len(x),
        xx=sum(v * v for v in x),
        xy=sum(v * w for v, w in zip(x, y, strict=True)),
        yy=sum(v * v for v in y),
        x4=sum(v**4 for v in x),
        x3y=sum(v**3 * w for v, w in zip(x, y, strict=True)),
        x2y2=sum((v * w) ** 2 for v, w in zip(x, y, strict=True)),
        xy3=sum(v * w**3 for v, w in zip(x, y, strict=True)),
        y4=sum(v**4 for v in y),
    )


def _opposed(own: Sequence[Scores], others: Sequence[Scores], rates: tuple[float, float]) -> Sums:
    """One node's scores of several members against what others measured of others, prompt by prompt.

    `rates`: the share of its scores that may be contradictions, above and below. The nats are the logarithm
    of what somebody would own who bets against that: an honest node makes nobody rich.
    """
    if len(others) < FEW:
        return Sums()
    found = dict.fromkeys(MIRRORED, 0.0)
    for mine, theirs in zip(zip(*own, strict=True), zip(*others, strict=True), strict=True):
        least, most = min(theirs), max(theirs)
        if most <= 0.5:
            share, rate = sum(score - most > 0.5 for score in mine) / len(mine), rates[0]
            _count(found, low=1, over=share, up=log1p(min(STAKE, 0.5 / rate) * (share - rate)))
        elif least >= 0.5:
            share, rate = sum(least - score > 0.5 for score in mine) / len(mine), rates[1]
            _count(found, high=1, under=share, down=log1p(min(STAKE, 0.5 / rate) * (share - rate)))
    return Sums(**found)


def _count(found: dict[str, float], **more: float) -> None:
    for name, value in more.items():
        found[name] += value


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    ranked = sorted(values)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


def partners(evidence: Evidence, node: bytes, without: Collection[bytes] = ()) -> dict[bytes, Sums]:
    """A node's evidence by partner, seen from the node."""
    found = {}
    for (one, two), sums in evidence.items():
        if one == node and two not in without:
            found[two] = sums
        elif two == node and one not in without:
            found[one] = sums.turned
    return found


def total(rows: Collection[Sums]) -> Sums:
    """The evidence of several pairs together."""
    return sum(rows, Sums())


def tables(evidence: Evidence, without: Collection[bytes]) -> dict[bytes, dict[bytes, Sums]]:
    """`partners` of every node, in one pass."""
    found: dict[bytes, dict[bytes, Sums]] = {}
    for (one, two), sums in evidence.items():
        if one not in without and two not in without:
            found.setdefault(one, {})[two] = sums
            found.setdefault(two, {})[one] = sums.turned
    return found


def reference(evidence: Evidence, node: bytes, without: Collection[bytes]) -> tuple[float, float] | None:
    """The median correlation of the other nodes among themselves, and its standard error."""
    return references(tables(evidence, without))(node)


def references(
    rows: Mapping[bytes, Mapping[bytes, Sums]],
) -> Callable[[bytes], tuple[float, float] | None]:
    """`reference` for any node of these tables: what it has no part in is summed up once."""
    settled = {key: whole for key, row in rows.items() if (whole := total(row.values())).weight >= SETTLED}

    def of(node: bytes) -> tuple[float, float] | None:
        beside = rows.get(node, {})
        enough = [whole for key, whole in settled.items() if key != node and key not in beside]
        for key in beside:
            rest = total([sums for partner, sums in rows[key].items() if partner != node])
            if rest.weight >= SETTLED:
                enough.append(rest)
        if not enough:
            return None
        return _median([row.r for row in enough]), _median([row.error for row in enough])

    return of


def bias(rows: Mapping[bytes, Sums]) -> str:
    """Why a node fails the bias test; "" when it does not.

    Two nodes that differ say nothing about which of them is wrong: the evidence must stand, at a lower
    level, without the partner that speaks most against it.
    """
    if len(rows) < 2 or (whole := total(rows.values())).excess <= 0:
        return ""
    sign = 1 if whole.d > 0 else -1
    worst = max(rows, key=lambda key: sign * rows[key].d)
    rest = total([sums for key, sums in rows.items() if key != worst])
    if sign * rest.d - ALLOWANCE * rest.pairs <= GUARD_SIGMAS * sqrt(rest.dd + 1):
        return ""
    return (
        f"its rewards are {'higher' if sign > 0 else 'lower'} than other nodes' by "
        f"{abs(whole.d) / whole.pairs:.3f} of the range over {whole.pairs:.0f} prompts ("
        f"{abs(whole.d):.1f} - {ALLOWANCE * whole.pairs:.1f} > {SIGMAS:g} x {sqrt(whole.dd + 1):.2f})"
    )


def laziness(rows: Mapping[bytes, Sums], expected: tuple[float, float] | None) -> str:
    """Why a node fails the laziness test; "" when it does not or nothing can be said yet."""
    whole = total(rows.values())
    if expected is None or whole.deep < ENOUGH or len(rows) < 2:
        return ""
    usual, usual_error = expected
    worst = min(rows, key=lambda key: rows[key].xy - usual * sqrt(rows[key].xx * rows[key].yy))
    rest = total([sums for key, sums in rows.items() if key != worst])
    error = sqrt(whole.error**2 + usual_error**2)
    low = whole.r < usual / 2 and usual - whole.r > ERRORS * error
    rest_error = sqrt(rest.error**2 + usual_error**2)
    if not low or rest.r >= usual / 2 or usual - rest.r <= GUARD_SIGMAS * rest_error:
        return ""
    return (
        f"its rewards follow the members with a correlation of {whole.r:.2f} over {whole.deep:.0f} prompts, "
        f"other nodes' with {usual:.2f} (limit {usual / 2:.2f}, standard error {error:.3f})"
    )


def rates(evidence: Evidence, node: bytes, out: Collection[bytes]) -> tuple[float, float]:
    """The share of a node's scores that may contradict all others, above and below: twice the others' own."""
    away = {node, *out}
    others = [sums for (one, two), sums in evidence.items() if one not in away and two not in away]
    over, low = sum(row.over + row.over_ for row in others), sum(row.low + row.low_ for row in others)
    under, high = sum(row.under + row.under_ for row in others), sum(row.high + row.high_ for row in others)
    above, below = (
        ALLOWANCE + 2 * (hits + MARGIN) / (prompts + MARGIN) for hits, prompts in ((over, low), (under, high))
    )
    return above, below


def contradiction(rows: Mapping[bytes, Sums]) -> str:
    """Why a node fails the contradiction test; "" when it does not."""
    if len(rows) < 2:
        return ""
    whole = total(rows.values())
    for nats, hits, word, prompts in (("up", "over", "high", "low"), ("down", "under", "low", "high")):
        against = getattr(whole, nats)
        if against > NATS and against - max(getattr(row, nats) for row in rows.values()) > GUARD_NATS:
            clear = getattr(whole, prompts)
            return (
                f"its rewards are {word} in {getattr(whole, hits):.1f} of {clear:.0f} cases where all "
                f"others' are {prompts} (odds of e^{against:.1f} against chance, limit e^{NATS:g})"
            )
    return ""


def judge(
    evidence: Evidence, out: Collection[bytes], about: Collection[bytes] | None = None
) -> tuple[bytes, str] | None:
    """The node that fails worst, and why; None when none does. `out`: those in quarantine already.

    One at a time: the evidence that others have with a liar speaks against them too, until it is out.
    `about`: only these are judged, the two of an audit; a pool of a thousand is too many to go through each
    time, and nobody else's evidence has changed.
    """
    known = {key for pair in evidence for key in pair} if about is None else about
    keys = sorted(set(known) - set(out))
    rows = {key: partners(evidence, key, out) for key in keys}
    biased = [(total(rows[key].values()).excess, key, reason) for key in keys if (reason := bias(rows[key]))]
    if biased:
        _, key, reason = max(biased, key=lambda row: row[0])
        return key, reason
    opposed = [
        (total(rows[key].values()).pairs, key, reason) for key in keys if (reason := contradiction(rows[key]))
    ]
    if opposed:
        _, key, reason = max(opposed)
        return key, reason
    lazy = [
        (total(rows[key].values()).r, key, reason)
        for key in keys
        if len(rows[key]) > 1 and total(rows[key].values()).deep >= ENOUGH
        if (reason := laziness(rows[key], reference(evidence, key, out)))
    ]
    if lazy:
        _, key, reason = min(lazy, key=lambda row: row[0])
        return key, reason
    return None
