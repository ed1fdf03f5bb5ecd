"""Every machine on record beside what its provider shows: followed, found absent, ended, kept or named."""

from __future__ import annotations

from dataclasses import replace

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import GpuError, NotReady, RemoteError
from gpu_skills.lifecycle import labels, machines, runs, states
from gpu_skills.lifecycle.approval import changes
from gpu_skills.lifecycle.books import accounting
from gpu_skills.lifecycle.ending import ownership, release, stops, witness
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.recovery import readback, returned
from gpu_skills.lifecycle.recovery.creates import LOOKED_FOR
from gpu_skills.lifecycle.recovery.findings import Pass
from gpu_skills.lifecycle.renting import keeping
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import format_usd


def look_at(here: Pass, machine: Machine) -> None:
    """One that has not reached its end on record. What fails here is told and keeps no other from its turn."""
    try:
        if machine.instance_id is None:
            _look_for(here, machine)
            return
        if approval := readback.worked_on(here.op, machine):
            text = f"another gpu command works on approval {approval}"
            here.say("worked_on", text, machine=machine, next_step="gpu status")
            return
        seen = next((s for s in here.shown if s.instance_id == machine.instance_id), None)
        if seen is None:  # lists lag: one that its own id finds is there
            seen = here.op.reader(here.provider).machine(machine.instance_id)
        if seen is None:
            _absent(here, machine)
            return
        for note in readback.compare(here.op, machine, seen):
            here.say(note.what, note.text, machine=machine, next_step=note.next_step, is_uncertain=note.is_uncertain)
            if note.is_not_ours:
                return
        _expire(here, readback.follow(here.op, machine, seen), seen)
        _ask_for_jobs(here, witness.current(here.op, machine), seen)
    except GpuError as exc:
        here.say("failed", exc.message, machine=machine, next_step=exc.next_step, is_uncertain=True)


def reappeared(here: Pass, machine: Machine) -> None:
    """What was believed gone and is there has a new record; what was sent away is sent away again.

    One that counted as destroyed because it was not shown past its deadline was never sent away, and its jobs
    were not asked.
    """
    seen = next((s for s in here.shown if s.instance_id == machine.instance_id is not None), None)
    alive = [m for m in here.machines() if m.instance_id == machine.instance_id and m.status not in states.FINAL]
    if seen is None or alive or labels.ours(seen.label, here.op.project.project_id) is None:
        return
    again = readback.reappeared(here.op, machine, seen)
    here.say(
        "reappeared",
        f"{machine.id} was {machine.status} and {seen.instance_id} is there again, as {again.id}",
        machine=again,
        next_step=f"gpu reconcile --provider {here.provider}",
        is_uncertain=True,
    )
    if machine.status == "destroyed" and _may_go_again(here, machine):
        here.end(again, f"{machine.id} was destroyed and came back")


def _may_go_again(here: Pass, machine: Machine) -> bool:
    """Whether nothing on it stands in the way: that was asked when it was sent away, or no job was ever on it."""
    return witness.was_sent_away(here.op, machine.id) or not here.op.ledger.jobs_on(machine.id)


def _look_for(here: Pass, machine: Machine) -> None:
    """A record without an instance and without a run that made it."""
    known = {a.intent for run in runs.all_runs(here.op) for a in run.attempts}
    if machine.intent in known:
        return  # its run was looked at, or belongs to another state directory
    found = here.with_intent(machine.intent or "")
    if found:
        machines.update(here.op.project, machine.id, lambda m: replace(m, host=found[0].instance_id, status="unknown"))
        return
    made = machine.created_at and parse_timestamp(machine.created_at)
    if made and here.op.clock.now() - made < LOOKED_FOR:
        step = f"gpu reconcile --provider {here.provider}"
        text = "nobody knows whether it was made"
        here.say("create_unknown", text, machine=machine, next_step=step, is_uncertain=True)
        return
    ownership.require_its_account(here.op, machine)
    machines.set_status(here.op.project, machine.id, "lost", clock=here.op.clock)
    here.say("never_seen", "it was never seen", machine=machine)


def _absent(here: Pass, machine: Machine) -> None:
    status = release.confirm(here.op, machine)
    if status == "destroyed":
        here.say("destroyed", "it is gone", machine=machine)
    elif status == "lost":
        here.say("lost", "it vanished without anybody's order; booked to its last sight", machine=machine)
    elif status not in ("unknown", "terminating"):
        here.say("late", f"it is there again, {status}", machine=machine, next_step="gpu status")
    else:
        text = f"{here.provider} does not show it; it takes several looks over a minute or more to believe that"
        step = f"gpu reconcile --provider {here.provider}"
        here.say("absent", text, machine=machine, next_step=step, is_uncertain=True)


