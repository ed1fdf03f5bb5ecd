"""`gpu spend`: what was spent, from the project's own records, and beside it what the providers say."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table
from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import ModeForbids, UnexpectedReply, UsageError
from gpu_skills.units import counted, format_duration, format_usd, json_number, usd

if TYPE_CHECKING:
    from gpu_skills.lifecycle.books.charged import Row

GROUPS = ("provider", "model", "status", "day", "kind")
MAX_MACHINES = 100
MAX_GAPS = 50
MAX_JOBS_LOOKED_AT = 5000
MAX_ROWS = 500
COMPARED_BACK = timedelta(days=29)  # when no --since says otherwise


@command(
    "spend",
    reads_only=True,
    example="gpu spend --by provider --since 2026-01-01",
    exits="0 done · 2 usage or no project · 3 refused · 5 a provider's charges cannot be read",
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
@click.option(
    "--reconcile",
    is_flag=True,
    help="Compare with what the providers charged, machine by machine; asks them. Shows only, unless --correct.",
)
@click.option("--correct", is_flag=True, help="With --reconcile: write a line for what they charged differently.")
def spend(
    context: Context, by: str, status: str | None, since: str | None, everything: bool, reconcile: bool, correct: bool
) -> Output:
    """What was spent, failed attempts included. Says so when a line cannot be read. Reads only.

    With --reconcile each machine's jobs and charges stand beside the provider's own, from --since or 29 days back.
    Charges of the last quarter of an hour may be missing there, so only machines that are gone longer are corrected.
    """
    if correct and not reconcile:
        raise UsageError("--correct goes with --reconcile", next_step="gpu spend --reconcile --correct")
    if correct and not context.may_write:
        raise ModeForbids(command="gpu spend --correct", mode=context.mode, needed="operate")
    moment = None if since is None else _moment(since)
    compared = _compared(context, moment, correct=correct) if reconcile else None
    everything = everything or reconcile
    result = context.ledger.spend(by=by, status=status, since=since, include_charges=everything)
    document = result.to_dict()
    document |= {"attempts": [], "attempts_left_out": 0, "machines": [], "machines_left_out": 0, "reconcile": compared}
    unbooked = _without_traffic(context, moment)
    document |= {"traffic_not_booked": unbooked[:MAX_MACHINES], "traffic_not_booked_machines": len(unbooked)}
    if everything:
        _add_failed_creates(context, document, moment)
        machines = _duties(context, moment)
        document["machines"] = machines[:MAX_MACHINES]
        document["machines_left_out"] = max(0, len(machines) - MAX_MACHINES)
    return Output(document, _text(document, everything=everything))


def _without_traffic(context: Context, since: datetime | None) -> list[str]:
    from gpu_skills.lifecycle.books import charged

    return [machine.id for machine in charged.without_traffic(context.project, since)]


def _moment(since: str) -> datetime:
    try:
        return parse_timestamp(since if len(since) > 10 else f"{since}T00:00:00Z")
    except (ValueError, OverflowError) as exc:
        allowed = "a day like 2026-11-30 or a time with its zone like 2026-11-30T18:08:00Z"
        raise UsageError(f"since {since!r} is not {allowed}", next_step="gpu spend --help") from exc


def _compared(context: Context, since: datetime | None, *, correct: bool) -> dict[str, Any]:
    """Our books beside those of every provider that we have a key of."""
    from gpu_skills.cli.reconcile import known_providers
    from gpu_skills.lifecycle import machines
    from gpu_skills.lifecycle.books import charged

    op, now = context.operator, context.clock.now()
    since = since or now - COMPARED_BACK
    rows: list[Row] = []
    corrected = 0
    for provider in known_providers(context):
        found = charged.compare(op, provider, since, now)
        if correct:
            due = [machines.find(op.project, row.machine_id) for row in found if row.machine_id and not row.is_even]
            for machine in {m.id: m for m in due if m is not None}.values():
                with contextlib.suppress(UnexpectedReply):  # its row says what cannot be true
                    corrected += len(charged.correct(op, machine))
            found = charged.compare(op, provider, since, now) if corrected else found
        rows += found
    own = [row for row in rows if row.machine_id is not None]
    others = [row for row in rows if row.machine_id is None]
    return {
        "since": timestamp(since),
        "until": timestamp(now),
        "rows": [_row(row) for row in own[-MAX_ROWS:]],
        "rows_left_out": max(0, len(own) - MAX_ROWS),
        "ours_usd": json_number(sum((row.ours_usd for row in own), usd(0))),
        "theirs_usd": json_number(sum((row.theirs_usd for row in own), usd(0))),
        "not_on_record": {
            "instances": len({(row.provider, row.instance_id) for row in others}),
            "theirs_usd": json_number(sum((row.theirs_usd for row in others), usd(0))),
        },
        "corrected": corrected,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "provider": row.provider,
        "machine_id": row.machine_id,
        "instance_id": row.instance_id,
        "kind": row.kind,
        "ours_usd": json_number(row.ours_usd),
        "theirs_usd": json_number(row.theirs_usd),
        "difference_usd": json_number(row.difference_usd),
        "is_even": row.is_even,
        "is_complete": row.is_complete,
        "doubt": row.doubt,
        "ours": {name: json_number(amount) for name, amount in sorted(row.ours.items())},
        "theirs": {name: json_number(amount) for name, amount in sorted(row.theirs.items())},
    }


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
    for machine, start, end in _running(context, now_s):
        if since is None or end >= since.timestamp():
            times.setdefault(machine, {}).setdefault("idle", []).append((start, end))
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


def _running(context: Context, now_s: float) -> list[tuple[str, float, float]]:
    """When rented machines ran, booked or not yet: what is neither job nor set-up of it was idle."""
    from gpu_skills.lifecycle import machines
    from gpu_skills.lifecycle.books import accounting

    return [
        (
            machine.id,
            stretch.started_at.timestamp(),
            now_s if stretch.ended_at is None else stretch.ended_at.timestamp(),
        )
        for machine in machines.all_machines(context.project)
        if machine.is_rented and machine.instance_id is not None
        for stretch in accounting.life_of(context.operator, machine)
        if stretch.kind == "running"
    ]


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
    if document["reconcile"] is not None:
        lines += _compared_lines(document["reconcile"])
    if count := document["traffic_not_booked_machines"]:
        lines.append(
            f"traffic of {counted(count, 'machine')} bills by the GB and is not in here yet; a quarter of an hour "
            "after its end: gpu spend --reconcile --correct"
        )
    if document["incomplete"]:
        where = "; ".join(f"{name} at byte {', '.join(map(str, at))}" for name, at in document["bad_offsets"].items())
        lines.append(f"incomplete: {document['bad_lines']} lines cannot be read ({where}): gpu ledger verify")
    return "\n".join(lines)


def _compared_lines(compared: dict[str, Any]) -> list[str]:
    rows = [
        [
            row["machine_id"],
            row["provider"],
            row["kind"],
            format_usd(row["ours_usd"]),
            format_usd(row["theirs_usd"]),
            f"{row['difference_usd']:+.4f}",
            f"not booked: {row['doubt']}" if row["doubt"] else "" if row["is_complete"] else "not complete yet",
        ]
        for row in compared["rows"]
    ]
    lines = [table(rows, ["MACHINE", "PROVIDER", "KIND", "OURS", "THEIRS", "DIFFERENCE", ""])] if rows else []
    sums = f"ours {format_usd(compared['ours_usd'])}, theirs {format_usd(compared['theirs_usd'])}"
    lines.append(f"since {compared['since']}: {sums}")
    others = compared["not_on_record"]
    if others["instances"]:
        what = counted(others["instances"], "instance")
        lines.append(f"{what} not on record here were charged {format_usd(others['theirs_usd'])}")
    if compared["corrected"]:
        lines.append(f"{counted(compared['corrected'], 'correction')} written to charges.jsonl")
    elif any(row["is_complete"] and not row["is_even"] and not row["doubt"] for row in compared["rows"]):
        lines.append("write the difference down: gpu spend --reconcile --correct")
    return lines
