"""What `gpu doctor` looks at. Reads only; every finding says what to do about it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import GpuError
from gpu_skills.jobs.records import is_collected, uncollected
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.state import registry
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.policy import Policy
from gpu_skills.state.project import Project
from gpu_skills.units import format_bytes, format_duration, format_usd

MIN_FREE_BYTES = 2_000_000_000
MAX_CHECKED_LEDGER_BYTES = 50_000_000


@dataclass(frozen=True)
class Finding:
    """verdict: `ok`, `note` (worth knowing) or `problem` (to mend)."""

    what: str
    verdict: str
    text: str
    next_step: str | None = None


def computer(environ: Mapping[str, str]) -> list[Finding]:
    found = [Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))]
    for program, why in (("ssh", "needed for provider ssh"), ("rsync", "large transfers fall back to one stream")):
        where = shutil.which(program, path=environ.get("PATH"))
        if where:
            found.append(Finding(program, "ok", where))
        else:
            found.append(Finding(program, "note", f"not installed: {why}", f"install {program}"))
    return found


def records(project: Project) -> list[Finding]:
    found = [Finding("project", "ok", f"{project.project_id} in {project.root}")]
    free = shutil.disk_usage(project.state).free
    if free < MIN_FREE_BYTES:
        found.append(Finding("disk", "problem", f"only {format_bytes(free)} free for outputs", "free some space"))
    for name in ("project", "policy", *registry.KINDS):
        path = project.state / f"{name}.json"
        if not path.exists():
            found.append(Finding(path.name, "problem", "missing", "gpu init"))
    for problem in registry.validate(project):
        found.append(Finding(problem.file, "problem", str(problem), f"edit {problem.file}"))
    ignored = project.root / ".gitignore"
    if (project.root / ".git").exists() and ".pi/" not in (
        ignored.read_text("utf-8", "replace") if ignored.exists() else ""
    ):
        found.append(Finding(".gitignore", "problem", "does not name .pi/", "gpu init"))
    return found


def ledger_reads(ledger: Ledger) -> list[Finding]:
    if not ledger.path.exists():
        return []
    size = ledger.path.stat().st_size
    if size > MAX_CHECKED_LEDGER_BYTES:
        return [Finding("jobs.jsonl", "note", f"{format_bytes(size)}, too long to check here", "gpu ledger verify")]
    checked = ledger.verify()
    if checked.problem_count:
        text = f"{checked.problem_count} problems in {checked.lines} lines"
        return [Finding("jobs.jsonl", "problem", text, "gpu ledger verify")]
    return [Finding("jobs.jsonl", "ok", f"{checked.lines} lines")]


def settings(load: Callable[[], Any], policy: Callable[[], Any]) -> list[Finding]:
    found: list[Finding] = []
    for name, read in (("gpu.yaml", load), ("policy.json", policy)):
        try:
            read()
        except GpuError as exc:
            found.append(Finding(name, "problem", exc.message, exc.next_step))
        else:
            found.append(Finding(name, "ok", "reads"))
    return found


def idle_deployments(project: Project, ledger: Ledger, policy: Policy, now: datetime) -> list[Finding]:
    """Ready deployments without a job for longer than the policy's `idle_shutdown_after_min`, with what they burn.

    A proposal only: nothing is stopped for it.
    """
    limit_min = policy.idle_shutdown_after_min
    if limit_min is None:
        return []
    try:
        ready = [d for d in registry.load(project, "deployments") if d["status"] == "ready"]
    except GpuError:  # reported by `records` already
        return []
    busy = {line.get("deployment_id") for line in ledger.open_jobs()}
    lines = ledger.jobs() if ready else []
    found: list[Finding] = []
    for deployment in ready:
        name = deployment["id"]
        if name in busy:
            continue
        since = _last_used(deployment, [line for line in lines if line.get("deployment_id") == name])
        if since is None:
            continue
        idle_s = (now - since).total_seconds()
        if idle_s <= float(limit_min) * 60:
            continue
        rate = Decimal(str(deployment.get("cost_hr") or 0))
        burnt = rate * Decimal(str(idle_s)) / 3600
        text = (
            f"ready without a job for {format_duration(idle_s)} (limit {limit_min:g} min), burns {format_usd(rate)}/h, "
            f"{format_usd(burnt)} so far"
        )
        step = f"give it back unless a batch is about to use it; see gpu deployment show {name}"
        found.append(Finding(name, "note", text, step))
    return found


def _last_used(deployment: Mapping[str, Any], lines: list[dict[str, Any]]) -> datetime | None:
    """The latest moment it is known to have been of use: a job's end, the record's own word, its proof, its making."""
    proof = deployment.get("test_generation") or {}
    moments = [line.get("completed_at") or line.get("ts") for line in lines]
    moments += [deployment.get("last_used_at"), proof.get("at"), deployment.get("created_at")]
    return max((parse_timestamp(m) for m in moments if isinstance(m, str)), default=None)


def machines_answer(project: Project, connect: Callable[[Machine], Link]) -> list[Finding]:
    found: list[Finding] = []
    try:
        known = machines.all_machines(project)
    except GpuError:  # reported by `records` already
        return []
    for machine in known:
        if machine.status in ("destroyed", "lost", "stopped"):
            continue
        try:
            link = connect(machine)
            session = link.session.call("session", {"project": project.project_id})["session"]
        except GpuError as exc:
            found.append(Finding(machine.id, "problem", exc.message, exc.next_step))
            continue
        if session is None or session.get("expired_at") is not None:
            why = (session or {}).get("expired_why") or "none open"
            found.append(Finding(machine.id, "note", f"{machine.host} answers; session ended ({why})", "gpu setup"))
        else:
            found.append(Finding(machine.id, "ok", f"{machine.host} answers, session {session.get('id')}"))
    return found


def jobs_home(project: Project, ledger: Ledger) -> list[Finding]:
    found: list[Finding] = []
    open_ids = {line["id"] for line in ledger.open_jobs()}
    for line in ledger.jobs(limit=200):
        job = line["id"]
        try:
            if job in open_ids or is_collected(project, job):
                continue
            files_left = uncollected(project, job)
        except GpuError as exc:
            found.append(Finding(job, "problem", exc.message, exc.next_step))
            continue
        if files_left:
            size = format_bytes(sum(f["bytes"] for f in files_left))
            found.append(
                Finding(job, "note", f"{len(files_left)} outputs ({size}) not collected", f"gpu job pull {job}")
            )
    return found
