"""What a person is asked to allow, in the few lines they have to read before they say yes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.config import LONGEST_WAIT_S
from gpu_skills.errors import PlanChanged, UsageError, one_line
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import SHOWN_CHARS, Plan
from gpu_skills.units import counted, format_bytes, format_duration, format_usd, json_number


@dataclass(frozen=True)
class Ask:
    """One thing to be allowed. action: rent, or what is done to one machine.

    subject: what it is about, short enough to stand in what is signed. lines: for the person. expires_at: after this
    nobody can say yes any more, None: as long as the thing is there. approval_until: a yes may hold longer than an
    hour, until then.
    """

    sha256: str
    action: str
    project_id: str
    subject: dict[str, Any]
    worst_case_usd: Decimal
    lines: tuple[str, ...]
    expires_at: datetime | None = None
    approval_until: datetime | None = None

    @property
    def name(self) -> str:
        """Of the plan, as far as a person reads it."""
        return self.sha256[:SHOWN_CHARS]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def plan_again(self) -> str:
        """The command that makes a new one when this is over."""
        steps = {
            "rent": "gpu plan --freeze",
            "destroy": f"gpu machine destroy {self._machine}",
            "extend": f"gpu machine extend {self._machine}",
            "start": f"gpu machine start {self._machine}",
            "stop": f"gpu machine stop {self._machine}",
            "unprotect": f"gpu machine protect {self._machine} --off",
        }
        return steps.get(self.action, "gpu status")

    @property
    def _machine(self) -> str:
        return one_line(str(self.subject.get("machine")), limit=80)


def ask_of_plan(name: str, plan: Plan) -> Ask:
    """What renting by this frozen plan means. UsageError for a draft, PlanChanged when the name is another plan's."""
    if name.startswith("draft-"):
        raise UsageError(f"{name} is a draft and cannot be approved", next_step="gpu plan --freeze")
    if plans.sha256(plan) != name:
        raise PlanChanged(plan=name[:SHOWN_CHARS])
    return Ask(
        sha256=name,
        action="rent",
        project_id=plan.project_id,
        subject={
            "provider": plan.provider,
            "gpus": [candidate.gpu for candidate in plan.tried],
            "gpu_count": plan.gpu_count,
            "max_rate_usd_hr": json_number(plan.max_rate_usd_hr),
            "deadline_s": json_number(Decimal(str(plan.deadline_s))),
        },
        worst_case_usd=plan.worst_case_usd,
        lines=tuple(one_line(line) for line in _lines(plan)),
        expires_at=parse_timestamp(plan.expires_at),
        approval_until=_until(plan),
    )


def _until(plan: Plan) -> datetime | None:
    """A plan that waits is good for the whole sequence of its attempts, until it expires: a day at most."""
    if plan.capacity.get("mode") != "wait":
        return None
    return min(parse_timestamp(plan.expires_at), parse_timestamp(plan.measured_at) + timedelta(seconds=LONGEST_WAIT_S))


def _lines(plan: Plan) -> list[str]:
    tried, left_out = plan.tried, [c for c in plan.candidates if c.left_out is not None]
    cheapest = min((c.rate_usd_hr for c in tried if c.rate_usd_hr is not None), default=None)
    now = "" if cheapest is None else f"; now from {format_usd(cheapest)}/h"
    expected = ""
    if plan.expected_usd is not None and plan.expected_s is not None:
        expected = f"; expected {format_usd(plan.expected_usd)} in {format_duration(plan.expected_s)}"
    kind = {"project": "the project's machine", "job": "a machine for one job", "canary": "a canary"}
    lines = [
        f"rent: {kind[plan.machine_class]} at {plan.provider}: {plan.gpu_count} × "
        + (", else ".join(c.gpu for c in tried) or "nothing"),
        f"rate: at most {format_usd(plan.max_rate_usd_hr)}/h all-in{now}",
        f"worst case: {format_usd(plan.worst_case_usd)}{_parts(plan)}{expected}",
        f"deadline: billing ends {format_duration(plan.deadline_s)} after the create"
        + (f" ({plan.deadline_reason})" if plan.deadline_reason else ""),
        *_after_the_deadline(plan),
    ]
    if left_out:
        lines.append("left out: " + "; ".join(f"{c.gpu}: {c.left_out}" for c in left_out))
    if (until := _until(plan)) is not None:
        attempts, interval_s = int(plan.capacity.get("attempts", 1)), float(plan.capacity.get("interval_s", 0))
        lines.append(
            f"waits: {counted(attempts, 'look')}, one every {format_duration(interval_s)}; the yes may hold until "
            f"{timestamp(until)}, and the price may rise to the maximum"
        )
    if plan.job is not None:
        lines.append(f"runs: {plan.job.get('run')}" + (f" after {plan.job['setup']}" if plan.job.get("setup") else ""))
    lines.append(f"reaches it: {_what_reaches_it(plan)}; it is {plan.whose_machine or 'rented from ' + plan.provider}")
    lines += [f"note: {warning}" for warning in plan.warnings]
    lines.append(f"plan: {plans.sha256(plan)[:SHOWN_CHARS]}, to be approved before {plan.expires_at}")
    return lines


def _parts(plan: Plan) -> str:
    amounts = {name: value for name, value in plan.worst_case.items() if isinstance(value, int | float) and value}
    largest_first = sorted(amounts, key=lambda name: -amounts[name])
    shown = [f"{name.removesuffix('_usd').replace('_', ' ')} {format_usd(amounts[name])}" for name in largest_first]
    return f" ({', '.join(shown)})" if shown else ""


def _after_the_deadline(plan: Plan) -> list[str]:
    if plan.outputs_ephemeral:
        return ["then: destroyed; outputs that were not pulled by then are gone"]
    kept = f"then: stopped; its disk is kept {format_duration(plan.storage_grace_s)}"
    cost = f" at {format_usd(plan.storage_usd_hr)}/h" if plan.storage_usd_hr else ""
    return [f"{kept}{cost}, then destroyed whether collected or not"]


def _what_reaches_it(plan: Plan) -> str:
    reaches = []
    if plan.inputs is not None:
        files, size = plan.inputs.get("files"), plan.inputs.get("bytes", 0)
        count = len(files) if isinstance(files, list) else int(plan.inputs.get("count", 0))
        reaches.append(f"{counted(count, 'file')}, {format_bytes(size)}")
    reaches += [f"secret {name}" for name in plan.secrets]
    return ", ".join(reaches) or "no files yet, no secrets"
