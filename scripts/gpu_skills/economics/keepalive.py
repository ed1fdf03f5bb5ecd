"""Keep an idle machine, stop it or destroy it: which costs least until the next job, and by which rule.

Three rules, by what is known of the gap:

known gap     compare. Keeping costs the gap, destroying one start-up for each of the N − 1 gaps.
unknown gap   leave each state when staying in it has cost as much as the next cheaper one would have from the start.
              Whatever the gap turns out to be, that is at most twice what one who knew it would have paid.
history       the timeout that would have been cheapest on the gaps there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from gpu_skills.economics.idle_timeout import break_even_timeout_s, cheapest_timeout, replay_usd
from gpu_skills.economics.machine_cost import HOUR_S, Action, MachineCost, Number, count, number
from gpu_skills.units import MAX_DURATION_S, format_duration, format_usd, json_number

Rule = Literal["known_gap", "unknown_gap", "history"]


@dataclass(frozen=True)
class Option:
    """One of the choices. restart_usd and wait_s: of a single restart, until the machine is ready again.

    cost_usd: with a known gap what it costs between the first job and the last, with history the mean per gap, with an
    unknown gap None: it is what the gap will tell.
    """

    action: Action
    idle_usd_hr: Decimal
    restart_usd: Decimal
    wait_s: Decimal
    cost_usd: Decimal | None

    def to_record(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "idle_usd_hr": json_number(self.idle_usd_hr),
            "restart_usd": json_number(self.restart_usd),
            "wait_s": json_number(self.wait_s),
            "cost_usd": None if self.cost_usd is None else json_number(self.cost_usd),
        }


@dataclass(frozen=True)
class KnownGap:
    """gap_s: the sum of the N − 1 gaps. break_even_gap_s: the sum below which keeping beats destroying.

    total_usd: start-up, all jobs and what the chosen action costs between them.
    """

    action: Action
    jobs: int
    gap_s: Decimal
    total_runtime_s: Decimal
    startup_usd: Decimal
    break_even_gap_s: Decimal
    options: tuple[Option, ...]
    total_usd: Decimal
    reason: str
    rule: Rule = "known_gap"

    def to_record(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "action": self.action,
            "jobs": self.jobs,
            "gap_s": json_number(self.gap_s),
            "total_runtime_s": json_number(self.total_runtime_s),
            "startup_usd": json_number(self.startup_usd),
            "break_even_gap_s": json_number(self.break_even_gap_s),
            "options": [option.to_record() for option in self.options],
            "total_usd": json_number(self.total_usd),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Step:
    """What to do with a machine that has been idle for after_s."""

    after_s: Decimal
    action: Action

    def to_record(self) -> dict[str, Any]:
        return {"after_s": json_number(self.after_s), "action": self.action}


@dataclass(frozen=True)
class Waiting:
    """What to do while nobody knows when the next job comes. action: now, after idle_s; schedule: from the start.

    break_even_gap_s: the gap at which keeping through and destroying at once cost the same; None on a free machine.
    at_most_times_best: the promise of the unknown-gap rule; None for history, which promises nothing.
    gaps: how many past gaps the advice rests on; cost_per_gap_usd: what the schedule costs on them, on average.
    """

    rule: Rule
    action: Action
    idle_s: Decimal
    schedule: tuple[Step, ...]
    break_even_gap_s: Decimal | None
    at_most_times_best: int | None
    gaps: int
    cost_per_gap_usd: Decimal | None
    options: tuple[Option, ...]
    reason: str

    def to_record(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "action": self.action,
            "idle_s": json_number(self.idle_s),
            "schedule": [step.to_record() for step in self.schedule],
            "break_even_gap_s": None if self.break_even_gap_s is None else json_number(self.break_even_gap_s),
            "at_most_times_best": self.at_most_times_best,
            "gaps": self.gaps,
            "cost_per_gap_usd": None if self.cost_per_gap_usd is None else json_number(self.cost_per_gap_usd),
            "options": [option.to_record() for option in self.options],
            "reason": self.reason,
        }


def known_gap(machine: MachineCost, *, jobs: int, gap_s: Number, job_s: Number = 0) -> KnownGap:
    """Compare when it is known how long the machine will idle between the first of N jobs and the last.

    gap_s: all gaps together. Equal costs go to the choice that leaves less running, so the last job means destroy.
    Keeping and destroying both scale with the rate: the break-even gap is (N − 1) × start-up at every price.
    """
    restarts = count("jobs", jobs) - 1
    gap = number("gap_s", gap_s, at_most=MAX_DURATION_S)
    runtime = jobs * number("job_s", job_s, at_most=MAX_DURATION_S)
    break_even = restarts * machine.startup_s

    costs: dict[Action, Decimal] = {}
    for action in machine.actions():
        costs[action] = machine.idle_usd_hr(action) * gap / HOUR_S + machine.usd(restarts * machine.restart_s(action))
    if machine.is_free:
        chosen: Action = "keep"
        reason = "a machine that costs nothing is kept: the next job does not wait"
    else:
        chosen = min(
            machine.actions(), key=lambda action: machine.idle_rate(action) * gap + restarts * machine.restart_s(action)
        )
        reason = (
            f"{chosen}: the gaps are {format_duration(float(gap))}; keeping beats destroying below "
            f"{format_duration(float(break_even))} ({restarts} × start-up, at any price); " + _prices(costs)
        )
    return KnownGap(
        action=chosen,
        jobs=jobs,
        gap_s=gap,
        total_runtime_s=runtime,
        startup_usd=machine.usd(machine.startup_s),
        break_even_gap_s=break_even,
        options=_options(machine, costs),
        total_usd=machine.usd(machine.startup_s + runtime) + costs[chosen],
        reason=reason,
    )


def unknown_gap(machine: MachineCost, *, idle_s: Number = 0) -> Waiting:
    """What to do, and when, without any idea of the next job: never more than twice the best possible.

    The schedule follows the cheapest choice for a gap that would end right now. Up to any moment the idle time then has
    cost exactly what the best choice for that gap costs, and the restart that is still to come costs at most as much.
    """
    idle = number("idle_s", idle_s, at_most=MAX_DURATION_S)
    schedule = _lower_envelope(machine)
    action = _now(schedule, idle)
    if machine.is_free:
        reason = "a machine that costs nothing is kept: the next job does not wait"
    else:
        reason = f"{action} after {format_duration(float(idle))} idle: " + ", then ".join(
            f"{step.action} from {format_duration(float(step.after_s))}" for step in schedule
        )
    return Waiting(
        rule="unknown_gap",
        action=action,
        idle_s=idle,
        schedule=schedule,
        break_even_gap_s=break_even_timeout_s(machine),
        at_most_times_best=2,
        gaps=0,
        cost_per_gap_usd=None,
        options=_options(machine, dict.fromkeys(machine.actions())),
        reason=reason,
    )


def from_history(machine: MachineCost, gaps_s: Sequence[Number], *, idle_s: Number = 0) -> Waiting:
    """What to do when the next gap may be like the past ones. Without past ones it is the unknown-gap rule."""
    if not gaps_s or machine.is_free:
        return unknown_gap(machine, idle_s=idle_s)
    idle = number("idle_s", idle_s, at_most=MAX_DURATION_S)
    advices = [cheapest_timeout(machine, gaps_s, action=leave) for leave in machine.actions() if leave != "keep"]
    best = min(advices, key=lambda advice: advice.cost_usd)
    schedule = (Step(best.timeout_s, best.action),)
    if best.timeout_s > 0:
        schedule = (Step(Decimal(0), "keep"), *schedule)

    costs: dict[Action, Decimal | None] = {}
    for action in machine.actions():
        total = replay_usd(machine, gaps_s, None) if action == "keep" else replay_usd(machine, gaps_s, 0, action)
        costs[action] = total / len(gaps_s)
    return Waiting(
        rule="history",
        action=_now(schedule, idle),
        idle_s=idle,
        schedule=schedule,
        break_even_gap_s=break_even_timeout_s(machine),
        at_most_times_best=None,
        gaps=len(gaps_s),
        cost_per_gap_usd=best.cost_usd / len(gaps_s),
        options=_options(machine, costs),
        reason=best.reason,
    )


def schedule_usd(machine: MachineCost, schedule: Sequence[Step], gap_s: Number) -> Decimal:
    """What following a schedule costs when the next job comes after gap_s, its restart included.

    A step whose time is the very end of the gap is not taken: the job is there.
    """
    gap = number("gap_s", gap_s, at_most=MAX_DURATION_S)
    idle_usd_s, state = Decimal(0), None
    ends = [step.after_s for step in schedule[1:]]
    for step, end in zip(schedule, [*ends, gap], strict=True):
        if step.after_s < gap:
            idle_usd_s += machine.idle_usd_hr(step.action) * (min(end, gap) - step.after_s)
            state = step.action
    restart = machine.restart_s(state) if state is not None else Decimal(0)
    return idle_usd_s / HOUR_S + machine.usd(restart)


def _lower_envelope(machine: MachineCost) -> tuple[Step, ...]:
    """Each choice is a line over the gap: its restart, rising with its idle rate. Walk along the lowest."""
    if machine.is_free:
        return (Step(Decimal(0), "keep"),)
    lines = {action: (machine.restart_s(action), machine.idle_rate(action)) for action in machine.actions()}
    current = min(lines, key=lambda action: lines[action])
    steps = [Step(Decimal(0), current)]
    while True:
        restart, rate = lines[current]
        crossings = [
            ((lines[other][0] - restart) / (rate - lines[other][1]), lines[other][1], other)
            for other in lines
            if lines[other][1] < rate
        ]
        if not crossings:
            return tuple(steps)
        after, _, current = min(crossings)
        steps.append(Step(after, current))


def _now(schedule: Sequence[Step], idle: Decimal) -> Action:
    return [step.action for step in schedule if step.after_s <= idle][-1]


def _options(machine: MachineCost, costs: dict[Action, Any]) -> tuple[Option, ...]:
    """In the order people say them: keep, stop, destroy."""
    return tuple(
        Option(
            action=action,
            idle_usd_hr=machine.idle_usd_hr(action),
            restart_usd=machine.usd(machine.restart_s(action)),
            wait_s=machine.restart_s(action),
            cost_usd=costs[action],
        )
        for action in reversed(machine.actions())
    )


def _prices(costs: dict[Action, Decimal]) -> str:
    return ", ".join(f"{action} {format_usd(cost)}" for action, cost in reversed(costs.items()))
