"""What a change to a machine that is there would cost: plans to start or extend one, measured and frozen."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal

from gpu_skills.clock import timestamp
from gpu_skills.errors import ConflictingState, InstanceAbsent, PlanRefused, Refused
from gpu_skills.lifecycle import labels
from gpu_skills.lifecycle.approval import actions
from gpu_skills.lifecycle.approval.actions import ActionPlan
from gpu_skills.lifecycle.guard import fuse, sentinel_records
from gpu_skills.lifecycle.guard.decisions import STORAGE_GRACE_S
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import format_duration, format_usd, usd

APPROVABLE = timedelta(hours=1)
SHORTEST_S = 300.0
_HOUR_S = Decimal(3600)


def start_plan(
    op: Operator, machine: Machine, *, lasts_s: float | None, session_usd: Decimal | None = None
) -> ActionPlan:
    """To start a stopped machine: at the rate the provider shows now, until the nearest of the limits.

    lasts_s: its deadline, counted from now. session_usd: what this start may cost in all. The policy's longest deadline
    bounds both. PlanRefused when that leaves less than five minutes.
    """
    plan_of(op, machine)
    seen = _shown(op, machine)
    rate, storage = _rates(machine, seen)
    limits = [lasts_s, _ceiling_s(op), _buys_s(session_usd, rate, storage * _grace_hours(op, machine))]
    seconds = min(limit for limit in (*limits, 7 * 86400.0) if limit is not None)
    if seconds < SHORTEST_S:
        reason = f"its limits leave {format_duration(seconds)} at {format_usd(rate)}/h"
        raise PlanRefused(summary=reason, reasons=[{"code": "too_short", "message": reason}])
    deadline_at = op.clock.now() + timedelta(seconds=int(seconds))
    return _frozen(op, machine, "start", deadline_at, held_deadline(op, machine, seen), rate, storage)


def plan_of(op: Operator, machine: Machine) -> plan.Plan:
    """What a machine was rented by, which says what it has to have when it starts again. Refused where it is lost.

    A machine that was taken back from its label may have none: then nobody can say whether a start of it is right.
    """
    made = plan.find(op.project, machine.plan)
    if made is None:
        raise Refused(
            f"the plan that rented {machine.id} is not on record: it cannot be started", next_step=give_up(machine)
        )
    return made


def give_up(machine: Machine) -> str:
    """The command that ends a machine which cannot be asked any more, with whatever nobody else has."""
    loses = f" --abandon-outputs {machine.id}" if machine.has_unknown_past else ""
    return f"gpu machine destroy {machine.id}{loses}"


def extend_plan(op: Operator, machine: Machine, more_s: float) -> ActionPlan:
    """To move the deadline of a running machine: to more_s after the one that holds.

    The record is no witness for that one: it is a file for hands, and a late deadline there would make the move to a
    later one cheap. PlanRefused past the policy's longest deadline.
    """
    seen = _shown(op, machine)
    before = held_deadline(op, machine, seen)
    if before is None:
        raise ConflictingState(
            provider=machine.provider, what="extend", instance_id=machine.instance_id, reason="it has no deadline"
        )
    until = before + timedelta(seconds=int(more_s))
    if until <= before:
        reason = f"{timestamp(until)} is not later than the deadline it has, {timestamp(before)}"
        raise PlanRefused(summary=reason, reasons=[{"code": "too_short", "message": reason}])
    ceiling_s = _ceiling_s(op)
    left_s = (until - op.clock.now()).total_seconds()
    if ceiling_s is not None and left_s > ceiling_s:
        asked, allowed = format_duration(left_s), format_duration(ceiling_s)
        reason = f"it would end {asked} from now, the policy allows {allowed}"
        fits_min = int(more_s - (left_s - ceiling_s)) // 60
        again = " ".join(("gpu", "machine", "extend", machine.id, "--by", f"{fits_min}m"))
        step = again if fits_min > 0 else "gpu policy show"
        reason += f"; {format_duration(fits_min * 60)} more fit" if fits_min > 0 else "; it has all of that already"
        raise PlanRefused(summary=reason, reasons=[{"code": "over_ceiling", "message": reason}], next_step=step)
    rate, storage = _rates(machine, seen)
    return _frozen(op, machine, "extend", until, before, rate, storage)


def held_deadline(op: Operator, machine: Machine, seen: Instance) -> datetime | None:
    """The deadline that a machine has now, as its label and the journal say."""
    label = labels.ours(seen.label, op.project.project_id)
    return None if label is None else sentinel_records.deadline_of(op, machine, seen, label)


def _frozen(
    op: Operator,
    machine: Machine,
    action: actions.Action,
    deadline_at: datetime,
    before: datetime | None,
    rate: Decimal,
    storage: Decimal,
) -> ActionPlan:
    now = op.clock.now()
    begins = now if action == "start" or before is None else max(now, before)
    runs_h = Decimal(str(max(0.0, (deadline_at - begins).total_seconds()))) / _HOUR_S
    worst = runs_h * rate
    if action == "start":  # an extended machine has its storage and grace in the plan that made it
        worst += Decimal(str(fuse.START_GRACE.total_seconds())) / _HOUR_S * rate + _grace_hours(op, machine) * storage
    made = plan.find(op.project, machine.plan)
    wanted = ActionPlan(
        action=action,
        project_id=op.project.project_id,
        machine_id=machine.id,
        provider=machine.provider,
        instance_id=machine.instance_id,
        worst_case_usd=usd(worst),
        rate_usd_hr=rate,
        storage_usd_hr=storage,
        gpu=machine.gpu,
        gpu_count=machine.gpu_count or None,
        deadline_at=timestamp(deadline_at),
        old_deadline_at=None if before is None else timestamp(before),
        whose_machine=None if made is None else made.whose_machine,
        secrets=() if made is None else made.secrets,
        measured_at=timestamp(now),
        expires_at=timestamp(now + APPROVABLE),
    )
    name = actions.freeze(op.project, wanted)
    _, frozen = actions.load(op.project, name)
    assert isinstance(frozen, ActionPlan)
    return frozen


def _shown(op: Operator, machine: Machine) -> Instance:
    seen = op.reader(machine.provider).machine(machine.instance_id) if machine.instance_id is not None else None
    if seen is None:
        raise InstanceAbsent(provider=machine.provider, instance_id=machine.instance_id or machine.id)
    return seen


def _rates(machine: Machine, seen: Instance) -> tuple[Decimal, Decimal]:
    """(running, stopped) in USD an hour as the provider shows them now, by the dearer reading."""
    rates = [rate for rate in (seen.rate_usd_hr, machine.rate_usd_hr) if rate]
    storages = [rate for rate in (seen.storage_usd_hr, machine.storage_usd_hr) if rate is not None]
    return max(rates, default=Decimal(0)), max(storages, default=Decimal(0))


def _buys_s(money_usd: Decimal | None, rate: Decimal, fixed_usd: Decimal) -> float | None:
    if money_usd is None or rate <= 0:
        return None
    left = money_usd - fixed_usd - Decimal(str(fuse.START_GRACE.total_seconds())) / _HOUR_S * rate
    return float(max(Decimal(0), left) / rate * _HOUR_S)


def _ceiling_s(op: Operator) -> float | None:
    limit = op.policy().ceilings["deadline_h"]
    return None if limit is None else float(limit) * 3600


def _grace_hours(op: Operator, machine: Machine) -> Decimal:
    made = plan.find(op.project, machine.plan)
    seconds = STORAGE_GRACE_S if made is None else made.storage_grace_s
    return Decimal(str(seconds)) / _HOUR_S
