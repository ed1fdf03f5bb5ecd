"""Vast's offers in our words: the question we ask, and what a row of the answer is worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from gpu_skills.providers import fields
from gpu_skills.providers.base import Offer, Requirements
from gpu_skills.providers.gpus import same_model, size_class_gb
from gpu_skills.providers.selection import VRAM_TOLERANCE

HOURS_PER_MONTH = 720  # what the documented examples of storage prices work out to
MIN_DISK_GB = 8
MAX_OFFERS = 500
# Names as the API spells them. Asked with only when they cover what is wanted; else everything is judged here.
GPU_NAMES = (
    "A10", "A100 PCIE", "A100 SXM4", "A100X", "A40", "B200", "B300", "GH200 SXM", "GTX 1080 Ti", "H100 NVL",
    "H100 PCIE", "H100 SXM", "H200", "H200 NVL", "L4", "L40", "L40S", "RTX 2080 Ti", "RTX 3060", "RTX 3060 Ti",
    "RTX 3070", "RTX 3070 Ti", "RTX 3080", "RTX 3080 Ti", "RTX 3090", "RTX 3090 Ti", "RTX 4060", "RTX 4060 Ti",
    "RTX 4070", "RTX 4070 Ti", "RTX 4070S", "RTX 4070S Ti", "RTX 4080", "RTX 4080S", "RTX 4090", "RTX 4090D",
    "RTX 5000Ada", "RTX 5060", "RTX 5060 Ti", "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090", "RTX 6000Ada",
    "RTX A4000", "RTX A5000", "RTX A6000", "RTX PRO 6000 S", "RTX PRO 6000 WS", "Tesla T4", "Tesla V100",
)  # fmt: skip


def question(need: Requirements, *, is_narrow: bool) -> dict[str, Any]:
    """The search. Narrow: all our filters, so that the answer is small; wide: only the shape, to see what falls.

    Storage is part of every price that comes back, for the disk that is wanted: `allocated_storage`.
    """
    asked: dict[str, Any] = {
        "rentable": {"eq": True},
        "verified": {"eq": True},
        "num_gpus": {"eq": need.gpu_count},
        "type": "bid" if need.interruptible else "on-demand",
        "order": [["dph_total", "asc"]],
        "limit": MAX_OFFERS,
        "allocated_storage": _disk_gb(need),
    }
    if not is_narrow:
        return asked
    asked["direct_port_count"] = {"gte": 1}
    asked["reliability"] = {"gte": need.min_reliability}
    asked["disk_space"] = {"gte": _disk_gb(need)}
    names = [[name for name in GPU_NAMES if same_model(wanted, name)] for wanted in need.gpus]
    if names and all(names):
        asked["gpu_name"] = {"in": sorted({name for found in names for name in found})}
    if need.min_vram_gb is not None:
        asked["gpu_ram"] = {"gte": int(need.min_vram_gb * 1000 * VRAM_TOLERANCE * 0.95)}
    if need.min_down_mbps is not None:
        asked["inet_down"] = {"gte": need.min_down_mbps}
    if need.hours is not None:
        asked["duration"] = {"gte": int(need.hours * 3600)}
    if need.min_cuda is not None:
        asked["cuda_max_good"] = {"gte": need.min_cuda}
    if need.max_rate_usd_hr is not None:
        asked["dph_total"] = {"lte": need.max_rate_usd_hr}
    return asked


def read_offers(rows: Iterable[Any], need: Requirements) -> tuple[list[Offer], int]:
    """The offers that can be read, each id once, and how many could not."""
    found: dict[str, Offer] = {}
    unreadable = 0
    for row in rows:
        offer = read_offer(row, need) if isinstance(row, dict) else None
        if offer is None:
            unreadable += 1
        else:
            found[offer.offer_id] = offer
    return list(found.values()), unreadable


def read_offer(row: Mapping[str, Any], need: Requirements) -> Offer | None:
    """One row, or None without what an offer must have. Where two prices of the same differ, the dearer counts."""
    offer_id = fields.identity(row, "id", "ask_contract_id")
    gpu, gpu_count = fields.text(row, "gpu_name", limit=80), fields.integer(row, "num_gpus")
    ram_mb = fields.real(row, "gpu_ram")
    min_bid = fields.amount(row, "min_bid")
    base = min_bid if need.interruptible else fields.amount(row, "dph_base")
    total = fields.amount(row, "dph_total")
    storage = fields.amount(row, "storage_cost")
    if offer_id is None or gpu is None or gpu_count is None or gpu_count < 1 or row.get("rentable") is False:
        return None
    if base is None or storage is None:
        return None
    storage_hr = storage * _disk_gb(need) / HOURS_PER_MONTH
    rate = base + storage_hr
    if total is not None and not need.interruptible:
        rate = max(rate, total)
    duration_s = fields.real(row, "duration")
    verification = fields.text(row, "verification", limit=20)
    return Offer(
        provider="vast",
        offer_id=offer_id,
        rate_usd_hr=rate,
        gpu=gpu,
        gpu_count=gpu_count,
        vram_gb=size_class_gb(ram_mb) if ram_mb else None,
        disk_gb=float(_disk_gb(need)),
        max_disk_gb=fields.real(row, "disk_space"),
        storage_usd_hr=storage_hr,
        download_usd_gb=fields.amount(row, "inet_down_cost") or Decimal(0),
        upload_usd_gb=fields.amount(row, "inet_up_cost") or Decimal(0),
        machine_id=fields.identity(row, "machine_id"),
        reliability=_share(fields.real(row, "reliability2", "reliability")),
        down_mbps=fields.real(row, "inet_down"),
        up_mbps=fields.real(row, "inet_up"),
        location=_place(row),
        duration_h=None if duration_s is None else duration_s / 3600,
        cuda=fields.real(row, "cuda_max_good"),
        is_interruptible=need.interruptible,
        min_bid_usd_hr=min_bid if need.interruptible else None,
        has_direct_ssh=(fields.integer(row, "direct_port_count") or 0) >= 1,
        is_verified=None if verification is None else verification == "verified",
    )


def at_bid(offer: Offer, bid_usd_hr: Decimal) -> Offer:
    """The same offer at a higher bid than its floor."""
    if offer.min_bid_usd_hr is None or bid_usd_hr < offer.min_bid_usd_hr:
        return offer
    return replace(offer, rate_usd_hr=bid_usd_hr + offer.storage_usd_hr)


def _disk_gb(need: Requirements) -> Decimal:
    wanted = Decimal(str(need.disk_gb)) if need.disk_gb is not None else Decimal(0)
    return max(wanted, Decimal(MIN_DISK_GB))


def _place(row: Mapping[str, Any]) -> str | None:
    """`Sweden, SE`; where the region is empty, the country alone."""
    return (fields.text(row, "geolocation", limit=80) or "").strip(" ,") or None


def _share(value: float | None) -> float | None:
    return value if value is not None and value <= 1 else None
