"""RunPod's catalogue in our words. An offer is a GPU type in the secure cloud, at its list price.

The community cloud is left out: its pods may have no public address, and this API cannot ask for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from gpu_skills.errors import UsageError
from gpu_skills.providers import fields
from gpu_skills.providers.base import Offer, Requirements
from gpu_skills.providers.runpod.pricing import CONTAINER_DISK_GB, running_usd_hr, stopped_usd_hr, volume_gb

CLOUD = "SECURE"
_STOCKS = ("NONE", "LOW", "MEDIUM", "HIGH")


def question(need: Requirements) -> dict[str, str]:
    """Availability comes only with `product`; counts and CUDA narrow what "available" means."""
    query = {"include": "AVAILABILITY", "product": "POD", "count": str(need.gpu_count), "cloud": CLOUD}
    if need.min_cuda is not None:
        query["minCudaVersion"] = f"{need.min_cuda:g}" if "." in f"{need.min_cuda:g}" else f"{need.min_cuda:g}.0"
    return query


def read_offers(rows: Iterable[Mapping[str, Any]], need: Requirements) -> tuple[list[Offer], int]:
    offers: list[Offer] = []
    unreadable = 0
    for row in rows:
        if row.get("id") == "unknown":  # a place holder of the catalogue's
            continue
        offer = read_offer(row, need)
        if offer is None:
            unreadable += 1
        else:
            offers.append(offer)
    return offers, unreadable


def read_offer(row: Mapping[str, Any], need: Requirements) -> Offer | None:
    gpu_id = fields.text(row, "id", limit=120)
    price = fields.amount(fields.child(row, "price"), "secure")
    memory = fields.real(row, "memory")
    if gpu_id is None or price is None or row.get("secure") is False:
        return None
    largest = fields.integer(fields.child(row, "maxCount"), "secure")
    count = need.gpu_count if largest is None else min(need.gpu_count, largest)
    if count < 1:
        return None
    persistent_gb = volume_gb(need.disk_gb) if need.persistent and not need.volume_id else 0
    is_kept = persistent_gb > 0 or need.volume_id is not None
    container_gb = CONTAINER_DISK_GB if is_kept else max(CONTAINER_DISK_GB, math.ceil(need.disk_gb or 0))
    stock = fields.text(row, "availability", limit=20)
    return Offer(
        provider="runpod",
        offer_id=gpu_id,
        rate_usd_hr=price * count + running_usd_hr(container_gb, persistent_gb),
        gpu=fields.text(row, "name", limit=80) or gpu_id,
        gpu_count=count,
        vram_gb=memory,
        disk_gb=float(persistent_gb or container_gb),
        storage_usd_hr=stopped_usd_hr(persistent_gb),
        location=", ".join(_places(row)) or None,
        cuda=max(_cuda_versions(row), default=None),
        is_interruptible=False,
        stock=stock if stock in _STOCKS else None,
    )


def _places(row: Mapping[str, Any]) -> list[str]:
    found = [dc for dc in fields.objects(row.get("dataCenters")) if dc.get("availability") != "NONE"]
    return [id for id in (fields.text(dc, "id", limit=32) for dc in found) if id]


def _cuda_versions(row: Mapping[str, Any]) -> list[float]:
    found = (fields.real(version, "version") for version in fields.objects(row.get("cudaVersions")))
    return [version for version in found if version is not None]


def check_locations(wanted: Iterable[str], known: Iterable[str]) -> None:
    """UsageError for a place RunPod does not have, naming those it has: there it is refused without a reason."""
    codes = sorted(known)
    for place in wanted:
        if not any(code == place.upper() or code.startswith(place.upper() + "-") for code in codes):
            raise UsageError(
                f"runpod has no data centre {place[:40]!r}; it has {', '.join(codes) or 'none'}",
                next_step="name one of them, or its first part such as EU or US",
                found=place,
                allowed=codes,
            )
