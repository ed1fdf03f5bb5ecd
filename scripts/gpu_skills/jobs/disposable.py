"""A job with a machine of its own, step by step. Each step finds what an earlier try left and goes on from there.

    open_plan, limits      what was frozen, and what the flags shorten
    launch.begin           from here on this plan is this job
    rent                   the one machine of its approval, or the one that was won before
    submit                 session, upload, start; again after a death, but started once
    watching.Watch         while it runs
    keep, let_go           held for review, then destroyed; only when its outputs are here

Nothing here decides to rent: `lifecycle.provision` does, by the approval. A second machine would need a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.errors import (
    ApprovalInvalid,
    ApprovalNeeded,
    GpuError,
    MissingCredential,
    Refused,
    StateBusy,
    Uncertain,
    UsageError,
)
from gpu_skills.jobs import launch, observe, staging
from gpu_skills.jobs.launch import Launch, Limits
from gpu_skills.jobs.pack import Packed
from gpu_skills.jobs.records import JobFolder
from gpu_skills.jobs.release import gate
from gpu_skills.jobs.spec import JobSpec, Progress
from gpu_skills.jobs.submit import Submitted, send, start
from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan
from gpu_skills.lifecycle.plans.plan import SHOWN_CHARS, Plan
from gpu_skills.state.project import Project
from gpu_skills.units import format_duration, parse_duration

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval, Ask

DEFAULT_HOLD_S = 1800.0
DESTROY_WAIT_S = 600.0
DEADLINE_REASON = "max_lease"
CANCEL_LOOK_S = 1.0


class MachineUnconfirmed(Uncertain):
    """The job is over and its machine may still bill."""

    code, may_be_billing = "machine_unconfirmed", True
    template = "machine {machine} of {job} may still bill: {reason}"
    next_step = "gpu reconcile"


class MachineHeld(Refused):
    code, may_be_billing = "machine_held", True
    template = "{machine} is held until {until} and bills until then"
    next_step = "gpu machine hold {machine} --off, then the same command again"


class CancelRequested(KeyboardInterrupt):
    """Somebody asked for the end of this launch in another terminal. Like Ctrl-C, and for the same clean-ups."""


# what was approved -------------------------------------------------------------------------------------------------


def open_plan(project: Project, name: str) -> tuple[str, Plan]:
    """(full name, plan) of a frozen plan for one job of this project."""
    full, found = plan.load(project, name)
    if full.startswith("draft-"):
        raise UsageError(f"{full} is a draft: it can be measured again, not run", next_step="gpu plan --freeze")
    shown = full[:SHOWN_CHARS]
    if found.machine_class != "job" or not found.job or not found.inputs:
        raise UsageError(f"plan {shown} is not for a job with a machine of its own", next_step="gpu plan --freeze")
    if found.project_id != project.project_id:
        raise ApprovalInvalid(
            reason=f"plan {shown} is of project {found.project_id}, this is {project.project_id}", plan=shown
        )
    return full, found


def limits(
    found: Plan, *, hold_for: str | None = None, max_lease: str | None = None, job_timeout: str | None = None
) -> Limits:
    """The plan's limits, shortened by flags. UsageError for one that would be longer: that is another plan."""
    hold_s = DEFAULT_HOLD_S if found.hold_for_s is None else found.hold_for_s
    timeout_s = found.job_timeout_s or None
    if hold_for is not None:
        hold_s = _shortened("--hold-for", hold_for, hold_s, may_be_zero=True)
    if job_timeout is not None:
        timeout_s = _shortened("--job-timeout", job_timeout, timeout_s)
    lease_s = found.deadline_s
    if max_lease is not None:
        lease_s = _shortened("--max-lease", max_lease, lease_s)
    return Limits(hold_s, lease_s, timeout_s)


def shorten(op: Operator, launched: Launch, asked: Limits) -> Launch:
    """What a later call asks for, if it is less. UsageError where it comes too late to hold."""
    machine = won_machine(op, launched)
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


