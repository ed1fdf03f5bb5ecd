"""Vast's instances in our words: status, dead ends, rates, and the ways in. Pure: a row in, a Machine out.

A row is never dropped because a field of it cannot be read: it may bill.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpu_skills.errors import one_line
from gpu_skills.providers import fields
from gpu_skills.providers.base import Machine, MachineStatus, SshEndpoint, SshWay
from gpu_skills.providers.gpus import size_class_gb
from gpu_skills.providers.vast.offers import HOURS_PER_MONTH

# Words of a start that failed; the vendor's own self-test gives up on the same.
_FAILURE = re.compile(
    r"(?i)\b(errors?|failed|failure|exception|traceback|oci runtime|permission denied|no such image|manifest unknown)\b"
)


@dataclass(frozen=True)
class _State:
    status: MachineStatus
    dead_end: str | None = None
    may_recover: bool = False
    conditions: tuple[str, ...] = ()


def read_machine(row: Mapping[str, Any]) -> Machine:
    """row: with an id, which the client made sure of."""
    state = _state(row)
    base, total = fields.amount(row, "dph_base"), fields.amount(row, "dph_total")
    disk_gb, ram_mb = fields.real(row, "disk_space"), fields.real(row, "gpu_ram")
    storage = _storage_usd_hr(row, disk_gb)
    computed = None if base is None or storage is None else base + storage
    rate = max((r for r in (computed, total) if r is not None), default=None)
    now = fields.amount(fields.child(row, "instance"), "totalHour")
    stopped_costs = max((r for r in (now, storage) if r is not None), default=None)
    return Machine(
        provider="vast",
        instance_id=fields.identity(row, "id") or "",
        label=_label(row),
        status=state.status,
        said=_said(row),
        rate_usd_hr=rate,
        burn_usd_hr=stopped_costs if state.status == "stopped" else rate,
        storage_usd_hr=stopped_costs if state.status == "stopped" else storage,
        gpu=fields.text(row, "gpu_name", limit=80),
        gpu_count=fields.integer(row, "num_gpus"),
        vram_gb=size_class_gb(ram_mb) if ram_mb else None,
        disk_gb=disk_gb,
        is_interruptible=fields.flag(row, "is_bid"),
        ways=_ways(row) if state.status in ("booting", "running", "unknown") else (),
        machine_id=fields.identity(row, "machine_id"),
        location=fields.text(row, "geolocation", limit=80),
        image=fields.text(row, "image_uuid", limit=255),
        dead_end=state.dead_end,
        may_recover=state.may_recover,
        conditions=state.conditions,
        created_at=fields.moment(row, "start_date"),
        ends_at=fields.moment(row, "end_date"),
    )


def _state(row: Mapping[str, Any]) -> _State:
    actual, intended = row.get("actual_status"), row.get("intended_status")
    current, following = row.get("cur_state"), row.get("next_state")
    if "unloaded" in (current, following):
        return _State("terminating")
    outbid = ("outbid",) if _is_outbid(row) else ()
    if actual in ("stopped", "exited") and intended == "stopped":
        return _State("stopped", _why_stopped(outbid), conditions=outbid)
    if actual == "stopped" or (intended == "stopped" and current == "stopped" and following == "stopped"):
        return _State("stopped", _why_stopped(outbid), conditions=outbid)
    if actual == "running":
        return _State("stopping" if intended == "stopped" else "running")
    if actual in (None, "created", "loading", "rebooting"):
        if intended == "stopped":
            return _State("stopping")
        message = fields.text(row, "status_msg", limit=600) or ""
        if _FAILURE.search(message):
            return _State("booting", f"the container does not start: {one_line(message, limit=200)}")
        return _State("booting")
    if actual == "exited":
        return _State("unknown", "the container exited")
    if actual == "offline":
        return _State("unknown", "the host is offline", may_recover=True)
    if actual == "unknown":
        return _State("unknown", "the host sends no sign of life", may_recover=True)
    return _State("unknown")  # `frozen`, and words of tomorrow


def _why_stopped(outbid: tuple[str, ...]) -> str:
    return "it was outbid and may start again by itself" if outbid else "it is stopped: it will not run unless started"


def _is_outbid(row: Mapping[str, Any]) -> bool:
    bid, floor = fields.amount(row, "dph_base"), fields.amount(row, "min_bid")
    return row.get("is_bid") is True and bid is not None and floor is not None and bid < floor


def _storage_usd_hr(row: Mapping[str, Any], disk_gb: float | None) -> Decimal | None:
    """`storage_cost` is per GB and month here too, whatever the specification says beside it."""
    stated = fields.amount(row, "storage_total_cost")
    monthly = fields.amount(row, "storage_cost")
    computed = None
    if monthly is not None and disk_gb is not None:
        computed = monthly * Decimal(str(disk_gb)) / HOURS_PER_MONTH
    return max((r for r in (stated, computed) if r is not None), default=None)


def _label(row: Mapping[str, Any]) -> str | None:
    value = row.get("label")
    return value if isinstance(value, str) and value else None


def _said(row: Mapping[str, Any]) -> str:
    words = [f"{name}={row.get(name)}" for name in ("actual_status", "intended_status", "cur_state", "next_state")]
    message = fields.text(row, "status_msg", limit=200)
    return one_line(" ".join(words) + (f": {message}" if message else ""), limit=400)


def _ways(row: Mapping[str, Any]) -> tuple[SshWay, ...]:
    """Direct ports first, then the proxy. On images with Jupyter its port is said to be one off: both are told."""
    ways: list[SshWay] = []
    address = fields.host(row.get("public_ipaddr"))
    mappings = fields.child(row, "ports").get("22/tcp")
    if address is not None:
        for mapping in fields.objects(mappings)[:4]:
            port = fields.port(mapping.get("HostPort"))
            if port is not None:
                ways.append(SshWay("direct", SshEndpoint(address, "root", port)))
    proxy, port = fields.host(row.get("ssh_host")), fields.port(row.get("ssh_port"))
    if proxy is not None and port is not None:
        ways.append(SshWay("proxy", SshEndpoint(proxy, "root", port)))
        if "jupyter" in (fields.text(row, "image_runtype") or "") and port < 65535:
            ways.append(SshWay("proxy", SshEndpoint(proxy, "root", port + 1)))
    return tuple(dict.fromkeys(ways))
