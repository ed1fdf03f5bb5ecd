"""What a job looks like: the document of `--json` and the lines a person reads."""

from __future__ import annotations

from typing import Any

from gpu_skills.cli.context import Context
from gpu_skills.errors import one_line
from gpu_skills.units import format_bytes, format_duration, format_usd

SHOWN_OUTPUTS = 50
SHOWN_STALL_S = 30
ALL_DONE = "gpu job ls"  # nothing is left to do for this job


def job_document(
    context: Context, job_id: str, answer: dict[str, Any] | None = None, line: dict[str, Any] | None = None
) -> dict[str, Any]:
    from gpu_skills.jobs.records import JobFolder, is_collected

    line = line or context.ledger.latest(job_id) or {"id": job_id}
    document = line_document(context, line)
    folder = JobFolder(context.project, job_id)
    record = folder.read("job") or {}
    document["machine"] = record.get("machine_id")
    document["upload"] = {k: record.get("upload", {}).get(k) for k in ("files_sent", "bytes_sent", "bytes_total")}
    if answer is not None:
        document.update({k: answer.get(k) for k in ("state", "phase", "progress", "log_bytes")})
        document.update(exit_code=answer.get("exit_code"), reason=answer.get("reason"))
        if document["duration_s"] is None:
            document["duration_s"] = answer.get("duration_s")
        if document["cost_usd"] is None and answer.get("duration_s") is not None:
            document["cost_usd"] = round(float(record.get("rate_usd_hr") or 0) * answer["duration_s"] / 3600, 6)
    manifest = folder.read("manifest") or {"files": []}
    document["outputs"] = manifest["files"][:SHOWN_OUTPUTS]
    document["outputs_left_out"] = max(0, len(manifest["files"]) - SHOWN_OUTPUTS)
    document["collected"] = is_collected(context.project, job_id)
    collected = folder.read("collected")
    document["outputs_dir"] = collected["destination"] if collected else None
    document["next_step"] = _next_step(document)
    return document


def line_document(context: Context, line: dict[str, Any]) -> dict[str, Any]:
    from gpu_skills.jobs.records import JobFolder, display

    spec = (JobFolder(context.project, line["id"]).read("job") or {}).get("spec") or line.get("inputs") or {}
    return {
        "job": line["id"],
        "state": context.ledger.state_of(line),
        "phase": None,
        "exit_code": line.get("exit_code"),
        "reason": line.get("reason"),
        "error": line.get("error"),
        "title": display(spec) if isinstance(spec, dict) else "",
        "provider": line.get("provider"),
        "gpu": line.get("gpu"),
        "started_at": line.get("started_at"),
        "completed_at": line.get("completed_at"),
        "duration_s": line.get("duration_s"),
        "cost_usd": line.get("cost_usd"),
        "progress": None,
    }


def _next_step(document: dict[str, Any]) -> str:
    if document["state"] == "running":
        return f"gpu job logs -f {document['job']}"
    if document["outputs"] and not document["collected"]:
        return f"gpu job pull {document['job']}"
    if document["state"] == "succeeded":
        return ALL_DONE
    return f"gpu job logs --tail 50 {document['job']}"


def job_text(document: dict[str, Any]) -> str:
    lines = [summary(document)]
    if document["progress"]:
        lines.append(f"progress: {progress_text(document['progress'])}")
    for output in document["outputs"][:10]:
        lines.append(f"  {format_bytes(output['bytes']):>10}  {output['path']}")
    more = len(document["outputs"]) - 10 + document["outputs_left_out"]
    if more > 0:
        lines.append(f"  … and {more} more")
    if document["outputs_dir"]:
        lines.append(f"pulled to {document['outputs_dir']}" + ("" if document["collected"] else " (not final)"))
    for event in document.get("events", [])[-3:]:
        lines.append(f"event: {_event_text(event)}")
    if document["state"] != "succeeded" or document["next_step"] != ALL_DONE:
        lines.append(f"next: {document['next_step']}")
    return "\n".join(lines)


def progress_text(progress: dict[str, Any]) -> str:
    """`1,200 rows, 45.3/s`, or how long nothing has moved."""
    text = f"{_figure(progress['value'])} {one_line(progress['unit'], limit=200)}"
    if progress["stalled_s"] > SHOWN_STALL_S:
        return f"{text}, no more for {format_duration(progress['stalled_s'])}"
    rate = progress["rate_per_s"]
    return text if rate is None else f"{text}, {_figure(rate)}/s"


def _event_text(event: dict[str, Any]) -> str:
    """`no_progress (stalled_s 612, unit rows, value 3) at 2026-11-30T19:29:21Z`. A machine wrote it: anything goes."""
    shown = {k: f"{v:g}" if type(v) is float else str(v) for k, v in event.items() if k not in ("event", "ts")}
    details = " (" + ", ".join(f"{k} {v}" for k, v in shown.items()) + ")" if shown else ""
    return one_line(f"{event.get('event')}{details} at {event.get('ts')}", limit=300)


def _figure(value: float) -> str:
    """Whole numbers whole, others with three significant digits, both without an exponent."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):,.10f}".rstrip("0").rstrip(".")


def summary(document: dict[str, Any]) -> str:
    parts = [f"{document['job']} {document['state']}"]
    if document.get("phase"):
        parts[0] += f" ({document['phase']})"
    if document["exit_code"] is not None:
        parts.append(f"exit {document['exit_code']}")
    error = document.get("error") if document["state"] not in ("running", "succeeded") else None
    if document["reason"] and document["reason"] != "exit_code" and not error:  # an error begins with it
        parts.append(one_line(str(document["reason"]), limit=200))
    if document["duration_s"] is not None:
        parts.append(format_duration(document["duration_s"]))
    if document["cost_usd"] is not None:
        parts.append(format_usd(document["cost_usd"]))
    return ", ".join(parts) + (f": {error}" if error else "")
