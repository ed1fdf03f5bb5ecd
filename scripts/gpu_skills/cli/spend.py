"""`gpu spend`: what was spent, from the project's own records."""

from __future__ import annotations

from typing import Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table
from gpu_skills.units import counted, format_usd

GROUPS = ("provider", "model", "status", "day", "kind")


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
    help="Also machine time that no job carries (charges.jsonl), and creates that failed.",
)
def spend(context: Context, by: str, status: str | None, since: str | None, everything: bool) -> Output:
    """What was spent, failed attempts included. Says so when a line cannot be read. Reads only."""
    result = context.ledger.spend(by=by, status=status, since=since, include_charges=everything)
    document = result.to_dict()
    document |= {"attempts": [], "attempts_left_out": 0}
    if everything:
        _add_failed_creates(context, document, since)
    return Output(document, _text(document, everything=everything))


def _add_failed_creates(context: Context, document: dict[str, Any], since: str | None) -> None:
    from gpu_skills.clock import parse_timestamp
    from gpu_skills.state import budget

    moment = None if since is None else parse_timestamp(since if len(since) > 10 else f"{since}T00:00:00Z")
    found = budget.failed_creates(context.project, since=moment)
    document["attempts"] = [attempt.to_record() for attempt in found.attempts]
    document["attempts_left_out"] = found.count - len(found.attempts)
    if found.bad_lines:
        document["incomplete"] = True
        document["bad_lines"] += found.bad_lines
        document["bad_offsets"] = {**document["bad_offsets"], "journal.jsonl": list(found.bad_offsets)}


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
    if document["incomplete"]:
        where = "; ".join(f"{name} at byte {', '.join(map(str, at))}" for name, at in document["bad_offsets"].items())
        lines.append(f"incomplete: {document['bad_lines']} lines cannot be read ({where}): gpu ledger verify")
    return "\n".join(lines)
