"""The old GraphQL API, parsed and validated by a real GraphQL library.

Business failures answer 200 with `errors`; documents that do not parse or do not fit the schema answer 400.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.sandbox.catalogue import GpuType
from gpu_skills.sandbox.face import Reply, Request, Route, route
from gpu_skills.sandbox.runpod_account import AccountParts
from gpu_skills.sandbox.runpod_placement import CPU_FLAVOURS, NO_INSTANCES, Wish, hosts_of, offered_types, stock
from gpu_skills.sandbox.runpod_pods import Pods, PodSpec, memory_gb, pod_of, vcpus
from gpu_skills.sandbox.runpod_wire import Problem, Settings, stamp, without_half_pairs
from gpu_skills.sandbox.world import Account, Instance, Key, World

SCHEMA = Path(__file__).with_name("runpod_schema.graphql")
MAX_TOKENS = 15_000
GENERIC_FAILURE = "Something went wrong. Please try again later or contact support."
_CLOUDS = {"ALL": ("SECURE", "COMMUNITY"), None: ("SECURE", "COMMUNITY")}
_DEFAULT_CPU = "cpu3c-2-4"


class Refused(Exception):
    """A business failure: reported inside a 200."""

    extensions = {"code": "RUNPOD"}


@functools.cache
def _schema() -> Any:
    from graphql import build_schema

    return build_schema(SCHEMA.read_text(encoding="utf-8"))


class GraphQl:
    def __init__(self, world: World, settings: Settings, pods: Pods, parts: AccountParts):
        self.world = world
        self.settings = settings
        self.pods = pods
        self.parts = parts

    def routes(self) -> Iterator[Route]:
        yield route("POST", "/graphql", "graphql", self.answer)

    def answer(self, request: Request) -> Reply:
        import graphql

        try:
            body = without_half_pairs(request.json())
        except ValueError:
            return _errors(400, ["POST body sent invalid JSON."])
        query = body.get("query") if isinstance(body, dict) else None
        variables = body.get("variables") if isinstance(body, dict) else None
        if not isinstance(query, str) or not isinstance(variables, dict | None):
            return _errors(400, ["POST body missing, invalid Content-Type, or JSON object has no keys."])
        try:
            document = graphql.parse(query, max_tokens=MAX_TOKENS)
            # Introspection is off at the vendor.
            rules = [*graphql.specified_rules, graphql.NoSchemaIntrospectionCustomRule]
            if invalid := graphql.validate(_schema(), document, rules):
                return _errors(400, [error.message for error in invalid], "GRAPHQL_VALIDATION_FAILED")
            operation = body.get("operationName")
            root = _Root(self, request)
            result = graphql.execute_sync(
                _schema(), document, root, variable_values=variables,
                operation_name=operation if isinstance(operation, str) else None,
            )  # fmt: skip
        except graphql.GraphQLError as exc:
            return _errors(400, [exc.message], "GRAPHQL_PARSE_FAILED")
        except RecursionError:
            return _errors(400, ["Syntax Error: nested too deep"], "GRAPHQL_PARSE_FAILED")
        return self._reply(result)

    def _reply(self, result: Any) -> Reply:
        if result.data is None and result.errors and not any(error.path for error in result.errors):
            # Variables that do not fit, or no such operation: nothing was executed.
            return _errors(400, [error.message for error in result.errors], "BAD_USER_INPUT")
        body: dict[str, Any] = {"data": result.data}
        if result.errors:
            body = {"errors": [self._error(error) for error in result.errors], **body}
        return Reply(200, body)

    def _error(self, error: Any) -> dict[str, Any]:
        known = isinstance(error.original_error, Refused)
        if not known and error.original_error is not None:
            self.world.crashes.append(f"graphql {error.path}: {error.original_error!r}")
        return {
            "message": error.message if known else GENERIC_FAILURE,
            "path": error.path,
            "extensions": {"code": "RUNPOD" if known else "INTERNAL_SERVER_ERROR"},
        }


class _Root:
    """The resolvers of Query and Mutation for one request."""

    def __init__(self, api: GraphQl, request: Request):
        self._api = api
        self._world = api.world
        self._pods = api.pods
        self._request = request
        assert request.key is not None
        self._key: Key = request.key
        self._account: Account = request.account

    # reading -------------------------------------------------------------------------------------------------------

    def myself(self, info: Any) -> dict[str, Any]:
        self._needs_account_key()
        account, now = self._account, self._world.now()
        return {
            "id": f"user_{account.id}",
            "email": "someone@example.com",
            "pubKey": "\n".join(account.ssh_keys.values()) or None,
            "clientBalance": float(account.balance_usd(now)),
            "currentSpendPerHr": float(account.bill.burn_usd_hr()),
            "spendLimit": self._api.settings.spend_limit_usd_hr,
            "pods": lambda info: [self._pod(instance) for instance in self._world.listed(account)],
            "networkVolumes": [
                {"id": v.id, "name": v.name, "size": int(v.size_gb), "dataCenterId": v.location}
                for v in self._api.parts.own_volumes(account)
            ],
        }

    def pod(self, info: Any, input: dict[str, Any] | None = None) -> dict[str, Any] | None:
        instance = self._world.find(self._account, (input or {}).get("podId"))
        if instance is None or self._key.instance_id not in (None, instance.id):
            return None
        return self._pod(instance)

    def gpuTypes(self, info: Any, input: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        wanted = input or {}
        ids = wanted.get("ids") or ([wanted["id"]] if wanted.get("id") else None)
        rows = [self._gpu(gpu) for gpu in offered_types(self._world.catalogue)]
        return [row for row in rows if ids is None or row["id"] in ids]

    def dataCenters(self, info: Any) -> list[dict[str, Any]]:
        return [
            {
                "id": center["id"],
                "name": center["name"],
                "location": center["country"],
                "gpuAvailability": self._gpus_at(center["id"]),
            }
            for center in self._world.catalogue.data_centers
        ]

    # changing --------------------------------------------------------------------------------------------------------

    def podFindAndDeployOnDemand(self, info: Any, input: dict[str, Any] | None = None) -> dict[str, Any]:
        given = _present(input or {})
        return self._deploy(given, self._wish(given), None)

    def deployCpuPod(self, info: Any, input: dict[str, Any]) -> dict[str, Any]:
        given = _present(input)
        flavour, _, rest = given.get("instanceId", _DEFAULT_CPU).partition("-")
        count = rest.partition("-")[0]
        if flavour not in CPU_FLAVOURS or not count.isdecimal() or int(count[:4]) not in (2, 4, 8, 16, 32):
            raise Refused(f"CPU instance {given.get('instanceId')!r} not found")
        return self._deploy({**given, "volumeInGb": 0}, None, (flavour, int(count)))

    def podStop(self, info: Any, input: dict[str, Any]) -> dict[str, Any]:
        instance = self._own(input["podId"])
        if pod_of(instance).is_locked:
            raise Refused("pod is locked")
        if "stop" in self._pods.actions(instance):
            self._pods.stop(instance)
        return self._pod(instance)

    def podResume(self, info: Any, input: dict[str, Any]) -> dict[str, Any]:
        instance, count = self._own(input["podId"]), input.get("gpuCount")
        if count is not None and not 0 <= count <= instance.host.gpu_count:
            raise Refused("There are not enough free GPUs on the host machine to start this pod.")
        if "start" in self._pods.actions(instance):
            _translated(self._pods.start, instance, count)
        return self._pod(instance)

    def podTerminate(self, info: Any, input: dict[str, Any]) -> None:
        self._pods.terminate(self._own(input["podId"]), self._request.faults)

    def updateUserSettings(self, info: Any, input: dict[str, Any] | None = None) -> dict[str, Any]:
        self._needs_account_key()
        key = (input or {}).get("pubKey")
        if key is not None:
            lines = [line.strip() for line in key.splitlines() if line.strip()]
            self._account.ssh_keys = dict(enumerate(lines))
        return self.myself(info)

    # how -------------------------------------------------------------------------------------------------------------

    def _needs_account_key(self) -> None:
        if self._key.instance_id is not None:
            raise Refused("not authorized")

    def _own(self, id: str) -> Instance:
        instance = self._world.find(self._account, id)
        if self._key.instance_id not in (None, id):
            raise Refused("not authorized")
        if instance is None:
            raise Refused("pod not found to perform this action")
        return instance

    def _wish(self, given: dict[str, Any]) -> Wish:
        gpu_id = given.get("gpuTypeId") or next(iter(given.get("gpuTypeIdList", ())), "")
        return Wish(
            gpu_id,
            max(given.get("gpuCount", 1), 1),
            clouds=_CLOUDS.get(given.get("cloudType"), (given.get("cloudType"),)),
            data_centers=(given["dataCenterId"],) if "dataCenterId" in given else (),
            countries=(given["countryCode"],) if "countryCode" in given else (),
            allowed_cuda=tuple(given.get("allowedCudaVersions", ())),
            min_cuda=given.get("minCudaVersion"),
            needs_public_ip=given.get("supportPublicIp", False),
        )

    def _deploy(self, given: dict[str, Any], wish: Wish | None, cpu: tuple[str, int] | None) -> dict[str, Any]:
        self._needs_account_key()
        template: dict[str, Any] = {}
        if "templateId" in given:
            template = _translated(self._api.parts.template_for_pod, self._account, given["templateId"])
        disk_gb = given.get("containerDiskInGb", template.get("disk", 20))
        if disk_gb < 1:
            raise Refused("containerDiskInGb must be at least 1")
        sent = {variable["key"]: variable["value"] for variable in given.get("env", ())}
        ports = [port for port in given.get("ports", "").split(",") if port] or template.get("ports", [])
        path = given.get("volumeMountPath", "/workspace")
        volume_id = given.get("networkVolumeId")
        spec = PodSpec(
            name=given.get("name") or "my pod",
            image=given.get("imageName") or template.get("image", ""),
            wish=wish,
            cpu=cpu,
            data_centers=wish.data_centers if wish else (given["dataCenterId"],) if "dataCenterId" in given else (),
            disk_gb=disk_gb,
            persistent={"size": given["volumeInGb"], "path": path}
            if given.get("volumeInGb", 0) > 0 and not volume_id
            else None,
            network={"volumeId": volume_id, "path": path} if volume_id else None,
            ports=tuple(ports),
            env={**template.get("env", {}), **sent},
            args=given.get("dockerArgs") or template.get("args", ""),
            registry=given.get("containerRegistryAuthId"),
            start_ssh=given.get("startSsh", False),
            start_jupyter=given.get("startJupyter", False),
            global_networking=given.get("globalNetwork", False),
        )
        if wish is not None:
            self._refuse_above(given.get("deployCost"), wish)
        return self._pod(_translated(self._pods.deploy, self._account, spec, self._request.faults))

    def _refuse_above(self, ceiling_usd_hr: float | None, wish: Wish) -> None:
        if ceiling_usd_hr is None:
            return
        rates = [host.rate_usd_hr * wish.count for host in hosts_of(self._world.catalogue, wish)]
        if not rates or min(rates) > Decimal(str(ceiling_usd_hr)):
            raise Refused(NO_INSTANCES)

    def _pod(self, instance: Instance) -> dict[str, Any]:
        pod, status = pod_of(instance), self._pods.status(instance)
        mount = pod.persistent or pod.network
        return {
            "id": instance.id,
            "name": instance.label,
            "imageName": instance.image,
            # What is intended: RUNNING while the image is still being pulled.
            "desiredStatus": {"EXITED": "EXITED", "TERMINATED": "TERMINATED"}.get(status, "RUNNING"),
            "lastStatusChange": pod.last_change,
            "lastStartedAt": stamp(instance.started_at),
            "createdAt": stamp(instance.created_at),
            "containerDiskInGb": int(instance.disk_gb),
            "volumeInGb": float(instance.volume_gb),
            "volumeMountPath": mount["path"] if mount else "/workspace",
            "networkVolumeId": pod.network["volumeId"] if pod.network else None,
            "costPerHr": float(instance.rate_usd_hr),
            "adjustedCostPerHr": float(instance.rate_usd_hr),
            "dockerArgs": pod.args,
            "env": [f"{name}={value}" for name, value in instance.env.items()],
            "gpuCount": instance.gpu_count,
            "machineId": self._pods.machine_name(instance),
            "memoryInGb": memory_gb(instance),
            "vcpuCount": vcpus(instance),
            "podType": "RESERVED",
            "ports": ",".join(pod.ports),
            "uptimeSeconds": 0,  # a constant at the vendor too
            "locked": pod.is_locked,
            "containerRegistryAuthId": pod.registry,
            "runtime": lambda info: self._runtime(instance),
            "machine": {
                "podHostId": self._pods.proxy_user(instance),
                "gpuTypeId": pod.gpu_id,
                "gpuDisplayName": instance.host.gpu.name if pod.cpu is None else None,
                "location": instance.host.location.get("country"),
                "dataCenterId": instance.host.location["data_center"],
                "secureCloud": instance.host.cloud == "secure",
                "supportPublicIp": self._pods.has_public_ip(instance),
            },
        }

    def _runtime(self, instance: Instance) -> dict[str, Any] | None:
        if not self._pods.is_reported(instance):
            return None
        return {
            "uptimeInSeconds": max(int(self._world.now() - (instance.started_at or 0)), 0),
            "gpus": [],
            "container": {"cpuPercent": 1, "memoryPercent": 2},
            "ports": [
                {
                    "ip": row["ip"],
                    "isIpPublic": row["type"] == "tcp" and row["ip"] is not None,
                    "privatePort": row["private"],
                    "publicPort": row["public"],
                    "type": row["type"],
                }
                for row in self._pods.port_mappings(instance)
            ],
        }

    def _gpu(self, gpu: GpuType) -> dict[str, Any]:
        prices = {cloud: float(gpu.entry.get(f"{cloud}_usd_hr") or 0) for cloud in ("secure", "community")}
        return {
            "id": gpu.entry["runpod_id"],
            "displayName": gpu.name,
            "manufacturer": "Nvidia",
            "memoryInGb": gpu.vram_gb,
            "cudaCores": 0,
            "maxGpuCount": int(gpu.entry.get("max_count", 8)),
            "secureCloud": bool(prices["secure"]),
            "communityCloud": bool(prices["community"]),
            "securePrice": prices["secure"] or None,
            "communityPrice": prices["community"] or None,
            "lowestPrice": lambda info, input=None: self._lowest(gpu, _present(input or {})),
        }

    def _lowest(self, gpu: GpuType, given: dict[str, Any]) -> dict[str, Any]:
        cloud = {None: "ALL", True: "SECURE", False: "COMMUNITY"}[given.get("secureCloud")]
        wish = self._wish({**given, "gpuTypeId": gpu.entry["runpod_id"], "cloudType": cloud})
        hosts = hosts_of(self._world.catalogue, wish)
        free = [host for host in hosts if host.free_gpus >= wish.count]
        counts = {count for host in hosts for count in range(1, host.free_gpus + 1)}
        return {
            "gpuTypeId": wish.gpu_id,
            "gpuName": gpu.name,
            "uninterruptablePrice": float(min(h.rate_usd_hr for h in free) * wish.count) if free else None,
            "stockStatus": stock(hosts, wish.count).capitalize() if free else None,
            "availableGpuCounts": sorted(counts),
        }

    def _gpus_at(self, center_id: str) -> list[dict[str, Any]]:
        rows = []
        for gpu in offered_types(self._world.catalogue):
            hosts = hosts_of(
                self._world.catalogue, Wish(gpu.entry["runpod_id"], 1, _CLOUDS["ALL"], data_centers=(center_id,))
            )
            if hosts:
                level = stock(hosts)
                shown = "none" if level == "NONE" else level.capitalize()  # lower case in this one place
                rows.append({"gpuTypeId": gpu.entry["runpod_id"], "displayName": gpu.name,
                             "available": level != "NONE", "stockStatus": shown})  # fmt: skip
        return rows


def _present(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _translated(work: Any, *arguments: Any) -> Any:
    """A problem of the newer API, said in the older one's way."""
    try:
        return work(*arguments)
    except Problem as exc:
        volume = "network volume" in exc.detail and "Secure" in exc.detail
        raise Refused(GENERIC_FAILURE if volume else exc.detail) from exc


def _errors(status: int, messages: list[str], code: str = "BAD_REQUEST") -> Reply:
    return Reply(status, {"errors": [{"message": text, "extensions": {"code": code}} for text in messages]})
