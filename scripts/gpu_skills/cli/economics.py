"""`gpu economics …`: keep an idle machine, stop it or destroy it; one machine or several; which idle timeout."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import click

from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table
from gpu_skills.units import format_duration, format_usd

_HERE = "gpu_skills.cli.economics:"
economics = LazyGroup(
    "economics",
    help="Arithmetic about machine time. Flags carry their units; all of it reads only and costs nothing.",
    lazy={
        "keepalive": (_HERE + "keepalive", "Keep, stop or destroy an idle machine: the cost of each."),
        "batch": (_HERE + "batch", "N jobs on one machine, several, or interruptible ones: time and cost."),
        "idle-timeout": (_HERE + "idle_timeout", "The idle timeout that past gaps would have wanted."),
    },
)
_EXITS = "0 done · 2 a number is missing or out of range"


def _machine_options(function: Callable[..., Output]) -> Callable[..., Output]:
    """What a machine costs, the same flags on every command."""
    for option in reversed(
        [
            click.option("--rate-usd-hr", required=True, metavar="USD", help="All-in rate of the running machine."),
            click.option(
                "--startup-min",
                metavar="MIN",
                help="From nothing to ready; without it what past set-ups of this project took.",
            ),
            click.option("--storage-usd-hr", metavar="USD", help="What it bills while stopped; with --restart-min."),
            click.option("--restart-min", metavar="MIN", help="From stopped to ready; with --storage-usd-hr."),
            click.option(
                "--gone-probability", default="0", show_default=True, metavar="0..1",
                help="How often the GPU of a stopped machine is given to others.",
            ),
        ]
    ):  # fmt: skip
        function = option(function)
    return function


@command(
    "keepalive",
    reads_only=True,
    example="gpu economics keepalive --rate-usd-hr 0.70 --startup-min 12 --gap-min 8",
    exits=_EXITS,
)
@_machine_options
@click.option("--gap-min", metavar="MIN", help="All gaps between the jobs together, where that is known.")
@click.option("--jobs", type=click.IntRange(1, 1_000_000), default=2, show_default=True, help="With a known gap.")
@click.option("--job-min", default="0", metavar="MIN", help="How long one job runs: for the total of a known gap.")
@click.option("--idle-min", default="0", metavar="MIN", help="How long it has been idle: where the gap is not known.")
@click.option(
    "--rule",
    type=click.Choice(["known-gap", "unknown-gap", "history"]),
    help="Else: known-gap with --gap-min, history where the ledger has gaps, unknown-gap.",
)
def keepalive(
    context: Context, gap_min: str | None, jobs: int, job_min: str, idle_min: str, rule: str | None, **flags: Any
) -> Output:
    """Keep, stop or destroy a machine until the next job: the cost of each, the break-even gap and the rule used.

    With a known gap it compares. Without one it never costs more than twice the best possible, or, where the project
    has gaps to learn from, it takes what would have been cheapest on those. Reads only.
    """
    from gpu_skills.economics import keepalive as rules
    from gpu_skills.errors import UsageError

    machine, startup = _machine(context, **flags)
    past = [] if rule == "unknown-gap" or gap_min is not None else _past_gaps(context)
    rule = rule or ("known-gap" if gap_min is not None else "history" if past else "unknown-gap")
    if (rule == "known-gap") != (gap_min is not None):
        raise UsageError("--rule known-gap and --gap-min belong together", next_step="gpu economics keepalive --help")
    if rule == "history" and not past:
        raise UsageError(
            "the ledger has no gaps between jobs yet", next_step="gpu economics keepalive with --rule unknown-gap"
        )
    found: Any
    if rule == "known-gap":
        found = rules.known_gap(
            machine, jobs=jobs, gap_s=_seconds("--gap-min", gap_min), job_s=_seconds("--job-min", job_min)
        )
    elif rule == "history":
        found = rules.from_history(machine, past, idle_s=_seconds("--idle-min", idle_min))
    else:
        found = rules.unknown_gap(machine, idle_s=_seconds("--idle-min", idle_min))
    document = {**found.to_record(), "startup": startup}
    rows = [
        [
            o.action,
            "-" if o.cost_usd is None else format_usd(o.cost_usd),
            f"{format_usd(o.idle_usd_hr)}/h",
            format_usd(o.restart_usd),
            format_duration(float(o.wait_s)),
        ]
        for o in found.options
    ]
    lines = [found.reason, "", table(rows, ["ACTION", "COST", "IDLE", "RESTART", "WAIT"])]
    break_even = found.break_even_gap_s
    lines.append("break-even gap: " + ("none" if break_even is None else format_duration(float(break_even))))
    return Output(document, "\n".join([*lines, _startup_text(startup)]))


@command(
    "batch",
    reads_only=True,
    example="gpu economics batch --rate-usd-hr 0.70 --startup-min 12 --jobs 40 --job-min 6 --machines 4",
    exits=_EXITS,
)
@_machine_options
@click.option("--jobs", type=click.IntRange(1, 1_000_000), required=True, help="How many.")
@click.option("--job-min", required=True, metavar="MIN", help="How long one runs.")
@click.option("--gap-min", default="0", metavar="MIN", help="From the end of one to the arrival of the next.")
@click.option("--machines", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="At once.")
@click.option("--interruptible-rate-usd-hr", metavar="USD", help="Rate of a machine that can be taken away.")
@click.option("--interrupted-every-min", metavar="MIN", help="How long such a machine stays, on average.")
@click.option("--checkpoint-min", metavar="MIN", help="Work between two checkpoints; without it a job begins again.")
def batch(
    context: Context,
    jobs: int,
    job_min: str,
    gap_min: str,
    machines: int,
    interruptible_rate_usd_hr: str | None,
    interrupted_every_min: str | None,
    checkpoint_min: str | None,
    **flags: Any,
) -> Output:
    """Time and cost of N jobs on one machine kept, stopped or destroyed between, several, interruptible. Reads only."""
    from gpu_skills.economics.batch import Interruptible, plan_batch
    from gpu_skills.errors import UsageError

    if (interruptible_rate_usd_hr is None) != (interrupted_every_min is None):
        raise UsageError(
            "--interruptible-rate-usd-hr and --interrupted-every-min belong together",
            next_step="gpu economics batch --help",
        )
    offer = None
    if interruptible_rate_usd_hr is not None and interrupted_every_min is not None:
        checkpoint = None if checkpoint_min is None else _seconds("--checkpoint-min", checkpoint_min)
        offer = Interruptible.of(
            interruptible_rate_usd_hr,
            _seconds("--interrupted-every-min", interrupted_every_min),
            checkpoint_s=checkpoint,
        )
    machine, startup = _machine(context, **flags)
    plan = plan_batch(
        machine,
        jobs=jobs,
        job_s=_seconds("--job-min", job_min),
        gap_s=_seconds("--gap-min", gap_min),
        machines=machines,
        interruptible=offer,
    )
    rows = [
        [
            option.strategy.replace("_", " "),
            str(option.machines),
            format_duration(float(option.elapsed_s)),
            format_usd(option.cost_usd),
            format_usd(option.cost_per_job_usd),
        ]
        for option in plan.options
    ]
    lines = [plan.reason, "", table(rows, ["STRATEGY", "MACHINES", "TIME", "COST", "PER JOB"])]
    lines += [f"not {strategy.replace('_', ' ')}: {why}" for strategy, why in plan.left_out]
    return Output({**plan.to_record(), "startup": startup}, "\n".join([*lines, _startup_text(startup)]))


@command(
    "idle-timeout",
    reads_only=True,
    example="gpu economics idle-timeout --rate-usd-hr 0.70 --startup-min 12 --gap-min 3 --gap-min 45",
    exits=_EXITS,
)
@_machine_options
@click.option("--action", type=click.Choice(["destroy", "stop"]), default="destroy", show_default=True)
@click.option("--usual-min", default="30", show_default=True, metavar="MIN", help="A timeout to compare with.")
@click.option("--gap-min", "gaps", multiple=True, metavar="MIN", help="A gap; without any the ledger's are taken.")
def idle_timeout(context: Context, action: str, usual_min: str, gaps: tuple[str, ...], **flags: Any) -> Output:
    """The idle timeout that past gaps would have wanted, and what 30 min and break-even cost more. Reads only.

    Without --gap-min: the gaps between the jobs of this project's ledger.
    """
    from gpu_skills.economics.idle_timeout import cheapest_timeout

    machine, startup = _machine(context, **flags)
    known = [_seconds("--gap-min", gap) for gap in gaps] if gaps else _past_gaps(context)
    found = cheapest_timeout(machine, known, action=action, usual_timeout_s=_seconds("--usual-min", usual_min))  # type: ignore[arg-type]
    rows = [["cheapest", format_duration(float(found.timeout_s)), format_usd(found.cost_usd), format_usd(0)]]
    rows += [
        [
            other.name,
            "never" if other.timeout_s is None else format_duration(float(other.timeout_s)),
            format_usd(other.cost_usd),
            format_usd(other.regret_usd),
        ]
        for other in found.compared
    ]
    lines = [found.reason, "", table(rows, ["TIMEOUT", "AFTER", "COST", "REGRET"]), _startup_text(startup)]
    document = {**found.to_record(), "gaps_from": "given" if gaps else "ledger", "startup": startup}
    return Output(document, "\n".join(lines))


# what the flags and the project's history say ------------------------------------------------------------------------


def _machine(
    context: Context,
    *,
    rate_usd_hr: str,
    startup_min: str | None,
    storage_usd_hr: str | None,
    restart_min: str | None,
    gone_probability: str,
) -> tuple[Any, dict[str, Any]]:
    """The machine, and where its start-up time comes from."""
    from gpu_skills.economics.machine_cost import MachineCost, typical_startup_s
    from gpu_skills.errors import UsageError
    from gpu_skills.units import json_number

    if startup_min is not None:
        startup_s, origin, count = _seconds("--startup-min", startup_min), "given", 0
    else:
        past = _past_startups_s(context)
        typical = typical_startup_s(past)
        if typical is None:
            raise UsageError(
                "no set-up is on record here to know the start-up time from", next_step="add --startup-min MIN"
            )
        startup_s, origin, count = typical, "history", len(past)
    machine = MachineCost.of(
        rate_usd_hr,
        startup_s,
        storage_usd_hr=storage_usd_hr,
        resume_s=None if restart_min is None else _seconds("--restart-min", restart_min),
        gone_probability=gone_probability,
    )
    return machine, {"startup_s": json_number(machine.startup_s), "from": origin, "setups": count}


def _past_startups_s(context: Context) -> list[float]:
    """How long set-ups took: as charged, else from a deployment's creation to its test generation. Newest 100."""
    from gpu_skills.errors import NoProject
    from gpu_skills.state import journal, registry
    from gpu_skills.units import MAX_DURATION_S

    try:
        charges = [
            record.get("duration_s")
            for _offset, _number, record in journal.scan(context.ledger.charges)
            if isinstance(record, dict) and record.get("kind") == "setup"
        ]
        if not charges:
            charges = [_until_tested(record) for record in registry.load(context.project, "deployments")]
    except NoProject:
        return []
    good = [s for s in charges if type(s) in (int, float) and 0 < s <= MAX_DURATION_S]
    return good[-100:]


