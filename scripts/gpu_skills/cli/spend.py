"""`gpu spend`: what was spent, from the project's own records."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table
from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.units import counted, format_duration, format_usd

GROUPS = ("provider", "model", "status", "day", "kind")
MAX_MACHINES = 100
MAX_GAPS = 50
MAX_JOBS_LOOKED_AT = 5000


@command(
    "spend",
    reads_only=True,
    example="gpu spend --by provider --since 2026-01-01",
    exits="0 done · 2 usage or no project",
)
@click.option("--by", type=click.Choice(GROUPS), default="provider", show_default=True, help="Group the sum.")
@click.option("--status", metavar="WORD", help="Only jobs that ended so (a job state or a ledger word).")
@click.option("--since", metavar="DATE", help="Only what ended at or after this RFC 3339 date or time.")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also machine time that no job carries (charges.jsonl), idle gaps, and creates that failed.",
)
def spend(context: Context, by: str, status: str | None, since: str | None, everything: bool) -> Output:
    """What was spent, failed attempts included. Says so when a line cannot be read. Reads only."""
    result = context.ledger.spend(by=by, status=status, since=since, include_charges=everything)
    document = result.to_dict()
    document |= {"attempts": [], "attempts_left_out": 0, "machines": [], "machines_left_out": 0}
    if everything:
        moment = None if since is None else parse_timestamp(since if len(since) > 10 else f"{since}T00:00:00Z")
        _add_failed_creates(context, document, moment)
        machines = _duties(context, moment)
        document["machines"] = machines[:MAX_MACHINES]
        document["machines_left_out"] = max(0, len(machines) - MAX_MACHINES)
    return Output(document, _text(document, everything=everything))


def _add_failed_creates(context: Context, document: dict[str, Any], since: datetime | None) -> None:
    from gpu_skills.state import budget

    found = budget.failed_creates(context.project, since=since)
    document["attempts"] = [attempt.to_record() for attempt in found.attempts]
    document["attempts_left_out"] = found.count - len(found.attempts)
    if found.bad_lines:
        document["incomplete"] = True
        document["bad_lines"] += found.bad_lines
        document["bad_offsets"] = {**document["bad_offsets"], "journal.jsonl": list(found.bad_offsets)}


def _duties(context: Context, since: datetime | None) -> list[dict[str, Any]]:
    """The machines whose time is in charges.jsonl: how much of it was work, and the long idle gaps. Lowest duty first.

    From the newest jobs; of time that ended before `since` nothing counts.
    """
    from gpu_skills.economics.duty import duty
    from gpu_skills.state import journal
    from gpu_skills.state.job_record import interval_s

    now_s = context.clock.now().timestamp()
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    charges = [record for _o, _n, record in journal.scan(context.ledger.charges) if isinstance(record, dict)]
    for record in [*charges, *context.ledger.jobs(limit=MAX_JOBS_LOOKED_AT)]:
        use = _USES.get(str(record.get("kind", "job")))
        machine, interval = record.get("machine_id"), interval_s(record)
        if use is None or interval is None or not isinstance(machine, str):
            continue
        start, end = interval[0], now_s if interval[1] is None else interval[1]
        if since is None or end >= since.timestamp():
            times.setdefault(machine, {}).setdefault(use, []).append((start, end))
    rows = []
    for machine, of in times.items():
        found = duty(of.get("job", []), of.get("setup", []), of.get("idle", []))
        if found.pct is None or not of.keys() - {"job"}:
            continue
        gaps = [
            {"started_at": timestamp(datetime.fromtimestamp(start, UTC)), "duration_s": round(end - start, 3)}
            for start, end in found.long_gaps
        ]
        rows.append(
            {
                "machine_id": machine,
                "billed_s": round(found.billed_s, 3),
                "busy_s": round(found.busy_s, 3),
                "duty_pct": found.pct,
                "idle_gaps": gaps[-MAX_GAPS:],
                "idle_gaps_left_out": max(0, len(gaps) - MAX_GAPS),
            }
        )
    return sorted(rows, key=lambda row: (row["duty_pct"], row["machine_id"]))


_USES = {"job": "job", "setup": "setup", "setup_failed": "setup", "idle": "idle"}  # by kind; the others are no time


def _duty_text(machine: dict[str, Any]) -> str:
    text = (
        f"{machine['machine_id']}: {format_duration(machine['billed_s'])} billed, {format_duration(machine['busy_s'])}"
        f" of work, duty {machine['duty_pct']:g} %"
    )
    gaps = [f"{g['started_at']} {format_duration(g['duration_s'])}" for g in machine["idle_gaps"][-5:]]
    more = len(machine["idle_gaps"]) - len(gaps) + machine["idle_gaps_left_out"]
    if gaps:
        text += f"; idle since {', '.join(gaps)}" + (f" and {more} earlier" if more else "")
    return text


def _text(document: dict[str, Any], *, everything: bool) -> str:
    rows = [[row["key"] or "-", str(row["jobs"]), format_usd(row["cost_usd"])] for row in document["rows"]]
    lines = [table(rows, [document["by"].upper(), "LINES" if everything else "JOBS", "COST"])] if rows else []
    total = f"total: {format_usd(document['total_usd'])} over {counted(document['jobs'], 'job')}"
    lines.append(total + (f" and {counted(document['charges'], 'charge')}" if everything else ""))
    count = len(document["attempts"]) + document["attempts_left_out"]
    if count:
        lines.append(f"{counted(count, 'create')} without a machine, $0:")
        shown = [
            [a["ts"], a["provider"] or "-", a["result"] or "no outcome", a["reason"] or "-"]
            for a in document["attempts"]
        ]
        lines.append(table(shown[-10:], ["WHEN", "PROVIDER", "RESULT", "REASON"]))
    lines += [_duty_text(machine) for machine in document["machines"][:10]]
    if document["incomplete"]:
        where = "; ".join(f"{name} at byte {', '.join(map(str, at))}" for name, at in document["bad_offsets"].items())
        lines.append(f"incomplete: {document['bad_lines']} lines cannot be read ({where}): gpu ledger verify")
    return "\n".join(lines)
