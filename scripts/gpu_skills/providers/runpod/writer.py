"""What changes something at RunPod. Each method is one request."""

from __future__ import annotations

from typing import Any, Literal

from gpu_skills.errors import GpuError, ProviderSilent, UnexpectedReply, UsageError
from gpu_skills.providers import fields, spec_check
from gpu_skills.providers.base import CreateOutcome, MachineSpec, Volume
from gpu_skills.providers.runpod.client import CLEAR_REFUSALS, NAME, RunpodClient
from gpu_skills.providers.runpod.offers import CLOUD, check_locations
from gpu_skills.providers.runpod.pricing import CONTAINER_DISK_GB, network_usd_hr, volume_gb
from gpu_skills.providers.runpod.reader import TRAITS, RunpodReader, checked_id
from gpu_skills.wire import Unanswered


class RunpodWriter:
    name = NAME

    def __init__(self, client: RunpodClient):
        self.client = client

    def create(self, spec: MachineSpec) -> CreateOutcome:
        """One POST. A 5xx may have made the pod: `unknown`, to be found by its name."""
        body = create_body(spec)
        spec_check.check(spec, TRAITS, self.client.http.key)
        try:
            answer = self.client.http.write("create", "POST", "/v2/pods", body=body)
        except Unanswered as exc:
            return _unknown(exc.reason)
        except UnexpectedReply as exc:
            return CreateOutcome("unknown", problem=exc)
        except GpuError as exc:  # nothing left this computer
            return CreateOutcome("refused", problem=exc)
        try:
            parsed = answer.json()
        except ValueError:
            parsed = None
        document = parsed if isinstance(parsed, dict) else {}
        if 200 <= answer.status < 300:
            pod_id = fields.identity(document, "id")
            if pod_id is not None:
                return CreateOutcome("created", pod_id)
        elif answer.status in CLEAR_REFUSALS:
            return CreateOutcome("refused", problem=self.client.problem(answer, "create", disk_gb=spec.disk_gb))
        return _unknown(f"HTTP {answer.status}: {answer.text}")

    def destroy(self, instance_id: str) -> Literal["accepted", "absent"]:
        return self.client.destroy(checked_id(instance_id))

    def stop(self, instance_id: str) -> None:
        self.client.act(checked_id(instance_id), "stop")

    def start(self, instance_id: str) -> None:
        """It stays tied to its host. A host without a free GPU is HostFull, or a pod without GPUs: count them after."""
        self.client.act(checked_id(instance_id), "start")

    def restart(self, instance_id: str) -> None:
        self.client.act(checked_id(instance_id), "restart")

    def set_label(self, instance_id: str, label: str) -> None:
        """The name. Editing a running pod may reset its container: never while a job runs."""
        if not label or len(label) > TRAITS.max_label_chars:
            raise UsageError(f"a name of {len(label)} characters; allowed are 1 to {TRAITS.max_label_chars}")
        self.client.patch(checked_id(instance_id), {"name": label})

    def attach_key(self, instance_id: str, public_key: str) -> None:
        """Nothing: the key came in with the create, as PUBLIC_KEY. The account's own keys are left alone."""

    def create_volume(self, name: str, size_gb: int, data_center: str) -> Volume:
        """A network volume, which bills until it is deleted."""
        check_locations([data_center], RunpodReader(self.client).data_centers())
        row = self.client.create_volume({"name": name, "size": size_gb, "dataCenter": data_center.upper()})
        volume_id = fields.identity(row, "id") or ""
        return Volume(volume_id, name, float(size_gb), data_center.upper(), network_usd_hr(size_gb))

    def delete_volume(self, volume_id: str) -> Literal["accepted", "absent"]:
        return self.client.delete_volume(volume_id)


def create_body(spec: MachineSpec) -> dict[str, Any]:
    """The request. What is not set is absent: unknown or null members are refused with 422.

    `gpu.count` is always sent: without it every create fails as "no instances". So is the disk: beside something that
    survives a stop it is for what is installed, else the work itself has to fit on it. `22/tcp` has to be
    asked for, and the key travels as PUBLIC_KEY, so that the account's set of keys need not be touched.
    """
    env = dict(spec.env)
    if spec.ssh_public_key:
        env["PUBLIC_KEY"] = spec.ssh_public_key.strip()
    gpu: dict[str, Any] = {"id": spec.offer.offer_id, "count": spec.gpu_count}
    if spec.min_cuda is not None:
        gpu["minCudaVersion"] = f"{spec.min_cuda:.1f}"
    is_kept = spec.persistent_gb is not None or spec.volume_id is not None
    body: dict[str, Any] = {
        "name": spec.label,
        "image": spec.image,
        "gpu": gpu,
        "cloud": CLOUD,
        "disk": CONTAINER_DISK_GB if is_kept else max(CONTAINER_DISK_GB, spec.disk_gb),
        "ports": ["22/tcp", *(f"{port}/http" for port in spec.ports if port != 22)],
    }
    if spec.volume_id is not None:
        if len(spec.data_centers) != 1:
            raise UsageError("a network volume is mounted in its own data centre: name that", next_step="gpu offers")
        body["mounts"] = {"network": [{"volumeId": spec.volume_id, "path": spec.workspace}]}
    elif spec.persistent_gb is not None:
        body["mounts"] = {"persistent": {"size": volume_gb(spec.persistent_gb), "path": spec.workspace}}
    if spec.data_centers:
        body["dataCenterIds"] = list(spec.data_centers)
    if env:
        body["env"] = env
    if spec.bootstrap:
        body["args"] = spec.bootstrap
    if spec.registry is not None:
        if not spec.registry.stored_id:
            raise UsageError(
                "runpod takes a private registry by the id of a stored login, not by user and password",
                next_step="store the login in RunPod's settings and name its id",
            )
        body["registry"] = spec.registry.stored_id
    return body


def _unknown(reason: str) -> CreateOutcome:
    return CreateOutcome("unknown", problem=ProviderSilent(provider=NAME, what="create", reason=reason))
