"""`gpu spend`: what was spent, from the project's own records."""

from __future__ import annotations

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table
from gpu_skills.units import format_usd

GROUPS = ("provider", "model", "status", "day", "kind")


@command("spend", reads_only=True, example="gpu spend --by provider --since 2026-01-01")
@click.option("--by", type=click.Choice(GROUPS), default="provider", show_default=True, help="Group the sum.")
@click.option("--status", metavar="WORD", help="Only jobs that ended so (a job state or a ledger word).")
@click.option("--since", metavar="DATE", help="Only what ended at or after this RFC 3339 date or time.")
@click.option("--all", "everything", is_flag=True, help="Machine time that no job carries too (charges.jsonl).")
def spend(context: Context, by: str, status: str | None, since: str | None, everything: bool) -> Output:
    """What was spent, failed attempts included. Reads only."""
    result = context.ledger.spend(by=by, status=status, since=since, include_charges=everything)
    rows = [[r.key or "-", str(r.jobs), format_usd(r.cost_usd)] for r in result.rows]
    text = table(rows, [by.upper(), "JOBS", "COST"]) + "\n" if rows else ""
    text += f"total: {format_usd(result.total_usd)} over {result.jobs} jobs"
    if everything:
        text += f" and {result.charges} charges"
    if result.incomplete:
        text += f"\nincomplete: {result.bad_lines} lines cannot be read: {result.bad_offsets}"
    return Output(result.to_dict(), text)
