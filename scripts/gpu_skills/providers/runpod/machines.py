"""RunPod's pods in our words: status, rates, and the ways in. Pure: a row in, a Machine out.

A row is never dropped because a field of it cannot be read: it may bill. Its `env` holds secrets and is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from gpu_skills.errors import one_line
from gpu_skills.providers import fields
from gpu_skills.providers.base import Machine, MachineStatus, SshEndpoint, SshWay
from gpu_skills.providers.runpod.pricing import running_usd_hr, stopped_usd_hr

_STATUS: dict[str, MachineStatus] = {
    "PROVISIONING": "booting",
    "STARTING": "booting",
    "RUNNING": "running",
    "EXITED": "stopped",
    "ERROR": "unknown",
    "TERMINATED": "terminating",
}
_DEAD_ENDS = {
    "EXITED": "it is stopped: it will not run unless started, and its host may be full then",
    "ERROR": "RunPod calls it beyond recovery",
    "TERMINATED": "it was terminated",
}


def read_machine(row: Mapping[str, Any]) -> Machine:
    """row: with an id, which the client made sure of."""
    said = row.get("status") if isinstance(row.get("status"), str) else ""
    status = _STATUS.get(str(said), "unknown")
    gpu = fields.child(row, "gpu")
    mounts = fields.child(row, "mounts")
    container_gb = fields.real(row, "disk")
    persistent_gb = fields.real(fields.child(mounts, "persistent"), "size") or 0.0
    rate = _rate(row, status, container_gb, persistent_gb)
    storage = stopped_usd_hr(persistent_gb)
    name = row.get("name")
    return Machine(
        provider="runpod",
        instance_id=fields.identity(row, "id") or "",
        label=name if isinstance(name, str) and name else None,
        status=status,
        said=one_line(str(said), limit=80),
        rate_usd_hr=rate,
        burn_usd_hr=storage if status == "stopped" else rate,
        storage_usd_hr=storage,
        gpu=fields.text(gpu, "id", limit=120),
        gpu_count=fields.integer(gpu, "count") if gpu else 0 if fields.child(row, "cpu") else None,
        disk_gb=persistent_gb or container_gb,
        is_interruptible=False,
        is_locked=row.get("locked") is True,
        ways=_ways(row) if status in ("booting", "running") else (),
        location=fields.text(row, "dataCenterId", limit=32),
        image=fields.text(row, "image", limit=255),
        dead_end=_DEAD_ENDS.get(str(said)),
        created_at=fields.moment(row, "createdAt"),
    )


def _rate(
    row: Mapping[str, Any], status: MachineStatus, container_gb: float | None, persistent_gb: float
) -> Decimal | None:
    """`cost` is the compute, and 0 for a pod that is stopped: what it costs when running is then not shown."""
    cost = fields.amount(row, "cost")
    if cost is None or (cost == 0 and status not in ("running", "booting")):
        return None
    if cost == 0 and fields.child(row, "gpu"):
        return None
    return cost + running_usd_hr(container_gb or 0.0, persistent_gb)


def _ways(row: Mapping[str, Any]) -> tuple[SshWay, ...]:
    """The port of `ssh.direct`, and that of `runtime.ports` where it differs: the first after a start may be old."""
    ways: list[SshWay] = []
    ssh = fields.child(row, "ssh")
    direct = fields.child(ssh, "direct")
    address, port = fields.host(direct.get("host")), fields.port(direct.get("port"))
    if address and port:
        ways.append(SshWay("direct", SshEndpoint(address, _user(direct) or "root", port)))
    for mapping in fields.objects(fields.child(row, "runtime").get("ports"))[:64]:
        address, port = fields.host(mapping.get("ip")), fields.port(mapping.get("public"))
        if fields.integer(mapping, "private") == 22 and address and port and mapping.get("type") in (None, "tcp"):
            ways.append(SshWay("direct", SshEndpoint(address, "root", port)))
    proxy = fields.child(ssh, "proxy")
    address, port = fields.host(proxy.get("host")), fields.port(proxy.get("port"))
    if address and port:
        ways.append(SshWay("proxy", SshEndpoint(address, _user(proxy), port), carries_commands=False))
    return tuple(dict.fromkeys(ways))


def _user(way: Mapping[str, Any]) -> str | None:
    return fields.identity(way, "username")
