"""One approval becomes one run. What refuses before leaves the approval unused; afterwards the run is gone on with."""

from __future__ import annotations

from dataclasses import replace

from gpu_skills.clock import timestamp
from gpu_skills.errors import ApprovalUsed, StateError
from gpu_skills.lifecycle import machines, runs, states
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.approval.approvals import Approval
from gpu_skills.lifecycle.guard import receipts
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import specs
from gpu_skills.lifecycle.runs import Run
from gpu_skills.state import budget
from gpu_skills.units import json_number


def bound(op: Operator, name: str, plan: Plan, approval: Approval, run: Run | None, job_id: str | None) -> Run:
    """The run of this approval with its money reserved. What refuses here leaves the approval unused."""
    if run is not None and run.state not in ("open", "won"):
        raise ApprovalUsed(reason=f"approval {run.approval_id} was used: its run is {run.state}")
    if run is not None and (run.state == "won" or not run.is_settled):
        return run
    runs.require_readable(op)
    receipts.require_recent(op, plan.provider, specs.fuse_action(op, plan))
    account = op.account(plan.provider)
    budget.reserve(
        op.project,
        op.ledger,
        op.clock,
        op.policy(),
        intent=approval.id,
        account=account,
        provider=plan.provider,
        cost_usd=plan.worst_case_usd,
        rate_usd_hr=plan.max_rate_usd_hr,
        deadline_h=plan.deadline_h,
        job_id=job_id,
        resumes=(plan.resume_from or {}).get("job"),
        environ=op.environ,
    )
    if run is not None:
        return runs.update(op, approval.id, lambda run: replace(run, is_settled=False))
    # From here on the approval is used. Whoever dies before it leaves money reserved and nothing bound: the same call
    # reserves it again, and reconcile frees what has no run.
    run = runs.create(
        op,
        Run(
            approval_id=approval.id,
            plan_sha256=name,
            project_id=op.project.project_id,
            provider=plan.provider,
            account=budget.account_directory(plan.provider, account, op.environ).name,
            owner=runs.owner_of(op),
            reserved_usd=json_number(plan.worst_case_usd),
            approval_expires_at=timestamp(approval.expires_at),
            began_at=timestamp(op.clock.now()),
        ),
    )
    approvals.note_used(op, approval)
    return run


def may_be_there(op: Operator, approval_id: str) -> list[str]:
    """The machines that this run asked for and that are not known to be gone."""
    run = runs.load(op, approval_id)
    return [a.machine_id for a in run.attempts if a.result != "refused" and not a.is_over] if run is not None else []


def machine_of(op: Operator, run: Run) -> Machine:
    """The machine that this run has won. ApprovalUsed for one that does not run any more."""
    attempt = next((a for a in run.attempts if a.intent == run.won), None)
    machine = machines.find(op.project, attempt.machine_id) if attempt is not None else None
    if machine is None:
        raise StateError(file="machines.json", at="", problem=f"found no machine of approval {run.approval_id}")
    if machine.status in states.FINAL or machine.status == "terminating":
        raise ApprovalUsed(
            reason=f"approval {run.approval_id} was used: its machine {machine.id} is {machine.status}",
            machine=machine.id,
        )
    if machine.status in ("stopped", "stopping"):
        raise ApprovalUsed(
            reason=f"approval {run.approval_id} was used: its machine {machine.id} is {machine.status}",
            next_step=f"gpu machine start {machine.id}",
            machine=machine.id,
        )
    return machine
