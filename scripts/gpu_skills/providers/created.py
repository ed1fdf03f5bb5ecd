"""Whether what was created is what was approved: price, kind, disk, GPUs. Pure: a spec and the machine as shown."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from gpu_skills.errors import CreatedPriceMismatch
from gpu_skills.providers.base import Machine, MachineSpec
from gpu_skills.providers.gpus import same_model

# Providers round their rates somewhere, and so do records.
_ROUNDING_USD_HR = Decimal("0.000002")


@dataclass(frozen=True)
class Verdict:
    """problems: what differs, so that it has to go at once. unknown: what is not shown yet: ask again."""

    problems: tuple[str, ...]
    unknown: tuple[str, ...]

    def error(self, machine: Machine) -> CreatedPriceMismatch:
        return CreatedPriceMismatch(
            machine=f"{machine.provider} {machine.instance_id}", reason="; ".join(self.problems)
        )


def compare(spec: MachineSpec, machine: Machine) -> Verdict:
    """What was asked for against what came. A rate that is not higher than approved is no difference."""
    problems: list[str] = []
    unknown: list[str] = []

    def check(name: str, value: object, difference: str | None) -> None:
        if value is None:
            unknown.append(name)
        elif difference:
            problems.append(difference)

    rate = machine.rate_usd_hr
    check(
        "rate_usd_hr",
        rate,
        f"it costs ${rate:.4f}/h, approved are at most ${spec.max_rate_usd_hr:.4f}/h"
        if rate is not None and rate > spec.max_rate_usd_hr + _ROUNDING_USD_HR
        else None,
    )
    wants_interruptible = spec.bid_usd_hr is not None
    kinds = {True: "interruptible", False: "on-demand"}
    check(
        "is_interruptible",
        machine.is_interruptible,
        f"it is {kinds[bool(machine.is_interruptible)]}, asked for was {kinds[wants_interruptible]}"
        if machine.is_interruptible is not wants_interruptible
        else None,
    )
    check(
        "disk_gb",
        machine.disk_gb,
        f"it has {machine.disk_gb:g} GB of disk, asked for were {spec.disk_gb} GB"
        # The work's disk is the network volume then, which was there before.
        if machine.disk_gb is not None and spec.volume_id is None and machine.disk_gb < spec.disk_gb
        else None,
    )
    check(
        "gpu_count",
        machine.gpu_count,
        f"it has {machine.gpu_count} GPUs, asked for were {spec.gpu_count}"
        if machine.gpu_count != spec.gpu_count
        else None,
    )
    wanted = spec.offer.gpu
    check(
        "gpu",
        machine.gpu,
        f"its GPU is {machine.gpu}, asked for was {wanted}"
        if wanted and machine.gpu and not (same_model(wanted, machine.gpu) or same_model(machine.gpu, wanted))
        else None,
    )
    return Verdict(tuple(problems), tuple(unknown))
