"""`gpu job diagnose`: why a job failed, by which lines, what helps, and whether it may be tried again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.job import job_line, settle
from gpu_skills.cli.output import Output
from gpu_skills.errors import GpuError
from gpu_skills.units import json_number

TAIL_LINES = 15
SHOWN_ALSO = 3


@command(
    "diagnose",
    reads_only=True,
    example="gpu job diagnose --json",
    exits="0 it may be tried once more, or nothing failed · 1 no such job · 3 it must not be tried again as it is",
)
@click.argument("job_id", metavar="[JOB]", required=False)
def diagnose(context: Context, job_id: str | None) -> Output:
    """Say why a job failed, by which lines, and what helps. Reads only; asks its machine while that is there.

    The class decides whether it may be tried once more; after one failed retry there is a report for the user instead.
    """
    from gpu_skills.jobs.diagnose import collect
    from gpu_skills.jobs.diagnose.attempts import failed_alike
    from gpu_skills.jobs.diagnose.classify import classify
    from gpu_skills.jobs.diagnose.verdict import FAILED_STATES, judge
    from gpu_skills.jobs.records import JobFolder

    line = job_line(context, job_id)
    job = line["id"]
    folder = JobFolder(context.project, job)
    link, seen, answer = _ask_machine(context, line)
    line = context.ledger.latest(job) or line
    log, no_log = _log(context, folder, link)
    state = context.ledger.state_of(line)
    has_failed = state in FAILED_STATES
    texts = [log.text(), collect.history(folder), collect.ending(line, answer), *seen.texts]
    secrets = _secrets(context)
    findings = classify(texts, secrets=secrets, has_failed=has_failed)
    attempts = None
    if has_failed:
        attempts = failed_alike(context.project, context.ledger, line, findings[0].failure.name)
    verdict = judge(job, state, findings, attempts, _retry_limit(context), seen.facts)
    document = {
        "job": job,
        "state": state,
        "exit_code": line.get("exit_code"),
        "class": verdict.cause.failure.name if verdict.cause else None,
        "title": verdict.cause.failure.title if verdict.cause else None,
        "may_retry": verdict.may_retry,
        "retry": verdict.retry,
        "why": verdict.why,
        "remedy": list(verdict.remedy),
        "report": verdict.report,
        "findings": [_finding(found) for found in findings],
        "attempts": None
        if attempts is None
        else {"failed": len(attempts.jobs), "jobs": list(attempts.jobs), "cost_usd": json_number(attempts.cost_usd)},
        "machine": {"id": seen.machine, "why_not": seen.why_not, "facts": seen.facts or None},
        "log": {
            "kept": log.kept,
            "bytes": log.size,
            "left_out_bytes": log.left_out_bytes,
            "tail": _tail(log, secrets),
        },
        "next_step": _next_step(job, verdict, state),
    }
    hints = [hint for hint in (no_log, seen.why_not and f"its machine was not asked: {seen.why_not}") if hint]
    return Output(document, _text(document), exit_code=3 if has_failed and not verdict.may_retry else 0, hints=hints)


def _ask_machine(context: Context, line: dict[str, Any]) -> tuple[Any, Any, dict[str, Any] | None]:
    """(link, look, answer about the job): what the machine says, or why it says nothing."""
    from gpu_skills.jobs import collect as collecting
    from gpu_skills.jobs.diagnose import collect
    from gpu_skills.jobs.records import JobFolder
    from gpu_skills.lifecycle import machines

    machine_id = line.get("machine_id")
    try:
        machine_id = (JobFolder(context.project, line["id"]).read("job") or {}).get("machine_id", machine_id)
        if machine_id is None:
            return None, collect.Look(None, why_not="no machine is on record for it"), None
        machine = machines.find(context.project, machine_id)
        if machine is not None:
            collecting.awake(machine, line["id"])
        link = context.machine_link(machine_id)
        answer = settle(context, link).get(line["id"])
        is_quiet = not any(other.get("machine_id") == machine_id for other in context.ledger.open_jobs())
        return link, collect.look(link, may_compute=is_quiet), answer
    except GpuError as exc:
        return None, collect.Look(machine_id, why_not=exc.message), None


def _log(context: Context, folder: Any, link: Any) -> tuple[Any, str | None]:
    """The log, kept here since the job was collected or read on its machine; and why there is none."""
    from gpu_skills.jobs.diagnose import collect

    if (kept := collect.local_log(folder)) is not None:
        return kept, None
    nothing = collect.Log("none", 0)
    if link is None:
        return nothing, "no log of it is kept here"
    try:
        return collect.machine_log(link, context.project.project_id, folder.job), None
    except GpuError as exc:
        return nothing, f"its log could not be read: {exc.message}"


def _retry_limit(context: Context) -> int:
    """Without a policy nothing may be tried again; looking needs none."""
    try:
        return context.policy.retry_limit
    except GpuError:
        return 0


def _secrets(context: Context) -> tuple[str, ...]:
    """What the job may have been given: by the environment, or by `.env`."""
    from gpu_skills import credentials
    from gpu_skills.redaction import secrets_of

    token = credentials.hf_token(context.project.root, context.environ)
    return (*secrets_of(context.environ), *([token] if token else []))


def _finding(found: Any) -> dict[str, Any]:
    return {
        "class": found.failure.name,
        "title": found.failure.title,
        "retry": found.failure.retry,
        "is_weak": found.is_weak,
        "matches": found.matches,
        "evidence": [asdict(evidence) for evidence in found.evidence],
        "details": found.details,
    }


def _tail(log: Any, secrets: tuple[str, ...]) -> list[str]:
    from gpu_skills.jobs.diagnose.classify import excerpt
    from gpu_skills.jobs.follow import last_lines

    return [excerpt(line, 0, 0, secrets) for line in last_lines((log.tail or log.head)[-(64 << 10) :], TAIL_LINES)]


def _next_step(job: str, verdict: Any, state: str) -> str:
    if state == "running":
        return f"gpu job logs -f {job}"
    if verdict.may_retry:
        return f"gpu policy check --cost USD --rate USD_HR --job {job}"
    return f"gpu job logs --tail 50 {job}"


def _text(document: dict[str, Any]) -> str:
    head = f"{document['job']} {document['state']}"
    if document["exit_code"] is not None:
        head += f", exit {document['exit_code']}"
    lines = [head + (f": {document['title']} ({document['class']})" if document["class"] else "")]
    first, *also = document["findings"] or [None]
    if first is not None:
        lines += [f"  {e['source']}:{e['line']}: {e['text']}" for e in first["evidence"]]
    for other in also[:SHOWN_ALSO]:
        evidence = other["evidence"][0]
        lines.append(f"also: {other['class']}, {evidence['source']}:{evidence['line']}: {evidence['text']}")
    if (machine := _machine_text(document["machine"]["facts"])) is not None:
        lines.append(f"machine: {machine}")
    lines += [f"  {number}. {step}" for number, step in enumerate(document["remedy"], 1)]
    lines.append(f"again: {document['why']}")
    if document["report"]:
        lines += ["", document["report"]]
    lines.append(f"next: {document['next_step']}")
    return "\n".join(lines)


def _machine_text(facts: dict[str, Any] | None) -> str | None:
    if facts is None:
        return None
    parts = [
        ", ".join(gpu["name"] for gpu in facts["gpus"]) or "no GPU",
        facts["driver"] and f"driver {facts['driver']}",
        facts["cuda"] and f"CUDA {facts['cuda']:g} at most",
        facts["torch"] and f"torch {facts['torch']}",
        facts["torch_cuda"] and f"built for CUDA {facts['torch_cuda']}",
        facts["python"] and f"Python {facts['python']}",
        facts["disk_free_gb"] is not None and f"{facts['disk_free_gb']:g} GB free",
        facts["shm_mib"] is not None and f"/dev/shm {facts['shm_mib']:g} MiB",
    ]
    return ", ".join(part for part in parts if part)
