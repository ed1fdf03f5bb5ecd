"""`gpu job finish`: write down how a job ended that no machine of ours reports, such as one of a deployment."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output
from gpu_skills.errors import AlreadyEnded, JobNotFound, JobRunning, RemoteError, StateError, UsageError
from gpu_skills.units import format_duration, format_usd, json_number, parse_duration

WORDS = ("succeeded", "completed", "failed", "timeout", "cancelled", "lost")
_HELP = "gpu job finish --help"


@command(
    "finish",
    example="gpu job finish J-000001 --status succeeded --artifact clip.mp4=s3://bucket/clip.mp4",
    exits="0 recorded · 1 no such job · 2 usage · 3 it has ended already, or still runs on its machine",
)
@click.argument("job_id", metavar="JOB")
@click.option("--status", required=True, type=click.Choice(WORDS), help="A job state or a ledger word.")
@click.option("--artifact", "artifacts", multiple=True, metavar="NAME=URI", help="Something it left, and where.")
@click.option("--error", metavar="TEXT", help="Why it did not succeed, in one line.")
@click.option("--duration", metavar="TIME", help='How long it ran, like "4m10s"; else from its start until now.')
@click.option("--cost-usd", metavar="USD", help="What it cost; else its share of the machine at the recorded rate.")
def finish(
    context: Context,
    job_id: str,
    status: str,
    artifacts: tuple[str, ...],
    error: str | None,
    duration: str | None,
    cost_usd: str | None,
) -> Output:
    """Write the one line that says how a job ended. Writes only our records, no cost; a second end is refused.

    Jobs of `gpu job run` get theirs from the machine, which is asked first.
    """
    from gpu_skills.state import policy
    from gpu_skills.state.job_record import ledger_word

    word = ledger_word(status)
    if error is not None and word == "completed":
        raise UsageError("--error does not go with a job that succeeded", next_step=_HELP)
    left = [_artifact(text) for text in artifacts]
    cost = None if cost_usd is None else policy.amount("--cost-usd", cost_usd)
    ran_s = None if duration is None else _seconds(duration)

    hints = _machine_says(context, job_id)
    start = _open_line(context, job_id)
    began, ended = _interval(context, start, ran_s)
    ending: dict[str, Any] = {"id": job_id, "status": word, "completed_at": _stamp(ended), "artifacts": left}
    ending["duration_s"] = None if began is None else round((ended - began).total_seconds(), 3)
    if began is not None and start.get("started_at") is None:
        ending["started_at"] = _stamp(began)
    if cost is None and began is not None:
        cost = _share_usd(context, start, began, ended)
    ending["cost_usd"] = None if cost is None else json_number(cost)
    if word != "completed":
        ending["error"] = " ".join((error or "").split()) or ("no reason was given" if word == "failed" else word)
    if not context.ledger.finish(ending):  # somebody else was faster
        _open_line(context, job_id)
    if cost is None:
        hints.append("no rate is on record for it, so cost_usd stays null: next time --cost-usd USD")
    line = context.ledger.latest(job_id)
    assert line is not None
    document = {"job": job_id, "state": context.ledger.state_of(line), "line": line}
    return Output(document, _text(document), hints=hints)


def _machine_says(context: Context, job_id: str) -> list[str]:
    """Let a machine that has the job say how it is first. Returns a hint when it does not answer."""
    from gpu_skills.jobs import observe
    from gpu_skills.jobs.records import JobFolder
    from gpu_skills.state.job_record import JOB_ID

    if not JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} is not a job id like J-000123", next_step="gpu job ls")
    record = JobFolder(context.project, job_id).read("job")
    line = context.ledger.latest(job_id)
    if record is None or line is None or not context.ledger.is_open(line):
        return []
    try:
        link = context.machine_link(record["machine_id"])
        answers = observe.settle(context.project, context.ledger, context.clock, link)
    except (RemoteError, StateError) as exc:
        return [f"its machine was asked and did not say ({exc.message}): the end is recorded as given"]
    if job_id in answers and context.ledger.is_open(context.ledger.latest(job_id) or line):
        raise JobRunning(job=job_id)
    return []


def _open_line(context: Context, job_id: str) -> dict[str, Any]:
    line = context.ledger.latest(job_id)
    if line is None:
        raise JobNotFound(job=job_id)
    if not context.ledger.is_open(line):
        raise AlreadyEnded(job=job_id, state=context.ledger.state_of(line))
    return line


def _interval(context: Context, line: dict[str, Any], ran_s: float | None) -> tuple[datetime | None, datetime]:
    """When it began and ended. A clock that stands before the start is no measure: the time has to be given."""
    now = context.clock.now().replace(microsecond=0)
    ran = None if ran_s is None else timedelta(seconds=ran_s)
    began = _started(line)
    if began is None:
        return (None, now) if ran is None else (now - ran, now)
    if ran is not None and (now < began or began + ran <= now):
        return began, began + ran
    if now < began:
        raise UsageError(
            f"the clock says {_stamp(now)}, but {line['id']} started at {_stamp(began)}: it was set back meanwhile",
            next_step=f"gpu job finish {line['id']} with --duration TIME",
        )
    if ran is None:
        return began, now
    if line.get("started_at") is None:  # it ran before its first line was written
        return now - ran, now
    raise UsageError(
        f"{line['id']} started at {_stamp(began)} and it is {_stamp(now)}: it cannot have run {format_duration(ran_s)}",
        next_step="leave --duration out, or give a shorter one",
    )


def _started(line: dict[str, Any]) -> datetime | None:
    from gpu_skills.clock import parse_timestamp

    try:
        return parse_timestamp(line.get("started_at") or line["ts"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _share_usd(context: Context, line: dict[str, Any], began: datetime, ended: datetime) -> Decimal | None:
    """Its part of what the machine billed meanwhile: jobs that overlap share equally. None: no rate on record."""
    from gpu_skills.economics.sharing import shared_seconds
    from gpu_skills.units import usd

    rate = _rate_usd_hr(context, line)
    if rate is None:
        return None
    others = []
    for other in _neighbours(context, line):
        start = _started(other)
        if start is None or other["id"] == line["id"]:
            continue
        stop = None if context.ledger.is_open(other) else _stopped(other)
        others.append((start.timestamp(), float("inf") if stop is None else stop.timestamp()))
    return usd(Decimal(str(shared_seconds(began.timestamp(), ended.timestamp(), others))) * rate / 3600)


def _rate_usd_hr(context: Context, line: dict[str, Any]) -> Decimal | None:
    from gpu_skills.state import registry

    for kind, identity, key in (
        ("machines", line.get("machine_id"), "rate_usd_hr"),
        ("deployments", line.get("deployment_id"), "cost_hr"),
    ):
        for record in registry.load(context.project, kind) if identity else ():
            if record["id"] == identity and record.get(key) is not None:
                return Decimal(str(record[key]))
    return None


def _neighbours(context: Context, line: dict[str, Any]) -> list[dict[str, Any]]:
    """Last lines of the jobs on the same machine, or on the same deployment where no machine is named."""
    if machine := line.get("machine_id"):
        found = (context.ledger.latest(job) for job in context.ledger.jobs_on(machine))
        return [other for other in found if other is not None]
    deployment = line.get("deployment_id")
    if not deployment:
        return []
    recent = {other["id"]: other for other in [*context.ledger.jobs(limit=500), *context.ledger.open_jobs()]}
    return [other for other in recent.values() if other.get("deployment_id") == deployment]


def _stopped(line: dict[str, Any]) -> datetime | None:
    return _started({"started_at": line.get("completed_at"), "ts": line["ts"]})


def _artifact(text: str) -> dict[str, str]:
    name, separator, uri = text.partition("=")
    if not name or not separator or not uri:
        raise UsageError(f"--artifact {text!r} is not NAME=URI", next_step=_HELP)
    return {"name": name, "uri": uri}


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise UsageError(f"--duration: {exc}", next_step=_HELP) from exc


def _stamp(moment: datetime) -> str:
    from gpu_skills.clock import timestamp

    return timestamp(moment)


def _text(document: dict[str, Any]) -> str:
    line = document["line"]
    parts = [f"{document['job']} {document['state']}"]
    if line.get("duration_s") is not None:
        parts.append(format_duration(line["duration_s"]))
    parts.append("cost unknown" if line.get("cost_usd") is None else format_usd(line["cost_usd"]))
    return ", ".join(parts)
