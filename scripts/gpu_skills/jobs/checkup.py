"""What `gpu doctor` looks at. Reads only; every finding says what to do about it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_skills.errors import GpuError
from gpu_skills.jobs.records import is_collected, uncollected
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.state import files
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.units import format_bytes

MIN_FREE_BYTES = 2_000_000_000


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
    for name in ("project", "providers", "machines", "deployments", "models", "workflows", "policy"):
        path = project.state / f"{name}.json"
        try:
            files.read_json(path)
        except FileNotFoundError:
            found.append(Finding(path.name, "problem", "missing", "gpu init"))
        except GpuError as exc:
            found.append(Finding(path.name, "problem", exc.message, exc.next_step))
    ignored = project.root / ".gitignore"
    if (project.root / ".git").exists() and ".pi/" not in (
        ignored.read_text("utf-8", "replace") if ignored.exists() else ""
    ):
        found.append(Finding(".gitignore", "problem", "does not name .pi/", "gpu init"))
    return found


def settings(load: Callable[[], Any]) -> list[Finding]:
    try:
        config = load()
    except GpuError as exc:
        return [Finding("gpu.yaml", "problem", exc.message, exc.next_step)]
    return [Finding("gpu.yaml", "ok", f"provider {config.provider}")]


def machines_answer(project: Project, connect: Callable[[Machine], Link]) -> list[Finding]:
    found: list[Finding] = []
    for machine in machines.all_machines(project):
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
        if job in open_ids or is_collected(project, job):
            continue
        files_left = uncollected(project, job)
        if files_left:
            size = format_bytes(sum(f["bytes"] for f in files_left))
            found.append(
                Finding(job, "note", f"{len(files_left)} outputs ({size}) not collected", f"gpu job pull {job}")
            )
    return found