def _shortened(flag: str, given: str, frozen_s: float | None, *, may_be_zero: bool = False) -> float:
    try:
        wanted_s = parse_duration(given)
    except ValueError as exc:
        raise UsageError(f"{flag} {given}: {exc}", next_step="gpu job run --help") from exc
    if wanted_s <= 0 and not may_be_zero:
        raise UsageError(f"{flag} {given}: must be more than 0", next_step="gpu job run --help")
    if frozen_s is not None and wanted_s > frozen_s:
        raise UsageError(
            f"{flag} {given} is longer than the plan's {format_duration(frozen_s)}; a flag can only shorten it",
            next_step=f"gpu plan --freeze {flag} {given}",
        )
    return wanted_s


def spec_of(project: Project, found: Plan, *, secret_env: Mapping[str, str], timeout_s: float | None) -> JobSpec:
    """The job as it was frozen. secret_env: values of the secrets it names; they are in no plan."""
    job = found.job or {}
    progress = job.get("progress")
    return JobSpec(
        run=job["run"],
        directory=staging.directory_of(project, job),
        setup=job.get("setup"),
        env=dict(job.get("env") or {}),
        secret_env=dict(secret_env),
        timeout_s=timeout_s,
        exclude=tuple(job.get("exclude") or ()),
        label=job.get("label"),
        expect=tuple(job.get("expect") or ()),
        progress=Progress(progress.get("unit"), progress.get("stall_s"), progress.get("on_stall") or "event")
        if progress
        else None,
        outputs_uri=job.get("outputs_uri"),
    )


def secret_values(
    found: Plan, given: Mapping[str, str], known: Callable[[str], str | None]
) -> tuple[dict[str, str], str | None]:
    """(values of the job's own secrets, HF token), for the names that were approved and no others.

    given: from `--env`. known: what environment and .env have. MissingCredential names one without a value.
    """
    named = [name for name in (found.job or {}).get("secret") or () if name != "HF_TOKEN"]
    if unknown := sorted(set(given) - set(found.secrets) - set(named)):
        raise UsageError(
            f"--env {', '.join(unknown)}: the plan names no such secret, and nobody agreed that it reaches the machine",
            next_step=f"gpu plan --freeze --env {unknown[0]}",
        )
    values = {}
    for name in named:
        value = given.get(name, known(name))
        if value is None:
            raise MissingCredential(provider=name, next_step=f"export {name}=…, then run it again")
        values[name] = value
    wants_hf = "HF_TOKEN" in found.secrets
    return values, (given.get("HF_TOKEN") or known("HF_TOKEN")) if wants_hf else None


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


def won_machine(op: Operator, launched: Launch) -> Machine | None:
    """The machine that this launch's approval won, as it is on record."""
    run = runs.load(op, launched.approval_id) if launched.approval_id else None
    if run is None or run.won is None:
        return None
    runs.require_ours(op, run)
    attempt = next((a for a in run.attempts if a.intent == run.won), None)
    return machines.find(op.project, attempt.machine_id) if attempt is not None else None


def rent(op: Operator, launched: Launch, found: Plan, approval: Approval) -> tuple[Machine, Link]:
    """A link to the launch's one machine: the one it won, else the one `provision` brings now.

    Ctrl-C, or a cancel from elsewhere, ends what was begun. Raises StateBusy when another command is at it.
    """
    from gpu_skills.lifecycle.renting import bringup, provision

    machine = won_machine(op, launched)
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
            end_machines(op, launched, why="cancelled")
            raise
        except StateBusy:
            raise
        except GpuError:
            if not may_bill(op, launched) and _is_settled(op, launched):
                launch.end(op.project, op.clock, launched.plan)
            raise
        machine, link = provisioned.machine, provisioned.link
    launch.update(op.project, launched.plan, lambda one: replace(one, machine_id=machine.id))
    return machine, link


def may_bill(op: Operator, launched: Launch) -> bool:
    """Whether something of this launch's approval is, or may be, at the provider."""
    run = runs.load(op, launched.approval_id) if launched.approval_id else None
    return run is not None and any(a.result != "refused" and not a.is_over for a in run.attempts)


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
            end_machines(op, launched, why="cancelled")
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


