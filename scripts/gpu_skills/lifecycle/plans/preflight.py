"""What speaks against a plan, all of it at once, before any money moves. Pure.

Each check gives reasons and raises nothing; `refuse` raises PlanRefused with every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

from gpu_skills.errors import GpuError, PlanRefused
from gpu_skills.lifecycle.plans.images import Needs
from gpu_skills.lifecycle.plans.market import Look
from gpu_skills.lifecycle.plans.offers import table_json
from gpu_skills.providers.base import Requirements
from gpu_skills.state.policy import Violation
from gpu_skills.units import counted, format_duration, format_usd

_AGAIN = ", then run gpu plan again"
_OF_POLICY = ("over_ceiling", "provider_not_allowed")
# Requirement of an offer → what to say when nothing satisfies it.
_CODES = {
    "min_vram_gb": "vram_too_small",
    "disk_gb": "disk_unspecified",
    "too_short": "too_short",
    "max_rate": "over_ceiling",
}


@dataclass(frozen=True)
class Reason:
    """code: what an agent branches on. next_step: where this one has its own."""

    code: str
    message: str
    next_step: str | None = None

    def to_record(self) -> dict[str, Any]:
        record = {"code": self.code, "message": self.message}
        return record if self.next_step is None else {**record, "next_step": self.next_step}


def of_error(error: GpuError) -> Reason:
    """What another part refused, as one reason among others."""
    return Reason(error.code, error.message, error.next_step)


def disk(disk_gb: float, needs: Needs, *, weights_gb: float = 0, inputs_bytes: int = 0) -> list[Reason]:
    """An image takes its size twice while it is unpacked; what is downloaded and sent comes on top."""
    inputs_gb = 2 * inputs_bytes / 1e9  # once in the store of the machine, once as the job's own copy
    needed = 2 * needs.size_gb + weights_gb + inputs_gb
    if disk_gb >= needed:
        return []
    suggested = math.ceil(needed / 5) * 5
    assumed = "" if needs.is_size_known else " (assumed)"
    more = f" + {weights_gb:g} GB of weights" if weights_gb else ""
    more += f" + {inputs_gb:.1f} GB of inputs" if inputs_gb >= 0.1 else ""
    return [
        Reason(
            "disk_too_small",
            f"{disk_gb:g} GB of disk for image {needs.image} of {needs.size_gb:g} GB{assumed}: "
            f"2 × image{more} make {needed:.1f} GB, {suggested} GB will do",
            f"set compute.disk_gb: {suggested} in gpu.yaml" + _AGAIN,
        )
    ]


def nothing_to_try(looks: Sequence[Look], need: Requirements, needs: Needs, provider: str) -> list[Reason]:
    """Why no class is left, each reason once. Of several classes every one has its own."""
    found: dict[tuple[str, str], Reason] = {}
    for look in looks:
        for reason in class_reasons(look, need, needs, provider):
            found.setdefault((reason.code, reason.message), reason)
    return list(found.values())


def class_reasons(look: Look, need: Requirements, needs: Needs, provider: str) -> list[Reason]:
    """Why no offer of a class will do: each requirement that none of them satisfies."""
    reasons = []
    for name, wanted in look.fails.items():
        code = _CODES.get(name, "no_offers")
        step = None
        if name == "min_vram_gb":
            has = f"has {look.vram_gb:g} GB" if look.vram_gb is not None else "does not say how much memory it has"
            text = f"{look.gpu} {has}, {need.min_vram_gb:g} GB are needed"
            step = "name a larger compute.gpu, or lower compute.min_vram_gb" + _AGAIN
        elif name == "cuda":
            code = "driver_too_old" if needs.is_of_wheel else "cuda_too_old"
            driver = f", which takes driver {needs.driver} or newer" if needs.driver else ""
            text = (
                f"{needs.because} needs CUDA {need.min_cuda:g}{driver}; no {look.gpu} at {provider} allows it: "
                f"filter cuda: {look.words}"
            )
            step = "use an image or packages for an older CUDA, or another compute.gpu" + _AGAIN
        elif name == "too_short":
            longest = max((o.duration_h for o in look.seen.offers if o.duration_h is not None), default=0.0)
            text = (
                f"no offer of {look.gpu} lasts until the deadline: {format_duration((need.hours or 0) * 3600)} are "
                f"wanted, the longest has {format_duration(longest * 3600)}"
            )
            step = "shorten --max-lease or lifecycle.max_lifetime" + _AGAIN
        elif name == "max_rate":
            cheapest = min((o.rate_usd_hr for o in look.seen.offers), default=Decimal(0))
            text = f"the cheapest {look.gpu} is {format_usd(cheapest)}/h with its disk, the ceiling is {wanted}"
            step = "gpu policy show; gpu doctor --config shows compute.max_rate_usd_hr"
        elif name == "location" and need.volume_id is not None:
            code = "volume_location"
            text = f"no {look.gpu} where volume {need.volume_id} is ({wanted})"
            step = "use another volume, or another compute.gpu" + _AGAIN
        elif name == "cooldown":
            text = f"every {look.gpu} failed lately and is left alone for now"
            step = "gpu offers shows until when"
        else:
            text = f"no offer of {look.gpu} at {provider}: {look.words}"
            step = "lower compute.disk_gb" + _AGAIN if name == "disk_gb" else "gpu offers"
        reasons.append(Reason(code, text, step))
    if not reasons and not look.estimates:
        reasons.append(Reason("no_offers", f"{provider} has no {look.gpu} now", "gpu offers"))
    return reasons


def balance(provider: str, credit_usd: Decimal | None, worst_case_usd: Decimal) -> list[Reason]:
    """An account that runs dry stops its machines, whatever runs on them."""
    if credit_usd is None or credit_usd >= worst_case_usd:
        return []
    return [
        Reason(
            "balance_too_low",
            f"the {provider} account has {format_usd(credit_usd)}, the worst case is {format_usd(worst_case_usd)}",
            f"add credit at {provider}, or shorten the deadline" + _AGAIN,
        )
    ]


def ceilings(violations: Iterable[Violation], *, longest_s: float | None = None) -> list[Reason]:
    """What the policy forbids. longest_s: the deadline that would still fit, where there is one."""
    reasons = []
    for violation in violations:
        if violation.ceiling == "allowed_providers":
            reasons.append(Reason("provider_not_allowed", str(violation), "gpu policy show"))
            continue
        text, step = str(violation), "gpu policy show"
        if longest_s is not None and violation.ceiling not in ("machines", "rate_usd_hr"):
            text += f"; a deadline of {format_duration(longest_s)} would fit"
            step = f"gpu policy show; shorten --max-lease or lifecycle.max_lifetime{_AGAIN}"
        reasons.append(Reason("over_ceiling", text, step))
    return reasons


def refuse(reasons: Sequence[Reason], looks: Sequence[Look] = ()) -> NoReturn:
    """PlanRefused with all of them, and with the filter table of each class that was looked at."""
    texts = [reason.message for reason in reasons]
    summary = texts[0] if len(texts) == 1 else f"{counted(len(texts), 'reason')}: " + "; ".join(texts)
    step = reasons[0].next_step if len(reasons) == 1 else None
    if all(reason.code in _OF_POLICY for reason in reasons):
        step = step or "gpu policy show"
    raise PlanRefused(
        summary=summary,
        next_step=step,
        reasons=[reason.to_record() for reason in reasons],
        filters={look.gpu: table_json(look.filters) for look in looks},
    )
