"""`gpu policy …`: what may be spent, and what is left of it."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import click

from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table
from gpu_skills.errors import UsageError
from gpu_skills.units import format_usd, json_number

_HERE = "gpu_skills.cli.policy:"
policy = LazyGroup(
    "policy",
    help="The policy: ceilings, approval, fuses. /etc/gpu/policy.json, yours and the project's, by the strictest.",
    lazy={
        "show": (_HERE + "show", "Every value with the file it comes from; reads only."),
        "check": (_HERE + "check", "Would this be allowed, and what is left; reads only."),
    },
)


@command(
    "show",
    reads_only=True,
    example="gpu policy show",
    exits="0 done · 2 no project · 3 a policy file is missing or wrong",
)
def show(context: Context) -> Output:
    """Every value of the policy with the file it comes from, and what is left under each ceiling. Reads only."""
    import difflib

    found = context.policy
    known = [name.split(".")[0] for name in found.values()]
    unknown = [
        {"from": origin, "key": key, "nearest": next(iter(difflib.get_close_matches(key, known, n=1)), None)}
        for origin, key in found.unknown
    ]
    ceilings, books = _ceilings(context)
    document = {
        "files": [{"from": s.origin, "path": str(s.path), "exists": s.content is not None} for s in found.sources],
        "values": [
            {"name": name, "value": value, "from": list(found.origins[name])} for name, value in found.values().items()
        ],
        "ceilings": ceilings,
        **books,
        "unknown": unknown,
    }
    rows = [[v["name"], _shown(v["value"]), ", ".join(v["from"])] for v in document["values"]]
    text = table(rows, ["VALUE", "IS", "FROM"]) + "\n\n" + _ceilings_text(document)
    hints = [f"{u['key']} ({u['from']}) is no key of a policy{_meant(u['nearest'])}" for u in unknown]
    return Output(document, text, hints=hints)


@command(
    "check",
    reads_only=True,
    example="gpu policy check --cost 3.50 --rate 0.70 --deadline 5h --provider ssh",
    exits="0 allowed · 2 usage · 3 over a ceiling, or no policy",
)
@click.option("--cost", required=True, metavar="USD", help="The worst case of what would be spent.")
@click.option("--rate", required=True, metavar="USD_HR", help="All-in rate of the machine.")
@click.option("--deadline", metavar="TIME", help='How long it may bill, like "5h"; without it that is not asked.')
@click.option("--provider", metavar="P", help="Whether this provider is allowed, too.")
@click.option("--job", "job_id", metavar="JOB", help="The job it is for: what it cost and has reserved counts.")
def check(
    context: Context, cost: str, rate: str, deadline: str | None, provider: str | None, job_id: str | None
) -> Output:
    """Ask the question that every path to money asks: is this within all ceilings? Reads only, reserves nothing."""
    from gpu_skills.state import budget
    from gpu_skills.state import policy as policies
    from gpu_skills.state.job_record import JOB_ID

    if job_id is not None and not JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} is not a job id like J-000123", next_step="gpu job ls")
    cost_usd, rate_usd_hr = policies.amount("--cost", cost), policies.amount("--rate", rate)
    deadline_h = None if deadline is None else _hours(deadline)
    books = budget.books(context.project, context.ledger, context.clock, context.environ, job_id=job_id)
    found = policies.check(
        context.policy,
        cost_usd=cost_usd,
        rate_usd_hr=rate_usd_hr,
        deadline_h=deadline_h,
        provider=provider,
        spent=books.spent,
        reserved_usd=books.reserved_usd,
    )
    ceilings, facts = _ceilings(context, books)
    document = {
        "allowed": not found,
        "code": "over_ceiling" if found else None,
        "cost_usd": json_number(cost_usd),
        "rate_usd_hr": json_number(rate_usd_hr),
        "deadline_h": None if deadline_h is None else json_number(deadline_h),
        "provider": provider,
        "violations": [v.to_dict() for v in found],
        "ceilings": ceilings,
        **facts,
    }
    verdict = "\n".join(f"no: {v}" for v in found) if found else "allowed"
    text = f"{verdict}\n\n{_ceilings_text(document)}"
    return Output(document, text, exit_code=3 if found else 0)


def _ceilings(context: Context, books: Any = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each ceiling with what is left, and the facts it was counted from."""
    from gpu_skills.state import budget
    from gpu_skills.state.policy import what_is_left

    if books is None:
        books = budget.books(context.project, context.ledger, context.clock, context.environ)
    found = context.policy
    left = what_is_left(found, books.spent, books.reserved_usd)
    ceilings = [
        {
            "ceiling": name,
            "limit": _number(limit),
            "left": _number(left[name]),
            "from": list(found.origins[f"ceilings.{name}"]),
        }
        for name, limit in found.ceilings.items()
    ]
    return ceilings, {"spent": books.spent.to_record(), "reserved_usd": json_number(books.reserved_usd)}


def _ceilings_text(document: dict[str, Any]) -> str:
    rows = [[c["ceiling"], _limit(c["limit"]), _limit(c["left"]), ", ".join(c["from"])] for c in document["ceilings"]]
    spent, reserved = document["spent"], document["reserved_usd"]
    text = table(rows, ["CEILING", "LIMIT", "LEFT", "FROM"])
    text += f"\nspent today {format_usd(spent['day_usd'])}, this month {format_usd(spent['month_usd'])}"
    text += f", reserved {format_usd(reserved)}, machines {spent['machines']}"
    if spent["incomplete"]:
        text += "\nincomplete: a record cannot be read, so it may be more: gpu ledger verify"
    return text


def _hours(deadline: str) -> Decimal:
    from gpu_skills.units import parse_duration

    try:
        return Decimal(str(parse_duration(deadline))) / 3600
    except ValueError as exc:
        raise UsageError(f"--deadline: {exc}", next_step="gpu policy check --help") from exc


def _number(value: Decimal | None) -> int | float | None:
    return None if value is None else json_number(value)


def _limit(value: Any) -> str:
    return "no limit" if value is None else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(v if isinstance(v, str) else json.dumps(v) for v in value) or "none"
    return "none" if value is None else str(value)


def _meant(nearest: str | None) -> str:
    return f": did you mean {nearest}?" if nearest else ""
