"""What is written down of a create once its outcome is known: in the run, the journal and the record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

from gpu_skills.clock import timestamp
from gpu_skills.errors import GpuError, one_line
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.renting import specs
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import Machine as Instance


@dataclass(frozen=True)
class Refused:
    """It does not exist: that is clear."""

    problem: GpuError


def refused(op: Operator, run: Run, attempt: Attempt, problem: GpuError) -> Refused:
    """It certainly does not exist: the intent is closed, the record ends, nothing was billed."""
    reason = one_line(problem.message, limit=300)
    intents.close(op.project, op.clock, attempt.intent, "refused", reason=reason, details={"code": problem.code})
    end_refused(op, run, attempt, reason, problem.code)
    return Refused(problem)


def end_refused(op: Operator, run: Run, attempt: Attempt, reason: str, code: str | None) -> None:
    """What follows from a create that the journal has as refused. Repeating is harmless."""
    _end_record(op, attempt, reason)
    note(op, run, attempt, result="refused", reason=code, is_over=True)


def _end_record(op: Operator, attempt: Attempt, reason: str) -> None:
    if machines.find(op.project, attempt.machine_id) is None:
        return

    def ended(machine: Machine) -> Machine:
        if machine.status in states.FINAL or machine.instance_id is not None:
            return machine
        return replace(machine, status="lost", extra={**machine.extra, "why_lost": reason})

    machines.update(op.project, attempt.machine_id, ended, clock=op.clock)


def note(op: Operator, run: Run, attempt: Attempt, **changes: object) -> Attempt:
    """Change the attempt as the run's file has it now: whoever ended its machine has written there too."""

    def noted(run: Run) -> Run:
        known = next((a for a in run.attempts if a.number == attempt.number), attempt)
        return runs.with_attempt(run, replace(known, **changes))  # type: ignore[arg-type]

    changed = runs.update(op, run.approval_id, noted)
    return next(a for a in changed.attempts if a.number == attempt.number)


def record_created(op: Operator, run: Run, attempt: Attempt, instance_id: str, seen: Instance | None = None) -> Machine:
    """The provider's id goes into journal and record at once: before any wait, and before anything can fail."""
    intents.close(op.project, op.clock, attempt.intent, "done", instance_id=instance_id, machine_id=attempt.machine_id)
    if machines.find(op.project, attempt.machine_id) is None:  # died between run file and record, or a lost registry
        machines.save(op.project, from_attempt(op, run, attempt))

    def created(machine: Machine) -> Machine:
        status = "booting" if machine.status in ("requested", "unknown") else machine.status
        machine = replace(machine, host=instance_id, status=status)
        return machine if seen is None else with_seen(machine, seen, op.clock.now())

    machine = machines.update(op.project, attempt.machine_id, created, clock=op.clock)
    note(op, run, attempt, result="done")
    return machine


def from_attempt(op: Operator, run: Run, attempt: Attempt) -> Machine:
    label = labels.parse(attempt.label)
    return Machine(
        id=attempt.machine_id,
        provider=run.provider,
        host=attempt.machine_id,
        rate_usd_hr=Decimal(str(attempt.rate_usd_hr)),
        gpu=attempt.gpu,
        label=attempt.label,
        machine_class=label.machine_class if label is not None else None,
        intent=attempt.intent,
        plan=run.plan_sha256,
        account=run.account,
        root=root_of(op, run.plan_sha256),
        created_at=attempt.began_at,
        deadline_at=attempt.deadline_at,
        extra={"approval_id": run.approval_id, "offer_id": attempt.offer_id},
    )


def root_of(op: Operator, plan_sha256: str | None) -> str | None:
    """Where the runner is, by the plan; None where that is not there any more: then the machine is asked."""
    plan = plans.find(op.project, plan_sha256)
    return None if plan is None else fuse.runner_root(specs.keeps(op, plan))


def with_seen(machine: Machine, seen: Instance, now: datetime) -> Machine:
    """The record with what the provider shows: the rate really billed, the physical machine, the label as it is."""
    return replace(
        machine,
        rate_usd_hr=machine.rate_usd_hr if seen.rate_usd_hr is None else seen.rate_usd_hr,
        storage_usd_hr=machine.storage_usd_hr if seen.storage_usd_hr is None else seen.storage_usd_hr,
        gpu=machine.gpu or seen.gpu,
        disk_gb=machine.disk_gb if seen.disk_gb is None else seen.disk_gb,
        host_key=machine.host_key or (f"{seen.provider}:{seen.machine_id}" if seen.machine_id else None),
        last_seen_at=timestamp(now),
    )
