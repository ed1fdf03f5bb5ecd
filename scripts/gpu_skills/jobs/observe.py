"""What became of the jobs on a machine: ask it, and write the one terminal ledger line of each that ended.

Whichever command sees the end first writes it; the ledger takes only one per id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.economics.sharing import shared_seconds
from gpu_skills.errors import EXIT_CANCELLED, EXIT_TIMEOUT, ProtocolError, StateBusy, StateError, one_line
from gpu_skills.jobs import durable
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle.connect import Link
from gpu_skills.remote.tree import Entry, parse_manifest
from gpu_skills.state import journal, quick_check, strict_json
from gpu_skills.state.job_record import JOB_ID
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.units import json_number, usd

ARTIFACTS_IN_A_LINE = 50
MAX_EVENT_BYTES = 8 << 20  # of one answer; a runner sends 4 MiB at most
CLOCK_SKEW_S = 120.0  # between this computer and the machine
SKIPPED_KEPT = 200  # of one manifest
MAX_JOBS_THERE = 100_000
ASKED_AT_ONCE = 100  # about 150 answers fit into one
_EXITS = {"timeout": EXIT_TIMEOUT, "cancelled": EXIT_CANCELLED}
_KEPT_OF_AN_END = ("state", "exit_code", "reason", "message", "started_epoch_s", "duration_s", "outputs")


def open_jobs(ledger: Ledger, machine_id: str | None = None) -> list[dict[str, Any]]:
    """Ledger lines of jobs without an end, oldest first."""
    return [
        line for line in ledger.open_jobs() if machine_id is None or line.get("machine_id", machine_id) == machine_id
    ]


Notify = Callable[..., None]


def settle(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    link: Link,
    *,
    write: bool = True,
    notify: Notify = lambda event, subject, **facts: None,
) -> dict[str, dict[str, Any]]:
    """Ask the machine about every job of ours that has no end yet; write the ends. Returns its answers by job id.

    write: False in Audit, where only the answers are wanted. notify: of an operator; it is told of ends on machines
    that are rented.
    """
    lines = [line for line in open_jobs(ledger, link.machine.id) if not JobFolder(project, line["id"]).is_request]
    if not lines:
        return {}
    told = _ask(project, link, [line["id"] for line in lines])
    now = clock.now()
    answers = {line["id"]: _believed(told[line["id"]], line, now) for line in lines}
    for line in lines if write else ():
        answer = answers.get(line["id"])
        if answer is None:
            continue
        if answer["state"] == "unknown":
            _never_started(project, ledger, clock, line)
        elif answer["state"] != "running":
            if _write_end(project, ledger, link, line, answer, answers) and link.machine.is_rented:
                tell_end(notify, ledger.latest(line["id"]) or line)
    return answers


def jobs_there(project: Project, link: Link) -> dict[str, dict[str, Any]]:
    """Every job of the project that the machine itself knows of, by id: also those that no record here names."""
    found: dict[str, dict[str, Any]] = {}
    after = ""
    while True:
        asked = {"project": project.project_id, **({"after": after} if after else {})}
        reply = link.session.call("jobs", asked)
        told = {s["job"]: s for s in reply["jobs"] if JOB_ID.fullmatch(s["job"]) and s["job"] > after}
        found |= told
        if not reply["left_out"]:
            return {job: status for job, status in found.items() if status["state"] != "unknown"}
        if not told or len(found) > MAX_JOBS_THERE:
            raise ProtocolError(host=link.host, reason="its list of jobs has no end")
        after = max(told)


def tell_end(notify: Notify, line: dict[str, Any]) -> None:
    """Say that a job ended, by its last line of the ledger."""
    facts = {name: line.get(name) for name in ("duration_s", "cost_usd", "gpu", "error")}
    if Ledger.state_of(line) == "succeeded":
        notify("job_done", line["id"], **facts)
    elif line.get("reason") not in ("user", "cancelled"):  # who cancelled it knows
        notify("job_failed", line["id"], state=Ledger.state_of(line), reason=line.get("reason"), **facts)


def outputs_now(project: Project, link: Link, job: str) -> dict[str, Any]:
    """The machine's manifest of a job's outputs as it is now, recorded in jobs/<id>/manifest.json."""
    entries, summary = fetch_manifest(project, link, job)
    return record_manifest(JobFolder(project, job), entries, summary)


def record_manifest(folder: JobFolder, entries: list[Entry], summary: dict[str, Any]) -> dict[str, Any]:
    """Write down what the machine listed."""
    record = {
        "final": bool(summary.get("final")),
        "files": [{"path": e.display, "bytes": e.size, "sha256": e.sha256} for e in entries if not e.is_dir],
        "skipped": skipped_outputs(summary),
    }
    folder.write("manifest", record)
    return record


def skipped_outputs(summary: dict[str, Any]) -> list[dict[str, str]]:
    """What the machine said it leaves out, and why; no more of it than a record may hold."""
    told = [s for s in summary["skipped"] if isinstance(s, dict)]
    return [
        {"path": s["path"], "why": s["why"]}
        for s in told
        if isinstance(s.get("path"), str) and isinstance(s.get("why"), str)
    ][:SKIPPED_KEPT]


def fetch_manifest(project: Project, link: Link, job: str):
    chunks: list[bytes] = []
    summary = link.session.call(
        "manifest",
        {"project": project.project_id, "job": job},
        on_data=lambda header, data: chunks.append(data),
        timeout_s=600,
    )
    return parse_manifest(chunks, host=link.host, job=job), summary


def sync_events(project: Project, link: Link, job: str) -> list[dict[str, Any]]:
    """Append what the machine recorded since last time to jobs/<id>/events.jsonl, but for lines that are no record.

    Returns what is new.
    """
    folder = JobFolder(project, job)
    chunks: list[bytes] = []
    answer = link.session.call(
        "events",
        {"project": project.project_id, "job": job, "offset": _events_seen_bytes(folder)},
        on_data=lambda header, data: chunks.append(data),
        max_data_bytes=MAX_EVENT_BYTES,
    )
    events = []
    for raw in b"".join(chunks).split(b"\n"):
        try:
            event = strict_json.loads(raw)
        except strict_json.Fault:
            continue
        if quick_check.fits(event, "jobs/events"):
            events.append(event)
    if events:
        journal.append(folder.events, events)
        folder.write("events_cursor", {"next": answer["next"]})
    return events


def _events_seen_bytes(folder: JobFolder) -> int:
    """Where the last reading ended; from the start again when what says so was damaged."""
    try:
        seen = folder.read("events_cursor")
    except StateError:
        return 0
    return int(seen["next"]) if seen else 0


def _ask(project: Project, link: Link, jobs: list[str]) -> dict[str, dict[str, Any]]:
    answers: dict[str, dict[str, Any]] = {}
    left = list(jobs)
    while left:
        reply = link.session.call("status", {"project": project.project_id, "jobs": left[:ASKED_AT_ONCE]})
        answered = {status["job"]: status for status in reply["jobs"] if status["job"] in left}
        if not answered:
            raise ProtocolError(host=link.host, reason="it tells nothing of the jobs it was asked about")
        answers |= answered
        left = [job for job in left if job not in answered]
    return answers


def _believed(answer: dict[str, Any], line: dict[str, Any], now: datetime) -> dict[str, Any]:
    """An answer without what cannot be: a success with an exit code, a job that ran before it was started."""
    longest_s = max(0.0, (now - parse_timestamp(line["started_at"] or line["ts"])).total_seconds()) + CLOCK_SKEW_S
    if isinstance(answer.get("duration_s"), int | float) and answer["duration_s"] > longest_s:
        answer = {**answer, "duration_s": longest_s}
    if answer["state"] == "succeeded" and answer.get("exit_code") not in (0, None):
        answer = {**answer, "state": "failed", "reason": "exit_code"}
    return answer


def _write_end(
    project: Project,
    ledger: Ledger,
    link: Link,
    line: dict[str, Any],
    answer: dict[str, Any],
    answers: dict[str, dict[str, Any]],
) -> bool:
    """False when another command had written it already."""
    job = line["id"]
    folder = JobFolder(project, job)
    manifest = outputs_now(project, link, job)
    sync_events(project, link, job)
    duration_s = max(0.0, float(answer.get("duration_s") or 0.0))
    completed = parse_timestamp(line["started_at"] or line["ts"]) + timedelta(seconds=duration_s)
    homes = durable.addresses(folder)
    ending: dict[str, Any] = {
        "id": job,
        "status": answer["state"],
        "completed_at": timestamp(completed),
        "duration_s": round(duration_s, 3),
        "cost_usd": json_number(_cost_usd(project, ledger, link, job, answer, answers)),
        "artifacts": [
            {"name": f["path"], "uri": _uri(project, link, folder, f, homes)}
            for f in manifest["files"][:ARTIFACTS_IN_A_LINE]
        ],
        "exit_code": answer.get("exit_code"),
    }
    if answer["state"] != "succeeded":
        ending["error"] = reason_text(answer)
        ending["reason"] = answer.get("reason")
    if answer.get("reason") == "no_progress":
        ending["wasted_usd"] = json_number(_wasted_usd(answer, link.machine.rate_usd_hr, usd(ending["cost_usd"])))
    folder.write("ended", {k: answer.get(k) for k in _KEPT_OF_AN_END})
    return ledger.finish(ending)


def _wasted_usd(answer: dict[str, Any], rate_usd_hr: Decimal, cost_usd: Decimal) -> Decimal:
    """What was spent since the last progress of a job that was ended for having none; never more than it cost."""
    stalled_s = (answer.get("progress") or {}).get("stalled_s")
    if stalled_s is None:
        return usd(0)
    return min(cost_usd, usd(Decimal(str(stalled_s)) * rate_usd_hr / 3600))


def _uri(
    project: Project, link: Link, folder: JobFolder, file: dict[str, Any], homes: dict[str, tuple[str, str]]
) -> str:
    """Where an output is: in its durable home, else in the project once it was collected, on the machine until then."""
    path = file["path"]
    digest, uri = homes.get(path, (None, ""))
    if digest is not None and digest == file["sha256"]:
        return uri
    collected = folder.read("collected")
    if not (collected and collected.get("final")):
        return f"machine://{link.machine.id}/{folder.job}/{path}"
    place = Path(collected["destination"]) / path
    return str(place.relative_to(project.root)) if place.is_relative_to(project.root) else str(place)


def reason_text(answer: dict[str, Any]) -> str:
    reason = answer.get("reason") or answer["state"]
    message = answer.get("message")
    return one_line(f"{reason}: {message}" if message else str(reason))


def exit_code_of(answer: dict[str, Any]) -> int:
    """What `gpu job run` exits with: the job's own code, and never 0 for a job that did not succeed."""
    state = answer["state"]
    if state in _EXITS:
        return _EXITS[state]
    code = answer.get("exit_code")
    if state == "succeeded":
        return 0
    return code if isinstance(code, int) and 0 < code < 256 else 1


