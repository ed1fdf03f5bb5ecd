"""Whose second is it: jobs that overlap on one machine share its time equally, so that the bill is booked once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


def shared_seconds(start: float, end: float, others: Iterable[tuple[float, float]]) -> float:
    """Seconds of [start, end] that this job pays for: each instant divided by the number of jobs running then.

    others: intervals of the other jobs on the machine, in the same clock; one still running ends at infinity.
    """
    if end <= start:
        return 0.0
    overlapping = [(max(s, start), min(e, end)) for s, e in others if s < end and e > start]
    edges = sorted({start, end, *(s for s, _ in overlapping), *(e for _, e in overlapping)})
    paid = 0.0
    for left, right in pairwise(edges):
        sharers = 1 + sum(1 for s, e in overlapping if s <= left and e >= right)
        paid += (right - left) / sharers
    return paid
