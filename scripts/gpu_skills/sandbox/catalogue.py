"""What could be rented: GPU types from a catalogue file, and hosts that carry them, made from a seed.

The same file and seed give the same hosts, offers and prices, whoever asks and in whichever order.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).with_name("catalogue.json")


@dataclass(frozen=True)
class GpuType:
    """`name` is Vast's; `entry` the whole record of the catalogue file, RunPod's prices and ids included."""

    name: str
    vram_gb: int
    vram_mib: int
    compute_cap: int  # times 100: 890
    tflops: float
    memory_gb_s: float
    power_w: int
    entry: dict[str, Any]

    @property
    def product_name(self) -> str:
        """As nvidia-smi prints it."""
        name = str(self.entry.get("runpod_id") or f"NVIDIA GeForce {self.name}")
        return name if name.startswith("NVIDIA") else f"NVIDIA {name}"


@dataclass
class Host:
    """One physical machine. `used` maps the rental that holds GPUs to how many."""

    machine_id: int
    host_id: int
    vendor: str
    gpu: GpuType
    gpu_count: int
    driver_version: str
    cuda: str
    location: dict[str, Any]
    rate_usd_hr: Decimal  # per GPU
    min_bid_usd_hr: Decimal
    storage_usd_gb_month: Decimal
    up_usd_gb: Decimal
    down_usd_gb: Decimal
    up_mbps: float
    down_mbps: float
    disk_gb: float
    disk_mb_s: float
    cpu_cores: int
    cpu_ghz: float
    cpu_name: str
    ram_mb: int
    reliability: float
    verification: str
    is_datacenter: bool
    has_static_ip: bool
    port_count: int
    available_s: float
    cloud: str = "community"  # RunPod: secure or community
    used: dict[Any, int] = field(default_factory=dict)
    generation: int = 0  # grows whenever what is free changes: offer ids do not survive that
    others: int = 0  # GPUs that somebody else rents

    @property
    def free_gpus(self) -> int:
        return self.gpu_count - sum(self.used.values()) - self.others


@dataclass
class Catalogue:
    gpu_types: list[GpuType]
    hosts: list[Host]
    data_centers: list[dict[str, Any]]

    def gpu_type(self, name: str) -> GpuType | None:
        """By Vast's name or RunPod's id."""
        return next((gpu for gpu in self.gpu_types if name in (gpu.name, gpu.entry.get("runpod_id"))), None)


def load(seed: int, path: Path = DEFAULT) -> Catalogue:
    """Read the catalogue and make its hosts. Raises ValueError for a file that is none."""
    try:
        return _make(seed, json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError, ArithmeticError) as exc:
        raise ValueError(f"{path} is no catalogue: {type(exc).__name__} {exc}") from exc


def _make(seed: int, content: dict[str, Any]) -> Catalogue:
    gpu_types = [_gpu_type(entry) for entry in content["gpu_types"]]
    if not gpu_types:
        raise ValueError("the catalogue has no GPU types")
    dice = random.Random(f"{seed} hosts")
    hosts: list[Host] = []
    for gpu in gpu_types:
        for _ in range(int(gpu.entry.get("vast_hosts", 0))):
            hosts.append(_vast_host(dice, gpu, content, len(hosts)))
    for gpu in gpu_types:
        for number in range(int(gpu.entry.get("runpod_hosts", 0))):
            hosts.append(_runpod_host(dice, gpu, content, number, len(hosts)))
    return Catalogue(gpu_types, hosts, content.get("data_centers", []))


def _gpu_type(entry: dict[str, Any]) -> GpuType:
    return GpuType(
        entry["name"],
        int(entry["vram_gb"]),
        int(entry["vram_mib"]),
        int(entry["compute_cap"]),
        float(entry["tflops"]),
        float(entry["memory_gb_s"]),
        int(entry["power_w"]),
        entry,
    )


def _driver(dice: random.Random, gpu: GpuType, content: dict[str, Any]) -> dict[str, str]:
    drivers = content["drivers"]
    if gpu.compute_cap >= 1200:
        oldest = str(content.get("oldest_driver_for_compute_cap_1200", "0"))
        drivers = [driver for driver in drivers if driver["version"].split(".")[0] >= oldest] or drivers
    return dice.choice(drivers)


def _vast_host(dice: random.Random, gpu: GpuType, content: dict[str, Any], index: int) -> Host:
    low, high = gpu.entry["vast_usd_hr"]
    driver = _driver(dice, gpu, content)
    rate = Decimal(str(round(dice.uniform(low, high), 4)))
    gpu_count = dice.choice([1, 1, 2, 4, 4, 8])
    is_datacenter = dice.random() < 0.3
    down = float(round(dice.choice([180, 450, 700, 940, 2400, 6500]) * dice.uniform(0.8, 1.05), 1))
    cores = dice.choice([8, 16, 24, 32, 64]) * (2 if gpu_count > 2 else 1)
    return Host(
        machine_id=10_000 + index * 37 + dice.randrange(30),
        host_id=50_000 + dice.randrange(40) * 11,
        vendor="vast",
        gpu=gpu,
        gpu_count=gpu_count,
        driver_version=driver["version"],
        cuda=driver["cuda"],
        location=dice.choice(content["locations"]),
        rate_usd_hr=rate,
        min_bid_usd_hr=(rate * Decimal("0.45")).quantize(Decimal("0.0001")),
        storage_usd_gb_month=Decimal(dice.choice(["0.10", "0.15", "0.20", "0.30"])),
        up_usd_gb=Decimal(dice.choice(["0.0", "0.002", "0.005", "0.02"])),
        down_usd_gb=Decimal(dice.choice(["0.0", "0.002", "0.005", "0.02"])),
        up_mbps=round(down * dice.uniform(0.3, 0.9), 1),
        down_mbps=down,
        disk_gb=float(dice.choice([80, 200, 450, 900, 1800]) + gpu_count * 40),
        disk_mb_s=float(dice.choice([480, 1200, 2600, 5400])),
        cpu_cores=cores,
        cpu_ghz=dice.choice([2.9, 3.4, 3.7, 4.5]),
        cpu_name=dice.choice(["AMD EPYC 7543 32-Core Processor", "Xeon® Gold 6248", "AMD Ryzen 9 7950X"]),
        ram_mb=dice.choice([32, 64, 128]) * 1024 * max(1, gpu_count // 2),
        reliability=round(1 - dice.uniform(0.0005, 0.06) ** 1.3, 7),
        verification=dice.choices(["verified", "unverified", "deverified"], [0.8, 0.17, 0.03])[0],
        is_datacenter=is_datacenter,
        has_static_ip=is_datacenter or dice.random() < 0.3,
        port_count=dice.choice([0, 20, 100, 250, 999]) if not is_datacenter else 999,
        available_s=float(dice.randrange(2, 180) * 86400),
    )


def _runpod_host(dice: random.Random, gpu: GpuType, content: dict[str, Any], number: int, index: int) -> Host:
    cloud = "secure" if number % 2 == 0 or gpu.entry.get("community_usd_hr") is None else "community"
    driver = _driver(dice, gpu, content)
    rate = Decimal(str(gpu.entry[f"{cloud}_usd_hr"]))
    center = dice.choice(content["data_centers"])
    return Host(
        machine_id=700_000 + index * 13,
        host_id=0,
        vendor="runpod",
        gpu=gpu,
        gpu_count=min(8, int(gpu.entry.get("max_count", 8))) if cloud == "secure" else dice.choice([1, 2, 4]),
        driver_version=driver["version"],
        cuda=driver["cuda"],
        location={**center, "data_center": center["id"]},
        rate_usd_hr=rate,
        min_bid_usd_hr=rate,
        storage_usd_gb_month=Decimal("0.10"),
        up_usd_gb=Decimal(0),
        down_usd_gb=Decimal(0),
        up_mbps=1000.0,
        down_mbps=float(dice.choice([900, 2500, 8000])),
        disk_gb=4000.0,
        disk_mb_s=3000.0,
        cpu_cores=128,
        cpu_ghz=2.9,
        cpu_name="AMD EPYC 9354 32-Core Processor",
        ram_mb=1024 * 1024,
        reliability=0.99,
        verification="verified",
        is_datacenter=cloud == "secure",
        has_static_ip=cloud == "secure",
        port_count=999 if cloud == "secure" or dice.random() < 0.6 else 0,
        available_s=float(365 * 86400),
        cloud=cloud,
    )
