"""End a job with a machine of its own, whatever it is at: nothing of it is left that bills.

    requested, booting   the command that provisions is told and ends it; if none lives any more, this one does
    set-up               the same, between two steps of the upload
    running              the job is ended, its outputs are collected, the machine is destroyed
    recovering           the machine stands still or is gone: what is left of it is destroyed
    ended                the hold is over

Outputs that can still be had are collected first. A machine that runs and does not answer is not destroyed unless its
outputs are given up by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import GpuError, JobNotFound, RemoteError, StateBusy, Uncertain
from gpu_skills.jobs import disposable, launch, parting
from gpu_skills.jobs.launch import Launch
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import runs, states
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state.project import Project

WORKER_WAIT_S = 120.0
CANCEL_WAIT_S = 60.0
SILENT_TRIES = 3
SILENT_PAUSE_S = 10.0


class StillWorkedOn(Uncertain):
    code, may_be_billing, retryable = "still_worked_on", True, True
    template = "the command that works on {job} has not ended yet; it was told to"
    next_step = "gpu job cancel {job}"


class OutputsOutOfReach(Uncertain):
    """The machine bills and does not answer. Nothing is given up by itself."""

    code, may_be_billing = "outputs_out_of_reach", True
    template = "{machine} runs and does not answer, and the outputs of {job} are only there: {reason}"
    next_step = "gpu job cancel {job}, or, to lose them: gpu job cancel {job} --abandon-outputs"


def cancel(
    op: Operator, launched: Launch, *, collect: Callable[[Link, str], Any], gives_up_outputs: bool = False
) -> str:
    """End it; the state of its machine afterwards, `destroyed` or `terminating`.

    collect: (link, job) pulls the outputs. Repeating is harmless. Raises StillWorkedOn, OutputsOutOfReach, or what
    kept outputs from being collected.
    """
    launched = launch.cancel(op.project, op.clock, launched.plan)
    line = op.ledger.latest(launched.job)
    if line is None:
        _wait_for_worker(op, launched)
        line = op.ledger.latest(launched.job)
    if line is None or not JobFolder(op.project, launched.job).was_sent:
        state = parting.end_machines(op, launched, why="cancelled")
        parting.cancelled_before_it_began(op, launched)
        return state
    machine = parting.won_machine(op, launched)
    if machine is None or machine.status in states.FINAL:
        if machine is not None:
            op.settle_jobs(machine.id, "cancelled")
        return parting.end_machines(op, launched, why="cancelled")
    if gives_up_outputs:
        _give_up(op, launched, machine)
        return parting.end_machines(op, launched, why="cancelled")
    link = _reach(op, launched, machine)
    if link is None:  # it stands still: this is its end
        op.settle_jobs(machine.id, "cancelled")
        _give_up(op, launched, machine)
        return parting.end_machines(op, launched, why="cancelled")
    with closing(link):
        _end_job(op, launched, link)
        disposable.settle(op, link)
        collect(link, launched.job)
    return parting.let_go(op, launched, why="cancelled")


def end_on_machine(project: Project, clock: Clock, link: Link, job: str, *, wait_s: float) -> dict[str, Any]:
    """Ask the machine to end a job until it has, or for so long; how it is then."""
    request = {"project": project.project_id, "job": job, "why": "user", "wait_s": 10}
    deadline = clock.monotonic() + wait_s
    answer = link.session.call("cancel", request, timeout_s=60)
    while answer["state"] == "running" and clock.monotonic() < deadline:
        answer = link.session.call("cancel", request, timeout_s=60)
    return answer


def _end_job(op: Operator, launched: Launch, link: Link) -> None:
    line = op.ledger.latest(launched.job)
    if line is not None and op.ledger.is_open(line):
        try:
            answer = end_on_machine(op.project, op.clock, link, launched.job, wait_s=CANCEL_WAIT_S)
        except JobNotFound:  # it was written down and never arrived: settling finds the same
            return
        if answer["state"] == "running":
            raise StillWorkedOn(f"{launched.job} has not ended yet", job=launched.job)


def _wait_for_worker(op: Operator, launched: Launch) -> None:
    """Until the command that provisions or sets up has noticed; at once when none lives."""
    ends = op.clock.monotonic() + WORKER_WAIT_S
    while _is_worked_on(op, launched):
        if op.clock.monotonic() >= ends:
            raise StillWorkedOn(job=launched.job)
        op.clock.sleep(1.0)


def _is_worked_on(op: Operator, launched: Launch) -> bool:
    if launched.approval_id is not None and runs.is_worked_on(op, launched.approval_id):
        return True
    try:
        with JobFolder(op.project, launched.job).launching():
            return False
    except StateBusy:
        return True


def _reach(op: Operator, launched: Launch, machine: Machine) -> Link | None:
    """A link to the machine; None when the provider says that it does not run. OutputsOutOfReach in between."""
    reason = ""
    for attempt in range(SILENT_TRIES):
        if attempt:
            op.clock.sleep(SILENT_PAUSE_S)
        try:
            return op.connect(machine)
        except RemoteError as exc:
            reason = exc.message
        if not _runs(op, machine):
            return None
    raise OutputsOutOfReach(machine=machine.id, job=launched.job, reason=reason)


def _runs(op: Operator, machine: Machine) -> bool:
    """Whether the provider shows it running, or does not say."""
    try:
        listed = op.reader(machine.provider).machines()
    except GpuError:
        return True
    return any(one.instance_id == machine.instance_id and one.status in ("booting", "running") for one in listed)


def _give_up(op: Operator, launched: Launch, machine: Machine) -> None:
    """Record that what only the machine has goes with it, by the user's own word."""
    record = {"at": timestamp(op.clock.now()), "machine_id": machine.id}
    for job in op.unverified(machine.id):
        JobFolder(op.project, job).write("abandoned", record)
