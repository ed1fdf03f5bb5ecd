"""What the lifecycle has to know of jobs: what runs on a machine, what only it has, and how jobs end with it."""

from __future__ import annotations

import math
from datetime import datetime
from decimal import Decimal

from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.economics.sharing import shared_seconds
from gpu_skills.jobs import durable
from gpu_skills.jobs.observe import Notify, tell_end
from gpu_skills.jobs.records import START_REFUSED, JobFolder, is_collected
from gpu_skills.lifecycle import machines, states
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.units import json_number, usd

# Why a job ended that its machine, asked for it, did not have.
_NEVER_THERE = (START_REFUSED, "never_started")


def running_on(ledger: Ledger, machine_id: str) -> list[str]:
    """Jobs of a machine that have no end in the ledger, oldest first."""
    return [line["id"] for line in ledger.open_jobs() if line.get("machine_id") == machine_id]


def unverified_on(project: Project, ledger: Ledger, machine_id: str, *, now: datetime | None = None) -> list[str]:
    """Jobs that were sent to the machine and whose outputs, for all we know, are nowhere else.

    Sent, not accepted: an answer may be lost. A job whose last manifest names no file left nothing to lose; one without
    a manifest counts, nobody looked. now: what was read back from a durable home by then is no loss either.
    """
    found = []
    for job in jobs_of(project, ledger, machine_id):
        folder = JobFolder(project, job)
        if not may_be_there(ledger, folder) or is_collected(project, job) or folder.read("abandoned") is not None:
            continue
        if now is not None and durable.is_kept(project, job, now):
            continue
        manifest = folder.read("manifest")
        if manifest is None or manifest["files"] or not manifest.get("final"):
            found.append(job)
    return found


def jobs_of(project: Project, ledger: Ledger, machine_id: str) -> list[str]:
    """Ids of all jobs that ran on a machine, also under the record it had before it was believed gone."""
    ids: list[str] = []
    known: str | None = machine_id
    while known is not None and known not in ids:
        ids.append(known)
        machine = machines.find(project, known)
        before = machine.extra.get("was") if machine is not None else None
        known = before if isinstance(before, str) else None
    return [job for one in reversed(ids) for job in ledger.jobs_on(one)]


def may_be_there(ledger: Ledger, folder: JobFolder) -> bool:
    """Whether the machine may have it: it was sent, and the machine did not say that it has nothing of it."""
    if folder.read("accepted") is not None:
        return True
    line = ledger.latest(folder.job) or {}
    return folder.was_sent and line.get("reason") not in _NEVER_THERE


def end_jobs(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    machine_id: str,
    why: str,
    *,
    at: datetime | None = None,
    notify: Notify = lambda event, subject, **facts: None,
) -> list[str]:
    """Write the end of jobs whose machine is gone; their ids. at: when it went, now if nobody knows.

    Nobody can ask the machine any more: the time is from the start to then, at the machine's rate, shared by the jobs
    that overlapped.
    """
    machine = machines.find(project, machine_id)
    lines = [line for line in ledger.open_jobs() if line.get("machine_id") == machine_id]
    moment = (at or clock.now()).timestamp()
    spans = {line["id"]: (_start(line), moment) for line in lines}
    for line in lines:
        start, end = spans[line["id"]]
        duration_s = max(0.0, end - start)
        others = [span for job, span in spans.items() if job != line["id"]]
        others += [span for job in ledger.jobs_on(machine_id) if job not in spans and (span := _ended(project, job))]
        rate = machine.rate_usd_hr if machine is not None else Decimal(0)
        seconds = Decimal(str(shared_seconds(start, max(start, end), others))) if duration_s else Decimal(0)
        state = states.ENDS_OF_JOBS.get(why, "lost")
        is_ours = ledger.finish(
            {
                "id": line["id"],
                "status": state,
                "completed_at": timestamp(datetime.fromtimestamp(max(start, end), tz=clock.now().tzinfo)),
                "duration_s": round(duration_s, 3),
                "cost_usd": json_number(usd(seconds * rate / 3600)),
                "artifacts": [],
                "error": f"{why}: the machine is gone",
                "reason": why,
            }
        )
        if is_ours:
            tell_end(notify, ledger.latest(line["id"]) or line)
    return list(spans)


def _start(line: dict) -> float:
    return parse_timestamp(line.get("started_at") or line["ts"]).timestamp()


def _ended(project: Project, job: str) -> tuple[float, float] | None:
    told = JobFolder(project, job).read("ended") or {}
    start, duration_s = told.get("started_epoch_s"), told.get("duration_s")
    if not isinstance(start, int | float) or not isinstance(duration_s, int | float) or not math.isfinite(start):
        return None
    return start, start + duration_s