def _until_tested(record: dict[str, Any]) -> float | None:
    from gpu_skills.clock import parse_timestamp

    test = record.get("test_generation") or {}
    try:
        if test.get("succeeded"):
            return (parse_timestamp(test["at"]) - parse_timestamp(record["created_at"])).total_seconds()
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    return None


def _past_gaps(context: Context) -> list[float]:
    """Idle seconds between jobs, provider by provider, from the newest 5,000 jobs of the ledger.

    By provider and not by machine: a machine that was destroyed after each job has no gap, the project has.
    """
    from gpu_skills.economics.idle_timeout import gaps_between
    from gpu_skills.errors import NoProject
    from gpu_skills.state.job_record import interval_s
    from gpu_skills.units import MAX_DURATION_S

    try:
        lines = context.ledger.jobs(limit=5000)
    except NoProject:
        return []
    by_provider: dict[str | None, list[tuple[float, float | None]]] = {}
    for line in lines:
        interval = interval_s(line)
        if interval is not None:
            by_provider.setdefault(line.get("provider"), []).append(interval)
    gaps = [gap for jobs in by_provider.values() for gap in gaps_between(jobs)]
    return [min(gap, MAX_DURATION_S) for gap in gaps if gap > 0]


def _seconds(flag: str, minutes: Any) -> Decimal:
    from gpu_skills.economics.machine_cost import number
    from gpu_skills.units import MAX_DURATION_S

    return number(flag, minutes, at_most=MAX_DURATION_S // 60) * 60


def _startup_text(startup: dict[str, Any]) -> str:
    known = "as given" if startup["from"] == "given" else f"the middle of {startup['setups']} past set-ups"
    return f"start-up: {format_duration(startup['startup_s'])}, {known}"
