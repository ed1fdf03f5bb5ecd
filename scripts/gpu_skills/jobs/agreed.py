"""What was approved for a job with a machine of its own: the frozen plan, its limits, its job and its secrets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpu_skills.errors import (
    ApprovalInvalid,
    MissingCredential,
    UsageError,
)
from gpu_skills.jobs import staging
from gpu_skills.jobs.launch import Limits
from gpu_skills.jobs.spec import JobSpec, Progress
from gpu_skills.lifecycle.plans import plan
from gpu_skills.lifecycle.plans.plan import SHOWN_CHARS, Plan
from gpu_skills.state.project import Project
from gpu_skills.units import format_duration, parse_duration

if TYPE_CHECKING:
    pass

DEFAULT_HOLD_S = 1800.0


def open_plan(project: Project, name: str) -> tuple[str, Plan]:
    """(full name, plan) of a frozen plan for one job of this project."""
    full, found = plan.load(project, name)
    if full.startswith("draft-"):
        raise UsageError(f"{full} is a draft: it can be measured again, not run", next_step=f"gpu plan --freeze {full}")
    shown = full[:SHOWN_CHARS]
    if found.machine_class != "job" or not found.job or not found.inputs:
        raise UsageError(
            f"plan {shown} is not for a job with a machine of its own", next_step="gpu plan --freeze -- CMD"
        )
    if found.project_id != project.project_id:
        raise ApprovalInvalid(
            reason=f"plan {shown} is of project {found.project_id}, this is {project.project_id}", plan=shown
        )
    return full, found


def limits(
    found: Plan, *, hold_for: str | None = None, max_lease: str | None = None, job_timeout: str | None = None
) -> Limits:
    """The plan's limits, shortened by flags. UsageError for one that would be longer: that is another plan."""
    hold_s = DEFAULT_HOLD_S if found.hold_for_s is None else found.hold_for_s
    timeout_s = found.job_timeout_s or None
    if hold_for is not None:
        hold_s = _shortened(found, "--hold-for", hold_for, hold_s, may_be_zero=True)
    if job_timeout is not None:
        timeout_s = _shortened(found, "--job-timeout", job_timeout, timeout_s)
    lease_s = found.deadline_s
    if max_lease is not None:
        lease_s = _shortened(found, "--max-lease", max_lease, lease_s)
    return Limits(hold_s, lease_s, timeout_s)


def _shortened(found: Plan, flag: str, given: str, frozen_s: float | None, *, may_be_zero: bool = False) -> float:
    try:
        wanted_s = parse_duration(given)
    except ValueError as exc:
        raise UsageError(f"{flag} {given}: {exc}", next_step="gpu job run --help") from exc
    if wanted_s <= 0 and not may_be_zero:
        raise UsageError(f"{flag} {given}: must be more than 0", next_step="gpu job run --help")
    if frozen_s is not None and wanted_s > frozen_s:
        raise UsageError(
            f"{flag} {given} is longer than the plan's {format_duration(frozen_s)}; a flag can only shorten it",
            next_step=staging.plan_again(found, flag, given),
        )
    return wanted_s


def spec_of(project: Project, found: Plan, *, secret_env: Mapping[str, str], timeout_s: float | None) -> JobSpec:
    """The job as it was frozen. secret_env: values of the secrets it names; they are in no plan."""
    job = found.job or {}
    progress = job.get("progress")
    return JobSpec(
        run=job["run"],
        directory=staging.directory_of(project, job),
        setup=job.get("setup"),
        env=dict(job.get("env") or {}),
        secret_env=dict(secret_env),
        timeout_s=timeout_s,
        exclude=tuple(job.get("exclude") or ()),
        label=job.get("label"),
        expect=tuple(job.get("expect") or ()),
        progress=Progress(progress.get("unit"), progress.get("stall_s"), progress.get("on_stall") or "event")
        if progress
        else None,
        outputs_uri=job.get("outputs_uri"),
    )


def secret_values(
    found: Plan, given: Mapping[str, str], known: Callable[[str], str | None]
) -> tuple[dict[str, str], str | None]:
    """(values of the job's own secrets, HF token), for the names that were approved and no others.

    given: from `--env`. known: what environment and .env have. MissingCredential names one without a value.
    """
    named = [name for name in (found.job or {}).get("secret") or () if name != "HF_TOKEN"]
    if unknown := sorted(set(given) - set(found.secrets) - set(named)):
        raise UsageError(
            f"--env {', '.join(unknown)}: the plan names no such secret, and nobody agreed that it reaches the machine",
            next_step=staging.plan_again(found, "--env", unknown[0]),
        )
    values = {}
    for name in named:
        value = given.get(name, known(name))
        if value is None:
            raise MissingCredential(provider=name, next_step=f"export {name}=…, then run it again")
        values[name] = value
    wants_hf = "HF_TOKEN" in found.secrets
    return values, (given.get("HF_TOKEN") or known("HF_TOKEN")) if wants_hf else None
