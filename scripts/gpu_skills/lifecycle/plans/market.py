"""What a provider has of each GPU class that would do, and what stands in the way of the others.

`look` asks, in as few calls as it can; `judge` is pure and may be repeated with other hours or prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpu_skills.lifecycle.memory import HostMemory
from gpu_skills.lifecycle.plans import offers as ranking
from gpu_skills.lifecycle.plans.offers import Estimate, Use
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.providers.base import FilterCount, Offer, RentedReader, Requirements, Search
from gpu_skills.providers.gpus import canonical
from gpu_skills.providers.selection import filters, in_words, select
from gpu_skills.units import json_number

ANY_GPU = "any GPU"
MAX_CLASSES = 3  # of those nobody named
DEARER_TIMES = Decimal("1.5")  # nor is one taken unasked that costs so much more than the smallest
MAX_EXPLAINED = 3  # classes for which the provider is asked once more, alone, why there is none
SHOWN = 5  # offers of each class in a plan
_LOOSENED: dict[str, Any] = {"min_vram_gb": None, "min_cuda": None, "max_rate_usd_hr": None}


@dataclass(frozen=True)
class Seen:
    """The offers of one class, whether or not they fit. filters: what removed them all, where there are none."""

    gpu: str
    offers: tuple[Offer, ...]
    filters: tuple[FilterCount, ...] = ()


@dataclass(frozen=True)
class Look:
    """One class as the need has it. estimates: what fits, best first.

    fails: names of the requirements that no offer of it satisfies, with what is wanted; filters: the whole table.
    """

    seen: Seen
    estimates: tuple[Estimate, ...]
    fails: Mapping[str, str]
    filters: tuple[FilterCount, ...]

    @property
    def gpu(self) -> str:
        return self.seen.gpu

    @property
    def shown(self) -> tuple[Estimate, ...]:
        """What stands in the plan: no dearer offer than these is taken."""
        return self.estimates[:SHOWN]

    @property
    def vram_gb(self) -> float | None:
        """The most that was seen of it."""
        return max((o.vram_gb for o in self.seen.offers if o.vram_gb is not None), default=None)

    @property
    def words(self) -> str:
        return in_words(self.filters)


def need_of(plan: Plan, gpu: str | None = None, *, hours: float | None = None) -> Requirements:
    """What a plan asks of an offer: of one class, or of any it may rent. hours: what is left until the deadline."""
    names = (gpu,) if gpu is not None else tuple(candidate.gpu for candidate in plan.tried)
    return Requirements(
        gpu=names[0] if names else None,
        candidates=names[1:],
        gpu_count=plan.gpu_count,
        min_vram_gb=plan.min_vram_gb,
        disk_gb=plan.disk_gb,
        max_rate_usd_hr=plan.max_rate_usd_hr,
        hours=plan.deadline_h if hours is None else hours,
        min_cuda=plan.min_cuda,
        locations=plan.locations,
        volume_id=plan.volume_id,
        interruptible=plan.interruptible,
        persistent=not plan.outputs_ephemeral,
    )


def look(reader: RentedReader, need: Requirements, names: Sequence[str]) -> list[Seen]:
    """Ask for these classes, or without names for the smallest ones that do. One search; more where it brings nothing.

    How long the machine is there is left out: the deadline follows from the price.
    """
    need = replace(need, hours=None)
    found = reader.search(_naming(need, names))
    names = list(names) or smallest_first(found.offers)
    if not names:
        return [_why_nothing(reader, need)]
    seen = [Seen(name, tuple(o for o in found.offers if is_of(name, o))) for name in names]
    empty = [one.gpu for one in seen if not one.offers]
    if not empty:
        return seen
    # What fell at the vendor's own filters is not in its answer: asked for with fewer, it tells what is wrong with it.
    wide = reader.search(_naming(replace(need, **_LOOSENED), empty))
    told = {name: Seen(name, tuple(o for o in wide.offers if is_of(name, o))) for name in empty}
    nowhere = [name for name in empty if not told[name].offers]
    for name in nowhere[:MAX_EXPLAINED]:
        alone = wide if empty == [name] else reader.search(_naming(replace(need, **_LOOSENED), [name]))
        told[name] = Seen(name, (), tuple(alone.filters))
    return [told.get(one.gpu, one) for one in seen]


def judge(
    seen: Seen, need: Requirements, memory: Mapping[str, HostMemory], *, use: Use, provider: str, now: datetime
) -> Look:
    """What of a class fits the whole need, machines on cooldown left out. Pure."""
    need = _naming(need, () if seen.gpu == ANY_GPU else (seen.gpu,))
    kept = select(seen.offers, need)
    ranked = ranking.rank({provider: kept}, use, memory, now=now)
    rules = [rule for rule in filters(need) if seen.offers and not any(map(rule.keeps, seen.offers))]
    fails = {rule.name: rule.wanted for rule in rules}
    table = tuple(ranked.filters[provider]) if seen.offers else seen.filters
    if not ranked.estimates and not fails and table:
        last = next((row for row in table if row.left == 0), table[-1])
        fails = {last.filter: last.wanted}
    return Look(seen, tuple(ranked.estimates), fails, table)


def is_of(name: str, offer: Offer) -> bool:
    """Whether an offer is of the class that a name means."""
    return next(rule for rule in filters(Requirements(gpu=name)) if rule.name == "gpu").keeps(offer)


def smallest_first(offers: Sequence[Offer], *, most: int = MAX_CLASSES) -> list[str]:
    """The classes of these offers: least memory first, among equals the cheapest."""
    classes: dict[tuple[str, float], Offer] = {}
    for offer in offers:  # cheapest first
        if offer.gpu is not None:
            classes.setdefault((canonical(offer.gpu), offer.vram_gb or 0.0), offer)
    ordered = sorted(classes, key=lambda key: (key[1], classes[key].rate_usd_hr, key[0]))
    ordered = [key for key in ordered if classes[key].rate_usd_hr <= classes[ordered[0]].rate_usd_hr * DEARER_TIMES]
    names = [name for name, _ in ordered]
    return [f"{name} {size:g}GB" if names.count(name) > 1 and size else name for name, size in ordered[:most]]


def offer_record(e: Estimate) -> dict[str, Any]:
    """An offer as a plan shows it."""
    offer = e.offer
    return {
        "offer_id": offer.offer_id,
        "machine_id": offer.machine_id,
        "gpu": offer.gpu,
        "vram_gb": offer.vram_gb,
        "rate_usd_hr": json_number(offer.rate_usd_hr),
        "storage_usd_hr": json_number(offer.storage_usd_hr),
        "location": offer.location,
        "duration_h": None if offer.duration_h is None else round(offer.duration_h, 1),
        "cuda": offer.cuda,
        "stock": offer.stock,
        "startup_s": round(e.startup_s),
    }


def _naming(need: Requirements, names: Sequence[str]) -> Requirements:
    return replace(need, gpu=names[0] if names else None, candidates=tuple(names[1:]))


def _why_nothing(reader: RentedReader, need: Requirements) -> Seen:
    found: Search = reader.search(_naming(replace(need, **_LOOSENED), ()))
    return Seen(ANY_GPU, tuple(found.offers), tuple(found.filters))
