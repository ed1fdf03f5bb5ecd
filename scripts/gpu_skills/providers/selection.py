"""Which offers fit, and which requirement removed how many: pure, and the same for every provider.

Servers ignore filters they do not understand, so whatever they were asked, everything is judged here again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpu_skills.providers.base import FilterCount, Offer, Requirements, Search
from gpu_skills.providers.gpus import same_model, size_on_label_gb

# A card reports a little less than its label: 24,564 MB and 23,034 MiB are both a 24 GB card.
VRAM_TOLERANCE = 0.95


@dataclass(frozen=True)
class Filter:
    """wanted: what a person reads. keeps: whether an offer may stay."""

    name: str
    wanted: str
    keeps: Callable[[Offer], bool]


def select(offers: Iterable[Offer], need: Requirements, *, is_cut: bool = False, unreadable: int = 0) -> Search:
    """The offers that satisfy every requirement, cheapest first, with the table of what removed the others.

    unreadable: entries of the provider that made no offer; they count as the first line of the table.
    """
    left = list(offers)
    considered = len(left) + unreadable
    table: list[FilterCount] = []
    if unreadable:
        table.append(FilterCount("readable", "an id, a rate and a GPU", unreadable, len(left)))
    for rule in filters(need):
        kept = [offer for offer in left if rule.keeps(offer)]
        table.append(FilterCount(rule.name, rule.wanted, len(left) - len(kept), len(kept)))
        left = kept
    return Search(sorted(left, key=lambda o: (o.rate_usd_hr, o.offer_id)), considered, table, is_cut)


def filters(need: Requirements) -> Iterator[Filter]:
    """The requirements in the order in which a person would relax them last: what it is, what it has, what it costs.

    What a provider does not state cannot be shown to satisfy a wish, so it falls; only the reliability floor, which
    holds without being asked for, passes over those that state none.
    """
    if need.gpus:
        yield Filter("gpu", " or ".join(need.gpus), lambda o: any(_is_model(wanted, o) for wanted in need.gpus))
    yield Filter("gpu_count", str(need.gpu_count), lambda o: o.gpu_count == need.gpu_count)
    yield Filter("stock", "some", lambda o: o.stock != "NONE")
    yield Filter("verified", "not known as unverified", lambda o: o.is_verified is not False)
    kind = "interruptible" if need.interruptible else "on-demand"
    yield Filter("kind", kind, lambda o: o.is_interruptible == need.interruptible)
    if need.min_vram_gb is not None:
        vram = need.min_vram_gb
        yield Filter(
            "min_vram_gb",
            f"{vram:g} GB or more",
            lambda o: o.vram_gb is not None and o.vram_gb >= vram * VRAM_TOLERANCE,
        )
    if need.disk_gb is not None:
        disk = need.disk_gb
        yield Filter("disk_gb", f"{disk:g} GB free", lambda o: o.max_disk_gb is None or o.max_disk_gb >= disk)
    if need.min_cuda is not None:
        cuda = need.min_cuda
        yield Filter("cuda", f"{cuda:g} or newer", lambda o: o.cuda is not None and o.cuda >= cuda)
    yield Filter("ssh", "a direct port", lambda o: o.has_direct_ssh)
    floor = need.min_reliability
    yield Filter("reliability", f"{floor:g} or more", lambda o: o.reliability is None or o.reliability >= floor)
    if need.min_down_mbps is not None:
        speed = need.min_down_mbps
        yield Filter(
            "min_down_mbps", f"{speed:g} Mb/s or more", lambda o: o.down_mbps is not None and o.down_mbps >= speed
        )
    if need.locations:
        places = [place.upper() for place in need.locations]
        yield Filter("location", " or ".join(places), lambda o: _is_in(o.location, places))
    if need.hours is not None:
        hours = need.hours
        # None: the provider sets no end.
        yield Filter("too_short", f"{hours:g} h or longer", lambda o: o.duration_h is None or o.duration_h >= hours)
    if need.max_rate_usd_hr is not None:
        ceiling = need.max_rate_usd_hr
        yield Filter("max_rate", f"${ceiling:g}/h or less, disk included", lambda o: o.rate_usd_hr <= ceiling)


def _is_model(wanted: str, offer: Offer) -> bool:
    if offer.gpu is None or not same_model(wanted, offer.gpu):
        return False
    size = size_on_label_gb(wanted)
    return size is None or (offer.vram_gb is not None and abs(offer.vram_gb - size) <= size * 0.1)


def _is_in(location: str | None, places: list[str]) -> bool:
    """`Sweden, SE` is in SE; the data centres `EU-SE-1, US-TX-3` are in EU-SE-1 and in US."""
    if location is None:
        return False
    words = [word.strip().upper() for word in location.split(",")]
    return any(word == place or word.startswith(place + "-") for word in words for place in places)


def in_words(table: Iterable[FilterCount]) -> str:
    """The table on one line: `gpu (L4) removed 12, 3 left; …`; filters that removed none are left out."""
    told = [f"{row.filter} ({row.wanted}) removed {row.removed}, {row.left} left" for row in table if row.removed]
    return "; ".join(told) or "the provider has none"