# the end -------------------------------------------------------------------------------------------------------------


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


def keep(op: Operator, launched: Launch, link: Link | None) -> datetime | None:
    """Until when the machine is held: its review, counted from the first time somebody asks, or longer by
    `gpu machine hold`; None: not at all.

    The machine is told as well, so that it goes when nobody here is left to end it.
    """
    if launched.cancelled_at is not None or launched.ended_at is not None:
        return None
    line = op.ledger.latest(launched.job) or {}
    if op.ledger.state_of(line) == "timeout" and line.get("reason") != "timeout":
        return None  # the machine's own end cut the job: there is nothing left to hold
    machine, now = won_machine(op, launched), op.clock.now()
    review = launched.held_until if launched.hold_for_s > 0 else None
    is_first = review is None and launched.hold_for_s > 0
    if is_first:
        review = now + timedelta(seconds=launched.hold_for_s)
        if machine is not None and machine.deadline_at is not None:
            review = min(review, parse_timestamp(machine.deadline_at))
        said = timestamp(review)
        launched = launch.update(op.project, launched.plan, lambda one: replace(one, hold_until=one.hold_until or said))
        review = launched.held_until or review
    by_hand = held_by_hand(op, launched)
    until = max((one for one in (review, by_hand) if one is not None), default=now)
    if link is not None and until > now and (is_first or by_hand is not None):
        try:
            machines.open_rented_session(
                op.project, link, clock=op.clock, deadline_at=until, reason="hold_for", is_moved=True
            )
        except GpuError as exc:  # its deadline still bounds it
            op.say(f"the machine could not be told of the hold: {exc.message}")
    return until if until > now else None


def held_by_hand(op: Operator, launched: Launch) -> datetime | None:
    """Until when somebody holds the launch's machine by `gpu machine hold`; None: nobody does now."""
    from gpu_skills.lifecycle.renting import keeping

    machine = won_machine(op, launched)
    until = None if machine is None else keeping.held_until(machine, op.clock.now())
    if until is None or machine is None or machine.deadline_at is None:
        return until
    return min(until, parse_timestamp(machine.deadline_at))


def let_go(op: Operator, launched: Launch, *, why: str = "job_over") -> str:
    """Destroy the launch's machine, unless something would be lost; the state it is in then.

    Raises MachineHeld for one that somebody holds when only its job is over, JobRunning, NotCollected or Protected,
    and MachineUnconfirmed when the provider gives no clear answer.
    """
    machine = won_machine(op, launched)
    if machine is not None and machine.status not in ("terminating", *states.FINAL):
        until = held_by_hand(op, launched) if why == "job_over" else None
        if until is not None and op.clock.now() < until:
            raise MachineHeld(machine=machine.id, until=timestamp(until))
        for obstacle in gate(op, machine):
            raise obstacle
    return end_machines(op, launched, why=why)


def end_machines(op: Operator, launched: Launch, *, why: str, wait_s: float = DESTROY_WAIT_S) -> str:
    """Destroy every machine this launch's approval made and rent no other; `destroyed`, or `terminating`.

    What was begun and never answered is looked for first, since it may exist.
    """
    from gpu_skills.lifecycle.books import accounting
    from gpu_skills.lifecycle.ending import release
    from gpu_skills.lifecycle.recovery import reconcile

    run = runs.load(op, launched.approval_id) if launched.approval_id else None
    if run is None:
        _require_nothing_begun(op, launched)
        launch.end(op.project, op.clock, launched.plan)
        return "destroyed"
    runs.require_ours(op, run)
    run = runs.update(op, run.approval_id, lambda one: replace(one, state="closed") if one.state == "open" else one)
    if any(_is_unclear(op, a) for a in run.attempts):
        reconcile.run(op, [run.provider])
        run = runs.load(op, run.approval_id) or run
    left: list[str] = []
    for attempt in run.attempts:
        machine = machines.find(op.project, attempt.machine_id)
        if machine is not None and machine.status in states.FINAL:
            continue
        if machine is None or (machine.instance_id is None and _is_unanswered(op, attempt)):
            left += [attempt.machine_id] if _is_unclear(op, attempt) else []
            continue
        try:
            state = release.destroy(op, machine, why=why, wait_s=wait_s)
        except Refused:
            raise
        except GpuError as exc:
            raise MachineUnconfirmed(
                machine=machine.id, job=launched.job, reason=exc.message, next_step=exc.next_step, cause=exc.code
            ) from exc
        if state != "destroyed":
            left.append(machine.id)
    if left or not accounting.settle_run(op, run):
        return "terminating"
    launch.end(op.project, op.clock, launched.plan)
    return "destroyed"


