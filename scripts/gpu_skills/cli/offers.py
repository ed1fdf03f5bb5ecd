"""`gpu offers`: what could be used now, at which rate."""

from __future__ import annotations

from typing import Any

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table
from gpu_skills.units import format_usd


@command("offers", reads_only=True, example="gpu offers --json", exits="0 done · 1 failed · 5 nothing to offer")
def offers(context: Context) -> Output:
    """This machine and your hosts, looked at now: GPUs, disk, rate, and whether gpu.yaml is satisfied. Reads only."""
    from gpu_skills.lifecycle import survey

    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(["local", context.config.provider]):
        for offer in context.provider(name).offers(survey.no_need()):
            found.append(survey.look(offer, context.config, context.connect))
    rows = [
        [
            o["provider"],
            o["host"],
            f"{o['gpu_count']} × {o['gpu']}" if o["gpu_count"] else "-",
            f"{o['vram_gb']:g}" if o["vram_gb"] else "-",
            str(o["disk_free_gb"]) if o["disk_free_gb"] is not None else "-",
            format_usd(o["rate_usd_hr"]),
            "yes" if o["fits"] else f"no: {o['why_not']}",
        ]
        for o in found
    ]
    return Output(
        {"offers": found}, table(rows, ["PROVIDER", "HOST", "GPU", "VRAM_GB", "DISK_FREE_GB", "USD/H", "FITS"])
    )
