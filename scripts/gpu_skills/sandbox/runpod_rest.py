"""Pods over REST v2: routes, the Pod object, and the rules of create, update and action."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox.containers import USER
from gpu_skills.sandbox.face import Reply, Request, Route, route
from gpu_skills.sandbox.runpod_account import AccountParts
from gpu_skills.sandbox.runpod_bodies import CREATE_POD, POD_ACTION, UPDATE_POD
from gpu_skills.sandbox.runpod_logs import Logs
from gpu_skills.sandbox.runpod_placement import CPU_FLAVOURS, NO_DISK, NO_INSTANCES, Wish, offered_types
from gpu_skills.sandbox.runpod_pods import (
    DEFAULT_DISK_GB,
    Pods,
    PodSpec,
    check_container,
    check_path,
    memory_gb,
    pod_of,
)
from gpu_skills.sandbox.runpod_wire import Problem, Settings, flag, read_body, stamp
from gpu_skills.sandbox.world import Account, Instance, World

# Only the direct way carries commands and files. The vendor's proxy is a shell for people: here a closed port.
PROXY_HOST, PROXY_PORT = "127.0.0.1", 1
# Changes of these take effect at the next start; every other edit resets a running container.
_WITHOUT_RESET = {"locked", "globalNetworking"}
_FROM_TEMPLATE = ("image", "args", "disk", "ports", "registry")


class PodRoutes:
    def __init__(self, world: World, settings: Settings, pods: Pods, logs: Logs, parts: AccountParts):
        self.world = world
        self.settings = settings
        self.pods = pods
        self.logs = logs
        self.parts = parts

    def routes(self) -> Iterator[Route]:
        yield route("GET", "/v2/pods", "list", self.list)
        yield route("POST", "/v2/pods", "create", self.create, mutates=True)
        yield route("GET", "/v2/pods/{id}", "show", self.show, about="id")
        yield route("PATCH", "/v2/pods/{id}", "update", self.update, mutates=True, about="id")
        yield route("DELETE", "/v2/pods/{id}", "destroy", self.destroy, mutates=True, about="id")
        yield route("POST", "/v2/pods/{id}/action", "action", self.act, mutates=True, about="id")
        yield route("GET", "/v2/pods/{id}/logs", "logs", self.read_logs, about="id")

    def find(self, request: Request) -> Instance:
        instance = self.world.find(request.account, request.params["id"])
        if instance is None:
            raise Problem(404, "pod not found")
        return instance

    # reading -------------------------------------------------------------------------------------------------------

    def list(self, request: Request) -> Reply:
        flag(request, "includeClusterPods")
        found = [] if "list_empty" in request.faults else self.world.listed(request.account)
        return Reply(200, {"pods": [self.document(instance) for instance in found]})

    def show(self, request: Request) -> Reply:
        return Reply(200, self.document(self.find(request)))

    def read_logs(self, request: Request) -> Reply:
        return self.logs.stream(request, self.find(request))

    def document(self, instance: Instance) -> dict[str, Any]:
        """The Pod object."""
        pod, status = pod_of(instance), self.pods.status(instance)
        is_reported = self.pods.is_reported(instance)
        ports = self.pods.port_mappings(instance) if is_reported else []
        env = {**pod.injected, **instance.env} if self.settings.shows_injected_env else dict(instance.env)
        document: dict[str, Any] = {
            "id": instance.id,
            "name": instance.label,
            "status": status,
            "actions": self.pods.actions(instance),
            "image": instance.image,
            "args": pod.args,
            "disk": int(instance.disk_gb),
            "env": env,
            "ports": list(pod.ports),
            "registry": pod.registry,
            "mounts": _mounts(instance),
            "cloud": instance.host.cloud.upper(),
            "dataCenterId": instance.host.location["data_center"],
            "cudaVersion": instance.host.cuda if pod.cpu is None else None,
            "template": None,
            "cost": Decimal(0) if status in ("EXITED", "TERMINATED") else instance.rate_usd_hr,
            "locked": pod.is_locked,
            "globalNetworking": self._global_networking(instance),
            "ssh": {"proxy": self._proxy(instance, status), "direct": _direct(ports)},
            "runtime": self._runtime(instance, ports) if is_reported else self.settings.idle_runtime,
            "createdAt": stamp(instance.created_at),
            "startedAt": stamp(instance.started_at),
        }
        if pod.cpu is None:
            document["gpu"] = {"id": pod.gpu_id, "count": instance.gpu_count}
        else:
            document["cpu"] = {"id": pod.cpu[0], "vcpuCount": pod.cpu[1], "memory": memory_gb(instance)}
        return document

    def _global_networking(self, instance: Instance) -> dict[str, Any]:
        if not pod_of(instance).has_global_networking:
            return {"enabled": False}
        address = f"10.65.{instance.host.machine_id % 250}.{len(str(instance.id)) + 2}"
        return {"enabled": True, "ip": address, "internalDns": f"{instance.id}.runpod.internal"}

    def _proxy(self, instance: Instance, status: str) -> dict[str, Any] | None:
        if status == "PROVISIONING":
            return None  # no machine is assigned yet
        user = self.pods.proxy_user(instance)
        command = f"ssh {user}@{PROXY_HOST} -p {PROXY_PORT}"
        return {"host": PROXY_HOST, "port": PROXY_PORT, "username": user, "command": command}

    def _runtime(self, instance: Instance, ports: list[dict[str, Any]]) -> dict[str, Any]:
        uptime = max(int(self.world.now() - (instance.started_at or self.world.now())), 0)
        return {
            "uptime": uptime,
            "gpus": [{"util": 0, "memoryUtil": 0} for _ in self.world.gpu_report(instance)["gpus"]],
            "cpu": {"util": 1},
            "memory": {"util": 2},
            "ports": ports,
        }

    # creating --------------------------------------------------------------------------------------------------------

    def create(self, request: Request) -> Reply:
        body = read_body(request, CREATE_POD)
        spec = self._spec(request.account, body)
        document = self.document(self.pods.deploy(request.account, spec, request.faults))
        if (wrong := request.faults.get("wrong_id")) is not None:
            document["id"] = wrong.get("instance", document["id"][::-1])
        return Reply(201, document)

    def _spec(self, account: Account, body: dict[str, Any]) -> PodSpec:
        template: dict[str, Any] = {}
        if "templateId" in body:
            template = self.parts.template_for_pod(account, body["templateId"])
        elif "image" not in body:
            raise Problem(422, "Request validation failed.", ["$: missing properties 'image'"])
        if ("gpu" in body) == ("cpu" in body):
            raise Problem(400, "exactly one of gpu or cpu must be set")
        settings = {**template, **body}
        mounts = self._create_mounts(body, template)
        centers = tuple(body.get("dataCenterIds", ()))
        wish = self._wish(body, template, centers) if "gpu" in body else None
        return PodSpec(
            name=body["name"],
            image=settings["image"],
            wish=wish,
            cpu=_cpu(body) if "cpu" in body else None,
            data_centers=centers,
            disk_gb=settings.get("disk", DEFAULT_DISK_GB),
            persistent=mounts.get("persistent"),
            network=next(iter(mounts.get("network", ())), None),
            ports=tuple(settings.get("ports", ())),
            env={**template.get("env", {}), **body.get("env", {})},
            args=settings.get("args", ""),
            registry=settings.get("registry"),
            start_ssh=settings.get("startSsh", False),
            start_jupyter=settings.get("startJupyter", False),
            global_networking=body.get("globalNetworking", False),
        )

    def _create_mounts(self, body: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
        mounts = body.get("mounts") or (template.get("mounts", {}) if "gpu" in body else {})
        if "persistent" in mounts and "network" in mounts:
            raise Problem(400, "mounts.persistent and mounts.network are mutually exclusive")
        if "persistent" in mounts and "cpu" in body:
            raise Problem(400, "mounts.persistent is not supported on CPU pods")
        return mounts

    def _wish(self, body: dict[str, Any], template: dict[str, Any], centers: tuple[str, ...]) -> Wish:
        gpu = body["gpu"]
        allowed, least = tuple(gpu.get("allowedCudaVersions", ())), gpu.get("minCudaVersion")
        if allowed and least is not None:
            raise Problem(400, "gpu.allowedCudaVersions and gpu.minCudaVersion are mutually exclusive")
        if "allowedCudaVersions" not in gpu and least is None:
            allowed = tuple(template.get("allowedCudaVersions", ()))
        if gpu["id"] not in {gpu_type.entry["runpod_id"] for gpu_type in offered_types(self.world.catalogue)}:
            raise Problem(400, f"gpu type {gpu['id'][:60]!r} not found")
        if "count" not in gpu and self.settings.count_is_required:
            raise Problem(400, NO_INSTANCES)
        return Wish(
            gpu["id"],
            gpu.get("count", 1),
            clouds=(body.get("cloud", "SECURE"),),
            data_centers=centers,
            allowed_cuda=allowed,
            min_cuda=least,
        )

    # changing --------------------------------------------------------------------------------------------------------

    def act(self, request: Request) -> Reply:
        instance, action = self.find(request), read_body(request, POD_ACTION)["action"]
        status, pod = self.pods.status(instance), pod_of(instance)
        if action not in self.pods.actions(instance):
            raise Problem(409, f"action '{action}' is not valid for pod status {status}")
        if pod.is_locked and (action in ("stop", "restart") or self._is_kept(instance, action)):
            raise Problem(409, f"pod is locked: '{action}' is not allowed")
        if action == "terminate":
            self.pods.terminate(instance, request.faults)
            return Reply(204)
        {"start": self.pods.start, "stop": self.pods.stop, "restart": self.pods.restart}[action](instance)
        return Reply(200, self.document(instance))

    def _is_kept(self, instance: Instance, action: str) -> bool:
        return action == "terminate" and pod_of(instance).is_locked and self.settings.locked_refuses_terminate

    def destroy(self, request: Request) -> Reply:
        instance = self.find(request)
        if self._is_kept(instance, "terminate"):
            raise Problem(409, "pod is locked")
        self.pods.terminate(instance, request.faults)
        return Reply(204)

    def update(self, request: Request) -> Reply:
        instance, body = self.find(request), read_body(request, UPDATE_POD)
        if "templateId" in body:
            template = self.parts.template_for_pod(request.account, body.pop("templateId"))
            env = {**template.get("env", {}), **body.get("env", {})}
            body = {**{name: template[name] for name in _FROM_TEMPLATE}, **body, "env": env}
        self._check_update(instance, body)
        resets = self._resets(instance, body)
        if resets and pod_of(instance).is_locked and body.get("locked") is not False:
            raise Problem(409, "pod is locked: an edit would reset it")
        self._apply(instance, body)
        if resets:
            self.pods.restart(instance)
        self.world.rebill(instance)
        return Reply(200, self.document(instance))

    def _resets(self, instance: Instance, body: dict[str, Any]) -> bool:
        edited = set(body) - _WITHOUT_RESET
        return bool(edited) and self.settings.edit_resets and self.pods.status(instance) in ("RUNNING", "STARTING")

    def _check_update(self, instance: Instance, body: dict[str, Any]) -> None:
        pod = pod_of(instance)
        check_container(
            body.get("image", instance.image),
            body.get("args", pod.args),
            body.get("ports", pod.ports),
            body.get("env", instance.env),
        )
        if body.get("disk", 0) + instance.volume_gb > instance.host.disk_gb:
            raise Problem(400, NO_DISK)
        registry = body.get("registry")
        if registry is not None and registry not in instance.account.extra.get("registries", {}):
            raise Problem(400, f"container registry credential {registry[:60]!r} not found")
        mounts = body.get("mounts", {})
        if mounts.get("network") == []:
            raise Problem(400, "clearing mounts is not supported")
        for kind, present in (("persistent", pod.persistent), ("network", pod.network)):
            if kind in mounts and present is None:
                raise Problem(400, f"mount kind is fixed at create: this pod has no {kind} mount")
        if "network" in mounts and pod.network and mounts["network"][0]["volumeId"] != pod.network["volumeId"]:
            raise Problem(400, "the volumeId of a network mount is immutable")
        if "persistent" in mounts and mounts["persistent"]["size"] < instance.volume_gb:
            raise Problem(400, "a volume disk can only grow")
        if "persistent" in mounts and mounts["persistent"]["size"] > instance.host.disk_gb:
            raise Problem(400, NO_DISK)
        for mount in (mounts.get("persistent"), *mounts.get("network", ())):
            if mount is not None:
                check_path(mount["path"])
        if body.get("globalNetworking") and not instance.host.location.get("global_network"):
            raise Problem(400, "global networking is not available in this data center")

    def _apply(self, instance: Instance, body: dict[str, Any]) -> None:
        pod = pod_of(instance)
        instance.label = body.get("name", instance.label)
        instance.image = pod.image = body.get("image", instance.image)
        instance.env = body.get("env", instance.env)  # replaces, does not merge
        instance.disk_gb = Decimal(body.get("disk", instance.disk_gb))
        pod.args = body.get("args", pod.args)
        pod.ports = list(body.get("ports", pod.ports))
        pod.registry = body.get("registry", pod.registry)
        pod.is_locked = body.get("locked", pod.is_locked)
        pod.has_global_networking = body.get("globalNetworking", pod.has_global_networking)
        mounts = body.get("mounts", {})
        if "persistent" in mounts:
            pod.persistent = mounts["persistent"]
            instance.volume_gb = Decimal(mounts["persistent"]["size"])
        if "network" in mounts:
            pod.network = mounts["network"][0]


def _cpu(body: dict[str, Any]) -> tuple[str, int]:
    flavour, count = CPU_FLAVOURS.get(body["cpu"]["id"]), body["cpu"]["vcpuCount"]
    if flavour is None:
        raise Problem(400, f"cpu flavor {body['cpu']['id'][:60]!r} not found")
    if count & (count - 1) or count > flavour.max_vcpu:
        raise Problem(400, f"cpu.vcpuCount must be a power of two between 2 and {flavour.max_vcpu}")
    if body.get("cloud", "SECURE") != "SECURE":
        raise Problem(400, NO_INSTANCES)
    return flavour.id, count


def _mounts(instance: Instance) -> dict[str, Any]:
    pod = pod_of(instance)
    if pod.persistent is not None:
        return {"persistent": dict(pod.persistent)}
    return {"network": [dict(pod.network)]} if pod.network is not None else {}


def _direct(ports: list[dict[str, Any]]) -> dict[str, Any] | None:
    mapping = next((p for p in ports if p["private"] == 22 and p["type"] == "tcp" and p["public"]), None)
    if mapping is None:
        return None
    host, port = mapping["ip"], mapping["public"]
    return {"host": host, "port": port, "username": USER, "command": f"ssh {USER}@{host} -p {port}"}
