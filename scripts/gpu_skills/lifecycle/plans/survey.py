"""A look at what an offer of the user's own really is: connect, probe, compare with gpu.yaml. Nothing is set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_skills.config import GpuConfig
from gpu_skills.errors import CannotSatisfy, RemoteError
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine, machine_of, measured
from gpu_skills.providers.base import Offer, Requirements
from gpu_skills.units import json_number


def no_need() -> Requirements:
    return Requirements()


def look(offer: Offer, config: GpuConfig, connect: Callable[[Machine], Link]) -> dict[str, Any]:
    """One row of `gpu offers`. A host that does not answer is a row that says so."""
    machine = machine_of(offer)
    row: dict[str, Any] = {
        "provider": offer.provider,
        "host": machine.host,
        "machine": machine.id,
        "gpu": offer.gpu,
        "gpu_count": offer.gpu_count,
        "vram_gb": offer.vram_gb,
        "disk_free_gb": None,
        "rate_usd_hr": json_number(offer.rate_usd_hr),
        "fits": False,
        "why_not": None,
    }
    try:
        link = connect(machine)
        probe = link.session.call("probe", {})
    except RemoteError as exc:
        return {**row, "why_not": exc.message}
    row["disk_free_gb"] = probe.get("disk_free_gb")
    gpus = [g for g in probe.get("gpus") or [] if isinstance(g, dict)]
    try:
        found = measured(machine, probe, config)
    except (RemoteError, CannotSatisfy) as exc:
        name = str(gpus[0].get("name")) if gpus else None
        return {**row, "gpu": name, "gpu_count": len(gpus), "why_not": exc.message}
    return {**row, "gpu": found.gpu, "gpu_count": found.gpu_count, "vram_gb": found.vram_gb, "fits": True}
