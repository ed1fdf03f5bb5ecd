"""The rented machine a project keeps for a while: the one that is there, a stopped one started again, or a new one.

Each start of billing is one approval, asked for through `agree`. A machine that is there and answers needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from gpu_skills.clock import parse_timestamp
from gpu_skills.config import GpuConfig
from gpu_skills.errors import ApprovalNeeded, CannotSatisfy, MachinePending, PlanRefused, UsageError
from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.approval import actions, approval_record, approvals
from gpu_skills.lifecycle.approval.approvals import Approval, Ask, ask_of_plan
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.ending import witness
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.machines import VRAM_TOLERANCE, Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan, planning
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.recovery import reconcile, returned
from gpu_skills.lifecycle.renting import bringup, keeping, provision, restarting
from gpu_skills.providers.gpus import same_model
from gpu_skills.state.project import Project

Agree = Callable[[Ask], Approval]


def ready(op: Operator, config: GpuConfig, *, agree: Agree) -> Link:
    """A link to the project's machine with an open session.

    Raises what `agree` raises without an approval, PlanRefused before one is asked for, MachinePending (exit 6) while
    nobody knows what became of an earlier create, StateBusy while another command rents or starts it, and the errors
    of renting.
    """
    machine = _at_work(op, config.provider)
    if machine is not None:
        return _link_to(op, config, machine)
    with runs.setting_up(op, config.provider):
        machine = current(op.project, config.provider)
        if machine is not None or _may_be_lost(op, config.provider):  # at work by now, or it is found out
            reconcile.run(op, [config.provider])
            machine = current(op.project, config.provider)
        if machine is None:
            return _rent(op, config, agree)
        if machine.status in ("ready", "busy"):
            return _link_to(op, config, machine)
        if machine.status == "stopped":
            return _start(op, config, machine, agree)
        return _go_on(op, config, machine, agree)


def _may_be_lost(op: Operator, provider: str) -> bool:
    """Whether something that was rented here is not over, although no record names a machine."""
    return any(run.provider == provider and not run.is_settled for run in runs.own_runs(op))


def _at_work(op: Operator, provider: str) -> Machine | None:
    """The project's machine, if it is ready by the record and its provider. A fuse may have stopped it since."""
    machine = current(op.project, provider)
    if machine is None or machine.status not in ("ready", "busy"):
        return None
    seen = op.reader(machine.provider).machine(str(machine.instance_id))
    return machine if seen is not None and seen.status == "running" else None


def current(project: Project, provider: str | None = None) -> Machine | None:
    """The project's own machine at a provider that has not reached its end; of several the newest."""
    found = [
        machine
        for machine in machines.all_machines(project)
        if machine.is_rented
        and machine.machine_class == "project"
        and machine.status not in states.FINAL
        and provider in (None, machine.provider)
    ]
    return max(found, key=lambda machine: machine.created_at or "", default=None)


def _rent(op: Operator, config: GpuConfig, agree: Agree) -> Link:
    name, frozen = _approved_plan(op, config) or _fresh_plan(op, config)
    return provision.provision(op, name, frozen, agree(ask_of_plan(name, frozen))).link


def _fresh_plan(op: Operator, config: GpuConfig) -> tuple[str, Plan]:
    try:
        made = planning.plan_project(op, config)
    except PlanRefused as exc:
        exc.next_step = _set_up_again(exc.next_step)
        for reason in exc.details["reasons"]:
            if "next_step" in reason:
                reason["next_step"] = _set_up_again(reason["next_step"])
        raise
    return plan.load(op.project, plan.freeze(op.project, made))


def _set_up_again(step: str) -> str:
    """What is planned here comes from gpu.yaml alone: there are no flags, and another plan would not be used."""
    if step == PlanRefused.next_step:
        return "change gpu.yaml, then: gpu setup"
    return (
        step.replace("--max-lease or ", "")
        .replace("run gpu plan again", "once more: gpu setup")
        .replace("gpu plan again", "gpu setup")
    )


def _approved_plan(op: Operator, config: GpuConfig) -> tuple[str, Plan] | None:
    """The plan that a person said yes to since an earlier call asked for it, if it is still for what gpu.yaml says."""
    for sha256 in approval_record.plans_named(op.project):
        try:
            name, wanted = actions.load(op.project, sha256)
            if isinstance(wanted, Plan) and _is_for(wanted, config):
                approvals.find(op, ask_of_plan(name, wanted))
                return name, wanted
        except (ApprovalNeeded, UsageError):  # not of a plan to rent, or void: a fresh one is asked for
            continue
    return None