def _require_nothing_begun(op: Operator, launched: Launch) -> None:
    """MachineUnconfirmed for a machine whose record names an approval that no run is there of any more."""
    for machine in machines.all_machines(op.project):
        if machine.status not in states.FINAL and machine.extra.get("approval_id") == launched.approval_id is not None:
            raise MachineUnconfirmed(
                machine=machine.id,
                job=launched.job,
                reason=f"the run of approval {launched.approval_id} is not there any more",
                next_step=f"gpu machine destroy {machine.id}",
            )


def _is_unclear(op: Operator, attempt: runs.Attempt) -> bool:
    """It may have made a machine that nothing here names: its create was not answered, or its record is gone."""
    if attempt.result == "refused" or attempt.is_over:
        return False
    return _is_unanswered(op, attempt) or machines.find(op.project, attempt.machine_id) is None


def _is_unanswered(op: Operator, attempt: runs.Attempt) -> bool:
    intent = intents.read(op.project).get(attempt.intent)
    return intent is not None and intent.is_open


def as_shown(op: Operator, machine: Machine) -> Machine:
    """The machine as its provider shows it: it may have stopped at the end of a review that nobody was left to end."""
    from gpu_skills.lifecycle.ending import witness
    from gpu_skills.lifecycle.recovery import readback

    seen = witness.look(op, machine)
    return machine if seen is None else readback.follow(op, machine, seen)


def settle(op: Operator, link: Link) -> dict[str, dict[str, Any]]:
    """Ask the machine how its jobs are, write the ends, tell who wants to know."""
    return observe.settle(op.project, op.ledger, op.clock, link, notify=op.notify)


def cancelled_before_it_began(op: Operator, launched: Launch) -> None:
    """Give a job that never began its two lines, so that every list shows what became of it. It cost nothing: what its
    machine cost until then is in charges."""
    try:
        job_plan = plan.load(op.project, launched.plan)[1]
        provider, what = job_plan.provider, {"run": (job_plan.job or {}).get("run")}
    except GpuError:
        provider, what = None, {}
    now = timestamp(op.clock.now())
    with JobFolder(op.project, launched.job).submitting():
        if op.ledger.latest(launched.job) is None:
            op.ledger.start(
                {"id": launched.job, "provider": provider, "inputs": what, "started_at": now, "plan": launched.plan}
            )
        op.ledger.finish(
            {
                "id": launched.job,
                "status": "cancelled",
                "completed_at": now,
                "duration_s": 0,
                "cost_usd": 0,
                "artifacts": [],
                "error": "cancelled before it began",
                "reason": "user",
            }
        )


def has_begun(op: Operator, launched: Launch) -> bool:
    """Whether the job is on its machine, or was: from here on it is followed, not started."""
    line = op.ledger.latest(launched.job)
    if line is None:
        return False
    return not op.ledger.is_open(line) or JobFolder(op.project, launched.job).read("accepted") is not None


def is_collected(op: Operator, launched: Launch) -> bool:
    """Whether the job has ended and nothing of it is on its machine alone."""
    line = op.ledger.latest(launched.job)
    if line is None or op.ledger.is_open(line):
        return False
    machine = won_machine(op, launched)
    return machine is None or not op.unverified(machine.id)