def _cost_usd(
    project: Project, ledger: Ledger, link: Link, job: str, answer: dict[str, Any], answers: dict[str, dict[str, Any]]
) -> Decimal:
    """This job's share of the machine's time at its rate, overlapping jobs sharing equally."""
    rate = link.machine.rate_usd_hr
    mine = _interval(answer)
    if not rate or mine is None:
        return usd(0)
    others = []
    for other in ledger.jobs_on(link.machine.id):
        if other == job:
            continue
        theirs = _interval(answers.get(other) or JobFolder(project, other).read("ended") or {})
        if theirs is not None:
            others.append(theirs)
    return usd(Decimal(str(shared_seconds(*mine, others))) * rate / 3600)


def _interval(answer: dict[str, Any]) -> tuple[float, float] | None:
    """When a job ran, by the machine's clock; one that still runs has no end."""
    start = answer.get("started_epoch_s")
    if not isinstance(start, int | float):
        return None
    if answer["state"] == "running":
        return start, math.inf
    return start, start + float(answer.get("duration_s") or 0)


def _never_started(project: Project, ledger: Ledger, clock: Clock, line: dict[str, Any]) -> None:
    """The machine does not know it. While its submitter still holds the lock it may yet; afterwards it never will."""
    folder = JobFolder(project, line["id"])
    try:
        with folder.submitting(timeout_s=0):
            if folder.read("accepted") is None:
                reason, message = "never_started", "the submitting command ended before the machine had the job"
            else:
                reason, message = "machine_forgot", "the machine has no trace of it any more"
            ledger.finish(
                {
                    "id": line["id"],
                    "status": "lost",
                    "completed_at": timestamp(clock.now()),
                    "duration_s": 0,
                    "cost_usd": 0,
                    "artifacts": [],
                    "error": f"{reason}: {message}",
                    "reason": reason,
                }
            )
    except StateBusy:
        return