def _is_for(frozen: Plan, config: GpuConfig) -> bool:
    need = config.compute
    wanted = {gpu for gpu in (need.gpu, *need.candidates) if gpu}
    return (
        frozen.machine_class == "project"
        and frozen.provider == config.provider
        and frozen.image == need.image
        and frozen.disk_gb >= need.disk_gb
        and frozen.gpu_count == need.gpu_count
        and frozen.min_vram_gb == need.min_vram_gb
        and (need.max_rate_usd_hr is None or frozen.max_rate_usd_hr <= need.max_rate_usd_hr)
        and (not wanted or all(any(same_model(gpu, c.gpu) for gpu in wanted) for c in frozen.tried))
    )


def _start(op: Operator, config: GpuConfig, machine: Machine, agree: Agree) -> Link:
    _require_fit(config, machine)
    lasts_s, session_usd = config.lifecycle.max_lifetime_s, config.budget.session_usd
    wanted = keeping.start_plan(op, machine, lasts_s=lasts_s, session_usd=session_usd)
    return provision.restart(op, machine, agree(wanted.ask())).link


def _go_on(op: Operator, config: GpuConfig, machine: Machine, agree: Agree) -> Link:
    """One that an earlier command asked for and did not wait for, or that started again by itself."""
    if machine.has_unknown_past and machine.status in ("booting", "unknown"):
        returned.bring_up(op, machine).close()  # or it says why not, and what then
        return _link_to(op, config, witness.current(op, machine))
    run = next((run for run in runs.own_runs(op) if any(a.machine_id == machine.id for a in run.attempts)), None)
    if run is not None and run.state == "won" and machine.status == "booting":
        begun = keeping.allowed(op, "start", machine)
        if begun is not None:
            return provision.restart(op, machine, approvals.find(op, begun.ask())).link
        return restarting.resume(op, machine).link
    if run is None or run.state != "open" or machine.status not in ("requested", "booting"):
        raise MachinePending(machine=machine.id, status=machine.status)
    name, frozen = plan.load(op.project, run.plan_sha256)
    return provision.provision(op, name, frozen, agree(ask_of_plan(name, frozen))).link


def _link_to(op: Operator, config: GpuConfig, machine: Machine) -> Link:
    _require_fit(config, machine)
    intents.require_staying(op.project, machine.id)
    link, _ = bringup.follow(op, machine)
    try:
        frozen = plan.find(op.project, machine.plan)
        ends = link.machine.deadline_at
        machines.open_rented_session(
            op.project,
            link,
            clock=op.clock,
            deadline_at=None if ends is None else fuse.session_deadline(parse_timestamp(ends)),
            reason=(frozen.deadline_reason if frozen is not None else None) or "max_lifetime",
            idle_timeout_s=config.lifecycle.idle_timeout_s if frozen is None else frozen.idle_timeout_s,
        )
    except BaseException:
        link.close()
        raise
    return link


def _require_fit(config: GpuConfig, machine: Machine) -> None:
    """What gpu.yaml asks for now may be more than what was rented then."""
    need = config.compute
    wanted = [gpu for gpu in (need.gpu, *need.candidates) if gpu]
    fits = (
        (machine.gpu_count or 0) >= need.gpu_count
        and (need.min_vram_gb is None or (machine.vram_gb or 0) >= need.min_vram_gb * VRAM_TOLERANCE)
        and (not wanted or any(machine.gpu is not None and same_model(gpu, machine.gpu) for gpu in wanted))
        and Decimal(str(machine.disk_gb or need.disk_gb)) >= Decimal(str(need.disk_gb))
    )
    if not fits:
        gpus = f"{need.gpu_count} × {' or '.join(wanted) or 'GPU'} with {need.min_vram_gb or 0:g} GB"
        raise CannotSatisfy(
            provider=machine.id,
            found=f"{machines.describe_gpus(machine)}, {machine.disk_gb or 0:g} GB of disk",
            wanted=f"{gpus}, {need.disk_gb:g} GB of disk",
            next_step="what is rented does not change its shape: gpu destroy, then gpu setup",
        )
