"""What a rented machine would really cost for the hours that are wanted, and in which order to try them. Pure.

Total = (start-up + download + hours) × all-in rate + downloaded GB × traffic price. Start-up and download come from
what was measured on that machine before, else from what the provider states, else from careful guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpu_skills.clock import timestamp
from gpu_skills.lifecycle.memory import HostMemory
from gpu_skills.providers.base import FilterCount, Offer, Search
from gpu_skills.providers.gpus import canonical
from gpu_skills.units import json_number

# From the create to an SSH banner without the image pull, where nothing was measured.
BOOT_S = 90.0
# Of the stated speed, what one download gets.
USABLE_SHARE = 0.5
# Where no speed is stated.
ASSUMED_MBPS = 200.0
# Speeds and times are somebody's claim or a file's content: beyond these they mean nothing but "no".
SLOWEST_MBPS = 0.1
LONGEST_STARTUP_S = 86400.0
IMAGE_GB = 6.0


@dataclass(frozen=True)
class Use:
    """What the machine is wanted for. download_gb: what it fetches beside the image: packages, models, data."""

    hours: float = 1.0
    download_gb: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """One offer with what it comes to. memory: None where nothing is known of the machine."""

    offer: Offer
    startup_s: float
    download_s: float
    traffic_usd: Decimal
    total_usd: Decimal
    memory: HostMemory | None = None

    @property
    def is_measured(self) -> bool:
        return self.memory is not None and (self.memory.time_to_ssh_s is not None or self.memory.down_mbps is not None)


@dataclass(frozen=True)
class Ranking:
    """estimates: best first. filters: by provider, what removed the others, cooldowns last."""

    estimates: list[Estimate]
    filters: dict[str, list[FilterCount]]
    considered: dict[str, int]


def rank(
    searches: Mapping[str, Search],
    use: Use,
    memory: Mapping[str, HostMemory],
    *,
    now: datetime,
    by: str = "total",
) -> Ranking:
    """Every offer of every provider in one order: `total` or `rate`, cheapest first. Machines on cooldown fall.

    Equal prices are told apart by reliability, then by id, so that the order does not change between two looks.
    """
    estimates: list[Estimate] = []
    filters: dict[str, list[FilterCount]] = {}
    for name, search in searches.items():
        made = [estimate(offer, use, memory.get(offer.host_key or "")) for offer in search.offers]
        kept = [e for e in made if e.memory is None or not e.memory.is_cooling(now)]
        estimates += kept
        table = list(search.filters)
        if len(kept) < len(made):
            table.append(FilterCount("cooldown", "no recent failure of this machine", len(made) - len(kept), len(kept)))
        filters[name] = table

    def order(e: Estimate) -> tuple[Any, ...]:
        price = e.total_usd if by == "total" else e.offer.rate_usd_hr
        return price, e.total_usd, -(e.offer.reliability or 0.0), e.offer.provider, e.offer.offer_id

    return Ranking(sorted(estimates, key=order), filters, {name: s.considered for name, s in searches.items()})


def estimate(offer: Offer, use: Use, memory: HostMemory | None = None) -> Estimate:
    """The cost of one use. A machine that fetches slowly pays for it in hours, not in its rate."""
    measured_mbps = memory.down_mbps if memory is not None else None
    mbps = measured_mbps or (offer.down_mbps * USABLE_SHARE if offer.down_mbps else ASSUMED_MBPS)
    measured_s = memory.time_to_ssh_s if memory is not None else None
    # The time to SSH includes the image pull.
    startup_s = measured_s if measured_s is not None else BOOT_S + _seconds(IMAGE_GB, mbps)
    startup_s = min(startup_s, LONGEST_STARTUP_S)
    download_s = _seconds(use.download_gb, mbps)
    hours = Decimal(str(use.hours)) + Decimal(str(round(startup_s + download_s, 3))) / 3600
    traffic = offer.download_usd_gb * Decimal(str(IMAGE_GB + use.download_gb))
    return Estimate(offer, startup_s, download_s, traffic, offer.rate_usd_hr * hours + traffic, memory)


def _seconds(gigabytes: float, mbps: float) -> float:
    return gigabytes * 8000 / max(mbps, SLOWEST_MBPS)


def row(e: Estimate, use: Use) -> dict[str, Any]:
    """An estimate as `gpu offers --json` shows it."""
    offer = e.offer
    return {
        "provider": offer.provider,
        "host": offer.offer_id,
        "offer_id": offer.offer_id,
        "machine": None,
        "machine_id": offer.machine_id,
        "gpu": canonical(offer.gpu) if offer.gpu else None,
        "gpu_count": offer.gpu_count,
        "vram_gb": offer.vram_gb,
        "disk_free_gb": offer.max_disk_gb,
        "disk_gb": offer.disk_gb,
        "rate_usd_hr": json_number(offer.rate_usd_hr),
        "storage_usd_hr": json_number(offer.storage_usd_hr),
        "hours": use.hours,
        "total_usd": json_number(e.total_usd),
        "startup_s": round(e.startup_s),
        "download_s": round(e.download_s),
        "traffic_usd": json_number(e.traffic_usd),
        "is_measured": e.is_measured,
        "is_interruptible": offer.is_interruptible,
        "min_bid_usd_hr": None if offer.min_bid_usd_hr is None else json_number(offer.min_bid_usd_hr),
        "reliability": None if offer.reliability is None else round(offer.reliability, 4),
        "down_mbps": offer.down_mbps,
        "up_mbps": offer.up_mbps,
        "location": offer.location,
        "duration_h": None if offer.duration_h is None else round(offer.duration_h, 1),
        "cuda": offer.cuda,
        "stock": offer.stock,
        "last_failure": e.memory.last_failure if e.memory is not None else None,
        "fits": True,
        "why_not": None,
    }


def table_json(filters: Iterable[FilterCount]) -> list[dict[str, Any]]:
    return [{"filter": f.filter, "wanted": f.wanted, "removed": f.removed, "left": f.left} for f in filters]


def cooling(memory: Mapping[str, HostMemory], now: datetime) -> list[dict[str, Any]]:
    """The machines that are left alone now, and why."""
    return [
        {"machine_id": key, "reason": known.last_failure, "until": timestamp(known.cooldown_until)}
        for key, known in sorted(memory.items())
        if known.cooldown_until is not None and known.is_cooling(now)
    ]
