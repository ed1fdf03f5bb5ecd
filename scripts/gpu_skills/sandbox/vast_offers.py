"""Vast's offers: what the hosts' free GPUs look like in a search, and the search itself.

A host offers its free GPUs in sizes of 1, 2, 4, 8 and all of them. Searches show another id for an offer whenever what
is free on its host has changed; an old one is still accepted as long as there are GPUs (two creates on one id may both
succeed), for six hours of the vendor's clock at most. machine_id stays. Every six hours other people come and go.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox.catalogue import Host
from gpu_skills.sandbox.meter import per_hour
from gpu_skills.sandbox.vast_wire import error, number, passes, rounded
from gpu_skills.sandbox.world import Account, World

OFFER_LIFE_S = 6 * 3600
OTHERS_PROBABILITY = 0.15  # that a host with free GPUs is rented by somebody in an epoch
DEFAULT_LIMIT = 64
DEFAULT_STORAGE_GB = 8
CONTROL_KEYS = {"order", "type", "limit", "allocated_storage", "disable_bundling", "select_cols", "q"}
DEFAULT_FILTERS = {"verified": {"eq": True}, "rentable": {"eq": True}, "rented": {"eq": False}}
TYPES = {
    "on-demand": "on-demand", "ondemand": "on-demand", "bid": "bid", "interruptible": "bid", "reserved": "reserved",
}  # fmt: skip
RESERVED_DISCOUNT = Decimal("0.2")


@dataclass(frozen=True)
class Ask:
    """One rentable share of a host. is_expired: its id was good once; whether GPUs are free is another question."""

    id: int
    host: Host
    gpu_count: int
    is_expired: bool = False

    @property
    def rate_usd_hr(self) -> Decimal:
        return self.host.rate_usd_hr * self.gpu_count

    @property
    def min_bid_usd_hr(self) -> Decimal:
        return self.host.min_bid_usd_hr * self.gpu_count

    @property
    def fraction(self) -> float:
        return self.gpu_count / self.host.gpu_count

    @property
    def disk_gb(self) -> Decimal:
        return Decimal(str(round(self.host.disk_gb * self.fraction, 1)))


class OfferBook:
    """Gives offers their ids and finds them again."""

    def __init__(self, world: World):
        self.world = world
        self.hosts = [host for host in world.catalogue.hosts if host.vendor == "vast"]
        self._ids = itertools.count(30_000_000 + world.dice.randrange(100_000) * 10)
        self._by_state: dict[tuple[int, int, int, int], int] = {}
        self._by_id: dict[int, tuple[Host, int, int]] = {}
        self._began = world.now()

    def let_others_rent(self) -> None:
        """At the start of each epoch some hosts lose what is free to others, and those of the last one leave."""
        epoch = self._epoch()
        self.world.clock.call_at(self._began + (epoch + 1) * OFFER_LIFE_S, self.world.guarded(self.let_others_rent))
        for host in self.hosts:
            dice = random.Random(f"{self.world.seed} {host.machine_id} {epoch}")
            host.others = 0
            # Everything is free when the sandbox begins.
            if epoch > 0 and host.free_gpus and dice.random() < OTHERS_PROBABILITY:
                host.others = dice.randint(1, host.free_gpus)
            host.generation += 1
            self.world.wake_waiting(host)

    def open(self) -> Iterator[Ask]:
        """Every offer there is now."""
        for host in self.hosts:
            for size in dict.fromkeys((1, 2, 4, 8, host.gpu_count)):
                if size <= host.free_gpus:
                    yield Ask(self._id(host, size), host, size)

    def find(self, offer_id: int) -> Ask | None:
        """None for an id that never was an offer."""
        found = self._by_id.get(offer_id)
        if found is None:
            return None
        host, size, epoch = found
        return Ask(offer_id, host, size, is_expired=epoch != self._epoch())

    def _id(self, host: Host, size: int) -> int:
        state = (host.machine_id, size, host.generation, self._epoch())
        if state not in self._by_state:
            offer_id = self._by_state[state] = next(self._ids)
            self._by_id[offer_id] = (host, size, self._epoch())
        return self._by_state[state]

    def _epoch(self) -> int:
        return int((self.world.now() - self._began + 1e-6) // OFFER_LIFE_S)


def search(book: OfferBook, query: dict[str, Any], account: Account | None) -> list[dict[str, Any]]:
    """Offers for a query of filters and control keys, as the vendor reads it: numbers may be text, and what is not a
    filter object or names no field is passed over in silence. Raises WireError for an unknown operator or type."""
    kind = TYPES.get(str(query.get("type") or "on-demand"))
    if kind is None:
        raise error(400, "invalid_request", f"Unknown offer type {query.get('type')!r}")
    storage_gb = number(query.get("allocated_storage"))
    if storage_gb is None or storage_gb < 0:
        storage_gb = DEFAULT_STORAGE_GB
    filters = {
        **DEFAULT_FILTERS,
        **{name: value for name, value in query.items() if name not in CONTROL_KEYS and isinstance(value, dict)},
    }
    mine = {i.host.machine_id for i in book.world.living(account)} if account is not None else set()
    found = [
        offer
        for ask in book.open()
        if _matches(offer := describe(ask, book.world.now(), kind, storage_gb, mine), filters)
    ]
    _sort(found, query.get("order"))
    limit = number(query.get("limit"))
    return found[: DEFAULT_LIMIT if limit is None or limit <= 0 else int(min(limit, 10_000))]


def _matches(offer: dict[str, Any], filters: dict[str, Any]) -> bool:
    for name, conditions in filters.items():
        if name == "rented" and conditions.get("eq") in (True, "true", "True"):
            continue  # it asks for machines of one's own as well, not only
        if name not in _SPECIAL and name not in offer:
            continue
        found = _SPECIAL[name](offer) if name in _SPECIAL else offer[name]
        if name == "driver_version":
            conditions = {ending: _as_driver(wanted) for ending, wanted in conditions.items()}
        if not passes(found, conditions, unknown=lambda op: error(400, "invalid_request", f"Unknown operator {op!r}")):
            return False
    return True


# Names that filters have and answers do not, or that mean something else there.
_SPECIAL = {
    "verified": lambda offer: offer["verification"] == "verified",
    "datacenter": lambda offer: offer["hosting_type"] == 1,
    "geolocation": lambda offer: offer["geolocation"].rsplit(", ", 1)[-1],
    "external": lambda offer: bool(offer["external"]),
    "driver_version": lambda offer: offer["driver_vers"],
    "ubuntu_version": lambda offer: offer["os_version"],
}


def _sort(offers: list[dict[str, Any]], order: Any) -> None:
    entries = order if isinstance(order, list) else []
    if len(entries) == 2 and all(isinstance(part, str) for part in entries):
        entries = [entries]
    for entry in reversed(entries or [["score", "desc"]]):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise error(400, "invalid_request", "order is a list of [field, direction]")
        name, descending = entry[0], str(entry[1]).lower() == "desc"
        offers.sort(key=lambda offer: _sort_key(offer.get(name)), reverse=descending)


def _sort_key(value: Any) -> tuple[int, float, str]:
    as_number = number(value)
    return (1, as_number, "") if as_number is not None else (0, 0.0, str(value or ""))


def describe(ask: Ask, now: float, kind: str, storage_gb: float, mine: set[int]) -> dict[str, Any]:
    """One offer of a search reply."""
    host, gpu = ask.host, ask.host.gpu
    gpu_hour = ask.min_bid_usd_hr if kind == "bid" else ask.rate_usd_hr
    disk_hour = per_hour(host.storage_usd_gb_month, Decimal(str(storage_gb)))
    total = gpu_hour + disk_hour
    discount = ask.rate_usd_hr * RESERVED_DISCOUNT if kind == "reserved" else Decimal(0)
    dlperf = gpu.tflops * ask.gpu_count * 1.35
    flops = gpu.tflops * ask.gpu_count
    costs = {
        "gpuCostPerHour": rounded(gpu_hour),
        "diskHour": rounded(disk_hour),
        "totalHour": rounded(total),
        "discountTotalHour": rounded(discount),
        "discountedTotalPerHour": rounded(total - discount),
    }
    return {
        "id": ask.id,
        "ask_contract_id": ask.id,
        "bundle_id": host.machine_id * 8 + ask.gpu_count,
        "bundled_results": None,
        **machine_fields(host, ask.gpu_count),
        "disk_space": float(ask.disk_gb),
        "dlperf": round(dlperf, 6),
        "dlperf_per_dphtotal": round(dlperf / float(total), 6),
        "total_flops": round(flops, 6),
        "flops_per_dphtotal": round(flops / float(total), 6),
        "score": round(dlperf / float(total) * host.reliability, 6),
        "vram_costperhour": rounded(gpu_hour / (gpu.vram_mib * ask.gpu_count)),
        "dph_base": rounded(gpu_hour),
        "dph_total": rounded(total),
        "dph_total_adj": rounded(total),
        "discount_rate": float(RESERVED_DISCOUNT) if kind == "reserved" else None,
        "discounted_hourly": rounded(discount),
        "discounted_dph_total": rounded(total - discount),
        "min_bid": rounded(ask.min_bid_usd_hr),
        "is_bid": kind == "bid",
        "storage_cost": float(host.storage_usd_gb_month),
        "storage_total_cost": rounded(disk_hour),
        "search": costs,
        "instance": {**dict.fromkeys(costs, 0.0), "diskHour": rounded(disk_hour), "totalHour": rounded(disk_hour)},
        "duration": host.available_s,
        "start_date": now,
        "end_date": now + host.available_s,
        "time_remaining": "",
        "time_remaining_isbid": "",
        "rentable": True,
        "rented": host.machine_id in mine,
        "credit_discount_max": 0.4,
        "avail_vol_ask_id": host.machine_id + 4_000_000,
        "avail_vol_dph": rounded(per_hour(host.storage_usd_gb_month, 1)),
        "avail_vol_size": int(host.disk_gb / 2),
        "resource_type": "gpu",
        "cluster_id": None,
        "nw_disk_min_bw": None,
        "nw_disk_max_bw": None,
        "nw_disk_avg_bw": None,
        "rn": 1,
    }


def machine_fields(host: Host, gpu_count: int) -> dict[str, Any]:
    """What offers and instances both say about the machine."""
    gpu = host.gpu
    share = gpu_count / host.gpu_count
    return {
        "machine_id": host.machine_id,
        "host_id": host.host_id,
        "hosting_type": 1 if host.is_datacenter else 0,
        "hostname": None,
        "logo": "/static/logos/vastai_small2.png",
        "webpage": None,
        "external": None,
        "verification": host.verification,
        "vericode": {"verified": 1, "unverified": 0, "deverified": 2}[host.verification],
        "is_vm_deverified": False,
        "vms_enabled": False,
        "geolocation": host.location["geolocation"],
        "geolocode": host.location["geolocode"],
        "country_code": host.location["country"],
        "public_ipaddr": "127.0.0.1",
        "static_ip": host.has_static_ip,
        "direct_port_count": host.port_count,
        "num_gpus": gpu_count,
        "gpu_name": gpu.name,
        "gpu_arch": "nvidia",
        "gpu_frac": share,
        "gpu_ids": [host.machine_id * 10 + number for number in range(gpu_count)],
        "gpu_ram": gpu.vram_mib,
        "gpu_total_ram": gpu.vram_mib * gpu_count,
        "gpu_lanes": 16,
        "gpu_mem_bw": gpu.memory_gb_s,
        "gpu_max_power": gpu.power_w,
        "gpu_max_temp": 88.0,
        "gpu_display_active": False,
        "bw_nvlink": float(gpu.entry.get("nvlink_gb_s", 0)),
        "compute_cap": gpu.compute_cap,
        "cuda_max_good": float(host.cuda),
        "driver_version": host.driver_version,
        "driver_vers": padded_driver(host.driver_version),
        "pci_gen": 4.0,
        "pcie_bw": 24.6,
        "cpu_arch": "amd64",
        "cpu_name": host.cpu_name,
        "cpu_cores": host.cpu_cores,
        "cpu_cores_effective": round(host.cpu_cores * share, 2),
        "cpu_ghz": host.cpu_ghz,
        "cpu_ram": host.ram_mb,
        "has_avx": 1,
        "disk_name": "Samsung SSD 990 PRO 4TB",
        "disk_bw": host.disk_mb_s,
        "mobo_name": "ROMED8-2T",
        "os_version": "22.04",
        "inet_up": host.up_mbps,
        "inet_down": host.down_mbps,
        "inet_up_cost": float(host.up_usd_gb),
        "inet_down_cost": float(host.down_usd_gb),
        "internet_up_cost_per_tb": float(host.up_usd_gb * 1000),
        "internet_down_cost_per_tb": float(host.down_usd_gb * 1000),
        "reliability": host.reliability,
        "reliability2": host.reliability,
        "reliability_mult": host.reliability,
        "expected_reliability": host.reliability,
    }


def _as_driver(wanted: Any) -> Any:
    """`"535.86.05"` in a filter means its padded number."""
    if isinstance(wanted, list):
        return [_as_driver(entry) for entry in wanted]
    parts = wanted.split(".") if isinstance(wanted, str) else []
    is_dotted = len(parts) in (2, 3) and all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts)
    return padded_driver(wanted) if is_dotted else wanted


def padded_driver(version: str) -> int:
    """`535.86.05` → 535086005."""
    padded = 0
    for part in [*version.split("."), "0", "0"][:3]:
        padded = padded * 1000 + int(part)
    return padded
