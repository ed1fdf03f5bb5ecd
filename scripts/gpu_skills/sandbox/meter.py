"""The meter: what each resource costs, by the second of the vendor's clock, in exact decimals.

A bill is a list of entries. A running entry is a rate since a second; a closed one ended; a lump sum is a quantity at a
price (bandwidth). Seconds are whole: two entries that follow each other neither share nor lose one. The amount of an
entry is rounded to twelve places once, so every total is the plain sum of the lines that are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

HOURS_PER_MONTH = 720  # a month of storage, as both vendors' own examples work out
_PLACES = Decimal("0.000000000001")
ZERO = Decimal(0)


def per_hour(usd_per_gb_month: Decimal, gigabytes: Decimal | int) -> Decimal:
    """The hourly rate of storage that is priced by the gigabyte and month."""
    return usd_per_gb_month * gigabytes / HOURS_PER_MONTH


@dataclass
class Entry:
    """resource: `instance-7`, `volume-3`. kind: gpu, disk, volume, bwd, bwu, …: the vendor's own words."""

    resource: str
    kind: str
    start: int
    end: int | None  # None: still running
    rate_usd_hr: Decimal = ZERO
    lump_usd: Decimal = ZERO
    quantity_gb: Decimal = ZERO

    def amount(self, since: float, until: float) -> Decimal:
        """What falls into [since, until): a lump sum counts in the second it was made."""
        first, last = max(self.start, int(since)), int(until) if self.end is None else min(self.end, int(until))
        amount = self.rate_usd_hr * max(last - first, 0) / 3600
        if self.lump_usd and int(since) <= self.start < max(int(until), int(since) + 1):
            amount += self.lump_usd
        return amount.quantize(_PLACES, rounding=ROUND_HALF_EVEN)

    def seconds(self, now: float) -> int:
        return max((int(now) if self.end is None else self.end) - self.start, 0)


@dataclass
class Bill:
    """Everything one account was ever charged."""

    entries: list[Entry] = field(default_factory=list)
    _running: dict[tuple[str, str], Entry] = field(default_factory=dict)
    _closed_usd: Decimal = ZERO

    def set_rate(self, resource: str, kind: str, rate_usd_hr: Decimal, now: float) -> None:
        """From this second on the resource costs that much for that kind; 0 ends it."""
        key, second = (resource, kind), int(now)
        current = self._running.get(key)
        if current is not None:
            if current.rate_usd_hr == rate_usd_hr:
                return
            del self._running[key]
            current.end = max(second, current.start)
            if current.end == current.start:
                self.entries.remove(current)
            else:
                self._closed_usd += current.amount(current.start, current.end)
        if rate_usd_hr:
            entry = Entry(resource, kind, second, None, rate_usd_hr)
            self.entries.append(entry)
            self._running[key] = entry

    def set_rates(self, resource: str, rates_usd_hr: dict[str, Decimal], now: float) -> None:
        """All kinds of a resource at once; a kind that is not named ends."""
        for kind in [kind for name, kind in self._running if name == resource and kind not in rates_usd_hr]:
            self.set_rate(resource, kind, ZERO, now)
        for kind, rate in rates_usd_hr.items():
            self.set_rate(resource, kind, rate, now)

    def add(self, resource: str, kind: str, *, usd_per_gb: Decimal, quantity_gb: Decimal, now: float) -> None:
        lump = (usd_per_gb * quantity_gb).quantize(_PLACES, rounding=ROUND_HALF_EVEN)
        entry = Entry(resource, kind, int(now), int(now), lump_usd=lump, quantity_gb=quantity_gb)
        self.entries.append(entry)
        self._closed_usd += lump

    def burn_usd_hr(self, resource: str | None = None) -> Decimal:
        """What is being charged per hour right now."""
        return sum((e.rate_usd_hr for e in self._running.values() if resource in (None, e.resource)), ZERO)

    def running(self) -> list[Entry]:
        return list(self._running.values())

    def total_usd(self, now: float) -> Decimal:
        return self._closed_usd + sum((e.amount(e.start, now) for e in self._running.values()), ZERO)

    def of(self, resource: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.resource == resource]

    def resources(self) -> Iterator[str]:
        """In the order of their first charge."""
        yield from dict.fromkeys(entry.resource for entry in self.entries)

    def lines(self, now: float) -> list[dict[str, Any]]:
        """One line per entry, for people and tests; their `amount_usd` add up to `total_usd`."""
        return [
            {
                "resource": e.resource,
                "kind": e.kind,
                "start": e.start,
                "end": e.end,
                "seconds": e.seconds(now),
                "rate_usd_hr": e.rate_usd_hr,
                "quantity_gb": e.quantity_gb,
                "amount_usd": e.amount(e.start, max(now, e.start + 1) if e.lump_usd else now),
            }
            for e in self.entries
        ]


def by_kind(entries: Iterable[Entry], since: float, until: float) -> dict[str, Decimal]:
    """Amounts of these entries within a window, added up by kind."""
    sums: dict[str, Decimal] = defaultdict(Decimal)
    for entry in entries:
        sums[entry.kind] += entry.amount(since, until)
    return dict(sums)
