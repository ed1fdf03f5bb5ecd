"""The end of a job with a machine of its own: held for review, then destroyed; only when its outputs are here."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import (
    GpuError,
    Refused,
    Uncertain,
)
from gpu_skills.jobs import launch
from gpu_skills.jobs.launch import Launch
from gpu_skills.jobs.records import JobFolder
from gpu_skills.jobs.release import gate
from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan

if TYPE_CHECKING:
    pass

DESTROY_WAIT_S = 600.0


class MachineUnconfirmed(Uncertain):
    """The job is over and its machine may still bill."""

    code, may_be_billing = "machine_unconfirmed", True
    template = "machine {machine} of {job} may still bill: {reason}"
    next_step = "gpu reconcile"


class MachineHeld(Refused):
    code, may_be_billing = "machine_held", True
    template = "{machine} is held until {until} and bills until then"
    next_step = "gpu machine hold {machine} --off, then the same command again"


def won_machine(op: Operator, launched: Launch) -> Machine | None:
    """The machine that this launch's approval won, as it is on record."""
    run = runs.load(op, launched.approval_id) if launched.approval_id else None
    if run is None or run.won is None:
        return None
    runs.require_ours(op, run)
    attempt = next((a for a in run.attempts if a.intent == run.won), None)
    return machines.find(op.project, attempt.machine_id) if attempt is not None else None


def may_bill(op: Operator, launched: Launch) -> bool:
    """Whether something of this launch's approval is, or may be, at the provider."""
    run = runs.load(op, launched.approval_id) if launched.approval_id else None
    return run is not None and any(a.result != "refused" and not a.is_over for a in run.attempts)


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


def is_collected(op: Operator, launched: Launch) -> bool:
    """Whether the job has ended and nothing of it is on its machine alone."""
    line = op.ledger.latest(launched.job)
    if line is None or op.ledger.is_open(line):
        return False
    machine = won_machine(op, launched)
    return machine is None or not op.unverified(machine.id)
