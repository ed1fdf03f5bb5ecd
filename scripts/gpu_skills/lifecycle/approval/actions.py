"""A plan to change one machine that is there: extend, start, stop, destroy, unprotect. Frozen and named like a plan.

`plans/<sha256>.json` holds both kinds; this one has an `action`.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from gpu_skills import schemas
from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import ApprovalInvalid, PlanChanged, UsageError, one_line
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import SHOWN_CHARS, Plan
from gpu_skills.state import files
from gpu_skills.state.project import Project
from gpu_skills.units import format_usd, json_number

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval, Ask

SCHEMA_VERSION = 1
Action = Literal["extend", "start", "stop", "destroy", "unprotect"]
MAX_ACTION_BYTES = 1 << 20
_MONEY = ("worst_case_usd", "rate_usd_hr", "storage_usd_hr")


@dataclass(frozen=True)
class ActionPlan:
    """Fields as in schemas/actions.json, where each is described.

    worst_case_usd: what the action may add to the bill. deadline_at: the new one, None where the action sets none.
    """

    action: Action
    project_id: str
    machine_id: str
    provider: str
    instance_id: str | None = None
    worst_case_usd: Decimal = Decimal(0)
    rate_usd_hr: Decimal | None = None
    storage_usd_hr: Decimal | None = None
    gpu: str | None = None
    gpu_count: int | None = None
    deadline_at: str | None = None
    old_deadline_at: str | None = None
    whose_machine: str | None = None
    secrets: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    details: dict[str, Any] | None = None
    measured_at: str | None = None
    expires_at: str | None = None
    nonce: str | None = None

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Decimal):
                value = json_number(value)
            elif isinstance(value, tuple):
                value = list(value)
            record[one.name] = value
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ActionPlan:
        """SchemaInvalid for what is no such plan. Fields nobody knows are refused: they would be approved unseen."""
        schemas.check(record, "actions", file="plan", next_step="gpu machine --help")
        given = {key: value for key, value in record.items() if key != "schema_version"}
        if unknown := sorted(set(given) - {one.name for one in fields(cls)}):
            raise UsageError(f"the plan has fields nobody knows: {', '.join(unknown)[:200]}", next_step="gpu plan")
        for name in _MONEY:
            if given.get(name) is not None:
                given[name] = Decimal(str(given[name]))
        for name in ("secrets", "warnings"):
            given[name] = tuple(given.get(name) or ())
        return cls(**given)

    def ask(self) -> Ask:
        """What a person is asked to allow."""
        from gpu_skills.lifecycle.approval.approvals import Ask

        subject = {"machine": self.machine_id, "provider": self.provider, "instance": self.instance_id}
        if self.deadline_at is not None:
            subject["deadline"] = self.deadline_at
        return Ask(
            sha256=plans.sha256(self),
            action=self.action,
            project_id=self.project_id,
            subject=subject,
            worst_case_usd=self.worst_case_usd,
            lines=_lines(self),
            expires_at=None if self.expires_at is None else parse_timestamp(self.expires_at),
        )


def freeze(project: Project, plan: ActionPlan) -> str:
    """Write the plan under its hash and return that. One that is measured anew is a new plan."""
    project.require_writable()
    if plan.measured_at is not None and plan.nonce is None:
        plan = replace(plan, nonce=secrets.token_hex(8))
    name = plans.sha256(plan)
    path = project.path("plans") / f"{name}.json"
    files.make_directory(path.parent)
    with files.lock(path):
        files.commit(path, plans.canonical(plan), expected=files.read_bytes(path, max_bytes=MAX_ACTION_BYTES))
    return name


def load(project: Project, name: str) -> tuple[str, Plan | ActionPlan]:
    """(full name, plan of either kind) by its name or eight or more digits of it. PlanUnknown, PlanChanged."""
    if plans.is_draft(name):
        return plans.load(project, name)
    full = plans.full_name(project, name)
    raw = files.read_bytes(project.path("plans") / f"{full}.json", max_bytes=plans.MAX_PLAN_BYTES)
    if raw is None:
        raise plans.unknown(project, name)
    record = files.parse(raw, project.path("plans") / f"{full}.json")
    if not isinstance(record, dict) or "action" not in record:
        return plans.load(project, full)
    plan = ActionPlan.from_record(record)
    if hashlib.sha256(raw).hexdigest() != full or plans.sha256(plan) != full:
        raise PlanChanged(plan=full[:SHOWN_CHARS])
    if plan.project_id != project.project_id:
        raise ApprovalInvalid(
            reason=f"plan {full[:SHOWN_CHARS]} is of project {one_line(plan.project_id, limit=80)}, not of this one",
            plan=full[:SHOWN_CHARS],
        )
    return full, plan


def named_by(project: Project, approval: Approval, action: Action, machine_id: str) -> ActionPlan:
    """The plan that an approval allows, if it is to do this to this machine; ApprovalInvalid otherwise."""
    _, plan = load(project, approval.plan_sha256)
    if not isinstance(plan, ActionPlan) or plan.action != action or plan.machine_id != machine_id:
        reason = f"approval {approval.id} is not for: {action} {machine_id}"
        raise ApprovalInvalid(reason=reason, plan=approval.plan_sha256[:SHOWN_CHARS])
    return plan


def _lines(plan: ActionPlan) -> tuple[str, ...]:
    what = f"{plan.action} machine {plan.machine_id} of {plan.provider}"
    if plan.instance_id:
        what += f" (instance {plan.instance_id})"
    if plan.gpu:
        what += f": {plan.gpu_count or 1} × {plan.gpu}"
    lines = [what]
    if plan.rate_usd_hr is not None:
        lines.append(f"rate: at most {format_usd(plan.rate_usd_hr)}/h all-in")
    if plan.deadline_at is not None:
        before = f", until now {plan.old_deadline_at}" if plan.old_deadline_at else ""
        lines.append(f"deadline: billing ends {plan.deadline_at}{before}")
    lines.append(f"worst case: {format_usd(plan.worst_case_usd)} more")
    if plan.action == "destroy":
        lines.append("its disk and everything on it that was not pulled is gone for good")
    if plan.secrets or plan.whose_machine:
        lines.append(f"reaches it: {', '.join(plan.secrets) or 'no secrets'}; it is {plan.whose_machine or 'rented'}")
    lines += [f"note: {warning}" for warning in plan.warnings]
    return tuple(one_line(line) for line in lines)
