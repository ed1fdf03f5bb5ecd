"""The books of machines that are gone: their time, what the provider says it was, the reservations of runs."""

from __future__ import annotations

from gpu_skills.errors import GpuError, StateBusy, UnexpectedReply
from gpu_skills.lifecycle import runs, states
from gpu_skills.lifecycle.books import accounting, charged
from gpu_skills.lifecycle.ending import ownership, release
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.recovery import leftovers, vanished
from gpu_skills.lifecycle.recovery.findings import Pass
from gpu_skills.state import budget


def close_books(here: Pass) -> None:
    """Of machines that are gone: their time, and later what the provider says it was."""
    due = []
    for machine in here.machines():
        if machine.id in here.held or machine.status not in states.FINAL or machine.instance_id is None:
            continue
        before = len(accounting.lines_of(here.op, machine.id))
        release.finish_books(here.op, machine)
        accounting.close(here.op, machine)
        here.booked += len(accounting.lines_of(here.op, machine.id)) - before
        if not charged.is_corrected(here.op, machine):  # also what a pass that died has booked
            accounting.settle_anew(here.op, machine)
        is_here = machine.account in (None, ownership.account_of(here.op, here.provider))
        if is_here and charged.is_due(here.op, machine):
            due.append(machine)
    if due:
        _correct(here, due)


def _correct(here: Pass, due: list[Machine]) -> None:
    since = min(charged.began(here.op, machine) for machine in due)
    try:
        charges = charged.charges_between(here.op, here.provider, since, here.op.clock.now())
    except GpuError as exc:  # a key may not be allowed to read them: the books stay estimates
        here.say("charges_unread", f"the charges of {here.provider} cannot be read: {exc.message}")
        return
    for machine in due:
        try:
            written = charged.correct(here.op, machine, charges)
        except UnexpectedReply as exc:
            here.say("charges_doubtful", f"{exc.message}; not booked, and asked again", machine=machine)
            continue
        for line in written:
            here.booked += 1
            here.say("corrected", f"{line['kind']} {line['cost_usd']:+.6f} USD: {line['note']}", machine=machine)


def settle_runs(here: Pass) -> None:
    reserved = budget.open_reservations(here.op.project, here.op.environ)
    for run in runs.own_runs(here.op):
        # One that was settled and has money reserved was to go on, and the command that wanted it died.
        is_over = run.is_settled and run.approval_id not in reserved
        if run.provider != here.provider or is_over or not here.is_ours(run):
            continue
        try:
            with runs.working_on(here.op, run.approval_id):
                if accounting.settle_run(here.op, run):
                    here.say("settled", f"the reservation of approval {run.approval_id} is free again")
        except StateBusy:
            continue
    for name in leftovers.free_unbound(here.op, here.provider):
        here.say("settled", f"what was reserved for {name} came to nothing: it is free again")
    vanished.settle(here)
