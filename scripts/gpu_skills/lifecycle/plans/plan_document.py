"""Write down what was measured: the plan as it is frozen, and what its approver should know beside the figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import timestamp
from gpu_skills.config import LONGEST_WAIT_S
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import preflight
from gpu_skills.lifecycle.plans.market import Look, offer_record
from gpu_skills.lifecycle.plans.plan import Candidate, Plan
from gpu_skills.lifecycle.plans.wanted import Wish
from gpu_skills.lifecycle.plans.worst_case import TRAFFIC_GB, WorstCase, hours
from gpu_skills.providers.base import RentedReader, Requirements
from gpu_skills.units import format_duration, format_usd, json_number, usd

VALID_FOR = timedelta(hours=1)


def document(
    op: Operator,
    wish: Wish,
    need: Requirements,
    reader: RentedReader,
    looks: Sequence[Look],
    worst: WorstCase,
    left: Mapping[str, Decimal | None],
) -> Plan:
    """The plan without its warnings."""
    config, now = wish.config, op.clock.now()
    capacity = config.compute.capacity
    waits = capacity.mode == "wait"
    attempts = capacity.attempts if waits else 1
    if waits and capacity.interval_s > 0:  # an older plan that is measured again may have had more
        attempts = max(1, min(attempts, int(LONGEST_WAIT_S // capacity.interval_s)))
    sequence = timedelta(seconds=min(attempts * capacity.interval_s, LONGEST_WAIT_S)) if waits else timedelta(0)
    need = replace(need, hours=worst.deadline_s / 3600)
    best = next((one.estimates[0] for one in looks if one.estimates), None)
    expected_usd = None
    if wish.expected_s is not None and best is not None:
        lasts = hours(wish.expected_s + (wish.hold_for_s or 0) + best.startup_s + best.download_s)
        expected_usd = usd(best.offer.rate_usd_hr * lasts + best.traffic_usd)
    return Plan(
        project_id=op.project.project_id,
        machine_class=wish.machine_class,
        provider=config.provider,
        image=config.compute.image,
        disk_gb=math.ceil(config.compute.disk_gb),
        gpu_count=config.compute.gpu_count,
        candidates=tuple(_candidate(one, wish, need) for one in looks),
        max_rate_usd_hr=worst.max_rate,
        deadline_s=worst.deadline_s,
        deadline_reason=worst.why,
        storage_grace_s=worst.storage_grace_s,
        storage_usd_hr=worst.storage_rate,
        worst_case_usd=worst.worst_usd,
        worst_case={name: json_number(value) for name, value in worst.parts.items()},
        setup_cap_s=worst.setup_cap_s,
        setup_failures_max=worst.failures,
        image_gb=wish.needs.size_gb,
        measured_at=timestamp(now),
        expires_at=timestamp(now + max(VALID_FOR, sequence)),
        min_vram_gb=config.compute.min_vram_gb,
        min_cuda=wish.needs.cuda,
        min_driver=wish.needs.driver,
        interruptible=wish.interruptible,
        volume_id=need.volume_id,
        locations=_locations(need, reader),
        idle_timeout_s=wish.idle_timeout_s,
        hold_for_s=wish.hold_for_s,
        job_timeout_s=wish.job_timeout_s,
        capacity={
            "mode": capacity.mode,
            "attempts": attempts,
            "interval_s": json_number(Decimal(str(capacity.interval_s))) if waits else 0,
        },
        expected_s=wish.expected_s,
        expected_usd=expected_usd,
        ceilings_left={name: None if value is None else json_number(value) for name, value in left.items()},
        outputs_ephemeral=not need.persistent,
        secrets=wish.secrets,
        whose_machine=reader.traits.whose_machine,
        job=wish.job,
        inputs=wish.inputs,
        resume_from=wish.resume_from,
    )


def _candidate(one: Look, wish: Wish, need: Requirements) -> Candidate:
    left_out = None
    if not wish.tries(one):
        reasons = preflight.class_reasons(one, need, wish.needs, wish.config.provider)
        left_out = "; ".join(reason.message for reason in reasons)
    rate = one.estimates[0].offer.rate_usd_hr if one.estimates else None
    shown = tuple(offer_record(e) for e in one.shown)
    return Candidate(one.gpu, left_out, shown, None if rate is None else usd(rate))


def warnings(wish: Wish, plan: Plan, looks: Sequence[Look], *, is_incomplete: bool) -> list[str]:
    """What the approver should know beside the figures. is_incomplete: of what was spent."""
    found = wish.needs.assumptions()
    if plan.outputs_ephemeral:
        found.append("outputs_ephemeral: no disk of it survives a stop; what is not pulled by then is gone")
    if plan.capacity["mode"] == "wait":
        attempts, interval_s = plan.capacity["attempts"], plan.capacity["interval_s"]
        found.append(
            f"it waits in the foreground, {format_duration(attempts * interval_s)} at most, and takes whatever fits "
            f"then: the price may change up to {format_usd(plan.max_rate_usd_hr)}/h"
        )
    if plan.interruptible:
        found.append("interruptible: the machine may be taken away at any time, and with it what was not pulled")
    limit_s, _why = wish.limit
    if plan.deadline_s < math.floor(limit_s):
        what = "budget.session_usd" if plan.deadline_reason == "session_budget" else "what the policy's ceilings leave"
        found.append(
            f"the deadline is {format_duration(plan.deadline_s)}, not {format_duration(limit_s)}: {what} pays no more"
        )
    ends = (plan.job_timeout_s or plan.expected_s or 0) + (plan.hold_for_s or 0)
    if plan.job is not None and not plan.job_timeout_s:
        found.append(f"the job has no timeout: the deadline of {format_duration(plan.deadline_s)} ends it")
    if ends > plan.deadline_s:
        found.append(f"the job and its review may take {format_duration(ends)}: the deadline ends them before that")
    if plan.worst_case.get("traffic"):
        gb = TRAFFIC_GB + wish.weights_gb
        found.append(
            f"traffic is billed by the GB: image, inputs and {gb:g} GB more are counted, the rest comes on top"
        )
    if plan.volume_id is not None:
        found.append(f"network volume {plan.volume_id} bills until it is deleted, whatever becomes of the machine")
    tried = {candidate.gpu for candidate in plan.tried}
    nothing = [one.gpu for one in looks if one.gpu in tried and not one.estimates]
    if nothing:
        found.append(f"none to be had now: {', '.join(nothing)}")
    if is_incomplete:
        found.append("a record of what was spent cannot be read, so less may be left: gpu ledger verify")
    return found


def _locations(need: Requirements, reader: Any) -> tuple[str, ...]:
    """The one data centre in which a network volume stands: a create has to name it."""
    if need.volume_id is None:
        return ()
    return tuple(v.location for v in reader.volumes() if v.volume_id == need.volume_id)
