"""A job with a machine of its own, step by step. Each step finds what an earlier try left and goes on from there.

    agreed                 what was frozen, and what the flags shorten
    launch.begin           from here on this plan is this job
    rent                   the one machine of its approval, or the one that was won before
    submit                 session, upload, start; again after a death, but started once
    watching.Watch         while it runs
    parting                held for review, then destroyed; only when its outputs are here

Nothing here decides to rent: `lifecycle.provision` does, by the approval. A second machine would need a second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import Clock, parse_timestamp
from gpu_skills.errors import (
    ApprovalNeeded,
    GpuError,
    StateBusy,
    UsageError,
)
from gpu_skills.jobs import launch, observe, parting, staging
from gpu_skills.jobs.launch import Launch, Limits
from gpu_skills.jobs.pack import Packed
from gpu_skills.jobs.records import JobFolder
from gpu_skills.jobs.spec import JobSpec
from gpu_skills.jobs.submit import Submitted, send, start
from gpu_skills.lifecycle import machines, runs
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.units import format_duration

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval, Ask

DEADLINE_REASON = "max_lease"
CANCEL_LOOK_S = 1.0


class CancelRequested(KeyboardInterrupt):
    """Somebody asked for the end of this launch in another terminal. Like Ctrl-C, and for the same clean-ups."""


# before it is rented --------------------------------------------------------------------------------------------------


def shorten(op: Operator, launched: Launch, asked: Limits) -> Launch:
    """What a later call asks for, if it is less. UsageError where it comes too late to hold."""
    machine = parting.won_machine(op, launched)
    if machine is not None and asked.max_lease_s < launched.max_lease_s:
        raise UsageError(
            f"--max-lease {format_duration(asked.max_lease_s)} comes too late: {machine.id} was rented until "
            f"{machine.deadline_at}",
            next_step=f"gpu job cancel {launched.job}",
        )
    holds = launched.job_timeout_s
    if asked.job_timeout_s is not None and (holds is None or asked.job_timeout_s < holds):
        if has_begun(op, launched):
            until = "until it exits" if holds is None else f"for {format_duration(holds)}"
            raise UsageError(
                f"--job-timeout {format_duration(asked.job_timeout_s)} comes too late: {launched.job} began and may "
                f"run {until}",
                next_step=f"gpu job cancel {launched.job}",
            )
    return launch.shorten(op.project, launched.plan, asked)


def begin(op: Operator, full: str, found: Plan, limits: Limits, approval: Approval) -> tuple[Launch, Approval]:
    """The launch of a plan and the approval it goes by: where another terminal was faster, that one's."""
    from gpu_skills.lifecycle.approval import approvals

    ask = approvals.ask_of_plan(full, found)
    known = launch.find(op.project, full)
    void = known.approval_id if known is not None and not _serves(op, ask, known.approval_id) else None
    launched = launch.begin(op.project, op.ledger, op.clock, full, limits, approval.id, replaces=void)
    if launched.approval_id != approval.id:
        approval = approvals.find(op, ask, approval_id=launched.approval_id)
    return launched, approval


def _serves(op: Operator, ask: Ask, approval_id: str | None) -> bool:
    """Whether a launch can still come to its machine, or has, under the approval it began with."""
    from gpu_skills.lifecycle.approval import approvals

    if approval_id is None:
        return False
    if runs.is_worked_on(op, approval_id):
        return True
    try:
        approvals.find(op, ask, approval_id=approval_id)
    except ApprovalNeeded:
        return False
    return True


# the machine ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CancellableClock:
    """A clock whose waiting ends when the launch is cancelled from elsewhere: provisioning is mostly waiting."""

    clock: Clock
    is_cancelled: Callable[[], bool]

    def now(self) -> datetime:
        return self.clock.now()

    def monotonic(self) -> float:
        return self.clock.monotonic()

    def sleep(self, seconds: float) -> None:
        ends = self.clock.monotonic() + seconds
        while True:
            if self.is_cancelled():
                raise CancelRequested
            left_s = ends - self.clock.monotonic()
            if left_s <= 0:
                return
            self.clock.sleep(min(left_s, CANCEL_LOOK_S))


def rent(op: Operator, launched: Launch, found: Plan, approval: Approval) -> tuple[Machine, Link]:
    """A link to the launch's one machine: the one it won, else the one `provision` brings now.

    Ctrl-C, or a cancel from elsewhere, ends what was begun. Raises StateBusy when another command is at it.
    """
    from gpu_skills.lifecycle.renting import bringup, provision

    machine = parting.won_machine(op, launched)
    if machine is not None:
        link, _ = bringup.follow(op, machine)
        machine = link.machine
    else:
        patient = replace(op, clock=CancellableClock(op.clock, lambda: launch.is_cancelled(op.project, launched.plan)))
        try:
            provisioned = provision.provision(
                patient, launched.plan, found, approval, max_lease_s=launched.max_lease_s, job_id=launched.jobs[0]
            )
        except KeyboardInterrupt:
            parting.end_machines(op, launched, why="cancelled")
            raise
        except StateBusy:
            raise
        except GpuError:
            if not parting.may_bill(op, launched) and _is_settled(op, launched):
                launch.end(op.project, op.clock, launched.plan)
            raise
        machine, link = provisioned.machine, provisioned.link
    launch.update(op.project, launched.plan, lambda one: replace(one, machine_id=machine.id))
    return machine, link


