"""N jobs, and the ways to get them done: time and cost of each."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from gpu_skills.economics.machine_cost import (
    HOUR_S,
    MAX_JOBS,
    MAX_RATE_USD_HR,
    Action,
    MachineCost,
    Number,
    count,
    number,
)
from gpu_skills.units import MAX_DURATION_S, format_duration, format_usd, json_number

Strategy = Literal["kept", "stopped_between", "destroyed_between", "parallel", "interruptible"]


@dataclass(frozen=True)
class Interruptible:
    """A cheaper machine that can be taken away. between_interruptions_s: the mean time it stays, as past ones did.

    checkpoint_s: how much work is between two checkpoints; None: an interrupted job begins again.
    """

    rate_usd_hr: Decimal
    between_interruptions_s: Decimal
    checkpoint_s: Decimal | None = None

    @classmethod
    def of(
        cls, rate_usd_hr: Number, between_interruptions_s: Number, *, checkpoint_s: Number | None = None
    ) -> Interruptible:
        return cls(
            number("interruptible rate_usd_hr", rate_usd_hr, at_most=MAX_RATE_USD_HR),
            number("between_interruptions_s", between_interruptions_s, at_most=MAX_DURATION_S, above_zero=True),
            None
            if checkpoint_s is None
            else number("checkpoint_s", checkpoint_s, at_most=MAX_DURATION_S, above_zero=True),
        )


@dataclass(frozen=True)
class BatchOption:
    """starts: start-ups and resumes that are paid for; expected ones, so not always whole, where machines go away."""

    strategy: Strategy
    machines: int
    jobs: int
    elapsed_s: Decimal
    cost_usd: Decimal
    starts: Decimal

    @property
    def cost_per_job_usd(self) -> Decimal:
        return self.cost_usd / self.jobs

    def to_record(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "machines": self.machines,
            "elapsed_s": json_number(self.elapsed_s),
            "cost_usd": json_number(self.cost_usd),
            "cost_per_job_usd": json_number(self.cost_per_job_usd),
            "starts": json_number(self.starts),
        }


@dataclass(frozen=True)
class BatchPlan:
    """left_out: strategies that cannot be had here, with the reason."""

    jobs: int
    job_s: Decimal
    gap_s: Decimal
    options: tuple[BatchOption, ...]
    left_out: tuple[tuple[Strategy, str], ...]

    @property
    def cheapest(self) -> BatchOption:
        return min(self.options, key=lambda option: (option.cost_usd, option.elapsed_s))

    @property
    def fastest(self) -> BatchOption:
        return min(self.options, key=lambda option: (option.elapsed_s, option.cost_usd))

    @property
    def reason(self) -> str:
        cheapest, fastest = self.cheapest, self.fastest
        if cheapest == fastest:
            return f"{_shown(cheapest)} is the cheapest and the fastest"
        return f"cheapest: {_shown(cheapest)}; fastest: {_shown(fastest)}"

    def to_record(self) -> dict[str, Any]:
        return {
            "jobs": self.jobs,
            "job_s": json_number(self.job_s),
            "gap_s": json_number(self.gap_s),
            "options": [option.to_record() for option in self.options],
            "left_out": [{"strategy": strategy, "reason": why} for strategy, why in self.left_out],
            "cheapest": self.cheapest.strategy,
            "fastest": self.fastest.strategy,
            "reason": self.reason,
        }


def plan_batch(
    machine: MachineCost,
    *,
    jobs: int,
    job_s: Number,
    gap_s: Number = 0,
    machines: int = 1,
    interruptible: Interruptible | None = None,
) -> BatchPlan:
    """Every way to run N jobs of job_s, each ending when its last job ends.

    gap_s: from the end of one job to the arrival of the next; 0 when all are there at once, which is what several
    machines need. A machine that was stopped or destroyed starts when the next job arrives, so that the job waits for
    it. Machines in parallel take the jobs from one queue and each goes when the queue is empty.
    """
    jobs = count("jobs", jobs)
    machines = count("machines", machines, at_most=MAX_JOBS)
    job = number("job_s", job_s, at_most=MAX_DURATION_S)
    gap = number("gap_s", gap_s, at_most=MAX_DURATION_S)

    options = [_one_machine(machine, "kept", "keep", jobs, job, gap)]
    left_out: list[tuple[Strategy, str]] = []
    if machine.can_stop:
        options.append(_one_machine(machine, "stopped_between", "stop", jobs, job, gap))
    else:
        left_out.append(("stopped_between", "this machine cannot be stopped, or its storage rate is not known"))
    options.append(_one_machine(machine, "destroyed_between", "destroy", jobs, job, gap))

    if machines == 1:
        left_out.append(("parallel", "one machine was asked for"))
    elif gap > 0:
        left_out.append(("parallel", "the jobs arrive one after the other, so more machines would only wait"))
    else:
        options.append(_parallel(machine, jobs, job, machines))

    if interruptible is None:
        left_out.append(("interruptible", "no interruptible rate is known"))
    else:
        option = _interruptible(machine, interruptible, jobs, job, gap)
        if isinstance(option, str):
            left_out.append(("interruptible", option))
        else:
            options.append(option)
    return BatchPlan(jobs, job, gap, tuple(options), tuple(left_out))


def _one_machine(
    machine: MachineCost, strategy: Strategy, between: Action, jobs: int, job: Decimal, gap: Decimal
) -> BatchOption:
    restarts = jobs - 1
    busy = machine.startup_s + jobs * job + restarts * machine.restart_s(between)
    return BatchOption(
        strategy=strategy,
        machines=1,
        jobs=jobs,
        elapsed_s=busy + restarts * gap,
        cost_usd=machine.usd(busy) + restarts * gap * machine.idle_usd_hr(between) / HOUR_S,
        starts=Decimal(1 if between == "keep" else jobs),
    )


def _parallel(machine: MachineCost, jobs: int, job: Decimal, machines: int) -> BatchOption:
    """No more machines than jobs; the busiest one has the rounded-up share and says when it is over."""
    used = min(machines, jobs)
    longest_share = -(-jobs // used)
    return BatchOption(
        strategy="parallel",
        machines=used,
        jobs=jobs,
        elapsed_s=machine.startup_s + longest_share * job,
        cost_usd=machine.usd(used * machine.startup_s + jobs * job),
        starts=Decimal(used),
    )


def _interruptible(
    machine: MachineCost, offer: Interruptible, jobs: int, job: Decimal, gap: Decimal
) -> BatchOption | str:
    """What is to be expected when interruptions come at random, at a constant mean rate 1/m.

    A piece of work of length x that has to be done in one go fails exp(x/m) − 1 times on average, and takes
    m × (exp(x/m) − 1) with its failed tries, to which each failure adds a start-up. A job is such a piece, or several,
    one from each checkpoint to the next. In a gap the machine waits; the whole gap is counted, and a start-up in case
    it is gone by then: a little too much.
    """
    mean = offer.between_interruptions_s
    piece = job if offer.checkpoint_s is None else min(job, offer.checkpoint_s)
    pieces, rest = divmod(job, piece) if piece > 0 else (Decimal(0), Decimal(0))
    hopeless = (
        f"{format_duration(float(piece))} of work in one go, interrupted every {format_duration(float(mean))}, "
        "would take more than a year: write checkpoints more often"
    )
    if piece / mean > 40:
        return hopeless
    failures_per_job = pieces * ((piece / mean).exp() - 1) + ((rest / mean).exp() - 1)
    job_elapsed = failures_per_job * (mean + machine.startup_s)
    if job_elapsed > MAX_DURATION_S:
        return hopeless

    gone_in_gap = 1 - (-gap / mean).exp()
    restarts = (jobs - 1) * gone_in_gap
    elapsed = machine.startup_s * (1 + restarts) + jobs * job_elapsed + (jobs - 1) * gap
    return BatchOption(
        strategy="interruptible",
        machines=1,
        jobs=jobs,
        elapsed_s=elapsed,
        cost_usd=elapsed * offer.rate_usd_hr / HOUR_S,
        starts=1 + restarts + jobs * failures_per_job,
    )


def _shown(option: BatchOption) -> str:
    name = option.strategy.replace("_", " ")
    return f"{name}, {format_usd(option.cost_usd)} in {format_duration(float(option.elapsed_s))}"