def _expire(here: Pass, machine: Machine, seen: Instance) -> None:
    """What its state asks for, and its deadline."""
    due = readback.due(here.op, machine, seen)
    is_begun = witness.open_destroy(here.op, machine.id) is not None
    if machine.status == "terminating" and (is_begun or due.action == "none"):
        status = release.confirm(here.op, machine)
        if status not in states.FINAL:
            step = f"gpu reconcile --provider {here.provider}"
            text = "it was told to go and is still there"
            here.say("terminating", text, machine=machine, next_step=step, is_uncertain=True)
        return
    if due.action == "destroy":
        here.end(machine, due.why)
    elif due.action == "stop":
        machine = stops.stop(here.op, machine, why="deadline_passed", despite_jobs=True)
        here.say("deadline_passed", "its deadline has passed: it was stopped", machine=machine)
    elif due.action == "keep":
        _keep(here, machine, due.why)
    elif machine.status in ("unknown", "stopping"):
        is_stoppable = ownership.may_be_stopped(seen)
        step = f"gpu reconcile --provider {here.provider}" if is_stoppable else f"gpu machine destroy {machine.id}"
        text = f"{here.provider} says {seen.said or seen.status}"
        here.say(machine.status, text, machine=machine, next_step=step, is_uncertain=True)
    if machine.status == "stopped":
        here.booked += len(accounting.close(here.op, machine))
    if due.action == "none":
        _left_standing(here, machine, seen)


def _left_standing(here: Pass, machine: Machine, seen: Instance) -> None:
    """What bills without being of use: a stopped disk, a job's own machine after its job.

    A job's machine that has stopped with nothing left on it is what a review leaves that nobody was left to end: it
    ends as an interrupted one does. One that was stopped on purpose, or was taken away and may come back, is kept;
    so is one that somebody holds, until the hold is over.
    """
    is_over = _is_over(here, machine, seen)
    step = f"gpu machine destroy {machine.id}"
    held_until = keeping.held_until(machine, here.op.clock.now())
    if is_over and held_until is not None and machine.status in ("stopped", "ready", "busy"):
        text = f"{machine.status}, its job is over and collected, and it is held until {timestamp(held_until)}"
        here.say("held", text, machine=machine, next_step=f"gpu machine hold {machine.id} --off, or {step}")
        return
    if machine.status == "stopped":
        if is_over and machine.extra.get("stopped_why") not in ("asked", "outbid", "preempted"):
            here.end(machine, "its job is over and collected, and it has stopped")
            return
        cost = "" if machine.storage_usd_hr is None else f", its disk costs {format_usd(machine.storage_usd_hr)}/h"
        can_start = here.plan(machine.plan) is not None
        step = f"gpu machine start {machine.id}, or {step}" if can_start else changes.give_up(machine)
        here.say("stopped", f"it is stopped{cost}", machine=machine, next_step=step)
    elif is_over and machine.status in ("ready", "busy"):
        text = "its job is over and collected, and it goes on billing"
        here.say("job_over", text, machine=machine, next_step=step)


def _is_over(here: Pass, machine: Machine, seen: Instance) -> bool:
    """Whether it was made for one job, and that has ended with nothing left on it."""
    if machine.machine_class != "job" or machine.has_unknown_past or not here.op.ledger.jobs_on(machine.id):
        return False
    has_more = here.op.running_jobs(machine.id) or here.op.unverified(machine.id)
    return not has_more and not ownership.needs_named_approval(machine, seen)


def _ask_for_jobs(here: Pass, machine: Machine, seen: Instance) -> None:
    """A machine may have jobs that no record names: nothing may be concluded from records that are not whole."""
    if seen.status != "running" or machine.id in here.held or not returned.is_doubtful(here.op, machine):
        return
    try:
        told = returned.ask(here.op, machine, adopt=here.adopts)
    except (RemoteError, NotReady) as exc:
        if machine.has_unknown_past:
            text = f"which jobs it has is not on record, and it cannot be asked: {exc.message}"
            here.say("jobs_unread", text, machine=machine, next_step=exc.next_step, is_uncertain=True)
        return
    if told.taken:
        text = f"jobs read back from it: {', '.join(told.taken[:20])}"
        here.say("jobs_read_back", text, machine=told.machine, next_step=f"gpu job status {told.taken[-1]}")
    if told.unknown:
        step = f"gpu reconcile --provider {here.provider} --adopt"
        text = f"it has jobs that no record names: {', '.join(told.unknown[:20])}"
        if here.adopts:
            step = f"gpu machine destroy {machine.id} --abandon-outputs {machine.id}"
            text += "; other jobs have these numbers here, so they stay there until they are given up"
        here.say("jobs_unrecorded", text, machine=told.machine, next_step=step, is_uncertain=True)


def _keep(here: Pass, machine: Machine, why: str) -> None:
    jobs = list(dict.fromkeys([*here.op.running_jobs(machine.id), *here.op.unverified(machine.id)]))
    step = f"gpu job pull {jobs[0]}" if jobs else f"gpu machine destroy {machine.id}"
    facts = {"uncollected": ", ".join(jobs[:20]), "burn_usd_hr": machine.burn_usd_hr, "steps": step}
    if machine.status == "stopped":
        here.op.notify("idle_stop", machine.id, **facts)
    else:  # protected, and a stop would take its disk
        here.op.notify("recovery", machine.id, what=why, **facts)
    what = f"outputs that are nowhere else ({', '.join(jobs[:5])})" if jobs else "whatever its jobs left"
    text = f"{machine.status}, past its deadline, with {what}: {why}"
    here.say("kept", text, machine=machine, next_step=step)