def _is_settled(op: Operator, launched: Launch) -> bool:
    """Whether nothing stays reserved for it, as far as that can be written down now."""
    from gpu_skills.lifecycle.books import accounting

    run = runs.load(op, launched.approval_id) if launched.approval_id else None
    try:
        return run is None or accounting.settle_run(op, run)
    except GpuError:
        return False


def submit(
    op: Operator,
    launched: Launch,
    found: Plan,
    link: Link,
    spec: JobSpec,
    packed: Packed,
    *,
    hf_token: str | None,
    progress: Callable[[int, int], None] | None = None,
) -> Submitted:
    """Open the session, bring the inputs, start the job. All of it again after a death, and started once.

    The inputs are verified there before anything of the job runs: each file by its hash when it arrives, and once
    more when the job's own copy is made.
    """

    def goes_on(done: int, total: int) -> None:
        require_wanted(op, launched)
        if progress is not None:
            progress(done, total)

    folder = JobFolder(op.project, launched.job)
    try:
        with folder.launching():
            require_wanted(op, launched)
            open_session(op, link, launched, reason=found.deadline_reason or DEADLINE_REASON)
            report = send(op.project, link, packed, goes_on)
            require_wanted(op, launched)
            return start(
                op.project,
                op.ledger,
                op.clock,
                link,
                spec,
                packed,
                report,
                env_values=spec.env_values(),
                hf_token=hf_token,
                job=launched.job,
                plan=launched.plan,
                resume=staging.RESUME_FOLDER if found.resume_from else None,
            )
    except KeyboardInterrupt:
        if not folder.was_sent:  # nothing runs there and nothing will: there is no reason to keep it
            parting.end_machines(op, launched, why="cancelled")
        raise


def require_wanted(op: Operator, launched: Launch) -> None:
    if launch.is_cancelled(op.project, launched.plan):
        raise CancelRequested


def open_session(op: Operator, link: Link, launched: Launch, *, reason: str) -> None:
    """The machine's own bound on work: a moment before its fuse, so that exit records and outputs are complete."""
    from gpu_skills.lifecycle.guard import fuse

    deadline_at = None
    if link.machine.deadline_at is not None:
        deadline_at = fuse.session_deadline(parse_timestamp(link.machine.deadline_at))
    machines.open_rented_session(op.project, link, clock=op.clock, deadline_at=deadline_at, reason=reason)


# while it is there ----------------------------------------------------------------------------------------------------


def may_try_again(op: Operator, launched: Launch, machine: Machine) -> bool:
    """Whether a job that went down with its container may run once more: on the same machine, and only once.

    A policy whose retry limit is 0 says no.
    """
    if len(launched.jobs) > 1 or launched.cancelled_at is not None or op.policy().retry_limit < 1:
        return False
    line = op.ledger.latest(launched.job)
    if line is None or op.ledger.state_of(line) != "lost":
        return False
    went_down = line.get("reason") == "runner_vanished" and {"outbid", "preempted"} & set(machine.conditions)
    if not went_down and line.get("reason") not in ("reboot", "never_started", "machine_forgot"):
        return False
    return _has_time(op, machine)


def _has_time(op: Operator, machine: Machine) -> bool:
    ends = machine.deadline_at
    return ends is None or op.clock.now() + timedelta(minutes=5) < parse_timestamp(ends)


def try_again(op: Operator, launched: Launch) -> Launch:
    """Take the id of the second try."""
    job = op.ledger.new_job_id()
    return launch.update(
        op.project, launched.plan, lambda one: one if len(one.jobs) > 1 else replace(one, jobs=(*one.jobs, job))
    )


def settle(op: Operator, link: Link) -> dict[str, dict[str, Any]]:
    """Ask the machine how its jobs are, write the ends, tell who wants to know."""
    return observe.settle(op.project, op.ledger, op.clock, link, notify=op.notify)


def has_begun(op: Operator, launched: Launch) -> bool:
    """Whether the job is on its machine, or was: from here on it is followed, not started."""
    line = op.ledger.latest(launched.job)
    if line is None:
        return False
    return not op.ledger.is_open(line) or JobFolder(op.project, launched.job).read("accepted") is not None
