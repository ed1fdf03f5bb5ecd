"""What belongs to an account beside pods: SSH keys, registry credentials, templates, network volumes."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox import meter
from gpu_skills.sandbox.face import Reply, Request, Route, route
from gpu_skills.sandbox.runpod_bodies import (
    CREATE_REGISTRY,
    CREATE_TEMPLATE,
    CREATE_VOLUME,
    SSH_KEYS,
    UPDATE_TEMPLATE,
    UPDATE_VOLUME,
)
from gpu_skills.sandbox.runpod_pods import Pods, check_container, check_path, pod_of
from gpu_skills.sandbox.runpod_wire import Problem, listed, read_body
from gpu_skills.sandbox.world import Account, Volume, World

STANDARD_USD_GB_MONTH = Decimal("0.07")
ABOVE_A_TERABYTE_USD_GB_MONTH = Decimal("0.05")
HIGH_PERFORMANCE_USD_GB_MONTH = Decimal("0.14")  # "cost more" is all that is documented
TERABYTE_GB = 1000

_OFFICIAL = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
PUBLIC_TEMPLATES: dict[str, dict[str, Any]] = {
    "30zmvf89kd": {"name": "PyTorch 2.8", "image": _OFFICIAL, "category": "NVIDIA"},
    "runpod-ubuntu": {"name": "Ubuntu", "image": "runpod/base:1.0.2-ubuntu2404", "category": "CPU"},
}


def volume_rate_usd_hr(size_gb: int, kind: str) -> Decimal:
    if kind == "HIGH_PERFORMANCE":
        return meter.per_hour(HIGH_PERFORMANCE_USD_GB_MONTH, size_gb)
    above = max(size_gb - TERABYTE_GB, 0)
    return meter.per_hour(STANDARD_USD_GB_MONTH, size_gb - above) + meter.per_hour(ABOVE_A_TERABYTE_USD_GB_MONTH, above)


class AccountParts:
    def __init__(self, world: World, pods: Pods):
        self.world = world
        self.pods = pods

    def routes(self) -> Iterator[Route]:
        yield route("GET", "/v2/account/ssh-keys", "ssh_keys", self.show_keys)
        yield route("PUT", "/v2/account/ssh-keys", "set_ssh_keys", self.set_keys, mutates=True)
        yield route("GET", "/v2/registries", "registries", self.list_registries)
        yield route("POST", "/v2/registries", "create_registry", self.create_registry, mutates=True)
        yield route("GET", "/v2/registries/{id}", "registry", self.show_registry)
        yield route("DELETE", "/v2/registries/{id}", "delete_registry", self.delete_registry, mutates=True)
        yield route("GET", "/v2/templates", "templates", self.list_templates)
        yield route("POST", "/v2/templates", "create_template", self.create_template, mutates=True)
        yield route("GET", "/v2/templates/{id}", "template", self.show_template)
        yield route("PATCH", "/v2/templates/{id}", "update_template", self.update_template, mutates=True)
        yield route("DELETE", "/v2/templates/{id}", "delete_template", self.delete_template, mutates=True)
        yield route("GET", "/v2/catalog/templates", "public_templates", self.list_public_templates)
        yield route("GET", "/v2/network-volumes", "volumes", self.list_volumes)
        yield route("POST", "/v2/network-volumes", "create_volume", self.create_volume, mutates=True)
        yield route("GET", "/v2/network-volumes/{id}", "volume", self.show_volume)
        yield route("PATCH", "/v2/network-volumes/{id}", "update_volume", self.update_volume, mutates=True)
        yield route("DELETE", "/v2/network-volumes/{id}", "delete_volume", self.delete_volume, mutates=True)

    # SSH keys --------------------------------------------------------------------------------------------------------

    def show_keys(self, request: Request) -> Reply:
        return Reply(200, {"keys": list(request.account.ssh_keys.values())})

    def set_keys(self, request: Request) -> Reply:
        """The whole set is replaced; pods that exist keep what they were given."""
        request.account.ssh_keys = dict(enumerate(read_body(request, SSH_KEYS)["keys"]))
        return self.show_keys(request)

    # registry credentials --------------------------------------------------------------------------------------------

    def _registries(self, account: Account) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = account.extra.setdefault("registries", {})
        return found

    def list_registries(self, request: Request) -> Reply:
        rows = [{"id": id, "name": row["name"]} for id, row in self._registries(request.account).items()]
        return Reply(200, {"registries": rows})

    def create_registry(self, request: Request) -> Reply:
        body, id = read_body(request, CREATE_REGISTRY), self.pods.new_id(25)
        self._registries(request.account)[id] = body
        return Reply(201, {"id": id, "name": body["name"]})

    def show_registry(self, request: Request) -> Reply:
        row = self._registries(request.account).get(request.params["id"])
        if row is None:
            raise Problem(404, "registry not found")
        return Reply(200, {"id": request.params["id"], "name": row["name"]})

    def delete_registry(self, request: Request) -> Reply:
        self.show_registry(request)
        if any(pod_of(pod).registry == request.params["id"] for pod in self.world.living(request.account)):
            raise Problem(400, "registry credential is in use by a pod and cannot be deleted")
        for template in self._templates(request.account).values():
            if template["registry"] == request.params["id"]:
                template["registry"] = None
        del self._registries(request.account)[request.params["id"]]
        return Reply(204)

    # templates -------------------------------------------------------------------------------------------------------

    def _templates(self, account: Account) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = account.extra.setdefault("templates", {})
        return found

    def _template(self, account: Account, id: str) -> dict[str, Any]:
        if id in PUBLIC_TEMPLATES:
            row = {"ports": ["8888/http", "22/tcp"], "public": True, **PUBLIC_TEMPLATES[id]}
            return _whole_template(id, row)
        if id not in self._templates(account):
            raise Problem(404, "template not found")
        return self._templates(account)[id]

    def template_for_pod(self, account: Account, id: str) -> dict[str, Any]:
        template = self._template(account, id)
        if template["serverless"]:
            raise Problem(422, "Request validation failed.", ["$.templateId: a serverless template cannot make a pod"])
        return template

    def list_templates(self, request: Request) -> Reply:
        return Reply(200, {"templates": list(self._templates(request.account).values())})

    def list_public_templates(self, request: Request) -> Reply:
        source = (listed(request, "source", ("official", "verified", "community")) or ["official"])[0]
        rows = [self._template(request.account, id) for id in PUBLIC_TEMPLATES] if source == "official" else []
        return Reply(200, {"templates": rows})

    def show_template(self, request: Request) -> Reply:
        return Reply(200, self._template(request.account, request.params["id"]))

    def create_template(self, request: Request) -> Reply:
        body, id = read_body(request, CREATE_TEMPLATE), self.pods.new_id(10)
        template = _whole_template(id, body)
        _check_template(template)
        self._templates(request.account)[id] = template
        return Reply(201, template)

    def update_template(self, request: Request) -> Reply:
        own = self._own_template(request)
        changed = {**own, **read_body(request, UPDATE_TEMPLATE)}
        _check_template(changed)
        self._templates(request.account)[own["id"]] = changed
        return Reply(200, changed)

    def delete_template(self, request: Request) -> Reply:
        del self._templates(request.account)[self._own_template(request)["id"]]
        return Reply(204)

    def _own_template(self, request: Request) -> dict[str, Any]:
        own = self._templates(request.account).get(request.params["id"])
        if own is None:
            raise Problem(404, "template not found")
        return own

    # network volumes -------------------------------------------------------------------------------------------------

    def own_volumes(self, account: Account) -> list[Volume]:
        return [volume for volume in self.world.volumes.values() if volume.account is account]

    def _volume(self, request: Request) -> Volume:
        volume = self.world.volumes.get(request.params["id"])
        if volume is None or volume.account is not request.account:
            raise Problem(404, "network volume not found")
        return volume

    def list_volumes(self, request: Request) -> Reply:
        return Reply(200, {"networkVolumes": [volume_document(v) for v in self.own_volumes(request.account)]})

    def show_volume(self, request: Request) -> Reply:
        return Reply(200, volume_document(self._volume(request)))

    def create_volume(self, request: Request) -> Reply:
        body = read_body(request, CREATE_VOLUME)
        centers = {center["id"]: center["network_volumes"] for center in self.world.catalogue.data_centers}
        kinds = centers.get(body["dataCenter"], [])
        kind = body.get("type", kinds[0] if kinds else "STANDARD")
        if kind not in kinds:
            able = [id for id, offered in centers.items() if kind in offered]
            raise Problem(
                400, f"data center {body['dataCenter'][:40]!r} has no {kind} volumes; use one of {', '.join(able)}"
            )
        if request.account.balance_usd(self.world.now()) <= 0:
            raise Problem(402, "insufficient balance")
        id = self.pods.new_id(10)
        volume = Volume(
            id=id,
            vendor="runpod",
            account=request.account,
            name=body["name"],
            size_gb=Decimal(body["size"]),
            location=body["dataCenter"],
            directory=self.world.directory / f"volume-{id}",
            created_at=self.world.now(),
            extra={"type": kind},
        )
        # The bill outlives the volume and has to know what it was.
        request.account.extra.setdefault("volume_kinds", {})[id] = kind
        self.world.add_volume(volume, volume_rate_usd_hr(body["size"], kind))
        return Reply(201, volume_document(volume))

    def update_volume(self, request: Request) -> Reply:
        volume, body = self._volume(request), read_body(request, UPDATE_VOLUME)
        size = body.get("size", int(volume.size_gb))
        if size < volume.size_gb:
            raise Problem(400, "network volume size cannot be reduced")
        volume.name, volume.size_gb = body.get("name", volume.name), Decimal(size)
        self.world.rate_volume(volume, volume_rate_usd_hr(size, volume.extra["type"]))
        return Reply(200, volume_document(volume))

    def delete_volume(self, request: Request) -> Reply:
        volume = self._volume(request)
        users = [
            p.id for p in self.world.living(request.account) if (pod_of(p).network or {}).get("volumeId") == volume.id
        ]
        if users:
            raise Problem(400, f"network volume is in use by pod {users[0]}: terminate the pod first")
        self.world.delete_volume(volume)
        return Reply(204)


def volume_document(volume: Volume) -> dict[str, Any]:
    return {
        "id": volume.id,
        "name": volume.name,
        "size": int(volume.size_gb),
        "dataCenter": volume.location,
        "type": volume.extra["type"],
    }


def _whole_template(id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": id,
        "args": "",
        "disk": 50,
        "mounts": {},
        "ports": [],
        "env": {},
        "registry": None,
        "serverless": False,
        "public": False,
        "category": "NVIDIA",
        "startSsh": True,
        "startJupyter": True,
        "allowedCudaVersions": [],
        **body,
    }


def _check_template(template: dict[str, Any]) -> None:
    check_container(template["image"], template["args"], template["ports"], template["env"])
    if "persistent" in template["mounts"]:
        check_path(template["mounts"]["persistent"]["path"])
