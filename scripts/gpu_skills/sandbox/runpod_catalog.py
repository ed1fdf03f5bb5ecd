"""The catalogue over REST v2: GPU types, CPU flavours and data centres, with stock for whoever asks by the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_skills.sandbox.catalogue import GpuType, Host
from gpu_skills.sandbox.face import Reply, Request, Route, route
from gpu_skills.sandbox.runpod_placement import CPU_FLAVOURS, Flavour, Wish, hosts_of, offered_types, stock, version
from gpu_skills.sandbox.runpod_wire import Problem, flag, listed, whole
from gpu_skills.sandbox.world import World

PRODUCTS = ("POD", "CLUSTER", "SERVERLESS")
REGIONS = ("NORTH_AMERICA", "SOUTH_AMERICA", "EUROPE", "ASIA", "MIDDLE_EAST", "AFRICA", "OCEANIA", "ANTARCTICA",
           "UNKNOWN")  # fmt: skip
COMPLIANCE = ("GDPR", "ISO_IEC_27001", "ISO_14001", "PCI_DSS", "HITRUST", "SOC_1_TYPE_2", "SOC_2_TYPE_2",
              "SOC_3_TYPE_2", "ITAR", "FISMA_HIGH", "HIPAA", "RENEWABLE")  # fmt: skip
_ONLY_WITH_AVAILABILITY = ("product", "count", "cloud", "countryCodes", "cudaVersions", "minCudaVersion", "vcpuCount")
# A row of the real catalogue that is no GPU: a client has to drop it.
_SENTINEL = {
    "id": "unknown",
    "name": "unknown",
    "pool": None,
    "manufacturer": "UNKNOWN",
    "memory": 0,
    "secure": False,
    "community": False,
    "price": {"secure": 0, "community": 0},
    "maxCount": {"secure": 0, "community": 0},
}


class Catalog:
    def __init__(self, world: World):
        self.world = world

    def routes(self) -> Iterator[Route]:
        yield route("GET", "/v2/catalog/gpus", "gpus", self.list_gpus)
        yield route("GET", "/v2/catalog/gpus/{id}", "gpu", self.show_gpu)
        yield route("GET", "/v2/catalog/cpus", "cpus", self.list_cpus)
        yield route("GET", "/v2/catalog/cpus/{id}", "cpu", self.show_cpu)
        yield route("GET", "/v2/catalog/datacenters", "data_centers", self.list_data_centers)
        yield route("GET", "/v2/catalog/datacenters/{id}", "data_center", self.show_data_center)

    # GPUs ------------------------------------------------------------------------------------------------------------

    def list_gpus(self, request: Request) -> Reply:
        wanted = self._wanted(request, PRODUCTS)
        rows = [self._gpu(gpu, wanted) for gpu in offered_types(self.world.catalogue)]
        if wanted is None:
            return Reply(200, {"gpus": [*rows, _SENTINEL]})
        if wanted.countries:
            rows = [row for row in rows if "dataCenters" in row]
        return Reply(200, {"gpus": rows if wanted.countries else [*rows, {**_SENTINEL, "availability": "NONE"}]})

    def show_gpu(self, request: Request) -> Reply:
        wanted = self._wanted(request, PRODUCTS)
        for gpu in offered_types(self.world.catalogue):
            if gpu.entry["runpod_id"] == request.params["id"]:
                return Reply(200, self._gpu(gpu, wanted))
        raise Problem(404, "gpu type not found")

    def _wanted(self, request: Request, products: tuple[str, ...]) -> Wish | None:
        """What availability is asked for, or None. Its filters without it are 400, malformed ones 422."""
        include = listed(request, "include", ("AVAILABILITY",))
        product = listed(request, "product", products)
        count = whole(request, "count", 1, 1_000_000) or 1
        cloud = listed(request, "cloud", ("SECURE", "COMMUNITY")) or ["SECURE"]
        countries = listed(request, "countryCodes", pattern="[A-Z]{2}")
        cuda = listed(request, "cudaVersions", pattern=r"\d+\.\d+")
        least = (listed(request, "minCudaVersion", pattern=r"\d+(\.\d+)?") or [None])[0]
        if not include:
            for name in _ONLY_WITH_AVAILABILITY:
                if request.query.get(name):
                    raise Problem(400, f"{name} is valid only with include=AVAILABILITY")
            return None
        if not product:
            raise Problem(400, "product is required with include=AVAILABILITY")
        if cuda and least is not None:
            raise Problem(400, "cudaVersions and minCudaVersion are mutually exclusive")
        return Wish("", count, (cloud[0],), (), tuple(countries), tuple(cuda), least)

    def _gpu(self, gpu: GpuType, wanted: Wish | None) -> dict[str, Any]:
        entry = gpu.entry
        counts = {cloud: self._largest(gpu, cloud.upper()) for cloud in ("secure", "community")}
        row: dict[str, Any] = {
            "id": entry["runpod_id"],
            "name": gpu.name,
            "pool": entry.get("pool"),
            "manufacturer": "NVIDIA",
            "memory": gpu.vram_gb,
            "secure": entry.get("secure_usd_hr") is not None,
            "community": entry.get("community_usd_hr") is not None,
            "price": {cloud: float(entry.get(f"{cloud}_usd_hr") or 0) for cloud in ("secure", "community")},
            "maxCount": counts,
        }
        if wanted is not None:
            row.update(self._availability(gpu, wanted))
        return row

    def _largest(self, gpu: GpuType, cloud: str) -> int:
        hosts = hosts_of(self.world.catalogue, Wish(gpu.entry["runpod_id"], 1, (cloud,)))
        return max((host.gpu_count for host in hosts), default=0)

    def _availability(self, gpu: GpuType, wanted: Wish) -> dict[str, Any]:
        wish = Wish(**{**vars(wanted), "gpu_id": gpu.entry["runpod_id"]})
        hosts = hosts_of(self.world.catalogue, wish)
        centers = {host.location["data_center"] for host in hosts}
        rows = [
            {
                "id": center["id"],
                "name": center["name"],
                "availability": stock((h for h in hosts if h.location["data_center"] == center["id"]), wish.count),
            }
            for center in self.world.catalogue.data_centers
            if center["id"] in centers
        ]
        found: dict[str, Any] = {"availability": stock(hosts, wish.count), "cudaVersions": _cuda(hosts, wish.count)}
        return {**found, "dataCenters": rows} if rows else found

    # CPUs ------------------------------------------------------------------------------------------------------------

    def list_cpus(self, request: Request) -> Reply:
        wanted = self._wanted(request, ("POD", "SERVERLESS"))
        return Reply(200, {"cpus": [self._cpu(flavour, wanted) for flavour in CPU_FLAVOURS.values()]})

    def show_cpu(self, request: Request) -> Reply:
        wanted = self._wanted(request, ("POD", "SERVERLESS"))
        flavour = CPU_FLAVOURS.get(request.params["id"])
        if flavour is None:
            raise Problem(404, "cpu type not found")
        return Reply(200, self._cpu(flavour, wanted))

    def _cpu(self, flavour: Flavour, wanted: Wish | None) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": flavour.id,
            "name": flavour.name,
            "group": flavour.group,
            "vcpu": {"min": 2, "max": flavour.max_vcpu},
            "ramGbPerVcpu": flavour.ram_gb_per_vcpu,
            "price": {
                "securePerVcpu": float(flavour.usd_hr_per_vcpu),
                "serverlessPerVcpu": float(flavour.usd_hr_per_vcpu * 2),
            },
        }
        if wanted is not None:
            row["availability"] = "HIGH"
            row["dataCenters"] = [
                {"id": center["id"], "name": center["name"], "availability": "HIGH"}
                for center in self.world.catalogue.data_centers
            ]
        return row

    # data centres ----------------------------------------------------------------------------------------------------

    def list_data_centers(self, request: Request) -> Reply:
        include = listed(request, "include", ("GPU_AVAILABILITY", "CPU_AVAILABILITY"))
        regions = listed(request, "regions", REGIONS)
        kinds = listed(request, "networkVolumeTypes", ("STANDARD", "HIGH_PERFORMANCE"))
        compliance = listed(request, "compliance", COMPLIANCE)
        has_network = flag(request, "globalNetwork")
        rows = [
            self._data_center(center, include)
            for center in self.world.catalogue.data_centers
            if (not regions or center["region"] in regions)
            and set(kinds) <= set(center["network_volumes"])
            and set(compliance) <= set(center.get("compliance", ()))
            and has_network in (None, center["global_network"])
        ]
        return Reply(200, {"dataCenters": rows})

    def show_data_center(self, request: Request) -> Reply:
        include = listed(request, "include", ("GPU_AVAILABILITY", "CPU_AVAILABILITY"))
        for center in self.world.catalogue.data_centers:
            if center["id"] == request.params["id"]:
                return Reply(200, self._data_center(center, include))
        raise Problem(404, "data center not found")

    def _data_center(self, center: dict[str, Any], include: list[str]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": center["id"],
            "name": center["name"],
            "region": center["region"],
            "globalNetwork": center["global_network"],
            "networkVolumeTypes": center["network_volumes"],
            "compliance": center.get("compliance", []),
        }
        if "GPU_AVAILABILITY" in include and (gpus := self._gpus_at(center["id"])):
            row["gpuAvailability"] = gpus
        if "CPU_AVAILABILITY" in include:
            row["cpuAvailability"] = [
                {"id": flavour.id, "name": flavour.name, "availability": "HIGH"} for flavour in CPU_FLAVOURS.values()
            ]
        return row

    def _gpus_at(self, center_id: str) -> list[dict[str, Any]]:
        rows = []
        for gpu in offered_types(self.world.catalogue):
            wish = Wish(gpu.entry["runpod_id"], 1, ("SECURE", "COMMUNITY"), (center_id,))
            if hosts := hosts_of(self.world.catalogue, wish):
                rows.append({"id": wish.gpu_id, "name": gpu.name, "availability": stock(hosts)})
        return rows


def _cuda(hosts: list[Host], count: int) -> list[dict[str, Any]]:
    versions = sorted({host.cuda for host in hosts}, key=version, reverse=True)
    return [
        {"version": text, "available": any(h.cuda == text and h.free_gpus >= count for h in hosts)} for text in versions
    ]
