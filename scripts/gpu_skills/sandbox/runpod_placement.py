"""Which host takes a pod, what is in stock, and the CPU flavours. Pure, but for what hosts hold at the moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal

from gpu_skills.sandbox.catalogue import Catalogue, GpuType, Host

NO_INSTANCES = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
NO_DISK = "There are no longer any instances available with enough disk space."


@dataclass(frozen=True)
class Flavour:
    id: str
    name: str
    group: str
    ram_gb_per_vcpu: int
    usd_hr_per_vcpu: Decimal
    max_vcpu: int = 32


CPU_FLAVOURS = {
    flavour.id: flavour
    for flavour in (
        Flavour("cpu3c", "Compute-Optimized", "Gen 3", 2, Decimal("0.03")),
        Flavour("cpu3g", "General Purpose", "Gen 3", 4, Decimal("0.04")),
        Flavour("cpu3m", "Memory-Optimized", "Gen 3", 8, Decimal("0.055")),
        Flavour("cpu5c", "Compute-Optimized", "Gen 5", 2, Decimal("0.035")),
        Flavour("cpu5g", "General Purpose", "Gen 5", 4, Decimal("0.045")),
        Flavour("cpu5m", "Memory-Optimized", "Gen 5", 8, Decimal("0.06")),
    )
}


@dataclass(frozen=True)
class Wish:
    """clouds: any of them. data_centers, countries: any when empty. allowed_cuda: exact; min_cuda: at least."""

    gpu_id: str
    count: int = 1
    clouds: tuple[str, ...] = ("SECURE",)
    data_centers: tuple[str, ...] = ()
    countries: tuple[str, ...] = ()
    allowed_cuda: tuple[str, ...] = ()
    min_cuda: str | None = None
    needs_public_ip: bool = False


def version(text: str) -> tuple[int, ...]:
    """`12.11` is above `12.2`; `12` is any release of that major."""
    return tuple(int(part) for part in text.split(".") if len(part) < 9)


def offered_types(catalogue: Catalogue) -> list[GpuType]:
    return [gpu for gpu in catalogue.gpu_types if gpu.entry.get("runpod_id")]


def hosts_of(catalogue: Catalogue, wish: Wish) -> list[Host]:
    """Every host that could ever serve the wish, full or not."""
    return [
        host
        for host in catalogue.hosts
        if host.vendor == "runpod"
        and host.gpu.entry.get("runpod_id") == wish.gpu_id
        and host.cloud.upper() in wish.clouds
        and (not wish.data_centers or host.location["data_center"] in wish.data_centers)
        and (not wish.countries or host.location.get("country") in wish.countries)
        and (not wish.allowed_cuda or host.cuda in wish.allowed_cuda)
        and (wish.min_cuda is None or version(host.cuda) >= version(wish.min_cuda))
        and (not wish.needs_public_ip or host.port_count > 0)
        and host.gpu_count >= wish.count
    ]


def place(catalogue: Catalogue, wish: Wish) -> Host | None:
    """The cheapest host with enough free GPUs, the emptiest of them first."""
    free = [host for host in hosts_of(catalogue, wish) if host.free_gpus >= wish.count]
    return min(free, key=lambda host: (host.rate_usd_hr, -host.free_gpus, host.machine_id), default=None)


def stock(hosts: Iterable[Host], count: int = 1) -> str:
    """NONE, LOW, MEDIUM or HIGH, by how many such pods fit now."""
    fitting = sum(host.free_gpus // max(count, 1) for host in hosts)
    return "NONE" if not fitting else "LOW" if fitting < 4 else "MEDIUM" if fitting < 12 else "HIGH"


def cpu_host(catalogue: Catalogue, data_centers: tuple[str, ...]) -> Host | None:
    """A machine without GPUs in one of the data centres; CPU pods never run out."""
    ids = [center["id"] for center in catalogue.data_centers if not data_centers or center["id"] in data_centers]
    pattern = next((host for host in catalogue.hosts if host.vendor == "runpod"), None)
    if not ids or pattern is None:
        return None
    center = next(center for center in catalogue.data_centers if center["id"] == ids[0])
    return replace(
        pattern,
        machine_id=900_000 + catalogue.data_centers.index(center),
        gpu_count=0,
        location={**center, "data_center": center["id"]},
        rate_usd_hr=Decimal(0),
        cloud="secure",
        port_count=999,
        used={},
    )
