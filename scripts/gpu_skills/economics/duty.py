"""How much of the time that a machine billed was work, and when it stood idle. Pure: intervals in, sums out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONG_GAP_S = 15 * 60.0

Interval = tuple[float, float]


@dataclass(frozen=True)
class Duty:
    """long_gaps: the stretches of more than LONG_GAP_S that billed without a job or a set-up, oldest first."""

    billed_s: float
    busy_s: float
    long_gaps: tuple[Interval, ...]

    @property
    def pct(self) -> float | None:
        return round(100 * self.busy_s / self.billed_s, 1) if self.billed_s else None


def duty(jobs: Iterable[Interval], setups: Iterable[Interval], idle: Iterable[Interval]) -> Duty:
    """Of one machine, in one clock. Jobs that overlap are one stretch of work; a set-up bills and is not work."""
    busy = _merged(jobs)
    in_use = _merged([*busy, *setups])
    billed = _merged([*in_use, *idle])
    gaps = tuple(gap for gap in _without(billed, in_use) if gap[1] - gap[0] > LONG_GAP_S)
    return Duty(_length(billed), _length(busy), gaps)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as stretches that neither overlap nor touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _without(whole: list[Interval], taken: list[Interval]) -> list[Interval]:
    """What of `whole` is not `taken`; both merged, `taken` within `whole`."""
    left: list[Interval] = []
    for start, end in whole:
        for taken_start, taken_end in taken:
            if start <= taken_start < end:
                left.append((start, taken_start))
                start = taken_end
        left.append((start, end))
    return [(start, end) for start, end in left if end > start]


def _length(merged: list[Interval]) -> float:
    return sum(end - start for start, end in merged)
