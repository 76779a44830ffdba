"""Judges a canary, a new version with a share of the traffic, against the version it may replace. Pure.

The rule compares both since the canary began: failures by Wilson's lower bound at 95 %, since one failure in three
requests means little and three in ten mean enough; latency by the median of the metrics' histogram. Where the rule
bounds the disagreement, the canary answers copies of the other version's requests too, and both answers are compared.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from trueline.errors import RequestError
from trueline.serve.counters import BOUNDS_S, VersionStats

Act = Literal["watch", "roll back", "promote"]
Z = 1.96
MIN_FAILURES = 2
MAX_ERROR_RATE = 0.01
MAX_LATENCY_RATIO = 2.0
MIN_REQUESTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRule:
    """When a canary is rolled back or promoted."""

    max_error_rate: float = MAX_ERROR_RATE  # above the other version's rate
    max_latency_ratio: float = MAX_LATENCY_RATIO  # of the medians
    min_requests: int = MIN_REQUESTS  # before the latency is judged
    promote_after: int = 0  # requests after which the canary gets all the traffic; 0: never
    max_disagreement: float | None = None  # share of records for which the canary decides otherwise
    max_difference: float | None = None  # of any number in an answer, absolute

    @property
    def compares(self) -> bool:
        return self.max_disagreement is not None or self.max_difference is not None

    def __post_init__(self) -> None:
        if not 0 <= self.max_error_rate < 1 or not self.max_latency_ratio >= 1:
            raise RequestError(
                f"max_error_rate is from 0 up to 1 and max_latency_ratio at least 1; got {self.max_error_rate:g} and "
                f"{self.max_latency_ratio:g}"
            )
        if not 0 <= (self.max_disagreement or 0.0) < 1 or not (self.max_difference or 0.0) >= 0:
            raise RequestError(
                "max_disagreement is a share from 0 up to 1 and max_difference at least 0; got "
                f"{self.max_disagreement} and {self.max_difference}"
            )
        if self.min_requests < 1 or self.promote_after < 0:
            raise RequestError(
                f"min_requests is at least 1 and promote_after at least 0; got {self.min_requests} and "
                f"{self.promote_after}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counts of a version over some time."""

    answered: int
    failed: int
    seconds: Sequence[int]  # answered requests by cell of the histogram

    @property
    def requests(self) -> int:
        return self.answered + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """How a canary has answered copies of the other version's requests."""

    records: int = 0
    changed: int = 0
    largest: float = 0.0


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """What becomes of a canary, and why."""

    act: Act
    why: str = ""


def sample(stats: VersionStats, before: Sample | None = None) -> Sample:
    cells = list(stats.request_s.cells)
    if before is None:
        return Sample(answered=sum(cells), failed=stats.failed, seconds=cells)
    since = [now - then for now, then in zip(cells, before.seconds, strict=True)]
    return Sample(answered=sum(since), failed=stats.failed - before.failed, seconds=since)


def judge(base: Sample, canary: Sample, rule: CanaryRule, beside: Disagreement | None = None) -> CanaryVerdict:
    allowed = rule.max_error_rate + (base.failed / base.requests if base.requests else 0.0)
    if canary.failed >= MIN_FAILURES and lower_bound(canary.failed, canary.requests) > allowed:
        return CanaryVerdict(
            "roll back", f"{canary.failed} of {canary.requests} requests failed; {allowed:.3g} of them would be allowed"
        )
    beside = beside or Disagreement()
    why = _find_disagreement(beside, rule)
    if why:
        return CanaryVerdict("roll back", why)
    if min(canary.answered, base.answered) >= rule.min_requests:
        ours, theirs = median_s(canary), median_s(base)
        if ours > rule.max_latency_ratio * theirs:
            return CanaryVerdict(
                "roll back",
                f"its median is {ours * 1e3:.3g} ms, the other version's {theirs * 1e3:.3g} ms; "
                f"{rule.max_latency_ratio:g} times that would be allowed",
            )
    compared = not rule.compares or beside.records >= rule.min_requests
    if rule.promote_after and canary.requests >= rule.promote_after and compared:
        told = f"; {beside.changed} of {beside.records} records decided otherwise" if rule.compares else ""
        return CanaryVerdict("promote", f"{canary.requests} requests, {canary.failed} failed{told}")
    return CanaryVerdict("watch")


def _find_disagreement(beside: Disagreement, rule: CanaryRule) -> str:
    """Why the canary's answers are too far from the other version's; empty: they are not."""
    share = rule.max_disagreement
    if share is not None and lower_bound(beside.changed, beside.records) > share:
        return f"it decides otherwise for {beside.changed} of {beside.records} records; {share:.3g} would be allowed"
    if rule.max_difference is not None and beside.largest > rule.max_difference:
        return f"an answer differs by {beside.largest:.3g}; {rule.max_difference:.3g} would be allowed"
    return ""


def lower_bound(failed: int, requests: int) -> float:
    """The lower end of Wilson's 95 % interval for a share.

    >>> round(lower_bound(3, 10), 3), round(lower_bound(1, 100), 4)
    (0.108, 0.0018)
    """
    if not failed:
        return 0.0
    share, z2 = failed / requests, Z * Z
    centre = share + z2 / (2 * requests)
    spread = Z * math.sqrt(share * (1 - share) / requests + z2 / (4 * requests * requests))
    return min(share, max(0.0, (centre - spread) / (1 + z2 / requests)))


def median_s(found: Sample) -> float:
    """Interpolated in its cell."""
    running = list(accumulate(found.seconds))
    if not running or not running[-1]:
        return 0.0
    middle = running[-1] / 2
    cell = bisect_left(running, middle)
    below = running[cell - 1] if cell else 0
    low = BOUNDS_S[cell - 1] if cell else 0.0
    high = BOUNDS_S[cell] if cell < len(BOUNDS_S) else 2 * BOUNDS_S[-1]
    return low + (high - low) * (middle - below) / max(1, found.seconds[cell])
