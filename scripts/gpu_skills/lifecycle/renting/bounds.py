"""What bounds the next create of a run: what its approval still pays for, and the ceilings as they are now."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from gpu_skills.errors import ApprovalUsed
from gpu_skills.lifecycle import runs
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import worst_case
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.state import budget
from gpu_skills.state import policy as policies
from gpu_skills.units import format_duration, format_usd


def deadline_s(op: Operator, plan: Plan, approval_id: str, cost_usd: Decimal) -> float:
    """What was approved bounds all machines of the run together: the next one has what earlier ones left.

    cost_usd: what those took. ApprovalUsed, and the run is exhausted, when too little is left for a machine to be of
    use.
    """
    left_s, useful_s = worst_case.left_s(plan, cost_usd), worst_case.useful_s(plan)
    if left_s >= useful_s:
        return left_s
    runs.update(op, approval_id, lambda run: replace(run, state="exhausted"))
    raise ApprovalUsed(
        reason=f"of the {format_usd(plan.worst_case_usd)} of approval {approval_id} earlier set-ups "
        f"took {format_usd(cost_usd)}: the rest pays {format_duration(left_s)}, "
        f"{format_duration(useful_s)} are needed",
        next_step="gpu plan --freeze",
    )


def require_within_ceilings(
    op: Operator, plan: Plan, approval_id: str, cost_usd: Decimal, *, job_id: str | None
) -> None:
    """The policy as it is now, asked for what this run may still cost."""
    books = budget.books(
        op.project,
        op.ledger,
        op.clock,
        op.environ,
        job_id=job_id,
        resumes=(plan.resume_from or {}).get("job"),
        without_intent=approval_id,
    )
    spent = books.spent  # for day and month the books of earlier set-ups count already
    policies.require(
        op.policy(),
        cost_usd=max(Decimal(0), plan.worst_case_usd - cost_usd),
        rate_usd_hr=plan.max_rate_usd_hr,
        deadline_h=plan.deadline_h,
        provider=plan.provider,
        spent=replace(spent, job_usd=spent.job_usd + cost_usd, session_usd=spent.session_usd + cost_usd),
        reserved_usd=books.reserved_usd,
    )
